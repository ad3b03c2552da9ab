"""Groups without a server: nodes that find out by themselves which neighbors are like them.

The clients of experiment `personal`, 20 nodes that see digits turned by 0, 90, 180 or 270 degrees:
40 images to train, 20 by which a node chooses its neighbors, and the length of a step and the
epochs of a round are chosen, others for the accuracy. 40 rounds of ATC; means over the nodes,
medians over five seeds. Then the same where all see upright digits, over twenty; and, over three,
16 nodes of the exponential graph, two of them malicious (see `benchmarks/_liars.py`). Writes
results/groups.md. About ten minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _digits import Measured
from _liars import NEIGHBORS, average_among_liars

from flwr_perdl.network import InMemoryNetwork, Schedule, Topology, diffusion_averaging
from perdl_experiments.render import markdown_table
from perdl_experiments.studies import configure, find
from perdl_experiments.studies.personal import Client, Split, first_model, splits

NODES, GROUPS, ROUNDS, SEEDS = 20, 4, 40, range(5)
#: Seeds where nodes are alike: the difference is as small as what five of them leave to chance.
MORE = range(20)
#: Lengths of a step and epochs per round, of which every cell has its best.
TRAININGS = ((0.1, 5), (0.3, 1), (0.3, 5), (1.0, 1))
CONFIG = configure(find("personal"))
Network = Schedule | Topology

GRAPHS: Mapping[str, Callable[[int], Network]] = {
    "1 pairing": lambda seed: Schedule.random_pairs(NODES, 1, seed=seed),
    "3 pairings": lambda seed: Schedule.random_pairs(NODES, 3, seed=seed),
    "6 pairings": lambda seed: Schedule.random_pairs(NODES, 6, seed=seed),
    "fixed graph, degree 6": lambda seed: Topology.k_regular(NODES, 6, seed=seed),
}


class Trained(Measured):
    """A client whose ``fit`` takes several epochs."""

    epochs = 1

    def fit(self, parameters: Any, config: Any) -> Any:
        """Train for some epochs."""
        model, n = parameters, 0
        for epoch in range(self.epochs):
            drawn = {**config, "server-round": config["server-round"] * self.epochs + epoch}
            model, n, _ = super().fit(model, drawn)
        return model, n, {}


class Ended(NamedTuple):
    """What chooses the training, the nodes' accuracy, and the share accepted of the own group."""

    chosen_by: float
    accuracy: float
    own: float = np.nan


def trained(own: Sequence[Split], seed: int, step: float, epochs: int) -> list[Trained]:
    """Return the clients."""
    clients = [Trained(one, seed, i, step) for i, one in enumerate(own)]
    for client in clients:
        client.epochs = epochs
    return clients


def ended(clients: Sequence[Client], model: Any, network: Network, groups: str | None) -> Any:
    """Return what nodes have learned."""
    return diffusion_averaging(
        clients.__getitem__,
        network,
        ROUNDS,
        initial=model,
        method="atc",
        groups=groups,
        evaluate_every=ROUNDS,
        metrics=["accuracy", "chosen-by"],
    )


def measured(runs: Iterable[Any]) -> Ended:
    """Return the means over the nodes of runs that make up a network."""
    last = [{name: rows[-1] for name, rows in run.curves.items()} for run in runs]
    names = "evaluate-chosen-by", "evaluate-accuracy"
    return Ended(*(float(np.mean([row[name] for row in last])) for name in names))


def plain(clients: Sequence[Client], model: Any, network: Network) -> Ended:
    """Return what nodes end with that average with all neighbors."""
    return measured([ended(clients, model, network, None)])


def chosen(clients: Sequence[Client], model: Any, network: Network) -> Ended:
    """Return what nodes end with that choose."""
    run, group = ended(clients, model, network, "auto"), np.arange(NODES) % GROUPS
    own = run.accepted[np.equal.outer(group, group)].sum() / max(run.accepted.sum(), 1)
    return measured([run])._replace(own=float(own))


