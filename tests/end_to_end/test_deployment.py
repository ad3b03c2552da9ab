"""A real SuperLink and real SuperNodes, with TLS and node authentication."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_perdl.network import InMemoryNetwork
from flwr_perdl.simulations import run_experiment
from flwr_perdl.simulations.deployment import Deployment, make_certificates, make_key

pytestmark = [pytest.mark.slow, pytest.mark.deployment]


def test_registered_nodes_learn_what_a_run_in_process_learns_and_others_are_refused(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with Deployment(tmp_path / "deployment", 3, tls=True) as deployment:
        deployment.make_key("stranger")
        stranger = deployment.start_node(0, key="stranger", name="stranger")
        deployment.run({"experiment": "digits", "rounds": 2, "out": str(out)}, timeout=400)
        refused = stranger.poll()
        processes = [*deployment.nodes]
    assert refused not in (None, 0), "the unregistered SuperNode is still running"
    assert all(process.poll() is not None for process in processes)
    local = tmp_path / "local"
    run_experiment("digits", clients=3, rounds=2, out=local)
    with np.load(out / "arrays.npz") as deployed, np.load(local / "arrays.npz") as in_process:
        np.testing.assert_array_equal(deployed["global_atoms"], in_process["global_atoms"])


SEALED_DIFFUSION = """\
import numpy as np
from flwr.serverapp import ServerApp

from flwr_perdl.clients import DiffusionClient, client_app
from flwr_perdl.diffusion import SparseSVD, Topology
from flwr_perdl.diffusion.inference import ConsensusADMM
from flwr_perdl.network import FlowerNetwork

topology = Topology.from_edges(3, [(0, 1), (1, 2)])
rng = np.random.default_rng(0)
X, D = rng.standard_normal((2, 5)), rng.standard_normal((3, 2, 5)) / 4


def program(nodes):
    atoms = {k: D[k] for k in nodes}
    return ConsensusADMM(SparseSVD(0.1, 0.5), topology, atoms, X, n_atoms=2)


def make_client(context):
    return DiffusionClient(program([context.node_config["partition-id"]]), context)


client = client_app(make_client)
server = ServerApp()


@server.main()
def main(grid, context):
    run = FlowerNetwork(grid, topology, sealed=True).run(None, 3)
    np.savez(context.run_config["out"], unheard=len(run.unheard), **run.observed)
"""


def test_neighbours_write_sealed_letters_from_supernode_to_supernode(tmp_path: Path) -> None:
    app: dict[str, Any] = {}
    exec(SEALED_DIFFUSION, app)
    in_memory = InMemoryNetwork(app["topology"]).run(app["program"](range(3)), 3).observed
    out = tmp_path / "out.npz"
    with Deployment(tmp_path / "deployment", 3, app=SEALED_DIFFUSION) as deployment:
        deployment.run({"out": str(out)}, timeout=400)
    with np.load(out) as deployed:
        assert deployed["unheard"] == 0
        assert {*deployed} == {"unheard", *in_memory}
        for name, expected in in_memory.items():
            np.testing.assert_allclose(deployed[name], expected, rtol=1e-12, atol=1e-12)


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    with (
        Deployment(tmp_path, 2) as deployment,
        pytest.raises(RuntimeError, match="rounds must be at least 1, got 0"),
    ):
        deployment.run({"experiment": "digits", "rounds": 0}, timeout=300)


def test_secrets_are_the_owners_alone(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    public = make_key(tmp_path, "node")
    for secret in ("server.key", "node"):
        assert stat.S_IMODE((tmp_path / secret).stat().st_mode) == 0o600
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")


def test_a_superlink_that_does_not_come_up_is_named_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    broken = folder / "flower-superlink"
    broken.write_text("#!/bin/sh\necho no room left\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    with (
        pytest.raises(RuntimeError, match=r"(?s)superlink did not come up.*no room left"),
        Deployment(tmp_path / "deployment", 1),
    ):
        pass
