"""FedRoD, FedProto, GPFL and kNN-Per against plain PyTorch on the same minibatches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

import coterie
from coterie import models
from coterie._core.errors import SettingError
from coterie.algorithms import make
from tests.algorithms.reference import federation, flat, losses, mean, minibatches, sgd, start

ROUNDS, LR = 3, 0.2
HEAD = ["3.weight", "3.bias"]


def network(classes: int = 3, **options):
    return models.mlp(
        (5,), activation="tanh", stacked=False, **({"classes": classes} if classes else {}), **options
    )


@pytest.mark.parametrize(("classes", "l2"), [(3, 0.0), (3, 0.05), (2, 0.0), (0, 0.0)])
def test_fedrod_trains_a_balanced_and_a_personal_head(classes: int, l2: float) -> None:
    fed = federation(network(classes, l2=l2), classes)
    algorithm = make("fedrod", lr=LR, steps=4, batch=5)
    run = coterie.fit(fed, algorithm, ROUNDS)
    module, x = start(fed)
    own = [{name: torch.zeros_like(x[name]) for name in HEAD} for _ in range(fed.n)]

    def balanced(scores: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        if not classes:
            return 0.5 * (scores.squeeze(-1) - y).square()
        share = torch.stack([(labels == c).double().mean() for c in range(classes)]).clamp(min=1e-9)
        if classes == 2:
            scores = torch.cat([torch.zeros_like(scores), scores], 1)
        return functional.cross_entropy(scores + share.log(), y, reduction="none")

    def penalty(w: dict[str, Tensor]) -> Tensor:
        return l2 / 2 * sum(value.square().sum() for value in w.values())

    for t in range(1, ROUNDS + 1):
        ends = []
        for k in range(fed.n):
            w, p, labels = dict(x), own[k], fed.runtime.rows("train").of(k)[1]
            for rows, y, weight in minibatches(fed, algorithm, k, t, 4):
                w = {name: value.detach().requires_grad_() for name, value in w.items()}
                p = {name: value.detach().requires_grad_() for name, value in p.items()}
                both = {name: value.detach() for name, value in w.items()}
                both |= {name: both[name] + p[name] for name in HEAD}
                mine = (losses(module, both, rows, y) * weight).sum() + penalty(both)
                generic = (balanced(functional_call(module, w, (rows,)), y, labels) * weight).sum() + penalty(
                    w
                )
                slopes = torch.autograd.grad(mine, list(p.values()))
                grads = torch.autograd.grad(generic, list(w.values()))
                p = {name: p[name] - LR * slope for name, slope in zip(p, slopes, strict=True)}
                w = {name: w[name] - LR * grad for name, grad in zip(w, grads, strict=True)}
            own[k] = {name: value.detach() for name, value in p.items()}
            ends.append({name: value.detach() for name, value in w.items()})
        x = mean(ends, fed.rows["train"])
    expected = torch.stack([flat(x | {name: x[name] + p[name] for name in HEAD}) for p in own])
    torch.testing.assert_close(run.personal, expected, rtol=0, atol=1e-11)


def test_fedrod_shifts_scores_and_not_what_is_before_a_scale() -> None:
    """resnet9 multiplies its last layer by 1/8, so biases move by eight times the logarithm of a class's share."""
    fed = coterie.Federation.from_arrays(
        [torch.zeros(4, 8, 8)], [torch.tensor([0, 0, 1, 2])], models.resnet9(width=4, classes=3)
    )

    class Look(type(make("fedrod"))):  # type: ignore[misc]
        def look(self, client) -> Tensor:
            return self._shift(client)

    shift = fed.map(Look().look).values[0]
    w, x = fed.initial_model(), torch.zeros(1, 8, 8)
    moved = fed.model.scores(w + shift, x) - fed.model.scores(w, x)
    torch.testing.assert_close(moved[0], torch.tensor([0.5, 0.25, 0.25]).log())


def hidden(module, w, x: Tensor) -> Tensor:
    """What reaches the last layer, written out."""
    return torch.tanh(x @ w["1.weight"].T + w["1.bias"])


