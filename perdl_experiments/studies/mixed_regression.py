"""Clustered mixed regression: Appendix C and Fig. 1-3, both panels.

P2 = Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression", NeurIPS 2022.
What it is compared with has the paper's Phase 2; IFCA is also shown with this library's. All run
batched (`flwr_perdl.regression.simulate`), which gives the Strategies' results; where there is one
federation only (one setting, one seed), the two phases run through Flower's messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix, check_choice, check_count
from flwr_perdl._parallel import in_threads
from flwr_perdl._random import DATA, SERVER, spawn
from flwr_perdl._records import PARTITION_ID, to_arrays
from flwr_perdl.clients.regression import RegressionClient
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
from perdl_experiments.engine import Config, arranged
from perdl_experiments.mixed_regression_data import SETTINGS, Mixed, oracle, setting
from perdl_experiments.outcome import Outcome, Picture, Table
from perdl_experiments.studies._experiment import Federate, Keep, Value, seeds_of
from perdl_experiments.studies._parts import keep_all
from perdl_experiments.words import plural

NAME = "mixed-regression"
ABOUT = "FedMD and FedX find the models of clustered clients, against FedAvg, IFCA and one-shot"
SOURCE = "Su, Xu, Yang, NeurIPS 2022, Appendix C and Fig. 1-3"
DEFAULTS: dict[str, Value] = {
    "clients": 0,
    "rounds": 400,
    "seed": 0,
    "setting": ",".join(SETTINGS),
    "seeds": 20,
    "k": "3",
    "variant": "default",
}
HELP: dict[str, str] = {
    "clients": "number of clients; 0: the setting's",
    "setting": "settings of the paper: `C1`, `C2`, `C3`, or some of them",
    "seeds": "per setting",
    "k": "number of models: `3`, another number, or `auto`",
    "variant": "parameters: `default`, or the `paper`'s",
}
FIGURES: tuple[str, ...] = ("fig1-C1.png", "fig2-C2.png", "fig3-C3.png")
ERROR = "error"

K = 3
#: Within so much of the oracle's error, and within so many rounds in all, a run counts as good.
CLOSE, BUDGET = 1.05, 100
VARIANTS = ("default", "paper")
_TITLES = {
    "C1": "balanced clients and clusters",
    "C2": "unbalanced clients, balanced clusters",
    "C3": "unbalanced clients and clusters",
}
#: The two-phase method in the left panel; the first is the headline.
LEFT: dict[str, dict[str, Any]] = {
    "s = 5": {"n_steps": 5},
    "s = 1": {"n_steps": 1},
    "s = 10": {"n_steps": 10},
    "FedProx": {"local": "fedprox"},
}
HEADLINE = next(iter(LEFT))
RIGHT = ("FedAvg", "IFCA", "one-shot", "from the truth")
#: Further rows of the table.
ALSO = ("k unknown", "the paper's variant", "a random start")
METHODS = (*LEFT, *RIGHT, *ALSO)


class Study(NamedTuple):
    """One setting's results, over all seeds."""

    name: str
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
    data, i = _data(_names(config)[0], int(config["seed"])), int(context.node_config[PARTITION_ID])
    return RegressionClient(data.X[i], data.y[i], context)


def strategy(config: Config, **options: Any) -> FedX:
    """Return the two-phase strategy; ``options`` are the server's own."""
    settings = vars(_settings(config, _data(_names(config)[0], int(config["seed"]))))
    return FedX(**settings, **arranged({"fraction_evaluate": 0.0, **options}))


