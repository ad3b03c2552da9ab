"""The cost of differential privacy: PerMA with noised sums, against epsilon.

Label skew: 90 % of a client's images have one label. The noise hides the presence of every single
image, whatever is known of the others. Atoms are learned in a public subspace, the lowest
frequencies of the discrete cosine transform, from random unit atoms; images are brought to norm 1,
so that dark and bright ones count alike, and each is coded by a fixed number of atoms, whatever the
other images are. The error is measured on held-out images of all labels, in pixels.

Compared with one round under the same guarantee in the same space: the principal components of the
images' second moments with noise (Dwork, Talwar, Thakurta and Zhang, "Analyze Gauss", STOC 2014).
PerMA that starts from these components, for a share of the budget, has no row: in trials it was
never better than the better of the two.

``--data FILE.npz`` with ``X`` (n, h, w) and ``y`` (n,), as for ``images``; without it,
scikit-learn's digits.

Metrics: ``error_private`` (this run), ``error_components`` (principal components, the same
guarantee), ``error_not_private``, ``error_alone`` (local training), ``error_public`` (the
frequencies themselves as atoms). Curves: ``epsilon``, and where the server adds the noise
``error_central`` and ``error_components_central``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from math import ceil, inf, sqrt
from typing import Any

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.core.checks import Matrix, check_real
from flwr_perdl.dictionary import MODLearner, normalize_atoms, reconstruct, sparse_code
from flwr_perdl.privacy import Noise, PublicBasis
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.random import DATA, spawn
from flwr_perdl.strategies import PerMA
from perdl_experiments.baselines import GENEROSITY, learn_each
from perdl_experiments.engine import arranged
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies import images
from perdl_experiments.studies._experiment import Config as Base
from perdl_experiments.studies._experiment import Federate, Keep

N_ATOMS, N_NONZERO, SAMPLES, DELTA = 32, 10, 500, 1e-5
#: Share of the clients that must answer: the noise of those that do suffices.
REQUIRED = 0.8
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
#: Whose draws the noise is, beside the clients' and the data's.
NOISE = 1_000_001
#: Frequencies at most, and their share of the pixels, where the user names no number.
FREQUENCIES, SHARE = 144, 0.75


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    """The options of private.toml."""

    epsilon: float
    trust: str
    basis: int

    def check(self) -> None:
        """Reject options that do not fit together."""
        if self.basis:
            check_real("basis", self.basis, 1, self.task.test.shape[1])

    @property
    def task(self) -> images.Task:
        """The clients' and the held-out images."""
        return images.load_task(self.data, self.clients, SAMPLES, self.seed)

    @property
    def space(self) -> PublicBasis:
        """The public space in which atoms are learned."""
        height, width = self.task.shape
        most = min(FREQUENCIES, int(SHARE * height * width))
        return PublicBasis.dct((height, width), self.basis or most)


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    X = config.task.clients[int(context.node_config[PARTITION_ID])]
    return DictionaryClient(_unit(X, config.space), _learner(), context, state_dir=config.state_dir)


