"""The advisor on 80 random linear worlds, and on homogeneous clients: python benchmarks/advisor.py [worlds] [seed]."""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from coterie.theory.trial import judge, make_world, random_world


def main() -> None:
    worlds = int(sys.argv[1]) if len(sys.argv) > 1 else 80
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 5000
    torch.set_num_threads(1)
    started, scores, floats = time.perf_counter(), [], []
    for seed in range(first, first + worlds):
        score, advice = judge(random_world(seed))
        scores.append(score)
        floats.append(advice.floats_up)
    joined = {
        name: float(torch.cat([getattr(score, name) for score in scores]).mean())
        for name in ("exact", "within", "log_excess", "always_rtfa")
    }
    clients = sum(len(score.exact) for score in scores)
    print(f"{worlds} worlds from seed {first}, {clients} clients, {time.perf_counter() - started:.0f} s")
    print(f"best of five methods named       {joined['exact']:.3f}   (bar 0.75, reference 0.77)")
    print(f"within 10 % of the best risk     {joined['within']:.3f}   (bar 0.82, reference 0.85)")
    print(f"mean log excess                  {joined['log_excess']:.3f}   (reference 0.045)")
    print(f"rtfa for everybody               {joined['always_rtfa']:.3f}")
    print(
        f"the federation's best method     {np.mean([score.federation for score in scores]):.3f}   (bar 0.90)"
    )
    print(
        f"the majority's best method       {np.mean([score.majority for score in scores]):.3f}   (reference 0.93)"
    )
    sure = [score.federation for score in scores if score.shared_sure]
    print(f"  where the advisor is sure      {np.mean(sure):.3f} of {len(sure)}")
    print(f"floats sent up per client        {np.median(floats):.0f} (median)")
    gaps = []
    for seed in range(10):
        world = make_world(
            np.random.default_rng(seed), clients=60, features=100, gamma=2.0, sigma2=0.5, r2=1.0, centre2=1.0
        )
        _, advice = judge(world)
        gaps += torch.log(advice.lam_shared / world.best_lambda).abs().tolist()
    print(f"homogeneous: median |ln lam/lam*| {np.median(gaps):.3f}   (bar 0.15)")


if __name__ == "__main__":
    main()
