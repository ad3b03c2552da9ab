"""When are all clusters found? FedMD and FedX over separation, noise and points per client.

A map that P2 (Su, Xu, Yang, "Global Convergence of Federated Learning for Mixed Regression",
NeurIPS 2022) does not have. The models of `K` clusters have a part in common, of norm one, and lie
``separation`` apart: ``theta_j = c + separation / sqrt(2) u_j``, c and u_j ``N(0, I) / sqrt(d)``.
(Without a common part only the ratio of separation to noise would matter.) All clusters are found
where there are `K` models and each is closer to its true one than half the least distance between
true ones. Runs are batched (`flwr_perdl.regression.simulate`), which gives the Strategies' results.

============  ===================================================================================
method        what it is
============  ===================================================================================
``k_known``   both phases, the number of models given
``k_auto``    both phases, which find it
``random``    Phase 2 alone from random models: IFCA with this library's Phase 2
``truth``     Phase 2 from the true models: the mark for all others
============  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix, check_count
from flwr_perdl._random import DATA, SERVER, spawn
from flwr_perdl.regression import Clients, Refinement, TwoPhase, model_error, simulate
from flwr_perdl.strategies.mixed_regression import random_models
from perdl_experiments.engine import Config
from perdl_experiments.mixed_regression_data import Mixed, mixed_regression
from perdl_experiments.outcome import Outcome, Picture, Table
from perdl_experiments.studies._experiment import Keep, Value, numbers, reals, seeds_of
from perdl_experiments.words import plural

NAME = "separation"
ABOUT = "When FedMD and FedX find all clusters: a map over separation, noise and points per client"
SOURCE = "beyond the paper: Su, Xu, Yang, NeurIPS 2022"
DEFAULTS: dict[str, Value] = {
    "clients": 100,
    "rounds": 60,
    "seed": 0,
    "seeds": 5,
    "dimension": 20,
    "separations": "0.25,0.5,1,2",
    "noises": "0.1,0.3,1",
    "points": "5,10,20,40",
}
HELP: dict[str, str] = {
    "seeds": "per place of the map",
    "dimension": "features",
    "separations": "mean distances between two models, which share a part of norm one",
    "noises": "standard deviations",
    "points": "per client",
}
FIGURES: tuple[str, ...] = ("maps.png",)
ERROR = "error"

K = 3
METHODS = {
    "k_known": "two phases, k known",
    "k_auto": "two phases, k unknown",
    "random": "from random models",
    "truth": "from the truth",
}


def run(config: Config, keep: Keep) -> Outcome:
    """Run all methods with every separation, noise and number of points."""
    axes = _axes(config)
    places = list(product(*axes.values()))
    shares = np.array(
        [
            np.mean(
                keep(_name(place), partial(_at, place, config), of=len(places))["found"], axis=0
            )
            for place in places
        ]
    ).reshape(*map(len, axes.values()), len(METHODS))
    maps = {method: shares[..., i] for i, method in enumerate(METHODS)}
    return Outcome(
        metrics={f"found_{method}": float(table.mean()) for method, table in maps.items()}
        | {
            f"found_{method}_{n:g}_points": float(table[i].mean())
            for method, table in maps.items()
            for i, n in enumerate(axes["points"])
        },
        curves={},
        arrays={f"found_{method}": table for method, table in maps.items()}
        | {axis: np.array(values) for axis, values in axes.items()},
        tables=[_table(axes, maps)],
        pictures=[_picture(axes, maps)],
        notes=list(_notes(config, axes, maps)),
        rounds=int(config["rounds"]),
        floats_up=0.0,
        floats_down=0.0,
    )


def _axes(config: Config) -> dict[str, list[float]]:
    check_count("seeds", config["seeds"], 1)
    check_count("dimension", config["dimension"], K)
    return {
        "points": [*map(float, numbers("points", config["points"], 1, 10_000))],
        "noises": reals("noises", config["noises"], 0),
        "separations": reals("separations", config["separations"], 0),
    }


def _name(place: Sequence[float]) -> str:
    return "points-{:g}-noise-{:g}-separation-{:g}".format(*place)


def _at(place: Sequence[float], config: Config) -> dict[str, NDArray[Any]]:
    """Return which methods found all clusters at a place, (n_seeds, n_methods)."""
    seeds = seeds_of(config)
    return {"found": np.array([_found(place, config, seed) for seed in seeds])}


def _found(place: Sequence[float], config: Config, seed: int) -> list[bool]:
    data = _data(place, config, seed)
    clients, reach = Clients(data.X, data.y), _least_distance(data.theta) / 2
    found = []
    for settings, start in _methods(data, seed):
        ran = simulate(clients, settings, int(config["rounds"]), centers=start, seed=seed)
        models = ran.state.centers
        found.append(len(models) == K and model_error(models, data.theta) < reach)
    return found


def _methods(data: Mixed, seed: int) -> Iterator[tuple[TwoPhase, Matrix | None]]:
    """Yield every method's settings and start, in the order of ``METHODS``."""
    yield TwoPhase(K), None
    yield TwoPhase(), None
    fixed = TwoPhase(K, phase_2=Refinement(check_every=0))
    yield fixed, random_models(K, data.theta.shape[1], spawn(seed, SERVER, 1))
    yield fixed, data.theta