def privacy(config: Config) -> Noise | None:
    """Return the guarantee. Its noise comes from the seed: this is a simulation, to be repeated."""
    if config.epsilon == inf:
        return None
    draws = count()
    return Noise(
        epsilon=config.epsilon,
        delta=DELTA,
        trust=config.trust,
        rng=lambda: spawn(config.seed, NOISE, next(draws)),
    )


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own."""
    if noise := privacy(config):
        # As many clients must answer as the noise is for.
        options |= {"privacy": noise, "min_clients": ceil(REQUIRED * config.clients)}
        if config.trust == "distributed":
            options["secure"] = {"reconstruction_threshold": REQUIRED}
    return PerMA(N_ATOMS, fraction_evaluate=0.0, **arranged(options))


def initial(config: Config) -> list[Matrix]:
    """Return random unit atoms of the public space: where all clients begin."""
    rng = spawn(config.seed, DATA, 1)
    return [normalize_atoms(rng.standard_normal((N_ATOMS, len(config.space.matrix))))]


def federations(config: Config) -> list[Config]:
    """Return the config of this run, of none, and of every epsilon, whose noise the server adds."""
    central = [replace(config, epsilon=e, trust="central") for e in EPSILONS]
    return [config, replace(config, epsilon=inf), *central]


def noised_moments(config: Config) -> Matrix:
    """Return the second moments of all images, each of norm 1, released once with noise."""
    noise, space, n_required = privacy(config), config.space, 1
    if noise is None or noise.rng is None:
        raise ValueError(f"epsilon must be finite, got {config.epsilon}.")
    upper = np.triu_indices(len(space.matrix))
    twice = np.where(upper[0] == upper[1], 1, sqrt(2))  # an image moves the sum by 1
    unit = [_unit(X, space) for X in config.task.clients]
    sums = [(X.T @ X)[upper] * twice for X in unit]
    if config.trust == "central":
        sums = [np.sum(sums, axis=0)]
    else:
        n_required = ceil(REQUIRED * config.clients)
    release = noise.release(
        1,
        size=len(twice),
        sensitivity=1.0,
        reach=float(SAMPLES * config.clients),
        n_required=n_required,
        limit=2**40,  # finer than secure sums have: to the rival's advantage
    )
    total = np.sum([release.add_noise(one, noise.rng()) for one in sums], axis=0)
    moments = np.zeros((len(space.matrix),) * 2)
    moments[upper] = moments.T[upper] = release.read(total) / twice
    return moments


def principal_components(config: Config) -> Matrix:
    """Return the leading directions of the images' second moments with noise, rows."""
    return np.asarray(np.linalg.eigh(noised_moments(config))[1][:, : -N_ATOMS - 1 : -1].T)


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run a federation per epsilon, and what they are compared with."""
    task, space = config.task, config.space
    clients = range(len(task.clients))
    asked = federations(config)
    own, *others = map(federate, asked)
    atoms = [space.lift(one.arrays[0]) for one in (own, *others)]
    private, not_private, *curve = (_error(task.test, D) for D in atoms)
    components, *their_curve = (
        _error(task.test, space.lift(principal_components(one)))
        for one in asked
        if one.epsilon < inf
    )
    alone = learn_each(
        [_unit(X, space) for X in task.clients],
        [_learner()] * len(clients),
        [spawn(config.seed, i) for i in clients],
        config.rounds,
    )
    errors = {
        "private": private,
        "components": components,
        "not_private": not_private,
        "alone": float(np.mean([_error(task.test, space.lift(D)) for D in alone])),
        "public": _error(task.test, space.matrix),
    }
    return Outcome(
        records=[
            *(Record("error", value, method) for method, value in errors.items()),
            *(
                Record(metric, value, parameters={"epsilon": epsilon})
                for metric, values in (("at", curve), ("components_at", their_curve))
                for epsilon, value in zip(EPSILONS, values, strict=True)
            ),
        ],
        curves={
            "epsilon": EPSILONS,
            "error_central": curve,
            "error_components_central": their_curve,
        },
        arrays={"private_atoms": atoms[0], "not_private_atoms": atoms[1]},
        figures=_figures(config.epsilon, curve, their_curve, errors),
        facts={
            "n_images": sum(map(len, task.clients)),
            "n_test": len(task.test),
            "n_pixels": task.test.shape[1],
            "n_frequencies": len(space.matrix),
            "n_required": ceil(REQUIRED * config.clients),
            "distributed": config.trust == "distributed",
            "central": config.trust == "central",
            "generosity": GENEROSITY,
        },
        **own.cost,
    )


def _learner() -> MODLearner:
    return MODLearner(N_ATOMS, n_nonzero=N_NONZERO)


def _unit(X: Matrix, space: PublicBasis) -> Matrix:
    """Return images in the public space, of norm 1 there; one without light stays as it is."""
    X = space.project(X)
    lengths = np.linalg.norm(X, axis=1, keepdims=True)
    unit: Matrix = X / np.where(lengths > 0, lengths, 1)
    return unit


def _error(X: Matrix, D: Matrix) -> float:
    return float(np.mean((X - reconstruct(sparse_code(X, D, n_nonzero=N_NONZERO), D)) ** 2))


def _figures(
    epsilon: float, curve: list[float], their_curve: list[float], errors: dict[str, float]
) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: clients must not need it

    at = sorted({*EPSILONS, epsilon})
    points, theirs = (dict(zip(EPSILONS, one, strict=True)) for one in (curve, their_curve))
    levels = {"not_private": "without noise", "alone": "local training", "public": "public atoms"}
    panel = plots.Panel(
        "epsilon (smaller: more private)",
        "mean squared error",
        at,
        {
            "PerMA, the server adds the noise": [points.get(e, np.nan) for e in at],
            "principal components, likewise": [theirs.get(e, np.nan) for e in at],
            "this run": [errors["private"] if e == epsilon else np.nan for e in at],
        },
        log=True,
        linear=True,
        levels={words: errors[method] for method, words in levels.items()},
    )
    return {"curve": plots.panels([panel], height=3.2)}
