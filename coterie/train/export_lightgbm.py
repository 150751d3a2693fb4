"""A client's trees as a LightGBM text model, for LightGBM and tools that read its models, SHAP values included."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from coterie._core import files
from coterie._core.errors import SettingError
from coterie.models.objectives import TWEEDIE_POWER
from coterie.models.tree_walk import FEATURE, MISSING, PARENT, SHARE, THRESHOLD, children
from coterie.models.trees import Trees

if TYPE_CHECKING:
    from coterie.train.exported_model import ExportedModel

COUNT = 1_000_000  # rows that the root stands for: SHAP values weigh nodes by their counts
CATEGORY, LEFT_IF_MISSING, MISSING_IS_NAN = 1, 2, 8  # bits of a decision type


def to_lightgbm(one: ExportedModel, path: Path) -> None:
    """Write the trees as LightGBM's text format.

    Columns have the order of the features: numbers as they are in the table (NaN: missing), categories as the code of
    their level (NaN: missing or unknown). Predictions are those of the client's model, in the target's units.

    Parameters
    ----------
    one
        The model of a client.
    path
        The file to write.
    """
    model = one.model
    if not isinstance(model, Trees):
        raise SettingError(
            "only trees have LightGBM's format; export this model to safetensors, onnx or torchscript"
        )
    base, splits, values = (part.detach().double() for part in model.parts(one.weights.double()))
    unit, shift = 1.0, 0.0
    if one.preprocessor is not None and one.task == "regression":
        unit, shift = one.preprocessor.target_sd, one.preprocessor.target_mean
    used = (splits[..., PARENT] >= 0).any(-1).any(-1)
    count = max(1, int(used.nonzero()[-1]) + 1 if bool(used.any()) else 1)
    values = values[:count] * unit
    values[0] += (base * unit + shift).unsqueeze(-1)
    levels = model.levels or (0,) * model.width
    trees = [
        _tree(number, *tree, levels)
        for number, tree in enumerate(zip(splits[:count].flatten(0, 1), values.flatten(0, 1), strict=True))
    ]
    text = "\n".join(
        [*_head(one, model, levels), "", *trees, "end of trees", "", "pandas_categorical:null", ""]
    )
    files.write_text(path, text)


def _head(one: ExportedModel, model: Trees, levels: tuple[int, ...]) -> list[str]:
    objective = {
        "regression": "regression",
        "binary": "binary sigmoid:1",
        "multiclass": f"multiclass num_class:{model.outputs}",
        "poisson": "poisson",
        "tweedie": f"tweedie tweedie_variance_power:{TWEEDIE_POWER}",
    }[model.objective]
    given = one.preprocessor.feature_names if one.preprocessor is not None else None
    names = [re.sub(r"[^\w.-]+", "_", name) for name in given or (f"x{k}" for k in range(model.width))]
    infos = [
        ":".join(str(code) for code in range(count)) if count else "[-1e+308:1e+308]" for count in levels
    ]
    return [
        "tree",
        "version=v4",
        f"num_class={model.outputs}",
        f"num_tree_per_iteration={model.outputs}",
        "label_index=0",
        f"max_feature_idx={model.width - 1}",
        f"objective={objective}",
        f"feature_names={' '.join(names)}",
        f"feature_infos={' '.join(infos)}",
    ]


def _tree(number: int, splits: Tensor, values: Tensor, levels: tuple[int, ...]) -> str:
    """Return one tree; a tree without a split is written with one that has the same value on both sides."""
    rows = [row for row in splits.tolist() if row[PARENT] >= 0]
    child = children(splits.unsqueeze(0))[0].tolist()
    leaf = values.tolist()[: len(rows) + 1]
    if not rows:
        rows, child, leaf = [[0.0, 0.0, 0.0, 0.0, 0.5]], [[-1, -2]], [leaf[0], leaf[0]]
    thresholds: list[str] = []
    kinds: list[int] = []
    left: list[int] = []
    right: list[int] = []
    masks: list[int] = []
    for row, (below, beyond) in zip(rows, child, strict=False):
        count, missing_right = levels[int(row[FEATURE])], row[MISSING] > 0.5
        if not count:
            thresholds.append(repr(row[THRESHOLD]))
            kinds.append(MISSING_IS_NAN + (0 if missing_right else LEFT_IF_MISSING))
        else:  # LightGBM sends the codes of a set left, and missing values right
            bits = int(row[THRESHOLD]) & (2**count - 1)
            if missing_right:
                bits = ~bits & (2**count - 1)
            else:
                below, beyond = beyond, below
            thresholds.append(str(len(masks)))
            kinds.append(CATEGORY + MISSING_IS_NAN)
            masks.append(bits)
        left.append(below)
        right.append(beyond)
    counts, inner = _counts(rows)
    words = [
        [mask >> 32 * k & 0xFFFFFFFF for k in range(max(1, (mask.bit_length() + 31) // 32))] for mask in masks
    ]
    ends = [sum(map(len, words[:k])) for k in range(len(words) + 1)]

    def line(name: str, items: list[object]) -> str:
        return f"{name}={' '.join(str(item) for item in items)}"

    lines = [
        f"Tree={number}",
        f"num_leaves={len(leaf)}",
        f"num_cat={len(masks)}",
        line("split_feature", [int(row[FEATURE]) for row in rows]),
        line("split_gain", [0] * len(rows)),
        line("threshold", list(thresholds)),
        line("decision_type", list(kinds)),
        line("left_child", list(left)),
        line("right_child", list(right)),
        line("leaf_value", [repr(value) for value in leaf]),
        line("leaf_weight", list(counts)),
        line("leaf_count", list(counts)),
        line("internal_value", [0] * len(rows)),
        line("internal_weight", list(inner)),
        line("internal_count", list(inner)),
    ]
    if masks:
        lines += [
            line("cat_boundaries", list(ends)),
            line("cat_threshold", [word for part in words for word in part]),
        ]
    return "\n".join([*lines, "is_linear=0", "shrinkage=1", "", ""])


def _counts(rows: list[list[float]]) -> tuple[list[int], list[int]]:
    """Return how many of COUNT rows lie in each leaf and at each split."""
    weight, inner = [float(COUNT)], []
    for row in rows:
        whole = weight[int(row[PARENT])]
        inner.append(whole)
        weight[int(row[PARENT])] = whole * (1 - row[SHARE])
        weight.append(whole * row[SHARE])
    return [max(1, round(part)) for part in weight], [max(2, round(part)) for part in inner]