def _data(place: Sequence[float], config: Config, seed: int) -> Mixed:
    points, noise, separation = place
    sizes = np.full(int(config["clients"]), int(points))
    shares = np.full(K, 1 / K)
    d = int(config["dimension"])
    return mixed_regression(
        sizes, shares, spawn(seed, DATA), d=d, noise=noise, separation=separation
    )


def _least_distance(theta: Matrix) -> float:
    apart = np.linalg.norm(theta[:, None] - theta, axis=2)
    return float(apart[np.triu_indices(len(theta), 1)].min())


# The report ----------------------------------------------------------------------------------


def _table(axes: Mapping[str, Sequence[float]], maps: Mapping[str, Matrix]) -> Table:
    return Table(
        "All clusters found",
        "Share of all seeds, noises and separations of the map, per number of points.",
        ["points per client", *METHODS.values()],
        [
            [f"{n:g}", *(f"{maps[method][i].mean():.0%}" for method in METHODS)]
            for i, n in enumerate(axes["points"])
        ],
    )


def _picture(axes: Mapping[str, Sequence[float]], maps: Mapping[str, Matrix]) -> Picture:
    from perdl_experiments import regression_plots  # an extra: clients must not need it

    return Picture(
        "maps",
        "Where all clusters are found",
        "Share of seeds in which all clusters are found, in percent; a row per method.",
        regression_plots.maps(
            {METHODS[method]: table for method, table in maps.items()},
            [f"{n:g} points per client" for n in axes["points"]],
            axes["separations"],
            axes["noises"],
            x="separation of the models",
            y="noise",
        ),
    )


def _notes(
    config: Config, axes: Mapping[str, Sequence[float]], maps: Mapping[str, Matrix]
) -> Iterator[str]:
    beaten = [
        f"{n:g}"
        for i, n in enumerate(axes["points"])
        if maps["random"][i].mean() > maps["k_known"][i].mean()
    ]
    if beaten:
        yield (
            f"With {', '.join(beaten)} points per client, random models find all clusters more "
            "often than the two phases with k known."
        )
    yield (
        f"{plural(config['seeds'], 'seed')} per place, {config['clients']} clients in {K} "
        "clusters, "
        f"{config['dimension']} features, {plural(config['rounds'], 'round')} in all. The "
        "models have a part "
        "in common, of norm about one; the separation is the mean distance between two of them, "
        "the noise its standard deviation."
    )
    yield (
        "Found: three models, each closer to its true one than half the least distance between "
        "true ones. From the truth: what Phase 2 keeps of the true models, the mark for all others."
    )
