"""What strategies cost beside Flower's FedAvg where the model is a ResNet-18.

Run from the repository's root: ``python benchmarks/large_models.py``; it writes
``benchmarks/results/large_models.json`` and its table and picture. Some ten minutes, and 6 GB of
memory. The model is made in NumPy: ResNet-18's 122 arrays, 11 million float32 numbers and twenty
integer counters. Each run is a process of its own, in process on `InProcessGrid`, with evaluation.
The clients' handlers add a number to each array; what they cost is subtracted. ``--one NAME N``
prints what a single run of N clients takes, ``--ray NAME`` the seconds of one of eight on Ray.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from _measure import cell, main
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from matplotlib.figure import Figure

from flwr_perdl.clients import client_app
from flwr_perdl.network import Topology
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    DiffusionAveraging,
    Ditto,
    PersonalizedFedAvg,
)
from perdl_experiments.render import markdown_table

CLIENTS, ROUNDS, TURNS, ON_RAY = 20, 2, 3, 8
#: Numbers of clients for the picture.
SIZES = (5, 20, 50)
FEDAVG = "FedAvg of Flower"
START = "ClusteredFedAvg(3), the start"
CHOICE, BETWEEN = "ClusteredFedAvg(3), a choice", "ClusteredFedAvg(3), between choices"


def resnet18() -> dict[str, np.ndarray]:
    """Return ResNet-18's arrays, with PyTorch's names: random numbers."""
    rng, model = np.random.default_rng(0), dict[str, np.ndarray]()

    def add(name: str, *shape: int) -> None:
        model[name] = 0.05 * rng.standard_normal(shape, dtype=np.float32)

    def add_norm(name: str, size: int) -> None:
        for part in ("weight", "bias", "running_mean", "running_var"):
            add(f"{name}.{part}", size)
        model[f"{name}.running_var"] = np.ones(size, dtype=np.float32)
        model[f"{name}.num_batches_tracked"] = np.array(100)

    add("conv1.weight", 64, 3, 7, 7)
    add_norm("bn1", 64)
    width = 64
    for layer, size in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            name = f"layer{layer}.{block}"
            add(f"{name}.conv1.weight", size, width, 3, 3)
            add_norm(f"{name}.bn1", size)
            add(f"{name}.conv2.weight", size, size, 3, 3)
            add_norm(f"{name}.bn2", size)
            if width != size:
                add(f"{name}.downsample.0.weight", size, width, 1, 1)
                add_norm(f"{name}.downsample.1", size)
            width = size
    add("fc.weight", 1000, 512)
    add("fc.bias", 1000)
    return model


N_NUMBERS = sum(array.size for array in resnet18().values())


class Handlers:
    """A ClientApp's handlers, and the processor's seconds that they take."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.app = ClientApp()
        self.app.train()(self.train)
        self.app.evaluate()(self.evaluate)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is done inside as the user's."""
        start = time.process_time()
        yield
        self.seconds += time.process_time() - start

    def train(self, message: Message, context: Context) -> Message:
        """Add a number of the client's own to every array."""
        with self.counted():
            own = 1e-4 * (1 + int(context.node_config["partition-id"]) % 3)
            arrays = message.content.array_records["arrays"].to_numpy_ndarrays()
            for array in arrays:
                array += array.dtype.type(own if array.dtype.kind == "f" else 1)
            record = to_record(zip(message.content.array_records["arrays"], arrays, strict=True))
            metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Return how far one array is from the client's own number."""
        with self.counted():
            arrays = message.content.array_records["arrays"].to_numpy_ndarrays()
            own = int(context.node_config["partition-id"]) % 3
            loss = abs(float(arrays[1][0]) - 1e-4 * own)
            metrics = MetricRecord({"num-examples": 10, "loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)


def to_record(arrays: Iterable[tuple[str, np.ndarray]]) -> ArrayRecord:
    """Return a record of named arrays."""
    return ArrayRecord({name: Array(array) for name, array in arrays})


#: ``n_clients, on_round -> strategy``.
STRATEGIES: dict[str, Callable[..., Any]] = {
    FEDAVG: lambda n, on_round: FedAvg(),
    "ClusteredFedAvg(1)": lambda n, on_round: ClusteredFedAvg(1, num_clients=n, on_round=on_round),
    CHOICE: lambda n, on_round: ClusteredFedAvg(
        3, choose_every=2, num_clients=n, on_round=on_round
    ),
    'PersonalizedFedAvg(["fc.*"])': lambda n, on_round: PersonalizedFedAvg(
        ["fc.*"], num_clients=n, on_round=on_round
    ),
    "Ditto": lambda n, on_round: Ditto(num_clients=n, on_round=on_round),
    "DiffusionAveraging(ring)": lambda n, on_round: DiffusionAveraging(
        Topology.ring(n), on_round=on_round
    ),
    'DiffusionAveraging(ring, method="atc")': lambda n, on_round: DiffusionAveraging(
        Topology.ring(n), method="atc", on_round=on_round
    ),
}


class CountingGrid(InProcessGrid):
    """Counts the bytes of arrays that messages carry."""

    n_bytes = 0

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        """Push messages, and return the replies."""
        asked = list(messages)
        replies = list(super().send_and_receive(asked, timeout=timeout))
        for message in (*asked, *replies):
            if not message.has_error():
                records = message.content.array_records.values()
                self.n_bytes += sum(len(one.data) for record in records for one in record.values())
        return replies


def run(name: str, n_clients: int) -> dict[str, Any]:
    """Return what a run takes beside the handlers: seconds by round, MB at most, MB of messages.

    A run of a small model comes first: what a process loads once is not counted.
    """
    small = {name: array.ravel()[:1] for name, array in resnet18().items()}
    run_with(name, 3, small)
    return run_with(name, n_clients, resnet18())


def run_with(name: str, n_clients: int, model: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return what a run with a model takes."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    handlers, ends = Handlers(), dict[int, float]()

    def spent() -> float:
        return time.process_time() - handlers.seconds

    app = handlers.app if name == FEDAVG else client_app(handlers.app)
    grid = CountingGrid(app, n_clients)
    strategy = STRATEGIES[name](n_clients, lambda report: ends.update({report.round: spent()}))
    rounds = ROUNDS + (name == CHOICE)  # the first one finds the clusters
    initial = to_record(model.items())
    began, handlers.seconds = time.process_time(), 0.0
    strategy.start(grid, initial, num_rounds=rounds)
    total = spent() - began
    stamps = [began, *(ends[round_] for round_ in sorted(ends))]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": total,
        "rounds": np.diff(stamps).tolist(),
        "handlers": handlers.seconds,
        "mb": peak,
        "mb_sent": grid.n_bytes / 2**20,
    }


def on_ray(name: str) -> float:
    """Return the seconds of a run on Ray, after one in which workers and memory begin."""
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.WARNING)
    handlers, seconds, server = Handlers(), list[float](), ServerApp()

    @server.main()
    def begin(grid: Grid, context: Context) -> None:
        for model in (resnet18(), resnet18()):
            strategy = STRATEGIES[name](ON_RAY, None)
            start = time.perf_counter()
            strategy.start(grid, to_record(model.items()), num_rounds=ROUNDS)
            seconds.append(time.perf_counter() - start)

    app = handlers.app if name == FEDAVG else client_app(handlers.app)
    run_simulation(
        server, app, ON_RAY, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    )
    return seconds[-1]


def measured(name: str, n_clients: int) -> dict[str, Any]:
    """Return what a run takes in a process of its own."""
    command = [sys.executable, __file__, "--one", name, str(n_clients)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return each row's seconds and MB in every turn, in times of FedAvg's too."""
    rows = {}
    for name, turns in runs.items():
        own = {key: np.array([turn[key] for turn in turns]) for key in ("seconds", "mb", "mb_sent")}
        if name == CHOICE:
            by_round = np.array([turn["rounds"] for turn in turns])
            for row, number in ((START, 0), (CHOICE, 1), (BETWEEN, 2)):
                rows[row] = {**own, "seconds": by_round[:, number] * ROUNDS}
        else:
            rows[name] = own
    base = rows[FEDAVG]
    for own in rows.values():
        own["times_seconds"] = own["seconds"] / base["seconds"]
        own["times_mb"] = own["mb"] / base["mb"]
    return rows


def ratios() -> dict[str, Any]:
    """Measure all runs in turn."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in STRATEGIES}
    for _ in range(TURNS):
        for name, turns in runs.items():
            turns.append(measured(name, CLIENTS))
    rows = rows_of(runs)
    compared = {f"{FEDAVG} / {name}": 1 / own["times_seconds"] for name, own in rows.items()}
    del compared[f"{FEDAVG} / {FEDAVG}"]
    return {"ratios": compared, "rows": rows}


def rest() -> dict[str, Any]:
    """Measure all runs once with other numbers of clients."""
    sizes = {n: rows_of({name: [measured(name, n)] for name in STRATEGIES}) for n in SIZES}
    return {"sizes": {str(n): rows for n, rows in sizes.items()}}


def tables(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    heads = ["", "processor time, times FedAvg's", "peak memory, times FedAvg's", "MB sent"]
    rows = [
        [
            name,
            cell(own["times_seconds"], ".2f"),
            cell(own["times_mb"], ".2f"),
            f"{np.median(own['mb_sent']):,.0f}",
        ]
        for name, own in results["rows"].items()
    ]
    base = results["rows"][FEDAVG]
    seconds, mb = cell(base["seconds"], ".2f"), cell(base["mb"], ",.0f")
    return (
        f"{CLIENTS} clients in process, {ROUNDS} rounds with evaluation, a ResNet-18 of "
        f"{N_NUMBERS:,} numbers in {len(resnet18())} arrays, without the clients' own training and "
        f"evaluation. FedAvg of Flower takes {seconds} s and {mb} MB. Medians of {TURNS} turns, "
        f"and their range. ClusteredFedAvg(3) takes a round more; times are of "
        f"{ROUNDS} rounds of a kind, memory and MB of all three.\n\n{markdown_table(heads, rows)}"
    )


def picture(results: dict[str, Any]) -> Figure:
    """Draw time and memory against the number of clients."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    sizes = {int(n): rows for n, rows in results["sizes"].items()}
    for axes, key, label in zip(
        figure.subplots(1, 2),
        ("times_seconds", "times_mb"),
        ("processor time, times FedAvg's", "peak memory, times FedAvg's"),
        strict=True,
    ):
        for name in next(iter(sizes.values())):
            values = [float(np.median(rows[name][key])) for rows in sizes.values()]
            axes.plot(list(sizes), values, "o-", label=name)
        axes.set(xlabel="clients", ylabel=label, ylim=(0, None))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=9)
    return figure


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(run(sys.argv[2], int(sys.argv[3]))))
    elif sys.argv[1:2] == ["--ray"]:
        print(json.dumps(on_ray(sys.argv[2])))
    else:
        main("large_models", (__doc__ or "").splitlines()[0], ratios, rest, tables, picture)
