"""Keys for secure sums pass through the server: it cannot exchange them, because nodes sign what they say."""

from __future__ import annotations

import secrets
import shutil

import numpy as np
import pytest
import torch

from coterie.deploy import keys
from coterie.deploy import secure_aggregation as secure
from coterie.deploy.consent import Refusal
from coterie.deploy.identity import Identity
from coterie.deploy.node_masks import NodeMasks, context, keys_only
from coterie.deploy.wire import WireError

RUN = "a0b1c2d3"
NAMES = ("n0", "n1", "n2", "n3")
VALUES = torch.arange(5, dtype=torch.float64)


def member(folder, name, authority=None, days=100.0):
    """A node with a key of its own and a certificate of the authority."""
    place, authority = folder / name, folder / "ca" if authority is None else authority
    keys.make_node_key(place, name)
    _, public = keys.load_node_key(place / "node.key")
    keys.certify(authority, public, name, place, days)
    (place / "ca.crt").write_bytes((folder / "ca" / "ca.crt").read_bytes())
    return Identity.read(place)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("members")
    keys.make_authority(path / "ca", "hospitals")
    return path


@pytest.fixture(scope="module")
def members(folder):
    return {name: member(folder, name) for name in NAMES}


def ask(masks: NodeMasks, kind: str, **more):
    return masks.answer({"kind": kind, "run": RUN, **more})[0]


def offered(nodes, slots=1):
    return {name: ask(node, "sum_keys", node=name, slots=slots)["keys"] for name, node in nodes.items()}


class Middle:
    """A server that tells `victim` keys of its own for all other nodes, and so shares every mask with it."""

    def __init__(self, victim: str, dress) -> None:
        self.victim, self.dress = victim, dress
        self.parties = {name: secure.Party(name, 1) for name in NAMES if name != victim}

    def attack(self, nodes) -> torch.Tensor:
        """Return what the victim added to the sum."""
        real = offered(nodes)
        forged = {name: self.dress(name, party.public(), real) for name, party in self.parties.items()}
        roster = {self.victim: real[self.victim], **forged}
        node, plain = nodes[self.victim], {name: keys_only(one) for name, one in roster.items()}
        shares = ask(node, "sum_shares", roster=roster)["shares"]
        for name, party in self.parties.items():
            party.shares(plain)
            party.receive({self.victim: shares[name]})
        about = {"weight": 1.0}
        masked = node.masked({"about": about, "slot": 0}, VALUES, 1.0)
        use = secure.digest(plain) + (0).to_bytes(4, "big") + context(about)
        seen = masked.numpy().view(np.uint64).copy()
        for name, party in self.parties.items():
            pair = secure.agreed(secure._mask_key(party._masks[0]), plain[self.victim]["masks"][0])
            change = np.subtract if self.victim < name else np.add
            change(seen, secure.stream(pair, use, len(seen)), out=seen)
        own = secure.stream(
            node.party._selves[0], use, len(seen)
        )  # the victim reveals it: all others "survived"
        total = torch.from_numpy(np.subtract(seen, own).view(np.int64))
        return secure.decode(total, secure.fraction_bits(1.0))


def test_without_signatures_the_attack_succeeds():
    """So that the next tests refuse something: the server reads the answer of one node."""
    nodes = {name: NodeMasks(RUN) for name in NAMES}
    stolen = Middle("n1", lambda name, own, real: own).attack(nodes)
    torch.testing.assert_close(stolen, VALUES, atol=1e-9, rtol=0)


