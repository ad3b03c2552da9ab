"""The two phases as a conversation: what the server asks, and what it makes of the answers.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
Phase 1, lines 6-16                     steps "moment" and "anchors" of `TwoPhase.advance`
Phase 2, lines 4-8                      step "update" of `TwoPhase.advance`
``T``, ``T_1``                          ``n_iterations``, ``n_products``
``n_H``, ``Delta``                      ``n_anchors``, ``separation``
``eta``, ``s``                          ``step_size``, ``n_steps``
======================================= ====================================================

One `State` holds all that the server knows. ``settings.ask(state)`` is the next request, the same
for every client, and ``settings.advance(state, answers, rng)`` what follows from the answers; a
client's answer is :func:`flwr_perdl.regression.answer`. Who carries the messages is no business of
this module: a Strategy, or :class:`flwr_perdl.regression.Clients`, which answers for all clients
at once.

`TwoPhase()` deviates from the paper where it was measured to be better; ``TwoPhase.paper(...)``
does not:

- a first exchange (``"describe"``) finds the dimension and the step size, of which all local steps
  together come to ``work`` over the largest eigenvalue of ``X' X / n`` (of any client but those
  that hold the last tenth of the points, mostly clients of very few);
- Phase 1 starts from zero, so that all anchors share one subspace and nobody's estimate is
  broadcast, and takes one least-squares step at every client with enough points; where no merge of
  their estimates stands out, it begins with too many models rather than too few;
- Phase 2 divides by the cluster's points and has Nesterov's momentum with gradient restart;
- whenever the models have settled, and every ``check_every`` rounds, models without clients are
  dropped, models closer than four standard errors merge, and if more than 2 % of the clients fit
  none, Phase 1 is run on those to find what they need. Five times the models' last movement, and
  rounding, count as noise here: without noise, residuals show only how far the models still have
  to go. This is for the squared loss, and takes the features to be alike in scale.

What each party learns: see ``answers.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from flwr_perdl._checks import (
    LARGE,
    Matrix,
    all_finite,
    check_array,
    check_choice,
    check_count,
    check_real,
    own_numbers,
)
from flwr_perdl._robust import CAP, capped
from flwr_perdl.regression.anchors import cluster_anchors, kmeans
from flwr_perdl.regression.answers import (
    ANCHORS,
    DESCRIBE,
    MOMENT,
    UPDATE,
    Answers,
    Ask,
    misfit_bound,
)
from flwr_perdl.regression.clustering import LOCALS, ROBUST, average_updates, factors_of
from flwr_perdl.regression.moments import (
    ESTIMATES,
    STEPS,
    left_subspace,
    orthonormal,
    sketch,
    symmetric_subspace,
)

#: Columns of a sketch beyond twice the number of models.
_OVERSAMPLING = 4
#: An anchor has at least this many points per dimension of the subspace.
_POINTS_PER_DIMENSION = 4
#: Clients whose curvature is above this many times the median do not count for the step size.
_STEEP = 10
#: Share of the points whose clients decide about the step size.
_TYPICAL = 0.9
#: Relative movement in a round below which the models have settled.
_SETTLED = 0.01
#: How many times its last movement a model that has settled may be away from where it ends.
_AHEAD = 5.0
#: Share of clients that fit no model above which models are added.
_MISFITS = 0.02
#: Models closer than this many standard errors are one.
_SAME = 4.0
#: Rounds before an early check.
_LEAST_WAIT = 5
#: Where fewer clients than this have enough points, anchors have fewer points.
_ANCHORS_PER_DIMENSION = 3
#: Movement of a model, relative to its length, from which on it tells how clients follow it.
_TELLING = 1e-4
#: Most anchors: the distances of all pairs are looked at.
_MOST_ANCHORS = 1000


class State(NamedTuple):
    """All that the server knows; the fields that a step does not need are empty."""

    #: The step to take next.
    step: str
    #: Models, (k, d), and those of the round before.
    centers: Matrix
    previous: Matrix
    #: Rounds since the restart of each model's momentum, and its cluster's points, (k,): of the
    #: clients that answered, and of the absent ones as they last did since the last check.
    tempo: Matrix
    counts: Matrix
    #: Who answered since the last check, and its points in every cluster, (m, 1 + k).
    heard: Matrix
    #: Phase 1: estimates (h, d), columns or subspaces (h, d, width), the anchors' partitions, and
    #: who of them has answered so far.
    thetas: Matrix
    columns: Matrix
    anchors: NDArray[np.intp]
    moved: NDArray[np.bool_]
    #: Phase 1: products and iterations done, fewest points of an anchor.
    products: int
    iteration: int
    min_points: int
    #: Step size, mean square of the features, noise variance.
    step_size: float
    power: float
    variance: float
    #: Rounds since the last check of the models, and checks left that need not wait.
    since: int
    patience: int
    #: "filtered": whose last updates these are (m,), of which cluster and change (m, d + 1), at
    #: which models (k, d), and how they have changed with the models so far (m,).
    who: NDArray[np.intp]
    said: Matrix
    asked: Matrix
    slopes: Matrix
    #: Whose answers to the last exchange stood out: partition and share, (m, 2).
    odd: Matrix
    #: Clients too steep for the step size, which Phase 2 leaves out.
    steep: NDArray[np.intp]

    def pack(self) -> dict[str, NDArray[Any]]:
        """Return the state as named arrays, such as a checkpoint holds."""
        return {name: np.asarray(value) for name, value in self._asdict().items()}

    @classmethod
    def unpack(cls, arrays: Mapping[str, NDArray[Any]]) -> State:
        """Return the state that was packed."""
        values: dict[str, Any] = {name: arrays[name] for name in cls._fields}
        return cls(**{name: v if v.ndim else v.item() for name, v in values.items()})


@dataclass(frozen=True)
class TwoPhase:
    """FedMD and FedX + clustering, and how they are done.

    Parameters
    ----------
    n_clusters : int or "auto", default "auto"
        Number of models k.
    max_clusters : int, default 8
        Most models, with "auto".
    estimate : {"u-statistic", "halves", "pair"}, default "u-statistic"
        Phase 1: how the residual moment is estimated.
    anchor_step : {"least-squares", "line-search", "paper"}, default "least-squares"
        Phase 1: how an anchor moves.
    n_anchors : int, optional
        Phase 1: anchors drawn at random among the clients with enough points; by default all.
    n_iterations : int, default 1
        Phase 1: moment-descent iterations T.
    n_products : int, default 2
        Phase 1: products with the moment per iteration, T_1; even unless "u-statistic".
    separation : float, optional
        Phase 1: the paper's Delta.
    random_start : bool, default False
        Phase 1: start from ``N(0, I) / sqrt(d)`` instead of zero.
    perturbation : float, default 0
        Phase 1: standard deviation of the noise in the two copies of the anchors' estimates that
        every client receives (Remark 2); 0 sends the estimates as they are.
    one_shot : bool, default False
        Instead of Phase 1, and of every later assignment: k-means of what the clients estimate
        from their own points (Ghosh et al., 2019).
    local : {"fedavg", "fedprox", "exact"}, default "fedavg"
        Phase 2: local work. "exact": clients send their Gram matrix, and the server solves.
    n_steps : int, default 5
        Phase 2: local gradient steps s.
    step_size : float, optional
        Phase 2: eta; by default ``work / n_steps`` ("fedprox": ``work``) over the largest
        curvature of the clients that hold 90 % of the points, and stable at all of them. One
        client's curvature does not decide it: clients above ten times the median do not count, and
        a "fedavg" with ``robust="mean"``, whose average they would ruin, leaves them out of Phase
        2, unless ``step_size`` is given; with another rule none counts for more than three medians.
    work : float, default 1
        See ``step_size``. With more local work the models converge in fewer rounds, but to what
        is further from least squares: at 3, up to 7 % further from the truth in setting C.1.
    softness : float, default 0
        Phase 2: 0 for hard assignment; otherwise the temperature of `assign` in units of twice the
        mean loss, which is the noise's variance.
    normalise : {"cluster", "all"}, default "cluster"
        Phase 2: divide by the cluster's points or by all.
    momentum : bool, default True
        Phase 2: Nesterov's, with gradient restart.
    check_every : int, default 60
        Phase 2: rounds between checks of the models; 0: never. Needs the squared loss.
    robust : str, default "mean"
        Against clients that lie: "filtered", the one to take, withstands three in ten of them
        (docs/faults.md). Both phases then leave out answers that are not consistent with the
        others (`flwr_perdl._robust.consistent`); Phase 1 looks for liars' groups too, in sketches
        as wide as with "auto", and takes the largest k; Phase 2 leaves out clients whose steps do
        not follow the models as those down a convex loss do, for which the server, and its
        checkpoints, hold every client's last update. "clip", "trimmed", "median" and
        "geometric-median": Phase 2's average (see `aggregate`); they bound what a client can do
        to Phase 1 and to the step size.

    Raises
    ------
    ValueError
        If an option breaks its rule.

    Notes
    -----
    Floats per client: Phase 1 takes d + 1 up, ``n_products`` times ``(width + 1) d`` down and
    ``width * d`` up, with ``width`` = 2 k + 4 (k: ``max_clusters`` with "auto") but at most d, and,
    for the anchors' estimates, ``(dimensions + 1) d`` down, of a subspace of k dimensions ("auto":
    as many as are found, at most ``width``), and d + 1 up. With h anchors, from the second
    iteration on, a product takes ``h (width + 1) d`` down and ``h * width * d`` up. Where it is run
    again later, k d more go down with each request. Phase 2 takes k d down and d + 2 up per round
    (soft: k (d + 2) up).
    """

    n_clusters: int | str = "auto"
    max_clusters: int = 8
    estimate: str = "u-statistic"
    anchor_step: str = "least-squares"
    n_anchors: int | None = None
    n_iterations: int = 1
    n_products: int = 2
    separation: float | None = None
    random_start: bool = False
    perturbation: float = 0.0
    one_shot: bool = False
    local: str = "fedavg"
    n_steps: int = 5
    step_size: float | None = None
    work: float = 1.0
    softness: float = 0.0
    normalise: str = "cluster"
    momentum: bool = True
    check_every: int = 60
    robust: str = "mean"

    def __post_init__(self) -> None:
        """Check the options."""
        own_numbers(self)
        if self.n_clusters != "auto":
            check_count("n_clusters", self.n_clusters, 1)
        check_count("max_clusters", self.max_clusters, 1)
        check_choice("estimate", self.estimate, ESTIMATES)
        check_choice("anchor_step", self.anchor_step, STEPS)
        if self.n_anchors is not None:
            check_count("n_anchors", self.n_anchors, 1)
        check_count("n_iterations", self.n_iterations, 1)
        check_count("n_products", self.n_products, 1)
        if self.estimate != "u-statistic" and self.n_products % 2:
            raise ValueError(f"n_products must be even, got {self.n_products}.")
        if self.estimate != "u-statistic" and self.n_clusters == "auto":
            raise ValueError('n_clusters must be given unless estimate="u-statistic", got "auto".')
        if self.separation is not None:
            check_real("separation", self.separation, 0, LARGE, open_low=True)
        check_real("perturbation", self.perturbation, 0, LARGE)
        check_choice("local", self.local, (*LOCALS, "exact"))
        check_count("n_steps", self.n_steps, 1)
        if self.step_size is not None:
            check_real("step_size", self.step_size, 0, LARGE, open_low=True)
        check_real("work", self.work, 0, LARGE, open_low=True)
        check_real("softness", self.softness, 0, LARGE)
        check_choice("normalise", self.normalise, ("cluster", "all"))
        check_count("check_every", self.check_every)
        check_choice("robust", self.robust, ROBUST)
        if self.one_shot and (self.n_clusters == "auto" or self.softness):
            raise ValueError("one_shot must come with n_clusters given and softness=0.")
        if self.local == "exact" and (self.softness or self.robust != "mean"):
            raise ValueError('local="exact" must come with softness=0 and robust="mean".')

    @classmethod
    def paper(cls, n_clusters: int, separation: float | None = None) -> TwoPhase:
        """Return the paper's own variant, as its Appendix C runs it (without its oversights).

        Parameters
        ----------
        n_clusters : int
            Number of models k.
        separation : float, optional
            Delta; without it anchors are joined until k groups are left.

        Raises
        ------
        ValueError
            If ``n_clusters`` or ``separation`` is not positive.
        """
        check_count("n_clusters", n_clusters, 1)
        return cls(
            n_clusters=n_clusters,
            estimate="halves",
            anchor_step="paper",
            n_anchors=max(round(3 * n_clusters * float(np.log(n_clusters))), 1),
            n_iterations=5,
            n_products=10,
            separation=separation,
            random_start=True,
            work=3.0,
            normalise="all",
            momentum=False,
            check_every=0,
        )

    # Where to begin ---------------------------------------------------------------------------

    def begin(self, centers: Matrix | None = None) -> State:
        """Return the state before the first request.

        Parameters
        ----------
        centers : ndarray of shape (k, d), optional
            Models to start Phase 2 from; without them Phase 1 comes first.
        """
        start = np.zeros((0, 0)) if centers is None else check_array("centers", centers, min_rows=1)
        state = _with_centers(_EMPTY, start)
        if centers is not None and self.step_size is not None and not self._adapts(len(centers)):
            return state._replace(step_size=self.step_size)
        return state._replace(step=DESCRIBE)

    def _adapts(self, n_clusters: int) -> bool:
        """Whether models may be dropped, merged and added."""
        alone = self.n_clusters != "auto" and n_clusters == 1
        return self.check_every > 0 and not alone and not self.one_shot

    # What to ask ------------------------------------------------------------------------------

    def ask(self, state: State, rng: np.random.Generator) -> Ask:
        """Return the request that comes next.

        Parameters
        ----------
        state : State
            The server's state.
        rng : numpy.random.Generator
            Source of the perturbations; not used without them.
        """
        options: dict[str, float | int | str] = {}
        if state.step == MOMENT:
            options |= {"estimate": self.estimate, "transpose": state.products % 2}
            options["variance"] = state.variance
            arrays = (state.thetas[None], state.columns, state.centers)
            if not self.perturbation or not len(state.anchors):
                return Ask(MOMENT, arrays, options)
            return Ask(MOMENT, arrays, options, {}, self.perturbation, int(rng.integers(2**31)))
        if state.step == ANCHORS:
            options |= {"anchor_step": self.anchor_step, "min_points": state.min_points}
            options["variance"] = state.variance
            if not len(state.anchors):
                return Ask(ANCHORS, (state.thetas, state.columns, state.centers), options)
            last = len(state.thetas) - 1
            own = {}
            for h, partition in enumerate(state.anchors):
                row = [min(h, last)]
                own[int(partition)] = (state.thetas[row], state.columns[row], state.centers)
            return Ask(ANCHORS, (), options, own)
        if state.step == UPDATE:
            options |= {"local": self.local, "n_steps": self.n_steps}
            options |= {"step_size": state.step_size, "soft": int(self.softness > 0)}
            options["temperature"] = self.softness * state.variance
            groups = (state.thetas,) if len(state.thetas) else ()
            return Ask(UPDATE, (self._ahead(state), *groups), options)
        return Ask(DESCRIBE)

    def _ahead(self, state: State) -> Matrix:
        """Nesterov's point: the models, carried on along their last movement."""
        if not self.momentum:
            return state.centers
        beta = state.tempo / (state.tempo + 3)
        return state.centers + beta[:, None] * (state.centers - state.previous)

    # What follows -----------------------------------------------------------------------------

    def advance(self, state: State, answers: Answers, rng: np.random.Generator) -> State:
        """Return the state after these answers to ``ask(state)``.

        Parameters
        ----------
        state : State
            The state in which was asked.
        answers : Answers
            At least one.
        rng : numpy.random.Generator
            Source of sketches, random starts and the choice of anchors.
        """
        follow = {
            DESCRIBE: self._described,
            MOMENT: self._moment,
            ANCHORS: self._anchors,
            UPDATE: self._update,
        }
        return follow[state.step](state._replace(odd=_EMPTY.odd), answers, rng)

    def answer_shape(self, state: State) -> tuple[int, ...] | None:
        """Return the shape of a client's answer; None in the exchange that finds the dimension."""
        k, d = state.centers.shape
        shapes: dict[str, tuple[int, ...] | None] = {
            DESCRIBE: (d + 1,) if k else None,
            MOMENT: state.columns.shape,
            ANCHORS: (d + 1,),
            UPDATE: (k if self.softness else 1, d + 2 + (d * d if self.local == "exact" else 0)),
        }
        return shapes[state.step]

    def check(self, state: State, given: Matrix) -> None:
        """Raise a ValueError that says what is wrong with a client's answer, if anything is.

        Parameters
        ----------
        state : State
            The state in which was asked.
        given : ndarray
            The answer.
        """
        k = len(state.centers)
        wanted = self.answer_shape(state) or (given.size,)
        if given.shape != wanted:
            raise ValueError(f"wrong shape: {wanted} is asked for, got {given.shape}")
        if not all_finite(given):
            raise ValueError("the answer is not finite")
        if state.step == UPDATE and not self.softness and given[0, 1] not in range(k):
            raise ValueError(f"the answer names cluster {given[0, 1]:g} of {k}")

    def _described(self, state: State, answers: Answers, rng: np.random.Generator) -> State:
        stack, n = answers.stack, answers.n_samples
        curvature, squares = stack[:, 0], stack[:, 1:].mean(axis=1)
        power = float(n @ squares / n.sum())
        steep = curvature[curvature > 0]
        middle = float(np.median(steep)) if len(steep) else 0.0
        likely = curvature <= _STEEP * middle
        if self.robust != "mean":
            power = float(np.median(squares))
            curvature, n = np.minimum(curvature, CAP * middle), capped(n)
        elif self.local == "fedavg" and self.step_size is None:
            state = state._replace(steep=answers.partitions[~likely])
        automatic = self._automatic_step(curvature[likely], n[likely])
        state = state._replace(step_size=self.step_size or automatic, power=max(power, 1e-300))
        if len(state.centers):
            return _with_centers(state, state.centers)
        d = stack.shape[1] - 1
        state = _with_centers(state, np.zeros((0, d)))
        if self.one_shot:
            thetas, whole = np.zeros((1, d)), np.eye(d)[None]
            return state._replace(step=ANCHORS, thetas=thetas, columns=whole, min_points=1)
        return self._begin_moments(state, rng)

    def _automatic_step(self, curvature: Matrix, n_samples: Matrix) -> float:
        order = np.argsort(curvature, kind="stable")
        held = np.cumsum(n_samples[order]) / n_samples.sum()
        typical = float(curvature[order][np.argmax(held >= _TYPICAL)])
        if typical <= 0:
            return 1.0
        if self.local != "fedavg":
            return self.work / typical
        return min(self.work / (self.n_steps * typical), 1 / float(curvature.max()))

    def _begin_moments(self, state: State, rng: np.random.Generator) -> State:
        """Start Phase 1 for the clients that no model fits."""
        d = state.centers.shape[1]
        groups = self._most()
        if self.robust == "filtered":  # liars' groups too are to be told apart
            groups = max(groups, self.max_clusters)
        width = 2 * groups + _OVERSAMPLING
        theta = rng.standard_normal((1, d)) / np.sqrt(d) if self.random_start else np.zeros((1, d))
        return state._replace(
            step=MOMENT,
            thetas=theta,
            columns=sketch(1, d, width, rng),
            anchors=_EMPTY.anchors,
            moved=_EMPTY.moved,
            products=0,
            iteration=0,
        )

    def _moment(self, state: State, answers: Answers, rng: np.random.Generator) -> State:
        stack = answers.stack
        if self.robust != "mean":
            rule = "filtered" if self.robust == "filtered" else "clip"
            factors = factors_of(stack, rule)
            stack = stack * factors[:, None, None, None]
            state = state._replace(odd=_odd(answers, 1 - factors))
        product = stack.sum(axis=0) / answers.n_samples.sum()
        products = state.products + 1
        if products < self.n_products:
            return state._replace(columns=orthonormal(product), products=products)
        auto = self.n_clusters == "auto"
        if self.estimate == "u-statistic":
            k = None if auto or self.robust == "filtered" else int(self.n_clusters)
            space = symmetric_subspace(state.columns, product, k)
        else:
            space = left_subspace(state.columns, product, int(self.n_clusters))
        involved = answers.n_samples[answers.stack.any(axis=(1, 2, 3))]
        points = np.sort(involved if len(involved) else answers.n_samples)[::-1]
        dimensions = space.U.shape[2]
        enough = points[min(_ANCHORS_PER_DIMENSION * dimensions, len(points)) - 1]
        min_points = int(min(_POINTS_PER_DIMENSION * dimensions, enough))
        if self.n_anchors is not None and state.iteration == 0:
            able = answers.partitions[answers.n_samples >= min_points]
            anchors = rng.choice(able, min(self.n_anchors, len(able)), replace=False)
            state = state._replace(anchors=anchors, moved=np.zeros(len(anchors), dtype=bool))
        return state._replace(step=ANCHORS, columns=space.U, min_points=min_points)

    def _anchors(self, state: State, answers: Answers, rng: np.random.Generator) -> State:
        able = np.flatnonzero(answers.stack[:, 0] > 0)
        most = np.argsort(-answers.n_samples[able], kind="stable")[:_MOST_ANCHORS]
        chosen = able if self.one_shot else able[np.sort(most)]
        absent = np.flatnonzero(~np.isin(state.anchors, answers.partitions))
        last = state.thetas[np.minimum(absent, len(state.thetas) - 1)]
        estimates = np.vstack([answers.stack[chosen, 1:], last])
        moved = np.concatenate([np.ones(len(chosen), dtype=bool), state.moved[absent]])
        if state.iteration + 1 < self.n_iterations and len(estimates) and not self.one_shot:
            d, width = estimates.shape[1], state.columns.shape[2] + _OVERSAMPLING
            return state._replace(
                step=MOMENT,
                thetas=estimates,
                anchors=np.concatenate([answers.partitions[chosen], state.anchors[absent]]),
                moved=moved,
                columns=sketch(len(estimates), d, width, rng),
                products=0,
                iteration=state.iteration + 1,
            )
        estimates = estimates[moved]
        if not len(estimates):
            if len(state.centers):
                return _with_centers(state, state.centers)
            raise ValueError(
                "Phase 1 has no anchors: no client with enough points answered that was asked for "
                "its estimate."
            )
        if self.robust != "mean":
            lengths = np.linalg.norm(estimates, axis=1)
            estimates = estimates[lengths <= 10 * np.median(lengths)]
        if self.one_shot:
            groups = kmeans(estimates, int(self.n_clusters), rng)
            return _with_centers(state, groups)._replace(thetas=groups)
        k = None if self.n_clusters == "auto" or len(state.centers) else int(self.n_clusters)
        found = self._groups(estimates, k)
        if self.n_clusters == "auto" and not len(state.centers) and len(found) == 1:
            dimensions = min(state.columns.shape[2], self.max_clusters)
            found = kmeans(estimates, dimensions, rng)
        room = self._most() - len(state.centers)
        return _with_centers(state, np.vstack([state.centers, found[:room]]))

    def _groups(self, estimates: Matrix, k: int | None) -> Matrix:
        """Return the means of the groups of like estimates, the largest k first.

        A robust run looks for more groups than k, so that those of liars are not joined with
        those of honest clients.
        """
        grouped = partial(
            cluster_anchors, separation=self.separation, max_clusters=self.max_clusters
        )
        if self.robust == "filtered" and k is not None:
            groups = grouped(estimates).centers
            if len(groups) >= k:
                return groups[:k]
        return grouped(estimates, k).centers

    def _most(self) -> int:
        """Most models there may be."""
        return self.max_clusters if self.n_clusters == "auto" else int(self.n_clusters)

    def _update(self, state: State, answers: Answers, rng: np.random.Generator) -> State:
        ahead, k = self._ahead(state), len(state.centers)
        loss, packed = answers.stack[:, 0, 0], answers.stack[:, :, 1:]
        if self.local == "exact":
            change, counts = _solve(packed[:, 0], answers.n_samples, k)
        else:
            trusted = ~np.isin(answers.partitions, state.steep)
            if self.robust == "filtered" and not self.softness:
                state = _listened(state, answers.partitions, packed[:, 0], ahead)
                trusted = state.slopes <= 0
            heard = slice(None) if trusted.all() else trusted
            odd = np.ones(len(loss))
            change, counts, odd[heard] = average_updates(
                packed[heard],
                answers.n_samples[heard],
                k,
                self.softness > 0,
                self.normalise,
                self.robust,
            )
            state = state._replace(odd=_odd(answers, odd))
        centers = np.where(counts[:, None] > 0, ahead + change, state.centers)
        moved = centers - state.centers
        tempo = np.where(np.einsum("kd,kd->k", change, moved) < 0, 0, state.tempo + 1)
        if self._adapts(k):
            shares = packed[:, :, 0] if self.softness else packed[:, :1, 0] == np.arange(k)
            told = np.empty((len(shares), 1 + k))
            told[:, 0] = answers.partitions
            np.multiply(answers.n_samples[:, None], shares, out=told[:, 1:])
            if len(state.heard) and not np.array_equal(state.heard[:, 0], answers.partitions):
                absent = state.heard[~np.isin(state.heard[:, 0], answers.partitions)]
                told = np.vstack([absent, told])
                counts = counts + absent[:, 1:].sum(axis=0)
            state = state._replace(heard=told)
        after = state._replace(
            centers=centers,
            previous=state.centers,
            tempo=tempo if self.local != "exact" else state.tempo,
            counts=counts,
            since=state.since + 1,
        )
        if self.softness:
            n = answers.n_samples
            after = after._replace(variance=float(2 * (n @ loss) / n.sum()))
        return self._adapt(after, loss, answers, rng)

    def _adapt(
        self, state: State, loss: Matrix, answers: Answers, rng: np.random.Generator
    ) -> State:
        """Drop, merge and add models as the clients need them."""
        k = len(state.centers)
        if not self._adapts(k):
            return state
        moved = np.linalg.norm(state.centers - state.previous, axis=1)
        settled = moved.max() <= _SETTLED * np.linalg.norm(state.centers, axis=1).max()
        early = settled and state.patience > 0 and state.since >= _LEAST_WAIT
        if state.since < self.check_every and not early:
            return state
        honest = np.ones(len(loss), dtype=bool)
        if self.robust == "filtered":
            honest = ~np.isin(answers.partitions, state.odd[state.odd[:, 1] == 1, 0])
        n, squares = answers.n_samples[honest], 2 * loss[honest]
        variance = float(np.quantile(n * squares / chi2.ppf(0.2, n), 0.2))
        # Without noise, residuals are how far the models still have to go, and then rounding.
        length = np.linalg.norm(state.centers, axis=1).max()
        variance = max(variance, float(np.finfo(float).eps * state.power * length**2))
        known = max(variance, float(state.power * (_AHEAD * moved.max()) ** 2))
        state = state._replace(
            variance=known,
            since=0,
            patience=max(state.patience - 1, 0),
            heard=state.heard[:0],
        )
        misfits = bool((squares > known * misfit_bound(n)).mean() > _MISFITS)
        centers = state.centers
        if misfits or self.n_clusters == "auto":
            keep = state.counts > 0
            centers = _merge(centers[keep], state.counts[keep], variance / state.power)
        if misfits and len(centers) < self._most():
            return self._begin_moments(_with_centers(state, centers), rng)
        if len(centers) < k and self.n_clusters == "auto":
            return _with_centers(state, centers)
        return state


