"""Running one federation of an experiment on an engine: the same apps, the same results.

======================  ============================================================
engine                  what it is
======================  ============================================================
``"in-process"``        `InProcessGrid`: this process, no Ray
``"ray"``               Flower's simulation engine, started from this process
a Flower ``Grid``       inside a ServerApp: ``flwr run .`` or ``flower-simulation --app .``
======================  ============================================================
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result

from flwr_perdl.clients import client_app
from flwr_perdl.core.checks import Matrix, check_choice
from flwr_perdl.protocol.records import EVALUATE, NEW_STATE
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import ProtocolStrategy, RoundReport, ServerSettings, client_report
from perdl_experiments.words import plural

ENGINES = ("in-process", "ray")

Served = TypeVar("Served")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Federation(Protocol):
    """What an engine needs of an experiment (a module with these two functions).

    A module may have two more: ``initial(config)``, the arrays that the strategy starts from, and
    ``privacy(config)``, the clients' own guarantee in process.
    """

    def client(self, context: Context, config: Any) -> Any:
        """Return the client of ``context``'s partition."""

    def strategy(self, config: Any, **options: Any) -> ProtocolStrategy:
        """Return the strategy; ``options`` are the server's."""


class Federated(NamedTuple):
    """What one federation came to.

    Attributes
    ----------
    arrays : list of ndarray
        The final model.
    history : list of RoundReport
        Every training round and every evaluation.
    names : dict of int to str
        How reports call the clients, by partition.
    result : Result
        Flower's own result.
    learned : object
        The strategy's own, mostly a `Learned`; None where it has none.
    rounds : int
        Communication rounds: one request and one reply per participating client.
    floats_up, floats_down : float
        Floats that a client sent and received in all training rounds; the mean over clients.
    seconds : float
        Time of this run.
    local_atoms : list of ndarray
        Every client's own, by partition, where the clients of this process learn a dictionary.
    """

    arrays: list[Matrix]
    history: list[RoundReport]
    names: dict[int, str]
    result: Result
    learned: Any
    rounds: int
    floats_up: float
    floats_down: float
    seconds: float
    local_atoms: list[Matrix]

    @property
    def cost(self) -> dict[str, Any]:
        """Rounds and floats, as an `Outcome` has them."""
        return {name: getattr(self, name) for name in ("rounds", "floats_up", "floats_down")}


def federate(
    experiment: Federation,
    config: Any,
    *,
    engine: str | Grid = "in-process",
    evaluate_fn: EvaluateFn | None = None,
    evaluate_config: Mapping[str, Any] | None = None,
    state_dir: Path | None = None,
    **options: Any,
) -> Federated:
    """Run one federation of ``experiment`` and return what it came to.

    Parameters
    ----------
    experiment : Federation
        Makes the clients and the strategy.
    config : Config
        The experiment's own, with ``clients``, ``rounds`` and ``seed``.
    engine : str or Grid
        See the module's table.
    evaluate_fn : callable, optional
        ``(round, model) -> metrics``, before the first round and after every round, as Flower's.
    evaluate_config : mapping, optional
        Config of the clients' evaluations.
    state_dir : Path, optional
        In process: where the states of all clients are kept, as `InProcessGrid` does it.
    **options
        Further server options, such as ``checkpoint_dir``, ``resume`` and ``on_round``.
    """

    def run(grid: Grid) -> Federated:
        server: dict[str, Any] = {
            "seed": config.seed,
            "num_clients": config.clients,
            "min_clients": min(2, config.clients),
        }
        strategy = experiment.strategy(config, **{**server, **options})
        initial = getattr(experiment, "initial", None)
        started = time.perf_counter()
        result = strategy.start(
            grid,
            None if initial is None else ArrayRecord(initial(config)),
            num_rounds=config.rounds,
            evaluate_config=ConfigRecord(dict(evaluate_config or {})),
            evaluate_fn=evaluate_fn,
        )
        seconds = time.perf_counter() - started
        training = [report for report in strategy.history if report.step != EVALUATE]
        return Federated(
            arrays=result.arrays.to_numpy_ndarrays(),
            history=list(strategy.history),
            names={who: str(who) for who in client_report(strategy.history)}
            | strategy.client_names,
            result=result,
            learned=getattr(strategy, "result", None),
            rounds=len(training),
            floats_up=float(np.sum([report.floats_up for report in training])),
            floats_down=float(np.sum([report.floats_down for report in training])),
            seconds=seconds,
            local_atoms=_local_atoms(grid),
        )

    if isinstance(engine, Grid):
        return run(engine)
    check_engine(engine)
    make_client = partial(experiment.client, config=config)
    if engine == "in-process":
        guarantee = getattr(experiment, "privacy", lambda config: None)(config)
        app = client_app(make_client, privacy=guarantee)
        return run(InProcessGrid(app, config.clients, state_dir=state_dir))
    # Ray's processes would each draw the same noise from a seed: there it is the system's.
    return on_ray(run, client_app(make_client), config.clients)


