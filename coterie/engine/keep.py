"""What a phase keeps on its client."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from coterie._core.errors import CoterieError
from coterie.models.fast.lazy_models import materialize


class Keep:
    """State that stays on the client: `client.keep.personal = v`, read back in a later round.

    Writes become visible at once to the phase and lasting only when the phase has succeeded.
    """

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        self.__dict__.update(_read=read, _written={})

    def __getattr__(self, name: str) -> Tensor:
        written: dict[str, Tensor] = self.__dict__["_written"]
        if name in written:
            return written[name]
        read: Callable[[str], Tensor] = self.__dict__["_read"]
        try:
            return read(name)
        except KeyError:
            raise CoterieError(
                f"a client has kept nothing under {name!r} yet; set it in `begin`, which every client runs "
                "before anything else"
            ) from None

    def __setattr__(self, name: str, value: Tensor) -> None:
        self.__dict__["_written"][name] = materialize(value)

    def __contains__(self, name: str) -> bool:
        try:
            self.__getattr__(name)
        except CoterieError:
            return False
        return True
