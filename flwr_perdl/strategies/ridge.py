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
from typing import Any, ClassVar, Unpack

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp import Grid

from flwr_perdl.clients.ridge import (
    ALL,
    CLASSES,
    CLUSTER,
    COEFFICIENTS,
    COLUMNS,
    ERRORS,
    FEATURES,
    FOLDS,
    GROUPS,
    LEVEL,
    LEVELS,
    LOCAL,
    MOMENTS,
    N_FOLDS,
    PERSONAL,
    RANDOM,
    RANDOM_ARRAY,
    RANDOMS,
    RIDGE,
    SHARED,
    SOLVE,
    SPREAD,
    SUMS,
    RidgeClient,
)
from flwr_perdl.core.checks import (
    LARGE,
    MOST_CLUSTERS,
    Matrix,
    brief_repr,
    check_array,
    check_choice,
    check_count,
    check_list,
    check_real,
    is_auto,
)
from flwr_perdl.protocol.options import ServerOptions, check_support
from flwr_perdl.protocol.records import (
    Limits,
    Replies,
    Reply,
    Scalar,
    check_shapes,
    read_reply,
    to_record,
)
from flwr_perdl.protocol.request import (
    Kept,
    Lost,
    Protocol,
    Request,
    Sent,
    State,
    accept,
    read_replies,
)
from flwr_perdl.protocol.roster import LocalGrid
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.regression.mixed_model import fit_mixed_model
from flwr_perdl.regression.ridge import (
    EQUAL,
    MODEL_ARRAYS,
    PENALTIES,
    SIMPLER,
    RandomFeatures,
    RidgeModel,
    check_sums,
    choose_groups,
    choose_ridge,
    joined_moments,
    solve_ridge,
    standardize,
    sums_size,
)
from flwr_perdl.strategies._own_models import EndsWithModels, Learned, Own
from flwr_perdl.strategies.diagnosis import middle

AUTO, _BOTH = "auto", "groups-personal"
#: Levels at which each client has a part of its own.
_HAVE_OWN = (PERSONAL, _BOTH, LOCAL)
#: The most features whose variances are told apart.
_MOST_COLUMNS = 100
_ONLY = RidgeClient.only
#: Names in a checkpoint: the columns' means and deviations, how many scales were tried, and of the
#: best its penalty, its error, the clients' sums and who they are; the groups' models and members,
#: and the models learned without each fold.
_MEANS, _DEVIATIONS, _TRIED, _SCALE = "means", "deviations", "tried", "scale"
_PENALTY, _ERROR = "penalty", "error"
_SUMS, _CLIENTS, _MODELS, _GROUPS = "sums", "clients", "models", "groups"
_WITHOUT = ("without/shared", "without/groups")


