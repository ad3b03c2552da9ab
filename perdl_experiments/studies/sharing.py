"""How much to share: errors against the number of global atoms, from none to all.

A figure that P0 (Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for
Heterogeneous Datasets", NeurIPS 2023) does not have, on the clients of its Section 5.2: nine tenths
of a client's images carry one label. Every client has as many atoms; r_g of them are everybody's.
With r_g = 0 clients are alone. Two errors of a client's whole dictionary, by orthogonal matching
pursuit with `N_NONZERO` atoms per image: on held-out images of its own kind, and on those of
all kinds; with and without local refinement (Algorithm 6) before every round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl._checks import Matrix, check_count
from flwr_perdl.dictionary import reconstruct, sparse_code
from flwr_perdl.strategies import PerMA
from perdl_experiments.engine import Config
from perdl_experiments.outcome import Outcome, Picture, Table
from perdl_experiments.studies._experiment import (
    MIN_SUPPORT,
    Federate,
    Keep,
    Value,
    make_strategy,
    numbers,
    seeds_of,
)
from perdl_experiments.studies.images import ImageClient, Task, load_task
from perdl_experiments.words import plural

NAME = "sharing"
ABOUT = "When collaboration helps and when it hurts: errors against the number of global atoms"
SOURCE = "beyond the paper: Liang et al., NeurIPS 2023, the clients of Section 5.2"
DEFAULTS: dict[str, Value] = {
    "clients": 10,
    "rounds": 20,
    "seed": 0,
    "data": "",
    "seeds": 3,
    "samples_per_client": 100,
    "n_atoms": 48,
    "n_global": "0,8,16,24,32,40,48",
    "refine_steps": "0,5",
    "aggregation": "statistics",
    "matching": "consensus",
    "learner": "orthogonal",
    "min_support": MIN_SUPPORT,
}
HELP: dict[str, str] = {
    "data": "your images, as for `images`; without it, scikit-learn's digits",
    "refine_steps": "iterations of local refinement before every round",
}
FIGURES: tuple[str, ...] = ("errors.png", "trade-off.png")
ERROR = "error_all"

#: Atoms per image.
N_NONZERO = 10
AUTO: Final = "auto"
KINDS = {"own": "own kind", "all": "all kinds"}


class SharingClient(ImageClient):
    """A client that measures the error alone."""

    def extra_metrics(self, global_atoms: Matrix, local_atoms: Matrix) -> dict[str, float]:
        """Return the errors on images of the client's own kind, and of all."""
        D = np.vstack([global_atoms, local_atoms])
        held_out = {"own": self.task.own_test(self.partition), "all": self.task.test}
        return {
            f"error_{kind}": float(
                np.mean((X - reconstruct(sparse_code(X, D, n_nonzero=N_NONZERO), D)) ** 2)
            )
            for kind, X in held_out.items()
        }


def client(context: Context, config: Config) -> SharingClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    return SharingClient.of(_task(config), context, config)


def strategy(config: Config, **options: Any) -> PerMA:
    """Return PerMA as ``config`` describes it; ``options`` are the server's own."""
    given: dict[str, Any] = {"refine_steps": int(config["refine_steps"])}
    if config["n_global"] == AUTO:
        return make_strategy(config, AUTO, {"fraction_evaluate": 0.0, **given, **options})
    given["evaluate_every"] = int(config["rounds"])
    return make_strategy(config, int(config["n_global"]), {**given, **options})


def federations(config: Config) -> list[Config]:
    """Return the configs of all federations: a matching round that counts, and every point."""
    return [
        one
        for seed in seeds_of(config)
        for one in (_counting(config, seed), *_points(config, seed).values())
    ]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run all federations and compare what sharing brings with what it costs."""
    _task(config)  # wrong data are told before anything runs
    chosen, costs = [], []
    found: dict[tuple[int, int], list[Matrix]] = {}
    for seed in seeds_of(config):
        counting = partial(_count, _counting(config, seed), federate)
        chosen.append(int(keep(f"auto-seed-{seed}", counting)["n_global"]))
        for (n_global, refine_steps), point in _points(config, seed).items():
            name = f"global-{n_global}-refine-{refine_steps}-seed-{seed}"
            kept = keep(name, partial(_errors, point, federate))
            found.setdefault((n_global, refine_steps), []).append(kept["errors"])
            costs.append(kept["cost"])
    shares, refined = _shares(config), _refined(config)
    #: (own and all, r_g, seeds), per number of refinement steps.
    errors = {
        t: np.stack([np.mean(found[g, t], axis=2).T for g in shares], axis=1) for t in refined
    }
    best = _best(shares, errors[refined[0]])
    rounds, floats_up, floats_down = np.mean(costs, axis=0)
    return Outcome(
        metrics=_metrics(shares, errors) | best | {"auto": float(np.median(chosen))},
        curves={
            f"error_{kind}_refine_{t}": np.median(table[i], axis=1).tolist()
            for t, table in errors.items()
            for i, kind in enumerate(KINDS)
        },
        arrays={
            "n_global": np.array(shares),
            "auto": np.array(chosen),
            **{f"errors_refine_{t}": table for t, table in errors.items()},
        },
        tables=[_table(shares, errors, best, chosen)],
        pictures=_pictures(shares, errors),
        notes=list(_notes(config, shares, errors[refined[0]])),
        rounds=int(rounds),
        floats_up=float(floats_up),
        floats_down=float(floats_down),
    )


def _shares(config: Config) -> list[int]:
    return sorted(set(numbers("n_global", config["n_global"], 0, int(config["n_atoms"]))))


def _refined(config: Config) -> list[int]:
    return numbers("refine_steps", config["refine_steps"], 0, 1000)


def _points(config: Config, seed: int) -> dict[tuple[int, int], Config]:
    """Return the config of every number of global atoms and of refinement steps."""
    return {
        (g, t): {**config, "seed": seed, "n_global": g, "refine_steps": t}
        for g in _shares(config)
        for t in _refined(config)
    }


def _counting(config: Config, seed: int) -> Config:
    return {**config, "seed": seed, "n_global": AUTO, "refine_steps": 0, "rounds": 1}


def _task(config: Config) -> Task:
    samples = check_count("samples_per_client", config["samples_per_client"], 1)
    return load_task(str(config["data"]), int(config["clients"]), samples, int(config["seed"]))


def _count(config: Config, federate: Federate) -> dict[str, NDArray[Any]]:
    """Return how many global atoms the matching round finds by itself."""
    return {"n_global": np.array(len(federate(config).arrays[0]))}


def _errors(config: Config, federate: Federate) -> dict[str, NDArray[Any]]:
    """Return the clients' errors, on their own kind and on all, and what a federation cost."""
    federated = federate(config)
    last = federated.history[-1].metrics
    return {
        "errors": np.array(
            [[one[f"error_{kind}"] for _, one in sorted(last.items())] for kind in KINDS]
        ),
        "cost": np.array([federated.rounds, federated.floats_up, federated.floats_down]),
    }


