"""A process that serves a sharded simulation on the same machine: `python -m coterie.train.worker RANK COUNT PORT`."""

from __future__ import annotations

import signal
import sys

from coterie.train.workers import serve_rank

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the link
    rank, count, port = map(int, sys.argv[1:])
    serve_rank(rank, count, "127.0.0.1", port)
