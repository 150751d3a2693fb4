"""Which columns matter: coefficients of linear models with their intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from coterie.report.facts import RunFacts
from coterie.report.numbers import digits
from coterie.report.panels import Panel, Trace, axis, numbers, plain
from coterie.train.export import LINKS, coefficients
from coterie.train.exported_model import ExportedModel
from coterie.train.uncertainty import contrasts, load_errors

SHOWN = 20  # coefficients in the chart
PER_CLIENT = 6  # coefficients on a client's page
Z = 1.959964
UNITS = {
    "identity": "units of the target",
    "logistic": "log-odds",
    "softmax": "log-odds of the class",
    "log-hazard": "log hazard ratio",
}
RATIOS = {"logistic": "odds ratio", "log-hazard": "hazard ratio"}


@dataclass(frozen=True)
class Coefficients:
    """Coefficients for standardised features, of the common model and of the clients' models.

    Attributes
    ----------
    link : str
        'identity', 'logistic', 'softmax' or 'log-hazard'.
    names : list of str
        The features, with the class for several classes, m of them.
    value, error : ndarray
        Coefficients of the common model and their standard errors, [m]; NaN where an error is not known.
    clients : list of str
        Names of the clients.
    own_value, own_error : ndarray
        Coefficients of the clients' models and their standard errors, [n, m].
    """

    link: str
    names: list[str]
    value: np.ndarray
    error: np.ndarray
    clients: list[str]
    own_value: np.ndarray
    own_error: np.ndarray

    def panel(self) -> Panel:
        """Draw the largest coefficients of the common model, with the range over the clients' models."""
        top = np.argsort(-np.abs(self.value), kind="stable")[:SHOWN]
        names = plain([self.names[k] for k in top])
        low, high = self.own_value.min(0), self.own_value.max(0)
        traces: list[Trace] = [
            {
                "type": "scatter",
                "mode": "markers",
                "x": numbers(self.value[top]),
                "y": names,
                "name": "common model, 95 % interval",
                "marker": {"color": "$c0", "size": 9},
                "error_x": {
                    "type": "data",
                    "array": numbers(np.nan_to_num(Z * self.error[top])),
                    "color": "$c0",
                    "thickness": 1.5,
                },
                "hovertemplate": "%{y}: %{x:.3g}<extra></extra>",
            },
            {
                "type": "bar",
                "orientation": "h",
                "base": numbers(low[top]),
                "x": numbers((high - low)[top]),
                "y": names,
                "name": "range over the clients' models",
                "marker": {"color": "$c1/0.25"},
                "width": 0.5,
                "hoverinfo": "skip",
            },
        ]
        units = UNITS[self.link]
        ratio = [RATIOS[self.link]] if self.link in RATIOS else []
        rows = [
            [
                self.names[k],
                digits(self.value[k]),
                _interval(self.value[k], self.error[k]),
                *([f"{math.exp(min(self.value[k], 50)):.2f}"] if ratio else []),
                f"{digits(low[k])} to {digits(high[k])}",
            ]
            for k in top
        ]
        return Panel(
            "coefficients",
            "Coefficients of the common model",
            f"By how much the prediction changes ({units}) when a number rises by one standard deviation, or for a "
            "category compared with the mean of its column, everything else unchanged. The intervals take the model "
            "as right and rows as independent; they say nothing about cause and effect. Light bars show how far the "
            "clients' own models differ.",
            traces,
            {
                "xaxis": axis(f"coefficient ({units})", zeroline=True),
                "yaxis": axis("", type="category", autorange="reversed"),
                "showlegend": True,
                "barmode": "overlay",
            },
            ("feature", "coefficient", "95 % interval", *ratio, "clients' models"),
            rows,
            190 + 26 * len(top),
        )

    def sentence(self) -> str:
        """Name the features whose interval excludes zero, the largest first."""
        clear = np.flatnonzero(np.abs(self.value) > Z * np.nan_to_num(self.error, nan=np.inf))
        if not len(clear):
            return "No coefficient of the common model is clearly different from zero."
        order = clear[np.argsort(-np.abs(self.value[clear]), kind="stable")][:5]
        some = ", ".join(f"{self.names[k]} ({'+' if self.value[k] > 0 else '−'})" for k in order)
        many = f"{len(clear)} of {len(self.names)} coefficients are clearly different from zero"
        return f"{many}; the largest are {some}. The sign says whether more of it raises or lowers the prediction."

    def of(self, client: str) -> list[list[str]]:
        """Return the largest coefficients of a client's model as text: feature, value, interval."""
        mine = self.clients.index(client)
        value, error = self.own_value[mine], self.own_error[mine]
        top = np.argsort(-np.abs(value), kind="stable")[:PER_CLIENT]
        return [[self.names[k], digits(value[k]), _interval(value[k], error[k])] for k in top]


def _interval(value: float, error: float) -> str:
    return "–" if math.isnan(error) else f"{digits(value - Z * error)} to {digits(value + Z * error)}"


def read_coefficients(run: RunFacts) -> Coefficients | None:
    """Return the coefficients of a run's models, or None if they are not linear or not here."""
    errors, own = load_errors(run.folder), run.personal
    if "common" not in errors or own is None:
        return None
    one = ExportedModel.load(run.folder, None)
    # Where a parameter sits in the module: the module of the vector 0, 1, 2, ... tells.
    place = (
        replace(one, weights=torch.arange(len(one.weights), dtype=torch.float64))
        .linear()
        .linear.weight.long()
    )
    at = place.flatten().numpy()
    features = [line["feature"] for line in coefficients(one) if line["kind"] != "intercept"]
    outputs = [line["output"] for line in coefficients(one) if line["kind"] != "intercept"]
    several = one.task == "multiclass"
    names = [f"{a} → {b}" if several else a for a, b in zip(features, outputs, strict=True)]
    unit = 1.0
    if one.preprocessor is not None and one.task == "regression":
        unit = one.preprocessor.target_scale
    centred = contrasts(one).numpy()[at]
    unknown = torch.full((len(own), len(one.weights)), torch.nan, dtype=torch.float64)
    return Coefficients(
        LINKS[one.task],
        names,
        unit * centred @ one.weights.double().numpy(),
        unit * errors["common"].double().numpy()[at],
        run.names,
        unit * own @ centred.T,
        unit * errors.get("personal", unknown).double().numpy()[:, at],
    )
