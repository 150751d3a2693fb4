"""Compressed values in answers have the size that their length asks for, or the answer is not used."""

from __future__ import annotations

import pytest
import torch

from coterie.algorithms import make
from coterie.deploy import answers
from coterie.engine.compressors import compressor
from coterie.engine.protocol import Call

LENGTH = 12


@pytest.mark.parametrize("text", ["natural", "top-3", "qsgd-4"])
@pytest.mark.parametrize("more", [-1, 0, 1, 10**6])
def test_a_compressed_value_has_the_bytes_of_its_length(text: str, more: int) -> None:
    one = compressor(text)
    call = Call(make("fedavg"), "train", 1, 0, {}, {}, one)
    sent = torch.zeros(2, one.size(LENGTH, torch.float32) + more, dtype=torch.uint8)
    assert answers._are_encoded({"x": [0, LENGTH, "float32"]}, call, {"value.x": sent}) is (more == 0)
