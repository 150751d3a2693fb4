"""An nn.Module as a function of one flat parameter vector."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from coterie.models.batch_norm import MaskedBatchNorm, has_batch_norm, masked

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.SiLU, nn.LeakyReLU, nn.Softplus, nn.Identity)


class FlatModule:
    """Module as a function of `w` [d], which holds its trainable parameters in their order.

    Running statistics of batch normalisation follow the parameters in `w` unless `buffers` is "shared".
    """

    def __init__(self, module: nn.Module, buffers: str = "personal") -> None:
        self.original = copy.deepcopy(module).cpu().train()
        self.normalises_batches = buffers != "shared" and has_batch_norm(module)
        self.module = masked(self.original) if self.normalises_batches else copy.deepcopy(self.original)
        for layer in self.module.modules():
            if isinstance(layer, _BatchNorm):
                layer.eval()
        trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.norms = {
            name: layer for name, layer in self.module.named_modules() if isinstance(layer, MaskedBatchNorm)
        }
        self.names = list(trainable)
        self.shapes = [p.shape for p in trainable.values()]
        self.sizes = [p.numel() for p in trainable.values()]
        self.trainable = sum(self.sizes)
        statistics = [
            part for layer in self.norms.values() for part in (layer.running_mean, layer.running_var)
        ]
        self.d = self.trainable + sum(part.numel() for part in statistics)
        values = [*(p.detach() for p in trainable.values()), *statistics]
        self.start = torch.cat([value.reshape(-1).to(torch.float64) for value in values])
        self._constants: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        self._copies: dict[int, nn.Module] = {}
        self._unrolls = bool(getattr(module, "can_unroll", False))
        self._images = any(isinstance(part, nn.Conv2d) for part in module.modules())

    def __call__(self, w: Tensor, x: Tensor, unrolled: bool = False, weight: Tensor | None = None) -> Tensor:
        """Return outputs for rows `x`; `unrolled` asks modules that can for operations that stack well.

        `weight` [B] is given in training, where batch normalisation measures the rows that have weight.
        """
        return self.applied(self.parts(w), x, unrolled, self._statistics(w, weight))

    def parts(self, w: Tensor) -> list[Tensor]:
        """Return the trainable parameters, which share the memory of `w`."""
        w = w if not self.norms else w[: self.trainable]
        return [part.view(shape) for part, shape in zip(w.split(self.sizes), self.shapes, strict=True)]

    def applied(
        self,
        parts: Sequence[Tensor],
        x: Tensor,
        unrolled: bool = False,
        statistics: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Return outputs for trainable parameters given as separate tensors."""
        if self._images and not unrolled and parts[0].device.type == "cpu":
            try:
                return self._applied([channels_last(part) for part in parts], x, False, statistics)
            except RuntimeError:  # a module that asks for its own order of memory, with .view
                self._images = False
        return self._applied(parts, x, unrolled, statistics)

    def _applied(
        self, parts: Sequence[Tensor], x: Tensor, unrolled: bool, statistics: dict[str, Tensor] | None
    ) -> Tensor:
        values = dict(zip(self.names, parts, strict=True))
        options = {"unrolled": True} if unrolled and self._unrolls else {}
        inputs = x.to(parts[0].dtype) if x.is_floating_point() else x
        constants = {**self.constants(parts[0]), **(statistics or {})}
        outputs: Tensor = functional_call(self._mine(), {**values, **constants}, (inputs,), options)
        return outputs

    def _statistics(self, w: Tensor, weight: Tensor | None) -> dict[str, Tensor] | None:
        """Return the running statistics of batch normalisation in `w`, and the row weights, by buffer name."""
        if not self.norms:
            return None
        found, at = {}, self.trainable
        for name, layer in self.norms.items():
            prefix = f"{name}." if name else ""
            for part in ("running_mean", "running_var"):
                found[prefix + part] = w[at : at + layer.channels]
                at += layer.channels
            found[f"{prefix}row_weight"] = w.new_empty(0) if weight is None else weight
        return found

    def measured(self, w: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the statistics of rows with weight, in the order in which they follow the parameters."""
        self(w, x, weight=weight)
        layers = (part for part in self._mine().modules() if isinstance(part, MaskedBatchNorm))
        return torch.cat([layer.seen.flatten() for layer in layers if layer.seen is not None])

    @functools.cached_property
    def momentum(self) -> Tensor:
        """Momentum of each running statistic, in the same order."""
        return torch.cat([torch.full((2 * layer.channels,), layer.momentum) for layer in self.norms.values()])

    def _mine(self) -> nn.Module:
        """Return this thread's copy of the module: a call with other parameters changes it while it runs."""
        if torch.compiler.is_compiling():
            return self.module
        me = threading.get_ident()
        if me not in self._copies:
            self._copies[me] = copy.deepcopy(self.module)
        return self._copies[me]

    @functools.cached_property
    def layers(self) -> list[nn.Module] | None:
        """Layers of a chain of nn.Linear and activations, which needs no vmap; None for other modules."""
        layers = self.sequence or []
        plain = [layer for layer in layers if not isinstance(layer, nn.Flatten)]
        known = all(type(layer) in (nn.Linear, *ELEMENTWISE) for layer in plain)
        flattens = [at for at, layer in enumerate(layers) if isinstance(layer, nn.Flatten)]
        starts = flattens in ([], [0]) and all(
            (layer.start_dim, layer.end_dim) == (1, -1) for layer in layers if isinstance(layer, nn.Flatten)
        )
        return plain if plain and known and starts else None

    @functools.cached_property
    def sequence(self) -> list[nn.Module] | None:
        """Layers of nested nn.Sequential in their order if all parameters are trained; None for other modules."""
        layers = list(_unnested(self.module))
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self.module.modules())
        trains = len(self.names) == sum(len(list(layer.parameters())) for layer in layers)
        return layers if trains and not hooked else None

    @functools.cached_property
    def head(self) -> str | None:
        """Name of the last nn.Linear, or None."""
        names = [name for name, part in self.module.named_modules() if isinstance(part, nn.Linear)]
        return names[-1] if names else None

    @functools.cached_property
    def norm_layers(self) -> list[str]:
        """Names of the layers of normalisation, ours and those whose class torch calls so."""
        return [name for name, part in self.module.named_modules() if "Norm" in type(part).__name__]

    def hidden_features(self, w: Tensor, x: Tensor, unrolled: bool = False) -> Tensor:
        """Return the inputs of the last nn.Linear, [B, features]."""
        assert self.head is not None
        seen: list[Tensor] = []
        last = self._mine().get_submodule(self.head)
        handle = last.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            self(w, x, unrolled)
        finally:
            handle.remove()
        return seen[0]

    def constants(self, like: Tensor) -> dict[str, Tensor]:
        """Return buffers and frozen parameters on the device of `like`, floating-point ones in its dtype."""
        key = (like.dtype, like.device)
        if key not in self._constants:
            self._constants[key] = {
                name: value.detach().to(like.device, like.dtype if value.is_floating_point() else None)
                for name, value in self._held()
            }
        return self._constants[key]

    def filled(self, w: Tensor) -> nn.Module:
        """Return a copy of the user's module with `w` filled in, on the device and in the dtype of `w`."""
        module = copy.deepcopy(self.original).to(w.device, w.dtype).eval()
        targets = dict(module.named_parameters()) | dict(module.named_buffers())
        values = dict(zip(self.names, self.parts(w), strict=True)) | (self._statistics(w, None) or {})
        with torch.no_grad():
            for name, value in values.items():
                if name in targets:
                    targets[name].copy_(value.view_as(targets[name]))
        return module

    def saved_bytes(self, x: Tensor, dtype: torch.dtype) -> int:
        """Return the bytes that a backward pass holds per row, without the parameters."""
        w = self.start.to(dtype).requires_grad_()
        own = w.untyped_storage().data_ptr()
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() != own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self(w, x)
        del output
        return max(1, sum(kept.values()) // len(x))

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        own = {f"{name}.{part}" if name else part for name in self.norms for part in STATISTICS}
        for name, buffer in self.module.named_buffers():
            if name not in own:
                yield name, buffer
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                yield name, parameter


STATISTICS = ("running_mean", "running_var", "row_weight")


def channels_last(part: Tensor) -> Tensor:
    """Return convolution weights in channels-last order, which is fastest on a CPU, and others unchanged."""
    return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part


def _unnested(module: nn.Module) -> Iterator[nn.Module]:
    """Return the layers of nested nn.Sequential in their order."""
    if type(module) is nn.Sequential:
        for part in module:
            yield from _unnested(part)
    else:
        yield module
