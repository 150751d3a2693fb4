"""Which Linux a wheel runs on: the versions of the C library's functions that its compiled code calls."""

from __future__ import annotations

import ctypes.util
import platform
import re
import sys
from pathlib import Path

from release.build import Failed, run

OLDEST = (2, 28)  # manylinux_2_28, which torch's own wheels need
_NEED = re.compile(r" (?:UND|U) +(\w+)@(?:GLIBC_)([\d.]+)")


def check(library: Path) -> None:
    """Raise `Failed` if the library calls a function that glibc 2.28 does not have.

    A compiler binds each function to its newest version on the machine it runs on, so a wheel that is built on a newer
    machine than the `manylinux_2_28` image may need more than its sources do. This asks for the oldest version of each
    function that the C library of this machine has, which is what the image binds to.
    """
    needed = dict(_NEED.findall(run("readelf", "--wide", "--dyn-syms", library)))
    offered: dict[str, list[tuple[int, ...]]] = {}
    for system in _system_libraries():
        for name, version in re.findall(
            r" (\w+)@@?GLIBC_([\d.]+)", run("readelf", "--wide", "--dyn-syms", system)
        ):
            offered.setdefault(name, []).append(_numbers(version))
    late = {name: min(offered[name]) for name in needed if min(offered[name]) > OLDEST}
    if late:
        raise Failed(f"{library.name} calls functions newer than glibc {_text(OLDEST)}: {late}")
    bound = max(map(_numbers, needed.values()), default=(0,))
    oldest = max((min(offered[name]) for name in needed), default=(0,))
    print(
        f"   {len(needed)} functions of glibc, all in {_text(oldest)} or older; this build is bound to {_text(bound)}"
        + ("" if bound <= OLDEST else ": publish the wheel of the manylinux_2_28 image (cibuildwheel)")
    )


def applies() -> bool:
    """Return True on Linux with glibc."""
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc"


def _system_libraries() -> list[Path]:
    """Return libc and libm of this machine."""
    with open("/proc/self/maps") as maps:
        folder = next(Path(line.split()[-1]).parent for line in maps if re.search(r"/libc[.-]", line))
    return [folder / str(ctypes.util.find_library(name)) for name in ("c", "m")]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
