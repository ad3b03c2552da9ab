"""FederatedRidge: what is linear in fixed features is learned in one exchange of sums.

`flwr_perdl.regression.ridge` has the maths. What each party receives:

- *The server*: in exchange one each client's counts, sums and sums of squares of its columns; in
  exchange two the products of its features and responses, summed over its samples in three folds;
  for "auto" its squared errors by level; metrics on held-out samples; numbers of samples. With
  "shared" and "personal" it adds the clients' sums up and keeps the total; with `secure` it sees
  nothing else. The sums of fewer samples than features determine these samples up to a rotation.
- *A client*: the columns' pooled means and deviations; the shared model, or those of all groups;
  for "auto" also those learned without each fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import sqrt
from typing import Any, ClassVar, Unpack

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.clients import ridge as wire
from flwr_perdl.clients.neighbor_relay import SHOW
from flwr_perdl.clients.ridge import GROUPS, LEVELS, LOCAL, PERSONAL, SHARED, VARIANCES
from flwr_perdl.core import checks
from flwr_perdl.core.aggregate import OUTLIER, aggregate
from flwr_perdl.core.checks import LARGE, MOST_CLUSTERS, Matrix
from flwr_perdl.network.schedule import LinkPlan, Schedule
from flwr_perdl.network.topology import Topology, weights_of
from flwr_perdl.parts import given
from flwr_perdl.privacy.noise import Noise
from flwr_perdl.protocol import records
from flwr_perdl.protocol.options import JUDGED, NO_MODEL, Needs, ServerOptions, check_support
from flwr_perdl.protocol.records import CLUSTER, Kept, Limits, Replies, Reply, Scalar
from flwr_perdl.protocol.report import MEMBERS, History, Models
from flwr_perdl.protocol.request import (
    Lost,
    Protocol,
    Request,
    Sent,
    State,
    Summed,
    accept,
    read_replies,
)
from flwr_perdl.protocol.roster import LocalGrid
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.regression import ridge as maths
from flwr_perdl.regression.mixed_model import fit_mixed_model
from flwr_perdl.regression.ridge import PENALTIES, SIMPLER, RandomFeatures, RidgeModel
from flwr_perdl.strategies._own_models import EndsWithModels, Learned
from flwr_perdl.strategies.diagnosis import Diagnosed, interval, middle
from flwr_perdl.strategies.neighbor_relay import NeighborRelay

AUTO, BOTH = "auto", "groups-personal"
#: Levels at which each client has a part of its own; options with which the server, or nobody, sees
#: single clients' sums.
_HAVE_OWN, _SUMMED = (PERSONAL, BOTH, LOCAL), ("secure", "privacy")
_TOTAL = (*_SUMMED, "topology")
#: The most features whose variances are told apart; rows of a client that count in a secure sum
#: where their number is not known; and the share of a privacy budget that moments take: in the
#: square of the noise's inverse, which is a quarter of epsilon.
_MOST_COLUMNS, _MOST_ROWS, _SHARES = 100, 10_000, (1, 15)
#: Draws of clients by which a level is chosen again.
_DRAWS = 1000
#: By how much nodes' means of normal numbers differ, and how many rounds that takes, at most.
_AGREED, _MOST_ROUNDS = 1e-14, 10_000
#: What is known of the features, and of single clients.
_COLUMNS, _SINGLE = ("means", "deviations", "scale"), ("sums", "clients")
#: Accepts a reply that has metrics alone.
_NO_ARRAYS: Callable[[Reply], None] = partial(records.check_shapes, [])


class FederatedRidge(EndsWithModels):
    """Learn in one exchange: a shared ridge regression, groups, and each client's own part.

    Clients send sums over their samples; models that are linear in fixed features follow in closed
    form. With random Fourier features they are nonlinear in the columns. There is no learning rate
    and no number of rounds; penalties are chosen on held-out folds.

    Parameters
    ----------
    level : {"auto", "shared", "groups", "personal", "groups-personal"}, default "auto"
        What a client's model is: the shared one; its group's; the shared one and its own deviation;
        its group's and its own deviation. "auto" has each client measure levels on held-out folds,
        and takes the simplest whose mean error is within 1 % of the least; that may be "local".
    classes : int, optional
        Number of classes; by default a regression.
    outputs : int, default 1
        Number of columns of a regression's responses.
    features : int, default 600
        Random Fourier features beside the standardized columns and the constant; 0: linear.
    scale : float or sequence of float, default 2.0
        Number of columns times the variance of the features' directions. Of several the best is
        taken; each takes an exchange.
    penalty : float or sequence of float, optional
        Of the shared model; of several the best on held-out folds is taken. By default of 0.1, 0.3,
        1, 3 and 10; with ``privacy`` it follows from the noise.
    random : {"all", "intercept", "columns"}, default "all"
        Which coefficients deviate at a client: all, with one variance that each client chooses by
        leave-one-out; the constant alone; or all, with a variance for each column (at most 100
        with the features) by the likelihood of a mixed model.
    n_clusters : int or "auto", default "auto"
        Number of groups; "auto" takes the fewest whose held-out error is within 1 % of the least.
    max_clusters : int, default 6
        Most groups that are tried.
    columns : tuple of ndarray, optional
        ``(means, deviations)`` of the columns, by which they are standardized. By default the
        pooled ones, which takes an exchange.
    bounds : ndarray of shape (d, 2), or with a regression's q outputs (d + q, 2), optional
        Between which values columns, and responses, are cut; needed with ``secure`` or ``privacy``.
    topology : Topology or Schedule, optional
        Without a server, which only relays: nodes average the sums with their neighbors until all
        have the total but for rounding, and solve their models themselves (levels "shared" and
        "personal"). Node k is the client with ``partition-id`` k.
    sealed : bool, default False
        With a ``topology``, whether messages are encrypted end to end, as in `NeighborRelay`.
    robust : bool, default False
        Whether clients whose sums per sample are inconsistent with the others' are left out.
    secure : bool or mapping, default False
        Secure sums: the server sees the clients' totals only. A mapping has options of SecAgg+.
    privacy : Noise, optional
        Differential privacy of samples (``level="record"``): the sums get noise (moments a
        sixteenth of the budget); a sample's features are scaled down to norm 1.5. Nothing else
        leaves a client: there are no metrics.
    **options
        See `ServerOptions`.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule, or does not go with the others.

    Notes
    -----
    Exchanges: moments of columns, sums; with an own part the model down, and metrics back; for
    "auto" the errors before that. Communication up: ``3 (p (p + 1) / 2 + (p + 1) q)`` values of a
    client, p features (``1 + columns + features``) and q outputs.

    The result's ``models`` and `model_of` are read by `flwr_perdl.regression.RidgeModel.of`. A
    client that was not there for the sums solves its part from the model; a new one by
    `flwr_perdl.clients.adapt`.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import RidgeClient, client_app
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import FederatedRidge
    >>> X = np.random.default_rng(0).standard_normal((8, 60, 2))
    >>> def make_client(context):
    ...     i = context.node_config["partition-id"]
    ...     return RidgeClient(X[i], X[i] @ [[2.0, -1.0], [0.0, 3.0]][i % 2], context)
    >>> strategy = FederatedRidge("groups", features=0)
    >>> result = strategy.start(InProcessGrid(client_app(make_client), 8))
    >>> [*strategy.result.members.values()]
    [0, 1, 0, 1, 0, 1, 0, 1]
    """

    protocol_name = after_protocol = wire.RIDGE
    labels = (CLUSTER,)
    _not_in_words = NeighborRelay._not_in_words
    _last_step = wire.SOLVE
    unsupported: ClassVar[Mapping[str, str]] = {
        "reuse_last_reply": "sums are asked for once",
        "private": "a client's own part is its deviation, which stays there",
        "parts": NO_MODEL,
    }
    needs = (
        Needs(_TOTAL, "level", (SHARED, PERSONAL), "others read single clients' sums"),
        Needs((*_TOTAL, "robust"), "random", wire.RANDOMS[:2], "variances need single sums"),
        Needs(_SUMMED, "robust", (False,), JUDGED),
        Needs(("topology",), "columns", (None,), "nodes average those, too"),
        *(Needs((name,), "topology", (None,), "no server sums") for name in (*_SUMMED, "robust")),
        Needs(("robust",), "level", (SHARED, PERSONAL), "groups have too few clients to judge by"),
    )
    _default_rounds = None
    _called_as: ClassVar = {"network": "network"}
    privacy: Noise | None

    def __init__(
        self,
        level: str = AUTO,
        *,
        classes: int | None = None,
        outputs: int = 1,
        features: int = 600,
        scale: float | Sequence[float] = 2.0,
        penalty: float | Sequence[float] | None = None,
        random: str = "all",
        n_clusters: int | str = AUTO,
        max_clusters: int = 6,
        columns: tuple[Matrix, Matrix] | None = None,
        bounds: Matrix | None = None,
        topology: Topology | Schedule | None = None,
        sealed: bool = False,
        robust: bool = False,
        secure: bool | Mapping[str, float] = False,
        privacy: Noise | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        kinds = (Topology, Schedule, type(None))
        checks.check_kind("topology", topology, kinds, "a Topology or None")
        if topology is not None:
            options = ServerOptions(num_clients=topology.n_nodes) | options
        super().__init__(*given(privacy=privacy, secure=secure), **options)
        self.level = checks.check_choice("level", level, (AUTO, SHARED, GROUPS, PERSONAL, BOTH))
        most = wire.MOST_CLASSES
        self.classes = None if classes is None else checks.check_count("classes", classes, 2, most)
        self.outputs = checks.check_count("outputs", outputs, 1, 10_000)
        self.features = checks.check_count("features", features, 0, wire.MOST_FEATURES)
        self.scale = _several("scale", scale)
        self.penalty = None if penalty is None else sorted(_several("penalty", penalty))
        self.random = checks.check_choice("random", random, wire.RANDOMS)
        self.n_clusters: int | str = n_clusters
        if not checks.is_auto("n_clusters", n_clusters):
            self.n_clusters = checks.check_count("n_clusters", n_clusters, 1, MOST_CLUSTERS)
        self.max_clusters = checks.check_count("max_clusters", max_clusters, 1, MOST_CLUSTERS)
        self.columns = None if columns is None else _numbers("columns", columns, rows=2)
        if self.columns is not None and not (self.columns[1] > 0).all():
            raise ValueError("columns must have deviations above 0, got others.")
        self.bounds = None if bounds is None else _numbers("bounds", bounds, columns=2)
        if self.bounds is not None and not (self.bounds[:, 0] < self.bounds[:, 1]).all():
            raise ValueError("bounds must have a lower one and a higher one, got others.")
        self.sealed = checks.check_flag("sealed", sealed)
        self.robust = checks.check_flag("robust", robust)
        self.secure, self.privacy = secure, privacy
        self._only_sums = privacy is not None or secure is not False
        if (bounds is None) == self._only_sums:
            raise ValueError("bounds must be given with secure or privacy, and only then.")
        if privacy is not None and privacy.level != "record":
            raise ValueError(f'privacy must be of level="record", got {privacy.level!r}.')
        if len(self.scale) > 1 and (privacy is not None or topology is not None):
            raise ValueError(f"scale must be one number with privacy or topology, got {scale}.")
        check_support(self, self._options_with(topology=topology, columns=columns))
        if sealed and topology is None:
            raise ValueError("topology must be given with sealed, got None.")
        if random == wire.RANDOMS[2] and level != PERSONAL:
            raise ValueError(f'level must be "personal" with random="columns", got {level!r}.')
        # Whether groups are looked for, and single clients' sums are read, not their total alone.
        self._finds_groups = level in (AUTO, GROUPS, BOTH)
        self._single = self._finds_groups or random == wire.RANDOMS[2] or self.robust
        # The number of outputs, and of columns where bounds say it; what divides bounded responses.
        self._q = q = self.classes or self.outputs
        self._n_columns, self._heights = 0, list[Matrix]()
        if self.bounds is not None:
            self._n_columns = len(self.bounds) - (0 if self.classes else q)
            if not self.classes:
                self._heights = [sqrt(q) * np.abs(self.bounds[-q:]).max(axis=1)]
        # One fold where nothing is chosen by folds.
        given_one = len(self.penalty) == 1 if self.penalty else privacy is not None
        given_one &= len(self.scale) == 1 and not self._finds_groups
        self._n_folds = 1 if given_one else wire.N_FOLDS
        names = (*maths.MODEL_ARRAYS, wire.RANDOM_ARRAY)
        self._reads = Models(names=names, stack=3, form=self._model_arrays)
        after = {SHARED: 0, GROUPS: 0, AUTO: 2}.get(level, 1)
        self._least_rounds = (columns is None) + len(self.scale) + after
        self._relay: NeighborRelay | None = None
        if topology is not None:
            weights = weights_of(topology) if isinstance(topology, Topology) else None
            plan = LinkPlan.make(topology, weights)
            self._n_nodes = plan.n_nodes
            self._switch = _rounds_to_agree(plan, 1)
            rounds = self._switch + _rounds_to_agree(plan, 1 + self._switch)
            self._relay = NeighborRelay(topology, rounds, weights=weights, sealed=sealed)
            self._least_rounds, self._last_step = self._relay.exchanges, SHOW
        self._told = {wire.FEATURES: self.features, wire.CLASSES: self.classes or 0}

    @property
    def network(self) -> str | None:
        """What the network is without a server."""
        return None if self._relay is None else self._relay.network

    @property
    def chosen_level(self) -> str:
        """What a client's model is: ``level``, or what "auto" has chosen."""
        kept = {} if self._run is None else self._run.record.kept
        return LEVELS[int(kept.get("level", 0))] if self.level == AUTO else self.level

    @property
    def errors(self) -> dict[int, dict[str, float]]:
        """With "auto" each client's squared error per held-out sample, by level."""
        found = [report.metrics for report in self.history if report.step == wire.ERRORS]
        return _measured(*found) if found else {}

    @property
    def diagnosis(self) -> Diagnosed:
        """What "auto" has measured, as of a `Diagnosis` whose candidates are the levels."""
        if not (errors := self.errors):
            raise RuntimeError(f'start must be called first with level="auto", got {self.level!r}.')
        table, n = _table(errors), len(errors)
        gains, taken = table[0] - table, LEVELS.index(self.chosen_level)
        order = np.argsort(-middle(gains)[0], kind="stable").tolist()
        over = next(i for i in order if i != taken)
        drawn = spawn(self._options.seed, SERVER, 3).integers(n, size=(_DRAWS, n))
        typed = [*(f'FederatedRidge("{level}")' for level in LEVELS[:-1]), "local training"]
        lead = interval(gains[taken] - gains[over], len(LEVELS))
        return Diagnosed(
            LEVELS[taken],
            f"{typed[taken]}: squared error lower by {lead[0]:.3g} than with {typed[over]}.",
            f"strategy = {typed[taken]}",
            float(np.mean(_best_level(table[:, drawn]) == taken)),
            dict(zip(LEVELS, table, strict=True)),
            dict(zip(LEVELS, gains, strict=True)),
            [*errors],
            self.result.members,
            dict(zip(LEVELS, typed, strict=True)),
            dict.fromkeys(LEVELS, 1),
            {},
            LEVELS[over],
            lead,
            metric="squared error",
        )

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Ask for moments and sums, solve, and have clients solve their own parts."""
        if initial:
            raise ValueError(f"initial_arrays must be left out, got {len(initial)} arrays.")
        if self._relay is not None:
            yield from self._relay._deliver({}, state, self._consensus)
            return []
        known: dict[str, Any] = {**(state or {})}
        if not known and self.columns is None:
            d, bounds = self._n_columns, [] if self.bounds is None else [self.bounds]
            replies = yield self._request(
                wire.MOMENTS, [own[:d] for own in bounds], None, _check_moments, shape=(3, d)
            )
            known = self._standardized(replies)
        elif not known and self.columns is not None:
            known = dict(zip(("means", "deviations"), self.columns, strict=True))
            known |= {"most": np.array(_MOST_ROWS), "tried": np.array(0)}
        p, mixed = 1 + len(known["means"]) + self.features, self.random == wire.RANDOMS[2]
        if mixed and p > _MOST_COLUMNS:
            raise ValueError(
                f'random must not be "columns" with more than {_MOST_COLUMNS} columns, features '
                f"and constant included, got {p}."
            )
        shape = self._n_folds, maths.sums_size(p, self._q)
        check = partial(_check_sums, p, self._q, self._n_folds, self.classes is not None)
        while (tried := int(known["tried"])) < len(self.scale):
            given = known["means"], known["deviations"], np.array([self.scale[tried]])
            replies = yield self._request(
                wire.SUMS, [*given, *self._heights], known, check, shape=shape
            )
            known = self._best_of(known, replies, p)
        if not {"models", VARIANCES[0]} & known.keys():
            known = {**known, **self._refined(known, p)}
        if self.level == AUTO and "level" not in known:
            asked = [known[name] for name in (*_COLUMNS, "shared-without", "groups-without")]
            replies = yield self._request(wire.ERRORS, asked, known)
            errors = _measured({client: reply.metrics for client, reply in replies.items()})
            known = {**known, "level": np.array(_best_level(_table(errors)))}
        kept = self._running().record.kept
        kept |= {name: known[name] for name in ("level", *_SINGLE) if name in known}
        found, members = self._solved(known)
        kept |= members
        if self.chosen_level in _HAVE_OWN:
            yield self._request(wire.SOLVE, found, known, level=self.chosen_level)
        return found

    def _consensus(self, start: Mapping[str, Matrix]) -> dict[str, Scalar]:
        """Return what nodes are told that average sums."""
        told: dict[str, Scalar] = {wire.RANDOM: self.random, wire.FOLDS: self._n_folds}
        told |= {wire.LEVEL: self.level, wire.SCALE: self.scale[0], wire.SWITCH: self._switch}
        told[wire.TRIED] = " ".join(map(repr, self.penalty or PENALTIES))
        return {**told, wire.NODES: self._n_nodes}

    def without(self, clients: Sequence[int]) -> Learned:
        """Return what the others' sums give, without some clients: no message is sent.

        Columns stay standardized as they were; the level, and ``scale``, stay. Clients' own parts
        belong to the model that they were solved from: `flwr_perdl.clients.adapt` solves new ones.

        Parameters
        ----------
        clients : sequence of int
            Their partitions.

        Returns
        -------
        Learned

        Raises
        ------
        ValueError
            If the server has not read the sums of single clients (``level`` "shared" or "personal",
            but for ``random="columns"``), or of these, or would be left without any.
        """
        record, result = self._running().record, self.result
        kept, left = record.kept, {*checks.check_list("clients", clients)}
        if "sums" not in kept:
            raise ValueError(
                "level must be one for which the server reads the sums of single clients, got "
                f"{self.level!r}."
            )
        if not left or not left < {*kept["clients"].tolist()}:
            raise ValueError(f"clients must be some that sent sums, not all, got {clients!r}.")
        stay, p = ~np.isin(kept["clients"], [*left]), 1 + len(record.model[0]) + self.features
        known = dict(zip(_COLUMNS, record.model, strict=False))
        known |= {name: kept[name][stay] for name in _SINGLE}
        total = known["sums"].sum(axis=0)
        ridge = maths.choose_ridge(total, p, self._q, self.penalty or PENALTIES)
        known |= {wire.COEFFICIENTS: ridge.coefficients, "penalty": np.array(ridge.penalty)}
        found, members = self._solved({**known, **self._refined(known, p)})
        record = replace(record, model=found, kept=members, history=History())
        models = [*map(self._named, self._reads.split(record))]
        names = {client: name for client, name in result.names.items() if client not in left}
        return replace(
            result,
            shared=models[0] if len(models) == 1 else models,
            members=self._reads.members(record, len(models), names),
            metrics={},
            names=names,
            token="",
            apart=(),
            contexts={},
        )

    def _refined(self, known: Mapping[str, Any], p: int) -> dict[str, Any]:
        """Return what single clients' sums give besides the shared model."""
        if self._finds_groups:
            return self._grouped(known, p)
        return self._mixed(known, p) if self.random == wire.RANDOMS[2] else {}

    def _solved(self, known: Mapping[str, Any]) -> tuple[list[Matrix], dict[str, Matrix]]:
        """Return the run's model, and, of groups, who has which."""
        groups = self.chosen_level in (GROUPS, BOTH)
        models = known["models"] if groups else known[wire.COEFFICIENTS][None]
        found = [*(known[name] for name in _COLUMNS), models]
        found += [known[name] for name in VARIANCES if name in known]
        return found, {MEMBERS: known[MEMBERS]} if groups else {}

    def _request(
        self,
        step: str,
        arrays: Sequence[Matrix],
        known: State | None,
        check: Callable[[Reply], None] = _NO_ARRAYS,
        *,
        shape: tuple[int, int] = (0, 0),
        level: str = "",
    ) -> Request:
        """Return a request to which sums of this shape are replied, or nothing but metrics."""
        sums, moments, channel, summed = step == wire.SUMS, step == wire.MOMENTS, None, None
        if self._only_sums and not (sums or moments):
            channel = Total(accept, {records.SILENT: True})
        elif self._only_sums:
            given, d = self.columns is not None, self._n_columns
            entries = maths.sums_size(1 + d + self.features, self._q) + (0 if given else 3 * d)
            budget = (1, 1) if given else (_SHARES[sums], sum(_SHARES))
            summed = Summed(
                [np.zeros(shape)],
                norm=sqrt(3 * d) if moments else maths.MOST_NORM,
                max_weight=_MOST_ROWS if known is None else int(known["most"]),
                by_sample=True,
                budget=(*budget, entries),
            )
        elif sums and not self._single:
            channel = Total(check)
        return Request(
            step,
            arrays,
            {wire.RANDOM: self.random, wire.FOLDS: self._n_folds, wire.LEVEL: level},
            known,
            accept if summed is not None or channel is not None else check,
            model=(),
            max_values=None if moments else shape[0] * shape[1],
            max_weight=10.0 if sums and self.robust else None,
            summed=summed,
            secure=channel,
        )

    def _total(self, replies: Replies, length: float, most: int) -> Matrix:
        """Return the clients' total where each reply holds that, or a mean."""
        found = next(iter(replies.values())).arrays[0]
        if self.privacy is not None:  # a client's sums of samples of this length, in units of clip
            return found * (len(replies) * length / self.privacy.clip)
        if self._only_sums:
            return found * float(np.minimum(replies.sizes, most).sum())
        return found

    def _standardized(self, replies: Replies) -> dict[str, Any]:
        """Return the state with what columns are standardized by."""
        if self.bounds is None:
            replies = replies.keep_majority(lambda r: r.arrays[0].shape[1], "{} columns".format)
            moments = np.sum([reply.arrays[0] for reply in replies.values()], axis=0)
            means, deviations = maths.standardize(moments)
        else:
            moments = self._total(replies, sqrt(3 * self._n_columns), _MOST_ROWS)
            middles, halves = maths.of_bounds(self.bounds[: self._n_columns])
            means, deviations = (halves * own for own in maths.standardize(moments))
            means = means + middles
        most = np.array(max(replies.sizes))
        return {"means": means, "deviations": deviations, "most": most, "tried": np.array(0)}

    def _best_of(self, known: Mapping[str, Any], replies: Replies, p: int) -> dict[str, Any]:
        """Return the state with the shared model of a scale, if it is the best so far."""
        q, penalties, own = self._q, self.penalty or PENALTIES, dict[str, Any]()
        if self._single:
            sums = np.stack([reply.arrays[0] for reply in replies.values()])
            total = sums.sum(axis=0)
            own = {"sums": sums, "clients": np.array(list(replies))}
            if self.robust:
                each = sums.reshape(len(sums), -1) / replies.sizes[:, None]
                judged = aggregate("filtered", each, replies.sizes)
                total, own = judged.weight * judged.value.reshape(total.shape), {}
                replies.note(OUTLIER, dict(zip(replies, judged.outlyingness, strict=True)))
        else:
            total = self._total(replies, maths.ROW_LENGTH, int(known["most"]))
        if self.privacy is not None:
            noise = next(iter(replies.values())).metrics["sigma"] / self.privacy.clip
            total = maths.denoised_sums(total[0], p, q)[None]
            penalties = self.penalty or [sqrt(p / 2) * noise * maths.ROW_LENGTH]
        ridge = maths.choose_ridge(total, p, q, penalties)
        state, scale = {**known, "tried": known["tried"] + 1}, self.scale[int(known["tried"])]
        if "error" not in known or ridge.error < (1 - maths.EQUAL) * known["error"]:
            w = ridge.coefficients * next(iter(self._heights), 1.0)
            state |= {wire.COEFFICIENTS: w, "scale": np.array([scale]), **own}
            state |= {"penalty": np.array(ridge.penalty), "error": np.array(ridge.error)}
        return state

    def _grouped(self, known: Mapping[str, Any], p: int) -> dict[str, Any]:
        """Return the groups' models and members, and for "auto" the models without each fold."""
        folds, q, k = known["sums"].swapaxes(0, 1), self._q, self.n_clusters
        penalty, rng = float(known["penalty"]), spawn(self._options.seed, SERVER, 1)
        numbers = range(1, 1 + min(self.max_clusters, folds.shape[1]))
        tried = [k] if isinstance(k, int) else numbers
        groups, without = maths.choose_groups(folds, p, q, tried, penalty, rng=rng)
        rest = folds.sum(axis=(0, 1)) - folds.sum(axis=1)
        return {
            "models": groups.models,
            "members": np.column_stack([known["clients"], groups.members]),
            "shared-without": np.stack([maths.solve_ridge(one, p, q, penalty) for one in rest]),
            "groups-without": np.stack([own.models for own in without]),
        }

    def _mixed(self, known: Mapping[str, Any], p: int) -> dict[str, Any]:
        """Return the shared model, and variances, of a mixed model of each output."""
        moments = [maths.join_moments(own, p, self._q) for own in known["sums"].sum(axis=1)]
        mixed = [fit_mixed_model(own, correlated=False) for own in np.stack(moments, axis=1)]
        return {
            wire.COEFFICIENTS: np.column_stack([one.common for one in mixed]),
            VARIANCES[0]: np.stack([np.diag(one.between) for one in mixed]),
            VARIANCES[1]: np.array([one.noise for one in mixed]),
        }

    def _model_arrays(self, model: Sequence[Matrix]) -> dict[str, Matrix]:
        """Return what a client of `adapt`, or `RidgeModel.of`, reads of a model."""
        means, deviations, (scale,), coefficients, *spread = model
        how: Any = {"scale": float(scale), "seed": self._options.seed}
        features = RandomFeatures.draw(means, deviations, self.features, **how)
        arrays = RidgeModel(features, coefficients, self.classes or 0).to_arrays()
        arrays[wire.RANDOM_ARRAY] = np.array(wire.RANDOMS.index(self.random))
        return arrays | dict(zip(VARIANCES, spread, strict=False))


