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
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from flwr_perdl.checks import Matrix
from flwr_perdl.random import DATA, SERVER, spawn
from flwr_perdl.regression import Clients, Refinement, TwoPhase, model_error, simulate
from flwr_perdl.strategies.mixed_regression import random_models
from perdl_experiments.mixed_regression_data import Mixed, mixed_regression
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies._experiment import Arrays, Keep, words
from perdl_experiments.studies._experiment import Config as Common

K = 3
METHODS = words("separation")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of separation.toml."""

    dimension: int
    separations: tuple[float, ...]
    noises: tuple[float, ...]
    points: tuple[int, ...]

    @property
    def axes(self) -> dict[str, tuple[float, ...]]:
        """The map's axes."""
        points = tuple(map(float, self.points))
        return {"points": points, "noises": self.noises, "separations": self.separations}


def run(config: Config, keep: Keep) -> Outcome:
    """Run all methods with every separation, noise and number of points."""
    axes = config.axes
    places = list(product(*axes.values()))
    parts = [keep(_name(at), partial(_at, at, config), of=len(places)) for at in places]
    shares = np.array([np.mean(kept["found"], axis=0) for kept in parts]).reshape(
        *map(len, axes.values()), len(METHODS)
    )
    maps = {method: shares[..., i] for i, method in enumerate(METHODS)}
    beaten = [
        f"{n:g}"
        for i, n in enumerate(axes["points"])
        if maps["random"][i].mean() > maps["k_known"][i].mean()
    ]
    return Outcome(
        records=[
            *(Record("found", table, method) for method, table in maps.items()),
            *(
                Record("found_with", table[i], method, {"points": n})
                for method, table in maps.items()
                for i, n in enumerate(axes["points"])
            ),
        ],
        curves={},
        arrays={f"found_{method}": table for method, table in maps.items()}
        | {axis: np.array(values) for axis, values in axes.items()},
        figures={"maps": _figure(axes, maps)},
        rounds=config.rounds,
        floats_up=0.0,
        floats_down=0.0,
        facts={"n_clusters": K, "beaten": ", ".join(beaten)},
    )


def _name(place: Sequence[float]) -> str:
    return "points-{:g}-noise-{:g}-separation-{:g}".format(*place)


def _at(place: Sequence[float], config: Config) -> Arrays:
    """Return which methods found all clusters at a place, (n_seeds, n_methods)."""
    found = [_found(place, config, seed) for seed in config.each_seed]
    return {"found": np.array(found)}


def _found(place: Sequence[float], config: Config, seed: int) -> list[bool]:
    data = _data(place, config, seed)
    clients, reach = Clients(data.X, data.y), _least_distance(data.theta) / 2
    found = []
    for settings, start in _methods(data, seed):
        ran = simulate(clients, settings, config.rounds, centers=start, seed=seed)
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
    sizes = np.full(config.clients, int(points))
    shares = np.full(K, 1 / K)
    d = config.dimension
    return mixed_regression(
        sizes, shares, spawn(seed, DATA), d=d, noise=noise, separation=separation
    )


def _least_distance(theta: Matrix) -> float:
    apart = np.linalg.norm(theta[:, None] - theta, axis=2)
    return float(apart[np.triu_indices(len(theta), 1)].min())


def _figure(axes: Mapping[str, Sequence[float]], maps: Mapping[str, Matrix]) -> Any:
    from perdl_experiments import regression_plots  # an extra: clients must not need it

    return regression_plots.maps(
        {METHODS[method]: table for method, table in maps.items()},
        [f"{n:g} points per client" for n in axes["points"]],
        axes["separations"],
        axes["noises"],
        x="separation of the models",
        y="noise",
    )
