"""A node's last word on the models of a run: a client whose own rows speak against them keeps what it trains alone.

No message changes this choice. It protects a client from a shared model that does not suit it, whether other nodes are
different, mistaken or lying.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coterie.algorithms import Algorithm, make
from coterie.engine.federation import Federation
from coterie.engine.local_runtime import LocalRuntime
from coterie.models.metrics import LOSS
from coterie.theory.verdicts import CLEAR_ROWS, Evidence, guarded, judge
from coterie.train.fit import fit

ALIKE = ("lr", "steps", "batch")  # settings in which training alone follows the method


def federation(runtime: LocalRuntime) -> Federation:
    """Return a federation of a node's clients only, with nothing kept."""
    return Federation(
        runtime.fresh(),
        model=runtime.model,
        names=[str(k) for k in runtime.ids.tolist()],
        rows={name: split.size for name, split in runtime.splits.items()},
        clusters=runtime.clusters,
        seed=runtime.seed,
        dtype=runtime.dtype,
    )


def can_choose(runtime: LocalRuntime, algorithm: Algorithm) -> bool:
    """Return True if clients can train the same model alone: not for trees, survival times and language models."""
    model = runtime.model
    return (
        algorithm.name != "local"
        and algorithm.own_model(1) is None
        and not model.whole_clients
        and model.task != "language"
    )


def trained_alone(runtime: LocalRuntime, algorithm: Algorithm, rounds: int) -> Tensor:
    """Return the models [k, d] of a node's clients after as much training on their own rows as the method had."""
    given = algorithm.settings()
    local = make("local")
    own = {name: given[name] for name in ALIKE if name in given and name in local.settings()}
    run = fit(federation(runtime), make("local", **own), max(rounds, 1), evaluate_every=0, score_test=False)
    return run.personal


def preferring_own(runtime: LocalRuntime, models: Tensor, alone: Tensor) -> list[int]:
    """Return the clients for whom their own model is better with a probability of at least 0.8, by validation rows.

    Parameters
    ----------
    runtime
        The node's clients.
    models
        What the run would deploy, [k, d]; NaN for a client without a model.
    alone
        What they trained alone, [k, d].

    Returns
    -------
    list of int
        Clients with at least 20 validation rows that these rows speak for.
    """
    fed = federation(runtime)
    first, second = (
        fed.row_values(one.nan_to_num(), "validation", [LOSS])[LOSS.name] for one in (models, alone)
    )
    client = torch.repeat_interleave(runtime.splits["validation"].size)
    if not len(client):
        return []
    found = guarded(judge(Evidence.of_rows((second - first).numpy(), client.numpy(), len(models))))
    enough = runtime.splits["validation"].size >= CLEAR_ROWS
    has_both = torch.isfinite(models).all(1) & torch.isfinite(alone).all(1)
    return [k for k in range(len(models)) if found[k] and enough[k] and has_both[k]]


def replaced(models: Tensor, alone: Tensor, clients: Sequence[int]) -> Tensor:
    """Return models [k, d] with those of some clients replaced by what they trained alone."""
    at = torch.tensor(list(clients), dtype=torch.long)
    return models.index_copy(0, at, alone[at].to(models))
