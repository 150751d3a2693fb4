"""Coterie itself, through `fit`, in the way a user calls it."""

from __future__ import annotations

from typing import Any

from common import Clock, Problem, Run, serve


def prepare(problem: Problem) -> Run:
    from coterie import fit  # first, as a user would: it sets how threads wait

    from benchmarks.workloads import WORKLOADS, as_module  # isort: skip

    work = WORKLOADS[problem.name]
    fed = work.federation()
    algorithm = work.algorithm(fed)
    loopless = problem.name == "W5"

    def run(clock: Clock) -> dict[str, Any]:
        def watch(t: int, rounds: int) -> None:
            if not loopless:
                clock.tick()

        clock.start()
        run = fit(fed, algorithm, work.rounds, evaluate_every=0, watch=watch)
        if loopless:
            clock.tick(work.rounds)
        final = {"personal": as_module(fed.model, run.personal).numpy()}
        return final | ({"x": as_module(fed.model, run.state.x).numpy()} if "x" in run.state else {})

    if not loopless:
        run(Clock())  # what is measured once, such as how a network is stacked, is measured here
    return run


serve(prepare, choose_threads=False)
