"""Beside fluke, FedLab, GossipPy, and IFCA and D-PSGD in plain loops, on the same splits.

``make rivals`` makes each library's environment and runs ``python benchmarks/rivals.py [SEEDS]``,
which prints two tables and writes them to ``benchmarks/results/``: accuracies, ``rivals.md``, and
what they cost, ``rivals-cost.md``; SEEDS, 3, is at least 2.

Clients, images and network are those of the experiment `personal`. All have the same first weights,
batches of one size in an order drawn anew in each epoch, all clients in every round, and one epoch
of each array per round. Each method has its learning rate (and Ditto its pull) by the accuracy
on the images to choose by with the first seed; another library's grid has the optimizer of its
documentation, too. fluke's ``lam`` is a term of each gradient step: it is set so that its pull in
all steps of a round is ours. IFCA starts from four random networks, ClusteredFedAvg from one.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions, version
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from _digits import Measured
from _measure import CORES, RESULTS
from joblib import Parallel, delayed
from scipy import stats

from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.network import Schedule, Topology, diffusion_averaging, metropolis_weights
from flwr_perdl.protocol.records import ROUND
from flwr_perdl.random import DATA, spawn
from flwr_perdl.strategies import ClusteredFedAvg, ServerSettings
from perdl_experiments.render import markdown_table
from perdl_experiments.studies import _network, configure, find, personal

ROUNDS, CONFIG = 20, configure(find("personal"))
THERE, N_STEPS = RESULTS.parent / "_rivals.py", CONFIG.images // personal.BATCH  # of an epoch
#: By library: its distribution, and the optimizer of its documentation's examples.
LIBRARIES: dict[str, tuple[str, dict[str, float]]] = {
    "fluke": ("fluke-fl", {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}),
    "fedlab": ("fedlab", {"lr": 0.02}),
    "gossipy": ("gossipy-dfl", {"lr": 0.1, "weight_decay": 0.01}),
}
#: Task and rival, how the clients differ, our method, and the rival's function and method.
ROWS = (
    ("private head, FedPer", "fluke", "labels", "fedper", "fluke", "fedper.FedPer"),
    ("private head, FedRep", "fluke", "labels", "fedrep", "fluke", "fedrep.FedRep"),
    ("own models, Ditto", "fluke", "labels", "ditto", "fluke", "ditto.Ditto"),
    ("one model, FedAvg", "fluke", "missing", "fedavg", "fluke", "fedavg.FedAVG"),
    ("one model, FedAvg", "FedLab", "missing", "fedavg", "fedlab", ""),
    ("four clusters", "FedLab's IFCA, fixed", "turned", "clustered", "fedlab_ifca", ""),
    ("four clusters", "IFCA in a loop", "turned", "clustered", "ifca", ""),
    ("gossip, exponential graph", "fluke", "gossip", "exponential", "fluke_gossip", ""),
    ("gossip, exponential graph", "GossipPy", "gossip", "exponential", "gossipy", ""),
    ("gossip, exponential graph", "D-PSGD in a loop", "gossip", "exponential", "dpsgd", ""),
)
#: What a user writes, by function or our method: definitions of files.
MODEL = [(_network.__file__, ("Network", "layers", "accuracy")), (personal.__file__, ("Client",))]
TORCH = ("images", "layer", "Net")
WRITTEN = {
    **{name: [(__file__, (name,)), *MODEL] for name in ("gossip", "ifca", "dpsgd")},
    "server": [(_network.__file__, ("federated",)), *MODEL],
    "fluke": [(THERE, (*TORCH, "fluke_parts", "two_parts", "fluke"))],
    "fluke_gossip": [(THERE, (*TORCH, "fluke_parts", "fluke_gossip"))],
    "fedlab": [(THERE, (*TORCH, "fedlab"))],
    "fedlab_ifca": [(THERE, (*TORCH, "fedlab", "fedlab_ifca"))],
    "gossipy": [(THERE, (*TORCH, "gossipy"))],
}
#: Processor seconds; bytes, per client; each client's accuracies, to choose by and in the test.
Run = tuple[float, float, Any]
Clients = Sequence[personal.Client]
#: A seed, an optimizer, and Ditto's pull.
Tried = Sequence[tuple[int, dict[str, float], float]]


def given(kind: str, seed: int) -> tuple[list[personal.Split], list[_network.Model]]:
    """Return the clients' images, for gossip with common ones to measure by, and first models."""
    own = personal.splits(CONFIG, "missing" if kind == "gossip" else kind, seed)
    if kind == "gossip":
        _, *pairs = zip(*own, strict=True)
        common = [[np.concatenate(x) for x in zip(*pair, strict=True)] for pair in pairs]
        own = [personal.Split(one.train, *map(tuple, common)) for one in own]
    X, rng = own[0].train[0], spawn(seed, DATA, 1)
    models = [_network.random_network(X.shape[1], CONFIG.hidden, 10, rng) for _ in range(4)]
    return own, [[array.astype(np.float32) for array in model] for model in models]