def federations(config: Config) -> list[Config]:
    """Return the config of the one federation, or nothing where there are many to study."""
    (names, seeds), clients = (_names(config), seeds_of(config)), int(config["clients"])
    if len(names) * len(seeds) > 1:
        if clients:
            raise ValueError(f"clients must be left to the settings, got {clients}.")
        return []
    own = len(_data(names[0], seeds[0]).X)
    if clients not in (0, own):
        raise ValueError(f"clients must be {own} in setting {names[0]}, got {clients}.")
    return [{**config, "clients": own}]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run all methods in every setting and with every seed, and compare them with the oracle."""
    single = federations(config)
    names, seeds = _names(config), seeds_of(config)
    parts = {
        f"{name}-seed-{seed}": partial(_one_seed, name, seed, config)
        for name in names
        for seed in seeds
    }
    kept = iter(keep_all(keep, parts))
    studies = [_study(name, [next(kept) for _ in seeds]) for name in names]
    learned: dict[str, Matrix] = {}
    if single:
        errors, models = _federated(single[0], federate)
        studies[0].errors[HEADLINE][0], studies[0].found[HEADLINE][0] = errors, len(models)
        learned["models"] = models
    if any(np.isnan(study.errors[HEADLINE][:, -1]).any() for study in studies):
        raise ValueError(f"rounds must be more than Phase 1 takes, got {config['rounds']}.")
    ends = [study.floats[HEADLINE][:, -1] for study in studies]
    return Outcome(
        metrics=_metrics(studies),
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
        tables=[_table(study) for study in studies],
        pictures=[_picture(study) for study in studies],
        notes=_notes(config, bool(single)),
        rounds=int(config["rounds"]),
        floats_up=float(np.mean([end[:, 0].mean() for end in ends])),
        floats_down=float(np.mean([end[:, 1].mean() for end in ends])),
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


def _one_seed(name: str, seed: int, config: Config) -> dict[str, NDArray[Any]]:
    """Return all methods' errors and costs with one seed."""
    data, n_rounds = _data(name, seed), int(config["rounds"])
    clients = _Counted(data)

    def learn(given: tuple[str, TwoPhase, Matrix | None]) -> dict[str, NDArray[Any]]:
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
    variant = check_choice("variant", config["variant"], VARIANTS)
    k: int | str = str(config["k"])
    if k != "auto":
        try:
            k = check_count("k", int(k), 1)
        except ValueError:
            raise ValueError(f"k must be a positive integer or 'auto', got {k!r}.") from None
    if variant == "default":
        return TwoPhase(k)
    if k == "auto":
        raise ValueError("k must be given with variant='paper', got 'auto'.")
    return replace(_paper(data), n_clusters=k)


def _paper(data: Mixed) -> TwoPhase:
    """Return the paper's own variant, which knows how far apart the true models are."""
    apart = np.linalg.norm(data.theta[:, None] - data.theta, axis=2)
    return TwoPhase.paper(K, float(apart[np.triu_indices(K, 1)].min()))


def _federated(config: Config, federate: Federate) -> tuple[Matrix, Matrix]:
    """Return the two-phase method's errors through Flower's messages, and its models."""
    theta = _data(_names(config)[0], int(config["seed"])).theta
    errors = np.full(int(config["rounds"]), np.nan)

    def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        models = to_arrays(arrays)
        if not models or not round_:
            return None
        errors[round_ - 1] = model_error(models[0], theta)
        return MetricRecord({ERROR: float(errors[round_ - 1])})

    federated = federate(config, evaluate_fn=evaluate)
    return errors, federated.arrays[0] if federated.arrays else np.empty((0, theta.shape[1]))


@lru_cache(maxsize=2)
def _data(name: str, seed: int) -> Mixed:
    return setting(name, spawn(seed, DATA))


def _names(config: Config) -> list[str]:
    return [check_choice("setting", name, SETTINGS) for name in str(config["setting"]).split(",")]


def _study(name: str, kept: Sequence[Mapping[str, NDArray[Any]]]) -> Study:
    def stacked(part: str) -> dict[str, NDArray[Any]]:
        return {method: np.stack([one[f"{method}/{part}"] for one in kept]) for method in METHODS}

    oracle = np.array([float(one["oracle"]) for one in kept])
    return Study(name, stacked("errors"), stacked("floats"), stacked("found"), oracle)


def _metrics(studies: Sequence[Study]) -> dict[str, float]:
    """Return the stable figures over all settings, and the same per setting."""
    metrics = _figures(studies)
    if len(studies) > 1:
        for study in studies:
            metrics |= {f"{name}_{study.name}": v for name, v in _figures([study]).items()}
    return metrics