# The report ----------------------------------------------------------------------------------


def _best(shares: Sequence[int], errors: Matrix) -> dict[str, float]:
    """Return the numbers of global atoms with the least errors: own, all, and their mean."""
    own, everything = np.median(errors, axis=2)
    curves = {"own": own, "all": everything, "both": (own + everything) / 2}
    return {f"best_{kind}": float(shares[int(np.argmin(v))]) for kind, v in curves.items()}


def _metrics(shares: Sequence[int], errors: Mapping[int, Matrix]) -> dict[str, float]:
    return {
        f"error_{kind}_{g}_refine_{t}": float(np.median(table[i, j]))
        for t, table in errors.items()
        for i, kind in enumerate(KINDS)
        for j, g in enumerate(shares)
    }


def _label(refine_steps: int) -> str:
    return f"{plural(refine_steps, 'step')} of refinement" if refine_steps else "no refinement"


def _table(
    shares: Sequence[int],
    errors: Mapping[int, Matrix],
    best: Mapping[str, float],
    chosen: Sequence[int],
) -> Table:
    def cell(values: Matrix) -> str:
        return f"{np.median(values):.4f} ({values.min():.4f}…{values.max():.4f})"

    first = next(iter(errors))
    return Table(
        "Errors against the number of global atoms",
        f"Mean squared error of held-out images with {N_NONZERO} atoms per image, mean over "
        f"clients: median over seeds, and range. With {_label(first)}, least on the own kind: "
        f"r_g = {best['best_own']:.0f}; on all kinds: {best['best_all']:.0f}; for the mean of the "
        f"two, the default that the curve supports: {best['best_both']:.0f}. "
        f'n_global="auto" chooses {", ".join(map(str, chosen))}.',
        ["r_g", *(f"{words}, {_label(t)}" for t in errors for words in KINDS.values())],
        [
            [str(g), *(cell(table[i, j]) for table in errors.values() for i in range(len(KINDS)))]
            for j, g in enumerate(shares)
        ],
    )


def _pictures(shares: Sequence[int], errors: Mapping[int, Matrix]) -> list[Picture]:
    from perdl_experiments import plots  # an extra: clients must not need it

    medians = {_label(t): np.median(table, axis=2) for t, table in errors.items()}
    panels = [
        plots.Panel(
            "number of global atoms",
            f"error, {words}",
            shares,
            {label: table[i].tolist() for label, table in medians.items()},
            {_label(t): np.quantile(table[i], [0, 1], axis=1) for t, table in errors.items()},
            linear=True,
        )
        for i, words in enumerate(KINDS.values())
    ]
    return [
        Picture(
            "errors",
            "Errors against the number of global atoms",
            "Held-out images of the client's own kind (left) and of all kinds (right): medians "
            "and ranges over seeds of the mean over clients.",
            plots.panels(panels, columns=2),
        ),
        Picture(
            "trade-off",
            "What sharing brings and what it costs",
            "A point per number of global atoms, which stands beside it where there is room; "
            "medians over seeds.",
            plots.trails(
                {label: table[::-1].T for label, table in medians.items()},
                [str(g) for g in shares],
                x="error, all kinds",
                y="error, own kind",
            ),
        ),
    ]


def _notes(config: Config, shares: Sequence[int], errors: Matrix) -> Iterator[str]:
    own, everything = np.median(errors, axis=2)
    least, most = shares[0], shares[-1]
    for words, curve in zip(("the own kind", "all kinds"), (own, everything), strict=True):
        verb = "helps" if curve[-1] < curve[0] else "hurts"
        yield (
            f"On images of {words} sharing all {verb}: the error is {curve[0]:.4f} with r_g = "
            f"{least} and {curve[-1]:.4f} with r_g = {most}; the least, {curve.min():.4f}, has "
            f"r_g = {shares[int(np.argmin(curve))]}."
        )
    kind = "its label" if not _task(config).natural else "whose it is"
    yield (
        f"{plural(config['seeds'], 'seed')}, {config['clients']} clients with "
        f"{plural(config['n_atoms'], 'atom')} "
        f"each, {plural(config['rounds'], 'round')}; an image's kind is {kind}."
    )
