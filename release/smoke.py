"""Run every command of an installed coterie as a user would, in an empty folder, with and without extras."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from release.build import Failed

HEART = ("heart_disease", "--client", "hospital", "--target", "sick")

# What the commands read that does not come with the package. Each is run by the installed Python.
INPUTS = """
import pathlib, polars
from coterie.data import bundled
table = polars.read_csv(bundled.path("heart_disease")).filter(polars.col("hospital") == "cleveland").head(60)
table.with_columns(hospital=polars.lit("elsewhere")).write_csv("elsewhere.csv")
for client, text in (("de", "die katze schläft im haus. "), ("nl", "de kat slaapt in het huis. ")):
    pathlib.Path("texts", client).mkdir(parents=True)
    for number in range(12):  # documents: some train, some validate, some test
        pathlib.Path("texts", client, f"{number}.txt").write_text(text * 10, encoding="utf-8")
"""
LANGUAGE_MODEL = """
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
tokens = Tokenizer(models.BPE())
tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokens.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
tokens.train_from_iterator(["die katze", "de kat"], trainers.BpeTrainer(
    vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False))
transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>").save_pretrained("tiny")
transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, bos_token_id=0, eos_token_id=0, pad_token_id=0)).save_pretrained("tiny")
"""
PICTURES = """
import pathlib
from PIL import Image
from coterie.data import images
for kind, shade in (("day", 200), ("night", 20)):
    pathlib.Path("pictures", "train", kind).mkdir(parents=True)
    Image.new("RGB", (32, 32), (shade,) * 3).save(f"pictures/train/{kind}/1.png")
assert images.cifar("pictures", "train").x.shape == (2, 3, 32, 32)
"""
MIXED_MODEL = """
import torch
from coterie.experiments.mixed_model import mixed_model
client = torch.arange(8).repeat_interleave(10)
noise = torch.randn(80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
fitted = mixed_model(torch.ones(80, 1, dtype=torch.float64), client.double() + noise, client, torch.arange(8) // 4)
assert torch.isfinite(fitted.models).all()
"""


class Step(NamedTuple):
    """A command, or code for the installed Python; `extra` is what it needs beyond the core."""

    words: tuple[str, ...]
    extra: str = ""
    prepare: str = ""


STEPS = (
    Step(("--version",)),
    Step(("--help",)),
    Step(("data", "describe", *HEART)),
    Step(("advise", *HEART)),
    Step(("plan", *HEART, "--accuracy", "0.001", "--rounds", "10")),
    Step(("theory", "risk", "--gamma", "2", "--r2", "1", "--rho2", "2", "--noise", "0.25")),
    Step(("algorithms",)),
    Step(("algorithms", "ditto")),
    Step(("reproduce",)),
    Step(("reproduce", "known-clusters/baselines", "--quick")),
    Step(("fit", *HEART, "--algorithm", "ditto", "--rounds", "5", "--out", "fitted")),
    Step(("resume", "fitted")),
    Step(("compare", *HEART, "--rounds", "5", "--budget", "2", "--out", "compared")),
    Step(("report", "fitted", "compared", "--out", "page.html")),
    Step(("predict", "fitted", "heart_disease", "--out", "answers.csv")),
    Step(("adapt", "fitted", "elsewhere.csv", "--out", "adapted")),
    Step(("export", "fitted", "--client", "cleveland", "--to", "csv", "--out", "model.csv")),
    Step(("export", "fitted", "--client", "cleveland", "--to", "safetensors", "--out", "model.safetensors")),
    Step(("export", "fitted", "--client", "cleveland", "--to", "torchscript", "--out", "model.pt")),
    Step(("leaderboard", "run", "--methods", "local,fedavg", "--data", "diabetes", "--seeds", "1", "--rounds", "3",
          "--trials", "1", "--out", "board")),
    Step(("demo", "--out", "demo")),
    Step(("export", "fitted", "--client", "cleveland", "--to", "onnx", "--out", "model.onnx"), "export"),
    Step(("tune", *HEART, "--algorithm", "ditto", "--trials", "2", "--rounds", "3", "--out", "tuned"), "tune"),
    Step(("fit", *HEART, "--rounds", "2", "--track", "tensorboard", "--out", "boarded"), "track"),
    Step(("fit", *HEART, "--rounds", "2", "--track", "mlflow", "--out", "flowed"), "track"),
    Step(("fit", *HEART, "--rounds", "2", "--track", "wandb", "--out", "weighed"), "track"),
    Step(("fit", *HEART, "--algorithm", "fedavg", "--rounds", "2", "--epsilon", "8", "--out", "private"), "privacy"),
    Step(("privacy", *HEART, "--epsilons", "8", "--rounds", "2", "--seeds", "1"), "privacy"),
    Step(("federate", "init", "federation", "--node", "a"), "flower"),
    Step(("federate", "demo", "--rounds", "2", "--out", "hospitals"), "flower"),
    Step(("adapters", "texts", "--model", "tiny", "--rounds", "1", "--context", "16", "--out", "spoken"), "llm",
         LANGUAGE_MODEL),
    Step((), "images", PICTURES),
    Step((), "stats", MIXED_MODEL),
    Step(("fit", *HEART, "--algorithm", "fedavg", "--rounds", "2", "--workers", "ray:2", "--out", "shared"), "ray"),
)  # fmt: skip


def commands(python: Path, extras: set[str], folder: Path, core: bool) -> int:
    """Run the commands of these extras, and of the core if asked; raise `Failed` at the first that is wrong.

    A command whose extra is not installed has to exit with code 2, name the `pip install` that is missing, and leave
    nothing behind.

    Parameters
    ----------
    python
        Python of the environment, beside which `coterie` is.
    extras
        The extras installed there.
    folder
        An empty folder to work in.
    core
        Whether to run the commands of the core, and those whose extras are missing.

    Returns
    -------
    int
        The number of commands that were run.
    """
    steps = [step for step in STEPS if step.extra in extras or core]
    if not core and "export" in extras:  # it exports a run
        steps.insert(0, next(step for step in STEPS if step.words[:1] == ("fit",)))
    _require(0, _run([python, "-c", INPUTS], folder), ("python -c", INPUTS))
    for step in steps:
        lacking = step.extra and step.extra not in extras
        if step.prepare and not lacking:
            _require(0, _run([python, "-c", step.prepare], folder), ("python -c", step.prepare))
        if not step.words:
            continue
        before = set(folder.iterdir())
        done = _run([python.with_name(f"coterie{python.suffix}"), *step.words], folder)
        _require(2 if lacking else 0, done, step.words)
        if lacking and f'pip install "coterie[{step.extra}]"' not in done.stderr.replace("\n", " "):
            raise Failed(
                f"coterie {' '.join(step.words)} does not say how to install [{step.extra}]:\n{done.stderr}"
            )
        if lacking and set(folder.iterdir()) != before:
            raise Failed(f"coterie {' '.join(step.words)} failed and left {set(folder.iterdir()) - before}")
    return len(steps)


def _run(words: list[object], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COTERIE"))
    }
    environment |= {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPYCACHEPREFIX"] = str(
        folder.with_name("bytecode")
    )  # what one environment compiled, others have
    return subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def _require(code: int, done: subprocess.CompletedProcess[str], words: tuple[str, ...]) -> None:
    if done.returncode != code or "Traceback" in done.stderr:
        raise Failed(
            f"{' '.join(words)}: exit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
        )