def arranged(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a strategy's arguments, with those that are fields of its `ServerSettings` in one."""
    rare = {field.name for field in fields(ServerSettings) if field.init}
    server = ServerSettings(**{name: value for name, value in options.items() if name in rare})
    return {name: v for name, v in options.items() if name not in rare} | {"server": server}


def check_engine(engine: str) -> None:
    """Refuse an engine that is not known, or not installed."""
    check_choice("engine", engine, ENGINES)
    if engine == "ray" and find_spec("ray") is None:
        raise ValueError(
            "engine must be 'in-process' where Ray is not installed (the extra 'simulation' "
            "brings it), got 'ray'."
        )


def _local_atoms(grid: Grid) -> list[Matrix]:
    """Return the clients' own atoms; none where they are elsewhere, or none are learned."""
    try:
        return grid.local_atoms() if isinstance(grid, InProcessGrid) else []
    except ValueError:
        return []


def mishaps(history: Sequence[RoundReport], names: Mapping[int, str] | None = None) -> list[str]:
    """Return a sentence about every client that was left out, or made its private state anew.

    Parameters
    ----------
    history : sequence of RoundReport
        A federation's.
    names : mapping of int to str, optional
        The clients' names by partition; one that is not there is called by its number.
    """
    left_out: dict[str, list[tuple[int, str]]] = {}
    lost: dict[int, list[int]] = {}
    for report in history:
        for label, reason in report.dropped.items():
            left_out.setdefault(label, []).append((report.round, reason))
        if report.step == EVALUATE:
            continue
        for partition, metrics in report.metrics.items():
            if metrics.get(NEW_STATE):
                lost.setdefault(partition, []).append(report.round)
    notes = []
    for label, times in left_out.items():
        (round_, reason), often = times[0], len(times)
        what = reason.rstrip(".")
        times_ = plural(often, "time")
        notes.append(f"Left out {label} {times_}, first in round {round_}: {what}.")
    for partition, rounds in lost.items():
        who = (names or {}).get(partition, partition)
        lose = f"Client {who} had lost its private state in round"
        notes += [f"{lose} {round_} and made its local atoms anew." for round_ in rounds]
    return notes


def on_ray(serve: Callable[[Grid], Served], app: ClientApp, clients: int) -> Served:
    """Run a server on Flower's simulation engine, and return, or raise, what it does.

    Parameters
    ----------
    serve : callable
        The server's part.
    app : ClientApp
        What the clients run.
    clients : int
        How many there are.

    Raises
    ------
    ValueError
        If Ray is not installed.
    """
    check_engine("ray")
    from flwr.simulation import run_simulation

    server = ServerApp()
    served: list[Served] = []
    failures: list[Exception] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            served.append(serve(grid))
        except Exception as error:
            failures.append(error)

    # If a worker dies, alone or with its machine, Ray starts a new one on a free processor, which
    # handles the message again. The number of retries is bounded, since the message itself may have
    # killed the worker. Without this, Flower sends all further messages to the dead worker. The
    # variable silences a warning of Ray when workers are stopped at the end of the run.
    os.environ.setdefault("RAY_enable_output_error_log_if_still_retry", "0")
    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "max_restarts": -1, "max_task_retries": 30},
        "init_args": {"log_to_driver": False},
    }
    run_simulation(
        server_app=server,
        client_app=app,
        num_supernodes=clients,
        backend_config=backend,
    )
    if failures:
        raise failures[0]
    return served[0]
