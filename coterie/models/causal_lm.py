"""Language models with low-rank adapters: the adapters are the parameters, the rest is frozen and shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from coterie._core import randomness
from coterie._core.errors import DataError, SettingError
from coterie.models.adapted import PARTS, AdaptedModule
from coterie.models.base import Model
from coterie.models.compiling import PRECISIONS
from coterie.models.groups import ParameterGroups, of_adapters, of_layers
from coterie.models.language_weights import locate, quiet, read_model, read_tokenizer, require
from coterie.models.metrics import Metric, ScoredRows
from coterie.models.solve import largest_curvature, prox_lbfgs

CPU_BYTES = 2**30
GPU_SHARE = 0.4  # of its memory, for what a backward pass keeps
GPU_PIECE, CPU_PIECE = 8192, 512  # tokens whose logits exist at a time


@dataclass
class _Held:
    """Weights and tokenizer, read once and shared by all copies of a model."""

    adapted: AdaptedModule | None = None
    tokenizer: Any = None
    trained: int = 0  # tokens of which gradients were taken


@dataclass(frozen=True, eq=False)
class CausalLM(Model):
    """Pretrained language model with the adapters `w`; its loss is the mean over a client's tokens.

    A row of inputs is a stretch of token ids [length], a target the number of its tokens that count: those at
    places 1..y, each predicted from all before it. The loss of rows under weights a is
    sum_b a_b * sum_b a_b (losses of the tokens of row b) / sum_b a_b y_b; weights of a mean sum to one.
    """

    source: str = ""
    rank: int = 4
    alpha: float = 32.0
    target: str = "attention+mlp"
    precision: str = "full"
    micro_batch: int | None = None
    checkpointing: bool = False
    compiled: bool | str = False
    clip: float | None = None
    length: int | None = None
    held: _Held = field(default_factory=_Held, repr=False)

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise SettingError(f"lora_rank={self.rank}, lora_alpha={self.alpha}: both must be above 0.")
        if self.precision not in (*PRECISIONS, "auto"):
            known = ", ".join((*PRECISIONS, "auto"))
            raise SettingError(f"precision={self.precision!r} is unknown: choose from {known}.")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise SettingError(f"micro_batch={self.micro_batch}; give 1 or more rows, or None.")
        if self.compiled not in (True, False, "auto"):
            raise SettingError(f"compiled={self.compiled!r} is unknown: choose true, false or 'auto'.")
        if self.clip is not None and not self.clip > 0:
            raise SettingError(f"clip={self.clip}; give a length above 0, or None.")
        if not set(self.target.split("+")) <= set(PARTS):
            raise SettingError(f"target={self.target!r}: choose attention, mlp, or attention+mlp.")

    @property
    def d(self) -> int:
        return self.adapted.d

    @property
    def task(self) -> str:
        return "language"

    @property
    def groups(self) -> ParameterGroups:
        """Adapters by name, "lora_A", "lora_B", and "rank k" of both."""
        names, sizes = self.adapted.names, self.adapted.sizes
        shapes = [p.shape for p in self.adapted.parameters]
        return ParameterGroups(self.d, of_layers(names, sizes, self.d, None) | of_adapters(names, shapes))

    @property
    def adapted(self) -> AdaptedModule:
        """Frozen base model with one set of adapters, on the device where it was last used."""
        if self.held.adapted is None:
            require()
            dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
            model = read_model(locate(self.source), dtype)
            piece = GPU_PIECE if torch.cuda.is_available() else CPU_PIECE
            made = AdaptedModule(
                model,
                self.rank,
                self.alpha,
                self.target,
                self.checkpointing,
                torch.cuda.is_available() if self.compiled == "auto" else bool(self.compiled),
                piece,
            )
            made.check_head()
            self.held.adapted = made
        return self.held.adapted

    @property
    def tokenizer(self) -> Any:
        """Tokenizer that came with the weights."""
        if self.held.tokenizer is None:
            self.held.tokenizer = read_tokenizer(locate(self.source))
        return self.held.tokenizer

    @property
    def separator(self) -> int:
        """Id of the token that ends a document."""
        ids = self.adapted.base.config.eos_token_id
        found = ids[0] if isinstance(ids, list) else ids
        found = self.tokenizer.eos_token_id if found is None else found
        if found is None:
            raise DataError(f"{self.source} names no end-of-text token; set eos_token_id in its config.json.")
        return int(found)

    def fit_to(self, x: Tensor, y: Tensor) -> Self:
        if x.dim() != 2 or x.is_floating_point() or x.shape[1] < 2 or y.shape != x.shape[:1] or not len(x):
            raise DataError(
                f"Inputs have shape {tuple(x.shape)} and type {x.dtype}, targets {tuple(y.shape)}; give token ids "
                "[rows, length] and how many of each row count [rows], or use Federation.from_texts."
            )
        size = self.adapted.vocabulary
        if int(x.min()) < 0 or int(x.max()) >= size:
            raise DataError(
                f"Token ids reach from {int(x.min())} to {int(x.max())}; the model knows 0..{size - 1}. "
                "Use the tokenizer of the model."
            )
        if float(y.min()) < 1 or float(y.max()) > x.shape[1] - 1:
            raise DataError(f"Targets must be 1 to {x.shape[1] - 1}, how many tokens of the row count.")
        return replace(self, length=x.shape[1])

    def initial(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        start = self.adapted.start(int(randomness.key(seed, "initial adapters")))
        return start.to(device=device, dtype=dtype)

    def loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self._for_each(self._loss, 1, w, x, y, weight)

    def grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self._for_each(self._grad, self.d, w, x, y, weight)

    def hvp(self, w: Tensor, v: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return self._for_each(self._hvp, self.d, w, x, y, weight, v)

    def measure(
        self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, metrics: Sequence[Metric]
    ) -> dict[str, Tensor]:
        """Return the sums of each metric; the score of a client is the mean loss of its tokens."""
        loss = self.loss(w, x, y, weight)
        rows = ScoredRows(self.task, loss.unsqueeze(-1), y[..., :1], torch.ones_like(loss))
        return {metric.name: metric.sums(rows) for metric in metrics}

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """Logits of the token that comes next after each row, [..., B, vocabulary]."""

        def last(w: Tensor, x: Tensor) -> Tensor:
            adapted = self._filled(w)
            with torch.no_grad():
                states = adapted.base.get_decoder()(input_ids=x.long(), use_cache=False).last_hidden_state
                logits: Tensor = adapted.base.get_output_embeddings()(states[:, -1])
                return logits.to(w.dtype)

        flat = [last(*one) for one in zip(w.reshape(-1, self.d), x.reshape(-1, *x.shape[-2:]), strict=True)]
        return torch.stack(flat).reshape(*x.shape[:-1], -1)

    def smoothness(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """|H|_2 at `w`, from below, by Lanczos."""

        def curve(v: Tensor) -> Tensor:
            return self.hvp(w, v.to(w.dtype), x, y, weight).double()

        start = randomness.normal(randomness.slots(randomness.key("smoothness"), self.d)).to(w.device)
        return largest_curvature(curve, start.expand(w.shape), min(self.d, 12)).to(w.dtype)

    def solve(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, tol: float, prox: float = 0.0) -> Tensor:
        """At most 100 steps of L-BFGS to gradient norm tol."""
        rows = (x, y, weight.to(w.dtype))
        return prox_lbfgs(self.loss, self.grad, w, rows, tol, prox, steps=100)

    def module(self, w: Tensor) -> nn.Module:
        return ClientLM(self, w.detach())

    def describe(self) -> dict[str, Any]:
        return {
            "model": "causal_lm",
            "path_or_name": self.source,
            "lora_rank": self.rank,
            "target": self.target,
            "lora_alpha": self.alpha,
            "precision": self.precision,
            "micro_batch": self.micro_batch,
            "checkpointing": self.checkpointing,
            "compiled": self.compiled,
            "clip": self.clip,
        }

    def save_adapter(self, w: Tensor, folder: str | Path) -> None:
        """Save adapters `w` [d] for `PeftModel.from_pretrained(base, folder)`."""
        self._filled(w).save(Path(folder))

    def save_base(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Save the frozen model and its tokenizer as a folder of safetensors, which loads faster than GGUF."""
        model = read_model(locate(self.source), dtype or torch.float32)
        with quiet(require()):
            model.save_pretrained(str(folder))
            self.tokenizer.save_pretrained(str(folder))

    def _filled(self, w: Tensor) -> AdaptedModule:
        """Return the model with the adapters of one client, on their device and in the chosen precision."""
        low = self.precision == "bf16" or (self.precision == "auto" and w.is_cuda)
        adapted = self.adapted.to(torch.bfloat16 if low else w.dtype, w.device)
        adapted.fill(w)
        return adapted

    def _for_each(self, function: Callable[..., Tensor], size: int, w: Tensor, *rows: Tensor) -> Tensor:
        """Apply a function to one client after the other: the tokens of one fill the device."""
        lead = w.shape[:-1]
        if not lead:
            return function(w, *rows)
        flat = [part.flatten(0, len(lead) - 1) for part in (w, *rows)]
        return torch.stack([function(*one) for one in zip(*flat, strict=True)]).reshape(*lead, size)

    def _pieces(
        self, w: Tensor, x: Tensor, share: Tensor, kept: float = 1.0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Split rows into equal pieces that fit in memory, or that need as much as `micro_batch` rows in a gradient.

        `kept` is the memory that a row needs, relative to its need in a gradient.
        """
        count = len(x)
        if count == 0:
            return
        if self.micro_batch is None:
            room = CPU_BYTES
            if w.is_cuda:
                room = int(GPU_SHARE * torch.cuda.get_device_properties(w.device).total_memory)
            limit = max(1, int(room / (kept * self.adapted.bytes_per_token() * x.shape[1])))
            size = -(-count // -(-count // limit))
        else:
            size = max(1, int(self.micro_batch / kept))
        yield from zip(x.split(size), share.split(size), strict=True)

    def _counted(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows with weight, and the share of every token in the loss, [rows, length - 1]."""
        exact = torch.float64 if w.dtype == torch.float64 else torch.float32
        counts = weight.nonzero().squeeze(-1)
        x, y, weight = (part[counts] for part in (x, y, weight))
        weight, y = weight.double(), y.double()
        places = torch.arange(x.shape[1] - 1, device=x.device) < y.unsqueeze(1)
        share = weight * weight.sum() / (weight @ y)
        return x, (places * share.unsqueeze(1)).to(exact)

    def _loss(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        adapted = self._filled(w)
        total = torch.zeros(1, dtype=torch.float64, device=w.device)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for tokens, share in self._pieces(w, *self._counted(w, x, y, weight), kept=0.1):
                total += adapted.value(tokens, share).double()
        return total.to(w.dtype)

    def _grad(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        adapted = self._filled(w)
        total = torch.zeros_like(w, memory_format=torch.contiguous_format)
        for tokens, share in self._pieces(w, *self._counted(w, x, y, weight)):
            total += adapted.gradient(tokens, share)
            self.held.trained += share.numel()
        if self.clip is None:
            return total
        factor: Tensor = (self.clip / total.norm().clamp_min(1e-30)).clamp(max=1)
        return total * factor

    def _hvp(self, w: Tensor, x: Tensor, y: Tensor, weight: Tensor, v: Tensor) -> Tensor:
        """Return H v by differentiating (gradient)'v, with operations that have second derivatives."""
        adapted, total = self._filled(w), torch.zeros_like(w)
        along = v.to(adapted.place[0])
        with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            for tokens, share in self._pieces(w, *self._counted(w, x, y, weight), kept=4.0):
                grads = torch.autograd.grad(
                    adapted.value(tokens, share, plain=True), adapted.parameters, create_graph=True
                )
                product = torch.cat([one.reshape(-1) for one in grads]) @ along
                curved = torch.autograd.grad(product, adapted.parameters, materialize_grads=True)
                total += torch.cat([one.reshape(-1) for one in curved]).to(total.dtype)
        return total


class ClientLM(nn.Module):
    """Language model of one client: logits of token ids, and text continued from a prompt.

    It shares the frozen base with the models of all other clients.
    """

    def __init__(self, model: CausalLM, w: Tensor) -> None:
        super().__init__()
        self.adapters = nn.Parameter(w.clone(), requires_grad=False)
        self._model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of token ids [rows, length], [rows, length, vocabulary]."""
        with torch.no_grad():
            base = self._model._filled(self.adapters).base
            logits: Tensor = base(input_ids=ids.long().to(self.adapters.device), use_cache=False).logits
            return logits

    def generate(self, prompt: str, tokens: int = 40, temperature: float = 0.0, seed: int = 0) -> str:
        """Return the prompt and up to `tokens` more: the most likely ones, or drawn at a temperature above 0."""
        ids = self._model.tokenizer(prompt, return_tensors="pt").input_ids.to(self.adapters.device)
        if ids.shape[1] == 0:
            ids = torch.full((1, 1), self._model.separator, device=ids.device)
        generator = torch.Generator(ids.device).manual_seed(seed)
        base, given, past = self._model._filled(self.adapters).base, ids, None
        for _ in range(tokens):
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                said = base(input_ids=given, past_key_values=past, use_cache=True)
            logits, past = said.logits[0, -1].float(), said.past_key_values
            if temperature > 0:
                given = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)[None]
            else:
                given = logits.argmax(0).reshape(1, 1)
            if int(given) == self._model.separator:
                break
            ids = torch.cat([ids, given], 1)
        return str(self._model.tokenizer.decode(ids[0], skip_special_tokens=True))


def causal_lm(
    path_or_name: str | Path,
    lora_rank: int = 4,
    target: str = "attention+mlp",
    *,
    lora_alpha: float = 32.0,
    precision: str = "full",
    micro_batch: int | None = None,
    checkpointing: bool = False,
    compiled: bool | str = False,
    clip: float | None = None,
) -> CausalLM:
    """Return a pretrained language model whose parameters are low-rank adapters (LoRA); the rest is frozen.

    Parameters
    ----------
    path_or_name
        A folder with config.json and safetensors, a .gguf file, "smollm2", or a name that transformers knows.
    lora_rank
        Rank of the adapters.
    target
        Layers that get adapters: "attention", "mlp" or "attention+mlp".
    lora_alpha
        Scale of the adapters: their product is multiplied by lora_alpha / lora_rank.
    precision
        "full", "bf16" to compute in bfloat16 with adapters and sums in the federation's type, or "auto" to do so on a
        GPU only.
    micro_batch
        Rows whose gradient is computed at a time; None takes as many as fit in memory.
    checkpointing
        Recompute layers in the backward pass, which saves memory.
    compiled
        Compile the layers, which pays off in long runs; "auto" does so on a GPU only.
    clip
        Length to which longer gradients are shortened; None leaves them.

    Returns
    -------
    CausalLM
        The model; weights are read when they are first needed. It needs the extra `coterie[llm]`.

    Examples
    --------
    >>> import coterie
    >>> model = coterie.models.causal_lm("smollm2", lora_rank=8, target="attention")
    >>> model.task, model.rank
    ('language', 8)
    """
    return CausalLM(
        source=str(path_or_name),
        rank=lora_rank,
        alpha=lora_alpha,
        target=target,
        precision=precision,
        micro_batch=micro_batch,
        checkpointing=checkpointing,
        compiled=compiled,
        clip=clip,
    )