def exponential(n: int) -> Any:
    """Return the weights of the exponential graph."""
    return metropolis_weights(Topology.exponential(n)).matrix.toarray().astype(np.float32)


def place(function: str) -> Path:
    """Return where a function's library is installed."""
    return RESULTS.parent.parent / f".venv-rivals-{function.split('_')[0]}"


def measured(clients: Clients, models: Iterable[_network.Model]) -> list[list[Any]]:
    """Return the clients' accuracies."""
    found: list[list[Any]] = personal.measured(clients, [*models]).tolist()
    return found


def ours(name: str, clients: Clients, model: _network.Model, pull: float) -> tuple[float, Any]:
    """Run this library."""
    if name in ("exponential", "pairs"):
        return gossip(name, clients, model)
    strategy: Any = ClusteredFedAvg(4, server=ServerSettings(evaluate_every=ROUNDS))
    if name != "clustered":
        strategy = personal.strategies(ROUNDS)[name][f"{pull:g}" if pull else ""]
    private = personal.PRIVATE.get(name, ())
    models = _network.federated(clients, model, strategy, ROUNDS, private)
    sent = 4 * sum(one.floats_down + one.floats_up for one in strategy.history)
    return sent, measured(clients, models)


def gossip(name: str, clients: Clients, model: _network.Model) -> tuple[float, Any]:
    """Run this library without a server."""
    n, make = len(clients), Topology.exponential
    network = Schedule.random_pairs(n, seed=clients[0].seed) if name == "pairs" else make(n)
    names = ("chosen-by", "accuracy")
    options: dict[str, Any] = {"metrics": names, "evaluate_every": ROUNDS, "initial": model}
    run = diffusion_averaging(lambda node: clients[node], network, ROUNDS, **options)
    table = np.stack([run.curves[f"evaluate-{one}"][-1] for one in names], axis=1)
    return float(run.curves["bytes-received"].mean(axis=1).sum()), table


def ifca(clients: Clients, models: list[_network.Model]) -> tuple[float, Any]:
    """IFCA (Ghosh et al., 2020), models averaged, with an epoch for a client's steps."""

    def choose(client: personal.Client) -> int:
        return int(np.argmin([client.evaluate(model, {})[0] for model in models]))

    size = sum(array.nbytes for array in models[0])
    for t in range(1, ROUNDS + 1):
        groups: list[list[_network.Model]] = [[] for _ in models]
        for client in clients:
            k = choose(client)
            groups[k].append(client.fit(models[k], {ROUND: t})[0])
        models = [
            [np.mean(arrays, axis=0) for arrays in zip(*group, strict=True)] if group else model
            for model, group in zip(models, groups, strict=True)
        ]
    sent = (ROUNDS * (len(models) + 1) + len(models)) * size
    return sent, measured(clients, [models[choose(client)] for client in clients])


