"""Networks on nodes: the same models as in one process, and only where the owner of a node allows them."""

import polars
import pytest

from coterie import fit
from coterie._core.errors import SettingError
from coterie.algorithms import make
from coterie.conformance.runtimes import table
from coterie.data.federated import Roles
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.node_service import NodeService
from coterie.deploy.policy import Policy
from coterie.deploy.transport import NodeCaller
from coterie.engine.aggregate import PLAIN
from coterie.engine.federation import Federation
from tests.engine.sharding import gap

SIZES = (30, 24, 40, 35)
METHODS = {"fedavg": {}, "ditto": {}, "fine-tuned": {}}


def nodes(folder, frame):
    """Two nodes with two clients each."""
    found = {}
    for k in range(2):
        mine = frame.filter(polars.col("client").is_in([f"client {i}" for i in range(k, 4, 2)]))
        found[f"node {k}"] = NodeService(mine, folder / str(k))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_network_on_nodes_is_the_network_of_one_process(tmp_path, method):
    frame, algorithm = table(SIZES), make(method, lr=0.05, batch=8)
    local = fit(Federation.from_table(frame, "client", "y", model="mlp"), algorithm, rounds=3)
    there = nodes(tmp_path, frame)
    caller = NodeCaller(InProcessTransport(there))
    plan = survey(
        caller, {name: [] for name in there}, RunRequest(Roles("client", "y"), kind="mlp"), "networks"
    )
    assert plan.model["model"] == "mlp"
    fed = connect(caller, plan, algorithm)
    fed.aggregate = PLAIN
    run = fit(fed, algorithm, rounds=3)
    for name, ids in plan.nodes.items():
        found = there[name].runs["networks"].models(run.deployed_round)
        assert gap(local.personal[ids], found) < 1e-6
    assert local.fed.ledger.total("bytes_up") == run.fed.ledger.total("bytes_up")


def test_a_policy_names_the_networks_that_it_allows():
    roles = Roles("client", "y")
    strict = Policy.strict(table(SIZES), roles, min_rows=5)
    assert "mlp" not in strict.models
    assert "mlp" in strict.allowing((), ["mlp"]).models
    with pytest.raises(SettingError, match="no model 'mpl'"):
        strict.allowing((), ["mpl"])