@dataclass(frozen=True, eq=False, repr=False)
class RidgeLearned(Learned):
    """What `FederatedRidge` has learned.

    Attributes
    ----------
    shared : ArrayRecord
        The shared model; a list of those of the groups.
    own : Own
        Where the clients' own models are: see `model_of`.
    models : list of ArrayRecord
        The groups' models; one if there are no groups.
    groups : dict of int to int
        Each client's group, by partition; empty if there are none.
    level : str
        What each client's model is: "shared", "groups", "personal", "groups-personal" or "local".
    errors : dict of int to dict
        With "auto": each client's squared error per held-out sample, by level.

    Examples
    --------
    >>> from flwr.app import ArrayRecord
    >>> from flwr_perdl.strategies import RidgeLearned
    >>> RidgeLearned(ArrayRecord(), level="personal").level
    'personal'
    """

    models: list[ArrayRecord] = field(default_factory=list)
    groups: dict[int, int] = field(default_factory=dict)
    level: str = SHARED
    errors: dict[int, dict[str, float]] = field(default_factory=dict)


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
    penalty : float or sequence of float, default (0.1, 0.3, 1, 3, 10)
        Of the shared model; of several the best on held-out folds is taken.
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
    >>> [*strategy.result.groups.values()]
    [0, 1, 0, 1, 0, 1, 0, 1]
    """

    protocol_name = after_protocol = RIDGE
    labels = (CLUSTER,)
    unsupported: ClassVar[Mapping[str, str]] = {
        "secure": "sums of single clients are read",
        "privacy": "sums of single clients are read",
        "robust": "the sums of all clients count",
        "reuse_last_reply": "sums are asked for once",
        "private": "a client's own part is its deviation, which stays there",
    }
    _default_rounds = None

    def __init__(
        self,
        level: str = AUTO,
        *,
        classes: int | None = None,
        outputs: int = 1,
        features: int = 600,
        scale: float | Sequence[float] = 2.0,
        penalty: float | Sequence[float] = PENALTIES,
        random: str = ALL,
        n_clusters: int | str = AUTO,
        max_clusters: int = 6,
        columns: tuple[Matrix, Matrix] | None = None,
        **options: Unpack[ServerOptions],
    ) -> None:
        super().__init__(**options)
        self.level = check_choice("level", level, (AUTO, SHARED, GROUPS, PERSONAL, _BOTH))
        self.classes = None if classes is None else check_count("classes", classes, 2, 10_000)
        self.outputs = check_count("outputs", outputs, 1, 10_000)
        self.features = check_count("features", features, 0, 100_000)
        self.scale = _several("scale", scale)
        self.penalty = sorted(_several("penalty", penalty))
        self.random = check_choice("random", random, RANDOMS)
        self.n_clusters: int | str = n_clusters
        if not is_auto("n_clusters", n_clusters):
            self.n_clusters = check_count("n_clusters", n_clusters, 1, MOST_CLUSTERS)
        self.max_clusters = check_count("max_clusters", max_clusters, 1, MOST_CLUSTERS)
        self.columns = None if columns is None else _check_columns(columns)
        check_support(self, locals())
        if random == COLUMNS and level != PERSONAL:
            raise ValueError(
                'level must be "personal" with random="columns", whose variances are of deviations '
                f"from one model, got {level!r}."
            )
        self._told = {FEATURES: self.features, CLASSES: self.classes or 0}

    @property
    def result(self) -> RidgeLearned:
        """The shared model, or the groups', and where each client's own is."""
        if not (model := self._running().record.model):
            raise RuntimeError("the run must have got as far as a model.")
        models = [self._record(w) for w in model[3]]
        shared: Any = models[0] if len(models) == 1 else models
        found = self._members, self._final_level, self._errors
        return RidgeLearned(shared, self.own, models, *found)

    def _least_rounds(self) -> int:
        """Return how many exchanges a run takes."""
        after = {SHARED: 0, GROUPS: 0, AUTO: 2}.get(self.level, 1)
        return (self.columns is None) + len(self.scale) + after

    def protocol(self, initial: list[Matrix], state: State | None) -> Protocol:
        """Ask for moments and sums, solve, and have clients solve their own parts."""
        if initial:
            raise ValueError(f"initial_arrays must be left out, got {len(initial)} arrays.")
        known: dict[str, Any] = {**(state or {})}
        if not known:
            columns = self.columns
            if columns is None:
                replies = yield Request(MOMENTS, check=_check_moments, max_weight=None)
                replies = replies.keep_majority(
                    lambda reply: reply.arrays[0].shape[1], "{} columns".format
                )
                columns = standardize(np.sum([r.arrays[0] for r in replies.values()], axis=0))
            known = {_MEANS: columns[0], _DEVIATIONS: columns[1], _TRIED: np.array(0)}
        given = [known[_MEANS], known[_DEVIATIONS]]
        p, q = 1 + len(given[0]) + self.features, self._q
        check = partial(_check_reply, p, q, self._n_folds, self.classes is not None)
        while (tried := int(known[_TRIED])) < len(self.scale):
            scale = np.array([self.scale[tried]])
            replies = yield Request(
                SUMS,
                [*given, scale],
                {FOLDS: self._n_folds},
                known,
                check if self._single else accept,
                model=(),
                max_values=self._n_folds * sums_size(p, q),
                max_weight=None,
                secure=None if self._single else Total(check),
            )
            known = self._best_of(known, scale, replies, p)
        if self._groups and _MODELS not in known:
            known = {**known, **self._grouped(known, p)}
        elif self.random == COLUMNS and SPREAD[0] not in known:
            known = {**known, **self._mixed(known, p)}
        given = [*given, known[_SCALE]]
        errors = self._errors
        if self.level == AUTO and not errors:
            replies = yield Request(
                ERRORS,
                [*given, *(known[name] for name in _WITHOUT)],
                {RANDOM: self.random},
                known,
                partial(check_shapes, []),
                model=(),
                max_values=0,
                max_weight=None,
            )
            errors = _measured({client: reply.metrics for client, reply in replies.items()})
        level = self._level_by(errors)
        models = known[_MODELS] if level in (GROUPS, _BOTH) else known[COEFFICIENTS][None]
        final = [*given, models, *(known[name] for name in SPREAD if name in known)]
        self._running().record.kept |= {n: known[n] for n in (_CLIENTS, _GROUPS) if n in known}
        if level in _HAVE_OWN:
            yield Request(
                SOLVE,
                final,
                {LEVEL: level, RANDOM: self.random},
                known,
                partial(check_shapes, []),
                model=(),
                max_values=0,
                max_weight=None,
            )
        return final

    def _best_of(
        self, known: Mapping[str, Any], scale: Matrix, replies: Replies, p: int
    ) -> dict[str, Any]:
        """Return the state with the shared model of a scale, if it is the best so far."""
        sums = np.stack([reply.arrays[0] for reply in replies.values()])
        if not self._single:
            sums = sums[:1]  # every reply holds the total
        found = choose_ridge(sums.sum(axis=0), p, self._q, self.penalty)
        state = {**known, _TRIED: known[_TRIED] + 1}
        if _ERROR not in known or found.error < (1 - EQUAL) * known[_ERROR]:
            own = {_SUMS: sums, _CLIENTS: np.array(list(replies))} if self._single else {}
            best = (scale, found.coefficients, found.penalty, found.error)
            state |= dict(zip((_SCALE, COEFFICIENTS, _PENALTY, _ERROR), best, strict=True)) | own
        return state

    def _grouped(self, known: Mapping[str, Any], p: int) -> dict[str, Any]:
        """Return the groups' models and members, and for "auto" the models without each fold."""
        sums, penalty, k = known[_SUMS].swapaxes(0, 1), float(known[_PENALTY]), self.n_clusters
        numbers = range(1, 1 + min(self.max_clusters, sums.shape[1]))
        found = choose_groups(
            sums,
            p,
            self._q,
            [k] if isinstance(k, int) else numbers,
            penalty,
            rng=spawn(self._options.seed, SERVER, 1),
        )
        total = sums.sum(axis=(0, 1))
        shared = [solve_ridge(total - own.sum(axis=0), p, self._q, penalty) for own in sums]
        without = np.stack(shared), np.stack([groups.models for groups in found.without])
        both = {_MODELS: found.groups.models, _GROUPS: found.groups.members}
        return {**both, **dict(zip(_WITHOUT, without, strict=True))}

    def _mixed(self, known: Mapping[str, Any], p: int) -> dict[str, Any]:
        """Return the shared model, and variances, of a mixed model of each output."""
        if p > _MOST_COLUMNS:
            raise ValueError(
                f'random must not be "columns" with more than {_MOST_COLUMNS} columns, features '
                f"and constant included, got {p}."
            )
        statistics = [joined_moments(own, p, self._q) for own in known[_SUMS].sum(axis=1)]
        outputs = np.stack(statistics).swapaxes(0, 1)
        mixed = [fit_mixed_model(own, correlated=False) for own in outputs]
        common = np.column_stack([one.common for one in mixed])
        variances = np.stack([np.diag(one.between) for one in mixed])
        noise = np.array([one.noise for one in mixed])
        return {COEFFICIENTS: common, SPREAD[0]: variances, SPREAD[1]: noise}

    @property
    def _single(self) -> bool:
        """Whether the sums of single clients are read; else their total is enough."""
        return self._groups or self.random == COLUMNS

    @property
    def _groups(self) -> bool:
        """Whether groups are looked for."""
        return self.level in (AUTO, GROUPS, _BOTH)

    @property
    def _q(self) -> int:
        """The number of outputs."""
        return self.classes or self.outputs

    @property
    def _n_folds(self) -> int:
        """Into how many folds clients part their samples: one where nothing is chosen by them."""
        return N_FOLDS if len(self.penalty) > 1 or len(self.scale) > 1 or self._groups else 1

    @property
    def _evaluates(self) -> bool:
        """Whether clients evaluate: those that have solved their part have measured it."""
        return all(report.step != SOLVE for report in self.history)

    @property
    def _errors(self) -> dict[int, dict[str, float]]:
        """What clients have measured of each level, by partition."""
        said = (report.metrics for report in self.history if report.step == ERRORS)
        return _measured(next(said, {}))

    @property
    def _final_level(self) -> str:
        """What a client's model is."""
        return self._level_by(self._errors)

    def _level_by(self, errors: Mapping[int, Mapping[str, float]]) -> str:
        """Return the simplest level that is as good as the best, if one is to be chosen."""
        if self.level != AUTO:
            return self.level
        if not errors:
            return SHARED
        table = np.array([[own[level] for own in errors.values()] for level in LEVELS])
        # As in `Diagnosis`: means of differences, without clients that decide alone.
        means = middle(table[0])[0] - middle(table[0] - table)[0]
        return LEVELS[int(np.argmax(means <= SIMPLER * means.min()))]

    @property
    def _members(self) -> dict[int, int]:
        """Each client's group: as the server found it, or as a client that came later said."""
        said = {
            client: int(own[CLUSTER])
            for report in self.history
            for client, own in report.metrics.items()
            if CLUSTER in own
        }
        kept = self._running().record.kept
        if self._final_level not in (GROUPS, _BOTH) or _GROUPS not in kept:
            return said
        return {**said, **dict(zip(kept[_CLIENTS].tolist(), kept[_GROUPS].tolist(), strict=True))}

    def _record(self, coefficients: Matrix) -> ArrayRecord:
        """Return what a client of `adapt`, or `RidgeModel.of`, reads of coefficients."""
        means, deviations, scale, _, *spread = self._running().record.model
        features = RandomFeatures.draw(
            means,
            deviations,
            self.features,
            scale=float(scale[0]),
            seed=self._options.seed,
        )
        arrays = RidgeModel(features, coefficients, self.classes or 0).to_arrays()
        arrays |= {RANDOM_ARRAY: np.array(RANDOMS.index(self.random))}
        arrays |= dict(zip(SPREAD, spread, strict=False))
        return to_record([*arrays.values()], [*arrays])

    @property
    def own(self) -> Own:
        """Where the clients' own models are."""
        own = super().own
        has_own = self._run is not None and self._final_level in _HAVE_OWN
        return own if has_own else replace(own, apart=())

    def _array_names(self) -> list[str]:
        return [*MODEL_ARRAYS, RANDOM_ARRAY]

    def _model_for(self, client: int) -> dict[str, Array] | None:
        """Return the shared model, or that of a client's group."""
        models = self._running().record.model[3:4]
        group = self._members.get(client, 0)
        return dict(self._record(models[0][group])) if models else None