@pytest.mark.parametrize("classes", [3, 2])
def test_fedproto_is_that_of_torch(classes: int) -> None:
    fed = federation(network(classes), classes)
    algorithm = make("fedproto", lr=LR, steps=4, batch=5, lam=0.7)
    run = coterie.fit(fed, algorithm, ROUNDS)
    module, first = start(fed)
    own, centres = [first] * fed.n, None
    rows = [fed.runtime.rows("train").of(k) for k in range(fed.n)]

    def pulled(module, w, x: Tensor, y: Tensor) -> Tensor:
        plain = losses(module, w, x, y)
        if centres is None:
            return plain
        return plain + 0.7 * (hidden(module, w, x) - centres[y.long()]).square().mean(1)

    for t in range(1, ROUNDS + 1):
        own = [
            sgd(module, own[k], minibatches(fed, algorithm, k, t, 4), LR, list(first), pulled)
            for k in range(fed.n)
        ]
        found = torch.cat([hidden(module, w, x) for w, (x, _) in zip(own, rows, strict=True)])
        labels = torch.cat([y for _, y in rows]).long()
        centres = torch.stack([found[labels == c].mean(0) for c in range(classes)])
    torch.testing.assert_close(run.state.prototypes, centres, rtol=0, atol=1e-11)
    for k, (x, _) in enumerate(rows):
        nearest = torch.cdist(hidden(module, own[k], x), centres).argmin(1)
        assert torch.equal(run.model(fed.names[k])(x).argmax(1), nearest)
    size = classes * (5 + 1)  # features and a number of rows for each class: no parameter travels
    assert run.fed.ledger.total("floats_up") == run.fed.ledger.total("floats_down") == ROUNDS * fed.n * size
    alone = coterie.fit(fed, algorithm.replace(lam=0.0, predict="head"), ROUNDS)
    by_itself = sgd(module, first, minibatches(fed, algorithm, 1, 1, 4), LR, list(first))
    for t in (2, 3):
        by_itself = sgd(module, by_itself, minibatches(fed, algorithm, 1, t, 4), LR, list(first))
    torch.testing.assert_close(alone.personal[1], flat(by_itself), rtol=0, atol=1e-11)


class Conditional(torch.nn.Module):
    """What GPFL's authors call a conditional valve."""

    def __init__(self, width: int, layers: Tensor) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList()
        for values in layers.chunk(2):
            weight, bias, gain, shift = values.split([width**2, width, width, width])
            linear, norm = torch.nn.Linear(width, width), torch.nn.LayerNorm(width)
            linear.weight.data, linear.bias.data = weight.view(width, width).clone(), bias.clone()
            norm.weight.data, norm.bias.data = gain.clone(), shift.clone()
            self.parts.append(torch.nn.Sequential(linear, torch.nn.ReLU(), norm))

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        gain, shift = (part(condition) for part in self.parts)
        return torch.relu(features * (gain + 1) + shift)

    def flat(self) -> Tensor:
        return torch.cat([value.detach().flatten() for value in self.parameters()])


