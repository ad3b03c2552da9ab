"""Clustered mixed regression: Appendix C and Fig. 1-3.

Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022.
Every method is a start and a Phase 2. Both versions of Phase 2, this library's and the paper's, run
from the same starts: this library's Phase 1, the paper's, random models (IFCA), one-shot
clustering, one model (FedAvg), and the true models, the paper's oracle. The reference is least
squares with the true labels.

The paper's Phase 1 is the best possible: an SVD of the whole moment, d^2 values per anchor, instead
of its products, and average linkage of the anchors instead of a known separation. IFCA runs from
one start, and from several in turn within the same rounds; the one with the lowest training loss
continues.

The paper gives s but no eta. Here ``s * eta`` is 3 over the largest curvature of any client for
s = 5, and eta is the same for other s. All runs are batched (`Counted`), with the Strategies'
results; a single federation (one setting, one seed) runs both phases through Flower's messages.

Metrics, over all settings and, where there are several, per setting (``_C1``, …):
``share_within_5pct_of_oracle`` (from round 100 on at the latest, with k = 3),
``error_over_oracle_max``, ``rounds_median`` and ``rounds_max`` (-1: never), and ``share_METHOD``
and ``rounds_METHOD`` of all that run with this library's Phase 2 (``k_unknown``, ``ifca_same``,
``ifca_restarts``, ``paper_same``, ...); ``share_paper`` (at the end), where the oracle is least
squares with the true labels; ``share_paper_own_oracle`` (at the end, where the oracle is the
paper's: the same Phase 2 from the true models); ``error_oracle`` (least squares), ``error_truth``
(the paper's oracle), ``error_ours`` (the two phases), ``error_paper``, and with the paper's Phase 2
``error_ifca``, ``error_oneshot``, ``error_fedavg``, ``error_ours_phase_1``, ``error_s_1``,
``error_s_10``, ``error_fedprox``; with this library's ``error_ifca_same``, ``error_oneshot_same``,
``error_fedavg_same``, ``error_truth_same`` (medians); ``error_first_ours``,
``error_first_paper``, ``error_first_ifca``, of the first models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from numpy.typing import NDArray

from flwr_perdl.clients import RegressionClient
from flwr_perdl.core.checks import Matrix
from flwr_perdl.core.threads import in_threads
from flwr_perdl.protocol.records import PARTITION_ID, to_arrays
from flwr_perdl.random import DATA, SERVER, spawn
from flwr_perdl.regression import (
    Refinement,
    TwoPhase,
    cluster_anchors,
    model_error,
    moment_step,
    residual_moment,
)
from flwr_perdl.regression.moments import random_models
from flwr_perdl.strategies import FedX
from perdl_experiments.batched_regression import Counted, simulate_rounds
from perdl_experiments.engine import arranged
from perdl_experiments.measures import rounds_to
from perdl_experiments.mixed_regression_data import FEW, SETTINGS, Mixed, oracle, setting
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import (
    Arrays,
    Auto,
    Federate,
    Keep,
    stacked,
    words,
)
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import keep_all

K = 3
#: Within so much of a mark's error, and within so many rounds in all, a run counts as good; so many
#: random starts of IFCA share these rounds.
CLOSE, BUDGET, RESTARTS = 1.05, 100, 5
#: The methods with each Phase 2; the true models as a start are the oracle of the others.
OURS = (
    "ours",
    "k_unknown",
    "paper_same",
    "ifca_same",
    "ifca_restarts",
    "oneshot_same",
    "fedavg_same",
    "truth_same",
)
PAPERS = ("ours_phase_1", "paper", "ifca", "oneshot", "fedavg", "truth")
#: The paper's left panels: its Phase 2 with more or less local work and the same eta.
LEFT = ("s_1", "ours_phase_1", "s_10", "fedprox")
METHODS = tuple(dict.fromkeys((*OURS, *PAPERS, *LEFT)))
#: Which of them the results are about, by variant.
HEADLINES = {"default": "ours", "paper": "paper"}
#: Methods that start from as many models as there are clusters, or from one.
RIVALS = tuple(method for method in METHODS if method.startswith(("ifca", "oneshot", "fedavg")))
_FIGURES = {**{name: f"fig{i}-{name}" for i, name in enumerate(SETTINGS, 1)}, FEW: FEW}
PANELS = {
    "this library's Phase 2": ("ours", "paper_same", "ifca_same", "ifca_restarts", "oneshot_same"),
    "the paper's Phase 2": ("ours_phase_1", "paper", "ifca", "oneshot", "fedavg"),
    "the paper's Phase 2: local steps, eta fixed": LEFT,
}
#: ``s * eta`` times the largest curvature, and the paper's s.
WORK, STEPS = 3.0, 5
#: Iterations of the paper's Phase 1, each a round for the moment and one for the estimates.
ITERATIONS = 5
#: A run ends when no model has moved by more than this share of its length in so many rounds.
_STILL, _ROUNDS_STILL = 1e-13, 3


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of mixed_regression.toml."""

    setting: tuple[str, ...]
    k: int | Auto
    variant: str

    def check(self) -> None:
        """Reject options that do not fit together."""
        if self.k == "auto" and self.variant == "paper":
            raise ValueError("k must be given with variant='paper', got 'auto'.")


