from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from flwr_perdl.network import (
    Faults,
    Inbox,
    InMemoryNetwork,
    RayNetwork,
    Topology,
    averaging_weights,
    metropolis_weights,
)
from flwr_perdl.random import spawn
from tests.network import programs
from tests.network.programs import assert_same


class Held(NamedTuple):
    nodes: NDArray[np.intp]
    value: NDArray[np.float64]
    count: NDArray[np.int64]


class Drift:
    """Uses all that an inbox has, two arrays per message, and draws of the node and the round."""

    def __init__(self, data: dict[int, NDArray[np.float64]]) -> None:
        self.data = data

    def hosted(self, nodes: NDArray[np.intp]) -> Drift:
        return type(self)({int(k): self.data[int(k)] for k in nodes})

    def start(self, nodes: NDArray[np.intp]) -> Held:
        assert set(self.data) >= set(nodes.tolist())
        return Held(nodes, np.stack([self.data[int(k)] for k in nodes]), np.zeros(len(nodes), int))

    def adapt(self, state: Held, round_: int) -> Held:
        noise = [spawn(7, int(k), round_).standard_normal(2) for k in state.nodes]
        return state._replace(value=state.value + 0.01 * np.stack(noise))

    def message(self, state: Held) -> tuple[NDArray[np.float64], ...]:
        return state.value, np.abs(state.value).sum(axis=1)

    def combine(self, state: Held, inbox: Inbox) -> Held:
        best = inbox.argmax(inbox.arrays[1][:, None])[:, 0]
        value = inbox.mean() + 0.1 * inbox.total() + 0.01 * inbox.arrays[0][best]
        value = value / (1 + inbox.degrees[:, None])
        return state._replace(value=value, count=state.count + inbox.degrees)

    def observe(self, state: Held) -> dict[str, NDArray[Any]]:
        return {"count": state.count, "norm": np.linalg.norm(state.value, axis=1)}


def drift(n: int) -> Drift:
    return Drift({k: spawn(3, k).standard_normal(2) for k in range(n)})


def test_without_ray_one_sentence_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    network = RayNetwork(Topology.ring(3))
    with pytest.raises(ImportError, match="RayNetwork"):
        network.run(programs.Consensus(np.zeros((3, 1))), 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    for module in (sys.modules[__name__], programs):  # actors have no tests
        ray.cloudpickle.register_pickle_by_value(module)
    yield ray
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.slow
class TestOnACluster:
    @pytest.mark.parametrize(
        "faults",
        [Faults(), Faults(0.2, 0.2, {3: 4, 11: 1}, {0: 2, 9: 5}, 2, seed=4)],
        ids=["none", "all"],
    )
    def test_the_same_numbers_as_in_memory(self, cluster: Any, faults: Faults) -> None:
        topology = Topology.erdos_renyi(12, 0.3, seed=5)
        weights = averaging_weights(topology)
        network = RayNetwork(topology, weights, faults, agents_per_actor=5)
        here = InMemoryNetwork(topology, weights, faults)
        assert_same(network.run(drift(12), 9), here.run(drift(12), 9))

    def test_a_network_that_changes_in_time(self, cluster: Any) -> None:
        first = metropolis_weights(Topology.from_edges(4, [(0, 1), (2, 3)]))
        second = metropolis_weights(Topology.from_edges(4, [(1, 2), (3, 0)]))
        weights = [first, second]
        run = RayNetwork(first.topology, weights, agents_per_actor=1).run(drift(4), 5)
        assert_same(run, InMemoryNetwork(first.topology, weights).run(drift(4), 5))

    def test_callback_stop_and_going_on(self, cluster: Any) -> None:
        topology = Topology.ring(6)
        network = RayNetwork(topology, agents_per_actor=2)
        program = programs.Consensus(np.random.default_rng(1).standard_normal((6, 2)))
        seen: list[int] = []

        def close(state: Any) -> bool:
            return float(np.ptp(state.value, axis=0).max()) < 1e-2

        run = network.run(program, 99, callback=lambda round_, _: seen.append(round_), stop=close)
        here = InMemoryNetwork(topology).run(program, 99, stop=close)
        assert_same(run, here)
        assert seen == list(range(1, run.rounds + 1))
        assert run.rounds < 99
        halfway = InMemoryNetwork(topology).run(program, 4).state
        ended = network.run(program, 6, state=halfway).state
        whole = InMemoryNetwork(topology).run(program, 10).state
        np.testing.assert_allclose(ended.value, whole.value, atol=1e-14)
        assert cluster.is_initialized()  # it is others'

    def test_an_actor_gets_its_own_nodes_data_only(self, cluster: Any) -> None:
        class Jealous(Drift):
            def start(self, nodes: NDArray[np.intp]) -> Held:
                assert set(self.data) == set(nodes.tolist())
                return super().start(nodes)

        topology, jealous = Topology.ring(6), Jealous(drift(6).data)
        run = RayNetwork(topology, agents_per_actor=2).run(jealous, 3)
        assert_same(run, InMemoryNetwork(topology).run(jealous, 3))

    def test_a_lost_actor_silences_its_nodes_and_the_others_go_on(
        self, cluster: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Mortal(programs.Consensus):
            def adapt(self, state: Any, round_: int) -> Any:
                if round_ == 5 and 0 in state.nodes:
                    os._exit(1)
                return state

        values = np.random.default_rng(2).standard_normal((6, 2))
        network = RayNetwork(Topology.complete(6), agents_per_actor=2)
        with caplog.at_level(logging.WARNING):
            run = network.run(Mortal(values), 60)
        assert "Nodes 0 to 1" in caplog.text
        assert run.alive.tolist() == [False, False, True, True, True, True]
        assert run.rounds == 60
        np.testing.assert_array_equal(run.state.nodes, [2, 3, 4, 5])
        np.testing.assert_allclose(run.state.value, np.tile(run.state.value[0], (4, 1)), atol=1e-12)
        assert np.isnan(run.observed["value"][:2]).all()
        np.testing.assert_array_equal(run.observed["value"][2:], run.state.value)
        # The lost nodes were heard until they died: the agreed value is not the others' mean.
        assert np.abs(run.state.value[0] - values[2:].mean(axis=0)).max() > 1e-3
        assert run.dropped_messages == {}

    def test_when_all_actors_are_lost_one_sentence_says_so(self, cluster: Any) -> None:
        class Doomed(programs.Consensus):
            def adapt(self, state: Any, round_: int) -> Any:
                os._exit(1)

        with pytest.raises(RuntimeError):
            RayNetwork(Topology.ring(4), agents_per_actor=2).run(Doomed(np.ones((4, 1))), 3)

    @pytest.mark.parametrize("where", ["start", "adapt", "combine", "observe"])
    def test_an_error_in_the_program_ends_the_run(self, cluster: Any, where: str) -> None:
        def fails(*_: Any) -> Any:
            raise ValueError("no such atom")

        program = programs.Consensus(np.ones((4, 1)))
        setattr(program, where, fails)
        with pytest.raises(ValueError, match="atom"):
            RayNetwork(Topology.ring(4), agents_per_actor=2).run(program, 3)


@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_started_for_a_run_is_ended_with_it() -> None:
    import ray

    if ray.is_initialized():
        ray.shutdown()
    values = np.array([[1.0], [2.0], [6.0]])
    run = RayNetwork(Topology.complete(3)).run(programs.Consensus(values), 1)
    np.testing.assert_allclose(run.state.value, 3.0)
    assert not ray.is_initialized()
