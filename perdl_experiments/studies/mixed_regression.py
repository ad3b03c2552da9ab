"""Clustered mixed regression: Appendix C and Fig. 1-3, both panels.

P2 = Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022.
What it is compared with has the paper's Phase 2; IFCA is also shown with this library's. All run
batched (`flwr_perdl.regression.simulate`), which gives the Strategies' results; where there is one
federation only (one setting, one seed), the two phases run through Flower's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from numpy.typing import NDArray

from flwr_perdl.checks import Matrix
from flwr_perdl.clients.regression import RegressionClient
from flwr_perdl.random import DATA, SERVER, spawn
from flwr_perdl.records import PARTITION_ID, to_arrays
from flwr_perdl.regression import (
    Answers,
    Ask,
    Clients,
    OneShot,
    Refinement,
    TwoPhase,
    model_error,
    simulate,
)
from flwr_perdl.strategies.mixed_regression import FedX, random_models
from flwr_perdl.threads import in_threads
from perdl_experiments.engine import arranged
from perdl_experiments.mixed_regression_data import SETTINGS, Mixed, oracle, setting
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Auto, Federate, Keep
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import keep_all

K = 3
#: Within so much of the oracle's error, and within so many rounds in all, a run counts as good.
CLOSE, BUDGET = 1.05, 100
#: The two-phase method in the left panel.
LEFT: dict[str, dict[str, Any]] = {
    "s = 1": {"n_steps": 1},
    "s = 5": {"n_steps": 5},
    "s = 10": {"n_steps": 10},
    "FedProx": {"local": "fedprox", "n_steps": 1},
}
#: Which of them the results are about, by variant.
HEADLINES = {"default": "s = 1", "paper": "s = 5"}
RIGHT = ("FedAvg", "IFCA", "one-shot", "from the truth")
#: Further rows of the table.
ALSO = ("k unknown", "the paper's variant", "a random start")
METHODS = (*LEFT, *RIGHT, *ALSO)
#: How a reader sees the methods.
_TITLES = {
    **{method: f"two phases, {method}" for method in METHODS if method not in RIGHT},
    "a random start": "IFCA with this library's Phase 2",
}


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
    """One setting's results, over all seeds."""

    name: str
    #: The method that the results are about.
    headline: str
    #: Errors per method, (n_seeds, n_rounds), NaN before there are models.
    errors: Mapping[str, Matrix]
    #: Floats up and down until then, per client, as the errors.
    floats: Mapping[str, Matrix]
    #: Numbers of models at the end, per method, (n_seeds,).
    found: Mapping[str, NDArray[np.intp]]
    #: Error of least squares with the true labels, (n_seeds,).
    oracle: Matrix

    def ratio(self, method: str) -> Matrix:
        """Return the final errors over the oracle's."""
        over: Matrix = self.errors[method][:, -1] / self.oracle
        return over

    def rounds(self, method: str) -> Matrix:
        """Return the rounds after which a run stays close to the oracle; infinite: never."""
        near = self.errors[method] <= CLOSE * self.oracle[:, None]
        last_far = near.shape[1] - np.argmin(near[:, ::-1], axis=1)
        rounds = np.where(near.all(axis=1), 1.0, last_far + 1.0)
        return np.where(near[:, -1], rounds, np.inf)

    def good(self, method: str) -> NDArray[np.bool_]:
        """Return which seeds end close, in time, and with as many models as there are."""
        right = np.ones_like(self.oracle, dtype=bool)
        if method not in RIGHT:
            right = self.found[method] == K
        return right & (self.rounds(method) <= BUDGET)


