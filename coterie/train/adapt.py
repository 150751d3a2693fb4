"""Models for clients that were not in training, from what the others left behind; nobody else trains again.

A method may have its own rule (`adapt(fed, state, personal, rounds) -> models [k, d]`, where `fed` holds the newcomers
only): hierarchical models take the posterior mean. Where it has none, or returns None, the server's state when models
were deployed decides:

- weights between clients (CoBo): the newcomer finds its own by the alignment of gradients;
- a model per cluster (IFCA, threshold clustering, oracle): the nearest cluster, by training loss;
- a shared model: the newcomer takes part in rounds in which the server's state does not change, then deploys.

A model that is not personal after that is fine-tuned on the newcomer's own rows, for as many steps as its validation
rows prefer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie._core import files
from coterie._core.errors import DataError, RunError, SettingError
from coterie.algorithms import Algorithm, make, setting
from coterie.data import tables
from coterie.data.table_source import TableSource
from coterie.data.time_order import in_time, split_in_time
from coterie.engine.client import Client
from coterie.engine.federation import Federation
from coterie.engine.from_table import SPLIT
from coterie.engine.resplit import only
from coterie.engine.state import State
from coterie.models.base import Model
from coterie.models.description import description
from coterie.models.ensemble import Ensemble
from coterie.models.metrics import main_metric
from coterie.train.fit import fit
from coterie.train.folder import RunFolder
from coterie.train.predict import Predictor
from coterie.train.roster import RunRoster
from coterie.train.save import load_state

if TYPE_CHECKING:
    import polars

TUNING = (0, 5, 20, 80, 320)  # steps at home that are tried
USUAL = 20  # steps at home of a client with fewer validation rows than ENOUGH
ENOUGH = 10


@dataclass(frozen=True)
class Adapted:
    """Models of newcomers, how they were found, and how good they are on the newcomers' own test rows.

    Attributes
    ----------
    names : list of str
        The newcomers.
    models : Tensor
        Their models, [k, d].
    alone : Tensor
        What training alone would have given them, [k, d].
    how : list of str
        How each model was found.
    metric : str
        The metric of `scores`.
    rows : dict of str to list of int
        Numbers of rows by split.
    scores : dict of str to list of float
        Scores of 'adapted', 'common' and 'alone' models on test rows; NaN where there are none.
    predictor : Predictor
        Predicts for old and new clients.
    """

    names: list[str]
    models: Tensor
    alone: Tensor  # what they would have got without anybody, for comparison
    how: list[str]
    metric: str
    rows: dict[str, list[int]]
    scores: dict[str, list[float]]  # 'adapted', 'common' and 'alone', on test rows (NaN: there are none)
    predictor: Predictor

    def frame(self) -> polars.DataFrame:
        """Return a table with a line for each newcomer."""
        import polars

        return polars.DataFrame(
            {"client": self.names, "training_rows": self.rows["train"], **self.scores, "how": self.how}
        ).with_columns(polars.col(*self.scores).fill_nan(None))

    def save(self, out: str | Path, run: str | Path) -> Path:
        """Write a folder from which `coterie predict` and `coterie export` serve old and new clients.

        Parameters
        ----------
        out
            The folder to create.
        run
            The run folder that was adapted.

        Returns
        -------
        Path
            The new folder.
        """
        place, source = Path(out), RunFolder.open(Path(run))
        RunFolder.require_free(place)
        tensors = {"personal": self.predictor.personal, "common": self.predictor.common}
        files.write_tensors(place / "models" / "models.safetensors", tensors)
        if self.predictor.baseline is not None:
            self.predictor.baseline.save(place / "models")
        note = files.read_json(source.path / "models" / "model.json")
        note |= {
            "clients": self.predictor.clients,
            "sha256": files.sha256(place / "models" / "models.safetensors"),
            "model": description(self.predictor.model),
        }
        files.write_json(place / "models" / "model.json", note)
        config = source.config | {"adapt": {"run": str(source.path.resolve()), "newcomers": self.names}}
        files.seal(place, "config.toml", files.as_toml(config))
        return place


def adapt(folder: str | Path, table: Any, client: str | None = None, model: Model | None = None) -> Adapted:
    """Find personal models for clients that were not in a run.

    Rows are split as those of the run were; test rows only score the result.

    Parameters
    ----------
    folder
        A finished run folder.
    table
        A file or data frame with the columns of the run's table.
    client
        Name of the newcomer, where the table has no client column.
    model
        The model, where it was a module of your own.

    Returns
    -------
    Adapted
        Models, scores and how they were found.

    Examples
    --------
    >>> import tempfile, coterie
    >>> from coterie.data import bundled, tables
    >>> rows = tables.read(bundled.path("heart_disease"))
    >>> known = rows.filter(rows["hospital"] != "cleveland")
    >>> fed = coterie.Federation.from_table(known, client="hospital", target="sick")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = coterie.fit(fed, "fedavg", rounds=3, out=f"{folder}/run")
    ...     adapted = adapt(f"{folder}/run", rows.filter(rows["hospital"] == "cleveland"))
    >>> adapted.names
    ['cleveland']
    """
    opened = RunFolder.open(Path(folder))
    if "adapt" in opened.config:
        raise RunError(f"{folder} holds adapted models; adapt {opened.config['adapt']['run']} instead")
    known = Predictor.load(folder, model)
    with opened.reading():
        algorithm, rounds = opened.algorithm(), int(opened.plan()["rounds"])
        state, roster = load_state(opened.path), RunRoster.load(opened.path)
    if not len(known.personal):
        raise RunError(f"the models of {folder} stayed with its clients, so newcomers cannot start from them")
    fed = _newcomers(opened, known, table, client)
    labels = None if roster is None or roster.clusters is None else torch.tensor(roster.clusters)
    models, how = personal_models(algorithm, fed, state, known.personal, known.common, rounds, labels)
    trained = not isinstance(fed.model, Ensemble)  # which is made of models that are trained one by one
    alone = _alone(algorithm, fed, rounds) if trained else torch.full_like(models, torch.nan)
    metric = main_metric(fed.model.task).name
    candidates = {"adapted": models, "common": known.common.expand_as(models), "alone": alone}
    scores = {name: [float("nan")] * fed.n for name in candidates}
    scores |= {
        name: fed.score(value, "test")[metric].tolist()
        for name, value in candidates.items()
        if trained or name != "alone"
    }
    rows = {split: size.tolist() for split, size in fed.rows.items()}
    everyone = replace(
        known, personal=torch.cat([known.personal, models]), clients=[*known.clients, *fed.names]
    )
    return Adapted(fed.names, models, alone, how, metric, rows, scores, everyone)


def personal_models(
    algorithm: Algorithm,
    fed: Federation,
    state: State,
    personal: Tensor,
    common: Tensor,
    rounds: int,
    labels: Tensor | None = None,
) -> tuple[Tensor, list[str]]:
    """Return models [k, d] for the clients of `fed`, and for each how it was found.

    Parameters
    ----------
    algorithm
        The algorithm of the run.
    fed
        A federation of the newcomers only.
    state
        The server's state when models were deployed.
    personal, common
        Models of the run's clients [n, d], and its common model [d].
    rounds
        Rounds of the run.
    labels
        Known clusters of the run's clients, [n].
    """
    own = getattr(algorithm, "adapt", None)
    models = None if own is None else own(fed, state, personal, rounds)
    if models is not None:
        return models, [f"by the rule of {algorithm.name}"] * fed.n
    lr = _step_size(algorithm, state)
    if "weights" in state and state.weights.shape == (len(personal), len(personal)):
        return _collaborating(fed, state, personal, common, lr)
    centres = _centres(state, personal, labels)
    if centres is not None:
        start, nearest = _nearest(fed, centres)
        models, steps = _tuned(fed, start, lr)
        first = [f"cluster {k + 1} of {len(centres)}" for k in nearest.tolist()]
        return models, [
            f"{which}, {_said(count)}" for which, count in zip(first, steps.tolist(), strict=True)
        ]
    if "x" in state or algorithm.name == "local":
        joined = _standing_still(algorithm, fed, state, rounds)
        if joined is not None and not ("x" in state and torch.equal(joined, state.x.expand_as(joined))):
            how = (
                "alone, as the method is" if algorithm.name == "local" else f"as a client of {algorithm.name}"
            )
            return joined, [how] * fed.n
    start = (state.x if "x" in state else common).expand(fed.n, -1)
    models, steps = _tuned(fed, start, lr)
    return models, [f"shared model, {_said(count)}" for count in steps.tolist()]


def _step_size(algorithm: Algorithm, state: State) -> float:
    """Return the step size of the method: for tuning, for training, or found by itself."""
    found = (
        getattr(algorithm, "tuning_lr", None),
        getattr(algorithm, "lr", None),
        getattr(state, "lr", None),
    )
    return next((float(lr) for lr in found if lr), 0.05)


def _said(steps: int) -> str:
    return f"{steps} steps at home" if steps else "as it is"


def _newcomers(opened: RunFolder, known: Predictor, table: Any, client: str | None) -> Federation:
    """Return a federation of the new clients only, encoded and split as the run's clients were."""
    import polars

    frame = tables.read(table)
    source = str(table) if isinstance(table, str | Path) else "the table"
    if known.client_column not in frame.columns:
        name = client or (Path(table).stem if isinstance(table, str | Path) else "newcomer")
        frame = frame.with_columns(polars.lit(name).alias(known.client_column))
    elif client is not None:
        raise SettingError(
            f"{source} names its clients in column {known.client_column!r}; leave the name away"
        )
    tables.require_values(frame, "client", known.client_column, source)
    frame, names, counts = tables.by_client(frame, known.client_column)
    there = [name for name in names if name in known.clients]
    if there:
        raise DataError(
            f"{source}: client {there[0]!r} was in training and has a model; use `coterie predict`"
        )
    data = opened.config.get("data", {})
    fractions = tuple(float(part) for part in data.get("split", SPLIT))
    parts = None
    if data.get("time"):
        frame, times = in_time(frame, counts, data["time"], source)
        parts = split_in_time(torch.tensor(counts), times, (fractions[0], fractions[1], fractions[2]))
    return Federation.from_rows(
        known.preprocessor.encode(frame, source),
        known.preprocessor.encode_target(frame, source),
        torch.tensor(counts),
        model=known.model,
        names=names,
        split=(fractions[0], fractions[1], fractions[2]),
        seed=int(opened.config["federation"]["seed"]),
        dtype=known.personal.dtype,
        table=TableSource(data, known.preprocessor),
        parts=parts,
    )