class Study(NamedTuple):
    """One setting's results, over all seeds.

    Attributes
    ----------
    name, headline : str
        The setting, and the method that the results are about.
    runs : dict of str to ndarray
        Seeds first: the ``oracle``'s errors, and per METHOD ``METHOD/errors`` by round, NaN before
        there are models, ``METHOD/floats`` up and down until then, per client, and
        ``METHOD/found``, the number of models at the end.
    """

    name: str
    headline: str
    runs: Arrays

    def errors(self, method: str) -> Matrix:
        """Return the errors by round."""
        errors: Matrix = self.runs[f"{method}/errors"]
        return errors

    @property
    def oracle(self) -> Matrix:
        """The errors of least squares with the true labels."""
        return self.runs["oracle"]

    def ratio(self, method: str) -> Matrix:
        """Return the final errors over the oracle's."""
        over: Matrix = self.errors(method)[:, -1] / self.oracle
        return over

    def rounds(self, method: str) -> Matrix:
        """Return the rounds after which a run stays close to the oracle; infinite: never."""
        return _rounds(self.errors(method), self.oracle)

    def own_oracle(self, method: str) -> Matrix:
        """Return the error at which the same Phase 2 ends from the true models."""
        errors: Matrix = self.errors("truth_same" if method in OURS else "truth")[:, -1]
        return errors

    def right(self, method: str) -> NDArray[np.bool_]:
        """Return which seeds end with as many models as there are."""
        exact: NDArray[np.bool_] = self.runs[f"{method}/found"] == K
        return exact

    def good(self, method: str) -> NDArray[np.bool_]:
        """Return which seeds end close, in time, and with as many models as there are."""
        close = self.rounds(method) <= BUDGET
        return close if method in RIVALS else close & self.right(method)


def _rounds(errors: Matrix, marks: Matrix) -> Matrix:
    """Return the rounds after which runs stay close to their marks; infinite: never."""
    near = errors <= CLOSE * marks[:, None]
    return np.array([rounds_to(row, True) for row in near])


def client(context: Context, config: Config) -> RegressionClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    data, i = _data(config.setting[0], config.seed), int(context.node_config[PARTITION_ID])
    # drawn data need no protection, and the batched runs withhold nothing
    most = max(config.rounds, 1)
    return RegressionClient(data.X[i], data.y[i], context, min_support=0, max_requests=most)


def strategy(config: Config, **options: Any) -> FedX:
    """Return the two-phase strategy; ``options`` are the server's own."""
    settings = vars(_settings(config, _data(config.setting[0], config.seed)))
    return FedX(**settings, **arranged({"fraction_evaluate": 0.0, **options}))