@dataclass(frozen=True)
class Total:
    """The clients' sums, added up as they come: no single one is kept.

    Parameters
    ----------
    check : callable
        Raises a ValueError that says what is wrong with a reply.
    """

    check: Callable[[Reply], None]
    ended = ""

    def begin(self, kept: Kept, rounds: int | None, min_clients: int, save: Any) -> Total:
        """Return the channel of a run."""
        return self

    def config(self, n_clients: int) -> dict[str, Scalar]:
        """Return what the clients are told besides."""
        return {}

    def gather(
        self, grid: Grid, sent: Sent, round_: int, *, limits: Limits, timeout: float | None
    ) -> tuple[dict[int, Reply], dict[int, Lost]]:
        """Return the total in place of each reply, and who is not in it."""
        total: Any = 0.0
        good: dict[int, Reply] = {}
        lost: dict[int, Lost] = {}
        # In this process clients are asked one after the other: their sums need not wait together.
        for part in [[one] for one in sent] if isinstance(grid, LocalGrid) else [sent]:
            replies = grid.send_and_receive([message for _, message in part], timeout=timeout)
            found, wrong = read_replies(part, replies, partial(self._read, limits))
            lost |= wrong
            for partition in sorted(found):
                reply = found.pop(partition)
                total = total + reply.arrays[0]
                good[partition] = reply._replace(arrays=[])
        return {partition: own._replace(arrays=[total]) for partition, own in good.items()}, lost

    def _read(self, limits: Limits, message: Message) -> Reply:
        """Return a client's sums."""
        reply = read_reply(message.content, limits)
        self.check(reply)
        return reply