def client(context: Context, config: Config) -> RegressionClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    data, i = _data(config.setting[0], config.seed), int(context.node_config[PARTITION_ID])
    # drawn data need no protection, and the batched runs withhold nothing
    return RegressionClient(data.X[i], data.y[i], context, min_support=0)


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
        _study(name, headline, [next(kept) for _ in config.each_seed]) for name in config.setting
    ]
    learned: dict[str, Matrix] = {}
    if single:
        errors, models = _federated(single[0], federate)
        studies[0].errors[headline][0], studies[0].found[headline][0] = errors, len(models)
        learned["models"] = models
    if any(np.isnan(study.errors[headline][:, -1]).any() for study in studies):
        raise ValueError(f"rounds must be more than Phase 1 takes, got {config.rounds}.")
    ends = [study.floats[headline][:, -1] for study in studies]
    groups = {"": studies}
    if len(studies) > 1:
        groups |= {study.name: [study] for study in studies}
    return Outcome(
        records=[
            *(record for name, them in groups.items() for record in _summary(name, them)),
            *(record for study in studies for record in _records(study)),
        ],
        curves={
            f"error_{study.name}_{_key(method)}": _median(study.errors[method])
            for study in studies
            for method in METHODS
        },
        arrays=learned
        | {
            f"{study.name}_{_key(method)}": study.errors[method]
            for study in studies
            for method in METHODS
        },
        figures={f"fig{SETTINGS.index(one.name) + 1}-{one.name}": _figure(one) for one in studies},
        rounds=config.rounds,
        floats_up=float(np.mean([end[:, 0].mean() for end in ends])),
        floats_down=float(np.mean([end[:, 1].mean() for end in ends])),
        facts={
            "n_clusters": K,
            "federated": bool(single),
            "headline": headline,
            "words": {"method": _TITLES},
        },
    )


class _Counted(Clients):
    """Clients that count the floats that each of them sends and receives, the mean of all."""

    def __init__(self, data: Mixed) -> None:
        super().__init__(data.X, data.y)
        self.floats: list[tuple[float, float]] = []

    def answer(self, ask: Ask, present: NDArray[np.bool_] | None = None) -> Answers:
        """Return the answers, and note what they cost."""
        answers = super().answer(ask, present)
        shared = sum(array.size for array in ask.arrays) * (len(self) - len(ask.own))
        own = sum(array.size for arrays in ask.own.values() for array in arrays)
        self.floats.append((float(answers.stack[0].size), (shared + own) / len(self)))
        return answers


def _one_seed(name: str, seed: int, config: Config) -> Arrays:
    """Return all methods' errors and costs with one seed."""
    data, n_rounds = _data(name, seed), config.rounds
    clients = _Counted(data)

    def learn(given: tuple[str, TwoPhase, Matrix | None]) -> Arrays:
        method, settings, start = given
        own, errors = copy(clients), np.full(n_rounds, np.nan)
        own.floats = []
        ran = simulate(own, settings, n_rounds, centers=start, seed=seed)
        for round_, centers in ran.history:
            errors[round_ - 1] = model_error(centers, data.theta)
        return {
            f"{method}/errors": errors,
            f"{method}/floats": np.cumsum(own.floats, axis=0),
            f"{method}/found": np.array(len(ran.state.centers)),
        }

    kept = {"oracle": np.array(model_error(oracle(data), data.theta))}
    for found in in_threads(learn, _methods(config, data, seed)):
        kept.update(found)
    return kept


def _methods(
    config: Config, data: Mixed, seed: int
) -> Iterator[tuple[str, TwoPhase, Matrix | None]]:
    """Yield every method's name, settings and start, those that take longest first."""
    settings, paper = _settings(config, data), _paper(data)
    yield "the paper's variant", paper, None
    yield "one-shot", replace(paper, phase_1=OneShot()), None
    for name, options in LEFT.items():
        yield name, replace(settings, phase_2=replace(settings.phase_2, **options)), None
    models = random_models(K, data.theta.shape[1], spawn(seed, SERVER, 1))
    yield "FedAvg", replace(paper, n_clusters=1), models[:1]
    yield "IFCA", paper, models
    yield "from the truth", paper, data.theta
    yield "k unknown", TwoPhase(), None
    unchecked = TwoPhase(K, phase_2=Refinement(check_every=0))
    yield "a random start", unchecked, models