def _figures(studies: Sequence[Study]) -> dict[str, float]:
    def over(function: Any) -> Matrix:
        return np.concatenate([function(study) for study in studies])

    def finite(rounds: Matrix) -> float:
        return float(np.median(rounds)) if np.isfinite(np.median(rounds)) else -1.0

    figures = {
        "share_within_5pct_of_oracle": float(np.mean(over(lambda s: s.good(HEADLINE)))),
        "error_over_oracle_max": float(over(lambda s: s.ratio(HEADLINE)).max()),
        "rounds_median": finite(over(lambda s: s.rounds(HEADLINE))),
        "rounds_max": finite(over(lambda s: s.rounds(HEADLINE)).max(keepdims=True)),
        "share_k_unknown": float(np.mean(over(lambda s: s.good("k unknown")))),
        "share_paper": float(np.mean(over(lambda s: s.ratio("the paper's variant") <= CLOSE))),
        "error_oracle": float(np.median(over(lambda s: s.oracle))),
    }
    methods = {"ours": HEADLINE, "ifca": "IFCA", "oneshot": "one-shot", "fedavg": "FedAvg"}
    for name, method in methods.items():
        final = np.concatenate([study.errors[method][:, -1] for study in studies])
        figures[f"error_{name}"] = float(np.median(final))
    return figures


def _table(study: Study) -> Table:
    """Return the table of final errors, rounds and floats, over seeds."""
    rows = []
    for method in METHODS:
        ratio, rounds = study.ratio(method), study.rounds(method)
        close = np.isfinite(rounds)
        median = np.median(rounds)
        up, down = "-", "-"
        if np.isfinite(median):
            costs = study.floats[method][:, int(np.ceil(median)) - 1].mean(axis=0)
            up, down = (f"{cost:,.0f}" for cost in costs)
        rows.append(
            [
                _title(method),
                *("-" if np.isnan(x) else f"{x:.3f}" for x in (np.median(ratio), ratio.max())),
                f"{close.sum()} of {len(close)}",
                f"{median:.0f}" if np.isfinite(median) else "-",
                up,
                down,
                f"{np.mean(study.found[method] == K):.0%}",
            ]
        )
    return Table(
        f"{study.name}: {_TITLES[study.name]}",
        "Error of the models, the largest of the clusters', over that of least squares with the "
        "true labels; seeds that end within 5 % of it; after how many rounds, Phase 1 included, "
        "they stay there (median over all seeds; -: most never do); floats that a client has sent "
        f"and received by then; seeds with exactly {K} models.",
        ["", "median", "largest", "within 5 %", "rounds", "up", "down", f"k = {K}"],
        rows,
    )


def _title(method: str) -> str:
    if method == "a random start":
        return "IFCA with this library's Phase 2"
    return f"two phases, {method}" if method not in RIGHT else method


def _picture(study: Study) -> Picture:
    from perdl_experiments import regression_plots  # an extra: clients must not need it

    number = SETTINGS.index(study.name) + 1
    left = {name: study.errors[name] for name in LEFT}
    right = {"two phases": study.errors[HEADLINE]} | {name: study.errors[name] for name in RIGHT}
    return Picture(
        f"fig{number}-{study.name}",
        f"Fig. {number}: {_TITLES[study.name]}",
        "Error against communication rounds, Phase 1 included: median and range over seeds. Left: "
        "the two phases with s local steps or the proximal one; right: against other starts. "
        "Dashed: least squares with the true labels, median.",
        regression_plots.panels(
            {"two phases": left, "against the others": right},
            level=("oracle", float(np.median(study.oracle))),
            x="communication round",
            y="largest error of a model",
        ),
    )


def _notes(config: Config, federated: bool) -> list[str]:
    notes = [
        f"{plural(config['seeds'], 'seed')}, {plural(config['rounds'], 'round')}, k = "
        f"{config['k']}, variant "
        f"{config['variant']}.",
        "FedAvg, IFCA (one random start), one-shot clustering and the start from the truth have "
        "the paper's Phase 2 with s = 5: its step size, which leaves a bias, and its division by "
        "all points.",
        "The paper's variant knows the true separation of the models; it is given k.",
        "share_within_5pct_of_oracle counts runs that, from round 100 on at the latest, stay "
        "within 5 % of the oracle and end with the right number of models.",
    ]
    if federated:
        notes.append("The two phases with s = 5 ran through Flower's messages, all else batched.")
    return notes


def _key(method: str) -> str:
    kept = "".join(letter if letter.isalnum() else " " for letter in method.lower())
    return "_".join(kept.split())


def _median(errors: Matrix) -> list[float]:
    """Return the medians over seeds from the round on in which all have models."""
    median: list[float] = np.median(errors[:, ~np.isnan(errors).any(axis=0)], axis=0).tolist()
    return median
