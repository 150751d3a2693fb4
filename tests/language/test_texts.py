"""Texts by client: reading, tokenising once, packing, splitting by document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie._core.errors import DataError, SettingError
from coterie.data.languages import conllu_languages
from coterie.data.texts import Texts, read_texts
from coterie.data.tokens import Tokens, rows_of, tokenised
from coterie.models.causal_lm import causal_lm

Documents = dict[str, list[str]]


class Words:
    """A tokenizer that counts how often it is asked: a token is the length of a word."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        self.asked += 1
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}

    def get_vocab(self) -> dict[str, int]:
        return {"word": 1}


def test_folders_and_files_are_clients(tmp_path: Path) -> None:
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca" / "2.txt").write_text("segon")
    (tmp_path / "ca" / "1.txt").write_text("primer\n\nencara el primer")
    (tmp_path / "ca" / ".hidden").write_text("x")
    (tmp_path / "de.txt").write_text("erster Absatz\n \nzweiter Absatz\r\n\r\ndritter\n")
    texts = read_texts(tmp_path)
    assert texts.names == ["ca", "de"]
    assert texts.documents[0] == ["primer\n\nencara el primer", "segon"]
    assert [one.strip() for one in texts.documents[1]] == ["erster Absatz", "zweiter Absatz", "dritter"]


