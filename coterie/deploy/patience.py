"""The SuperLink's HTTP connections, with time limits that uvicorn by itself does not have."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0  # to send a whole request header
HANDSHAKE_SECONDS = 10.0  # to agree on TLS
HEADER_BYTES = 16 << 10
MOST_CONNECTIONS = 2000


class PatientProtocol(H11Protocol):
    """Closes connections that are slow to send a header, and tells the app whose certificate a connection has."""

    waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a header."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        certificate = None if tls is None else tls.getpeercert(binary_form=True)
        peer = None if certificate is None else hashlib.sha256(certificate).hexdigest()
        self.app_state = {**self.app_state, "peer": peer}
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take data; the time for a header counts from its first byte."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self.waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self.waiting = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def _stop_waiting(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None

    def _too_slow(self) -> None:
        self.waiting = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class PatientServer(uvicorn.Server):
    """A server that gives up on TLS handshakes that do not come to an end."""

    async def startup(self, sockets: Any = None) -> None:
        """Listen, with a time limit for handshakes."""
        loop: Any = asyncio.get_running_loop()
        if self.config.is_ssl:
            loop.create_server = functools.partial(
                loop.create_server, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        await super().startup(sockets)