def _standing_still(algorithm: Algorithm, fed: Federation, state: State, rounds: int) -> Tensor | None:
    """Return the newcomers' models after rounds in which they take part and the server's state does not change.

    None for a method that sends every client something of its own, which a newcomer does not have.
    """
    if algorithm.deploy_inputs(fed, state)[1]:
        return None
    if hasattr(algorithm, "participation"):
        algorithm = algorithm.replace(participation=1.0)
    fed = fed.fresh()
    for t in range(1, rounds + 1) if algorithm.begin is not None else ():
        fed.enter_round(t, state)
        algorithm.round(fed, state, t)
    fed.enter_round(rounds, state)
    return fed.personal(algorithm, state)


def _centres(state: State, personal: Tensor, labels: Tensor | None) -> Tensor | None:
    """Return one model per cluster [K, d]: the server's, or the means of the models of each cluster."""
    n, d = personal.shape
    known = state.tensors()
    if "centres" in known:
        return known["centres"]
    models = known.get("models")
    if models is not None and models.dim() == 2 and models.shape[1] == d and len(models) != n:
        return models
    found = [known[name] for name in ("labels", "groups") if name in known and known[name].shape == (n,)]
    if found:
        labels = found[0]
    elif "x" in state:
        labels = None
    return None if labels is None or not (labels >= 0).any() else _means(personal, labels)


