"""Ask theory without data: predicted errors, rounds to an accuracy, and where one method overtakes another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from coterie._core.errors import SettingError
from coterie.cli import console
from coterie.cli.arguments import JsonOption, require_place, write_json
from coterie.report import theory as show
from coterie.report.plots import save_plot
from coterie.theory import crossover as crossings
from coterie.theory import flix_rounds, learned_centre
from coterie.theory.spectrum import Spectrum

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Ask theory without data: predicted errors, rounds, crossovers.",
    epilog="Example: coterie theory risk --gamma 2 --r2 1 --rho2 2 --noise 0.25",
)

GammaOption = Annotated[float, typer.Option(min=1e-9, metavar="X", help="features per row of a client")]
DistanceOption = Annotated[
    float, typer.Option("--r2", min=0, metavar="X", help="squared distance of clients from their centre")
]
LengthOption = Annotated[
    float, typer.Option("--rho2", min=0, metavar="X", help="squared length of the clients' parameters")
]
NoiseOption = Annotated[float, typer.Option(min=0, metavar="X", help="variance of the noise")]
CountOption = Annotated[
    float | None,
    typer.Option(
        "--clients", min=1, metavar="N", help="clients that learn the centre; very many if not given"
    ),
]
SpectrumOption = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="eigenvalues of the features' covariance, such as 0.4,1.6"),
]
OverOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="vary gamma, r2, rho2, noise or clients")
]
LowOption = Annotated[float, typer.Option("--from", min=1e-9, metavar="X", help="smallest value")]
HighOption = Annotated[float, typer.Option("--to", min=1e-9, metavar="X", help="largest value")]
PlotOption = Annotated[Path | None, typer.Option(metavar="FILE", help="write a web page with a plot")]


@app.callback()
def theory() -> None:
    """Ask theory without data: predicted errors, rounds, crossovers."""


@app.command(epilog="Example: coterie theory risk --gamma 2 --r2 1 --rho2 2 --noise 0.25")
def risk(
    gamma: GammaOption,
    r2: DistanceOption,
    rho2: LengthOption,
    noise: NoiseOption,
    clients: CountOption = None,
    spectrum: SpectrumOption = None,
    over: OverOption = "gamma",
    low: LowOption = 0.1,
    high: HighOption = 10.0,
    plot: PlotOption = None,
    json: JsonOption = None,
) -> None:
    """Predict the error of every method for clients with linear models."""
    for place in (plot, json):
        require_place(place)
    numbers = _numbers(gamma, r2, rho2, noise, clients)
    settings = _settings(spectrum)
    found = {name: crossings.predict(name, numbers, **settings) for name in crossings.METHODS}
    console.show(*show.risk_tables(numbers, found))
    name = _over(over or "gamma")
    if plot is not None:
        grid = np.geomspace(low, high, 100).tolist()
        at = crossings.varied(numbers, name, np.array(grid))
        curves = {method: crossings.predict(method, at, **settings).risk for method in found}
        save_plot(plot, show.risk_plot(over or "gamma", grid, curves))
    write_json(json, {name: {"bias": one.bias, "variance": one.variance} for name, one in found.items()})


@app.command(epilog="Example: coterie theory rounds --smoothness 4 --convexity 0.1 --accuracy 1e-4")
def rounds(
    smoothness: Annotated[
        float, typer.Option(min=0, metavar="L", help="largest curvature of a client's loss")
    ],
    convexity: Annotated[float, typer.Option(min=0, metavar="MU", help="smallest curvature, such as l2")],
    accuracy: Annotated[float, typer.Option(metavar="X", help="wanted gap to the loss of the best mixture")],
    gap: Annotated[float, typer.Option(metavar="X", help="gap at the start, or a bound on it")] = 1.0,
    alpha: Annotated[float, typer.Option(min=0, max=1, metavar="X", help="weight of the shared model")] = 0.5,
    clients: Annotated[int, typer.Option(min=1, metavar="N", help="number of clients")] = 10,
    features: Annotated[int, typer.Option(min=1, metavar="D", help="number of parameters")] = 100,
    kept: Annotated[
        int, typer.Option(min=1, metavar="K", help="coordinates that diana (rand-K) and ef21 (top-K) send")
    ] = 10,
    plot: PlotOption = None,
    json: JsonOption = None,
) -> None:
    """Predict the rounds and messages of FLIX's solvers to an accuracy."""
    for place in (plot, json):
        require_place(place)
    if convexity == 0:
        raise SettingError(f"theory rounds: {flix_rounds.NOT_STRONGLY_CONVEX}")
    if convexity > smoothness or kept > features or not accuracy > 0:
        raise SettingError("theory rounds: needs convexity <= smoothness, kept <= features, accuracy > 0")
    found = show.solver_rounds(smoothness, convexity, alpha, clients, features, kept, gap, accuracy)
    console.show(*show.rounds_tables(found, gap, accuracy))
    if plot is not None:
        save_plot(plot, show.rounds_plot(found, gap))
    write_json(json, [one.__dict__ for one in found])


@app.command(
    epilog="Example: coterie theory crossover ftfa fedavg --over noise --gamma 2 --r2 1 --rho2 2 --noise 1"
)
def crossover(
    first: Annotated[str, typer.Argument(metavar="METHOD", help="a method of `coterie theory risk`")],
    second: Annotated[str, typer.Argument(metavar="METHOD", help="another one")],
    gamma: GammaOption,
    r2: DistanceOption,
    rho2: LengthOption,
    noise: NoiseOption,
    over: OverOption = "noise",
    clients: CountOption = None,
    spectrum: SpectrumOption = None,
    low: LowOption = 0.01,
    high: HighOption = 100.0,
    plot: PlotOption = None,
    json: JsonOption = None,
) -> None:
    """Find where one method overtakes another, and how many clients sharing needs."""
    for place in (plot, json):
        require_place(place)
    numbers, settings, name = _numbers(gamma, r2, rho2, noise, clients), _settings(spectrum), _over(over)
    points = crossings.crossings(first, second, name, numbers, low, high, **settings)
    needed = learned_centre.clients_needed(
        gamma=gamma, r2=r2, sigma2=noise, centre2=max(0.0, rho2 - r2), **settings
    )
    grid = np.geomspace(low, high, 200).tolist()
    at = crossings.varied(numbers, name, np.array(grid))
    curves = {method: crossings.predict(method, at, **settings).risk for method in (first, second)}
    console.show(*show.crossover_tables(over or "noise", points, grid, curves, needed))
    if plot is not None:
        save_plot(plot, show.risk_plot(over or "noise", grid, curves, points))
    write_json(
        json, {"over": over, "points": points, "clients_needed": needed if np.isfinite(needed) else None}
    )


def _numbers(
    gamma: float, r2: float, rho2: float, noise: float, clients: float | None
) -> dict[str, float | None]:
    return {"gamma": gamma, "r2": r2, "rho2": rho2, "sigma2": noise, "clients": clients}


def _over(name: str | None) -> str:
    """Return theory's name of the number that varies."""
    found = "sigma2" if name == "noise" else name or ""
    if found not in crossings.NUMBERS:
        raise SettingError(f"cannot vary {name!r}; choose gamma, r2, rho2, noise or clients")
    return found


def _settings(spectrum: str | None) -> dict[str, Any]:
    if spectrum is None:
        return {}
    try:
        return {"spectrum": Spectrum.of([float(part) for part in spectrum.split(",")])}
    except ValueError:
        raise SettingError(f"--spectrum {spectrum} is not a list of numbers such as 0.4,1.6") from None
