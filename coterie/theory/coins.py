"""Coins of the asynchronous methods for known clusters: who communicates when, and the resulting step sizes.

Lyu, Hanzely, Kolar (2022), sections 3 and 4. Numbers per cluster are [k, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie._core.errors import SettingError
from coterie.theory.cluster_penalty import Penalty, column

_SMALLEST_CHANCE = 1e-9  # of a step alone, below which a run would never take one


@dataclass(frozen=True)
class Coins:
    """Probabilities of communication: all clusters with p0; else cluster j inside with p_j; else clients step alone.

    Parameters
    ----------
    p0
        Probability that all clusters communicate.
    p
        Probability that each cluster communicates inside, given that not all do, [k, 1].
    tau
        Share of the penalty to the cluster's centre that is applied when all communicate, [k, 1].

    Examples
    --------
    >>> from coterie.theory.coins import Coins
    >>> from coterie.theory.cluster_penalty import Penalty
    >>> coins = Coins.of(Penalty.of([0, 0, 1], gamma=1.0, alpha=0.5), p0=0.2, p=0.3)
    >>> coins.expected_counts(100)["global"], coins.tau.flatten().round(decimals=3).tolist()
    (20.0, [0.294, 0.294])
    """

    p0: float
    p: Tensor
    tau: Tensor

    @classmethod
    def of(
        cls,
        penalty: Penalty,
        p0: float,
        p: float | tuple[float, ...],
        tau: float | tuple[float, ...] | None = None,
    ) -> Coins:
        """Return coins checked against the penalty: no branch that it needs may have probability zero.

        Parameters
        ----------
        penalty
            The penalty.
        p0
            Probability that all clusters communicate.
        p
            Probability that a cluster communicates inside: one number, or one per cluster.
        tau
            Share of the penalty applied when all communicate, by default `balanced_share`.

        Returns
        -------
        Coins
            The coins.

        Raises
        ------
        SettingError
            If a probability is out of range, or part of the penalty would never be applied.
        """
        k, alpha = len(penalty.alpha), penalty.alpha
        inside = column("p", p, k, alpha.device)
        if not 0 <= p0 < 1:
            raise SettingError(f"p0 = {p0}; it must be below 1, or no client ever looks at its own data")
        if not bool(((inside >= 0) & (inside < 1)).all()):
            raise SettingError(f"p = {p}; it must lie in [0, 1), or clients never look at their own data")
        if p0 == 0 and bool((alpha > 0).any()):
            raise SettingError(
                "p0 = 0, but clusters are tied to the common centre; choose p0 above 0, "
                "or alpha = 0 (lambda_ = 0) for independent clusters"
            )
        share = balanced_share(p0, inside) if tau is None else column("tau", tau, k, alpha.device)
        if not bool(((share >= 0) & (share <= 1)).all()):
            raise SettingError(f"tau = {tau}; it must lie between 0 and 1")
        never = (alpha < 1) & torch.where(share < 1, inside == 0, False)
        if bool(never.any()):
            raise SettingError(
                f"cluster {int(never.flatten().nonzero()[0])} never talks inside (p = 0) but leaves part of its "
                "penalty to that (tau below 1); choose p above 0 or tau = 1"
            )
        if p0 == 0 and bool((share > 0).any()):
            raise SettingError(
                "p0 = 0, but tau leaves part of the penalty to rounds of all clusters; choose tau = 0"
            )
        return cls(p0, inside, share)

    @classmethod
    def best(cls, penalty: Penalty, smoothness: float) -> Coins:
        """Return the probabilities with the smallest expected smoothness.

        Parameters
        ----------
        penalty
            The penalty.
        smoothness
            Smoothness of the clients' losses.

        Returns
        -------
        Coins
            The coins.
        """
        far, near = strengths(penalty)
        _check_balance(max(far, near), smoothness)
        if near > far:
            p0 = 2 * far / (far + near + smoothness)
            return cls.of(penalty, p0, (near - far) / (near - far + smoothness))
        return cls.of(penalty, 2 * far / (2 * far + smoothness), 0.0)

    @classmethod
    def best_one(cls, penalty: Penalty, smoothness: float) -> Coins:
        """Return the best probability with a single coin for all clusters: p_j = 0 and tau = 1.

        Parameters
        ----------
        penalty
            The penalty.
        smoothness
            Smoothness of the clients' losses.

        Returns
        -------
        Coins
            The coins.
        """
        strongest = max(strengths(penalty))
        _check_balance(strongest, smoothness)
        return cls.of(penalty, 2 * strongest / (2 * strongest + smoothness), 0.0)

    def far(self, penalty: Penalty) -> Tensor:
        """Return the strength of the term to the common centre when all communicate, per client [n, 1]."""
        return _divided(penalty.gamma * penalty.alpha[penalty.clusters], self.p0)

    def near(self, penalty: Penalty) -> Tensor:
        """Return the strength of the term to the cluster's centre when all communicate, per client [n, 1]."""
        share = (self.tau * (1 - penalty.alpha))[penalty.clusters]
        return _divided(penalty.gamma * share, self.p0)

    def inside(self, penalty: Penalty) -> Tensor:
        """Return the strength of the term to the cluster's centre when that cluster communicates, per client [n, 1]."""
        share = ((1 - self.tau) * (1 - penalty.alpha))[penalty.clusters]
        chance = ((1 - self.p0) * self.p)[penalty.clusters]
        return penalty.gamma * torch.where(chance > 0, share / chance.where(chance > 0, 1.0), 0.0)

    @property
    def alone(self) -> Tensor:
        """Factor of the loss's gradient in a step alone, [k, 1]."""
        return 1 / ((1 - self.p0) * (1 - self.p))

    def smoothness(self, penalty: Penalty, smoothness: float) -> float:
        """Return the expected smoothness: the second moment of the oracle is at most twice this times F(u) - F(best).

        Parameters
        ----------
        penalty
            The penalty.
        smoothness
            Smoothness of the clients' losses.

        Returns
        -------
        float
            The expected smoothness.
        """
        strongest = penalty.gamma.new_zeros(len(penalty.alpha)).scatter_reduce_(
            0, penalty.clusters, penalty.gamma.squeeze(-1), "amax"
        )
        rest = (1 - penalty.alpha).squeeze(-1) * strongest
        chance = (self.p0 + 2 * (1 - self.p0) * self.p).squeeze(-1)
        inside = torch.where(rest > 0, 2 * rest / chance.where(rest > 0, 1.0), 0.0)
        far, _ = strengths(penalty)
        together = 2 * far / self.p0 if far > 0 else 0.0
        return max(together, float(inside.max()), smoothness * float(self.alone.max()))

    def expected_counts(self, rounds: int) -> dict[str, float]:
        """Return the expected communication of the first cluster in `rounds` rounds, by the names of `count_rounds`."""
        p0, p = self.p0, float(self.p[0])
        return {
            "global": p0 * rounds,
            "global_starts": p0 * (1 - p0) * rounds,
            "within": (1 - p0) * p * rounds,
            "within_starts": (1 - p0) * p * (1 - p) * rounds,
            "within_fresh": (1 - p0) ** 2 * p * (1 - p) * rounds,
        }


