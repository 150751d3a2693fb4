"""A tiny Llama with random weights and a tokenizer of its own, on disk as a user would have them; no network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

WORDS = {
    "ca": "el gat dorm a la casa i el gos corre pel carrer amb la nena que canta".split(),
    "es": "el gato duerme en la casa y el perro corre por la calle con la chica que canta".split(),
    "de": "die katze schläft im haus und der hund läuft auf der straße mit dem mädchen".split(),
    "nl": "de kat slaapt in het huis en de hond loopt op straat met het meisje dat zingt".split(),
}


def sentences(language: str, count: int, seed: int = 0) -> list[str]:
    """Documents of eight to fifteen words."""
    generator = torch.Generator().manual_seed(seed + ord(language[0]))
    words = WORDS[language]
    return [
        " ".join(words[int(k)] for k in torch.randint(len(words), (8 + one % 8,), generator=generator)) + "."
        for one in range(count)
    ]


@pytest.fixture(scope="session")
def documents() -> dict[str, list[str]]:
    """Texts of four clients, a language each."""
    return {language: sentences(language, 24) for language in WORDS}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama with two layers: config.json, model.safetensors, tokenizer.json."""
    transformers = pytest.importorskip("transformers", reason="needs coterie[llm]")
    pytest.importorskip("peft", reason="needs coterie[llm]")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words) for words in WORDS.values()], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", bos_token="<end>"
    )
    fast.save_pretrained(str(folder))
    config = transformers.LlamaConfig(
        vocab_size=len(fast),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are kept in the folder of the test."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
