"""Links between a few of many clients, found by their own fits or by gradients at one point for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.algorithms.base import Reveals, setting
from coterie.algorithms.finding import FOLDS, MOST_SUMS
from coterie.algorithms.head_sums import HeadSums
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models.glm import Glm
from coterie.models.linear import Linear
from coterie.theory.cluster_tree import CLEAR, credible
from coterie.theory.pair_tests import bar, evidence, link_distances, pair_bar, shared_noise
from coterie.theory.pooled_sums import ENOUGH
from coterie.theory.sketch import project
from coterie.theory.sparse_links import best_pulls, candidates, link_degrees, merge, neighbourhood_means

SEARCH_ROUNDS = (1, 2, 4, 8, 16)  # in which candidate neighbours of many clients are looked for again
HEAVIEST_NOISE = 4.0  # times the median noise of a row: what of it counts where pulls are chosen
SKETCH = 16  # numbers of a gradient by which they are found


@dataclass(frozen=True)
class ManyLinks(HeadSums):
    """An algorithm whose state may have a sparse W: models [n, d], links [2, m], weights [m], judged [n]."""

    name = ""
    neighbours: int = setting(20, "candidates of each client if there are more than 300", low=1)
    reveals: ClassVar[Reveals] = HeadSums.reveals | {"probe": "gradient", "place": "personal"}

    def among_candidates(self, fed: Federation, s: State, t: int, ids: Tensor | None, pace: float) -> State:
        """w_ij <- clip(w_ij + pace e_ij, 0, 1), e_ij by how much gradients at one point are nearer than the bar."""
        if tells_by_fits(fed):
            return self.among_fits(fed, s, t, ids)
        r = fed.map(self.probe, z=s.models.mean(0), to=ids)
        if len(r) == 0:
            return s
        grads = torch.zeros_like(s.models).index_copy_(0, r.ids, r["grad"])
        noise = torch.zeros(fed.n, dtype=fed.dtype, device=fed.device).index_copy_(0, r.ids, r["noise"][:, 0])
        links, weights = s.links, s.weights
        if t in SEARCH_ROUNDS:
            near = candidates(project(r["grad"], SKETCH, fed.seed), self.neighbours)
            links, weights = merge(links, weights, r.ids[near], fed.n)
        (i, j), rows = links, fed.sizes[:, 0]
        alike_noise = shared_noise(noise[i], rows[i], noise[j], rows[j])
        gain = evidence(link_distances(grads, links), alike_noise, bar(float(r["dimensions"].median())))
        here = torch.zeros(fed.n, dtype=torch.bool, device=fed.device).index_fill_(0, r.ids, True)
        gain = torch.where(here[i] & here[j], gain, 0.0)
        weights = (weights + pace * gain).clamp(0, 1)
        alive = weights > 0
        s = s.replace(links=links[:, alive], weights=weights[alive])
        return self.held_to_alone(fed, s, r.ids) if t >= SEARCH_ROUNDS[-1] else s

    def held_to_alone(self, fed: Federation, s: State, ids: Tensor) -> State:
        """Cut the links of clients that held-out rows say are better off alone; they go on from their own fits.

        Gradients of many clients at one point may not tell them apart: noise grows with the distance from an optimum.
        So each compares, once, the mean model of those it is linked to with what it fits alone. Its rows and those of
        its neighbours speak together, and its own if they are clear.
        """
        company = self._degrees(s.links, fed.n)
        linked = torch.zeros_like(s.judged).index_fill_(0, s.links.flatten().unique(), True)
        r = fed.map(self.fit_alone, x=fed.initial_model(), to=ids[(linked & ~s.judged)[ids]])
        if len(r) == 0:
            return s
        others = (1 + 1 / company).unsqueeze(1) * neighbourhood_means(
            s.models, s.links
        ) - s.models / company.unsqueeze(1)
        share = torch.zeros(len(r), 1, dtype=fed.dtype, device=fed.device)
        tried = fed.map(self.try_shared, each={"x": others.to(fed.dtype)[r.ids], "share": share}, to=r.ids)
        found = torch.isin(r.ids, tried.ids)
        ids, fits, alone = r.ids[found], r["fit"][found], r["loss"][found]
        more = torch.zeros(fed.n, FOLDS, dtype=torch.float64, device=fed.device)
        more[ids] = credible((tried.values - alone).double())
        together = neighbourhood_means(more, s.links).sum(1) > 0
        clear = more.mean(1) > CLEAR * more.std(1) / FOLDS**0.5
        leaves = torch.zeros_like(s.judged).index_fill_(0, ids, True) & (together | clear)
        stays = ~leaves[s.links].any(0)
        judged = s.judged.index_fill(0, ids, True)
        models = torch.where(leaves.unsqueeze(1), s.models.index_copy(0, ids, fits), s.models)
        return s.replace(links=s.links[:, stays], weights=s.weights[stays], models=models, judged=judged)

    def among_fits(self, fed: Federation, s: State, t: int, ids: Tensor | None) -> State:
        """Link clients to the nearest whose own fits differ from theirs by no more than chance; W is then final.

        Gradients of linear models at one point for all are noise for clients whose optima are far from it. Of these
        links those stay whose two neighbourhoods have nearly the same mean: two clusters that are near each other
        have some clients between them, and a few such links would join both. Links pull no more than is best where what
        they would move fits by is more than chance explains: among clients that are all different nobody is near.
        """
        if t not in SEARCH_ROUNDS or (t > 1 and ids is None):
            return s
        r = fed.map(self.place, to=ids)
        if len(r) == 0:
            return s
        near = candidates(project(r["fit"], SKETCH, fed.seed), self.neighbours)
        noise = torch.zeros(fed.n, dtype=fed.dtype, device=fed.device).index_copy_(0, r.ids, r["noise"][:, 0])
        fits = torch.zeros_like(s.models).index_copy_(0, r.ids, r["fit"])
        links, _ = merge(s.links[:, :0], s.weights[:0], r.ids[near], fed.n)
        (i, j), rows = links, fed.sizes[:, 0]
        chance = shared_noise(noise[i], rows[i], noise[j], rows[j])
        alike = evidence(link_distances(fits, links), chance, pair_bar(fed.d)) > 0
        links, chance = links[:, alike], chance[alike]
        around = neighbourhood_means(fits, links)
        alike = link_distances(around, links) <= chance
        links = links[:, alike]
        per_row = noise * rows
        usual = HEAVIEST_NOISE * per_row[r.ids].median()  # nobody is excused by claiming to know nothing
        pulls = best_pulls(fits, per_row.clamp(max=usual) / rows, links, s.rho / s.curvature, fed.d / 2)
        new, old = (one[0] * fed.n + one[1] for one in (links, s.links))
        stay = ~torch.isin(old, new)
        whole, order = torch.cat([s.links[:, stay], links], 1), torch.cat([old[stay], new]).argsort()
        before, degree = (self._degrees(some, fed.n)[whole].amax(0) for some in (s.links, whole))
        kept, count = s.weights[stay], int(stay.sum())
        kept = torch.where(kept < 1, kept * (before / degree)[:count].to(kept), kept)
        weights = (s.curvature * pulls / (s.rho * degree[count:])).clamp(max=1)
        return s.replace(links=whole[:, order], weights=torch.cat([kept, weights.to(kept)])[order])

    @staticmethod
    def _degrees(links: Tensor, n: int) -> Tensor:
        """Return how many links each client has, [n], at least 1."""
        ones = torch.ones(links.shape[1], dtype=torch.float64, device=links.device)
        return link_degrees(links, ones, n).clamp(min=1)

    def place(self, client: Client) -> dict[str, Tensor]:
        """Return the client's own fit and the expected squared distance of it from that of its distribution.

        The variance is phi tr(H^-1)/n with H the curvature, phi the residual variance of least squares and 1 for other
        models. A client with no more rows than parameters knows nothing of its noise: it is 0, and it stays alone.
        """
        fit = client.solve(client.initial_model(), tol=1e-6)
        rows, d = client.size.to(fit.dtype), fit.shape[-1]
        spare = (rows - d).clamp(min=1)
        phi = 2 * client.loss(fit) * rows / spare if isinstance(client.model, Linear) else 1.0
        curves = client.hessian(fit)
        small = 1e-6 * curves.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp(min=1e-30)
        curves = curves + torch.diag_embed(small.expand(*small.shape[:-1], d))
        trace = torch.linalg.inv(curves).diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        return {"fit": fit, "noise": torch.where(rows > d, phi * trace / rows, 0.0)}

    def probe(self, client: Client, z: Tensor) -> dict[str, Tensor]:
        grad, noise, dimensions = client.grad_with_noise(z)
        return {"grad": grad, "noise": noise, "dimensions": dimensions}


def fits_tell(fed: Federation) -> bool:
    """Return True if clients fit models of their own quickly: one optimum, which gradient steps reach."""
    return isinstance(fed.model, Glm) and fed.model.closed_form and not fed.model.whole_clients


def tells_by_fits(fed: Federation) -> bool:
    """Return True if most clients have rows enough for a fit of their own, and the model has a closed form."""
    return fits_tell(fed) and fed.d <= MOST_SUMS and float(fed.sizes.median()) >= ENOUGH * fed.d