def known(clients: Sequence[Client], model: Any, network: Network) -> Ended:
    """Return what nodes end with that average with those of their group only."""
    runs = []
    for group in (np.arange(g, NODES, GROUPS) for g in range(GROUPS)):

        def links(round_: int, group: Any = group) -> Topology:
            there = network if isinstance(network, Topology) else network.matrix(round_).topology
            return Topology(there.adjacency[group][:, group])

        within = Schedule(len(group), links, ROUNDS)
        runs.append(ended([clients[k] for k in group], model, within, None))
    return measured(runs)


def best(method: Any, graph: str, kind: str, seed: int) -> Ended:
    """Return what a method ends with in its best training."""
    own = splits(CONFIG, kind, seed)
    model, network = first_model(CONFIG, own, seed), GRAPHS[graph](seed)
    each = (method(trained(own, seed, *training), model, network) for training in TRAININGS)
    return max(each, key=lambda end: end.chosen_by)


def several(method: Any, graph: str, kind: str, seeds: Sequence[int] = SEEDS) -> Ended:
    """Return the medians over the seeds."""
    return Ended(*np.median([best(method, graph, kind, seed) for seed in seeds], axis=0).tolist())


def among_liars(kind: str, attack: str | None, options: Mapping[str, Any]) -> float:
    """Return the honest nodes' accuracy, two of sixteen being malicious: mean, median of seeds."""
    n, liars, found = 16, [3, 9], []
    for seed in SEEDS[:3]:
        own = splits(replace(CONFIG, clients=n), kind, seed)
        model, clients = first_model(CONFIG, own, seed), trained(own, seed, 0.3, 5)
        network = InMemoryNetwork(Topology.exponential(n))
        given = {"method": "atc", "evaluate_every": 0, "initial": model, **options}
        every = (clients.__getitem__, network, ROUNDS)
        if attack is None:
            models = diffusion_averaging(*every, **given).models
        else:
            models = average_among_liars(liars, attack, *every, **given)
        honest = [k for k in range(n) if k not in liars]
        found.append(np.mean([clients[k].accuracy(models[k]) for k in honest]))
    return float(np.median(found))


ATTACKS = {
    "nothing malicious": None,
    "1e99": "huge",
    "NaN": "nan",
    "a bias of 1e6": "bias",
    "ten times the step, reversed": "flip",
    "a common push of 1.5 standard deviations": "push",
}
RULES: Mapping[str, Mapping[str, Any]] = {
    "no choice": {},
    '`robust="trimmed"`': {"robust": "trimmed", "n_liars": 2},
    '`groups="auto"`': {"groups": "auto"},
}


def tables() -> Iterator[str]:
    """Yield all tables."""
    methods = {"no choice": plain, "oracle groups": known, '`groups="auto"`': chosen}
    rows: list[list[str]] = []
    shares: list[str] = []
    for name, method in methods.items():
        rows.append([name])
        for graph in GRAPHS:
            # In a fixed graph the parts of a group need not be linked.
            skipped = method is known and graph.startswith("fixed")
            end = Ended(np.nan, np.nan) if skipped else several(method, graph, "turned")
            rows[-1].append("" if skipped else f"{end.accuracy:.3f}")
            shares += [f"{end.own:.2f}"] if method is chosen else []
    yield markdown_table(["accuracy", *GRAPHS], rows)
    yield f"Share of the accepted that are of the node's own group: {', '.join(shares)}.\n"
    on_all = (several(method, "6 pairings", "alike", MORE) for method in (plain, chosen))
    without, choosing = (f"{end.accuracy:.3f}" for end in on_all)
    yield (
        f"Where all nodes are alike, the choice costs little: {choosing}, without it {without} "
        f"(6 pairings, {len(MORE)} seeds).\n"
    )
    for kind, title in (("turned", "Four groups"), ("alike", "All alike")):
        lines = [
            [said, *(f"{among_liars(kind, attack, rule):.3f}" for rule in RULES.values())]
            for said, attack in ATTACKS.items()
        ]
        yield markdown_table([f"{title}; two of sixteen send", *RULES], lines)


if __name__ == "__main__":
    assert set(filter(None, ATTACKS.values())) == set(NEIGHBORS)
    logging.getLogger("flwr_perdl").setLevel(logging.ERROR)
    np.seterr(all="ignore")
    found = "\n".join(tables())
    (Path(__file__).parent / "results" / "groups.md").write_text(found)
    print(found)
