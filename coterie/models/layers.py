"""Layers of the ready networks."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from coterie.models import fast
from coterie.models.checks import groups_for


class ChannelAxis(nn.Module):
    """Add a channel axis to images [B, height, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1).movedim(-1, 1) if x.dim() == 3 else x  # with the strides of channels last


class GroupNorm(nn.GroupNorm):
    """Group normalisation whose output has the dtype of its input.

    In mixed precision torch returns float32, which doubles the memory traffic of the layers that follow. Means and
    variances are computed in float32 either way.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.group_norm(x, self.num_groups, weight, bias, self.eps)


class GlobalMax(nn.Module):
    """Maximum over height and width.

    Computed in float32: for bfloat16, torch.compile searches the rounded maximum among unrounded values and finds none.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32)).amax((-2, -1))


class Scaled(nn.Module):
    """Multiply by a constant. After a maximum over the image scores are large, and usual step sizes too long."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Block(nn.Sequential):
    """Convolution, group normalisation, ReLU and max pool; `unrolled` computes them one by one."""

    def __init__(self, before: int, after: int, pool: bool = False) -> None:
        layers = [nn.Conv2d(before, after, 3, padding=1), GroupNorm(groups_for(after), after), nn.ReLU()]
        super().__init__(*layers, *([nn.MaxPool2d(2)] if pool else []))
        self.pool, self.fused = pool, next(iter(fast.enabled("group norm")), None)

    def forward(self, x: Tensor, unrolled: bool = False) -> Tensor:
        convolution, norm = cast(nn.Conv2d, self[0]), cast(GroupNorm, self[1])
        shape = (norm.num_channels, norm.num_groups, self.pool)
        if unrolled or self.fused is None or not self.fused.supports(x, *shape):
            for layer in self:
                x = layer(x)
            return x
        images, kernel = (
            part.to(torch.bfloat16, memory_format=torch.channels_last) for part in (x, convolution.weight)
        )
        images, bias = nn.functional.conv2d(images, kernel, padding=1), cast(Tensor, convolution.bias)
        found: Tensor = self.fused.run(
            images, bias, norm.weight, norm.bias, norm.num_groups, norm.eps, self.pool
        )
        return found


class Residual(nn.Module):
    """x + conv(conv(x))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = Blocks(Block(channels, channels), Block(channels, channels))

    def forward(self, x: Tensor, unrolled: bool = False) -> Tensor:
        change: Tensor = self.body(x, unrolled)
        return x + change


class Blocks(nn.Sequential):
    """Sequence of layers whose blocks can be `unrolled`."""

    can_unroll = True

    def forward(self, x: Tensor, unrolled: bool = False) -> Tensor:
        for layer in self:
            x = layer(x, unrolled) if isinstance(layer, Block | Residual) else layer(x)
        return x


class CharLSTM(nn.Module):
    """Map tokens [B, T] to scores of the last state; `unrolled` computes the LSTM step by step.

    The fused kernel is several times faster for one client but cannot be mapped over clients.
    """

    can_unroll = True

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, outputs)
        with torch.no_grad():
            for layer in range(layers):
                getattr(self.lstm, f"bias_ih_l{layer}")[hidden : 2 * hidden] = 1.0

    def forward(self, x: Tensor, unrolled: bool = False) -> Tensor:
        states: Tensor = self.embedding(x.long())
        if unrolled:
            for layer in range(self.lstm.num_layers):
                states = self._layer(states, layer)
        else:
            states = self.lstm(states)[0]
        scores: Tensor = self.head(states[:, -1])
        return scores

    def _layer(self, inputs: Tensor, layer: int) -> Tensor:
        """Return the states h of a layer: c <- f c + i tanh(g), h <- o tanh(c), gates i, f, o sigmoids."""
        size = self.lstm.hidden_size
        into, again, bias, more = (
            getattr(self.lstm, f"{part}_l{layer}")
            for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        drive = nn.functional.linear(inputs, into, bias + more)
        back, hidden, cell = again.t(), None, None
        states = []
        for step in drive.unbind(1):
            gates = step if hidden is None else step + hidden @ back
            keep_in, forget = torch.sigmoid(gates[..., : 2 * size]).split(size, -1)
            fresh = keep_in * torch.tanh(gates[..., 2 * size : 3 * size])
            cell = fresh if cell is None else fresh + forget * cell
            hidden = torch.sigmoid(gates[..., 3 * size :]) * torch.tanh(cell)
            states.append(hidden)
        return torch.stack(states, 1)
