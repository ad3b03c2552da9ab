"""ClusteredFedAvg: k groups of clients, a model of any kind for each (FedX, Phase 2).

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022, whose
second phase works for any model: IFCA (Ghosh et al., "An Efficient Framework for Clustered
Federated Learning", NeurIPS 2020) is the same from a random start.

======================================= ====================================================
paper (FedX, Phase 2)                   here
======================================= ====================================================
``theta_{t-1}`` (k models)              the models
``z_{i,t}`` (equation 8)                the client's choice, by the loss that its ``evaluate``
                                        returns
local update (line 7)                   the client's own ``fit``
``theta_t = sum_i w_i theta_{i.,t}``    the mean of the cluster's models, by numbers of samples,
                                        or `flwr_perdl.core.aggregate`'s robust rules
======================================= ====================================================

Deviations: the client's loss is that of ``evaluate``, mostly on held-out data, which overfits less
than the paper's training loss; assignments are hard, since with soft ones (equation 7) every client
would train and send every model. IFCA averages a cluster's models without weights.

What each party receives:

- *The server*: in every round, per client: the number of its cluster, the loss of that model and
  whether all models have this loss (where there was a choice), the model after the client's
  training, the number of samples, and the metrics of the client's ``fit``. For "one-shot" and
  "anchors", once: the initial model after the client's local training. With ``k="auto"``, once: the
  losses of up to 2 ``max_clusters`` - 1 models. Never a sample; what a trained model reveals of the
  samples is not hidden (see the mods of ``client_app``).
- *A client*: the models of all clusters (between choices that of its own), and the options. The
  model of a cluster with one member is what that member sent. With "anchors" the first models are
  those of k single clients, as they sent them. With ``k="auto"``, once: the models of up to
  2 ``max_clusters`` - 1 groups, some of which may have one member.
- *Evaluations*: the metrics of the client's own ``evaluate``, and its cluster.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import WARNING
from typing import ClassVar, Unpack

import numpy as np

from flwr_perdl.clients.clustered import (
    ALL_ALIKE,
    ALONE,
    CHOOSE,
    CLUSTERED,
    MEASURE,
    MOST_FITS,
    N_FITS,
)
from flwr_perdl.core.aggregate import OUTLIER, keep_supported
from flwr_perdl.core.checks import LARGE, Matrix, check_choice, check_count, check_real, is_auto
from flwr_perdl.core.models import cleared, fixed_entries, is_plain, settled
from flwr_perdl.network.compression import TopK
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import OLD, SECURE, ServerOptions
from flwr_perdl.protocol.part import split
from flwr_perdl.protocol.records import (
    CLUSTER,
    Replies,
    Scalar,
    check_shapes,
    for_evaluations,
    scalars,
)
from flwr_perdl.protocol.report import Models
from flwr_perdl.protocol.request import Combine, Protocol, Request, State
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.strategies import _starts
from flwr_perdl.strategies._models import (
    MEMORY,
    Adam,
    ModelStrategy,
    Momentum,
    check_initial,
    pack_model,
    unpack_model,
)

STARTS = ("given", "random", "one-shot", "anchors")
_AUTO = "auto"
#: In reports: that a client chose a cluster that few choose.
FEW = "in a small cluster"
#: Names in a checkpoint: the number of models, who chose what when, the round, clients' groups.
_CLUSTERS, _CHOSEN, _ROUND, _GROUPS = "clusters", "chosen", "round", "groups"


class ClusteredFedAvg(ModelStrategy):
    """Learn k models for k groups of clients, without knowing which client is in which group.

    In every round each client receives the k models, picks the one with the lowest ``evaluate``
    loss, trains it with its own ``fit``, and returns it with its choice; the server averages per
    cluster (IFCA). Clients need these two methods and `client_app`. With ``k=1`` this is FedAvg.

    Parameters
    ----------
    k : int or "auto"
        Number of models. "auto" (with ``start="one-shot"``): the smallest number of clusters, from
        ``min_clusters`` to ``max_clusters``, whose models are within two standard errors of the
        best by the clients' ``evaluate``. See Notes.
    start : {"one-shot", "anchors", "random", "given"}, default "one-shot"
        Where the k models come from. "one-shot": every client trains the initial model locally; the
        server clusters the directions of their changes and averages each cluster. "anchors": as
        before, but takes the models of k clients that are far apart. "random": k perturbations of
        the initial model, each array by its own standard deviation, as in IFCA; often loses
        clusters. "given": the initial arrays are k stacked models: each array has a first axis of
        length k.
    start_rounds : int, default 1
        How often a client calls its ``fit`` in that local training, all in one message.
    choose_every : int, default 1
        Rounds between two choices. In between, a client receives and trains the model of its
        cluster only; one that missed the last choice makes it when it is back.
    proximal_mu : float, optional
        Sent in the config as ``"proximal-mu"``, as Flower's FedProx does, and under its older name
        ``"proximal_mu"``; the client's ``fit`` adds the term.
    optimizer : Momentum, Adam or Yogi, optional
        Server optimizer, applied to each cluster's mean change. By default plain averaging. A
        cluster that nobody trained in a round keeps its model and the optimizer's memory.
    robust : bool or str, default False
        Aggregation rule against malicious (Byzantine) clients: True is "filtered", False "mean";
        for other rules see `flwr_perdl.core.aggregate`. With any but "mean", the start ignores
        changes ten times as long as the median and groups of clients that are too small, no single
        client decides ``k="auto"``, and clusters that few clients choose are reported.
    min_clusters : int, default 1
        Smallest number of clusters with ``k="auto"``.
    max_clusters : int, default 8
        Largest number of clusters with ``k="auto"``.
    private, share : str or sequence of str, default ()
        Private or shared arrays, as in `PersonalizedFedAvg`: clusters whose members each have, say,
        their own head.
    transport : "float16", optional
        Send floats in half precision, both ways (`flwr_perdl.parts.transport`). By default every
        array keeps its dtype.
    compression : TopK, optional
        Clients send only the largest entries of their changes and carry the rest over to later
        rounds. Not with ``robust``.
    fine_tune : int, default 0
        After the last round each client fine-tunes its model for up to this many trainings, and
        keeps the best by its ``evaluate``.
    metric : str, default "loss"
        The metric of ``evaluate`` by which clients choose among models; "loss" also matches
        "eval_loss".
    higher_is_better : bool, optional
        Whether a larger ``metric`` is better; by default inferred from its name.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError
        If an option breaks its rule or has no effect with the others; if there are fewer clients
        than clusters.

    Notes
    -----
    Result: ``strategy.result`` (`Learned`); ``strategy.start(...).arrays`` is the model of the
    largest cluster. ``evaluate_fn`` is called once per cluster, with its number as third argument
    if it takes one; of several clusters the metrics get a suffix: ``"accuracy/cluster-0"``.

    Clients count by their number of samples, at most ten times the round's median
    (`Request.max_weight`).

    Communication per client and round: k models down, one up; between choices one down. "one-shot"
    and "anchors" take one more round (one model down, one up), ``k="auto"`` another (up to
    2 ``max_clusters`` - 1 models down).

    ``k="auto"`` separates groups only by ``evaluate``. If that measures the training loss, more
    clusters always look better. With few samples per client, groups that differ by less than two
    standard errors are merged. With too little local training, clusters don't match the groups.

    Every array keeps its dtype (docs/from-fedavg.md).

    With more than one model every client must define ``evaluate`` and return a finite loss.

    Examples
    --------
    >>> from flwr_perdl.strategies import ClusteredFedAvg
    >>> strategy = ClusteredFedAvg(4, start="one-shot", num_clients=40)
    >>> strategy = ClusteredFedAvg("auto", max_clusters=6, choose_every=5)
    """

    unsupported: ClassVar = {
        "secure": SECURE,
        "reuse_last_reply": OLD,
        "privacy": "which cluster a client chooses depends on its data: use PersonalizedFedAvg",
    }
    _called_as: ClassVar = {"start_from": "start"}
    labels = (CLUSTER,)
    _reads = Models(numbered=True, first=(ALONE, MEASURE))
    protocol_name = CLUSTERED

    def __init__(
        self,
        k: int | str,
        *,
        start: str = "one-shot",
        start_rounds: int = 1,
        choose_every: int = 1,
        proximal_mu: float | None = None,
        optimizer: Momentum | Adam | None = None,
        robust: str | bool = False,
        transport: str | None = None,
        compression: TopK | None = None,
        fine_tune: int = 0,
        metric: str = "loss",
        higher_is_better: bool | None = None,
        min_clusters: int = 1,
        max_clusters: int = 8,
        private: str | Sequence[str] = (),
        share: str | Sequence[str] = (),
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(
            optimizer=optimizer,
            robust=robust,
            transport=transport,
            compression=compression,
            fine_tune=fine_tune,
            metric=metric,
            higher_is_better=higher_is_better,
            private=private,
            share=share,
            **options,
        )
        self.k = k if is_auto("k", k) else check_count("k", k, 1)
        self._chooses |= k != 1
        self._reads = replace(self._reads, drops_empty=k == _AUTO)
        self.start_from = check_choice("start", start, STARTS)
        self._n_stacked = int(k) if start == "given" and k != _AUTO else 0
        if k == _AUTO and start != "one-shot":
            raise ValueError(f'k must be a number unless start="one-shot", got "auto", {start!r}.')
        self.start_rounds = check_count("start_rounds", start_rounds, 1, MOST_FITS)
        self.choose_every = check_count("choose_every", choose_every, 1)
        mu = None if proximal_mu is None else check_real("proximal_mu", proximal_mu, 0, LARGE)
        self.proximal_mu = mu
        self.max_clusters = check_count("max_clusters", max_clusters, 2)
        self.min_clusters = check_count("min_clusters", min_clusters, 1, self.max_clusters)
        alone = start in ("one-shot", "anchors")
        most = self.options.num_clients
        if alone and isinstance(self.k, int) and most is not None and self.k > most:
            raise ValueError(
                f"k must be at most num_clients={most} where the clients' own models are the "
                f"start, got {self.k}."
            )
        for name, value, default, used in (
            ("start_rounds", start_rounds, 1, alone),
            ("min_clusters", min_clusters, 1, k == _AUTO),
            ("max_clusters", max_clusters, 8, k == _AUTO),
        ):
            if value != default and not used:
                raise ValueError(
                    f"{name} must be left out where it does nothing, got {value} with k={k!r} and "
                    f"start={start!r}."
                )

    # The protocol ---------------------------------------------------------------------------

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Find k models to start from; then choose, train and average, round by round."""
        if state is None:
            state = yield from self._start(
                check_initial(initial, [*self.model_names] * (self._n_stacked or 1))
            )
        if _GROUPS in state:
            state = yield from self._measure(state)
        while True:
            state = yield from self._round(state)

    def _start(self, model: list[Matrix]) -> Generator[Request, Replies, State]:
        """Return the state to begin with: models given or drawn, or the clients' own, grouped."""
        if self.start_from == "given":
            return _state(split(model, len(self.model_names)))
        if self.k == 1:
            return _state([model])
        if self.start_from == "random":
            return _state(self._perturb(model, int(self.k)))
        if self.k == _AUTO and self._num_rounds == 1:
            log(
                WARNING,
                'k="auto" takes two rounds to find its models: one round leaves a single one.',
            )
        replies = yield Request(
            ALONE,
            model,
            {**self._config(), N_FITS: self.start_rounds},
            expect=model,
        )
        return self._group(model, replies)

    def _perturb(self, model: list[Matrix], k: int) -> list[list[Matrix]]:
        """Return random models around one; what is averaged plainly is the same in all."""
        names = zip(self.model_names, model, strict=True)
        moved = [i for i, (name, array) in enumerate(names) if not is_plain(name, array)]
        fixed = [fixed_entries(model[i]) for i in moved]
        own = [cleared(model[i], entries) for i, entries in zip(moved, fixed, strict=True)]
        models = [list(model) for _ in range(k)]
        drawn = _starts.perturb(own, k, spawn(self.options.seed, SERVER, 0))
        for i, stack, entries in zip(moved, drawn, fixed, strict=True):
            for one, array in zip(models, stack, strict=True):
                one[i] = settled(array, model[i], entries)
        return models

    def _measure(self, state: State) -> Generator[Request, Replies, State]:
        """Have the clients measure the groups' mean models, and keep as few as are needed."""
        models = _models(state)
        replies = yield Request(
            MEASURE,
            _flat(models),
            self._config(),
            state,
            partial(check_shapes, [(len(models),)]),
            numbers=lambda _: range(len(models)),
            model=models[0],  # the mean of all
            max_values=len(models),
        )
        groups_of = {int(row[0]): row[1:] for row in state[_GROUPS]}
        losses = [r.arrays[0][groups_of[p]] for p, r in replies.items() if p in groups_of]
        if not losses:
            raise ValueError(
                "fraction_train must include clients of the local training, which measure the "
                "groups, got other clients only."
            )
        robust = self.robust != "mean"
        tried = state[_GROUPS][:, 1:].T
        least = min(self.min_clusters, len(tried))
        numbers: Sequence[int] = range(least - 1, len(tried))
        if robust and least > 1:  # a single client makes no group, see below
            n_groups = [
                int(np.sum(np.unique(tried[j], return_counts=True)[1] > 1)) for j in numbers
            ]
            numbers = [j for j, n in zip(numbers, n_groups, strict=True) if n >= least] or numbers
        k = numbers[_starts.smallest_as_good(np.stack(losses)[:, numbers], robust) - 1]
        groups, sizes = np.unique(tried[k], return_counts=True)
        if robust and sizes.max() > 1:
            groups = groups[sizes > 1]
        return _state([models[j] for j in groups])

    def _round(self, state: State) -> Generator[Request, Replies, State]:
        """Lines 5-8: clients choose in every `choose_every`th round, as in IFCA, and train."""
        models, round_ = _models(state), int(state[_ROUND])
        k, choice = len(models), round_ - round_ % self.choose_every
        # An absent client keeps the cluster that it chose last, until the next choice.
        chosen = {int(p): (int(j), int(at)) for p, j, at in state[_CHOSEN]}
        everything = _flat(models)
        known = {p: j for p, (j, at) in chosen.items() if choice <= at < round_}
        own = (lambda p: models[known[p]] if p in known else everything) if known else None
        # Line 8: the driver calls it, for `replies.combined` below.
        combine = Combine(start=models, rule=self.robust, group=CLUSTER)
        replies = yield Request(  # line 5; clients: lines 6-7
            CHOOSE,
            everything,
            self._config(),
            state,
            per_client=own,
            numbers=lambda p: [known[p]] if p in known else range(k),
            combine=combine,
        )
        chosen |= {p: (int(reply.metrics[CLUSTER]), round_) for p, reply in replies.items()}
        if self.robust != "mean" and choice == round_:
            self._report_few(k, replies, first=not round_)
        if not round_ and all(ALL_ALIKE in reply.metrics for reply in replies.values()):
            log(
                WARNING,
                "Every client has the same loss for all of the %d models, so none can find its "
                "cluster: evaluate must return the loss of the model that it receives.",
                k,
            )
        trained, memory = {chosen[p][0] for p in replies}, unpack_model(state, MEMORY)
        size = len(memory) // k
        steps = [
            self.take_step(old, new, memory[j * size : (j + 1) * size], idle=j not in trained)
            for j, (old, new) in enumerate(zip(models, replies.combined, strict=True))
        ]
        moved, kept = zip(*steps, strict=True)
        return _state(moved, round_ + 1, chosen, _flat(kept))

    def _report_few(self, k: int, replies: Replies, *, first: bool) -> None:
        """Report clusters that less than half as many clients choose as one has on average."""
        for j in range(k):
            own = [p for p, reply in replies.items() if reply.metrics[CLUSTER] == j]
            if 2 * k * len(own) < len(replies):
                replies.note(FEW, dict.fromkeys(own, 1.0))
                if first:
                    names = ", ".join(map(self._running().roster.label, own)) or "none"
                    log(
                        WARNING,
                        "Cluster %d is chosen by %d of %d clients (%s): a small group, or "
                        "malicious clients.",
                        *(j, len(own), len(replies), names),
                    )

    def _config(self) -> dict[str, Scalar]:
        """Return what every request says."""
        config: dict[str, Scalar] = {}
        if self.proximal_mu is not None:
            config |= {"proximal-mu": self.proximal_mu, "proximal_mu": self.proximal_mu}
        if self._evaluate_config is not None:
            config |= for_evaluations(scalars(self._evaluate_config))
        return config

    def _group(self, model: list[Matrix], replies: Replies) -> State:
        """Return the models that follow from the clients' local training."""
        combine = Combine(start=model, rule=self.robust)
        changes = combine.changes(replies)
        most = min(self.max_clusters, len(replies)) if self.k == _AUTO else int(self.k)
        if most > len(replies):
            raise ValueError(
                f"k must be at most the number of clients that replied, got {most} with "
                f"{len(replies)}."
            )
        partitions = np.array(list(replies))
        robust = self.robust != "mean"
        if robust:
            n = 1 if self.k == _AUTO else most
            kept = keep_supported(changes)
            kept = kept[_starts.find_supported_groups(changes[kept], n)]
            kept = kept if len(kept) >= n else np.arange(len(changes))
            alone = np.delete(partitions, kept).tolist()
            replies.note(OUTLIER, dict.fromkeys(alone, 1.0))
            changes, partitions = changes[kept], partitions[kept]
        most = min(most, len(changes))
        if self.start_from == "anchors":
            anchors = partitions[_starts.choose_anchors(changes, most, robust)].tolist()
            return _state([replies[p].arrays for p in anchors])
        groups = _starts.nested_groups(changes, most)
        wanted = np.arange(len(groups.members)) if self.k == _AUTO else np.unique(groups.of[-1])
        # Of a group of several kinds a robust average is that of the largest, and measurements
        # could not tell that it has several.
        if robust and self.k == _AUTO:
            combine = replace(combine, rule="clip")
        members = [partitions[groups.members[j]].tolist() for j in wanted]
        models = [combine(replies.sharing({p: replies[p] for p in m})) for m in members]
        if self.k != _AUTO:
            return _state(models)
        table = np.column_stack([partitions, groups.of.T])
        return {**_state(models), _GROUPS: table}


# States -------------------------------------------------------------------------------------


def _state(
    models: Sequence[Sequence[Matrix]],
    round_: int = 0,
    chosen: Mapping[int, tuple[int, int]] | None = None,
    memory: Sequence[Matrix] = (),
) -> State:
    """Return the state: models, round, who chose which cluster when, and an optimizer's memory."""
    rows = [(partition, *what) for partition, what in sorted((chosen or {}).items())]
    return {
        **pack_model(_flat(models), memory),
        _CLUSTERS: np.array(len(models)),
        _ROUND: np.array(round_),
        _CHOSEN: np.array(rows, dtype=np.int64).reshape(-1, 3),
    }


def _models(state: State) -> list[list[Matrix]]:
    """Return the clusters' models in a state."""
    flat = unpack_model(state)
    size = len(flat) // int(state[_CLUSTERS])
    return [flat[at : at + size] for at in range(0, len(flat), size)]


def _flat(models: Iterable[Sequence[Matrix]]) -> list[Matrix]:
    """Return the arrays of all models, one model after the other."""
    return [array for model in models for array in model]