def federations(config: Config) -> list[Config]:
    """Return the config of the one federation, or nothing where there are many to study."""
    names, clients = config.setting, config.clients
    if len(names) * config.seeds > 1:
        if clients:
            raise ValueError(f"clients must be left to the settings, got {clients}.")
        return []
    own = len(_data(names[0], config.seed).X)
    if clients not in (0, own):
        raise ValueError(f"clients must be {own} in setting {names[0]}, got {clients}.")
    return [replace(config, clients=own)]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run all methods in every setting and with every seed, and compare them with the oracle."""
    single = federations(config)
    parts = {
        f"{name}-seed-{seed}": partial(_one_seed, name, seed, config)
        for name in config.setting
        for seed in config.each_seed
    }
    kept = iter(keep_all(keep, parts))
    headline = HEADLINES[config.variant]
    studies = [
        Study(name, headline, stacked([next(kept) for _ in config.each_seed]))
        for name in config.setting
    ]
    learned: dict[str, Matrix] = {}
    if single:
        errors, models = _federated(single[0], federate)
        studies[0].errors(headline)[0] = errors
        studies[0].runs[f"{headline}/found"][0] = len(models)
        learned["models"] = models
    if any(np.isnan(study.errors(headline)[:, -1]).any() for study in studies):
        raise ValueError(f"rounds must be more than Phase 1 takes, got {config.rounds}.")
    ends = [study.runs[f"{headline}/floats"][:, -1] for study in studies]
    groups = {"": studies}
    if len(studies) > 1:
        groups |= {study.name: [study] for study in studies}
    return Outcome(
        records=[
            *(record for name, them in groups.items() for record in _summary(name, them)),
            *(record for study in studies for record in _records(study)),
        ],
        curves={
            f"error_{study.name}_{method}": _median(study.errors(method))
            for study in studies
            for method in METHODS
        },
        arrays=learned
        | {
            f"{study.name}_{method}": study.errors(method)
            for study in studies
            for method in METHODS
        },
        figures={_FIGURES[one.name]: _figure(one) for one in studies},
        rounds=config.rounds,
        floats_up=float(np.mean([end[:, 0].mean() for end in ends])),
        floats_down=float(np.mean([end[:, 1].mean() for end in ends])),
        facts={
            "n_clusters": K,
            "federated": bool(single),
            "headline": words("mixed_regression")[headline],
        },
    )


class Way(NamedTuple):
    """A method: settings, the models that Phase 2 starts from, and what it took to find these.

    ``spent`` has values sent and received in every round before.
    """

    settings: TwoPhase
    start: Matrix | None = None
    spent: Sequence[tuple[float, float]] = ()


def _one_seed(name: str, seed: int, config: Config) -> Arrays:
    """Return all methods' errors and costs with one seed."""
    data = _data(name, seed)
    clients = Counted(data.X, data.y)

    def learn(given: tuple[str, Way]) -> Arrays:
        method, way = given
        found = _learned(copy(clients), data, way, config.rounds, seed)
        return {f"{method}/{part}": array for part, array in found.items()}

    kept = {"oracle": np.array(model_error(oracle(data), data.theta))}
    for found in in_threads(learn, _methods(config, clients, data, seed).items()):
        kept.update(found)
    return kept


def _learned(clients: Counted, data: Mixed, way: Way, n_rounds: int, seed: int) -> Arrays:
    """Return a method's errors and costs by round; once its models stand still, they are kept."""
    clients.floats, still, spent = list(way.spent[:n_rounds]), 0, len(way.spent)
    errors = np.full(n_rounds, np.nan)
    before: Matrix = np.empty((0, 0))
    centers, left = before, n_rounds - spent
    given = clients, way.settings, left
    states = simulate_rounds(*given, centers=way.start, seed=seed) if left > 0 else ()
    for round_, state in enumerate(states, spent):
        centers = state.centers
        if len(centers):
            errors[round_:] = model_error(centers, data.theta)
            moved = centers.shape != before.shape or (
                np.abs(centers - before).max() > _STILL * np.abs(centers).max()
            )
            still, before = 0 if moved else still + 1, centers
        if still == _ROUNDS_STILL:
            clients.floats += [clients.floats[-1]] * (n_rounds - 1 - round_)
            break
    return {
        "errors": errors,
        "floats": np.cumsum(clients.floats, axis=0),
        "found": np.array(len(centers)),
    }


