"""A tiny Llama with random weights and a tokenizer of its own, on disk as a user would have them; no network."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from coterie.deploy import demo_texts

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

LANGUAGES = {"ca": "catalan", "es": "spanish", "de": "german", "nl": "dutch"}
WORDS = {code: demo_texts.WORDS[language].split() for code, language in LANGUAGES.items()}


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
    pytest.importorskip("transformers", reason="needs coterie[llm]")
    pytest.importorskip("peft", reason="needs coterie[llm]")
    folder = tmp_path_factory.mktemp("tiny")
    demo_texts.write_language_model(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are kept in the folder of the test."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def tiny_gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model and tokenizer as one GGUF file."""
    pytest.importorskip("gguf", reason="needs coterie[llm]")
    return write_gguf(tiny, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(folder: Path, path: Path) -> Path:
    """The model and tokenizer of a transformers folder in one file, float32."""
    from gguf import GGUFWriter

    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    vocabulary = tokenizer["model"]["vocab"]
    words = [word for word, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3 if word == "<end>" else 1 for word in words])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, value in load_file(folder / "model.safetensors").items():
        writer.add_tensor(*_renamed(name, value, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _renamed(name: str, value: np.ndarray, heads: dict[str, int]) -> tuple[str, np.ndarray]:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight", value
    if name == "model.norm.weight":
        return "output_norm.weight", value
    _, _, layer, part, _ = name.replace("self_attn.", "self_attn/").replace("mlp.", "mlp/").split(".")
    short = NAMES[part.replace("/", ".")]
    if short in heads:  # llama.cpp turns neighbouring pairs where transformers turns halves
        rows = value.reshape(heads[short], 2, -1, value.shape[1]).swapaxes(1, 2)
        value = np.ascontiguousarray(rows.reshape(value.shape))
    return f"blk.{layer}.{short}.weight", value
