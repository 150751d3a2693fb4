from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from coterie import resume
from coterie.cli import main
from coterie.train import checkpoint


@pytest.fixture()
def folder(tmp_path: Path, documents: dict[str, list[str]]) -> Path:
    for language, texts in documents.items():
        (tmp_path / "texts" / language).mkdir(parents=True)
        for k, text in enumerate(texts):
            (tmp_path / "texts" / language / f"{k}.txt").write_text(text, encoding="utf-8")
    return tmp_path / "texts"


def train(folder: Path, tiny: Path, out: Path, *more: str) -> list[str]:
    small = ["--model", str(tiny), "--context", "16", "--rank", "2", "--set", "batch=2", "--out", str(out)]
    return ["adapters", str(folder), *small, *more]


@pytest.mark.slow
def test_from_a_folder_of_texts_to_adapters_that_peft_reads(folder, tiny, tmp_path, capsys) -> None:
    out, result = tmp_path / "run", tmp_path / "result.json"
    main_exits_well(train(folder, tiny, out, "--rounds", "3", "--json", str(result)))
    said = capsys.readouterr().out
    assert "perplexity" in said and "Adapters:" in said
    found = json.loads(result.read_text())
    assert set(found["clients"]) == {"ca", "es", "de", "nl"}
    assert found["settings"]["domain"] == "simplex" and found["settings"]["batch"] == 2

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = resume(out)
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(out / "adapters" / "de")).eval()
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, run.model("de")(ids), rtol=1e-4, atol=1e-5)


def test_one_document_per_client_is_refused_before_training(tiny, tmp_path, capsys) -> None:
    """It cannot be both trained on and validated on; the last adapters can be had."""
    for language, text in (("de", "die katze schläft. "), ("nl", "de kat slaapt. ")):
        (tmp_path / "texts" / language).mkdir(parents=True)
        (tmp_path / "texts" / language / "all.txt").write_text(text * 40, encoding="utf-8")
    words = train(tmp_path / "texts", tiny, tmp_path / "run", "--rounds", "1", "--algorithm", "local")
    with pytest.raises(SystemExit) as end:
        main(words)
    said = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2 and "no client has a document left to validate on" in said
    assert "--select last" in said and not (tmp_path / "run").exists()
    main_exits_well([*words, "--select", "last"])


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_writes_its_adapters(folder, tiny, tmp_path, monkeypatch) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    main_exits_well(train(folder, tiny, whole, "--rounds", "4", "--algorithm", "local"))
    save = checkpoint.save

    def saved_and_stopped(*arguments) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Clock, "due", lambda clock, t: t == 2)
        patch.setattr(checkpoint, "save", saved_and_stopped)
        with pytest.raises(SystemExit) as end:
            main(train(folder, tiny, stopped, "--rounds", "4", "--algorithm", "local"))
    assert end.value.code not in (0, 2)
    assert not (stopped / "adapters").exists()
    main_exits_well(["resume", str(stopped)])
    one, other = (
        (run / "adapters" / "ca" / "adapter_model.safetensors").read_bytes() for run in (whole, stopped)
    )
    assert one == other


def test_texts_that_are_not_there_are_named(tiny, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(train(tmp_path / "nowhere", tiny, tmp_path / "run"))
    assert stop.value.code == 2
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def main_exits_well(arguments: list[str]) -> None:
    try:
        main(arguments)
    except SystemExit as stop:
        assert stop.code in (0, None)


@pytest.mark.slow
def test_the_report_speaks_of_perplexity(folder, tiny, tmp_path) -> None:
    for method in ("cobo", "local"):
        main_exits_well(train(folder, tiny, tmp_path / method, "--rounds", "2", "--algorithm", method))
    page = tmp_path / "report.html"
    main_exits_well(["report", str(tmp_path / "cobo"), str(tmp_path / "local"), "--out", str(page)])
    text = page.read_text(encoding="utf-8")
    assert "its perplexity" in text and "target's units" not in text and "right answers" not in text