def dpsgd(clients: Clients, models: list[_network.Model]) -> tuple[float, Any]:
    """D-PSGD (Lian et al., 2017) with an epoch for its gradient step."""
    n = len(clients)
    weights = exponential(n)
    stacks = [np.stack([array] * n) for array in models[0]]
    for t in range(1, ROUNDS + 1):
        own = [c.fit([stack[i] for stack in stacks], {ROUND: t})[0] for i, c in enumerate(clients)]
        stacks = [np.tensordot(weights, arrays, 1) for arrays in zip(*own, strict=True)]
    sent = (np.count_nonzero(weights) / n - 1) * ROUNDS * sum(array[0].nbytes for array in stacks)
    return sent, measured(clients, zip(*stacks, strict=True))


def here(kind: str, function: str, method: str, tried: Tried) -> list[Run]:
    """Return the runs of this library or of a plain loop."""
    found = []
    for seed, sgd, pull in (tried[0], *tried):  # the first compiles
        own, models = given(kind, seed)
        clients = [Measured(one, seed, i, sgd["lr"]) for i, one in enumerate(own)]
        start = time.process_time()
        if function == "ours":
            sent, table = ours(method, clients, models[0], pull)
        else:
            sent, table = (ifca if function == "ifca" else dpsgd)(clients, models)
        found.append((time.process_time() - start, sent, table))
    return found[1:]


def there(kind: str, function: str, method: str, tried: Tried) -> list[Run]:
    """Return the runs of another library, in its environment."""
    n = CONFIG.clients
    arrays: dict[str, Any] = {"graph": exponential(n) - np.eye(n) > 0}
    for seed in {seed for seed, *_ in tried}:
        own, models = given(kind, seed)
        for k, model in enumerate(models):
            pairs = zip(_network.NAMES, model, strict=True)
            arrays |= {f"{seed}/{name}-{k}": array for name, array in pairs}
        for (i, one), part in product(enumerate(own), personal.Split._fields):
            pair = zip("Xy", getattr(one, part), strict=True)
            arrays |= {f"{seed}/{part}-{what}-{i}": array for what, array in pair}
    np.savez(sent := BytesIO(), **arrays)
    same = {"rounds": ROUNDS, "batch": personal.BATCH, "method": method}
    runs = [
        {"seed": seed, "sgd": sgd, "lam": pull / (1 - pull) / (N_STEPS * sgd["lr"])}
        for seed, sgd, pull in tried
    ]
    command = [place(function) / "bin" / "python", THERE, function]
    command.append(json.dumps([one | same for one in runs]))
    printed = subprocess.check_output(command, input=sent.getvalue()).splitlines()
    return [tuple(json.loads(line)) for line in printed[1:]]


