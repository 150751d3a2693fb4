"""Local SGD in the span of a client's rows (dual SGD), in C."""

from __future__ import annotations

import ctypes

from coterie._core.native import library

FEWEST_COLUMNS = 16
lanes = 0  # floats per vector register; 0: as many as this processor has
NO_MEMORY, OUT_OF_RANGE = 1, 2
ALL, ALL_BUT_LAST, LAST = 0, 1, 2  # columns that steps move

_numbers = (
    "parts clients everybody rows outputs columns largest width steps batch loss integers summed moving"
)
_span_numbers = "first last everybody rows outputs columns largest width length batch loss integers"
_span_results = "shares moved models weights totals"
_rows = "at start size x y kernels made tables centres"


class Work(ctypes.Structure):
    """The C struct of dual_sgd_work.h; the caller keeps alive the tensors that it points to."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _numbers.split()),
        *((name, ctypes.c_void_p) for name in _rows.split()),
        *((name, ctypes.c_int64) for name in ("table_step", "centre_step")),
        ("importance", ctypes.c_void_p),
        ("importance_step", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("number", "every")),
        *((name, ctypes.c_float) for name in ("lr", "keeps", "pulled", "share", "centre_share")),
        *((name, ctypes.c_void_p) for name in ("shares", "weights", "totals", "models", "witness")),
    )


class GradientWork(ctypes.Structure):
    """The C struct `glm_gradient_work`; the caller keeps alive the tensors that it points to."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("clients", "rows", "outputs", "columns", "loss", "integers")),
        ("tables", ctypes.c_void_p),
        ("table_step", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "y", "drawn")),
        ("total", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weight", "gradients")),
    )


class SpanWork(ctypes.Structure):
    """The C struct `row_span_work`; the caller keeps alive the tensors that it points to."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _span_numbers.split()),
        *((name, ctypes.c_void_p) for name in "at start size offset x y kernels made".split()),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tables", "steps", "scores", "keys")),
        *((name, ctypes.c_int64) for name in ("number", "summed")),
        *((name, ctypes.c_void_p) for name in _span_results.split()),
        ("blocks", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("block", "sums")),
    )


available = library is not None and bool(library.coterie_dual_sgd_suits(0))


def run(work: Work) -> None:
    """Run the C kernel on this work, one thread per part, without holding Python's global lock."""
    assert library is not None
    check(library.coterie_dual_sgd(ctypes.byref(work), lanes))


def run_span(work: SpanWork) -> None:
    """Run one operation in the span of rows, without holding Python's global lock."""
    assert library is not None
    check(library.coterie_row_span(ctypes.byref(work), lanes))


def check(problem: int) -> None:
    """Raise an error if a kernel returned a problem."""
    if problem == NO_MEMORY:
        raise MemoryError("no memory for the scores of a client")
    if problem == OUT_OF_RANGE:
        raise IndexError("a client or a label is out of range")