@pytest.mark.quick("0", "2")
@pytest.mark.parametrize("classes", [3, 2, 0])
def test_gpfl_is_that_of_torch(classes: int) -> None:
    width, lam, mu = 5, 0.3, 0.02
    fed = federation(network(classes, valve=True), classes)
    algorithm = make("gpfl", lr=LR, steps=4, batch=5, lam=lam, mu=mu)
    run = coterie.fit(fed, algorithm, ROUNDS)
    outputs, embedded = (classes if classes > 2 else 1), max(classes, 1)
    first, shared = fed.initial_model(), algorithm.start(fed).shared
    body_size, head_size = (4 + 1) * width, (width + 1) * outputs
    body, embeddings, layers = shared.split([body_size, embedded * width, 2 * width * (width + 3)])
    assert torch.equal(body, first[:body_size])
    heads = [first[-head_size:]] * fed.n
    for t in range(1, ROUNDS + 1):
        ends = []
        for k in range(fed.n):
            labels = (
                fed.runtime.rows("train").of(k)[1].long() if classes else torch.zeros(1, dtype=torch.long)
            )
            base, head = torch.nn.Linear(4, width), torch.nn.Linear(width, outputs)
            torch.nn.utils.vector_to_parameters(body.clone(), base.double().parameters())
            torch.nn.utils.vector_to_parameters(heads[k].clone(), head.double().parameters())
            table = torch.nn.Embedding.from_pretrained(embeddings.view(embedded, width).clone(), freeze=False)
            valve, frozen = Conditional(width, layers).double(), table.weight.detach().clone()
            generic = frozen.mean(0)
            personal = torch.stack([(labels == c).double().mean() * frozen[c] for c in range(embedded)]).sum(
                0
            )
            trained = [
                torch.optim.SGD([*base.parameters(), *head.parameters()], LR),
                torch.optim.SGD([*table.parameters(), *valve.parameters()], LR, weight_decay=mu),
            ]
            for rows, y, weight in minibatches(fed, algorithm, k, t, 4):
                found = torch.tanh(base(rows))
                scores, y_class = (
                    head(valve(found, personal)),
                    y.long() if classes else torch.zeros_like(y).long(),
                )
                if classes > 2:
                    losses = functional.cross_entropy(scores, y_class, reduction="none")
                elif classes == 2:
                    losses = functional.binary_cross_entropy_with_logits(
                        scores[:, 0], y.double(), reduction="none"
                    )
                else:
                    losses = 0.5 * (scores[:, 0] - y).square()
                common = valve(found, generic)
                alike = functional.cosine_similarity(common.unsqueeze(1), table.weight.unsqueeze(0), dim=-1)
                losses = losses + functional.cross_entropy(alike, y_class, reduction="none")
                losses = losses + lam * torch.linalg.vector_norm(common - frozen[y_class], dim=1)
                for one in trained:
                    one.zero_grad()
                (losses * weight).sum().backward()
                for one in trained:
                    one.step()
            heads[k] = torch.cat([value.detach().flatten() for value in head.parameters()])
            flat_body = torch.cat([value.detach().flatten() for value in base.parameters()])
            ends.append({"all": torch.cat([flat_body, table.weight.detach().flatten(), valve.flat()])})
        body, embeddings, layers = mean(ends, fed.rows["train"])["all"].split(
            [body_size, embedded * width, len(layers)]
        )
    torch.testing.assert_close(run.state.shared, torch.cat([body, embeddings, layers]), rtol=0, atol=1e-10)
    torch.testing.assert_close(run.personal[:, -head_size:], torch.stack(heads), rtol=0, atol=1e-10)
    sent = ROUNDS * fed.n * (body_size + embedded * width + 2 * width * (width + 3))  # the head stays
    assert run.fed.ledger.total("floats_up") == run.fed.ledger.total("floats_down") == sent


def test_a_class_that_nobody_has_is_never_predicted() -> None:
    fed = federation(network(4), 3)
    run = coterie.fit(fed, make("fedproto", lr=LR), 2)
    assert run.state.known.tolist() == [1, 1, 1, 0]
    assert (run.model(fed.names[0])(torch.randn(50, 4).double())[:, 3] < 1e-9).all()


