"""A real SuperLink and real SuperNodes, with TLS and node authentication."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks._deployment import Deployment
from flwr_perdl.network import diffusion_averaging
from perdl_experiments import run_experiment
from tests.engines import until

pytestmark = [pytest.mark.slow, pytest.mark.deployment]


WITH_A_LIAR = """\
import json
import time
from pathlib import Path

from flwr.serverapp import ServerApp

from flwr_perdl.strategies import PerMA, ServerSettings
from perdl_experiments import client_app, server_app

client = client_app.app
server = ServerApp()


@server.main()
def main(grid, context):
    out, node_ids = Path(context.run_config["out"]), grid.get_node_ids
    if out.suffix == ".json":
        known = {int(node): partition for node, partition in json.loads(out.read_text()).items()}
        listed = ServerSettings(clients_by_node=known)
        strategy = PerMA(10, num_clients=4, fraction_evaluate=0, server=listed)
        strategy.start(grid, num_rounds=1)
        out.write_text(json.dumps([*strategy.history[0].metrics]))
        return

    def after_the_liar():
        while (out / "checkpoints").exists() and len([*node_ids()]) < 4:
            time.sleep(0.2)
        return node_ids()

    grid.get_node_ids = after_the_liar
    server_app.main(grid, context)
"""


def test_registered_nodes_learn_what_a_run_in_process_learns_and_others_are_refused(
    tmp_path: Path,
) -> None:
    """With TLS and node authentication. Neither a node that is not registered takes part, nor a
    registered one that says that it is client 0, without a list of nodes or with one.

    This liar comes after the first round, and the server waits for it.
    """
    out, listed = tmp_path / "out", tmp_path / "listed.json"

    def lie(deployment: Deployment) -> int:
        node = deployment.register(deployment.make_key("liar"), "liar")
        until((out / "checkpoints").exists)
        deployment.start_node(0, key="liar", name="liar")
        return node

    with (
        Deployment(tmp_path / "deployment", 3, tls=True, app=WITH_A_LIAR) as deployment,
        ThreadPoolExecutor(1) as helper,
    ):
        deployment.make_key("stranger")
        stranger = deployment.start_node(0, key="stranger", name="stranger")
        lying = helper.submit(lie, deployment)
        said = deployment.run({"experiment": "digits", "rounds": 2, "out": str(out)}, timeout=400)
        liar, first = lying.result(), deployment.node_ids[0]
        assert f"Nodes {first} and {liar} " in said

        known = {node: partition for partition, node in deployment.node_ids.items()}
        listed.write_text(json.dumps({**known, liar: 3}))
        said = deployment.run({"experiment": "digits", "out": str(listed)}, timeout=400)
        assert f"Left out node {liar}" in said
        assert "clients_by_node" in said
        assert json.loads(listed.read_text()) == [0, 1, 2]

        refused = stranger.poll()
        processes = [*deployment.nodes]
    assert refused not in (None, 0), "the unregistered SuperNode is still running"
    assert all(process.poll() is not None for process in processes)
    local = tmp_path / "local"
    run_experiment("digits", clients=3, rounds=2, out=local)
    with np.load(out / "arrays.npz") as deployed, np.load(local / "arrays.npz") as in_process:
        np.testing.assert_array_equal(deployed["global_atoms"], in_process["global_atoms"])


SEALED_AVERAGING = """\
import numpy as np
from flwr.app import ArrayRecord
from flwr.client import NumPyClient
from flwr.common import log
from flwr.serverapp import ServerApp

from flwr_perdl.clients import client_app
from flwr_perdl.network import Topology
from flwr_perdl.strategies import DiffusionAveraging

options = {"method": "exact_diffusion", "evaluate_every": 2}
pair = Topology.complete(2)
initial = ArrayRecord([np.zeros(3)])


class LeastSquares(NumPyClient):
    def __init__(self, node):
        rng = np.random.default_rng(node)
        self.X, self.y = rng.standard_normal((9, 3)), node + rng.standard_normal(9)

    def fit(self, parameters, config):
        (w,) = parameters
        return [w - 0.1 * self.X.T @ (self.X @ w - self.y) / 9], 9, {}

    def evaluate(self, parameters, config):
        return float(np.mean((self.X @ parameters[0] - self.y) ** 2)), 9, {}


def make_client(context):
    return LeastSquares(int(context.node_config["partition-id"]))


