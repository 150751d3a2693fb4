"""The adapters of every client of a run, in the format of peft."""

from __future__ import annotations

import shutil
from pathlib import Path

from coterie._core import systems
from coterie._core.errors import RunError, SettingError
from coterie.models.causal_lm import CausalLM
from coterie.train.run import Run


def save_adapters(run: Run, folder: str | Path) -> list[Path]:
    """Write a folder per client that `peft.PeftModel.from_pretrained(base, folder)` reads.

    Parameters
    ----------
    run
        A run of a causal language model.
    folder
        The folder to create.

    Returns
    -------
    list of Path
        The folders in the order of the clients.
    """
    folder, model = Path(folder), run.fed.model
    if not isinstance(model, CausalLM):
        raise SettingError(f"{type(model).__name__} has no adapters; use `coterie export` for its models")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} exists already. Choose another folder, or delete it.")
    names = systems.file_names(run.fed.names)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    for name, adapters in zip(names, run.personal, strict=True):
        model.save_adapter(adapters, part / name)
    systems.replace(part, folder)
    return [folder / name for name in names]


def keep_adapters(run: Run) -> Path:
    """Write the adapters into the run's own folder unless they are there, and return that folder."""
    assert run.folder is not None
    place = run.folder / "adapters"
    if not place.exists():
        save_adapters(run, place)
    return place
