"""What a careful user writes in plain PyTorch: one module, torch.optim.SGD or autograd, a loop over clients."""

from __future__ import annotations

from typing import Any

import torch
from common import Clock, Problem, Run, serve
from modules import Rows, build, flat, load
from torch.nn.functional import cross_entropy


def averaging(problem: Problem) -> Run:
    """Federated averaging, and with `lam` Ditto."""
    module, rows = build(problem), Rows(problem)
    ditto = hasattr(problem, "lam")
    weights = torch.from_numpy(problem.size).float()

    def run(clock: Clock) -> dict[str, Any]:
        x = torch.from_numpy(problem.initial)
        personal = x.repeat(len(problem.size), 1)
        clock.start()
        for t, cohort in enumerate(problem.cohorts):
            ends = []
            for k in cohort.tolist():
                load(module, x)
                optimizer = torch.optim.SGD(module.parameters(), lr=problem.lr)
                for inputs, labels in rows.batches(t, k, slice(1, None, 2) if ditto else slice(None)):
                    optimizer.zero_grad()
                    cross_entropy(module(inputs), labels).backward()
                    optimizer.step()
                ends.append(flat(module))
                if ditto:
                    personal[k] = own(t, k, personal[k], x)
            share = weights[torch.from_numpy(cohort)] if ditto else torch.ones(len(cohort))
            x = (share / share.sum()) @ torch.stack(ends)
            clock.tick()
        return {"x": x.numpy(), "personal": personal.numpy() if ditto else x.repeat(len(personal), 1).numpy()}

    def own(t: int, k: int, v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        load(module, v)
        parameters = list(module.parameters())
        centre = [
            part.view_as(p)
            for p, part in zip(parameters, x.split([p.numel() for p in parameters]), strict=True)
        ]
        optimizer = torch.optim.SGD(parameters, lr=problem.lr)
        for inputs, labels in rows.batches(t, k, slice(0, None, 2)):
            optimizer.zero_grad()
            cross_entropy(module(inputs), labels).backward()
            for p, middle in zip(parameters, centre, strict=True):
                p.grad.add_(p.detach() - middle, alpha=problem.lam)
            optimizer.step()
        return flat(module)

    return run


def loopless(problem: Problem, iterations: int = 200) -> Run:
    """L2GD on least squares from X'X and X'y, client by client; the first iterations only."""
    x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y)
    pieces = [(x[problem.rows(k)], y[problem.rows(k)]) for k in range(len(problem.size))]
    squares = [(a.T @ a / len(a), a.T @ b / len(a)) for a, b in pieces]
    clusters = torch.from_numpy(problem.clusters)
    members = [(clusters == j).nonzero().squeeze(-1) for j in range(int(clusters.max()) + 1)]
    weights, pulls, rate = (torch.from_numpy(getattr(problem, name)) for name in ("weights", "pulls", "rate"))
    alpha = torch.from_numpy(problem.alpha)

    def run(clock: Clock) -> dict[str, Any]:
        models = [torch.zeros(x.shape[1], dtype=x.dtype) for _ in squares]
        clock.start()
        for everyone in problem.coins[:iterations]:
            if everyone:
                stack, inside, total = torch.stack(models), [], []
                for ids in members:
                    total.append(weights[ids, :1].sum())
                    inside.append((weights[ids, :1] * stack[ids]).sum(0) / total[-1])
                share = alpha.squeeze(-1) * torch.stack(total)
                common = (share.unsqueeze(-1) * torch.stack(inside)).sum(0) / share.sum()
                for k, j in enumerate(clusters.tolist()):
                    far, near = pulls[k, 0], pulls[k, 1]
                    models[k] = models[k] - problem.lr * (
                        far * (models[k] - common) + near * (models[k] - inside[j])
                    )
            else:
                for k, (a, b) in enumerate(squares):
                    models[k] = models[k] - problem.lr * rate[k] * (a @ models[k] - b)
        clock.tick(iterations)
        return {"partial": torch.stack(models).numpy(), "iterations": iterations}

    return run


def cobo(problem: Problem, guard: float = 0.5) -> Run:
    """CoBo, a backward pass per client and per end of a pair."""
    module = build(problem)
    parameters = list(module.parameters())
    x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y)
    rows = [(x[problem.rows(k)], y[problem.rows(k)]) for k in range(len(problem.size))]
    n, until = len(rows), [0, *problem.pairs_until.tolist()]

    def slope(k: int, w: torch.Tensor) -> torch.Tensor:
        load(module, w)
        inputs, labels = rows[k]
        grads = torch.autograd.grad(cross_entropy(module(inputs), labels), parameters)
        return torch.cat([part.reshape(-1) for part in grads])

    def run(clock: Clock) -> dict[str, Any]:
        models = torch.from_numpy(problem.initial).repeat(n, 1)
        links = 1 - torch.eye(n, dtype=torch.float64)
        clock.start()
        for t in range(problem.rounds):
            for i, j in problem.pairs[:, until[t] : until[t + 1]].T.tolist():
                middle = (models[i] + models[j]) / 2
                agreement = float(slope(i, middle) @ slope(j, middle))
                links[i, j] = links[j, i] = (links[i, j] + problem.gamma * agreement).clamp(0, 1)
            degree = links.sum(1)
            rho = min(problem.rho, guard / (problem.lr * float(degree.max())))
            slopes = torch.stack([slope(k, models[k]) for k in range(n)])
            pull = (torch.diag(degree) - links).float() @ models
            models = models - problem.lr * (slopes + rho * pull)
            clock.tick()
        return {"personal": models.numpy()}

    return run


def prepare(problem: Problem) -> Run:
    return {"W5": loopless, "W6": cobo}.get(problem.name, averaging)(problem)


serve(prepare)
