"""Frozen language model with one set of low-rank adapters, which is filled with the values of any client."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie._core.errors import SettingError
from coterie.models.compiling import first_line
from coterie.models.cuda_replay import Replayed
from coterie.models.language_weights import quiet, require
from coterie.models.token_loss import token_losses

PARTS = {
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "ffn", "feed_forward", "feedforward"),
}
ROUNDING = {torch.bfloat16: 0.2}  # how far compiled gradients may be off, relative; otherwise 1e-3


class AdaptedModule:
    """Base model with adapters, held once for all clients; `fill(w)` makes it the model of one of them."""

    def __init__(
        self,
        model: Any,
        rank: int,
        alpha: float,
        target: str,
        checkpointing: bool,
        compiled: bool,
        piece: int,
    ) -> None:
        import peft

        linear = _linear_layers(model, target)
        config = peft.LoraConfig(
            r=rank,
            lora_alpha=alpha,  # type: ignore[arg-type]
            target_modules=sorted({".".join(name.split(".")[-2:]) for name in linear}),
            fan_in_fan_out=any(type(layer).__name__ == "Conv1D" for layer in linear.values()),
            task_type="CAUSAL_LM",
        )
        self.module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        self.module.eval()
        self.names = [name for name, p in self.module.named_parameters() if p.requires_grad]
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.sizes = [p.numel() for p in self.parameters]
        self._lay_out()
        self.d, self.piece = sum(self.sizes), piece
        lists = [list(part) for part in self.base.modules() if isinstance(part, nn.ModuleList)]
        self.layers: list[nn.Module] = max(lists, key=len, default=[])
        if checkpointing:
            self._recompute()
        self.compiled = compiled
        self._trusted: dict[tuple[Any, ...], bool] = {}
        if compiled:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for layer in self.layers:
                    layer.compile(dynamic=False)

    def _lay_out(self) -> None:
        """Make all adapters views of one vector, and drop CUDA graphs that read their old memory."""
        self._flat = torch.cat([p.data.reshape(-1) for p in self.parameters])
        for p, part in zip(self.parameters, self._flat.split(self.sizes), strict=True):
            p.data = part.view_as(p)
        self._replayed: Replayed | None = Replayed(self._gradient)

    @property
    def base(self) -> Any:
        """The transformers model."""
        return self.module.get_base_model()

    @property
    def vocabulary(self) -> int:
        return int(self.base.get_output_embeddings().weight.shape[0])

    @property
    def place(self) -> tuple[torch.dtype, torch.device]:
        """Dtype and device of the base model."""
        weight = self.base.get_output_embeddings().weight
        return weight.dtype, weight.device

    def bytes_per_token(self) -> int:
        """Return the approximate bytes that a backward pass holds per token; a recomputed layer holds its input."""
        config = self.base.config
        width = int(getattr(config, "hidden_size", 0) or 1024)
        inner = int(getattr(config, "intermediate_size", 0) or 4 * width)
        per_layer = width if self._recomputes else 16 * width + 6 * inner
        size = self.place[0].itemsize
        return size * (len(self.layers) * per_layer + 16 * width + 6 * inner)

    def flops_per_token(self, length: int) -> float:
        """Return the operations of a gradient: two products per frozen weight, three per adapter, and attention."""
        frozen = sum(p.numel() for layer in self.layers for p in layer.parameters() if not p.requires_grad)
        head: Tensor = self.base.get_output_embeddings().weight
        attention = 7 * length * len(self.layers) * head.shape[1]
        return 4.0 * (frozen + head.numel()) + 6.0 * self.d + attention

    def to(self, dtype: torch.dtype, device: torch.device) -> AdaptedModule:
        """Move the model; buffers, such as the frequencies of positions, keep their dtype."""
        if self.place != (dtype, device):
            self.module.to(device)
            for p in self.module.parameters():
                p.data = p.data.to(dtype)
            self._lay_out()
        return self

    def start(self, seed: int) -> Tensor:
        """Return peft's initial adapters, float64 [d]: A uniform in +-1/sqrt(inputs), B zero."""
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for name, p in zip(self.names, self.parameters, strict=True):
            part = torch.zeros(p.shape, dtype=torch.float64)
            if "lora_A" in name:
                part.uniform_(-1.0, 1.0, generator=generator).div_(math.sqrt(p.shape[1]))
            parts.append(part.reshape(-1))
        return torch.cat(parts)

    def fill(self, w: Tensor) -> None:
        """Put the adapters of a client, [d], into the model."""
        self._flat.copy_(w)

    def losses(self, x: Tensor, plain: bool = False) -> Tensor:
        """Return the loss of every token but the first, [rows, length - 1]; `plain` has second derivatives."""
        ids = x.long()
        head = self.base.get_output_embeddings()
        hidden = self.base.get_decoder()(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        states, targets = hidden.flatten(0, 1), ids[:, 1:].flatten()
        if plain:
            found = functional.cross_entropy(states @ head.weight.t(), targets, reduction="none")
        else:
            found = token_losses(states, head.weight, targets, self.piece, self.compiled)
        return found.view(len(x), -1)

    def value(self, x: Tensor, share: Tensor, plain: bool = False) -> Tensor:
        """Return the sum of share [rows, length - 1] times the loss of the token."""
        return (self.losses(x, plain) * share).sum()

    def gradient(self, x: Tensor, share: Tensor) -> Tensor:
        """Return the gradient [d] of `value` in the current adapters, in float32 or float64."""
        if not self.compiled:
            return self._gradient(x, share)
        shape = (x.shape, *self.place)
        if shape not in self._trusted:
            self._trusted[shape] = self._compiles(x, share)
        if self._trusted[shape]:
            return self._replay(x, share) if x.is_cuda else self._gradient(x, share)
        with torch.compiler.set_stance("force_eager"):
            return self._gradient(x, share)

    def check_head(self) -> None:
        """Raise an error if the logits are not the last hidden states times the head."""
        with torch.no_grad():
            ids = torch.arange(8, device=self.place[1]).unsqueeze(0) % self.vocabulary
            logits = self.base(input_ids=ids[:, :-1], use_cache=False).logits
            expected = functional.cross_entropy(logits[0].double(), ids[0, 1:], reduction="none")
            head, found = self.base.get_output_embeddings(), self.losses(ids)[0].double()
        if getattr(head, "bias", None) is not None or not torch.allclose(
            found, expected, rtol=0.05, atol=0.05
        ):
            raise SettingError(
                f"{type(self.base).__name__} changes its logits after the last layer, which is not supported; "
                "choose a model of the Llama, Mistral, Qwen or GPT-2 kind."
            )

    def save(self, folder: Path) -> None:
        """Save the current adapters in peft's format."""
        with quiet(require()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.module.save_pretrained(str(folder), save_embedding_layers=False)

    def _gradient(self, x: Tensor, share: Tensor) -> Tensor:
        with torch.enable_grad():
            parts = torch.autograd.grad(self.value(x, share), self.parameters)
        flat = torch.cat([part.reshape(-1) for part in parts])
        return flat if flat.dtype == torch.float64 else flat.float()

    def _replay(self, x: Tensor, share: Tensor) -> Tensor:
        """Replay the gradient as a CUDA graph, which launches thousands of small kernels at once."""
        if self._replayed is not None:
            try:
                return self._replayed(x, share)
            except RuntimeError as problem:
                warnings.warn(
                    f"no CUDA graph of the gradient, which is slower: {first_line(problem)}", stacklevel=3
                )
                self._replayed = None
        return self._gradient(x, share)

    def _compiles(self, x: Tensor, share: Tensor) -> bool:
        """Return True if compiled layers give the same gradient as plain ones."""
        with torch.compiler.set_stance("force_eager"):
            expected = self._gradient(x, share)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self._gradient(x, share)
        except Exception as problem:  # a compiler fails in ways of its own
            warnings.warn(f"torch.compile failed and is not used: {first_line(problem)}", stacklevel=3)
            return False
        wrong = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
        if not wrong <= ROUNDING.get(self.place[0], 1e-3):
            warnings.warn(
                f"compiled gradients differ from plain ones by {wrong:.1e} and are not used", stacklevel=3
            )
            return False
        return True

    def _recompute(self) -> None:
        """Recompute each layer in the backward pass instead of storing its activations; dropout stays off."""
        name = "activation_checkpointing_enable"  # its name since transformers 5.23
        enable = getattr(self.base, name, None) or self.base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        for layer in self.layers:
            layer.training = True

    @property
    def _recomputes(self) -> bool:
        return any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers)


def _linear_layers(model: nn.Module, target: str) -> dict[str, nn.Module]:
    """Return the linear layers that get adapters, chosen by their part of a transformer block."""
    wanted = target.split("+")
    unknown = [part for part in wanted if part not in PARTS]
    if unknown:
        raise SettingError(
            f"target={target!r}: {unknown[0]!r} is unknown; choose attention, mlp, or attention+mlp."
        )
    marks = [mark for part in wanted for mark in PARTS[part]]
    found = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer).__name__ in ("Linear", "Conv1D")
        and any(mark in step for step in name.lower().split(".")[:-1] for mark in marks)
    }
    if not found:
        raise SettingError(f"target={target!r}: {type(model).__name__} has no such layers.")
    return found