def test_keys_of_the_server_are_refused(folder, members):
    stranger = folder / secrets.token_hex(4)
    keys.make_authority(stranger / "ca", "hospitals")
    (stranger / "ca" / "ca.crt").rename(stranger / "theirs.crt")
    (stranger / "ca" / "ca.crt").write_bytes((stranger / "theirs.crt").read_bytes())
    fakes = {name: member(stranger, name) for name in NAMES}

    def signed(identity, run, name, own):
        return {**own, **identity.sign(secure.digest("keys for secure sums", run, name, own))}

    dresses = {
        "is not signed": lambda name, own, real: own,
        "a node of this federation": lambda name, own, real: signed(fakes[name], RUN, name, own),
        # a node that works for the server signs for all others
        "somebody else": lambda name, own, real: (
            signed(members["n3"], RUN, name, own) if name != "n3" else real[name]
        ),
        # keys that are real, with other keys put in
        "node of this federation": lambda name, own, real: {**real[name], **own},
    }
    for text, dress in dresses.items():
        nodes = {name: NodeMasks(RUN, members[name]) for name in NAMES}
        with pytest.raises(WireError, match=text):
            Middle("n1", dress).attack(nodes)


def test_keys_of_another_run_are_refused(members):
    """Old signatures would let a server who learned old keys use them again."""
    old = offered({name: NodeMasks("b" * 8, members[name]) for name in NAMES})
    nodes = {name: NodeMasks(RUN, members[name]) for name in NAMES}
    roster = {**old, "n1": offered(nodes)["n1"]}
    with pytest.raises(WireError, match="not signed by a node"):
        ask(nodes["n1"], "sum_shares", roster=roster)


def test_honest_nodes_accept_each_other(members):
    nodes = {name: NodeMasks(RUN, members[name]) for name in NAMES}
    roster = offered(nodes)
    for node in nodes.values():
        assert len(ask(node, "sum_shares", roster=roster)["shares"]) == 3


def test_an_expired_certificate_and_one_that_was_not_compared_are_refused(folder, members):
    late = folder / "late"
    keys.private_folder(late)
    shutil.copytree(folder / "ca", late / "ca")
    expired = member(late, "n3", days=-1.0)
    nodes = {name: NodeMasks(RUN, members[name] if name != "n3" else expired) for name in NAMES}
    with pytest.raises(WireError, match="expired"):
        ask(nodes["n1"], "sum_shares", roster=offered(nodes))
    compared = {"n2": keys.fingerprint(folder / "n2" / "node.crt"), "n3": "00" * 32}
    careful = Identity.read(folder / "n1", compared)
    nodes = {name: NodeMasks(RUN, careful if name == "n1" else members[name]) for name in NAMES}
    with pytest.raises(WireError, match="has compared"):
        ask(nodes["n1"], "sum_shares", roster=offered(nodes))


def test_the_server_is_no_node(folder, members):
    """Its own certificate is of the same authority, and is worth nothing here."""
    keys.make_server_certificate(folder / "ca", folder / "server", ["n3"])
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key((folder / "server" / "server.key").read_bytes(), None)
    pem = (folder / "server" / "server.crt").read_text()
    posing = NodeMasks(RUN, Identity(key, pem, members["n0"].authority))
    nodes = {**{name: NodeMasks(RUN, members[name]) for name in NAMES}, "n3": posing}
    with pytest.raises(WireError, match="somebody else"):
        ask(nodes["n1"], "sum_shares", roster=offered(nodes))


def test_few_nodes_are_not_summed(members):
    """A server that shuts out all nodes but its friends: the owner says how many are enough."""
    nodes = {name: NodeMasks(RUN, members[name], least=4) for name in NAMES}
    roster = offered(nodes)
    with pytest.raises(Refusal, match="at least 4"):
        ask(nodes["n1"], "sum_shares", roster={name: roster[name] for name in NAMES[:3]})
    for node in nodes.values():
        ask(node, "sum_shares", roster=roster)
    with pytest.raises(Refusal, match="at least 4"):
        ask(nodes["n1"], "unmask", slot=0, alive=list(NAMES[:3]))


def test_a_node_signs_for_itself_only(members):
    with pytest.raises(Refusal, match="by its certificate"):
        ask(NodeMasks(RUN, members["n0"]), "sum_keys", node="n1", slots=1)
