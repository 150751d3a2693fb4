"""Made-up texts of four clients and a tiny language model with random weights: nothing to download."""

from __future__ import annotations

from pathlib import Path

import torch

from coterie._core import randomness
from coterie.models.language_weights import quiet, require

WORDS = {
    "catalan": "el gat dorm a la casa i el gos corre pel carrer amb la nena que canta",
    "dutch": "de kat slaapt in het huis en de hond loopt op straat met het meisje dat zingt",
    "german": "die katze schläft im haus und der hund läuft auf der straße mit dem mädchen",
    "spanish": "el gato duerme en la casa y el perro corre por la calle con la chica que canta",
}


def documents(language: str, count: int = 40) -> list[str]:
    """Return texts of eight to fifteen words of a language, drawn at random.

    Examples
    --------
    >>> len(documents("dutch", 3))
    3
    """
    words, found = WORDS[language].split(), []
    for number in range(count):
        length = 8 + number % 8
        keys = randomness.key("demo texts", language, number, torch.arange(length))
        found.append(" ".join(words[int(u * len(words))] for u in randomness.uniform(keys).tolist()) + ".")
    return found


def write_language_model(folder: Path) -> None:
    """Write a Llama with two layers and random weights, and a tokenizer of the words above, into a folder."""
    transformers = require()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS.values(), trainer)
    with quiet(transformers), torch.random.fork_rng(devices=[]):
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
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(str(folder))
