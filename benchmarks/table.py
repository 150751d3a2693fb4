"""The results as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.environments import BY_NAME, Peer


def markdown(result: dict[str, Any]) -> str:
    """One table of all workloads and peers, then the machine's limits and what could not be run."""
    about = result["machine"]
    lines = [
        f"{about['processor']}, {about['cores']} cores, torch {about['torch']}.",
        "",
        "| workload | | ms per round | times ours | least, times ours | CPU ms | start-up s | peak MB | difference |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, work in result["workloads"].items():
        for peer, line in work["peers"].items():
            lines.append(_line(name if peer == "ours" else "", BY_NAME[peer].title, line))
    lines += [
        "",
        "Libraries get the rows through their own loaders: FedLab, FLGo and Flower through torch's DataLoader, as in "
        'their examples, fluke, pfl and FedJAX through classes of their own. "Ready-made minibatches" are handed over '
        "by one gather each, the strictest comparison. CPU and memory of Flower are its server's, without Ray's "
        "processes.",
        "",
        *(_about(name, work) for name, work in result["workloads"].items()),
    ]
    limit = result["limits"]
    lines += [
        "",
        f"Machine: {limit['gemm_gflops']:.0f} GFLOP/s in large products, {limit['copy_gb_s']:.0f} GB/s in copies.",
    ]
    for name, shares in result["shares"].items():
        parts = ", ".join(f"{100 * value:.0f} % {what}" for what, value in shares.items())
        lines.append(
            f"{name} runs at {parts} (its fastest round, counted as the products of the plain algorithm)."
        )
    lines += [f"Not run: {BY_NAME[peer].title}: {why}." for peer, why in result["missing"].items()]
    return "\n".join(lines) + "\n"


def _about(name: str, work: dict[str, Any]) -> str:
    """What was run, and how many times ours the fastest of each kind takes."""
    found = [
        (BY_NAME[peer], line["ratio"])
        for peer, line in work["peers"].items()
        if peer != "ours" and "failed" not in line
    ]
    kinds = {
        "PyTorch library": [
            ratio for peer, ratio in found if peer.environment and _torch(peer) and not peer.ready
        ],
        "PyTorch with ready-made minibatches": [
            ratio for peer, ratio in found if _torch(peer) and peer.ready
        ],
        "JAX": [ratio for peer, ratio in found if not _torch(peer)],
    }
    fastest = [f"{kind} {min(ratios):.1f}" for kind, ratios in kinds.items() if ratios]
    text = f"- {name}: {work['title']} ({work['date']}, load {work['load']:.1f})."
    return text + (f" The fastest, times ours: {', '.join(fastest)}." if fastest else "")


def _torch(peer: Peer) -> bool:
    return peer.kind == "torch"


def _line(name: str, title: str, line: dict[str, Any]) -> str:
    if "failed" in line:
        return f"| {name} | {title} | {line['failed'].replace('|', '/')[:120]} | | | | | | |"
    return (
        f"| {name} | {title} | {_ms(line['seconds'])} | {line['ratio']:.1f} | {line['ratio_least']:.1f} | "
        f"{_ms(line['cpu_seconds'])} | {line['startup']:.1f} | {line['peak_mb']:.0f} | {line['difference']:.0e} |"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"
