"""An nn.Module as a function of one flat parameter vector."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.ELU, nn.SiLU, nn.LeakyReLU, nn.Softplus, nn.Identity)


class Skeleton:
    """forward(w, x): the module with its trainable parameters, in their order, taken from `w` [d]."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).cpu().train()
        trainable = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self.names = list(trainable)
        self.shapes = [p.shape for p in trainable.values()]
        self.sizes = [p.numel() for p in trainable.values()]
        self.d = sum(self.sizes)
        self.start = torch.cat([p.detach().reshape(-1).to(torch.float64) for p in trainable.values()])
        self._constants: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        self._copies: dict[int, nn.Module] = {}
        self._unrolls = bool(getattr(module, "can_unroll", False))
        self._images = any(isinstance(part, nn.Conv2d) for part in module.modules())

    def __call__(self, w: Tensor, x: Tensor, unrolled: bool = False) -> Tensor:
        """Output for rows `x`; `unrolled` asks modules that can for operations that stack well."""
        return self.applied(self.parts(w), x, unrolled)

    def parts(self, w: Tensor) -> list[Tensor]:
        """The trainable parameters, which share the memory of `w`."""
        return [part.view(shape) for part, shape in zip(w.split(self.sizes), self.shapes, strict=True)]

    def applied(self, parts: Sequence[Tensor], x: Tensor, unrolled: bool = False) -> Tensor:
        """The same with the trainable parameters one by one."""
        if self._images and not unrolled and parts[0].device.type == "cpu":
            try:
                return self._applied([channels_last(part) for part in parts], x)
            except RuntimeError:  # a module that asks for its own order of memory, with .view
                self._images = False
        return self._applied(parts, x, unrolled)

    def _applied(self, parts: Sequence[Tensor], x: Tensor, unrolled: bool = False) -> Tensor:
        values = dict(zip(self.names, parts, strict=True))
        options = {"unrolled": True} if unrolled and self._unrolls else {}
        inputs = x.to(parts[0].dtype) if x.is_floating_point() else x
        return functional_call(self._mine(), {**values, **self.constants(parts[0])}, (inputs,), options)

    def _mine(self) -> nn.Module:
        """A copy of the module for each thread: a call with other parameters changes it for as long as it lasts."""
        if torch.compiler.is_compiling():
            return self.module
        me = threading.get_ident()
        if me not in self._copies:
            self._copies[me] = copy.deepcopy(self.module)
        return self._copies[me]

    @functools.cached_property
    def layers(self) -> list[nn.Module] | None:
        """The layers of a chain of nn.Linear and activations, which needs no vmap; None for other modules."""
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
        """The layers of nested nn.Sequential in their order, all of whose parameters are trained; None for others."""
        layers = list(_unnested(self.module))
        hooked = any(part._forward_hooks or part._forward_pre_hooks for part in self.module.modules())
        trains = len(self.names) == sum(len(list(layer.parameters())) for layer in layers)
        return layers if trains and not hooked else None

    def chained(self, w: Tensor, x: Tensor) -> Tensor:
        """Outputs [k, B, outputs] of a chain of `layers` for a stack of clients, w [k, d] and x [k, B, ...].

        Inside, rows are the last axis: with that layout all products of a gradient run at full speed.
        """
        assert self.layers is not None
        parts = iter(zip(w.split(self.sizes, -1), self.shapes, strict=True))
        values = x.to(w.dtype).flatten(2).mT
        for layer in self.layers:
            if not isinstance(layer, nn.Linear):
                values = layer(values)
                continue
            weight, shape = next(parts)
            matrix = weight.unflatten(-1, shape)
            if layer.bias is None:
                values = matrix @ values
            else:
                values = torch.baddbmm(next(parts)[0].unsqueeze(-1), matrix, values)
        return values.mT

    def constants(self, like: Tensor) -> dict[str, Tensor]:
        """Buffers and frozen parameters, with the dtype (where floating) and device of `like`."""
        key = (like.dtype, like.device)
        if key not in self._constants:
            self._constants[key] = {
                name: value.detach().to(like.device, like.dtype if value.is_floating_point() else None)
                for name, value in self._held()
            }
        return self._constants[key]

    def filled(self, w: Tensor) -> nn.Module:
        """A copy of the module with the parameters `w`, on the device and in the dtype of `w`."""
        module = copy.deepcopy(self.module).to(w.device, w.dtype).eval()
        targets = dict(module.named_parameters())
        with torch.no_grad():
            for name, part in zip(self.names, w.split(self.sizes), strict=True):
                targets[name].copy_(part.view_as(targets[name]))
        return module

    def saved_bytes(self, x: Tensor, dtype: torch.dtype) -> int:
        """Bytes per row that a backward pass keeps, the parameters not counted."""
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
        yield from self.module.named_buffers()
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                yield name, parameter


def channels_last(part: Tensor) -> Tensor:
    """Weights of a convolution in the order in which a processor convolves and pools fastest, others as they are."""
    return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part


def _unnested(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested nn.Sequential in their order."""
    if type(module) is nn.Sequential:
        for part in module:
            yield from _unnested(part)
    else:
        yield module
