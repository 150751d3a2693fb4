"""Networks of a user's own on one GPU beside plain PyTorch: `python -m benchmarks.own_networks [--json FILE]`.

A ResNet-18 with group norm, a ViT of 6 layers of 256 and a small transformer over tokens; eight clients, five steps of
128 rows a round. `fit` has its defaults (FedAvg). The plain loop trains one client after the other with autograd and
SGD in place, eager and with torch.compile. TFLOP/s count the products of forward and backward pass as torch does.
Needs torch with CUDA, numpy and scipy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from coterie import Federation, fit, models
from coterie.algorithms import make
from coterie.models import gradient_backends

LR = 0.002  # small enough for the transformers
CLIENTS, STEPS, BATCH, ROWS, CLASSES = 8, 5, 128, 512, 10
TOKENS, LENGTH = 256, 128


class Residual(nn.Module):
    """Two convolutions with group norm beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(32, after) for _ in range(2))
        straight = before == after and stride == 1
        self.shortcut = nn.Identity() if straight else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[0](self.first(x)).relu()
        found: Tensor = (self.norms[1](self.second(inner)) + self.shortcut(x)).relu()
        return found


def resnet18() -> nn.Module:
    """Return a ResNet-18 for images of 32 x 32."""
    widths = (64, 64, 128, 256, 512)
    stages = [
        block
        for before, after in pairwise(widths)
        for block in (Residual(before, after, 1 if before == after else 2), Residual(after, after, 1))
    ]
    stem = (nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU())
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))


class Encoder(nn.Module):
    """Patches of an image, or tokens, through six layers of 256."""

    def __init__(self, patch: int | None) -> None:
        super().__init__()
        places = (32 // patch) ** 2 if patch else LENGTH
        self.embed: nn.Module = nn.Conv2d(3, 256, patch, patch) if patch else nn.Embedding(TOKENS, 256)
        self.place = nn.Parameter(0.02 * torch.randn(places, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x.flatten(2).mT if x.dim() == 4 else x
        found: Tensor = self.head(self.layers(x + self.place).mean(1))
        return found


def vit() -> nn.Module:
    """Return a ViT with patches of 4 x 4 pixels."""
    return Encoder(4)


def transformer() -> nn.Module:
    """Return a transformer over tokens."""
    return Encoder(None)


NETWORKS: dict[str, Callable[[], nn.Module]] = {"resnet18": resnet18, "vit": vit, "transformer": transformer}


def rows(name: str) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of all clients."""
    draw = torch.Generator().manual_seed(0)
    count = CLIENTS * ROWS
    x = (
        torch.randint(0, TOKENS, (count, LENGTH), generator=draw)
        if name == "transformer"
        else torch.randn(count, 3, 32, 32, generator=draw)
    )
    return x, torch.randint(0, CLASSES, (count,), generator=draw)


def flops(name: str) -> float:
    """Return the products of a round, in floating-point operations."""
    from torch.utils.flop_counter import FlopCounterMode

    module, (x, y) = NETWORKS[name](), rows(name)
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(module(x[:4]), y[:4]).backward()
    return float(counter.get_total_flops()) / 4 * BATCH * STEPS * CLIENTS


def timed(round_: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a round, after three that do not count."""
    for _ in range(3):
        round_()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        round_()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def plain(name: str, precision: str, compiled: bool, repeats: int) -> float:
    """Return seconds of a round of FedAvg in plain PyTorch."""
    module = NETWORKS[name]().cuda()
    x, y = (part.cuda().view(CLIENTS, ROWS, *part.shape[1:]) for part in rows(name))
    parameters: list[Tensor] = list(module.parameters())
    shared = [one.detach().clone() for one in parameters]
    forward = torch.compile(module) if compiled else module
    context = torch.autocast("cuda", torch.bfloat16) if precision == "bf16" else nullcontext()

    def round_() -> None:
        total = [torch.zeros_like(one) for one in shared]
        for k in range(CLIENTS):
            with torch.no_grad():
                torch._foreach_copy_(parameters, shared)
            for _ in range(STEPS):
                drawn = torch.randint(0, ROWS, (BATCH,), device="cuda")
                with context:
                    loss = functional.cross_entropy(forward(x[k, drawn]), y[k, drawn])
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-LR)
            with torch.no_grad():
                torch._foreach_add_(total, parameters, alpha=1 / CLIENTS)
        shared[:] = total

    return timed(round_, repeats)


def ours(name: str, precision: str, repeats: int) -> dict[str, Any]:
    """Return seconds of a round in `fit` with its defaults: what more rounds add, once nothing is measured any more."""
    x, y = rows(name)
    model = models.network(NETWORKS[name], precision=precision)
    sizes, names = torch.full((CLIENTS,), ROWS), [str(k) for k in range(CLIENTS)]
    fed = Federation.from_rows(x, y, sizes, model=model, names=names, device="cuda")
    algorithm = make("fedavg", lr=LR, steps=STEPS, batch=BATCH)

    def whole(rounds: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        fit(fed, algorithm, rounds, evaluate_every=0)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    started = time.perf_counter()
    whole(2)
    gradient_backends.PATIENCE, first = (
        0.0,
        time.perf_counter() - started,
    )  # what waits for half a minute comes now
    fed.model.backends._late.update(dict.fromkeys(fed.model.backends._late, 0.0))
    whole(2)
    tried = time.perf_counter() - started - first
    took = statistics.median((whole(2 + repeats) - whole(2)) / repeats for _ in range(3))
    return {"seconds": took, "chosen": dict(fed.model.decisions), "first_s": first, "trial_s": tried}


def lines(names: list[str], precisions: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each network and precision."""
    for name in names:
        work = flops(name)
        for precision in precisions:
            eager = plain(name, precision, False, repeats)
            compiled = plain(name, precision, True, repeats)
            found = ours(name, precision, repeats)
            yield {
                "network": name,
                "precision": precision,
                "plain_eager_s": eager,
                "plain_compiled_s": compiled,
                **found,
                "times_compiled": compiled / found["seconds"],
                "times_eager": eager / found["seconds"],
                "tflops": work / found["seconds"] / 1e12,
            }


def profile(name: str, precision: str) -> str:
    """Return a table of the kernels that take the most time in two rounds of `fit`."""
    x, y = rows(name)
    model = models.network(NETWORKS[name], precision=precision, compiled=True, stacked=False)
    sizes, names = torch.full((CLIENTS,), ROWS), [str(k) for k in range(CLIENTS)]
    fed = Federation.from_rows(x, y, sizes, model=model, names=names, device="cuda")
    algorithm = make("fedavg", lr=LR, steps=STEPS, batch=BATCH)
    fit(fed, algorithm, 2, evaluate_every=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        fit(fed, algorithm, 2, evaluate_every=0)
    return str(seen.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=80))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(NETWORKS))
    parser.add_argument("--precisions", type=lambda text: text.split(","), default=["full", "bf16"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="file for the kernels of ResNet-18 in bfloat16")
    arguments = parser.parse_args()
    found = []
    for line in lines(arguments.only, arguments.precisions, arguments.repeats):
        found.append(line)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in line.items()}, flush=True)
        if arguments.json:
            about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "clients": CLIENTS}
            arguments.json.write_text(json.dumps({**about, "lines": found}, indent=2) + "\n")
    if arguments.profile:
        arguments.profile.write_text(profile("resnet18", "bf16") + "\n")


if __name__ == "__main__":
    main()