#: Before anything is known.
_EMPTY = State(
    step=DESCRIBE,
    centers=np.zeros((0, 0)),
    previous=np.zeros((0, 0)),
    tempo=np.zeros(0),
    counts=np.zeros(0),
    heard=np.zeros((0, 1)),
    thetas=np.zeros((0, 0)),
    columns=np.zeros((0, 0, 0)),
    anchors=np.zeros(0, dtype=np.intp),
    moved=np.zeros(0, dtype=bool),
    products=0,
    iteration=0,
    min_points=0,
    step_size=0.0,
    power=1.0,
    variance=0.0,
    since=0,
    patience=5,
    who=np.zeros(0, dtype=np.intp),
    said=np.zeros((0, 1)),
    asked=np.zeros((0, 0)),
    slopes=np.zeros(0),
    odd=np.zeros((0, 2)),
    steep=np.zeros(0, dtype=np.intp),
)


def _with_centers(state: State, centers: Matrix) -> State:
    """Return the state in which Phase 2 starts from these models."""
    k, d = centers.shape
    return state._replace(
        step=UPDATE,
        centers=centers,
        previous=centers,
        tempo=np.zeros(k),
        counts=np.zeros(k),
        heard=np.zeros((0, 1 + k)),
        thetas=np.zeros((0, d)),
        columns=np.zeros((0, d, 0)),
        anchors=_EMPTY.anchors,
        moved=_EMPTY.moved,
        since=0,
    )


