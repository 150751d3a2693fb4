"""Draw the curve of every algorithm page: `python docs/curves.py [NAME...]` writes docs/algorithms/curves/NAME.svg.

All methods train on the same federation: four clusters of six clients, linear regression, 30 rows each. The settings
below were chosen on validation rows, among a few; the curve of a method is drawn over those of training alone and of
one model for all.
"""

from __future__ import annotations

import functools
import sys
from html import escape
from pathlib import Path
from typing import Any

import torch

import coterie
from coterie.algorithms import Algorithm, all_algorithms, find
from coterie.data.generate import hierarchical_linear

FOLDER = Path(__file__).parent / "algorithms" / "curves"
ROUNDS = 60
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 260, 46, 110, 28, 36
LOW, HIGH = 0.8, 3.2  # validation RMSE at the bottom and the top; the noise alone is 1
SETTINGS: dict[str, dict[str, Any]] = {
    "apfl": {"lr": 0.01, "alpha": 0.75},
    "cfl": {"lr": 0.03},
    "cobo": {"sampling": "all", "lr": 0.1, "rho": 0.3, "gamma": 0.1},
    "ditto": {"lr": 0.03, "lam": 0.3},
    "dual-adapters": {"lr": 0.01},
    "fc": {"lr": 0.3},
    "fedavg": {"lr": 0.3},
    "fedadam": {"lr": 0.1},
    "fedala": {"lr": 0.01, "mixing_lr": 10.0},
    "fedamp": {"lr": 0.03, "lam": 1.0},
    "feddyn": {"lr": 0.01},
    "fedem": {"lr": 0.3, "components": 4},
    "fedfomo": {"lr": 0.03},
    "fednova": {"lr": 0.3},
    "fedphp": {"lr": 0.3, "lam": 0.3, "mu": 0.5},
    "fedprox": {"lr": 0.3},
    "fedsoft": {"lr": 0.1, "centres": 4},
    "fedyogi": {"lr": 0.1},
    "fedbabu": {"lr": 0.1, "tuning_lr": 0.1},
    "fedbn": {"lr": 0.1},
    "fedmd": {"lr": 0.03, "digest_lr": 0.03},
    "fedpac": {"lr": 0.1},
    "fedper": {"lr": 0.1},
    "fedproto": {"lr": 0.03},
    "fedrep": {"lr": 0.1},
    "fedrod": {"lr": 0.01},
    "fedsa-lora": {"lr": 0.03},
    "ffa-lora": {"lr": 0.3},
    "fine-tuned": {"lr": 0.01, "tuning_lr": 0.1},
    "fomaml": {"lr": 0.03, "inner_lr": 0.1, "tuning_steps": 5},
    "ftfa": {"lr": 0.01, "tuning_lr": 0.1},
    "gpfl": {"lr": 0.01},
    "hetlora": {"lr": 0.03},
    "ifca": {"lr": 0.03, "clusters": 4, "restarts": 5},
    "l2sgd": {"lr": 0.03, "lam": 0.3},
    "knn-per": {"lr": 0.03},
    "lg-fedavg": {"lr": 0.01},
    "local": {"lr": 0.01},
    "maml-fl": {"lr": 0.01, "tuning_lr": 0.1, "alpha": 0.001},
    "oracle": {"lr": 0.01},
    "pdl-tc": {"clusters": 4, "rule": "size"},
    "pfedgraph": {"lr": 0.1},
    "pfedhn": {"lr": 0.03, "server_lr": 1.0},
    "pfedme": {"lr": 0.005, "lam": 1.0, "inner_steps": 10},
    "pfl-tc": {"clusters": 4, "rule": "size"},
    "reptile": {"lr": 0.1},
    "rtfa": {"lr": 0.01, "tuning_lr": 0.1},
    "scaffold": {"lr": 0.03},
}
NETWORKS: dict[str, dict[str, Any]] = {
    "dual-adapters": {"adapters": 4},
    "fedbn": {"norm": "batch"},
    "fedproto": {},
    "fedsa-lora": {"adapters": 4},
    "ffa-lora": {"adapters": 4},
    "gpfl": {"valve": True},
    "hetlora": {"adapters": 4},
    "knn-per": {},
}  # options of the perceptron with 16 hidden units that these methods train
Curve = tuple[list[int], list[float]]