@dataclass(frozen=True)
class Total:
    """The clients' sums, added up as they come: no single one is kept.

    Parameters
    ----------
    check : callable
        Raises a ValueError that says what is wrong with a reply.
    told : mapping of str to scalar
        What clients are told besides.
    """

    check: Callable[[Reply], None]
    told: Mapping[str, Scalar] = field(default_factory=dict)
    ended = ""

    def begin(self, kept: Kept, rounds: int | None, min_clients: int, save: Any) -> Total:
        """Return the channel of a run."""
        return self

    def config(self, n_clients: int) -> Mapping[str, Scalar]:
        """Return what the clients are told besides."""
        return self.told

    def gather(
        self, grid: Grid, sent: Sent, round_: int, *, limits: Limits, timeout: float | None
    ) -> tuple[dict[int, Reply], dict[int, Lost]]:
        """Return the total in place of each reply, and who is not in it."""
        total: list[Matrix] = []
        good: dict[int, Reply] = {}
        lost: dict[int, Lost] = {}

        def add(part: Sent) -> None:
            replies = grid.send_and_receive([message for _, message in part], timeout=timeout)
            found, wrong = read_replies(part, replies, partial(self._read, limits))
            lost.update(wrong)
            for partition, reply in sorted(found.items()):
                for array in reply.arrays:
                    total[:] = [np.add(total[0], array, out=total[0]) if total else array.copy()]
                good[partition] = reply._replace(arrays=total)

        # In this process clients are asked one after the other: their sums need not wait together.
        for part in [[one] for one in sent] if isinstance(grid, LocalGrid) else [sent]:
            add(part)
        return good, lost

    def _read(self, limits: Limits, message: Message) -> Reply:
        """Return a client's sums."""
        reply = records.read_reply(message.content, limits)
        self.check(reply)
        return reply