def test_a_class_of_clients_that_are_away_keeps_its_prototype(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
    fed = coterie.Federation.from_arrays([x, x], [y, torch.full((6,), 2)], model=network(3))
    method = make("fedproto", lr=LR)
    start = method.start(fed)
    fed.enter_round(1, start)
    both = method.round(fed, start, 1)
    fed.enter_round(2, both)
    monkeypatch.setattr(fed, "sample", lambda t, fraction: torch.tensor([0]))
    then = method.round(fed, both, 2)
    assert then.known.tolist() == [1, 1, 1]
    torch.testing.assert_close(then.prototypes[2], both.prototypes[2], rtol=0, atol=0)
    assert not torch.equal(then.prototypes[:2], both.prototypes[:2])


@pytest.mark.parametrize("stacked", [True, False])
def test_the_gradient_of_features_is_that_of_autograd(stacked: bool) -> None:
    fed = federation(models.mlp((5,), classes=3, stacked=stacked))
    w = torch.stack([fed.initial_model() + k / 10 for k in range(2)])
    x, slope = torch.randn(2, 6, 4).double(), torch.randn(2, 6, 5).double()
    found = fed.model.feature_grad(w, x, slope)
    for k in range(2):
        leaf = w[k].clone().requires_grad_()
        weight, bias = leaf[:20].view(5, 4), leaf[20:25]
        (torch.relu(x[k] @ weight.T + bias) * slope[k]).sum().backward()
        torch.testing.assert_close(found[k], leaf.grad)


@pytest.mark.parametrize("classes", [3, 2, 0])
def test_knn_per_mixes_with_the_nearest_rows(classes: int) -> None:
    fed = federation(models.with_neighbours(network(classes), rows=30), classes)
    algorithm = make("knn-per", lr=LR, steps=4, batch=5, lam=0.3, k=4, scale=0.5)
    run = coterie.fit(fed, algorithm, ROUNDS)
    base = coterie.fit(federation(network(classes), classes), make("fedavg", lr=LR, steps=4, batch=5), ROUNDS)
    shared = base.personal[0]
    torch.testing.assert_close(run.state.shared, shared, rtol=0, atol=1e-12)
    assert run.fed.ledger.total("floats_up") == base.fed.ledger.total("floats_up")  # the store stays
    names, shapes = ["1.weight", "1.bias"], [(5, 4), (5,)]
    w = {
        n: part.view(s)
        for n, part, s in zip(names, shared.split([20, 5, len(shared) - 25]), shapes, strict=False)
    }
    asked = torch.randn(9, 4, generator=torch.Generator().manual_seed(2)).double()
    plain = fed.model.base.module(shared)(asked)
    for k in range(fed.n):
        x, y = fed.runtime.rows("train").of(k)
        apart = torch.linalg.vector_norm(hidden(None, w, asked)[:, None] - hidden(None, w, x)[None], dim=-1)
        near = apart.topk(4, largest=False)
        vote = torch.softmax(-near.values / 0.5, 1)
        if classes:
            told = (vote.unsqueeze(-1) * functional.one_hot(y.long()[near.indices], classes)).sum(1)
        else:
            told = (vote * y[near.indices]).sum(1)
        torch.testing.assert_close(
            run.model(fed.names[k])(asked), 0.3 * told + 0.7 * plain, rtol=0, atol=1e-10
        )


def test_knn_per_without_neighbours_is_the_shared_model() -> None:
    fed = federation(models.with_neighbours(network(), rows=30))
    run = coterie.fit(fed, make("knn-per", lr=LR, batch=5, lam=0.0), ROUNDS)
    base = coterie.fit(federation(network()), make("fedavg", lr=LR, batch=5), ROUNDS)
    asked = torch.randn(9, 4).double()
    for name in fed.names:
        torch.testing.assert_close(
            run.model(name)(asked), base.model(name)(asked).detach(), rtol=0, atol=1e-12
        )


def test_knn_per_chooses_its_weight_on_validation_rows() -> None:
    sizes, split = (60, 50, 40), (0.5, 0.3, 0.2)
    fed = federation(models.with_neighbours(network(), rows=30), sizes=sizes, split=split)
    chosen = coterie.fit(fed, make("knn-per", lr=LR, k=5), ROUNDS)
    weights = chosen.personal[:, fed.model.base.d]
    tried = {
        lam: coterie.fit(fed, make("knn-per", lr=LR, k=5, lam=lam), ROUNDS).score("validation", "loss")
        for lam in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    best = torch.stack(list(tried.values())).argmin(0)
    assert weights.tolist() == [list(tried)[k] for k in best.tolist()]


def test_a_store_has_room_for_so_many_rows() -> None:
    fed = federation(models.with_neighbours(network(), rows=3))
    run = coterie.fit(fed, make("knn-per"), 1)
    store = run.personal[:, fed.model.base.d + 3 :].view(fed.n, 3, 7)
    x, y = fed.runtime.rows("train").of(0)
    assert store[..., -1].all() and torch.equal(store[0, :, -2].long(), y[:3])
    again = models.from_description(fed.model.describe())
    assert again.d == fed.model.d
    torch.testing.assert_close(again.scores(run.personal[0], x), fed.model.scores(run.personal[0], x))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("knn-per", "with_neighbours"),
        ("gpfl", "mlp.valve=True"),
        ("fedrod", "biases.*--model mlp"),
        ("fedproto", "biases.*--model mlp"),
    ],
)
def test_a_model_without_what_is_needed_is_refused(name: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        coterie.fit(federation(models.softmax(classes=3)), make(name), 1)
