"""A Ray cluster of three nodes on this machine: the same results, also where one of them dies."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from flwr_perdl.strategies import RoundReport
from perdl_experiments.engine import federate
from perdl_experiments.studies import configure, find, images

pytestmark = [pytest.mark.ray, pytest.mark.slow]

#: An experiment whose clients say where they are, and how often their process has read the data.
#: Flower's workers find it where the driver does, since they are given the driver's search path.
WITNESS = """
import os

import ray

from perdl_experiments.studies import images

strategy = images.strategy


def client(context, config):
    client = images.client(context, config)
    client.extra_metrics = where
    return client


def where(global_atoms, local_atoms):
    return {
        "process": os.getpid(),
        "node": int(ray.get_runtime_context().get_node_id()[:8], 16),
        "reads": images.load_task.cache_info().misses,
    }
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes with a processor each; what joins a cluster joins this one."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


def test_60_clients_learn_the_same_bits_on_three_nodes_of_which_one_dies(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "witness.py").write_text(WITNESS)
    monkeypatch.syspath_prepend(tmp_path)
    witness = importlib.import_module("witness")
    import ray

    config = configure(find("digits"), clients=60, rounds=6)
    middle = Event()

    def note(report: RoundReport) -> None:
        if report.round == 2:
            middle.set()

    with ThreadPoolExecutor(1) as helper:  # a cluster takes new nodes in the main thread alone
        run = helper.submit(federate, witness, config, engine="ray", on_round=note)
        assert middle.wait(timeout=300)
        ours = ray.get_runtime_context().get_node_id()  # older versions of Ray join any node
        dying = next(node for node in cluster.worker_nodes if node.node_id != ours)
        cluster.remove_node(dying, allow_graceful=False)
        assert not run.done(), "nobody missed the node"
        cluster.add_node(num_cpus=1)
        there = run.result()
    here = federate(images, config)
    np.testing.assert_array_equal(there.arrays[0], here.arrays[0])
    assert not any(report.dropped for report in there.history)
    seen = [m for r in there.history if r.step == "evaluate" for m in r.metrics.values()]
    assert len({m["process"] for m in seen}) == len({m["node"] for m in seen}) == 3
    assert {m["reads"] for m in seen} == {1}
