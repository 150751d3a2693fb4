"""Recipes of images: scikit-learn's digits in the field's partitions, and files of larger ones."""

from __future__ import annotations

from pathlib import Path

from torch.nn import functional

from coterie.data import partition
from coterie.data.clients import Clients
from coterie.data.feature_shift import coloured, rotated
from coterie.data.leaf_files import leaf
from coterie.data.recipes.recipe import Recipe, Seeded
from coterie.data.small_images import digits, small_idx

CLIENTS = 20
WRITERS, SIDE = 30, 14


def _alike(seed: int) -> Clients:
    return partition.power_law(digits(), CLIENTS, exponent=0.0, seed=seed)


def _dirichlet(seed: int) -> Clients:
    return partition.dirichlet(digits(), CLIENTS, alpha=0.3, min_rows=20, seed=seed)


def _pathological(seed: int) -> Clients:
    return partition.classes_per_client(digits(), CLIENTS, k=2, seed=seed)


def _sizes(seed: int) -> Clients:
    return partition.power_law(digits(), CLIENTS, exponent=1.2, min_rows=20, seed=seed)


def _permuted(seed: int) -> Clients:
    return partition.permuted_labels(digits(), [5] * 4, seed=seed)


def _rotated(seed: int) -> Clients:
    return rotated(digits(), [5] * 4, seed=seed)


def _coloured(seed: int) -> Clients:
    return coloured(digits(), [6] * 3, seed=seed)


def _fashion(seed: int, images: Path, labels: Path) -> Clients:
    return partition.dirichlet(small_idx(images, labels, 14), 40, alpha=0.3, min_rows=40, seed=seed)


def _writers(seed: int, archive: Path) -> Clients:
    found = leaf(archive, max_clients=WRITERS)
    xs = [functional.adaptive_avg_pool2d(x.float(), SIDE).flatten(1) for x in found.xs]
    return Clients(xs, found.ys, found.names)


_DIGITS = "UCI Machine Learning Repository, doi:10.24432/C50P49, in scikit-learn"
_SHARE = "a share of the digits"


def _digits_recipe(name: str, title: str, make: Seeded, model: str, heterogeneity: str, why: str) -> Recipe:
    """Return a recipe of handwritten digits."""
    return Recipe(name, title, make, "multiclass", model, _SHARE, heterogeneity, why, _DIGITS, "CC BY 4.0")


RECIPES = (
    _digits_recipe(
        "digits-alike",
        "Digits, clients alike",
        _alike,
        "linear",
        "none (control)",
        "Rows are dealt out at random: one model is best for all, and whatever is personal is noise.",
    ),
    _digits_recipe(
        "digits-dirichlet",
        "Digits, label skew",
        _dirichlet,
        "linear",
        "label skew (Dirichlet 0.3)",
        "Clients have other shares of the ten classes, and other sizes. A personal model gains by leaving out classes "
        "that its client never sees.",
    ),
    _digits_recipe(
        "digits-pathological",
        "Digits, two classes each",
        _pathological,
        "linear",
        "label skew (2 classes per client)",
        "The partition of McMahan et al. 2017. Training alone is easy here: two classes out of ten.",
    ),
    _digits_recipe(
        "digits-sizes",
        "Digits, clients of all sizes",
        _sizes,
        "linear",
        "quantity skew (power law 1.2)",
        "Clients differ in size alone: the largest has more than a quarter of the rows, the smallest 33 of 1,797.",
    ),
    _digits_recipe(
        "digits-permuted",
        "Digits, four groups with labels of their own",
        _permuted,
        "linear",
        "concept shift (label permutation, 4 clusters)",
        "The same picture has another label in each of four groups: one model for all must fail, and five clients "
        "share each truth.",
    ),
    _digits_recipe(
        "digits-rotated",
        "Digits, four groups that turn the page",
        _rotated,
        "mlp",
        "feature shift (rotation)",
        "Four groups turn their pictures by quarters of a circle. A network can learn all four if it sees all rows.",
    ),
    _digits_recipe(
        "digits-coloured",
        "Digits, three groups with a colour each",
        _coloured,
        "mlp",
        "feature shift (colour)",
        "Three groups write into channels of their own: first layers have no input in common, last layers do.",
    ),
    Recipe(
        "fashion",
        "Clothes in small pictures, label skew",
        _fashion,
        "multiclass",
        "mlp",
        "a share of the test pictures",
        "label skew (Dirichlet 0.3)",
        "Clients have other shares of the ten kinds of clothes.",
        "Fashion-MNIST (Xiao et al. 2017), the 10,000 test pictures",
        "MIT",
        ("fashion_mnist/t10k-images-idx3-ubyte.gz", "fashion_mnist/t10k-labels-idx1-ubyte.gz"),
    ),
    Recipe(
        "femnist",
        "Handwriting, by writer (LEAF)",
        _writers,
        "multiclass",
        "mlp",
        "a writer",
        "by writer (natural)",
        "Every writer has a hand, and a choice of the 62 letters and digits, of their own.",
        "LEAF FEMNIST (Caldas et al. 2018), 30 writers, averaged to 14 x 14 pixels",
        "LEAF BSD-2-Clause; NIST, public domain",
        ("femnist/arakotom_flic.tar.xz",),
    ),
)
