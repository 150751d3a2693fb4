"""A node's policy in plain words, for its owner."""

from __future__ import annotations

import math
from typing import Any

from coterie.algorithms.base import DISCLOSURES
from coterie.deploy.policy import Policy

REFIT = {
    "none": "Training rows train, validation and test rows never do.",
    "validation": "Once a run is scored, the same method may train again on training and validation rows together.",
    "all": "Once a run is scored, the same method may train again on all rows, test rows included.",
}


def explain(policy: Policy) -> list[str]:
    """Return a policy in plain words, a line for each rule."""
    if policy.roles is None:
        return ["This node trusts its server: it answers whatever it is asked. Use this for tests only."]
    kinds = [f"{name} ({kind})" for name, kind in (policy.columns or {}).items()]
    fixed = ", ".join(policy.encoding)
    shown = [f"{word}: {text}" for word, text in DISCLOSURES.items() if word in policy.reveal]
    hidden = [f"{word}: {text}" for word, text in DISCLOSURES.items() if word not in policy.reveal]
    split = " / ".join(f"{share:g}" for share in policy.split or ())
    what = {
        "table": f"Columns that exist for a server: {', '.join(kinds) or 'none'}. It cannot learn that there are "
        "others.",
        "images": f"This node has images of {' x '.join(map(str, policy.shape or ()))}; names of classes leave.",
        "texts": "This node has texts; how many documents and rows of tokens a client has leaves, no token does.",
    }
    before = {
        "table": "Once per run, count, mean and spread of each number and the levels of each category leave.",
        "images": "Pixels are numbers from 0 to 1; nothing about them leaves before training.",
        "texts": "Tokens are those of the language model that you installed.",
    }
    lines = [
        f"Target: {policy.roles.target}. Client column: {policy.roles.client}."
        + (f" Cluster column: {policy.roles.cluster}." if policy.roles.cluster else ""),
        what[policy.kind],
        f"Rows are split {split} with seed {policy.seed}, in at most {policy.splits} numbering(s) of the clients; the "
        "server cannot choose another split.",
        REFIT[policy.refit],
        "A client keeps a model that it trains alone if its own validation rows speak against that of a run; you and "
        "the server are told."
        if policy.guard
        else "Clients deploy the models of a run whatever their own rows say (guard = false).",
        f"A client with fewer than {policy.min_rows} rows takes no part. No level, mean or score of fewer than "
        f"{policy.min_rows_per_statistic} rows leaves.",
        f"You fixed the encoding of: {fixed}. Nothing about these columns is sent."
        if fixed
        else before[policy.kind],
        "Phases that run: " + "; ".join(shown) + ".",
        *(["Phases that never run: " + "; ".join(hidden) + "."] if hidden else []),
        "Deployed models stay here. They can be scored, never fetched.",
        f"Methods: {_list(policy.algorithms)}. Models: {_list(policy.models)}. Metrics: {_list(policy.metrics)}.",
        "Settings: "
        + "; ".join(f"{name} {_range(name, bounds)}" for name, bounds in policy.settings.items())
        + f"; any other whole number at most {policy.largest_count}.",
        f"At most {policy.rounds} rounds and {policy.messages_per_run} messages in a run; at most "
        f"{policy.messages_per_day} messages and {policy.runs_per_day} new runs in a day; numbers in messages at most "
        f"{policy.largest_number:g}; networks of at most {policy.largest_model:,} parameters; at most "
        f"{policy.megabytes:,} MB on this disk for a run.",
        f"Answers leave in secure sums of at least {policy.least_nodes} nodes only; a server learns the sum."
        if policy.secure
        else "A server may ask for single answers; secure = true in [methods] lets out secure sums only.",
        f"All runs together may cost epsilon {policy.epsilon:g} (delta {policy.delta:g}) of the privacy of training "
        "rows: gradients leave with noise, and runs without it are refused."
        if math.isfinite(policy.epsilon)
        else "Runs need not add noise. A server that was taken over can then choose models whose answers differ by "
        "single training rows, and compute these; epsilon in [privacy] prevents that.",
        *([f"You compared the certificates of: {', '.join(policy.members)}."] if policy.members else []),
        "Every run waits until you approve it: coterie federate approve FOLDER."
        if policy.approve
        else "Runs that fit this policy need no approval (approve = true in [consent] changes that).",
        "What leaves is written to the audit log first. Errors that leave hold no value of a row.",
    ]
    return lines


def _list(names: tuple[str, ...] | None) -> str:
    return "all that are installed" if names is None else ", ".join(names)


def _range(name: str, bounds: Any) -> str:
    if all(isinstance(bound, int | float) for bound in bounds):
        return f"from {bounds[0]:g} to {bounds[-1]:g}" + (", or 0 for all rows" if name == "batch" else "")
    return "one of " + ", ".join(str(bound) for bound in bounds)