def _settings(config: Config, data: Mixed) -> TwoPhase:
    """Return the two-phase method's settings."""
    if config.variant == "default":
        return TwoPhase(config.k)
    return replace(_paper(data), n_clusters=config.k)


def _paper(data: Mixed) -> TwoPhase:
    """Return the paper's own variant, which knows how far apart the true models are."""
    apart = np.linalg.norm(data.theta[:, None] - data.theta, axis=2)
    return TwoPhase.paper(K, float(apart[np.triu_indices(K, 1)].min()))


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


def _study(name: str, headline: str, kept: Sequence[Mapping[str, NDArray[Any]]]) -> Study:
    def stacked(part: str) -> dict[str, NDArray[Any]]:
        return {method: np.stack([one[f"{method}/{part}"] for one in kept]) for method in METHODS}

    oracle = np.array([float(one["oracle"]) for one in kept])
    return Study(name, headline, stacked("errors"), stacked("floats"), stacked("found"), oracle)


# The report ----------------------------------------------------------------------------------


def _summary(name: str, studies: Sequence[Study]) -> Iterator[Record]:
    """Yield the results over several settings, or of one."""

    def over(function: Callable[[Study], NDArray[Any]]) -> Matrix:
        return np.concatenate([function(study) for study in studies])

    at = {"setting": name}
    rounds = over(lambda study: study.rounds(study.headline))
    yield Record("good", over(lambda study: study.good(study.headline)), "ours", at)
    yield Record("ratio", over(lambda study: study.ratio(study.headline)), "ours", at)
    yield Record("rounds", rounds, "ours", at, "rounds")
    yield Record("good", over(lambda study: study.good("k unknown")), "k_unknown", at)
    close = over(lambda study: study.ratio("the paper's variant") <= CLOSE)
    yield Record("good", close, "paper", at)
    yield Record("error", over(lambda study: study.oracle), "oracle", at)
    ours = studies[0].headline
    methods = {"ours": ours, "ifca": "IFCA", "oneshot": "one-shot", "fedavg": "FedAvg"}
    for key, method in methods.items():
        final = np.concatenate([study.errors[method][:, -1] for study in studies])
        yield Record("error", final, key, at)


def _records(study: Study) -> Iterator[Record]:
    """Yield what every method comes to in a setting, for its table."""
    for method in METHODS:
        at = {"table": study.name}
        ratio, rounds = study.ratio(method), study.rounds(method)
        if not np.isnan(ratio).any():
            yield Record("over_oracle", ratio, method, at)
        close, median = np.isfinite(rounds), np.median(rounds)
        yield Record("close", f"{close.sum()} of {len(close)}", method, at)
        yield Record("models", study.found[method] == K, method, at)
        if np.isfinite(median):
            yield Record("until", float(median), method, at, "rounds")
            costs = study.floats[method][:, int(np.ceil(median)) - 1].mean(axis=0)
            for way, cost in zip(("up", "down"), costs, strict=True):
                yield Record(way, float(cost), method, at)


def _figure(study: Study) -> Any:
    from perdl_experiments import regression_plots  # an extra: clients must not need it

    left = {name: study.errors[name] for name in LEFT}
    right = {"two phases": study.errors[study.headline]} | {
        name: study.errors[name] for name in RIGHT
    }
    return regression_plots.panels(
        {"two phases": left, "against the others": right},
        level=("oracle", float(np.median(study.oracle))),
        x="communication round",
        y="largest error of a model",
    )


def _key(method: str) -> str:
    kept = "".join(letter if letter.isalnum() else " " for letter in method.lower())
    return "_".join(kept.split())


def _median(errors: Matrix) -> list[float]:
    """Return the medians over seeds from the round on in which all have models."""
    median: list[float] = np.median(errors[:, ~np.isnan(errors).any(axis=0)], axis=0).tolist()
    return median
