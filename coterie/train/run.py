"""The result of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

import coterie
from coterie._core import broadcast, html
from coterie._core.amounts import size
from coterie._core.errors import SettingError, nearest
from coterie.algorithms import Algorithm
from coterie.engine.federation import Federation
from coterie.engine.state import State
from coterie.models import fast
from coterie.models.metrics import Metric, main_metric, resolve
from coterie.train.blend import Blend
from coterie.train.conformal import Conformal
from coterie.train.effects import client_table, difference_tests, variance_table
from coterie.train.export import write_model
from coterie.train.exported_model import ExportedModel
from coterie.train.folder import RunFolder
from coterie.train.history import History
from coterie.train.links import link_table
from coterie.train.own_models import OwnModels
from coterie.train.predict import Predictor
from coterie.train.row_intervals import RowIntervals
from coterie.train.save import save_run

if TYPE_CHECKING:
    import pandas
    import polars

SPLITS = ("test", "validation", "train")


REFIT = {"none": ("train",), "validation": ("train", "validation"), "all": ("train", "validation", "test")}


def metric_plan(metric: str | None, further: Sequence[Metric]) -> dict[str, Any]:
    """Return what the plan of a run says of metrics; nothing where the usual ones are meant."""
    others = [one.name for one in further if one.name != metric]
    return ({"metric": metric} if metric else {}) | ({"metrics": others} if others else {})


@dataclass
class Run:
    """The result of training: personal models, the server's state, metrics and ledger.

    Attributes
    ----------
    fed : Federation
        The federation after training.
    algorithm : Algorithm
        What was run.
    personal : Tensor
        Personal models [n, d]. In a federation across a network models stay with the clients; `personal` [n, 1] is then
        the round under which they are stored, -1 for a client that was away at the end.
    state : State
        The server's state when models were deployed.
    history : History
        Metrics over rounds.
    rounds, deployed_round : int
        Number of rounds, and the round whose models are deployed.
    lost_rounds : int
        Rounds in which nobody answered.
    seconds : float
        Duration of the training.
    folder : Path or None
        The run folder.
    metric : str or None
        The metric that reports show, if not the main one of the task.
    further : tuple of Metric
        Metrics recorded beside the loss and the main one.
    refit : str
        'validation' or 'all' if the deployed models were trained again on those rows too, else 'none'.
    refitted : Federation or None
        Where the refitted models are, if models stay with the clients.
    scored : Tensor or None
        The models before they were refitted, which all scores are about; None if they were not.
    test_rows : dict of Tensor
        Value of every test row [rows], client after client, in metrics that are means over rows.
    own : OwnModels or None
        Clients that a guard let keep the model that they trained alone; None if there was no need.
    blend : Blend or None
        The runs whose weighted mean this one is, if it is an ensemble that was made in this process.

    Examples
    --------
    >>> import coterie
    >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
    >>> run = coterie.fit(fed, "ditto", rounds=3)
    >>> run.score("test", "accuracy").shape
    torch.Size([4])
    >>> run.metrics.columns
    ['round', 'client', 'split', 'metric', 'value']
    """

    fed: Federation
    algorithm: Algorithm
    personal: Tensor
    state: State
    history: History
    rounds: int
    deployed_round: int
    lost_rounds: int = 0
    seconds: float = 0.0
    folder: Path | None = field(default=None)
    metric: str | None = None
    further: tuple[Metric, ...] = ()
    refit: str = "none"
    refitted: Federation | None = field(default=None, repr=False)
    scored: Tensor | None = field(default=None, repr=False)
    test_rows: dict[str, Tensor] = field(default_factory=dict, repr=False)
    own: OwnModels | None = field(default=None, repr=False)
    blend: Blend | None = field(default=None, repr=False)

    @property
    def trained_on(self) -> tuple[str, ...]:
        """Splits whose rows the deployed models have seen."""
        return REFIT[self.refit]

    @property
    def metrics(self) -> polars.DataFrame:
        """Metrics as a table: round, client, split, metric, value."""
        return self.history.frame(self.fed.names)

    @property
    def ledger(self) -> polars.DataFrame:
        """Communication as a table: messages, floats and bytes by round, kind, phase and link."""
        return self.fed.ledger.frame()

    @property
    def left_out(self) -> list[tuple[int, str, str]]:
        """Answers that could not be used: round, client, reason."""
        return [(t, self.fed.names[k], why) for t, k, why in self.fed.left_out]

    @property
    def shortened(self) -> list[tuple[int, str, str]]:
        """Answers that would have moved a mean too far, and moved it like a typical one: round, client, phase."""
        return [(t, self.fed.names[k], phase) for t, k, phase in self.fed.shortened]

    def explain(self) -> str:
        """Say which fast paths and which plain code computed this run.

        Returns
        -------
        str
            A line for each, with how often it was taken. `COTERIE_FAST` switches fast paths off.

        Examples
        --------
        >>> import torch, coterie
        >>> xs, ys = [torch.ones(3, 1), torch.ones(2, 1)], [torch.zeros(3), torch.ones(2)]
        >>> fed = coterie.Federation.from_arrays(xs, ys, coterie.models.linear())
        >>> print(coterie.fit(fed, "fedavg", rounds=2).explain())
        plain steps: 2 times, local SGD, one gradient for each step
        row-statistics: 2 times, sums over rows (X'X, X'y) that replace the rows of least squares
        """
        used = self.fed.runtime.paths_used()
        if not used:
            return "Computed by the plain code, or by nodes elsewhere."
        return "\n".join(
            f"{name}: {count:,} times, {fast.explain(name)}" for name, count in sorted(used.items())
        )

    def score(self, split: str, metric: str | Metric) -> Tensor:
        """Return a metric of every client's deployed model.

        Parameters
        ----------
        split
            'train', 'validation' or 'test'.
        metric
            A metric or its name, such as 'auc'. One that was not recorded during training is computed now.

        Returns
        -------
        Tensor
            A value per client, [n]; NaN for a client without such rows, or where the metric is not defined.
        """
        found = resolve(metric, self.fed.model.task)
        value = self.history.at(self.deployed_round, split, found.name)
        if value is not None:
            return value
        return self.fed.score(self._models_of(split), split, [found])[found.name].cpu().double()

    def pooled(self, split: str, metric: str | Metric) -> float:
        """Return a metric over the rows of all clients together, each scored by its own model.

        Parameters
        ----------
        split
            'train', 'validation' or 'test'.
        metric
            A metric or its name.

        Returns
        -------
        float
            The value; NaN where the metric is not defined.
        """
        found = resolve(metric, self.fed.model.task)
        return self.fed.pooled(self._models_of(split), split, [found])[found.name]

    def _models_of(self, split: str) -> Tensor:
        if split not in self.fed.rows:
            raise SettingError(f"no split {split!r}; it is 'train', 'validation' or 'test'")
        if not self.fed.has_rows(split):
            raise SettingError(f"no client of this run has {split} rows")
        if self.scored is None and split in self.trained_on and split != "train":
            raise SettingError(
                f"the models of this run were trained on the {split} rows too, and those from before are not in "
                "its folder; only what was recorded is known"
            )
        return broadcast.to(self.personal if self.scored is None else self.scored, self.fed.device)

    def score_test(self) -> dict[str, Tensor]:
        """Score the deployed models on the test rows, add that to the metrics, and return it."""
        models = self._models_of("test")
        scores = self.fed.score(models, "test", self.further)
        self.history.add(self.deployed_round, "test", scores)
        self.test_rows = self.fed.row_values(models, "test", self.further)
        if self.own is not None:
            self.own.test_rows = self.fed.row_values(self.own.without(models), "test", self.further)
        return {name: value.cpu() for name, value in scores.items()}

    def traffic(self) -> tuple[float, float]:
        """Return megabytes up and down until the deployed round, without evaluation and refitting."""
        return self.fed.ledger.megabytes_until(self.deployed_round)

    def common(self) -> Tensor:
        """Return the model for a client that was not in training: the shared one, else the mean of all."""
        shared = self.algorithm.common(self.fed, self.state)
        if shared is not None:
            return shared.cpu()
        self._require_models()
        sizes = self.fed.sizes.cpu()
        return (self.personal * (sizes / sizes.sum())).sum(0)

    def model(self, client: str) -> nn.Module:
        """Return a client's model as a module that predicts from encoded features.

        Parameters
        ----------
        client
            Name of the client.

        Raises
        ------
        SettingError
            There is no such client, or the models are on the nodes of the clients.
        """
        self._require_client(client)
        return self.fed.model.module(self.personal[self.fed.names.index(client)])

    def _require_client(self, client: str) -> None:
        if client not in self.fed.names:
            raise SettingError(f"no client {client!r}.{nearest(client, self.fed.names)}")
        self._require_models()

    def _require_models(self) -> None:
        if self.fed.models_stay:
            raise SettingError("the models of this run are on the nodes of its clients, not here")

    def effects(self, level: float = 0.9) -> polars.DataFrame:
        """Return every client's coefficients with intervals and shrinkage (`hierarchical` only).

        Parameters
        ----------
        level
            Coverage of the intervals.

        Returns
        -------
        polars.DataFrame
            Columns client, coefficient, estimate, lower, upper, centre, shrinkage; in units of the target, for
            features that a table standardised.

        Examples
        --------
        >>> import coterie
        >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
        >>> method = coterie.algorithms.Hierarchical(grouping="one", effects="intercept")
        >>> run = coterie.fit(fed, method, rounds=12)
        >>> run.effects().columns
        ['client', 'coefficient', 'estimate', 'lower', 'upper', 'centre', 'shrinkage']
        """
        return client_table(self, level)

    def variances(self, level: float = 0.9) -> polars.DataFrame:
        """Return the variances with intervals (`hierarchical` only): variance, estimate, lower, upper, coefficients."""
        return variance_table(self, level)

    def tests(self) -> dict[str, float]:
        """Return p-values of "clients differ" and "clusters differ" by likelihood ratio (`hierarchical` only)."""
        return difference_tests(self)

    def links(self) -> polars.DataFrame:
        """Return for every pair of clients in one group how probable it is that both gain by collaborating.

        Every client computes one gradient more, at the median model of its group. A link of which the data say little
        has a probability near that of most links.

        Returns
        -------
        polars.DataFrame
            Columns client, other, weight (null where the method has none) and confidence; the least sure first.

        Examples
        --------
        >>> import coterie
        >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
        >>> run = coterie.fit(fed, "cobo", rounds=10)
        >>> run.links().columns
        ['client', 'other', 'weight', 'confidence']
        """
        return link_table(self)

    def intervals(self, level: float = 0.9) -> RowIntervals:
        """Return predictions with the intervals of the model itself (`hierarchical` only).

        Parameters
        ----------
        level
            Coverage.

        Returns
        -------
        RowIntervals
            Call its `predict` with a table, or `rows` with encoded features.
        """
        return RowIntervals.of(self, level)

    def conformal(self, level: float = 0.9, split: str = "validation") -> Conformal:
        """Return predictions with intervals, or sets of classes, that are right with this probability.

        Parameters
        ----------
        level
            Coverage.
        split
            Rows to calibrate on, 'validation' or 'test'.

        Returns
        -------
        Conformal
            Call its `predict` with a table, or `rows` with encoded features.
        """
        return Conformal.of(self, level, split)

    def predict(self, table: Any, times: Sequence[float] | None = None) -> polars.DataFrame:
        """Predict the rows of a table, each with its client's model; see `Predictor`."""
        return Predictor.of(self)(table, times)

    def save(self, folder: str | Path) -> Path:
        """Write the run into a folder, from which `coterie.load` returns it.

        Parameters
        ----------
        folder
            Folder to create.

        Returns
        -------
        Path
            The folder.
        """
        plan = {"rounds": self.rounds, "evaluate_every": max(1, self.rounds // 20), "select": "last"}
        if self.deployed_round != self.rounds:
            plan["select"] = "best"
        plan |= {"score_test": True, "checkpoint_every": 0, **metric_plan(self.metric, self.further)}
        made = RunFolder.create(Path(folder), self.fed, self.algorithm, plan)
        save_run(made, self)
        return made.path

    def export(self, to: str, client: str | None = None, out: str | Path | None = None) -> Path:
        """Write a client's model, with its preprocessing, in a format that needs no Coterie.

        Parameters
        ----------
        to
            'safetensors', 'onnx', 'torchscript' or 'csv' (coefficients of linear models).
        client
            Name of the client; None exports the common model.
        out
            File to write; by default in the folder `exports` of the run folder, or of the current one.

        Returns
        -------
        Path
            The file.

        Examples
        --------
        >>> import tempfile, coterie
        >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
        >>> run = coterie.fit(fed, "ditto", rounds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run.export("csv", "va", f"{folder}/va.csv").name
        'va.csv'
        """
        if client is None:
            weights = self.common()
        else:
            self._require_client(client)
            weights = self.personal[self.fed.names.index(client)]
        preprocessor = None if self.fed.table is None else self.fed.table.preprocessor
        one = ExportedModel.of(self.fed.model, weights, client, preprocessor)
        return write_model(one, to, out, self.folder or Path())

    def report(self, out: str | Path | None = None, **options: Any) -> Path:
        """Write the report of this run: one page that needs no network.

        Parameters
        ----------
        out
            File to write; `report.html` in the run folder, or in the current folder, if not given.
        **options
            Those of `coterie.report.write_report`: `by`, `threshold` and `pdf`.

        Returns
        -------
        Path
            The page.

        Examples
        --------
        >>> import tempfile, coterie
        >>> fed = coterie.Federation.from_table("heart_disease", client="hospital", target="sick")
        >>> run = coterie.fit(fed, "ditto", rounds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run.report(f"{folder}/page.html", by=["sex"]).stat().st_size > 1_000_000
        True
        """
        write: Any = coterie.report.write_report
        if self.folder is not None:
            return Path(write([self.folder], out, **options))
        with TemporaryDirectory() as place:
            saved = self.save(Path(place) / self.algorithm.name)
            return Path(write([saved], "report.html" if out is None else out, **options))

    @property
    def clients(self) -> polars.DataFrame:
        """A row per client: its rows by split, and every metric of its deployed model, such as `test_accuracy`."""
        import polars

        columns: dict[str, Any] = {"client": self.fed.names}
        columns |= {f"{split}_rows": self.fed.rows[split].tolist() for split in reversed(SPLITS)}
        for t, split, metric, value in self.history.blocks:
            if t == self.deployed_round and split in SPLITS and value.shape == (self.fed.n,):
                columns[f"{split}_{metric}"] = value.tolist()
        return polars.DataFrame(columns).fill_nan(None)

    def to_pandas(self, table: str = "clients") -> pandas.DataFrame:
        """Return a table of the run as a pandas frame.

        Parameters
        ----------
        table
            'clients' (a row per client with its rows and metrics), 'metrics' (every recorded value) or 'ledger' (what
            was sent).

        Returns
        -------
        pandas.DataFrame
            The table; needs pandas.

        Raises
        ------
        SettingError
            There is no such table, or pandas is not installed.
        """
        if table not in ("clients", "metrics", "ledger"):
            raise SettingError(f"no table {table!r}.{nearest(table, ('clients', 'metrics', 'ledger'))}")
        try:
            import pandas
        except ImportError:
            raise SettingError("to_pandas needs pandas: pip install pandas") from None
        frame: polars.DataFrame = getattr(self, table)
        return pandas.DataFrame(frame.to_dict(as_series=False))

    def _main_scores(self) -> tuple[str, str, Tensor] | None:
        """Return the metric that reports show, the best split it is known on, and its values [n]."""
        metric = self.metric or main_metric(self.fed.model.task).name
        for split in SPLITS:
            value = self.history.at(self.deployed_round, split, metric)
            if value is not None:
                return metric, split, value
        return None

    def __repr__(self) -> str:
        done = f"{self.algorithm.name}, {self.rounds} rounds, {self.fed.n} clients, d = {self.fed.d}"
        return f"Run({done}, {self.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        """Return the metric of every client as HTML, for notebooks."""
        up, down = self.traffic()
        cost = f"{self.deployed_round} rounds, {size(up + down)} sent, {self.seconds:.1f} s"
        head = html.paragraph(f"Run of {self.algorithm.name}: {cost}")
        found = self._main_scores()
        if found is None:
            return head
        metric, split, value = found
        column = "client" if self.fed.table is None else self.fed.table.options["client"]
        rows = [
            [name, f"{size:,}", "–" if score != score else f"{score:.4g}"]
            for name, size, score in zip(
                self.fed.names, self.fed.rows["train"].tolist(), value.tolist(), strict=True
            )
        ]
        return head + html.table([column, "training rows", f"{split} {metric}"], rows)
