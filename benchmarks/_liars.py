"""Malicious (Byzantine) clients, for tests and benchmarks of what a federation withstands.

=====================  ===========================================================================
attack                 what a malicious client sends
=====================  ===========================================================================
``"sign"``             minus it
``"scaled"``           a million times it
``"sign-scaled"``      minus a million times it
``"collude"``          what its group has agreed on, in rows as long as the honest ones
``"collude-scaled"``   a million times that
``"nudge"``            the honest answer and a tenth of that
``"false model"``      honest answers about false data, a false model per cluster
``"false cluster"``    the same, one model for all of them
=====================  ===========================================================================

The last two are for regression only. Numbers of samples, losses and clusters are told truthfully.
``NEIGHBORS`` are what nodes of `average_among_liars` do to their neighbors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.clients.perma import START
from flwr_perdl.core.checks import Matrix
from flwr_perdl.network import InMemoryNetwork, Topology, diffusion_averaging
from flwr_perdl.network.averaging import AveragingNode, NodeState
from flwr_perdl.network.averaging_in_memory import Hosts, run_nodes
from flwr_perdl.network.averaging_options import AveragingOptions
from flwr_perdl.protocol.records import STEP, Scalar
from flwr_perdl.regression import TwoPhase
from flwr_perdl.regression.phases import Answers, Ask
from perdl_experiments.batched_regression import Clients, simulate
from perdl_experiments.mixed_regression_data import Mixed
from perdl_experiments.studies import decentralized

MESSAGES = ("sign", "scaled", "sign-scaled", "collude", "collude-scaled")
NUDGE = "nudge"
DATA = ("false model", "false cluster")
SCALE = 1e6
#: What a node sends for its model, if its ``fit`` does not lie: of the models of the liars (m, p)
#: and of all honest nodes. The last is their agreed small push, which no distance betrays.
NEIGHBORS: Mapping[str, Callable[[Matrix, Matrix], Matrix]] = {
    "huge": lambda own, honest: np.full_like(own, 1e99),
    "nan": lambda own, honest: np.full_like(own, np.nan),
    "bias": lambda own, honest: own + SCALE,
    "flip": lambda own, honest: own,
    "push": lambda own, honest: honest.mean(axis=0) - 1.5 * honest.std(axis=0),
}


def lie(honest: Matrix, attack: str, group: int = 0) -> Matrix:
    """Return what a malicious client sends instead of its honest answer.

    Parameters
    ----------
    honest : ndarray of shape (..., n)
        The answer.
    attack : str
        One of ``MESSAGES``, or ``NUDGE``.
    group : int, default 0
        Those of one group agree.

    Returns
    -------
    ndarray of the same shape
    """
    lied = honest
    if attack.startswith("collude") or attack == NUDGE:
        agreed = np.random.default_rng(group).standard_normal(honest.shape[-2:])
        agreed /= np.linalg.norm(agreed, axis=-1, keepdims=True)
        lied = agreed * np.linalg.norm(honest, axis=-1, keepdims=True)
    if attack == NUDGE:
        return honest + lied / 10
    if attack.startswith("sign"):
        lied = -lied
    return SCALE * lied if attack.endswith("scaled") else lied


def liars(labels: NDArray[np.intp], share: float, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return the malicious clients: the same share of every cluster, drawn at random.

    Parameters
    ----------
    labels : ndarray of shape (n_clients,)
        Each client's true cluster.
    share : float
        Their share.
    rng : Generator
        Draws them.
    """
    members = [np.flatnonzero(labels == j) for j in np.unique(labels)]
    chosen = [rng.permutation(mine)[: round(share * len(mine))] for mine in members]
    return np.sort(np.concatenate(chosen))