@functools.cache
def federation(own: Algorithm | None = None) -> coterie.Federation:
    """Four clusters of six clients each around a centre of its own; linear, or the model that a method has."""
    model = None if own is None else own.trial_model(ROUNDS)
    if own is not None and own.name in NETWORKS:
        model = coterie.models.mlp((16,), stacked=False, **NETWORKS[own.name])
        model = coterie.models.with_neighbours(model, rows=15) if own.name == "knn-per" else model
    clients = hierarchical_linear(
        clusters=4, clients=6, rows=30, features=10, between=0.6, within=0.2, noise=1.0, seed=1
    )
    return coterie.Federation.from_clients(clients, model or coterie.models.linear(), split=(0.5, 0.3, 0.2))


@functools.cache
def curve(name: str) -> tuple[Algorithm, Curve]:
    """A method, and its validation RMSE over the rounds, mean over clients."""
    if name.startswith("async"):
        algorithm = find(name).from_theory(federation(), gamma=1.0, lambda_=1.0)  # type: ignore[attr-defined]
    else:
        algorithm = find(name)(**SETTINGS.get(name, {}))
    run = coterie.fit(
        federation(algorithm if algorithm.trial_model(ROUNDS) else None),
        algorithm,
        ROUNDS,
        evaluate_every=2,
        score_test=False,
    )
    return algorithm, run.history.curve("validation", "rmse")


def place(curve: Curve) -> list[tuple[float, float]]:
    """Pixels of a curve; what is above the frame stays at its edge."""
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    return [
        (LEFT + across * t / ROUNDS, TOP + up * (HIGH - min(max(value, LOW), HIGH)) / (HIGH - LOW))
        for t, value in zip(*curve, strict=True)
    ]


def settings(algorithm: Algorithm) -> str:
    """What differs from the method's defaults."""
    usual = type(algorithm)().settings()
    changed = {key: value for key, value in algorithm.settings().items() if value != usual[key]}
    return ", ".join(f"{key} = {_short(value)}" for key, value in changed.items()) or "the defaults"


def _short(value: object) -> str:
    if isinstance(value, tuple | list):
        return _short(value[0]) + " …"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def draw(name: str) -> str:
    """The picture, as SVG."""
    algorithm, own = curve(name)
    lines = {other: curve(other)[1] for other in ("local", "fedavg") if other != name}
    up = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        'font-family="sans-serif" font-size="11" fill="#808080">',
        f"<title>{escape(name)}: validation error over rounds</title>",
        f"<desc>Mean RMSE over 24 clients falls from {own[1][0]:.2f} to {own[1][-1]:.2f}; "
        f"with {escape(settings(algorithm))}.</desc>",
        f'<text x="{LEFT}" y="16">validation RMSE, mean over clients</text>',
        f'<path d="M{LEFT},{TOP}V{up}H{WIDTH - RIGHT}" fill="none" stroke="#808080"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">rounds</text>',
    ]
    for value in (1.0, 2.0, 3.0):
        y = place(([0], [value]))[0][1]
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{value:.0f}</text>')
        parts.append(f'<path d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}" stroke="#80808040"/>')
    for t in (0, 20, 40, 60):
        parts.append(
            f'<text x="{place(([t], [LOW]))[0][0]:.0f}" y="{up + 14}" text-anchor="middle">{t}</text>'
        )
    for other, dash in zip(lines, ("5 3", "1.5 3"), strict=False):
        parts.append(
            _polyline(lines[other], f'stroke="#808080" stroke-width="1.3" stroke-dasharray="{dash}"')
        )
    parts.append(_polyline(own, 'stroke="#2f7fd0" stroke-width="2.2"'))
    parts += _labels({**lines, name: own}, name)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _polyline(curve: Curve, style: str) -> str:
    points = " ".join(f"{x:.0f},{y:.1f}" for x, y in place(curve))
    return f'<polyline fill="none" {style} points="{points}"/>'


def _labels(curves: dict[str, Curve], own: str) -> list[str]:
    """Names at the right ends, moved apart where they would overlap."""
    ends = sorted((place(curve)[-1][1], label) for label, curve in curves.items())
    below, labels = -20.0, []
    for y, label in ends:
        below = max(y, below + 13)
        colour = ' fill="#2f7fd0" font-weight="bold"' if label == own else ""
        labels.append(f'<text x="{WIDTH - RIGHT + 8}" y="{below + 4:.0f}"{colour}>{escape(label)}</text>')
    return labels


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name in names or list(all_algorithms()):
        (FOLDER / f"{name}.svg").write_text(draw(name), encoding="utf-8")
        algorithm, (_, values) = curve(name)
        print(f"{name:14} {values[0]:.3f} -> {values[-1]:.3f}   {settings(algorithm)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
