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