def paper_start(data: Mixed, rng: np.random.Generator) -> tuple[Matrix, list[tuple[float, float]]]:
    """Return the models that the paper's Phase 1 finds at its best, and what it costs.

    Every anchor's subspace is that of its whole moment, from two halves of every client's points.

    Parameters
    ----------
    data : Mixed
        Anchors are drawn among the clients with the most points.
    rng : numpy.random.Generator
        Draws them, and the start.
    """
    sizes, d = np.array([len(y) for y in data.y]), data.theta.shape[1]
    n_anchors = round(3 * K * np.log(K))
    anchors = rng.choice(np.flatnonzero(sizes == sizes.max()), n_anchors, replace=False)
    thetas = np.repeat(random_models(1, d, rng), n_anchors, axis=0)
    whole = np.broadcast_to(np.eye(d), (n_anchors, d, d))
    for _ in range(ITERATIONS):
        product = partial(residual_moment, thetas=thetas, Q=whole, estimate="halves")
        moments = sum(map(product, data.X, data.y))
        U = np.linalg.svd(moments)[0][:, :, :K]
        steps = zip(anchors, thetas, U, strict=True)
        thetas = np.stack(
            [moment_step(data.X[i], data.y[i], own, V, step="paper") for i, own, V in steps]
        )
    shared, own = n_anchors * d, n_anchors / len(sizes) * (K + 1) * d
    spent = [(float(n_anchors * d**2), float(shared)), (own / (K + 1), own)] * ITERATIONS
    return cluster_anchors(thetas, K).centers, spent


def _restarts(
    clients: Counted, data: Mixed, phase_2: Refinement, starts: Sequence[Matrix], seed: int
) -> Way:
    """Return IFCA from the start whose models fit best after an equal share of the rounds."""
    settings, each, losses = TwoPhase(K, phase_2=phase_2), BUDGET // len(starts), []
    for start in starts:
        *_, state = simulate_rounds(clients, settings, each, centers=start, seed=seed)
        pairs = zip(data.X, data.y, strict=True)
        errors = [np.sum((y[:, None] - X @ state.centers.T) ** 2, axis=0).min() for X, y in pairs]
        losses.append(float(sum(errors)))
    rounds = BUDGET - each
    return Way(settings, starts[int(np.argmin(losses))], clients.floats[:rounds])


def _methods(config: Config, clients: Counted, data: Mixed, seed: int) -> dict[str, Way]:
    """Return every method, those that take longest first."""
    paper, truth = _paper(data).phase_2, data.theta
    alike = Refinement(check_every=0)  # checks of the models would run Phase 1
    rng = spawn(seed, SERVER, 1)
    models = [random_models(K, truth.shape[1], rng) for _ in range(RESTARTS)]
    found, spent = paper_start(data, rng)
    left: dict[str, dict[str, Any]] = {
        "ours_phase_1": {},
        "s_1": {"n_steps": 1},
        "s_10": {"n_steps": 2 * STEPS},
        "fedprox": {"n_steps": 1, "local": "fedprox"},
    }
    ways = {n: Way(TwoPhase(K, phase_2=replace(paper, **more))) for n, more in left.items()}
    for same, phase_2 in {"": paper, "_same": alike}.items():
        settings = TwoPhase(K, phase_2=phase_2)
        ways |= {
            f"paper{same}": Way(settings, found, spent),
            f"oneshot{same}": Way(TwoPhase(K, phase_2=phase_2, start="one-shot")),
            f"ifca{same}": Way(settings, models[0]),
            f"fedavg{same}": Way(TwoPhase(1, phase_2=phase_2), models[0][:1]),
            f"truth{same}": Way(settings, truth),
        }
    ways["ifca_restarts"] = _restarts(copy(clients), data, alike, models, seed)
    ways["ours"] = Way(_settings(replace(config, variant="default"), data))
    return ways | {"k_unknown": Way(TwoPhase())}


def _settings(config: Config, data: Mixed) -> TwoPhase:
    """Return the two-phase method's settings."""
    if config.variant == "default":
        return TwoPhase(config.k)
    return replace(_paper(data), n_clusters=config.k)


def _paper(data: Mixed) -> TwoPhase:
    """Return the paper's own variant; its step follows the clients' largest curvature."""
    papers = TwoPhase.paper(K)
    largest = max(float(np.linalg.norm(X, 2)) ** 2 / len(X) for X in data.X)
    step_size = WORK / STEPS / largest
    return replace(papers, phase_2=replace(papers.phase_2, work=1.0, step_size=step_size))


