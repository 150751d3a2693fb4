"""Labels of groups: text, numbers and missing ones are compared alike."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np


class GroupsWarning(UserWarning):
    """Rows whose group is not given, or was not in training: the common model predicts them."""


def as_labels(groups: Any, rows: int) -> np.ndarray:
    """Return one group per row as an array of objects."""
    values = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    if len(values) != rows:
        raise ValueError(f"groups has {len(values)} entries for {rows} rows; give the group of every row")
    if any(isinstance(value, list | tuple | dict) for value in values):
        raise ValueError("groups has more than one column; give one label per row")
    labels = np.empty(rows, dtype=object)
    labels[:] = values
    return labels


def as_text(label: Any) -> str | None:
    """Return a label as text, so that 3, 3.0 and "3" are one group; None for a missing one."""
    if label is None or label != label or type(label).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(label, numbers.Real) and not isinstance(label, bool) and float(label).is_integer():
        return str(int(float(label)))
    return str(label)


def kinds(labels: list[Any]) -> set[str]:
    """Return the kinds of the labels that are not missing: numbers, text or others."""
    return {
        "number" if isinstance(label, numbers.Real) else "text" if isinstance(label, str) else "other"
        for label in labels
        if as_text(label) is not None
    } or {"number", "text", "other"}


def described(labels: list[Any]) -> str:
    """Return what the labels are, in words."""
    return {"number": "numbers", "text": "text"}.get(min(kinds(labels)), "objects")


def distinct(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct groups, sorted, and the position of each row's group."""
    first = {as_text(label): label for label in reversed(labels.tolist())}
    try:
        ordered = sorted(first, key=first.__getitem__)
    except TypeError:
        ordered = sorted(first, key=str)
    place = {text: k for k, text in enumerate(ordered)}
    owner = np.array([place[as_text(label)] for label in labels.tolist()])
    return np.array([first[text] for text in ordered]), owner