def test_tables_have_a_document_in_every_row(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text("who,words\nnl,een huis\nca,una casa\nnl,twee huizen\n")
    texts = read_texts(path, client="who", text="words")
    assert texts == Texts(["ca", "nl"], [["una casa"], ["een huis", "twee huizen"]])
    assert read_texts({"nl": "een huis", "ca": ["una", "casa"]}).documents == [["een huis"], ["una", "casa"]]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty; put a folder or file"):
        read_texts(tmp_path)
    (tmp_path / "ca.txt").write_bytes(b"bon dia\n\xff\n")
    with pytest.raises(DataError, match=r"client 'ca': .*ca\.txt, line 2: byte 0xff is not UTF-8"):
        read_texts(tmp_path)
    (tmp_path / "ca.txt").write_text("  \n\n ")
    with pytest.raises(DataError, match=r"ca\.txt: client 'ca' has no text; remove it"):
        read_texts(tmp_path)
    (tmp_path / "ca.txt").write_text("bon dia")
    with pytest.raises(DataError, match="is one file; put the texts of each client"):
        read_texts(tmp_path / "ca.txt")
    with pytest.raises(SettingError, match="name columns of a table"):
        read_texts(tmp_path, client="who")
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca" / "a.txt").write_text("a")
    with pytest.raises(DataError, match="there are two clients 'ca'; rename one"):
        read_texts(tmp_path)
    table = {"who": ["a", "b"], "words": ["x", "y"]}
    with pytest.raises(SettingError, match="say which columns hold client and text"):
        read_texts(table, client="who")
    with pytest.raises(DataError, match="no column 'wrods'"):
        read_texts(table, client="who", text="wrods")
    with pytest.raises(DataError, match="row 2 has no client"):
        read_texts({"who": ["a", None], "words": ["x", "y"]}, client="who", text="words")
    with pytest.raises(DataError, match="client 'b' has no text"):
        read_texts({"who": ["a", "b"], "words": ["x", None]}, client="who", text="words")


def test_tokenised_once(tmp_path: Path) -> None:
    texts, tokenizer = Texts(["a", "b"], [["x yy", "zzz"], ["x"]]), Words()
    first = tokenised(texts, tokenizer, tmp_path)
    again = tokenised(texts, tokenizer, tmp_path)
    assert tokenizer.asked == 1 and torch.equal(first.ids, again.ids)
    assert again.ids.tolist() == [1, 2, 3, 1] and again.counts().tolist() == [3, 1]
    tokenised(Texts(["a", "b"], [["x yy", "zzz"], ["y y"]]), tokenizer, tmp_path)
    assert tokenizer.asked == 2
    for file in (tmp_path / "tokens").iterdir():
        file.write_bytes(file.read_bytes()[:20])
    assert torch.equal(tokenised(texts, tokenizer, tmp_path).ids, first.ids) and tokenizer.asked == 3
    (tmp_path / "file").write_text("no folder")
    assert torch.equal(tokenised(texts, tokenizer, tmp_path / "file").ids, first.ids)


def test_every_token_but_the_first_is_predicted_once() -> None:
    lengths = torch.tensor([3, 5, 4])
    tokens = Tokens(["a"], torch.arange(1, 13, dtype=torch.int32), [lengths])
    rows = rows_of(tokens, separator=0, context=4, split=(1.0, 0.0, 0.0))["train"]
    stream = [1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 9, 10, 11, 12, 0]
    predicted = [int(token) for x, y in zip(rows.x, rows.y, strict=True) for token in x[1 : 1 + int(y)]]
    assert predicted == stream[1:]
    assert rows.x[0].tolist() == [1, 2, 3, 0, 4] and rows.x[1, 0] == rows.x[0, -1]
    assert rows.y.tolist() == [4.0, 4.0, 4.0, 2.0]


def test_documents_stay_whole_in_one_split() -> None:
    lengths = [torch.full((20,), 3), torch.full((10,), 3)]
    owner = torch.arange(1, 31, dtype=torch.int32).repeat_interleave(3)
    splits = rows_of(Tokens(["a", "b"], owner, lengths), 0, 4, (0.6, 0.2, 0.2), seed=1)
    seen = {name: set(rows.x.unique().tolist()) - {0} for name, rows in splits.items()}
    assert sum(map(len, seen.values())) == 30 == len(set.union(*seen.values()))
    assert {name: len(ids) for name, ids in seen.items()} == {"train": 18, "validation": 6, "test": 6}
    assert set(splits["test"].of(1)[0].unique().tolist()) - {0} <= set(range(21, 31))


def test_at_most_so_many_tokens() -> None:
    tokens = Tokens(
        ["a", "b"], torch.arange(1, 13, dtype=torch.int32), [torch.tensor([3, 5]), torch.tensor([4])]
    )
    rows = rows_of(tokens, 0, 4, (1.0, 0.0, 0.0), most=5)["train"]
    assert rows.of(0)[0].flatten().tolist() == [1, 2, 3, 0, 4, 4, 5, 0, 0, 0]
    assert rows.of(1)[0].flatten().tolist() == [9, 10, 11, 12, 0]
    for options in ({"context": 0}, {"most": 1}):
        with pytest.raises(SettingError):
            rows_of(tokens, 0, **{"context": 4, "split": (1.0, 0.0, 0.0), **options})  # type: ignore[arg-type]


def test_a_client_without_held_out_documents_still_trains(tiny: Path, documents: Documents) -> None:
    texts = {"long": documents["ca"], "short": "un"}
    fed = coterie.Federation.from_texts(texts, causal_lm(tiny), context=8)
    assert fed.rows["test"].tolist()[1] == 0 and fed.rows["train"].tolist()[1] == 1
    run = coterie.fit(fed, coterie.algorithms.FedAvg(lr=0.01, steps=1, batch=2), rounds=1)
    assert run.score("test", "perplexity").isnan().tolist() == [False, True]


def test_texts_need_a_language_model() -> None:
    with pytest.raises(SettingError, match=r"models\.causal_lm"):
        coterie.Federation.from_texts({"a": "x"}, coterie.models.linear())


def test_corpora_by_language(tmp_path: Path) -> None:
    marked = "# newdoc id = {0}\n# sent_id = {0}-s1\n# text = Un gos.\n1\tUn\t_\n\n# text = Dos gats.\n1\tDos\t_\n\n"
    (tmp_path / "ca_x.conllu").write_text(marked.format("d1") + marked.format("d2"))
    plain = "".join(f"0\tHier\tO\n1\tstehen\tO\n2\t(\tO\n3\t{k}\tO\n4\t)\tO\n5\t.\tO\n\n" for k in range(25))
    (tmp_path / "de_val.conllu").write_text(plain)
    texts = conllu_languages(tmp_path, ["ca", "de"])
    assert texts.documents[0] == ["Un gos. Dos gats."] * 2
    assert len(texts.documents[1]) == 2 and texts.documents[1][1].startswith("Hier stehen (20). Hier")
    assert conllu_languages(tmp_path, ["ca"], sentences=1).documents[0] == ["Un gos.", "Dos gats."] * 2
    (tmp_path / "news").mkdir()
    (tmp_path / "news" / "ca_y.conllu").write_text(marked.format("d3"))
    assert len(conllu_languages(tmp_path, ["ca"]).documents[0]) == 3
    assert conllu_languages(tmp_path, ["ca"], within="news").documents == [["Un gos. Dos gats."]]
    with pytest.raises(DataError, match=r"has no text of 'de'.* in a folder 'news'"):
        conllu_languages(tmp_path, ["de"], within="news")
    with pytest.raises(SettingError, match="sentences=0"):
        conllu_languages(tmp_path, ["ca"], sentences=0)
    with pytest.raises(DataError, match="has no text of 'nl'"):
        conllu_languages(tmp_path, ["ca", "nl"])