def _measured(metrics: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Return the errors by level of the clients that have measured them."""
    return {
        client: {level: own[level] for level in LEVELS}
        for client, own in metrics.items()
        if {*LEVELS} <= own.keys()
    }


def _check_moments(reply: Reply) -> None:
    """Accept counts, sums and sums of squares of columns."""
    shapes = [array.shape for array in reply.arrays]
    if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][0] != 3 or not shapes[0][1]:
        raise ValueError(f"wrong shapes: [(3, columns)] is asked for, got {shapes}: {_ONLY}")
    counts, sums, squares = reply.arrays[0]
    # Cauchy and Schwarz, with room for rounding.
    if (counts < 0).any() or (counts > reply.num_examples).any() or (squares < 0).any():
        raise ValueError("the moments must be of at most as many samples as the client has")
    if (sums**2 > (1 + 1e-9) * counts * squares).any():
        raise ValueError("the moments must be of samples: a mean is beyond its mean square")


def _check_reply(p: int, q: int, n_folds: int, classes: bool, reply: Reply) -> None:
    """Accept sums of as many samples as the client has."""
    check_shapes([(n_folds, sums_size(p, q))], reply)
    check_sums(reply.arrays[0], p, q, reply.num_examples, classes=classes)


def _several(name: str, value: float | Sequence[float]) -> list[float]:
    """Return one number above 0, or several."""
    values = list(check_list(name, value)) if np.ndim(value) else [value]
    if not values:
        raise ValueError(f"{name} must have at least one number, got none.")
    return [check_real(name, one, 0, LARGE, open_low=True) for one in values]


def _check_columns(columns: object) -> tuple[Matrix, Matrix]:
    """Return the means and deviations of columns."""
    pair: Any = check_list("columns", columns)
    if len(pair) != 2:
        raise ValueError(f"columns must be (means, deviations), got {brief_repr(columns)}.")
    means = check_array("columns", pair[0], ndim=1, min_rows=1)
    deviations = check_array("columns", pair[1], ndim=1, columns=len(means))
    if not (deviations > 0).all():
        raise ValueError(f"columns must have deviations above 0, got {deviations.min():g}.")
    return means, deviations