def balanced_share(p0: float, p: Tensor) -> Tensor:
    """Return tau_j = p0 / (p0 + 2 (1 - p0) p_j): 1 where p_j = 0, 0 where p0 = 0.

    Parameters
    ----------
    p0
        Probability that all clusters communicate.
    p
        Probability that each cluster communicates inside, [k, 1].

    Returns
    -------
    Tensor
        [k, 1].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.coins import balanced_share
    >>> balanced_share(0.5, torch.tensor([[0.0], [0.5]])).tolist()
    [[1.0], [0.5]]
    """
    total = p0 + 2 * (1 - p0) * p
    return torch.where(p == 0, 1.0 if p0 > 0 else 0.0, p0 / total.where(total > 0, 1.0))


def renewal(coins: Coins, steps_worth: float = 20.0) -> float:
    """Return rho, the probability of a new anchor that reaches an accuracy at the least cost.

    For every rho in (0, 1] the method needs O(1/rho + sqrt(Lcal / (rho mu))) rounds (Theorem 4.3). A round costs p0 +
    rho communications and a step of computation, of which `steps_worth` cost as much as one communication. The
    product, (p0 + rho + 1/steps_worth) / sqrt(rho) where the second term leads, is least at p0 + 1/steps_worth. The
    p0 (1 - p0) of communication alone lets the method stall where losses are much steeper than pulls: p0 is then
    tiny, and so is the chance of ever seeing a new anchor.

    Parameters
    ----------
    coins
        The coins.
    steps_worth
        Steps that cost as much as a communication; infinity counts communication only.

    Returns
    -------
    float
        The probability.

    Examples
    --------
    >>> from coterie.theory.cluster_penalty import Penalty
    >>> from coterie.theory.coins import Coins, renewal
    >>> round(renewal(Coins.of(Penalty.of([0, 0, 1], gamma=1.0, alpha=0.5), p0=0.001, p=0.01)), 4)
    0.051
    """
    talk = coins.p0 * (1 - coins.p0) if coins.p0 > 0 else float((coins.p * (1 - coins.p)).max())
    return min(1.0, talk + 1 / steps_worth)


