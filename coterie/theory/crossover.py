"""Where the risks of two methods cross, in the linear model of `coterie.theory.risk`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy  # loads its parts when they are first used

from coterie._core.errors import SettingError
from coterie.theory import flix_risk, risk
from coterie.theory.ridge_limits import Risk

METHODS: dict[str, Callable[..., Risk]] = {
    "fedavg": risk.fedavg,
    "local": risk.local,
    "ridge-local": risk.ridge_local,
    "ftfa": risk.ftfa,
    "rtfa": risk.rtfa,
    "ditto": risk.ditto,
    "maml-fl": risk.maml_fl,
    "pfedme": risk.pfedme,
    "flix": flix_risk.flix,
}
NUMBERS = ("gamma", "r2", "rho2", "sigma2", "clients")
ALONE = ("local", "ridge-local")  # methods without a centre
GRID = 241  # points that are looked at before roots are refined


def predict(method: str, numbers: dict[str, Any], **settings: Any) -> Risk:
    """Predict the risk of a method by name.

    Parameters
    ----------
    method
        A name in `METHODS`.
    numbers
        gamma, r2, rho2, sigma2, and clients if they are finite; what the method does not need is left out.
    **settings
        Other arguments of the method, such as lam or spectrum.

    Returns
    -------
    Risk
        Bias and variance.

    Examples
    --------
    >>> from coterie.theory import crossover
    >>> crossover.predict("ftfa", {"gamma": 2.0, "r2": 1.0, "rho2": 2.0, "sigma2": 0.25}).risk
    0.75
    """
    if method not in METHODS:
        raise SettingError(f"no risk of {method!r}; choose {', '.join(METHODS)}")
    missing = [name for name in NUMBERS[:4] if numbers.get(name) is None]
    if missing:
        raise SettingError(f"the risk of {method} needs {' and '.join(missing)}")
    left_out = {"r2", "clients"} if method in ALONE else {"rho2"} if method != "flix" else set()
    given = {name: value for name, value in numbers.items() if name not in left_out and value is not None}
    return METHODS[method](**given, **settings)


def crossings(
    first: str, second: str, over: str, numbers: dict[str, Any], low: float, high: float, **settings: Any
) -> list[float]:
    """Return the values of one number at which two methods have the same risk.

    Parameters
    ----------
    first
        A name in `METHODS`.
    second
        Another.
    over
        The number that varies: "gamma", "r2", "rho2", "sigma2" or "clients". If r2 varies, rho2 - r2, the squared
        length of the centre, stays.
    numbers
        All numbers; that of `over` is not looked at, except for r2.
    low
        Smallest value, positive.
    high
        Largest value.
    **settings
        Other arguments of both methods, such as spectrum.

    Returns
    -------
    list of float
        In increasing order; empty if one method is better in the whole range.

    Examples
    --------
    >>> from coterie.theory import crossover
    >>> numbers = {"gamma": 2.0, "r2": 1.0, "rho2": 2.0, "sigma2": 0.25}
    >>> [round(value, 6) for value in crossover.crossings("ftfa", "fedavg", "sigma2", numbers, 0.01, 10.0)]
    [0.5]
    """
    if over not in NUMBERS:
        raise SettingError(f"cannot vary {over!r}; choose {', '.join(NUMBERS)}")
    if not 0 < low < high:
        raise SettingError(f"the range from {low} to {high} must be positive and increasing")

    def gap(value: Any) -> Any:
        at = varied(numbers, over, value)
        one, two = predict(first, at, **settings).risk, predict(second, at, **settings).risk
        with np.errstate(invalid="ignore"):
            return np.where(np.isinf(one) & np.isinf(two), np.nan, one - two)

    grid = np.geomspace(low, high, GRID)
    heights = np.asarray(gap(grid))
    found = [float(x) for x, height in zip(grid, heights, strict=True) if height == 0]
    for k in range(GRID - 1):
        if heights[k] * heights[k + 1] < 0 and np.isfinite(heights[k : k + 2]).all():
            found.append(
                float(scipy.optimize.brentq(lambda x: float(gap(x)), grid[k], grid[k + 1], xtol=1e-12))
            )
    return sorted(found)


def varied(numbers: dict[str, Any], over: str, value: Any) -> dict[str, Any]:
    """Return the numbers with one replaced; with r2 the length of the clients' parameters moves too.

    Parameters
    ----------
    numbers
        gamma, r2, rho2, sigma2, clients.
    over
        The one to replace.
    value
        Its value or values.

    Returns
    -------
    dict
        A copy.

    Examples
    --------
    >>> from coterie.theory import crossover
    >>> crossover.varied({"r2": 1.0, "rho2": 3.0}, "r2", 2.0)
    {'r2': 2.0, 'rho2': 4.0}
    """
    at = {**numbers, over: value}
    if over == "r2" and numbers.get("rho2") is not None:
        at["rho2"] = numbers["rho2"] - numbers["r2"] + value
    return at
