"""Checksums of a run folder: manifest.json lists the SHA-256 of every file, and readers compare.

The manifest is written before the file that makes a folder valid (config.toml) or complete (result.json), so a folder
that can be opened has a manifest that fits. Folders of versions that wrote none are read unchecked.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from coterie._core.errors import RunError

MANIFEST = "manifest.json"
_DEPTH = 2  # a listed file is in the folder of its manifest or in a folder inside it
_UNLISTED = (".tmp", ".html", ".js", MANIFEST)  # half-written files, pages, and the manifest itself
_FOLDERS = ("models",)  # checkpoints have hashes of their own, exports leave the folder


def render(folder: Path, texts: Mapping[str, str]) -> str:
    """Return the manifest of a folder as it will be once `texts` are written.

    Parameters
    ----------
    folder
        The run folder.
    texts
        Contents of files that are about to be written, by name.

    Returns
    -------
    str
        The JSON text of the manifest.
    """
    there = [path for place in (folder, *(folder / name for name in _FOLDERS)) for path in place.glob("*")]
    listed = [path for path in there if path.is_file() and not path.name.endswith(_UNLISTED)]
    sums = {path.relative_to(folder).as_posix(): sha256(path) for path in listed}
    sums |= {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    return json.dumps({"sha256": dict(sorted(sums.items()))}, indent=2) + "\n"


def check(path: Path) -> None:
    """Raise a RunError if the file is not as the manifest of its run folder lists it.

    Parameters
    ----------
    path
        A file. One that no manifest lists, or that is missing, passes.
    """
    for folder in list(path.absolute().parents)[:_DEPTH]:
        manifest = folder / MANIFEST
        if not manifest.is_file():
            continue
        expected = _sums(manifest).get(os.path.relpath(path.absolute(), folder).replace(os.sep, "/"))
        if expected is not None and path.is_file() and sha256(path) != expected:
            raise RunError(
                f"{path} is damaged: it does not match its hash in {MANIFEST}. Restore it from a copy, or train "
                "again."
            )
        if expected is not None:
            return


def _sums(manifest: Path) -> dict[str, str]:
    try:
        sums = json.loads(manifest.read_text(encoding="utf-8"))["sha256"]
        return {str(name): str(value) for name, value in sums.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise RunError(
            f"{manifest} is damaged ({problem}). Restore it from a copy, or delete it to open the folder unchecked."
        ) from None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
