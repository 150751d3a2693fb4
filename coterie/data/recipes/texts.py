"""Recipes of texts, for models that run on a CPU: bags of words, and the characters before the next one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from coterie.data.clients import Clients
from coterie.data.leaf_files import LETTERS
from coterie.data.recipes.recipe import Recipe
from coterie.data.xml_texts import plays, stackexchange

BEFORE = 4  # characters that the next one is predicted from
ROLES, ROWS = 30, 300


def _posts(seed: int, archive: Path) -> Clients:
    return stackexchange(archive, words=200, tags=20, min_posts=20)


def _roles(seed: int, archive: Path) -> Clients:
    found = plays(archive, length=BEFORE, stride=5, min_rows=ROWS, max_rows=ROWS, max_clients=ROLES)
    return Clients([_one_hot(x) for x in found.xs], found.ys, found.names)


def _one_hot(x: Tensor) -> Tensor:
    """Return a 1 for the character at each place."""
    return functional.one_hot(x, len(LETTERS) + 1).flatten(1).to(torch.float32)


RECIPES = (
    Recipe(
        "stackexchange",
        "Tags of questions and answers, by user",
        _posts,
        "multiclass",
        "linear",
        "a user",
        "by writer (natural)",
        "Users write about a few subjects of one of seven sites: labels differ, and so do words.",
        "Stack Exchange, Posts.xml of seven small sites",
        "CC BY-SA 4.0",
        ("stackexchange.tar.xz",),
    ),
    Recipe(
        "shakespeare",
        "The next letter of a play, by speaking role",
        _roles,
        "multiclass",
        "linear",
        "a speaking role",
        "by role (natural)",
        "Roles of LEAF's Shakespeare speak nearly the same language, so that one model is hard to beat.",
        "plays of Shakespeare in XML (Bosak), the 30 longest roles",
        "public domain",
        ("shakespeare.tar.xz",),
    ),
)