client = client_app(make_client)
server = ServerApp()


@server.main()
def main(grid, context):
    def tell(report):
        distances = [report.metrics[node].get("neighbor-distance") for node in range(2)]
        log(20, "Exchange %d, distances %s", report.round, distances)

    strategy = DiffusionAveraging(pair, sealed=True, on_round=tell, **options)
    strategy.start(grid, initial, num_rounds=2)
    np.savez(context.run_config["out"], **strategy.averaged.curves)
"""


@pytest.mark.tour
def test_supernodes_average_their_models_by_sealed_messages_and_report_every_round(
    tmp_path: Path,
) -> None:
    app: dict[str, Any] = {}
    exec(SEALED_AVERAGING, app)
    given = {"initial": app["initial"], **app["options"]}
    here = diffusion_averaging(app["LeastSquares"], app["pair"], 2, **given).curves
    out = tmp_path / "out.npz"
    with Deployment(tmp_path / "deployment", 2, app=SEALED_AVERAGING) as deployment:
        said = deployment.run({"out": str(out)}, timeout=400)
    assert [
        f"Exchange {t + 2}, distances {here['neighbor-distance'][t - 1].tolist()}" in said
        for t in (1, 2)
    ] == [True] * 2
    with np.load(out) as deployed:
        assert {*deployed} == {*here}
        for name, rows in here.items():
            np.testing.assert_array_equal(deployed[name], rows, err_msg=name)


PAGE = (Path(__file__).parents[2] / "docs" / "use-a-clients-model.md").read_text()


def test_a_client_completes_its_model_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's blocks, but for those in process; with one round."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (client,) = [block for block in blocks if block.startswith("# NumPy\n")]
    (served,) = [block for block in blocks if block.startswith("server = ")]
    (at_client,) = [block for block in blocks if block.startswith("own = load")]
    source = "\n".join((blocks[0], client, served, "client = app\n"))
    states, models = tmp_path / "site" / "states", tmp_path / "site" / "models"
    node_config = {"state-dir": str(states)}
    with Deployment(
        tmp_path / "deployment", 2, node_config=lambda _: node_config, app=source
    ) as deployment:
        deployment.run({"rounds": 1, "out": str(tmp_path / "out")}, timeout=400)
    shutil.copytree(tmp_path / "out", models)
    shutil.rmtree(states / "client-0")  # another machine's
    monkeypatch.chdir(models.parent)
    site: dict[str, Any] = {}
    exec(source + at_client, site)
    grid = site["InProcessGrid"](site["client"], 2)
    strategy = site["PersonalizedFedAvg"](["bias"], num_clients=2, fine_tune=20)
    strategy.start(grid, site["initial"], num_rounds=1)
    for name, array in strategy.result.model_of(1).items():
        np.testing.assert_array_equal(site["own"][name].numpy(), array.numpy())
    with pytest.raises(ValueError, match="state_dir"):
        site["load"]("models").model_of(0, state_dir="states")


def test_a_run_that_fails_says_why_and_a_killed_server_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    """The ServerApp dies after round 1 (SIGKILL); a new run with `resume` ends as if it had not."""
    out, states = tmp_path / "out", tmp_path / "states"
    run = {"experiment": "digits", "clients": 2, "rounds": 3, "out": str(out)}

    def strike(deployment: Deployment) -> None:
        until(lambda: (out / "checkpoints" / "round-000001.npz").exists())
        server = f"flwr-serverapp.*{deployment.address}"
        subprocess.run(["pkill", "-KILL", "-f", server], check=True)

    with (
        Deployment(
            tmp_path / "deployment", 2, node_config=lambda partition: {"state-dir": str(states)}
        ) as deployment,
        ThreadPoolExecutor(1) as helper,
    ):
        with pytest.raises(RuntimeError, match="rounds"):
            deployment.run({"experiment": "digits", "rounds": 0}, timeout=300)
        struck = helper.submit(strike, deployment)
        with pytest.raises(RuntimeError):
            deployment.run(run, timeout=400)
        struck.result()
        assert not (out / "results.json").exists()
        deployment.run({**run, "resume": True}, timeout=400)
    local = tmp_path / "local"
    run_experiment("digits", clients=2, rounds=3, out=local)
    with np.load(out / "arrays.npz") as deployed, np.load(local / "arrays.npz") as in_process:
        np.testing.assert_array_equal(deployed["global_atoms"], in_process["global_atoms"])
