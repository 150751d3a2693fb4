"""Plain PyTorch computations that tests compare methods with: modules, state dicts, autograd, one client at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from coterie import Federation
from coterie._core import randomness
from coterie.algorithms import Algorithm
from coterie.engine.protocol import Call, visit_keys

State = dict[str, Tensor]
Rows = tuple[Tensor, Tensor, Tensor]
SIZES = (12, 7, 20)


def federation(model: Any, classes: int = 3, sizes: Sequence[int] = SIZES, **options: Any) -> Federation:
    """Clients with inputs of their own place and scale; classes, or numbers if `classes` is 0."""
    draw = torch.Generator().manual_seed(5)
    xs = [
        torch.randn(n, 4, generator=draw, dtype=torch.float64) * (1 + k / 2) + k / 3
        for k, n in enumerate(sizes)
    ]
    turn = [torch.randn(4, 3, generator=draw, dtype=torch.float64) for _ in sizes]
    scores = [x @ w for x, w in zip(xs, turn, strict=True)]
    ys = [s.argmax(1) % classes if classes else s[:, 0] for s in scores]
    return Federation.from_arrays(xs, ys, model, **options)


def minibatches(
    fed: Federation,
    algorithm: Algorithm,
    client: int,
    t: int,
    steps: int,
    stream: str = "",
    phase: str = "train",
) -> Iterator[Rows]:
    """Yield inputs, targets and weights of a client's minibatches in round t, as the documentation says they are drawn.

    In its first round a client that begins is called twice, so that its phase is call 1.
    """
    call = Call(algorithm, phase, t, int(t == 1 and algorithm.begin is not None), {}, {})
    key = visit_keys(fed.seed, call, torch.tensor(client), None)
    key = randomness.fold(key, stream) if stream else key
    x, y = fed.runtime.rows("train").of(client)
    y = y if fed.model.task == "regression" else y.long()
    for step in range(1, steps + 1):
        if algorithm.batch == 0 or max(fed.rows["train"]) <= algorithm.batch:
            yield x, y, torch.full((len(x),), 1 / len(x), dtype=x.dtype)
            continue
        keys = randomness.fold(key, step)
        drawn, weight = fed.runtime.rows("train").draw(torch.tensor(client), keys, algorithm.batch)
        first = int(fed.runtime.rows("train").start[client])
        yield x[drawn - first], y[drawn - first], weight


def losses(module: nn.Module, w: State, x: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each row, or half the squared error for numbers."""
    scores = functional_call(module, w, (x,))
    if y.is_floating_point():
        return 0.5 * (scores.squeeze(-1) - y).square()
    if scores.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(
            scores.squeeze(-1), y.to(x.dtype), reduction="none"
        )
    return functional.cross_entropy(scores, y, reduction="none")


def sgd(
    module: nn.Module,
    w: State,
    batches: Iterator[Rows],
    lr: float,
    names: Sequence[str],
    loss: Callable[..., Tensor] = losses,
) -> State:
    """Return parameters after a gradient step on each minibatch; only those in `names` move."""
    for x, y, weight in batches:
        w = {name: value.detach().requires_grad_() for name, value in w.items()}
        total = (loss(module, w, x, y) * weight).sum()
        grads = torch.autograd.grad(total, [w[name] for name in names])
        w = w | {name: w[name] - lr * grad for name, grad in zip(names, grads, strict=True)}
    return {name: value.detach() for name, value in w.items()}


def start(fed: Federation) -> tuple[nn.Module, State]:
    """Return the module of a federation and its initial parameters."""
    module = fed.model.flat_module.filled(fed.initial_model())
    return module, {
        name: value.detach().clone() for name, value in module.named_parameters() if value.requires_grad
    }


def mean(states: Sequence[State], weights: Tensor) -> State:
    """Return the weighted mean of parameters, name by name."""
    share = weights.double() / weights.sum()
    return {name: sum(a * s[name] for a, s in zip(share, states, strict=True)) for name in states[0]}


def flat(w: State) -> Tensor:
    """Return parameters as one vector, in the order of the module."""
    return torch.cat([value.reshape(-1) for value in w.values()])