def tuned(kind: str, function: str, method: str, seeds: int) -> tuple[Any, list[Run]]:
    """Return what is best of the grid with the first seed, and its run with every seed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("flwr").setLevel(logging.ERROR)
    library, is_ditto = function.split("_")[0], method in ("ditto", "ditto.Ditto")
    pulls = personal.PULLS if is_ditto else (0.0,)
    grid: list[Any] = [(0, {"lr": step}, pull) for step, pull in product(personal.STEPS, pulls)]
    if library in LIBRARIES:
        documented = LIBRARIES[library][1]
        part = N_STEPS * documented["lr"]  # with fluke's documented lam, 1, the pull is:
        grid.append((0, documented, part / (1 + part) if is_ditto else 0.0))
    run = there if library in LIBRARIES else here
    with one_blas_thread():
        first = run(kind, function, method, grid)
        best = max(range(len(grid)), key=lambda k: np.mean(first[k][2], axis=0)[0])
        again = [(seed, *grid[best][1:]) for seed in range(1, seeds)]
        rest = run(kind, function, method, again)
    return grid[best][1:], [first[best], *rest]


def code_lines(function: str) -> int:
    """Return how many lines of the definitions are code: no docstrings, comments, blank lines."""
    found = 0
    for file, names in WRITTEN[function]:
        text = Path(file).read_text()
        for node in (node for node in ast.parse(text).body if getattr(node, "name", "") in names):
            source = re.sub(r'(?s)""".*?"""', "", ast.get_source_segment(text, node) or "")
            found += len(re.findall(r"(?m)^ *[^\s#]", source))
    return found


def tables(found: dict[Any, tuple[Any, list[Run]]], seeds: int) -> tuple[str, str]:
    """Return accuracies, the rows that we lose first, and what they cost, as Markdown."""
    rows, chosen = [], []
    for task, rival, kind, own, function, method in ROWS:
        sides = [found[kind, "ours", own], found[kind, function, method]]
        (a, b) = (np.array([np.mean(run[2], axis=0)[1] for run in runs]) for _, runs in sides)
        half = stats.t.ppf(0.975, seeds - 1) * stats.sem(a - b)
        accuracy = [f"{a.mean():.3f}", f"{b.mean():.3f}", f"{np.mean(a - b):+.3f} ± {half:.3f}"]
        cost = []
        for at, unit, form in ((1, 1e6, ".2f"), (0, 1, ".1f")):
            cost += [f"{np.mean([run[at] for run in runs]) / unit:{form}}" for _, runs in sides]
        ours = "gossip" if kind == "gossip" else "server"
        cost += [f"{code_lines(name)}" for name in (ours, function)]
        rows.append((np.mean(a - b), [task, rival], accuracy, cost))
        grids = [
            " ".join(f"{x:.2g}" for x in (*sgd.values(), pull) if x) for (sgd, pull), _ in sides
        ]
        chosen.append(f"{task} {grids[0]} ({rival} {grids[1]})")
    versions = [f"{name} {version(name)}" for name in ("flwr-perdl", "flwr")]
    for library, (name, _) in LIBRARIES.items():
        path = [str(one) for one in place(library).glob("lib/python*/site-packages")]
        versions += [f"{name} {one.version}" for one in distributions(name=name, path=path)]
        torch = [one.version for one in distributions(name="torch", path=path)]
    rows.sort()
    accuracies = markdown_table(
        ["task: other library", "accuracy, ours", "theirs", "ours - theirs"],
        [[": ".join(names), *accuracy] for _, names, accuracy, _ in rows],
    )
    costs = markdown_table(
        [
            "task",
            "other library",
            "MB, ours",
            "theirs",
            "s, ours",
            "theirs",
            "lines, ours",
            "theirs",
        ],
        [names + cost for _, names, _, cost in rows],
    )
    about = f"""
MB: sent and received by a client, or sent by a node. s: processor seconds of a run, one thread.
Lines: code that a user writes, network and loading included, imports at the top of a file not. Best
of the grid, ours and theirs (learning rate, documented momentum and weight decay, Ditto's pull):
{"; ".join(chosen)}.
Python {platform.python_version()}, {", ".join(versions)}, PyTorch {torch[0]}.
"""
    said = f"Means over {seeds} seeds, ±: half of a 95 % interval"
    said += f"; {CONFIG.clients} clients, {ROUNDS} rounds."
    return f"{accuracies}\n{said}\n", costs + about


if __name__ == "__main__":
    seeds = int((sys.argv[1:] or "3")[0])
    sides = [(kind, *side) for *_, kind, own, f, m in ROWS for side in (("ours", own), (f, m))]
    keys = list(dict.fromkeys(sides))
    runs = Parallel(CORES)(delayed(tuned)(*key, seeds) for key in keys)
    found = tables(dict(zip(keys, runs, strict=True)), seeds)
    for name, result in zip(("rivals", "rivals-cost"), found, strict=True):
        (RESULTS / f"{name}.md").write_text(result)
        print(result)
