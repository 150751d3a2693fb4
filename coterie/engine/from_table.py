"""Read a table with a client column into the parts of a federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coterie._core.errors import SettingError
from coterie.data import bundled, grouping, tables
from coterie.data.preprocess import Preprocessor
from coterie.data.split import as_fractions, split_rows
from coterie.data.statistics import Statistics, local_statistics
from coterie.data.table_source import TableSource
from coterie.data.table_spec import TableSpec
from coterie.data.time_order import in_time, split_in_time
from coterie.engine.build import Parts, encode_clusters, from_rows
from coterie.engine.noise import Noise
from coterie.engine.privacy import Privacy
from coterie.engine.private_statistics import SHARE, noisy_statistics
from coterie.models.base import Model
from coterie.models.class_weights import BALANCED, chosen
from coterie.models.cumulative_logit import Ordinal
from coterie.models.survival import Cox
from coterie.models.table_models import as_model, table_model

SPLIT = (0.6, 0.2, 0.2)


def from_table(
    source: Any,
    client: str,
    target: str,
    cluster: str | Sequence[str] | None = None,
    model: Model | str | None = None,
    task: str | None = None,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    split: Sequence[float] = SPLIT,
    seed: int = 0,
    device: str | None = None,
    loop: bool = False,
    l2: float | None = None,
    privacy: Privacy | None = None,
    encoding: str | None = None,
    paid: Sequence[float] = (),
    event: str | None = None,
    time: str | None = None,
    class_weights: str | Mapping[str, float] | None = None,
) -> Parts:
    """Make one client of each value of the client column.

    Encoding and standardisation are fitted on the training rows of all clients.

    Parameters
    ----------
    source
        A path to CSV or Parquet, a data frame, a dict of columns, or the name of a bundled table.
    client
        Name of the client column.
    target
        Name of the target column.
    cluster
        Name of the cluster column, if clusters are known; or of several grouping columns, crossed with clients or
        containing them, such as ["lecturer", "school", "school:class"].
    model
        The model to train, or its name ("linear", "mlp"); by default linear, logistic or softmax regression, by the
        kind of target.
    task
        "regression" or "classification"; by default inferred from the target.
    drop
        Names of columns to leave out.
    keep
        Names of columns to use although they look like identifiers, free text or copies of client or target.
    split
        Shares of train, validation and test.
    seed
        Seed of every draw.
    device
        Where to compute, by default the CPU; "auto" is the GPU if there is one.
    loop
        Compute clients one by one instead of stacked.
    l2
        Ridge penalty of the default model on all its weights, without an intercept, which makes it strongly convex. By
        default it has an intercept and a penalty of 0.001.
    privacy
        Fit the encoding to noisy statistics, which cost a fifth of this budget; `fit` spends the rest.
    encoding, paid
        An encoding that was fitted before, and the epsilon and delta that it cost, as a run folder records them.
    event
        Name of the column that says whether the event happened (1, yes, true) at the time in `target`, or the row was
        last seen then (0, no, false). The model is then Cox regression.
    time
        Name of a column with dates or numbers: each client's earliest rows train, later ones validate, and the latest
        test. It is no feature unless it is in `keep`.
    class_weights
        Weights of the rows of each class in training: "balanced" for rows / (classes x rows of the class) over the
        training rows of all clients, or numbers by class. Metrics count rows alike.

    Returns
    -------
    Parts
        Arguments of `Federation`.
    """
    source = bundled.resolve(source)
    frame = tables.read(source)
    name = str(source) if isinstance(source, str | Path) else "the table"
    spec = tables.check(
        frame, client, target, cluster, drop=drop, task=task, source=name, keep=keep, event=event, time=time
    )
    frame, names, counts = tables.by_client(frame, client)
    sizes = torch.tensor(counts)
    fractions = as_fractions(split)
    times = None
    if time is None:
        parts = split_rows(sizes, fractions, seed)
    else:
        frame, times = in_time(frame, counts, time, name)
        parts = split_in_time(sizes, times, fractions)
    training = parts.train.order
    rows, untrained = frame[training.numpy()], _model(model, spec.task, l2)
    if encoding is not None:
        preprocessor = Preprocessor.from_json(encoding)
        trained = untrained.with_levels(preprocessor.levels)
    elif privacy is not None:
        statistics, doubts = noisy_statistics(rows, spec, client, privacy, Noise())
        preprocessor, trained = encoded(spec, statistics, untrained)
        spec.warnings.extend(doubts)
        encoding, paid = preprocessor.to_json(), (SHARE * privacy.epsilon, SHARE * privacy.delta)
    else:
        preprocessor, trained = encoded(spec, local_statistics(rows, spec), untrained, every_group=True)
    targets = preprocessor.encode_target(frame)
    if class_weights is not None:
        if privacy is not None and class_weights == BALANCED:
            raise SettingError("balanced class weights would tell how many rows have a class; give numbers")
        trained = trained.with_class_weights(chosen(class_weights, spec.classes, targets[training]))
    clusters, cluster_names = None, None
    known = spec.cluster or grouping.finest(grouping.combined(frame, spec.groups), client, spec.groups)
    if known is not None:
        first_rows = (sizes.cumsum(0) - sizes).numpy()
        labels = grouping.combined(frame, spec.groups)[known][first_rows]
        clusters, cluster_names = encode_clusters(labels.to_list())
    options = {
        "source": bundled.recorded(source) if isinstance(source, str | Path) else "",
        "client": client,
        "target": target,
        "cluster": cluster if cluster is None or isinstance(cluster, str) else list(cluster),
        "task": task,
        "drop": list(drop),
        **({"keep": list(keep)} if keep else {}),
        **({} if event is None else {"event": event}),
        **({} if time is None else {"time": time}),
        "split": list(fractions),
        **({} if encoding is None else {"encoding": encoding, "paid": list(paid)}),
    }
    return from_rows(
        preprocessor.encode(frame),
        targets,
        sizes,
        model=trained,
        names=names,
        clusters=clusters,
        cluster_names=cluster_names,
        split=fractions,
        parts=parts,
        seed=seed,
        dtype=torch.float64,
        device=device,
        loop=loop,
        table=TableSource(options, preprocessor, spec.warnings, times),
    )


def encoded(
    spec: TableSpec, statistics: Statistics, model: Model, *, every_group: bool = False
) -> tuple[Preprocessor, Model]:
    """Return the encoding that a model takes, and the model with what the encoding says of categories."""
    preprocessor = Preprocessor.from_statistics(
        spec,
        statistics,
        encoding=model.encoding,
        target_in_units=model.target_in_units,
        every_group=every_group,
    )
    if isinstance(model, Ordinal) and any(not _is_number(name) for name in spec.classes):
        order = " < ".join(spec.classes[:20]) + (" < ..." if len(spec.classes) > 20 else "")
        spec.warnings.append(
            f"Target column {spec.target!r}: classes are taken in this order: {order}. If that is wrong, number them."
        )
    return preprocessor, model.with_levels(preprocessor.levels)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _model(model: Model | str | None, task: str, l2: float | None) -> Model:
    if model is None or isinstance(model, str):
        return table_model(model or "linear", task, l2)
    found = as_model(model)
    if isinstance(found, Cox) and task != "survival":
        raise SettingError(
            "Cox regression needs the column that says whether the event happened: --event COLUMN"
        )
    if task == "survival" and not isinstance(found, Cox):
        raise SettingError(
            f"{type(found).__name__} does not train on survival times; take coterie.models.cox() with a method such as "
            "local, fedavg, fine-tuned, ditto or rtfa"
        )
    return found
