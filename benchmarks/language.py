"""How fast the gradient of a language model with adapters is: plain or compiled, of how many rows at a time.

    python -m benchmarks.language [--model smollm2] [--rows 200] [--context 512] [--micro-batch 50,100,200]

A line of JSON for each setting: seconds of a gradient, tokens and TFLOP in a second, peak memory, and how long 500
rounds of each method of experiment cobo/languages would take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time

import torch

from coterie.models.causal_lm import CausalLM, causal_lm

GRADIENTS = {  # of four clients in 500 rounds; CoBo's pairs with probability 1/sqrt(t), or all of them
    "local": 2000,
    "fedavg": 2000,
    "ditto": 4000,
    "cobo": 2000 + 12 * sum(t**-0.5 for t in range(1, 501)),
    "cobo, all pairs": 8000,
}


def measured(model: CausalLM, rows: int, context: int, repeats: int, device: str) -> dict[str, float | str]:
    """The time of a gradient of random tokens, after one that prepares."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(5, model.adapted.vocabulary, (rows, context + 1), generator=generator).to(device)
    y = torch.full((rows,), float(context), device=device)
    model = model.fit_to(x, y)
    w, weight = model.initial(0, torch.float32, device), torch.full((rows,), 1 / rows, device=device)
    first = _timed(model, w, x, y, weight)
    seconds = min(_timed(model, w, x, y, weight) for _ in range(repeats))
    work = rows * context * model.adapted.flops_per_token(context)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {
        "first_seconds": round(first, 3),
        "seconds": round(seconds, 4),
        "tokens_per_second": round(rows * context / seconds),
        "tflops": round(work / seconds / 1e12, 2),
        "peak_gib": round(peak, 2),
        **{f"minutes of {name}": round(count * seconds / 60, 1) for name, count in GRADIENTS.items()},
    }


def _timed(model: CausalLM, *arguments: torch.Tensor) -> float:
    started = time.perf_counter()
    model.grad(*arguments).sum().item()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--micro-batch", default="50,100,200", help="rows at a time, by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="not compiled only")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = list(map(int, given.micro_batch.split(",")))
    for compiled, size in itertools.product((False, True)[: 2 - given.plain], sizes):
        model = causal_lm(given.model, precision="auto", micro_batch=size, compiled=compiled)
        line: dict[str, float | str] = {"compiled": compiled, "micro_batch": size}
        try:
            line |= measured(model, given.rows, given.context, given.repeats, device)
        except torch.cuda.OutOfMemoryError:
            line["failed"] = "out of memory"
        print(json.dumps(line), flush=True)
        del model
        torch.cuda.empty_cache()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
