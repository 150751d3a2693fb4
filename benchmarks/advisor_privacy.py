"""What noise for privacy leaves of the advice: best methods named, by the share of noise in what is known of clients.

python -m benchmarks.advisor_privacy [first seed] [last seed]   # docs/advisor.md: 1000 1059
"""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import torch

from benchmarks.advisor_worlds import KnownWorld
from coterie.engine.privacy import Privacy
from coterie.select.advice import METHODS, conclude
from coterie.select.advise import advise
from coterie.select.survey import Survey
from coterie.train import private

BUDGETS = (1.0, 4.0, 16.0, 1e4)
SHARES = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7, 0.9, 1.01)


def draw_world(seed: int) -> KnownWorld:
    """Draw a world of linear regression: 5 to 30 clients, 3 to 12 features, 20 to 2,000 rows per client."""
    draw = np.random.default_rng([seed, 77])

    def between(low: float, high: float) -> float:
        return float(np.exp(draw.uniform(math.log(low), math.log(high))))

    n, d, rows = round(between(5, 30)), round(between(3, 12)), between(20, 2000)
    sigma2, r2, centre2 = between(0.1, 4), between(0.01, 2), between(0.05, 4)
    own, centre = math.sqrt(r2 / d) * draw.normal(size=(n, d)), draw.normal(size=d)
    centre *= math.sqrt(centre2) / np.linalg.norm(centre)
    scale = math.sqrt(sigma2 + r2 + centre2)
    xs, ys = [], []
    for one in own:
        x = draw.normal(size=(max(6, round(rows * math.exp(0.4 * draw.normal()))), d))
        y = (x @ (centre + one) + math.sqrt(sigma2) * draw.normal(size=len(x))) / scale
        xs.append(torch.from_numpy(x))
        ys.append(torch.from_numpy(y))
    truth, noise = torch.from_numpy((centre + own) / scale), torch.full((n,), math.sqrt(sigma2) / scale)
    return KnownWorld("gaussian", xs, ys, truth, noise, [torch.eye(d, dtype=torch.float64)] * n)


def answers(seed: int) -> list[tuple[float, bool]]:
    """Share of noise, and whether the best method was named, for every budget."""
    world, found = draw_world(seed), []
    plain = advise(world.federation())
    risks = world.advised_risks(plain).mean(0)
    for epsilon in BUDGETS:
        fed = world.federation().fresh()
        fed.enter_round(0, None)
        plan = {**private.as_plan(Privacy(epsilon, 1e-5, "row")), "rounds": 0}
        private.set_up(fed, Survey(), plan, private.new_secret())
        seen = Survey().carry_out(fed)
        named = METHODS.index(conclude(fed, seen).method)
        found.append((seen.blur, bool(named == int(risks.argmin()))))
    return found


def main() -> None:
    first, last = (int(value) for value in (sys.argv[1:3] or (1000, 1059)))
    torch.set_num_threads(1)
    pairs = [pair for seed in range(first, last + 1) for pair in answers(seed)]
    for low, high in itertools.pairwise(SHARES):
        inside = [right for share, right in pairs if low <= share < high]
        if inside:
            print(f"share of noise {low:g} to {high:g}: best named in {np.mean(inside):.2f} of {len(inside)}")


if __name__ == "__main__":
    main()
