"""Flower's engines, for tests that run an app of their own on them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from benchmarks._deployment import Deployment

Result = TypeVar("Result")


def on_ray(client: ClientApp, serve: Callable[[Grid], Result], n_nodes: int) -> Result:
    """Return what ``serve`` does with the grid of a simulation, one processor per worker."""
    from flwr.simulation import run_simulation

    server, found = ServerApp(), list[Result]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        found.append(serve(grid))

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=n_nodes,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"log_to_driver": False}},
    )
    return found[0]


def until(happens: Callable[[], bool]) -> None:
    """Wait for something to happen."""
    deadline = time.monotonic() + 300
    while not happens():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def killed_and_back(folder: Path, app: str, nodes: int = 2) -> Any:
    """Run an app on SuperNodes, one of them killed meanwhile, and return its ``found.json``.

    In the folder, its run config's ``out``, the app makes ``reached``. Then node 1 dies (SIGKILL),
    is started again with its ``state-dir``, and the app finds ``restarted``.
    """

    def disturb(deployment: Deployment) -> None:
        until((folder / "reached").exists)
        deployment.kill(deployment.nodes[1])
        known = deployment.online()
        deployment.start_node(1)
        until(lambda: bool(deployment.online() - known))
        (folder / "restarted").touch()

    def node_config(partition: int) -> dict[str, Any]:
        return {"state-dir": str(folder / "states")}

    with (
        Deployment(folder / "run", nodes, node_config=node_config, app=app) as deployment,
        ThreadPoolExecutor(1) as helper,
    ):
        disturbed = helper.submit(disturb, deployment)
        deployment.run({"out": str(folder)}, timeout=400)
        disturbed.result()
    return json.loads((folder / "found.json").read_text())


def project(source: str) -> dict[str, Any]:
    """Return the names of an app's source; Ray pickles what is of ``__main__`` by value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    return names