def _odd(answers: Answers, shares: Matrix) -> Matrix:
    """Return who stands out, and to which share of the answer, as rows."""
    rows: Matrix = np.column_stack([answers.partitions, shares])[shares > 0]
    return rows


def _listened(state: State, partitions: NDArray[np.intp], packed: Matrix, asked: Matrix) -> State:
    """Note who said what, and how it changed with the models since the client's last update.

    Between two models a client's step down a convex loss changes against the way from one to the
    other, whatever its data and their noise; one that turns its steps round, or always sends the
    same, shows by this where no distance would. Absent clients are forgotten.
    """
    order = np.argsort(state.who)
    position = np.searchsorted(state.who, partitions, sorter=order)
    known = np.isin(partitions, state.who) & (state.asked.shape == asked.shape)
    slopes = np.full(len(partitions), -np.inf)
    if known.any():
        before = order[np.minimum(position, max(len(order) - 1, 0))]
        known &= state.said[before, 0] == packed[:, 0]
        mine, then = packed[known], before[known]
        labels = mine[:, 0].astype(int)
        way = (asked - state.asked)[labels]
        squares = (way**2).sum(axis=1)
        now = ((mine[:, 1:] - state.said[then, 1:]) * way).sum(axis=1) / np.maximum(squares, 1e-300)
        old = np.where(np.isfinite(state.slopes[then]), state.slopes[then] / 2, 0)
        telling = squares > (_TELLING * np.linalg.norm(asked, axis=1)[labels]) ** 2
        slopes[known] = np.where(telling, old + now, state.slopes[then])
    return state._replace(who=partitions, said=packed, asked=asked, slopes=slopes)


