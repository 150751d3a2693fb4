"""Optional packages: the extra that installs each, and the error that says so where one is missing."""

from __future__ import annotations

import importlib.util

from coterie._core.errors import SettingError

# What is imported of each extra. `coterie.train.run` and `coterie.models.fast` use two packages that have none.
EXTRAS = {
    "flower": ("flwr", "uvicorn", "httpx", "cryptography", "Crypto"),
    "privacy": ("dp_accounting", "cryptography"),
    "export": ("onnx", "onnxscript"),
    "tune": ("optuna",),
    "track": ("tensorboard", "mlflow", "wandb"),
    "llm": ("transformers", "tokenizers", "peft", "gguf"),
    "images": ("PIL",),
    "stats": ("statsmodels",),
    "ray": ("ray",),
}


class MissingExtra(SettingError):
    """Raised when a package that comes with an extra is not installed; the message has the command that installs it."""


def require(extra: str, purpose: str, *packages: str) -> None:
    """Raise `MissingExtra` unless the packages of an extra are installed; nothing is imported.

    Parameters
    ----------
    extra
        One of `EXTRAS`.
    purpose
        What needs it, such as "tuning".
    *packages
        Those that are needed; by default all of the extra.

    Examples
    --------
    >>> require("tune", "tuning")  # doctest: +SKIP
    """
    for package in packages or EXTRAS[extra]:
        if importlib.util.find_spec(package) is None:
            raise missing(extra, purpose, package)


def missing(extra: str, purpose: str, what: str) -> MissingExtra:
    """Return the error for an extra that is missing or does not fit."""
    # Double quotes, because the command prompt of Windows knows no others.
    return MissingExtra(f'{purpose} needs {what}. Install it: pip install "coterie[{extra}]"')


def explain(problem: ImportError) -> MissingExtra | None:
    """Return the error for an import that failed, or None if no extra has the package."""
    package = (problem.name or "").partition(".")[0]
    extra = next((name for name, packages in EXTRAS.items() if package in packages), None)
    return None if extra is None else missing(extra, "this", package)
