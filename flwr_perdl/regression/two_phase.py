"""The two phases as a conversation: what the server asks, and what it makes of the answers.

======================================= ====================================================
paper (Su, Xu, Yang, NeurIPS 2022)      here
======================================= ====================================================
Phase 1, lines 6-16                     steps "moment" and "anchors" of `TwoPhase.advance`
Phase 2, lines 4-8                      step "update" of `TwoPhase.advance`
``T``, ``T_1``, ``n_H``, ``eta``, …     options of the phases (``phases.py``)
======================================= ====================================================

A `State` holds all that the server knows before a step; every step has a type of its own.
``settings.ask(state)`` is the next request, the same for every client, and
``settings.advance(state, answers, rng)`` what follows from the answers; a client's answer is
:func:`flwr_perdl.regression.answer`. Who carries the messages is no business of this module: a
Strategy, or :class:`flwr_perdl.regression.Clients`, which answers for all clients at once.

`TwoPhase()` deviates from the paper where it was measured to be better; ``TwoPhase.paper(...)``
does not:

- a first exchange (``"describe"``) finds the dimension and the step size, of which all local steps
  together come to ``work`` over the largest eigenvalue of ``X' X / n`` (of any client but those
  that hold the last tenth of the points, mostly clients of very few);
- Phase 1 starts from zero, so that all anchors share one subspace and nobody's estimate is
  broadcast, and takes one least-squares step at every client with enough points; where no merge of
  their estimates stands out, it begins with too many models rather than too few;
- Phase 2 takes one local step, whose fixed point is least squares, divides by the cluster's points
  and accelerates on the server (``acceleration.py``): Anderson acceleration of a model while its
  clients stay the same, which needs no larger step to converge in few rounds; otherwise, and with
  a robust average, Nesterov's momentum with gradient restart, which withstands the noise of clients
  that come and go;
- whenever the models have settled, and every ``check_every`` rounds, models without clients are
  dropped, models closer than four standard errors merge, and if more than 2 % of the clients fit
  none, Phase 1 is run on those to find what they need. Five times the models' last movement, and
  rounding, count as noise here: without noise, residuals show only how far the models still have
  to go. This is for the squared loss, and takes the features to be alike in scale.

What each party learns: see ``answers.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from flwr_perdl._checks import (
    Matrix,
    all_finite,
    check_array,
    check_choice,
    check_count,
    check_kind,
    is_auto,
    own_numbers,
)
from flwr_perdl._robust import CAP, capped, supported
from flwr_perdl.regression.acceleration import accelerated, replaced_points
from flwr_perdl.regression.anchors import cluster_anchors, kmeans, nearest_group
from flwr_perdl.regression.answers import (
    ANCHORS,
    DESCRIBE,
    EXACT,
    MOMENT,
    UPDATE,
    Answers,
    Ask,
    Scalars,
    misfit_bound,
)
from flwr_perdl.regression.clustering import ROBUST, average_updates, factors_of
from flwr_perdl.regression.moments import (
    left_subspace,
    orthonormal,
    sketch,
    symmetric_subspace,
)
from flwr_perdl.regression.phases import (
    DESCENT,
    REFINEMENT,
    MomentDescent,
    OneShot,
    Refinement,
    refuse_idle,
)
from flwr_perdl.regression.states import (
    Describing,
    Estimating,
    Known,
    Refining,
    Searching,
    State,
)

#: Columns of a sketch beyond twice the number of models.
_OVERSAMPLING = 4
#: An anchor has at least this many points per dimension of the subspace.
_POINTS_PER_DIMENSION = 4
#: Clients whose curvature is above this many times the median do not count for the step size.
_STEEP = 10
#: Rounds that the acceleration of Phase 2 remembers, the current one included.
_MEMORY = 11
#: Share of a cluster's points that may come or go between two rounds that it compares.
_REPLACED = 0.02
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


@dataclass(frozen=True)
class TwoPhase:
    """FedMD and FedX + clustering, and how they are done.

    Parameters
    ----------
    n_clusters : int or "auto", default "auto"
        Number of models k.
    phase_1 : MomentDescent or OneShot
        How models are found where there are none, and where there are too few.
    phase_2 : Refinement
        How models are refined.
    max_clusters : int, default 8
        Most models, with "auto"; most groups of anchors that are looked for otherwise.
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
        If an option breaks its rule, or does nothing beside the others.

    Notes
    -----
    Floats per client: Phase 1 takes d + 1 up, ``n_products`` times ``(width + 1) d`` down and
    ``width * d`` up, with ``width`` = 2 k + 4 (k: ``max_clusters`` with "auto") but at most d, and,
    for the anchors' estimates, ``(dimensions + 1) d`` down, of a subspace of k dimensions ("auto":
    as many as are found, at most ``width``), and d + 1 up. With h anchors, from the second
    iteration on, a product takes ``h (width + 1) d`` down and ``h * width * d`` up. Where it is run
    again later, k d more go down with each request. Phase 2 takes k d down and d + 2 up per round
    (soft: k (d + 2) up).

    Examples
    --------
    >>> from flwr_perdl.regression import TwoPhase
    >>> TwoPhase.paper(3).n_clusters
    3
    """

    n_clusters: int | str = "auto"
    phase_1: MomentDescent | OneShot = DESCENT
    phase_2: Refinement = REFINEMENT
    max_clusters: int = 8
    robust: str = "mean"

    def __post_init__(self) -> None:
        """Check the options."""
        own_numbers(self)
        check_kind("phase_1", self.phase_1, (MomentDescent, OneShot), "a MomentDescent or OneShot")
        check_kind("phase_2", self.phase_2, Refinement, "a Refinement")
        auto = is_auto("n_clusters", self.n_clusters)
        if not auto:
            check_count("n_clusters", self.n_clusters, 1)
        check_count("max_clusters", self.max_clusters, 1)
        check_choice("robust", self.robust, ROBUST)
        if isinstance(self.phase_1, OneShot):
            if auto or self.phase_2.softness:
                raise ValueError("OneShot must come with n_clusters given and softness=0.")
            refuse_idle(self.phase_2, "with OneShot", check_every=0)
            refuse_idle(self, "with OneShot", max_clusters=8)
        elif auto and self.phase_1.estimate != "u-statistic":
            raise ValueError('n_clusters must be given unless estimate="u-statistic", got "auto".')
        if not auto and self.robust != "filtered" and not self.phase_2.check_every:
            refuse_idle(self, "with n_clusters given and no checks of the models", max_clusters=8)
        if self.phase_2.local == EXACT and (self.phase_2.softness or self.robust != "mean"):
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
        descent = MomentDescent(
            estimate="halves",
            anchor_step="paper",
            n_anchors=max(round(3 * n_clusters * float(np.log(n_clusters))), 1),
            n_iterations=5,
            n_products=10,
            separation=separation,
            random_start=True,
        )
        refinement = Refinement(n_steps=5, work=3.0, normalise="all", momentum=False, check_every=0)
        return cls(n_clusters, descent, refinement)

    # Where to begin ---------------------------------------------------------------------------

    def begin(self, centers: Matrix | None = None) -> State:
        """Return the state before the first request.

        Parameters
        ----------
        centers : ndarray of shape (k, d), optional
            Models to start Phase 2 from; without them Phase 1 comes first.
        """
        if centers is None:
            return Describing(centers=np.zeros((0, 0)))
        centers = check_array("centers", centers, min_rows=1)
        if self.phase_2.step_size is None or self._adapts(len(centers)):
            return Describing(centers=centers)
        return Refining.start(Known(centers=centers, step_size=self.phase_2.step_size), centers)

    def _adapts(self, n_clusters: int) -> bool:
        """Whether models may be dropped, merged and added."""
        alone = self.n_clusters != "auto" and n_clusters == 1
        return self.phase_2.check_every > 0 and not alone and not self._one_shot

    @property
    def _one_shot(self) -> bool:
        return isinstance(self.phase_1, OneShot)

    @property
    def _descent(self) -> MomentDescent:
        """Phase 1; one-shot clustering's only step is its default one."""
        return MomentDescent() if isinstance(self.phase_1, OneShot) else self.phase_1

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
        if isinstance(state, Searching):
            return self._ask_moment(state, rng)
        if isinstance(state, Estimating):
            return self._ask_estimates(state)
        if isinstance(state, Refining):
            phase, temperature = self.phase_2, self.phase_2.softness * state.variance
            work: Scalars = {
                "local": phase.local,
                "n_steps": phase.n_steps,
                "step_size": state.step_size,
            }
            weights = {"soft": int(phase.softness > 0), "temperature": temperature}
            groups = (state.groups,) if len(state.groups) else ()
            return Ask(UPDATE, (self._ahead(state), *groups), {**work, **weights})
        return Ask(DESCRIBE)

    def _ask_moment(self, state: Searching, rng: np.random.Generator) -> Ask:
        how: Scalars = {"estimate": self._descent.estimate, "transpose": state.products % 2}
        ask = Ask(
            MOMENT,
            (state.thetas[None], state.columns, state.centers),
            {**how, "variance": state.variance},
        )
        if not self._descent.perturbation or not len(state.anchors):
            return ask
        return ask._replace(noise=self._descent.perturbation, seed=int(rng.integers(2**31)))

    def _ask_estimates(self, state: Estimating) -> Ask:
        how: Scalars = {"anchor_step": self._descent.anchor_step, "min_points": state.min_points}
        ask = Ask(
            ANCHORS,
            (state.thetas, state.columns, state.centers),
            {**how, "variance": state.variance},
        )
        if not len(state.anchors):
            return ask
        last, own = len(state.thetas) - 1, {}
        for h, partition in enumerate(state.anchors):
            row = [min(h, last)]
            own[int(partition)] = (state.thetas[row], state.columns[row], state.centers)
        return ask._replace(arrays=(), own=own)

    def _ahead(self, state: Refining) -> Matrix:
        """Nesterov's point: the models, carried on along their last movement."""
        if not self.phase_2.momentum:
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
        state = replace(state, odd=state.odd[:0])
        if isinstance(state, Searching):
            return self._moment(state, answers, rng)
        if isinstance(state, Estimating):
            return self._anchors(state, answers, rng)
        if isinstance(state, Refining):
            return self._update(state, answers, rng)
        return self._described(state, answers, rng)

    def answer_shape(self, state: State) -> tuple[int, ...] | None:
        """Return the shape of a client's answer; None in the exchange that finds the dimension."""
        k, d = state.centers.shape
        if isinstance(state, Searching):
            return state.columns.shape
        if isinstance(state, Refining):
            phase = self.phase_2
            return (k if phase.softness else 1, d + 2 + (d * d if phase.local == EXACT else 0))
        return (d + 1,) if k or isinstance(state, Estimating) else None

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
        hard = isinstance(state, Refining) and not self.phase_2.softness
        if hard and given[0, 1] not in range(k):
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
        spared = self.robust == "mean" and self.phase_2.local == "fedavg"
        left_out = ~likely & (spared and self.phase_2.step_size is None)
        d = stack.shape[1] - 1
        known = Known(
            centers=state.centers if len(state.centers) else np.zeros((0, d)),
            step_size=self.phase_2.step_size or self._automatic_step(curvature[likely], n[likely]),
            power=max(power, 1e-300),
            steep=answers.partitions[left_out],
        )
        if len(known.centers):
            return Refining.start(known, known.centers)
        if self._one_shot:
            return known.to(Estimating, thetas=np.zeros((1, d)), columns=np.eye(d)[None])
        return self._search(known, rng)

    def _automatic_step(self, curvature: Matrix, n_samples: Matrix) -> float:
        order = np.argsort(curvature, kind="stable")
        held = np.cumsum(n_samples[order]) / n_samples.sum()
        typical = float(curvature[order][np.argmax(held >= _TYPICAL)])
        if typical <= 0:
            return 1.0
        if self.phase_2.local != "fedavg":
            return self.phase_2.work / typical
        step = self.phase_2.work / (self.phase_2.n_steps * typical)
        return min(step, 1 / float(curvature.max()))

    def _search(self, known: Known, rng: np.random.Generator) -> Searching:
        """Start Phase 1 for the clients that no model fits."""
        d = known.centers.shape[1]
        groups = self._most()
        if self.robust == "filtered":  # liars' groups too are to be told apart
            groups = max(groups, self.max_clusters)
        width = 2 * groups + _OVERSAMPLING
        theta = np.zeros((1, d))
        if self._descent.random_start:
            theta = rng.standard_normal((1, d)) / np.sqrt(d)
        return known.to(Searching, thetas=theta, columns=sketch(1, d, width, rng))

    def _moment(self, state: Searching, answers: Answers, rng: np.random.Generator) -> State:
        stack = answers.stack
        if self.robust != "mean":
            rule = "filtered" if self.robust == "filtered" else "clip"
            factors = factors_of(stack, rule)
            stack = stack * factors[:, None, None, None]
            state = replace(state, odd=_odd(answers, 1 - factors))
        product = stack.sum(axis=0) / answers.n_samples.sum()
        products = state.products + 1
        if products < self._descent.n_products:
            return replace(state, columns=orthonormal(product), products=products)
        auto = self.n_clusters == "auto"
        if self._descent.estimate == "u-statistic":
            k = None if auto or self.robust == "filtered" else int(self.n_clusters)
            space = symmetric_subspace(state.columns, product, k)
        else:
            space = left_subspace(state.columns, product, int(self.n_clusters))
        involved = answers.n_samples[answers.stack.any(axis=(1, 2, 3))]
        points = np.sort(involved if len(involved) else answers.n_samples)[::-1]
        dimensions = space.U.shape[2]
        enough = points[min(_ANCHORS_PER_DIMENSION * dimensions, len(points)) - 1]
        min_points = int(min(_POINTS_PER_DIMENSION * dimensions, enough))
        anchors, moved, most = state.anchors, state.moved, self._descent.n_anchors
        if most is not None and state.iteration == 0:
            able = answers.partitions[answers.n_samples >= min_points]
            anchors = rng.choice(able, min(most, len(able)), replace=False)
            moved = np.zeros(len(anchors), dtype=bool)
        chosen = {"anchors": anchors, "moved": moved, "min_points": min_points}
        return state.to(Estimating, columns=space.U, **chosen)

    def _anchors(self, state: Estimating, answers: Answers, rng: np.random.Generator) -> State:
        able = np.flatnonzero(answers.stack[:, 0] > 0)
        most = np.argsort(-answers.n_samples[able], kind="stable")[:_MOST_ANCHORS]
        chosen = able if self._one_shot else able[np.sort(most)]
        absent = np.flatnonzero(~np.isin(state.anchors, answers.partitions))
        last = state.thetas[np.minimum(absent, len(state.thetas) - 1)]
        estimates = np.vstack([answers.stack[chosen, 1:], last])
        moved = np.concatenate([np.ones(len(chosen), dtype=bool), state.moved[absent]])
        if state.iteration + 1 < self._descent.n_iterations and len(estimates):
            d, width = estimates.shape[1], state.columns.shape[2] + _OVERSAMPLING
            return state.to(
                Searching,
                thetas=estimates,
                anchors=np.concatenate([answers.partitions[chosen], state.anchors[absent]]),
                moved=moved,
                columns=sketch(len(estimates), d, width, rng),
                iteration=state.iteration + 1,
            )
        estimates = estimates[moved]
        if not len(estimates):
            if len(state.centers):
                return Refining.start(state, state.centers)
            raise ValueError(
                "Phase 1 has no anchors: no client with enough points answered that was asked for "
                "its estimate."
            )
        if self.robust != "mean":
            n_groups = int(self.n_clusters) if self._one_shot else 1

            def group(own: Matrix) -> NDArray[np.intp]:
                centers = kmeans(own, n_groups, rng.spawn(1)[0])  # leaves the draws of rng
                labels: NDArray[np.intp] = nearest_group(own, centers).argmax(axis=1)
                return labels

            estimates = estimates[supported(estimates, n_groups, group)]
        if self._one_shot:
            groups = kmeans(estimates, int(self.n_clusters), rng)
            return Refining.start(state, groups, groups)
        k = None if self.n_clusters == "auto" or len(state.centers) else int(self.n_clusters)
        found = self._groups(estimates, k)
        if self.n_clusters == "auto" and not len(state.centers) and len(found) == 1:
            dimensions = min(state.columns.shape[2], self.max_clusters)
            found = kmeans(estimates, dimensions, rng)
        room = self._most() - len(state.centers)
        return Refining.start(state, np.vstack([state.centers, found[:room]]))

    def _groups(self, estimates: Matrix, k: int | None) -> Matrix:
        """Return the means of the groups of like estimates, the largest k first.

        A robust run looks for more groups than k, so that those of liars are not joined with
        those of honest clients.
        """
        grouped = partial(
            cluster_anchors, separation=self._descent.separation, max_clusters=self.max_clusters
        )
        if self.robust == "filtered" and k is not None:
            groups = grouped(estimates).centers
            if len(groups) >= k:
                return groups[:k]
        return grouped(estimates, k).centers

    def _most(self) -> int:
        """Most models there may be."""
        return self.max_clusters if self.n_clusters == "auto" else int(self.n_clusters)

    def _update(self, state: Refining, answers: Answers, rng: np.random.Generator) -> State:
        ahead, k = self._ahead(state), len(state.centers)
        loss, packed = answers.stack[:, 0, 0], answers.stack[:, :, 1:]
        phase = self.phase_2
        if phase.local == EXACT:
            change, counts = _solve(packed[:, 0], answers.n_samples, k)
        else:
            trusted = ~np.isin(answers.partitions, state.steep)
            if self.robust == "filtered" and not phase.softness:
                state = _listened(state, answers.partitions, packed[:, 0], ahead)
                trusted = state.slopes <= 0
            heard = slice(None) if trusted.all() else trusted
            odd = np.ones(len(loss))
            change, counts, odd[heard] = average_updates(
                packed[heard],
                answers.n_samples[heard],
                k,
                phase.softness > 0,
                phase.normalise,
                self.robust,
            )
            state = replace(state, odd=_odd(answers, odd))
        shares = packed[:, :, 0] if phase.softness else packed[:, :1, 0] == np.arange(k)
        told = np.empty((len(shares), 1 + k))
        told[:, 0] = answers.partitions
        np.multiply(answers.n_samples[:, None], shares, out=told[:, 1:])
        state = self._moved(state, ahead, change, counts, told)
        if self._adapts(k):
            if len(state.heard) and not np.array_equal(state.heard[:, 0], answers.partitions):
                absent = state.heard[~np.isin(state.heard[:, 0], answers.partitions)]
                told = np.vstack([absent, told])
                counts = counts + absent[:, 1:].sum(axis=0)
            state = replace(state, heard=told)
        state = replace(state, counts=counts, since=state.since + 1)
        if phase.softness:
            n = answers.n_samples
            state = replace(state, variance=float(2 * (n @ loss) / n.sum()))
        return self._adapt(state, loss, answers, rng)

    def _moved(
        self, state: Refining, ahead: Matrix, change: Matrix, counts: Matrix, told: Matrix
    ) -> Refining:
        """Move the models by the clients' mean changes, accelerated."""
        phase = self.phase_2
        centers = np.where(counts[:, None] > 0, ahead + change, state.centers)
        after = replace(state, centers=centers, previous=state.centers)
        if phase.local == EXACT or not phase.momentum:
            return after
        uphill = np.einsum("kd,kd->k", change, centers - state.centers) < 0
        tempo = np.where(uphill, 0, state.tempo + 1)
        if self.robust != "mean":
            return replace(after, tempo=tempo)
        # Differences between rounds say how the changes depend on the model only where the same
        # clients made them.
        same = replaced_points(state.told, told) <= _REPLACED * counts
        memory = np.where(counts > 0, np.where(same, state.memory + 1, 1), 0)
        points = np.concatenate([state.points, ahead[None]])[-_MEMORY:]
        changes = np.concatenate([state.changes, change[None]])[-_MEMORY:]
        return replace(
            after,
            centers=np.where(memory[:, None] > 1, accelerated(points, changes, memory), centers),
            tempo=np.where(memory > 1, 0, tempo),
            points=points,
            changes=changes,
            memory=memory,
            told=told,
        )

    def _adapt(
        self, state: Refining, loss: Matrix, answers: Answers, rng: np.random.Generator
    ) -> State:
        """Drop, merge and add models as the clients need them."""
        k = len(state.centers)
        if not self._adapts(k):
            return state
        moved = np.linalg.norm(state.centers - state.previous, axis=1)
        settled = moved.max() <= _SETTLED * np.linalg.norm(state.centers, axis=1).max()
        early = settled and state.patience > 0 and state.since >= _LEAST_WAIT
        if state.since < self.phase_2.check_every and not early:
            return state
        honest = np.ones(len(loss), dtype=bool)
        if self.robust == "filtered":
            honest = ~np.isin(answers.partitions, state.odd[state.odd[:, 1] == 1, 0])
        if not honest.any():  # noise can turn everyone's steps round
            return state
        n, squares = answers.n_samples[honest], 2 * loss[honest]
        variance = float(np.quantile(n * squares / chi2.ppf(0.2, n), 0.2))
        # Without noise, residuals are how far the models still have to go, and then rounding.
        length = np.linalg.norm(state.centers, axis=1).max()
        variance = max(variance, float(np.finfo(float).eps * state.power * length**2))
        known = max(variance, float(state.power * (_AHEAD * moved.max()) ** 2))
        state = replace(
            state,
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
            return self._search(replace(state, centers=centers), rng)
        if len(centers) < k and self.n_clusters == "auto":
            return Refining.start(state, centers)
        return state


def _odd(answers: Answers, shares: Matrix) -> Matrix:
    """Return who stands out, and to which share of the answer, as rows."""
    rows: Matrix = np.column_stack([answers.partitions, shares])[shares > 0]
    return rows


def _listened(
    state: Refining, partitions: NDArray[np.intp], packed: Matrix, asked: Matrix
) -> Refining:
    """Note who said what, and how it changed with the models since the client's last update.

    Between two models a client's step down a convex loss changes against the way from one to the
    other, whatever its data and their noise; one that turns its steps round, or always sends the
    same, shows by this where no distance would. Absent clients are forgotten.
    """
    known = np.isin(partitions, state.who) & (state.asked.shape == asked.shape)
    slopes = np.full(len(partitions), -np.inf)
    if known.any():
        before = np.minimum(np.searchsorted(state.who, partitions), len(state.who) - 1)
        known &= state.said[before, 0] == packed[:, 0]
        mine, then = packed[known], before[known]
        labels = mine[:, 0].astype(int)
        way = (asked - state.asked)[labels]
        squares = (way**2).sum(axis=1)
        now = ((mine[:, 1:] - state.said[then, 1:]) * way).sum(axis=1) / np.maximum(squares, 1e-300)
        old = np.where(np.isfinite(state.slopes[then]), state.slopes[then] / 2, 0)
        telling = squares > (_TELLING * np.linalg.norm(asked, axis=1)[labels]) ** 2
        slopes[known] = np.where(telling, old + now, state.slopes[then])
    return replace(state, who=partitions, said=packed, asked=asked, slopes=slopes)


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