def strengths(penalty: Penalty) -> tuple[float, float]:
    """Return C1 = max alpha_j gamma_i and C2 = max (1 - alpha_j) gamma_i.

    Examples
    --------
    >>> from coterie.theory.coins import strengths
    >>> from coterie.theory.cluster_penalty import Penalty
    >>> strengths(Penalty.of([0, 0, 1], gamma=2.0, alpha=0.25))
    (0.5, 1.5)
    """
    share = penalty.alpha[penalty.clusters]
    return float((share * penalty.gamma).max()), float(((1 - share) * penalty.gamma).max())


def count_rounds(everyone: Tensor, inside: Tensor) -> dict[str, int]:
    """Count communication in all the senses of "communication rounds".

    Parameters
    ----------
    everyone
        Whether all clusters communicated in each round, bool [T].
    inside
        The coin of one cluster in each round, bool [T].

    Returns
    -------
    dict of int
        `global`, `within`: raw rounds. `global_starts`, `within_starts`: beginnings of runs (within: among the
        rounds that are not global), which the paper counts. `within_fresh`: within rounds right after a step alone.

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.coins import count_rounds
    >>> everyone = torch.tensor([1, 1, 0, 0, 0], dtype=torch.bool)
    >>> count_rounds(everyone, torch.tensor([0, 0, 1, 0, 1], dtype=torch.bool))
    {'global': 2, 'global_starts': 1, 'within': 2, 'within_starts': 2, 'within_fresh': 1}
    """
    start = everyone & ~torch.cat([everyone.new_zeros(1), everyone[:-1]])
    within = ~everyone & inside
    kept = inside[~everyone]
    runs = kept & ~torch.cat([kept.new_zeros(1), kept[:-1]])
    alone = ~everyone & ~inside
    fresh = within & torch.cat([alone.new_zeros(1), alone[:-1]])
    found = {
        "global": everyone,
        "global_starts": start,
        "within": within,
        "within_starts": runs,
        "within_fresh": fresh,
    }
    return {name: int(value.sum()) for name, value in found.items()}


def _divided(strength: Tensor, chance: float) -> Tensor:
    return strength / chance if chance > 0 else torch.zeros_like(strength)


def _check_balance(strongest: float, smoothness: float) -> None:
    """Raise an error if losses are flat, or so weak beside the pulls that no coin would ever fall to them."""
    if not smoothness > 0:
        raise SettingError(f"the losses have smoothness {smoothness:g}; they must be curved")
    if strongest > smoothness / _SMALLEST_CHANCE:
        raise SettingError(
            f"gamma = {strongest:g} is too strong beside losses of smoothness {smoothness:.3g}: clients would look at "
            f"their own data less than once in {1 / _SMALLEST_CHANCE:g} rounds. Take gamma below "
            f"{smoothness / _SMALLEST_CHANCE:.3g}, or fedavg, which gives all clients one model"
        )
