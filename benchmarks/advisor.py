"""The advisor on random linear worlds: python benchmarks/advisor.py [worlds] [first seed] [kind ...]."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from coterie.select.advice import METHODS
from coterie.select.synthetic_worlds import best_risks, judge, make_world, random_world

KINDS = ("reference", "middling", "wide", "even", "few")


def main() -> None:
    worlds = int(sys.argv[1]) if len(sys.argv) > 1 else 80
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 5000
    torch.set_num_threads(1)
    for kind in sys.argv[3:] or KINDS:
        show(kind, worlds, first)
    gaps = []
    for seed in range(10):
        world = make_world(
            np.random.default_rng(seed), clients=60, features=100, gamma=2.0, sigma2=0.5, r2=1.0, centre2=1.0
        )
        _, advice = judge(world)
        gaps += torch.log(advice.lam_shared / world.best_lambda).abs().tolist()
    print(f"homogeneous: median |ln lam/lam*|  {np.median(gaps):.3f}   (bar 0.15)")


def show(kind: str, worlds: int, first: int) -> None:
    started = time.process_time()
    scores, floats, excess = [], [], []
    for seed in range(first, first + worlds):
        world = random_world(seed, kind)
        score, advice = judge(world)
        scores.append(score)
        floats.append(advice.floats_up)
        risks = best_risks(world, advice)
        excess.append(torch.log(risks / risks.min(1, keepdim=True).values))

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(score, name) for score in scores])

    def error(name: str) -> str:
        """The standard error of a share, worlds being what is drawn."""
        parts = [torch.as_tensor(getattr(score, name), dtype=torch.float64).reshape(-1) for score in scores]
        share = torch.cat(parts).mean()
        off = torch.stack([(part - share).sum() for part in parts])
        return f"standard error {float(off.square().sum().sqrt() / len(torch.cat(parts))):.3f}"

    seconds, three = time.process_time() - started, joined("three")
    always = dict(zip(METHODS, torch.cat(excess).mean(0).tolist(), strict=True))
    sure = [score.federation for score in scores if score.sure]
    lines = {
        "best of five methods named": (joined("exact").mean(), f"{error('exact')}, bar 0.75, reference 0.77"),
        "within 10 % of the best risk": (
            joined("within").mean(),
            f"{error('within')}, bar 0.82, reference 0.85",
        ),
        "mean log excess": (joined("log_excess").mean(), "reference 0.045"),
        "  of rtfa, its best penalties": (always["rtfa"], "reference 0.18"),
        "  of ridge-local, its best penalties": (always["ridge-local"], "reference 0.33"),
        "the federation's best method": (
            np.mean([score.federation for score in scores]),
            f"{error('federation')}, bar 0.90",
        ),
        "  within 2 % of it": (np.mean([score.excess <= 0.02 for score in scores]), ""),
        f"  where sure ({len(sure)} worlds)": (np.mean(sure), ""),
        "the majority's best method": (np.mean([score.majority for score in scores]), "reference 0.93"),
        "best of local, fedavg, ftfa": (three.mean(), "reference 0.89"),
        "  where it leads by 20 %": (three[joined("lead") >= 0.2].mean(), "reference 0.96"),
        "floats up per client, median": (np.median(floats), ""),
    }
    print(f"{kind}: {worlds} worlds from seed {first}, {len(three)} clients, {seconds:.0f} CPU-seconds")
    for name, (value, bar) in lines.items():
        print(f"  {name:36s} {float(value):8.3f}   {bar}")


if __name__ == "__main__":
    main()
