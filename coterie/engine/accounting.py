"""What noisy answers cost in privacy, by Google's `dp-accounting`."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from coterie._core import extras
from coterie._core.errors import SettingError

ORDERS = [1 + k / 10 for k in range(5, 100, 5)] + list(range(12, 64)) + [80, 128, 256, 512]
MOST_NOISE = 1e6


def check(epsilon: float, delta: float) -> None:
    """Raise `SettingError` unless 0 < epsilon and 0 < delta < 1."""
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise SettingError(f"epsilon is {epsilon}; it must be a positive number, such as 4")
    if not 0 < delta < 1:
        raise SettingError(f"delta is {delta}; it must be between 0 and 1, such as 1e-5")


@functools.lru_cache(maxsize=4096)
def epsilon(noise: float, times: int, delta: float, rate: float = 1.0) -> float:
    """Return the privacy cost of noisy sums.

    Parameters
    ----------
    noise
        Standard deviation of the noise, in units of what one client or row can change.
    times
        Number of sums.
    delta
        Probability that is left out of the guarantee.
    rate
        Probability with which a row is in a sum at all (Poisson sampling).

    Returns
    -------
    float
        epsilon: from the privacy loss itself where every sum has everybody, else from Rényi divergences.

    Examples
    --------
    >>> from coterie.engine.accounting import epsilon
    >>> round(epsilon(1.0, 1, 1e-5), 2), round(epsilon(10.0, 100, 1e-5), 2)
    (4.38, 4.38)
    """
    if times == 0:
        return 0.0
    tools = _Tools.load()
    if rate < 1.0:
        accountant = tools.accountant(ORDERS)
        accountant.compose(
            tools.events.PoissonSampledDpEvent(rate, tools.events.GaussianDpEvent(noise)), times
        )
        return float(accountant.get_epsilon(delta))
    loss = tools.gaussian(noise / math.sqrt(times))  # many Gaussian sums are one with less noise
    low, high = 0.0, 1.0
    while loss.get_delta_for_epsilon(high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if loss.get_delta_for_epsilon(middle) <= delta else (middle, high)
    return high


@functools.lru_cache(maxsize=4096)
def noise_for(target: float, delta: float, times: int, rate: float = 1.0) -> float:
    """Return the least noise with which `times` sums cost at most `target`, to one part in a thousand.

    Parameters
    ----------
    target
        epsilon.
    delta, times, rate
        As in `epsilon`.

    Examples
    --------
    >>> from coterie.engine.accounting import epsilon, noise_for
    >>> 3.99 < epsilon(noise_for(4.0, 1e-5, 50), 50, 1e-5) <= 4.0
    True
    """
    check(target, delta)
    low, high = 1e-2, 1.0
    while epsilon(high, times, delta, rate) > target:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise SettingError(f"no noise makes {times} sums cost only epsilon = {target:g}")
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon(middle, times, delta, rate) <= target else (middle, high)
    return high


class _Tools:
    """What is used of `dp-accounting`."""

    def __init__(self) -> None:
        extras.require("privacy", "differential privacy")
        from dp_accounting import dp_event
        from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
        from dp_accounting.rdp import RdpAccountant

        logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of orders that it leaves out
        self.events: Any = dp_event
        self.gaussian: Any = GaussianPrivacyLoss
        self.accountant: Any = RdpAccountant

    @classmethod
    @functools.cache
    def load(cls) -> _Tools:
        """Import the library, once."""
        return cls()
