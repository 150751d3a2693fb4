"""Every algorithm found keeps every promise, and an algorithm that breaks one is caught."""

import inspect
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from coterie import Algorithm, State, check_algorithm, setting
from coterie._core.errors import CoterieError
from coterie.algorithms import all_algorithms, make
from coterie.algorithms.base import DISCLOSURES
from coterie.conformance import PROMISES, killed_and_resumed_equals_uninterrupted, same_as_stacked
from coterie.conformance.runtimes import RUNTIMES
from coterie.deploy import messages
from coterie.deploy.loopback import LoopbackRuntime

# One method for each thing that a runtime does: sums, kept models, pairs, clusters, compressed messages, messages
# between clients, coins, histograms, buffers. They train on every runtime what the stack trains. What else a runtime
# promises, two of them show. The other methods meet it in slow tests, and there all but these meet what takes
# long: runs that are killed, clients that are away, files that are written and read again.
EVERYWHERE = {"fedavg", "ditto", "cobo", "ifca", "flix", "fc", "async-l2gd", "trees", "fedbn"}
TWO = {"fedavg", "ditto"}
HEAVY = {
    ("hierarchical", "few_may_answer"),
    ("hierarchical", "a_client_that_answers_nan_is_left_out/stacked"),
}
LONG = (
    "resumed_files_are_the_same",
    "chunks_do_not_matter",
    "killed_and_resumed_equals_uninterrupted/stacked",
    "few_may_answer",
    "any_subset_may_answer/stacked",
)


def promises():
    for name in sorted(all_algorithms()):
        for promise in PROMISES:
            elsewhere = "/" in promise and not promise.endswith("/stacked")
            quick = EVERYWHERE if promise in LONG or promise.startswith("same_as_stacked/") else TWO
            late = promise in LONG or elsewhere or promise == "same_as_stacked/stacked"
            marks = [pytest.mark.slow] if (late and name not in quick) or (name, promise) in HEAVY else []
            yield pytest.param(name, promise, marks=marks, id=f"{name}-{promise}")


@pytest.mark.parametrize(("name", "promise"), list(promises()))
def test_promise(name, promise):
    algorithm = all_algorithms()[name]()
    PROMISES[promise](algorithm.replace(batch=4 if algorithm.batch else 0))


@dataclass(frozen=True)
class Sound(Algorithm):
    """Gradient descent x <- x - lr mean grad f_i(x) (Cauchy, 1847)."""

    reveals: ClassVar[dict[str, Any]] = {"slope": "gradient"}
    lr: float = setting(0.1, "step size", above=0)

    def start(self, fed: Any) -> State:
        return State(x=fed.initial_model())

    def round(self, fed: Any, s: State, t: int) -> State:
        return State(x=s.x - self.lr * fed.map(self.slope, x=s.x).mean())

    def slope(self, client, x):
        return client.grad(x)

    def deploy(self, client, x):
        return x

    def traffic(self, d):
        return {"slope": (d, d)}


class ChangesInput(Sound):
    def slope(self, client, x):
        x += 0
        x.sub_(client.grad(x))
        return x


class ChangesKept(Sound):
    def begin(self, client, x):
        client.keep.v = x + 1

    def slope(self, client, x):
        client.keep.v.mul_(0.5)
        return client.keep.v

    def traffic(self, d):
        return {"begin": (d, 0), "slope": (d, d)}


class ReadsOthers(Sound):
    def slope(self, client, x):
        return client.grad(x) - client.grad(x).mean(0)


class AssumesAll(Sound):
    def round(self, fed, s, t):
        replies = fed.map(self.slope, x=s.x)
        return State(x=s.x - self.lr * (replies.values * fed.sizes).sum(0) / fed.sizes.sum())


class HasMemory(Sound):
    def round(self, fed, s, t):
        SEEN.append(t)
        return State(x=super().round(fed, s, t).x + 1e-3 * len(SEEN))


class Undeclared(Sound):
    def traffic(self, d):
        return {"slope": (d, 1)}


class Silent(Sound):
    reveals: ClassVar[dict[str, Any]] = {"deploy": "nothing"}


class Understates(Sound):
    reveals: ClassVar[dict[str, Any]] = {"slope": "nothing"}


class Uncited(Sound):
    """Goes downhill."""


SEEN: list[int] = []


@pytest.mark.parametrize(
    ("cls", "promise"),
    [
        (ChangesInput, "inputs_are_not_changed|stacked"),
        (ChangesKept, "inputs_are_not_changed|stacked|chunks|messages"),
        (ReadsOthers, "stacked_equals_one_by_one"),
        (AssumesAll, "few_may_answer"),
        (HasMemory, "stacked|killed"),
        (Undeclared, "ledger_equals_declaration"),
        (Silent, "every_phase_says_what_it_reveals"),
        (Understates, "every_phase_says_what_it_reveals"),
        (Uncited, "documentation_names_its_source"),
    ],
)
def test_a_broken_promise_is_caught(cls, promise):
    with pytest.raises(AssertionError, match=promise):
        check_algorithm(dataclass(frozen=True)(cls)())


@pytest.mark.slow
def test_a_sound_algorithm_passes():
    assert check_algorithm(Sound()) == list(PROMISES)


def test_nan_reaching_the_server_is_caught():
    @dataclass(frozen=True)
    class Hides(Sound):
        """Turns NaN into a number that is shared (1847)."""

        def slope(self, client, x):
            grad = client.grad(x)
            return torch.where(grad.isnan(), 1e300, grad)

        def round(self, fed, s, t):
            x = super().round(fed, s, t).x
            return State(x=x * 1e300)

    with pytest.raises(AssertionError):
        check_algorithm(Hides())


class Forgetful(LoopbackRuntime):
    """Loses what clients keep when a run is resumed."""

    def fresh(self, seed=None):
        return Forgetful(super().fresh(seed).nodes, self.place)

    def restore(self, tensors):
        super().restore({})


class Eager(LoopbackRuntime):
    """Trains the clients in the order of the nodes, not in the order in which they were asked."""

    def fresh(self, seed=None):
        return Eager(super().fresh(seed).nodes, self.place)

    def run(self, call, visits):
        answer = super().run(call, visits)
        return replace(answer, named={name: value.flip(0) for name, value in answer.named.items()})


@pytest.mark.parametrize(
    ("runtime", "check"),
    [(Forgetful, killed_and_resumed_equals_uninterrupted), (Eager, same_as_stacked)],
)
def test_a_broken_runtime_is_caught(runtime, check):
    @contextmanager
    def host(algorithm, options):
        with RUNTIMES["loopback"](algorithm, options) as here:
            here.fed.runtime = runtime(here.fed.runtime.nodes, here.fed.runtime.place)
            yield here

    check(make("ditto"), RUNTIMES["loopback"])
    with pytest.raises((AssertionError, CoterieError)):
        check(make("ditto"), host)


@pytest.mark.parametrize("name", sorted(all_algorithms()))
def test_every_method_that_takes_a_client_says_what_it_reveals(name):
    """A node runs what is declared. A helper that takes a client has an underscore, so that none is forgotten."""
    cls = all_algorithms()[name]
    takes_client = {
        found
        for found, method in inspect.getmembers(cls, inspect.isfunction)
        if not found.startswith("_") and list(inspect.signature(method).parameters)[1:2] == ["client"]
    }
    assert takes_client - {"begin", "deploy"} == set(cls.reveals)
    assert set(cls.reveals.values()) <= set(DISCLOSURES) and cls.optional <= set(cls.reveals)
    assert messages.phases(cls) == takes_client
