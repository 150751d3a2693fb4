"""Experiment cobo/languages: perplexity by language, and which languages learn from each other."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coterie._core.errors import DataError, SettingError
from coterie.algorithms import make
from coterie.data.languages import LANGUAGES, conllu_languages
from coterie.data.texts import Texts
from coterie.engine.federation import Federation
from coterie.experiments.jobs import continued
from coterie.experiments.spec import Experiment, RunPlan, build, shared_data
from coterie.models.causal_lm import CausalLM, causal_lm
from coterie.models.language_weights import Location, locate
from coterie.report.weights import weights_of
from coterie.train.fit import fit
from coterie.train.history import mean_over_clients
from coterie.train.run import Run


@dataclass(frozen=True)
class Corpus:
    """The table [data]: amount of text, tokens per row, and rows per gradient."""

    archive: str
    languages: tuple[str, ...] = LANGUAGES
    context: int = 512
    tokens: int | None = None  # per language, at most
    batch: int = 200
    split: tuple[float, ...] = (0.8, 0.1, 0.1)
    within: str | None = None  # one folder of the archive, instead of all
    sentences: int | None = None  # per document, instead of the documents marked in the files
    tuning_steps: int | None = None  # replaces the setting of that name, if the method has it


def perplexities(experiment: Experiment, seed: int, home: Path | None = None) -> dict[str, Any]:
    """Train a method on the languages; return the test perplexity of each, and for CoBo the weights between them."""
    plan = experiment.plans[0]
    settings = dict(plan.settings)
    if "method" not in settings:
        raise SettingError("settings need a method, such as 'cobo'")
    corpus = build(Corpus, experiment.path, f"data of {plan.key!r}", plan.data)
    if corpus.tuning_steps is not None and "tuning_steps" in settings:
        settings["tuning_steps"] = corpus.tuning_steps
    algorithm = make(settings.pop("method"), **settings, batch=corpus.batch)
    fed = _federation(corpus, plan, seed)
    before = _tokens_trained(fed)
    for split in ("validation", "test"):
        for name, rows in zip(fed.names, fed.rows[split].tolist(), strict=True):
            if rows == 0:
                raise DataError(f"client {name!r} has no {split} documents; use more tokens of each language")
    if home is not None:
        run = continued(fed, algorithm, plan, home)
    else:
        run = fit(
            fed,
            algorithm,
            plan.rounds,
            evaluate_every=plan.evaluate_every,
            select=plan.select or "last",
        )
    return {**_scores(run), **_speed(run, before), **_choices(experiment, run, seed)}


def _federation(corpus: Corpus, plan: RunPlan, seed: int) -> Federation:
    """Build the federation of languages."""
    settings = tuple((name, value) for name, value in plan.model.items() if name != "name")
    fractions = (float(corpus.split[0]), float(corpus.split[1]), float(corpus.split[2]))
    return Federation.from_texts(
        _texts(shared_data(corpus.archive), corpus.languages, corpus.sentences, corpus.within),
        _model(settings, locate(str(plan.model["path_or_name"]))),
        context=corpus.context,
        tokens=corpus.tokens,
        split=fractions,
        seed=seed,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


@functools.lru_cache(maxsize=1)
def _model(settings: tuple[tuple[str, Any], ...], found: Location) -> CausalLM:
    """Return the model whose weights are `found`; jobs of one process share them and what was compiled."""
    return causal_lm(**dict(settings))


@functools.lru_cache(maxsize=1)
def _texts(path: Path, languages: tuple[str, ...], sentences: int | None, within: str | None) -> Texts:
    """Return the documents; jobs of one process read them once."""
    return conllu_languages(path, languages, sentences, within)


def _scores(run: Run) -> dict[str, Any]:
    """Return test perplexities, losses, traffic, and the curve of validation perplexity."""
    test = run.score("test", "perplexity")
    rounds, values = run.history.curve("validation", "perplexity")
    up, down = run.traffic()
    found: dict[str, Any] = {
        "perplexity": mean_over_clients(test),
        "worst": float(test.max()),
        **{name: float(value) for name, value in zip(run.fed.names, test, strict=True)},
        "loss": mean_over_clients(run.score("test", "loss")),
        "train_loss": mean_over_clients(run.score("train", "loss")),
        "validation_loss": mean_over_clients(run.score("validation", "loss")),
        "round": run.deployed_round,
        "mb_up": up,
        "mb_down": down,
        "clients": {"values": test.tolist(), "higher": False},
    }
    if rounds:
        shown = [value if math.isfinite(value) else None for value in values]
        found["curve"] = {
            "split": "validation",
            "metric": "perplexity",
            "rounds": rounds,
            "values": shown,
        }
        lowest = min(value for value in values if math.isfinite(value))
        found["overfitting"] = values[-1] / lowest if math.isfinite(values[-1]) else math.inf
    return found


def _tokens_trained(fed: Federation) -> int:
    """Return the number of tokens of which this process has taken gradients."""
    assert isinstance(fed.model, CausalLM)
    return fed.model.held.trained


def _speed(run: Run, before: int) -> dict[str, float]:
    """Return seconds of training and scoring, tokens in gradients (of this process), and TFLOP per second."""
    model = run.fed.model
    assert isinstance(model, CausalLM) and model.length is not None
    tokens = float(model.held.trained - before)
    work = tokens * model.adapted.flops_per_token(model.length - 1)
    return {
        "train_seconds": run.seconds,
        "tokens": tokens,
        "tflops": work / max(run.seconds, 1e-9) / 1e12,
    }


def _choices(experiment: Experiment, run: Run, seed: int) -> dict[str, Any]:
    """Return the last weights, named like `ca>es`, and a plot of all of them over the rounds."""
    title = f"{experiment.file.title}: {run.algorithm.name}, seed {seed}"
    page = weights_of(run.history, run.fed.names, None, title)
    if page is None:
        return {}
    names = run.fed.names
    curves = {
        f"{names[i]} to {names[j]}": (page["rounds"], [matrix[i][j] for matrix in page["matrices"]])
        for i in range(len(names))
        for j in range(len(names))
        if i != j
    }
    last = page["matrices"][-1]
    weights = {f"{a}>{b}": last[i][j] for i, a in enumerate(names) for j, b in enumerate(names)}
    return {**weights, "plots": {"weights": {**page, "curves": curves}}}