class LyingDictionaryClient(DictionaryClient):
    """A client of PerMA that is malicious in every round; matching dictionaries keep unit atoms.

    Parameters
    ----------
    *args, **options
        As for `DictionaryClient`.
    attack : str
        One of ``MESSAGES``.
    """

    def __init__(self, *args: Any, attack: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.attack = attack

    def fit(
        self, parameters: list[Matrix], config: dict[str, Scalar]
    ) -> tuple[list[Matrix], int, dict[str, Scalar]]:
        """Return what is sent instead of the honest answer."""
        (honest,), n_samples, metrics = super().fit(parameters, config)
        attack = self.attack
        if config[STEP] == START and attack == NUDGE:  # refused: no unit atoms
            return [honest], n_samples, metrics
        if config[STEP] == START and attack.startswith("collude"):
            attack = "collude"
        return [lie(honest, attack)], n_samples, metrics


def regress(
    data: Mixed,
    settings: TwoPhase,
    n_rounds: int,
    *,
    attack: str | None = None,
    share: float = 0.3,
    seed: int = 0,
) -> Matrix:
    """Run FedMD and FedX among malicious clients, and return the models.

    Parameters
    ----------
    data : Mixed
        All clients' data and true clusters.
    settings : TwoPhase
        What is asked.
    n_rounds : int
        Exchanges in all.
    attack : str, optional
        One of ``MESSAGES`` or ``DATA``, or ``NUDGE``; by default all are honest.
    share : float, default 0.3
        Share of malicious clients in every cluster.
    seed : int, default 0
        The run's one seed.

    Returns
    -------
    ndarray of shape (k, d)
    """
    rng = np.random.default_rng(seed)
    who = liars(data.labels, share if attack else 0.0, rng)
    y = list(data.y)
    if attack in DATA:
        false = rng.standard_normal(data.theta.shape) / np.sqrt(data.theta.shape[1])
        for i in who:
            j = data.labels[i] if attack == "false model" else 0
            y[i] = y[i] + data.X[i] @ (false[j] - data.theta[data.labels[i]])
    clients = _Liars(data.X, y)
    clients.labels = {int(i): int(data.labels[i]) for i in who}
    clients.attack = attack if attack in (*MESSAGES, NUDGE) else None
    return simulate(clients, settings, n_rounds, seed=seed).state.centers


class _Liars(Clients):
    """Clients, some of them malicious."""

    #: The true clusters of those that lie, and what they do; None: their data are the lie.
    labels: dict[int, int]
    attack: str | None

    def answer(self, ask: Ask) -> Answers:
        """Return the answers, some of them malicious."""
        answers = super().answer(ask)
        if self.attack is None:
            return answers
        stack = answers.stack.copy()
        first = {"update": 2, "anchors": 1}.get(ask.step, 0)
        for i, label in self.labels.items():
            lied = lie(np.atleast_2d(stack[i, ..., first:]), self.attack, label)
            stack[i, ..., first:] = lied.reshape(stack[i, ..., first:].shape)
            if ask.step == "describe":  # the server rejects what is below zero
                stack[i] = np.abs(stack[i])
        return answers._replace(stack=stack)


def average_among_liars(
    liars: list[int],
    attack: str,
    clients: Callable[[int], Any],
    network: InMemoryNetwork,
    n_rounds: int,
    *,
    initial: list[Matrix],
    **options: Any,
) -> dict[int, list[Matrix]]:
    """Return every node's model of `diffusion_averaging`, with malicious nodes.

    Parameters
    ----------
    liars : list of int
        The malicious nodes.
    attack : str
        One of ``NEIGHBORS``; with ``"flip"`` their ``fit`` goes ten times as far, backward.
    clients, network, n_rounds, initial, **options
        As for `diffusion_averaging`.
    """

    def some_lie(node: int) -> Any:
        lies = attack == "flip" and node in liars
        return _Backward(clients(node)) if lies else clients(node)

    checked = AveragingOptions(**options).suited_to(network, n_rounds)
    hosts = Hosts(checked, some_lie, initial)
    nodes = [AveragingNode(checked, hosts.form, k) for k in range(network.plan.n_nodes)]
    states = [node.start(initial) for node in nodes]

    def message(liar: AveragingNode, state: NodeState) -> list[Matrix]:
        """Replace what a malicious node would send, knowing what the honest ones send."""
        honest = [node.message(states[node.node]) for node in nodes if node.node not in liars]
        own = AveragingNode.message(liar, state)
        pairs = zip(own, zip(*honest, strict=True), strict=True)
        return [NEIGHBORS[attack](array, np.stack(others)) for array, others in pairs]

    for k in liars:
        vars(nodes[k])["message"] = partial(message, nodes[k])
    return run_nodes(nodes, states, hosts.trainer, network.plan, n_rounds)[1]


def among_liars(
    config: decentralized.Config, seed: int, robust: bool | str, attack: str | None
) -> float:
    """Return the worst honest node's accuracy with two malicious nodes in the exponential graph.

    Without an ``attack`` it is the worst of the same nodes, and all are honest.
    """
    nodes, network = (
        decentralized.Nodes(config, seed),
        InMemoryNetwork(Topology.exponential(config.clients)),
    )
    liars = [config.clients // 5, config.clients // 2 + 1]
    options: dict[str, Any] = {"robust": robust, "n_liars": len(liars), "evaluate_every": 0}
    options |= {"method": config.method, "initial": nodes.initial}
    if attack is None:
        models = diffusion_averaging(nodes, network, config.rounds, **options).models
    else:
        models = average_among_liars(liars, attack, nodes, network, config.rounds, **options)
    return min(nodes.accuracy(models[k]) for k in models if k not in liars)


class _Backward:
    """A client whose ``fit`` goes the wrong way."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def fit(self, parameters: list[Matrix], config: Any) -> tuple[list[Matrix], int, Any]:
        """Return the model minus ten times the honest change."""
        fitted, *rest = self.client.fit([w.copy() for w in parameters], config)
        return [w - 10 * (new - w) for w, new in zip(parameters, fitted, strict=True)], *rest

    def evaluate(self, parameters: list[Matrix], config: Any) -> Any:
        """Return what the client does."""
        return self.client.evaluate(parameters, config)