def _federated(config: Config, federate: Federate) -> tuple[Matrix, Matrix]:
    """Return the two-phase method's errors through Flower's messages, and its models."""
    theta = _data(config.setting[0], config.seed).theta
    errors = np.full(config.rounds, np.nan)

    def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        models = to_arrays(arrays)
        if not models or not round_:
            return None
        errors[round_ - 1] = model_error(models[0], theta)
        return MetricRecord({"error": float(errors[round_ - 1])})

    federated = federate(config, evaluate_fn=evaluate)
    return errors, federated.arrays[0] if federated.arrays else np.empty((0, theta.shape[1]))


@lru_cache(maxsize=2)
def _data(name: str, seed: int) -> Mixed:
    return setting(name, spawn(seed, DATA))


# The report ----------------------------------------------------------------------------------


def _summary(name: str, studies: Sequence[Study]) -> Iterator[Record]:
    """Yield the results over several settings, or of one."""

    def over(function: Callable[[Study], NDArray[Any]]) -> Matrix:
        return np.concatenate([function(study) for study in studies])

    at, headline = {"setting": name}, studies[0].headline
    yield Record("ratio", over(lambda study: study.ratio(headline)), "ours", at)
    yield Record("error", over(lambda study: study.oracle), "oracle", at)
    own = over(lambda study: study.errors("paper")[:, -1] <= CLOSE * study.own_oracle("paper"))
    yield Record("good", own, "paper_own_oracle", at)
    yield Record("good", over(lambda study: study.ratio("paper") <= CLOSE), "paper", at)
    for key in METHODS:
        method = headline if key == "ours" else key
        final = np.concatenate([study.errors(method)[:, -1] for study in studies])
        if not np.isnan(final).any():
            yield Record("error", final, key, at)
            yield Record("first", over(partial(_first, method)), key, at)
        if key in OURS:
            good = np.concatenate([study.good(method) for study in studies])
            rounds = np.concatenate([study.rounds(method) for study in studies])
            yield Record("good", good, key, at)
            yield Record("rounds", rounds, key, at, "rounds")


def _first(method: str, study: Study) -> Matrix:
    """Return the errors of a method's first models."""
    return np.array([row[~np.isnan(row)][0] for row in study.errors(method)])


def _records(study: Study) -> Iterator[Record]:
    """Yield what every method comes to in a setting, for its two tables, the best first."""

    def place(method: str) -> tuple[float, float]:
        ratio = float(np.median(study.ratio(method)))
        return (np.inf if np.isnan(ratio) else round(ratio, 2)), float(
            np.median(study.rounds(method))
        )

    for kind, methods in {"ours": OURS, "paper": (*PAPERS, "s_1", "s_10", "fedprox")}.items():
        for method in sorted(methods, key=place):
            at = {"table": f"{study.name}-{kind}"}
            ratio, own = study.ratio(method), study.own_oracle(method)
            rounds = _rounds(study.errors(method), own)
            if not np.isnan(ratio).any():
                yield Record("over_oracle", ratio, method, at)
            for mark, marks in {"close": study.oracle, "close_own": own}.items():
                close = study.errors(method)[:, -1] <= CLOSE * marks
                yield Record(mark, f"{close.sum()} of {len(close)}", method, at)
            yield Record("models", study.right(method), method, at)
            median = np.median(rounds)
            if np.isfinite(median):
                yield Record("until", float(median), method, at, "rounds")
                costs = study.runs[f"{method}/floats"][:, int(np.ceil(median)) - 1].mean(axis=0)
                for way, cost in zip(("up", "down"), costs, strict=True):
                    yield Record(way, float(cost), method, at)


def _figure(study: Study) -> Any:
    from perdl_experiments import plots  # an extra: clients must not need it

    names, level = words("mixed_regression", "curve"), float(np.median(study.oracle))
    drawn = [
        plots.Panel(
            "communication round",
            "error of the models",
            range(1, 1 + study.errors("ours").shape[1]),
            {names[method]: study.errors(method) for method in methods},
            title=title,
            log=True,
            levels={"least squares": level},
            limits=(level / 2, None),
        )
        for title, methods in PANELS.items()
    ]
    return plots.panels(drawn, height=2.7)


def _median(errors: Matrix) -> list[float]:
    """Return the medians over seeds from the round on in which all have models."""
    median: list[float] = np.median(errors[:, ~np.isnan(errors).any(axis=0)], axis=0).tolist()
    return median
