"""Trained models as ordinary nn.Modules: raw inputs in, predictions out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie.models.basis import Basis


def predictions(scores: Tensor, task: str) -> Tensor:
    """Return numbers [B] for regression, hazards [B] for survival, probabilities [B, 2] or [B, C] for classes."""
    if task == "regression":
        return scores.squeeze(-1)
    if task == "survival":
        return scores.squeeze(-1).exp()
    if task == "binary":
        likely = torch.sigmoid(scores.squeeze(-1))
        return torch.stack([1 - likely, likely], -1)
    return torch.softmax(scores, -1)


class LinearPredictor(nn.Module):
    """Linear layer with weights [outputs, features], followed by the link of the task."""

    def __init__(self, weight: Tensor, bias: Tensor | None, task: str) -> None:
        super().__init__()
        self.task = task
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.linear.weight = nn.Parameter(weight.clone())
        if bias is not None:
            self.linear.bias = nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        return predictions(self.linear(x.flatten(1).to(self.linear.weight.dtype)), self.task)


class CurvePredictor(nn.Module):
    """Linear model on functions of the inputs."""

    def __init__(self, basis: Basis, line: LinearPredictor) -> None:
        super().__init__()
        self.basis, self.line = basis, line

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.line(self.basis(x.flatten(1).to(self.line.linear.weight.dtype)))
        return found


class NetworkPredictor(nn.Module):
    """Network followed by the link of its task."""

    def __init__(self, network: nn.Module, task: str) -> None:
        super().__init__()
        self.task = task
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            x = x.to(next(self.network.parameters()).dtype)
        scores = self.network(x)
        return predictions(scores.unsqueeze(-1) if scores.dim() == 1 else scores, self.task)