def _means(models: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([models[labels == k].mean(0) for k in torch.unique(labels) if k >= 0])


def _nearest(fed: Federation, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return for every newcomer the cluster model with the lowest training loss, and its number."""
    losses = torch.stack([fed.score(centre.expand(fed.n, -1), "train")["loss"] for centre in centres], 1)
    best = losses.argmin(1)
    return centres[best], best


def _tuned(fed: Federation, start: Tensor, lr: float, pull: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Fine-tune given models, with a pull back to them or not, for as many of `TUNING` steps as validation prefers."""
    pull = torch.zeros_like(start[:, :1]) if pull is None else pull
    tried = []
    for steps in TUNING:
        r = fed.fresh().map(_AtHome(lr=lr, steps=steps).tuned, each={"x": start, "pull": pull})
        tried.append(r.put(start) if len(r) else start)
    losses = torch.stack([fed.score(models, "validation")["loss"] for models in tried], 1)
    best = losses.nan_to_num(nan=torch.inf).argmin(1)
    best = torch.where(fed.rows["validation"] < ENOUGH, TUNING.index(USUAL), best)
    models = torch.stack(tried, 1)[torch.arange(fed.n), best]
    return models, torch.tensor(TUNING)[best]


def collaborators(fed: Federation, common: Tensor, others: Tensor) -> Tensor:
    """Return weights [k, n] in [0, 1] of the run's clients for every newcomer, from the alignment of gradients.

    The weight of j for i is <g_i(z), z - x_j> at z = (common + x_j)/2, over the largest. Up to curvature z - x_j is the
    gradient of a client whose optimum is x_j, so that nobody has to be asked. The weight is positive where moving on
    towards x_j still helps i.
    """
    middle = (common + others) / 2
    visits = torch.arange(fed.n).repeat_interleave(len(others))
    each = {"x": middle.repeat(fed.n, 1)}
    slopes = fed.fresh().map(_AtHome().slope, each=each, to=visits).values.view(fed.n, *middle.shape)
    agreement = (slopes * (middle - others)).sum(-1).clamp(min=0)
    return agreement / agreement.amax(1, keepdim=True).clamp(min=1e-300)


def _collaborating(
    fed: Federation, state: State, others: Tensor, common: Tensor, lr: float
) -> tuple[Tensor, list[str]]:
    """CoBo with the others standing still: min f(x) + rho/2 sum_j w_j |x - x_j|^2, started at their weighted mean."""
    weights = collaborators(fed, common, others)
    degree = weights.sum(1, keepdim=True)
    start = torch.where(degree > 0, weights @ others / degree.clamp(min=1e-300), common)
    pull = (float(getattr(state, "rho", 1.0)) * degree).clamp(max=0.5 / lr)
    models, steps = _tuned(fed, start, lr, pull)
    pairs = zip((weights > 0).sum(1).tolist(), steps.tolist(), strict=True)
    return models, [
        f"with {many} of {len(others)} clients, chosen by their gradients, {_said(count)}"
        for many, count in pairs
    ]


@dataclass(frozen=True)
class _AtHome(Algorithm):
    """What a newcomer computes from its own rows: y <- y - lr (grad f(y) + pull (y - x)), `steps` times.

    The step was chosen for other clients: where it would raise f(y) + pull/2 |y - x|^2 it is halved, and y stays.
    """

    lr: float = setting(0.05, "step size", above=0)
    steps: int = setting(0, "steps", low=0)

    def slope(self, client: Client, x: Tensor) -> Tensor:
        return client.full_grad(x)

    def tuned(self, client: Client, x: Tensor, pull: Tensor) -> Tensor:
        centre, pace = x, torch.full_like(pull, self.lr)

        def objective(y: Tensor) -> Tensor:
            return client.loss(y) + 0.5 * pull * (y - centre).square().sum(-1, keepdim=True)

        value = objective(x)
        for _ in range(self.steps):
            further = x - pace * (client.full_grad(x) + pull * (x - centre))
            reached = objective(further)
            lower = reached <= value
            x, value = torch.where(lower, further, x), torch.where(lower, reached, value)
            pace = torch.where(lower, pace, 0.5 * pace)
        return x


def _alone(algorithm: Algorithm, fed: Federation, rounds: int) -> Tensor:
    """Return what training alone would have given the newcomers, for comparison."""
    select = "best" if fed.has_rows("validation") else "last"
    if algorithm.own_model(rounds) is not None:  # no local steps for its model: each newcomer is a federation
        alone = [
            fit(only(fed, torch.tensor([k])), algorithm, max(rounds, 1), score_test=False).personal
            for k in range(fed.n)
        ]
        return torch.cat(alone)
    return fit(
        fed, make("local", lr=_step_size(algorithm, State())), max(rounds, 1), select=select, score_test=False
    ).personal
