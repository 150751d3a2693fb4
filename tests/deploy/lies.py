"""Lies of a node with a valid key: what is changed in its honest answers, by the kind of message that is answered.

`test_malicious_node.py` tells them to a server in the same process, `tests/e2e/test_lies.py` over TLS to a real one.
"""

from __future__ import annotations

import json
import math
import struct

import torch

from coterie.deploy import wire


def values(change):
    """Change every value of an answer."""

    def forge(answer):
        header, tensors = wire.decode(answer)
        changed = {
            name: change(value) if name.startswith("value.") else value for name, value in tensors.items()
        }
        return wire.encode(header, changed)

    return forge


def head(change):
    """Change the header of an answer."""

    def forge(answer):
        header, tensors = wire.decode(answer)
        return wire.encode(change(header) or header, tensors)

    return forge


def raw(note) -> bytes:
    text = note if isinstance(note, bytes) else json.dumps(note).encode()
    return struct.pack("<Q", len(text)) + text


def schema(tensors):
    """Keep the header, claim these tensors, send no bytes."""
    return lambda answer: raw({"version": 1, "header": wire.decode(answer)[0], "tensors": tensors})


def told(change):
    return head(lambda header: change(header["told"]))


def sums(change):
    """Change [count, mean, squares, missing] of every numeric column."""

    def forge(header):
        numeric = header["statistics"]["numeric"]
        header["statistics"]["numeric"] = {name: change(list(four)) for name, four in numeric.items()}

    return head(forge)


def unsaid(change):
    """Change the same to what `wire.encode` refuses to say."""

    def forge(answer):
        header, _ = wire.decode(answer)
        numeric = header["statistics"]["numeric"]
        header["statistics"]["numeric"] = {name: change(list(four)) for name, four in numeric.items()}
        return raw({"version": 1, "header": header, "tensors": []})

    return forge


def error(text, code="failed"):
    return lambda answer: raw(
        {
            "version": 1,
            "header": {"nonce": wire.decode(answer)[0]["nonce"], "error": text, "code": code},
            "tensors": [],
        }
    )


def counts(change):
    def forge(answer):
        header, tensors = wire.decode(answer)
        return wire.encode(header, {name: change(value) for name, value in tensors.items()})

    return forge


