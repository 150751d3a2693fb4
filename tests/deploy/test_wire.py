import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.conformance import federation
from coterie.deploy import wire
from coterie.deploy.loopback import LoopbackNode
from coterie.deploy.messages import phases


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]),
        max_size=4,
    ),
    st.lists(st.integers(0, 3), max_size=3),
)
def test_messages_survive_the_wire(dtypes, shape):
    tensors = {name: torch.ones(shape).to(dtype) for name, dtype in dtypes.items()}
    header, back = wire.decode(wire.encode({"round": 3, "name": "ü"}, tensors))
    assert header == {"round": 3, "name": "ü"} and back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (
            back[name].dtype == value.dtype
            and back[name].shape == value.shape
            and torch.equal(back[name], value)
        )


def test_nan_and_special_values_survive():
    value = torch.tensor([float("nan"), float("inf"), -0.0, 5e-324], dtype=torch.float64)
    _, back = wire.decode(wire.encode({}, {"v": value}))
    assert back["v"].numpy().tobytes() == value.numpy().tobytes()


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(message):
    with pytest.raises(wire.WireError):
        wire.decode(message)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_gives_a_message_or_a_refusal(place, byte):
    message = bytearray(wire.encode({"phase": "train"}, {"x": torch.arange(10.0), "at": torch.arange(3)}))
    message[place % len(message)] = byte
    try:
        wire.decode(bytes(message))
    except wire.WireError:
        pass


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_cut_and_padded_messages_are_refused(cut):
    message = wire.encode({}, {"x": torch.arange(10.0)})
    with pytest.raises(wire.WireError, match="truncated"):
        wire.decode(message[:-cut])
    with pytest.raises(wire.WireError, match="trailing bytes"):
        wire.decode(message + b"\0" * cut)


def test_a_node_runs_only_phases_of_its_algorithm():
    from coterie.algorithms import make

    node, ditto = LoopbackNode(federation().runtime), make("ditto")
    assert phases(type(ditto)) == {"begin", "train", "deploy"}
    for phase in ("round", "fast_forward", "__init__", "replace", "nothing"):
        message = wire.encode({"algorithm": "ditto", "phase": phase}, {})
        with pytest.raises(wire.WireError, match="has no phase"):
            node.handle(ditto, message)


class TestParts:
    """Large tensors are parts of a message of their own."""

    LARGE = torch.arange(float(1 << 18))  # a mebibyte
    MESSAGE = ({"round": 3}, {"at": torch.arange(3), "x": LARGE, "y": torch.ones(2), "z": LARGE + 1})

    def test_the_parts_are_the_bytes_of_the_message(self):
        parts, whole = wire.encode_parts(*self.MESSAGE), wire.encode(*self.MESSAGE)
        assert [len(part) for part in parts[1:]] == [1 << 20, 8, 1 << 20]
        assert b"".join(parts) == whole and wire.size(parts) == wire.size(whole) == len(whole)
        for found in (wire.decode(parts), wire.decode(whole)):
            assert found[0] == {"round": 3} and list(found[1]) == ["at", "x", "y", "z"]
            assert all(torch.equal(found[1][name], value) for name, value in self.MESSAGE[1].items())

    def test_a_message_without_large_tensors_is_whole(self):
        small = ({}, {"x": torch.ones((1 << 18) - 1)})
        assert wire.encode_parts(*small) == wire.encode(*small)

    def test_what_messages_share_is_encoded_once(self):
        encoded = {}
        first, second = (
            wire.encode_parts({"nonce": nonce}, {"at": torch.zeros(1), "x": self.LARGE}, encoded)
            for nonce in "ab"
        )
        assert first[1] is second[1] and first[0] != second[0]

    @pytest.mark.parametrize(
        "change",
        [
            lambda parts: parts[:-1],
            lambda parts: (*parts, b"\0"),
            lambda parts: (parts[0], parts[1][:-1], parts[1][-1:], *parts[2:]),  # a tensor across two parts
            lambda parts: (parts[0] + parts[1][:8], parts[1][8:], *parts[2:]),
            lambda parts: (b"", *parts),
            lambda parts: (),
            lambda parts: (parts[0][:-5], *parts[1:]),
        ],
    )
    def test_other_parts_are_refused(self, change):
        with pytest.raises(wire.WireError):
            wire.decode(change(wire.encode_parts(*self.MESSAGE)))

    def test_a_short_header_is_not_made_up_for_by_a_later_part(self):
        """Its length is eight more than its text, and eight bytes come in a part of their own."""
        whole = wire.encode({}, {})
        header = (int.from_bytes(whole[:8], "little") + 8).to_bytes(8, "little") + whole[8:]
        with pytest.raises(wire.WireError, match="trailing"):
            wire.decode((header, bytes(8)))

    @given(st.lists(st.binary(max_size=60), max_size=5))
    def test_garbage_in_parts_is_refused(self, parts):
        with pytest.raises(wire.WireError):
            wire.decode(tuple(parts))