def _rounds_to_agree(plan: LinkPlan, first: int) -> int:
    """Return how many rounds of push-sum, from one on, give all nodes the mean but for rounding."""
    n, schedule = plan.n_nodes, plan.schedule
    never = schedule.repeats and not schedule.topology.is_connected
    sums = np.stack([spawn(0, SERVER).standard_normal(n), np.ones(n)], axis=1)  # any would do
    for round_ in range(first, first + (0 if never else _MOST_ROUNDS)):
        to, sender, _, weights = plan.links(round_)
        matrix = sparse.csr_array((weights, (to, sender)), shape=(n, n))
        kept = plan.totals(round_) - matrix.sum(axis=1)
        sums = matrix @ sums + kept[:, None] * sums
        if np.ptp(sums[:, 0] / sums[:, 1]) < _AGREED:
            return round_ - first + 1
    raise ValueError(
        f"topology must have links by which sums reach all nodes within {_MOST_ROUNDS} rounds, got "
        f"{schedule!r}."
    )


def _measured(metrics: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the errors by level of the clients that have measured them."""
    each = ((client, own) for client, own in metrics.items() if {*LEVELS} <= own.keys())
    return {client: {level: own[level] for level in LEVELS} for client, own in each}


def _table(errors: Mapping[int, Mapping[str, float]]) -> Matrix:
    """Return the errors by level and client."""
    return np.array([[own[level] for own in errors.values()] for level in LEVELS])


def _best_level(table: Matrix) -> NDArray[np.intp]:
    """Return the number of the simplest level that is as good as the best."""
    if not table.shape[-1]:
        return np.array(LEVELS.index(SHARED))
    # As in `Diagnosis`: means of differences, without clients that decide alone.
    means = middle(table[0])[0] - middle(table[0] - table)[0]
    best: NDArray[np.intp] = np.argmax(means <= SIMPLER * means.min(axis=0), axis=0)
    return best


def _check_moments(reply: Reply) -> None:
    """Accept counts, sums and sums of squares of columns."""
    shapes = [array.shape for array in reply.arrays]
    if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][0] != 3 or not shapes[0][1]:
        only = wire.RidgeClient.only
        raise ValueError(f"wrong shapes: [(3, columns)] is asked for, got {shapes}: {only}")
    counts, sums, squares = reply.arrays[0]
    # Cauchy and Schwarz, with room for rounding.
    possible = (counts >= 0) & (counts <= reply.num_examples) & (squares >= 0)
    if not (possible & (sums**2 <= (1 + 1e-9) * counts * squares)).all():
        raise ValueError("the moments must be of as many samples as the client has at most")


def _check_sums(p: int, q: int, n_folds: int, classes: bool, reply: Reply) -> None:
    """Accept sums of as many samples as the client has."""
    records.check_shapes([(n_folds, maths.sums_size(p, q))], reply)
    maths.check_sums(reply.arrays[0], p, q, reply.num_examples, classes=classes)


def _numbers(name: str, values: object, **rules: Any) -> Matrix:
    """Return numbers as a matrix of floats."""
    return checks.check_array(name, checks.check_numbers(name, values) + 0.0, min_rows=1, **rules)


def _several(name: str, value: float | Sequence[float]) -> list[float]:
    """Return one number above 0, or several."""
    values = list(checks.check_list(name, value)) if np.ndim(value) else [value]
    if not values:
        raise ValueError(f"{name} must have at least one number, got none.")
    return [checks.check_real(name, one, 0, LARGE, open_low=True) for one in values]