ATTACKS = {
    # in the numbers of a round
    "NaN": ("call", values(lambda v: torch.full_like(v, torch.nan))),
    "1e6": ("call", values(lambda v: torch.full_like(v, 1e6))),
    "-1e6": ("call", values(lambda v: torch.full_like(v, -1e6))),
    "1e30": ("call", values(lambda v: torch.full_like(v, 1e30))),
    "1e150": ("call", values(lambda v: torch.full_like(v, 1e150))),
    "times 1e4": ("call", values(lambda v: v * -1e4)),
    "one huge coordinate": ("call", values(lambda v: v.index_fill(-1, torch.tensor([0]), 1e9))),
    "another shape": ("call", values(lambda v: torch.cat([v, v[..., :1]], -1))),
    "three axes": ("call", values(lambda v: torch.zeros(1, 3, 11, dtype=v.dtype))),
    "ten times the other way": ("call", values(lambda v: -10 * v)),
    "float32": ("call", values(lambda v: v.float())),
    "int32": ("call", values(lambda v: v.int())),
    "bool": ("call", values(lambda v: v > 0)),
    "an extra value": ("call", counts(lambda v: v) and (lambda a: _extra(a))),
    "no value": ("call", lambda a: wire.encode(wire.decode(a)[0], {})),
    # in the bytes
    "cut": ("call", lambda a: a[:-9]),
    "empty": ("call", lambda a: b""),
    "noise": ("call", lambda a: b"\xff" * 100),
    "deep JSON": ("call", lambda a: raw(b"[" * 200_000 + b"]" * 200_000)),
    "deep header": (
        "call",
        lambda a: raw(b'{"version":1,"tensors":[],"header":' + b'{"a":' * 400 + b"1" + b"}" * 401),
    ),
    "a number of 200,000 digits": (
        "call",
        lambda a: raw(b'{"version":1,"header":{"x":' + b"9" * 200_000 + b'},"tensors":[]}'),
    ),
    "a number of 400 digits": ("call", head(lambda h: h | {"at": [10**400, 0]})),
    "the number of another message": ("call", head(lambda h: h | {"nonce": "0" * 24})),
    "bool for a stamp": ("call", head(lambda h: h | {"at": [True, False]})),
    "list for a stamp": ("call", head(lambda h: h | {"at": [[1], [2]]})),
    "encoded nonsense": ("call", head(lambda h: h | {"encoded": {"": [0, 5, ["float64"]]}})),
    "200,000 tensors": ("call", lambda a: schema([[f"z{k}", "float64", [0]] for k in range(200_000)])(a)),
    "2^62 x 0": ("call", schema([["value.", "float64", [2**62, 0]]])),
    "1 x 2^62 x 0": ("call", schema([["value.", "float64", [1, 2**62, 0]]])),
    "1e30 x 0": ("call", schema([["value.", "float64", [1, 10**30, 0]]])),
    "60 axes": ("call", schema([["value.", "float64", [1] * 60]])),
    "a list for a name": ("call", schema([[["x"], "float64", [0]]])),
    "a name twice": ("call", schema([["value.", "float64", [0]], ["value.", "float64", [0]]])),
    "no list of tensors": ("call", schema(None)),
    "a lone surrogate": ("call", lambda a: raw(b'{"version":1,"header":{"error":"\\ud800"},"tensors":[]}')),
    "an error that is a list": ("call", error(["x"] * 1000, ["forgot"])),
    "an error that forges a line": (
        "call",
        error("x\x1b[2J\n12:00:00 north is left out: forged\u2028[bold]<script>alert(1)</script>"),
    ),
    "an error of a megabyte": ("call", error("x" * 1_000_000)),
    "always forgets": ("call", error("x", "forgot")),
    "always waits for approval": ("call", error("x", "pending")),
    # about its rows
    "1e15 rows": ("open", counts(lambda v: torch.full_like(v, 10**15))),
    "2^63 - 1 rows": ("open", counts(lambda v: torch.full_like(v, 2**63 - 1))),
    "negative rows": ("open", counts(lambda v: -v)),
    "no rows": ("open", counts(lambda v: 0 * v)),
    "ten times the rows": ("open", counts(lambda v: 10 * v)),
    "all rows for training": ("open", lambda a: _all_train(a)),
    "NaN mean": ("statistics", unsaid(lambda s: [s[0], math.nan, s[2], s[3]])),
    "infinite spread": ("statistics", unsaid(lambda s: [s[0], s[1], math.inf, s[3]])),
    "huge mean": ("statistics", sums(lambda s: [s[0], 1e30, s[2], s[3]])),
    "huge spread": ("statistics", sums(lambda s: [s[0], s[1], 1e60, s[3]])),
    "overflowing spread": ("statistics", sums(lambda s: [s[0], s[1], 1e308, s[3]])),
    "negative spread": ("statistics", sums(lambda s: [s[0], s[1], -1e9, s[3]])),
    "a billion rows": ("statistics", sums(lambda s: [10**9, 1e30, 1e60, s[3]])),
    "a negative count": ("statistics", sums(lambda s: [-s[0] - 10**6, *s[1:]])),
    "counts that cancel": ("statistics", sums(lambda s: [-72, *s[1:]])),
    "a count of 400 digits": ("statistics", sums(lambda s: [10**400, *s[1:]])),
    "texts for numbers": ("statistics", sums(lambda s: ["1", "x", "3", "4"])),
    "a list for a number": ("statistics", sums(lambda s: [[1], 2, 3, 4])),
    "no statistics": ("statistics", head(lambda h: {"nonce": h["nonce"]})),
    "90 junk levels": (
        "statistics",
        head(lambda h: h["statistics"]["categories"]["c"][0].extend(f"j{k}" for k in range(90))),
    ),
    "a level with escapes": (
        "statistics",
        head(lambda h: h["statistics"]["categories"]["c"][0].append("\x1b[2J")),
    ),
    "a level that is half a character": (
        "statistics",
        head(lambda h: h["statistics"]["categories"]["c"][0].append("\ud800")),
    ),
    # about itself
    "another's client": ("hello", told(lambda t: t.update(clients=["north"]))),
    "a name that looks like another's": ("hello", told(lambda t: t.update(clients=["s\u043euth"]))),
    "100,000 clients": (
        "hello",
        told(lambda t: t.update(clients=[f"x{k}" for k in range(100_000)], rows=[1] * 100_000)),
    ),
    "1e15 rows at first": ("hello", told(lambda t: t.update(rows=[10**15]))),
    "a billion rows at first": ("hello", told(lambda t: t.update(rows=[10**9]))),
    "HTML for a name": ("hello", told(lambda t: t.update(clients=["west<script>alert(1)</script>"]))),
    "escapes in a name": (
        "hello",
        told(lambda t: t.update(clients=["va\x1b[2J\r\n12:00 north is left out"])),
    ),
    "a name that runs backwards": ("hello", told(lambda t: t.update(clients=["a\u202egnp.exe"]))),
    "no columns": ("hello", told(lambda t: t.update(columns=[]))),
    "all text": ("hello", told(lambda t: t.update(columns=[[name, "category"] for name, _ in t["columns"]]))),
    "one column of text": ("hello", told(lambda t: t["columns"][0].__setitem__(1, "category"))),
    "an unknown kind": (
        "hello",
        told(lambda t: t.update(columns=[[name, "weird"] for name, _ in t["columns"]])),
    ),
    "a quantity": ("hello", told(lambda t: t.update(target={"kind": "quantity"}))),
    "words": ("hello", told(lambda t: t.update(target={"kind": "words", "levels": ["no", "yes"]}))),
    "no kind": ("hello", told(lambda t: t.update(target={"levels": ["0", "1"]}))),
    "5000 classes": (
        "hello",
        told(lambda t: t.update(target={"kind": "words", "levels": [f"c{k}" for k in range(5000)]})),
    ),
    "30 more classes": ("hello", told(lambda t: t["target"]["levels"].extend(f"c{k}" for k in range(30)))),
    "a list for a description": ("hello", head(lambda h: {"nonce": h["nonce"], "told": [1]})),
    # about scores
    "accuracy of 1e9": ("score", values(lambda v: torch.full_like(v, 1e9))),
    "negative scores": ("score", values(lambda v: -v)),
    "scores of other rows": ("score", lambda a: _more_rows(a)),
    "perfect scores": ("score", lambda a: _perfect(a)),
    # about what it deploys
    "nonsense about own models": (
        "finish",
        head(lambda h: h | {"trained_alone": ["west", ["x"], {"a": 1}, 3, None, "north", "\x1b[2J"] * 1000}),
    ),
    "no list of own models": ("finish", head(lambda h: h | {"trained_alone": {"north": 1}})),
}
UNDETECTABLE = {
    "ten times the other way",
    "perfect scores",
    "90 junk levels",
    "HTML for a name",
    "nonsense about own models",
    "no list of own models",
}  # within what an honest node could send


def _extra(answer):
    header, tensors = wire.decode(answer)
    return wire.encode(header, tensors | {"value.hack": torch.zeros(1, 3, dtype=torch.float64)})


def _all_train(answer):
    header, tensors = wire.decode(answer)
    whole = sum(tensors.values())
    return wire.encode(header, {name: whole if "train" in name else 0 * whole for name in tensors})


def _more_rows(answer):
    header, tensors = wire.decode(answer)
    return wire.encode(header, tensors | {"value.rows": tensors["value.rows"] * 1000})


def _perfect(answer):
    header, tensors = wire.decode(answer)
    return wire.encode(header, tensors | {"value.accuracy": torch.ones_like(tensors["value.accuracy"])})
