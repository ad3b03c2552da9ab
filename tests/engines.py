"""Flower's simulation engine, for tests that run an app of two functions on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

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
