"""Fit the advisor's calibration on the worlds of DEVELOP, or judge it on those of FRESH.

python -m benchmarks.advisor_calibration fit                  # prints the constants of coterie/select/calibration.py
python -m benchmarks.advisor_calibration judge --out FOLDER   # writes calibration.json, .md and .svg
python -m benchmarks.advisor_calibration oracle               # how often who knows all variances names the best
python -m benchmarks.advisor_calibration fit --kind logistic  # and judge: the same for classes (logistic.json, ...)
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.advisor_worlds import DEVELOP, FRESH, KINDS, KnownWorld, draw_world
from coterie.select import calibration
from coterie.select.advice import METHODS, SHARED, Advice, conclude
from coterie.select.prospects import Prospects
from coterie.select.survey import Findings, Survey
from coterie.theory import held_out, left_out

COVERED = (0.045, 0.955)  # quantiles that are fitted
SAME = 1 + 1e-6  # errors within this factor are those of the same model
COLOURS = {"sharing": "#2ca02c", "federation": "#1f77b4", "client": "#d62728"}
FAMILY = np.array([name in SHARED for name in METHODS])


@dataclass(frozen=True)
class Judged:
    """A world, what the survey found and advised there, and the true errors beyond the noise."""

    world: KnownWorld
    findings: Findings
    advice: Advice
    risks: Tensor  # [n, methods]

    @property
    def mean(self) -> np.ndarray:
        """True error of every method, mean over clients."""
        return np.asarray(self.risks.mean(0))


def look(kind: str, seed: int) -> Judged:
    """Draw a world, ask the advisor and compute the truth."""
    world = draw_world(kind, seed)
    fed = world.federation().fresh()
    fed.enter_round(0, None)
    found = Survey().carry_out(fed)
    advice = conclude(fed, found)
    return Judged(world, found, advice, world.advised_risks(advice))


def oracle(kind: str, seed: int) -> bool:
    """Whether the best method is named by who knows every client's true noise and distances, in `left_out`'s risks."""
    world = draw_world(kind, seed)
    own = torch.stack([x.T @ x for x in world.xs])
    rows = torch.tensor([[float(len(x))] for x in world.xs], dtype=torch.float64)
    total, noise, d = own.sum(0), world.noise.square(), own.shape[-1]
    inverse = left_out.inverse(total - own)
    side = (own @ world.truth.unsqueeze(-1)).squeeze(-1)
    centre = (inverse @ (side.sum(0) - side).unsqueeze(-1)).squeeze(-1)
    noisy = noise[:, None, None] * own
    spread = (inverse @ (noisy.sum(0) - noisy) @ inverse).diagonal(dim1=-2, dim2=-1).sum(-1)
    distance = torch.stack(
        [(world.truth - centre).square().sum(-1) + spread, world.truth.square().sum(-1)], 1
    )
    lam = held_out.penalties(float(total.diagonal().sum() / rows.sum()) / min(d, float(rows.mean())))
    parts = left_out.curves(total, own, rows, rows.sum(), lam)
    curve = parts[:, [0, 2]] * (distance / d).unsqueeze(-1) + noise[:, None, None] * (1 + parts[:, [1, 3]])
    known = Prospects(lam, curve, curve, noise[:, None].expand(-1, 2), distance / d, rows.squeeze(-1))
    shared, alone = known.penalties()
    true = world.risks(alone, shared).mean(0)
    return bool(true[known.errors().mean(0).argmin()] <= SAME * true.min())


def fit(judged: list[Judged]) -> dict[str, Any]:
    """Fit quantiles of the log errors of predicted risks, and logistic models of being right."""
    from sklearn.linear_model import LogisticRegression, QuantileRegressor

    bounds, parts = {}, [_parts(one) for one in judged]
    classes = judged[0].world.kind == "logistic"
    if classes:  # few worlds: one feature
        parts = [(given[..., [calibration.ERROR]], errors) for given, errors in parts]
    weight = np.concatenate([[1 / len(one.risks)] * len(one.risks) for one in judged])
    for k, name in enumerate(METHODS):
        x = np.concatenate([features[:, k] for features, _ in parts])
        y = np.concatenate([errors[:, k] for _, errors in parts])
        alpha = 1e-3 if classes else 1e-4
        ends = [QuantileRegressor(quantile=q, alpha=alpha).fit(x, y, sample_weight=weight) for q in COVERED]
        bounds[name] = tuple(tuple(round(float(v), 3) for v in (one.intercept_, *one.coef_)) for one in ends)

    def logistic(x: list[float], y: list[bool]) -> tuple[float, float]:
        found = LogisticRegression(C=1e6).fit(np.array(x)[:, None], y)
        return round(float(found.intercept_[0]), 3), round(float(found.coef_[0, 0]), 3)

    share = logistic(
        [calibration.evidence(one.findings) for one in judged],
        [bool(one.mean[FAMILY].min() < one.mean[~FAMILY].min()) for one in judged],
    )
    if classes:
        return {"CLASSES_BOUNDS": bounds, "CLASSES_SHARE": share}
    leads, right, own, own_right, each = [], [], [], [], []
    for one in judged:
        predicted = torch.stack([one.advice.risks[name] for name in METHODS], 1)
        family = FAMILY == bool(one.mean[FAMILY].min() < one.mean[~FAMILY].min())
        leads.append(calibration.lead(predicted.mean(0)[family]))
        right.append(bool(one.mean[family].argmin() == predicted.mean(0)[family].argmin()))
        shared = one.advice.method in SHARED
        allowed, sure = (
            torch.from_numpy(FAMILY == shared),
            one.advice.sharing if shared else 1 - one.advice.sharing,
        )
        for mine, truth, name in zip(predicted, one.risks, one.advice.methods, strict=True):
            own.append(calibration.client_evidence(mine, allowed, sure))
            own_right.append(bool(truth[METHODS.index(name)] <= SAME * truth.min()))
            each.append(1 / len(predicted))
    client = LogisticRegression(C=1e6).fit(np.array(own), own_right, sample_weight=each)
    return {
        "BOUNDS": bounds, "SHARE": share, "WITHIN": logistic(leads, right),
        "CLIENT": tuple(round(float(v), 3) for v in (client.intercept_[0], *client.coef_[0])),
    }  # fmt: skip


def _parts(one: Judged) -> tuple[np.ndarray, np.ndarray]:
    """Features [n, methods, 5] and log errors [n, methods] of the predicted risks."""
    predicted = torch.stack([one.advice.risks[name] for name in METHODS], 1)
    features, resolution = calibration.features(one.findings.prospects, predicted)
    error = torch.log((one.risks + resolution) / (predicted + resolution))
    return np.asarray(features), np.asarray(error)


def summary(judged: list[Judged]) -> dict[str, Any]:
    """Coverage, right recommendations, extra errors and the reliability of probabilities, by kind and in all."""
    found: dict[str, Any] = {}
    for kind in (*dict.fromkeys(one.world.kind for one in judged), "all"):
        some = [one for one in judged if kind in ("all", one.world.kind)]
        covered = {
            name: float(np.mean([np.mean(_covers(one, k)) for one in some])) for k, name in enumerate(METHODS)
        }
        extra = [_extra(one, one.advice.method) for one in some]
        rtfa = [_extra(one, "rtfa") for one in some]
        right = [_best(one, one.advice.method) for one in some]
        sure = [one.advice.sure for one in some]
        firm = [_family(one) for one in some if one.advice.sure]
        found[kind] = {
            "worlds": len(some),
            "coverage": covered,
            "covered": float(np.mean(list(covered.values()))),
            "best named": float(np.mean(right)),
            "mean stated probability": float(np.mean([one.advice.probability for one in some])),
            "sure": float(np.mean(sure)),
            "right family where sure": float(np.mean(firm)) if firm else 1.0,
            "extra error, 90th percentile": float(np.quantile([e for e, _ in extra], 0.9)),
            "extra error beyond noise, 90th percentile": float(np.quantile([e for _, e in extra], 0.9)),
            "always rtfa: best": float(np.mean([_best(one, "rtfa") for one in some])),
            "always rtfa: extra error, 90th percentile": float(np.quantile([e for e, _ in rtfa], 0.9)),
            "always rtfa: extra error beyond noise, 90th percentile": float(
                np.quantile([e for _, e in rtfa], 0.9)
            ),
        }
    found["reliability"] = reliability(judged)
    return found


def _covers(one: Judged, k: int) -> np.ndarray:
    low, high = one.advice.intervals[METHODS[k]].unbind(1)
    return np.asarray((low <= one.risks[:, k]) & (one.risks[:, k] <= high))


def _extra(one: Judged, method: str) -> tuple[float, float]:
    """Extra error of a method over the best: of all of the error, and of what is beyond the noise."""
    noise, mine = float(one.world.noise.square().mean()), one.mean[METHODS.index(method)]
    return float((mine + noise) / (one.mean.min() + noise) - 1), float(mine / one.mean.min() - 1)


def _best(one: Judged, method: str) -> bool:
    """Whether a method is the best, or the same model as the best (such as local and ftfa where rows are many)."""
    return bool(one.mean[METHODS.index(method)] <= SAME * one.mean.min())


def _family(one: Judged) -> bool:
    """Whether it is right to share, or not."""
    return bool(one.mean[FAMILY].min() < one.mean[~FAMILY].min()) == (one.advice.method in SHARED)


def reliability(judged: list[Judged]) -> dict[str, list[dict[str, float]]]:
    """Stated probability, share that was right and its standard error, in bins, for federations and for clients."""
    pairs: dict[str, list[tuple[float, bool]]] = {"sharing": [], "federation": [], "client": []}
    for one in judged:
        pairs["sharing"].append((max(one.advice.sharing, 1 - one.advice.sharing), _family(one)))
        pairs["federation"].append((one.advice.probability, _best(one, one.advice.method)))
        best = one.risks.min(1).values
        for k, name in enumerate(one.advice.methods):
            right = bool(one.risks[k, METHODS.index(name)] <= SAME * best[k])
            pairs["client"].append((float(one.advice.client_probabilities[k]), right))
    bins: dict[str, list[dict[str, float]]] = {}
    for name, values in pairs.items():
        bins[name] = []
        for low, high in ((0, 0.5), (0.5, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 0.95), (0.95, 1.01)):
            inside = [(p, r) for p, r in values if low <= p < high]
            if len(inside) >= 5:
                share = float(np.mean([r for _, r in inside]))
                error = math.sqrt(max(share * (1 - share), 1e-4) / len(inside))
                stated = float(np.mean([p for p, _ in inside]))
                bins[name].append({"stated": stated, "right": share, "error": error, "count": len(inside)})
    return bins


def diagram(bins: dict[str, list[dict[str, float]]]) -> str:
    """Draw the reliability diagram as SVG: stated probability across, share that was right up."""
    size, edge = 320, 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size + 2 * edge} {size + 2 * edge}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{edge} {edge + size}L{edge + size} {edge}" stroke="#999" stroke-dasharray="4"/>',
        f'<rect x="{edge}" y="{edge}" width="{size}" height="{size}" fill="none" stroke="#333"/>',
        f'<text x="{edge + size / 2}" y="{size + 2 * edge - 8}" text-anchor="middle">stated probability</text>',
        f'<text transform="translate(12 {edge + size / 2}) rotate(-90)" text-anchor="middle">share right</text>',
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts.append(
            f'<text x="{edge + tick * size}" y="{edge + size + 16}" text-anchor="middle">{tick:g}</text>'
        )
        parts.append(
            f'<text x="{edge - 6}" y="{edge + (1 - tick) * size + 4}" text-anchor="end">{tick:g}</text>'
        )
    for place, (name, colour) in enumerate(COLOURS.items()):
        for one in bins[name]:
            x, y = edge + one["stated"] * size, edge + (1 - one["right"]) * size
            half = 1.645 * one["error"] * size
            parts.append(f'<path d="M{x:.1f} {y - half:.1f}V{y + half:.1f}" stroke="{colour}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{edge + 10}" y="{edge + 18 + 16 * place}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def table(found: dict[str, Any], seeds: range, name: str) -> str:
    """The summary as a page."""
    lines = [
        "# Calibration of the advisor on fresh worlds",
        "",
        f"Seeds {seeds.start} to {seeds.stop - 1} of each kind of `benchmarks/advisor_worlds.py`, fixed before the",
        "calibration was fitted on other seeds. Coverage: share of 90 % intervals that hold the true error of a",
        "method for a client, mean over methods (range). Extra error: of the named method over the best, 90th",
        "percentile over worlds, relative to the whole error and (in brackets) to what is beyond the noise. A method",
        "that gives the same model as the best one (local and ftfa where every client has more rows than features) is",
        "right too. Right where sure: whether to share at all.",
        "",
        "| worlds | coverage | best named | stated | right where sure | extra error | rtfa best | its extra error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, one in found.items():
        if kind == "reliability":
            continue
        spread = f"{min(one['coverage'].values()):.2f} to {max(one['coverage'].values()):.2f}"
        extra, beyond = (one[f"extra error{which}, 90th percentile"] for which in ("", " beyond noise"))
        theirs, away = (one[f"always rtfa: extra error{w}, 90th percentile"] for w in ("", " beyond noise"))
        lines.append(
            f"| {kind} ({one['worlds']}) | {one['covered']:.3f} ({spread}) | {one['best named']:.2f} | "
            f"{one['mean stated probability']:.2f} | {one['right family where sure']:.2f} of {one['sure']:.0%} | "
            f"{extra:.1%} ({beyond:.1%}) | {one['always rtfa: best']:.2f} | {theirs:.1%} ({away:.1%}) |"
        )
    lines += ["", f"![Reliability diagram]({name}.svg)", ""]
    for name, bins in found["reliability"].items():
        shown = ", ".join(
            f"{b['stated']:.2f}: {b['right']:.2f} ± {b['error']:.2f} ({b['count']})" for b in bins
        )
        lines.append(f"Stated: right, {name}: {shown}.\n")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("fit", "judge", "oracle"))
    parser.add_argument("--worlds", type=int, default=None)
    parser.add_argument("--skip", type=int, default=0, help="worlds to leave out at the start")
    parser.add_argument(
        "--kind", choices=(*KINDS, "logistic"), help="one kind only; the six linear ones by default"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "advisor")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seeds = (FRESH if asked.what == "judge" else DEVELOP)[asked.skip :][: asked.worlds]
    kinds, name = ((asked.kind,), asked.kind) if asked.kind else (KINDS, "calibration")
    if asked.what == "oracle":
        for kind in kinds:
            print(kind, np.mean([oracle(kind, seed) for seed in seeds]))
        return
    judged = [look(kind, seed) for kind in kinds for seed in seeds]
    if asked.what == "fit":
        for constant, value in fit(judged).items():
            print(f"{constant} = {value}")
        return
    found = summary(judged)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (asked.out / f"{name}.svg").write_text(diagram(found["reliability"]), encoding="utf-8")
    page = table(found, seeds, name)
    (asked.out / f"{name}.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