def _merge(centers: Matrix, counts: Matrix, ratio: float) -> Matrix:
    """Join models that are closer than their standard errors allow to tell."""
    centers, counts = centers.copy(), counts.copy()
    d = centers.shape[1]
    while len(centers) > 1:
        distance = np.linalg.norm(centers[:, None] - centers, axis=2)
        error = np.sqrt(ratio * d * (1 / counts[:, None] + 1 / counts))
        excess = distance / np.maximum(error, 1e-300)
        np.fill_diagonal(excess, np.inf)
        a, b = sorted(np.unravel_index(int(excess.argmin()), excess.shape))
        if excess[a, b] >= _SAME:
            break
        total = counts[a] + counts[b]
        centers[a] = (counts[a] * centers[a] + counts[b] * centers[b]) / total
        counts[a] = total
        centers, counts = np.delete(centers, b, axis=0), np.delete(counts, b)
    return centers


def _solve(packed: Matrix, n_samples: Matrix, n_clusters: int) -> tuple[Matrix, Matrix]:
    """Exact least squares of every cluster from its clients' sums."""
    d = int(np.sqrt(packed.shape[1] - 0.75) - 0.5)
    change, counts = np.zeros((n_clusters, d)), np.zeros(n_clusters)
    for j in range(n_clusters):
        mine = packed[:, 0] == j
        counts[j] = n_samples[mine].sum()
        if counts[j]:
            sums = n_samples[mine] @ packed[mine, 1:]
            change[j] = np.linalg.lstsq(sums[d:].reshape(d, d), sums[:d], rcond=None)[0]
    return change, counts
