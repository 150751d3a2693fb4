"""Which library belongs to the C sources in a folder; imports nothing of the package, for it is needed to build it."""

from __future__ import annotations

import zlib
from pathlib import Path


def library(folder: Path) -> Path:
    """Its name has a checksum of the sources, so that one that was built from others is not taken for it."""
    stamp = 0
    for source in sorted(folder.glob("*.[ch]")):
        stamp = zlib.crc32(source.name.encode() + source.read_bytes(), stamp)
    return folder / f"kernels-{stamp:08x}.so"
