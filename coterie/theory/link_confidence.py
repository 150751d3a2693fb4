"""How sure is it that two clients gain by pooling their rows? A posterior probability for each pair of a group.

Pooling pays for two alike clients while D < s, with D the squared distance between the gradients of their distributions
at one point and s the noise of the difference (see `pair_tests`). How much clients differ is learned from all pairs
together: D/s is a mixture over a grid of scales, none included, whose weights are found by EM (adaptive shrinkage,
Stephens 2017). A pair is then judged by its own distance and by what is usual among the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALES = (0.0, *(2 ** (k / 3) for k in range(-12, 22)))  # of D/s
STEPS = 100  # of EM
MOST = 20_000  # pairs that it uses
PRIOR = 1.0  # pairs that each scale is given before looking, so that few pairs decide nothing


def gain_probability(ratio: Tensor, dimensions: float, steps: int = STEPS) -> Tensor:
    """Return the probability that D < s for every pair.

    Parameters
    ----------
    ratio
        Squared distance of the two gradients that are seen, over s, [P].
    dimensions
        Number q of dimensions that the noise fills.
    steps
        Steps of EM for the weights of the scales.

    Returns
    -------
    Tensor
        Probabilities, float64 [P].

    Examples
    --------
    >>> import torch
    >>> from coterie.theory.link_confidence import gain_probability
    >>> near = gain_probability(torch.tensor([0.9, 1.1, 1.0, 1.0, 0.8, 6.0]), dimensions=8.0)
    >>> (near > 0.9).tolist()
    [True, True, True, True, True, False]
    """
    from scipy.stats import ncx2

    if len(ratio) == 0:
        return torch.zeros(0, dtype=torch.float64)
    q, seen = max(1.0, dimensions), ratio.double().cpu().unsqueeze(1)
    scales = torch.tensor(SCALES, dtype=torch.float64)
    log_likelihood = -0.5 * q * (torch.log1p(scales) + seen / (1 + scales))
    share, some = torch.full_like(scales, 1 / len(scales)), log_likelihood[:: -(-len(seen) // MOST)]
    for _ in range(steps):
        counts = torch.softmax(some + share.log(), 1).sum(0) + PRIOR / len(scales)
        share = counts / counts.sum()
    posterior = torch.softmax(log_likelihood + share.log(), 1)
    kept = scales / (1 + scales)  # posterior mean of the difference over the one that is seen
    below = torch.ones_like(posterior)
    below[:, 1:] = torch.from_numpy(ncx2.cdf((q / kept[1:]).numpy(), q, (q * kept[1:] * seen).numpy()))
    return (posterior * below.nan_to_num(nan=0.0)).sum(1)
