"""How much to share: errors against the number of global atoms, from none to all.

A figure that P0 (Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for
Heterogeneous Datasets", NeurIPS 2023) does not have, on the clients of its Section 5.2: nine tenths
of a client's images carry one label. Every client has as many atoms; r_g of them are everybody's.
With r_g = 0 clients are alone. Two errors of a client's whole dictionary, by orthogonal matching
pursuit with `N_NONZERO` atoms per image: on held-out images of its own kind, and on those of
all kinds; with and without local refinement (Algorithm 6) before every round. *Pooled* is one
dictionary of as many atoms, of all clients' images, with five times the iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context

from flwr_perdl.checks import Matrix, check_count
from flwr_perdl.dictionary import reconstruct, sparse_code
from flwr_perdl.random import SERVER, spawn
from flwr_perdl.strategies import PerMA
from perdl_experiments.baselines import learn
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies import _planted
from perdl_experiments.studies._experiment import Arrays, Auto, Federate, Keep, LearnerConfig, words
from perdl_experiments.studies.images import ImageClient, Task, load_task, start
from perdl_experiments.words import plural

#: Atoms per image.
N_NONZERO = 10
KINDS = words("sharing")


@dataclass(frozen=True, kw_only=True)
class Config(LearnerConfig):
    """The options of sharing.toml; below them, what one federation has of each list."""

    samples_per_client: int
    n_global: tuple[int, ...]
    refine_steps: tuple[int, ...]

    shared: int | Auto = "auto"
    refined: int = 0

    def check(self) -> None:
        """Reject options that do not fit together."""
        for count in self.n_global:
            check_count("n_global", count, 0, self.n_atoms)

    @property
    def shares(self) -> list[int]:
        """The numbers of global atoms, in order."""
        return sorted(set(self.n_global))

    @property
    def task(self) -> Task:
        """The clients' and the held-out images."""
        return load_task(self.data, self.clients, self.samples_per_client, self.seed)


class SharingClient(ImageClient):
    """A client that measures the error alone."""

    def extra_metrics(self, global_atoms: Matrix, local_atoms: Matrix) -> dict[str, float]:
        """Return the errors on images of the client's own kind, and of all."""
        D = np.vstack([global_atoms, local_atoms])
        found = zip(KINDS, _measured(self.task, self.partition, D), strict=True)
        return {f"error_{kind}": error for kind, error in found}


def _measured(task: Task, partition: int, D: Matrix) -> list[float]:
    """Return a dictionary's errors on images of a client's own kind, and of all."""
    return [
        float(np.mean((X - reconstruct(sparse_code(X, D, n_nonzero=N_NONZERO), D)) ** 2))
        for X in (task.own_test(partition), task.test)
    ]


def client(context: Context, config: Config) -> SharingClient:
    """Return the client of partition ``context.node_config["partition-id"]``."""
    return SharingClient.of(config.task, context, config)


def strategy(config: Config, **options: Any) -> PerMA:
    """Return PerMA as ``config`` describes it; ``options`` are the server's own."""
    counting = config.shared == "auto"
    given = {"fraction_evaluate": 0.0} if counting else {"evaluate_every": config.rounds}
    return config.strategy(config.shared, **{**given, "refine_steps": config.refined, **options})


def federations(config: Config) -> list[Config]:
    """Return the configs of all federations: a matching round that counts, and every point."""
    return [
        one
        for seed in config.each_seed
        for one in (_counting(config, seed), *_points(config, seed).values())
    ]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run all federations and compare what sharing brings with what it costs."""
    natural = config.task.natural  # and wrong data are rejected before anything runs
    chosen, pooled, costs = [], [], []
    found: dict[tuple[int, int], list[Matrix]] = {}
    for seed in config.each_seed:
        counting = partial(_count, _counting(config, seed), federate)
        chosen.append(int(keep(f"auto-seed-{seed}", counting)["n_global"]))
        pool = partial(_pooled, replace(config, seed=seed))
        pooled.append(keep(f"pooled-seed-{seed}", pool)["errors"])
        for (n_global, refine_steps), point in _points(config, seed).items():
            name = f"global-{n_global}-refine-{refine_steps}-seed-{seed}"
            kept = keep(name, partial(_errors, point, federate))
            found.setdefault((n_global, refine_steps), []).append(kept["errors"])
            costs.append(kept["cost"])
    shares, refined = config.shares, config.refine_steps
    #: (own and all, r_g, seeds), per number of refinement steps.
    errors = {
        t: np.stack([np.mean(found[g, t], axis=2).T for g in shares], axis=1) for t in refined
    }
    own, everything = np.median(errors[refined[0]], axis=2)
    curves = {"own": own, "all": everything, "both": (own + everything) / 2}
    return Outcome(
        records=[
            *(
                Record("error", table[i, j], kind, {"n_global": g, "refine_steps": t})
                for t, table in errors.items()
                for i, kind in enumerate(KINDS)
                for j, g in enumerate(shares)
            ),
            *(Record("best", float(shares[int(np.argmin(v))]), kind) for kind, v in curves.items()),
            Record("auto", chosen),
            *(
                Record("pooled", errors_of, kind)
                for kind, errors_of in zip(KINDS, np.transpose(pooled), strict=True)
            ),
        ],
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
        figures=_figures(shares, errors, np.median(pooled, axis=0)),
        facts={
            "n_nonzero": N_NONZERO,
            "first": _label(refined[0]),
            "chosen": ", ".join(map(str, chosen)),
            "kind_is": "whose it is" if natural else "its label",
            **{f"said_{kind}": _said(KINDS[kind], shares, curves[kind]) for kind in KINDS},
        },
        **_planted.mean_cost(costs),
    )


def _points(config: Config, seed: int) -> dict[tuple[int, int], Config]:
    """Return the config of every number of global atoms and of refinement steps."""
    return {
        (g, t): replace(config, seed=seed, shared=g, refined=t)
        for g in config.shares
        for t in config.refine_steps
    }


def _counting(config: Config, seed: int) -> Config:
    return replace(config, seed=seed, rounds=1)


def _count(config: Config, federate: Federate) -> Arrays:
    """Return how many global atoms the matching round finds by itself."""
    return {"n_global": np.array(len(federate(config).arrays[0]))}


def _errors(config: Config, federate: Federate) -> Arrays:
    """Return the clients' errors, on their own kind and on all, and what a federation cost."""
    federated = federate(config)
    last = federated.history[-1].metrics
    errors = [[one[f"error_{kind}"] for _, one in sorted(last.items())] for kind in KINDS]
    return {"errors": np.array(errors), "cost": _planted.cost(federated)}


def _pooled(config: Config) -> Arrays:
    """Return the errors of one dictionary of all clients' images: means over clients."""
    task, rng = config.task, spawn(config.seed, SERVER, 1)
    D = learn(np.vstack(task.clients), config.make_learner(), rng, config.rounds, start(config))
    return {"errors": np.mean([_measured(task, i, D) for i in range(len(task.clients))], axis=0)}


def _said(kind: str, shares: Sequence[int], curve: Matrix) -> str:
    """Return a sentence about what sharing all atoms does to an error."""
    verb = "helps" if curve[-1] < curve[0] else "hurts"
    of, best = kind if kind.startswith("all") else f"the {kind}", shares[int(np.argmin(curve))]
    return (
        f"On images of {of} sharing all {verb}: the error is {curve[0]:.4f} with r_g = {shares[0]} "
        f"and {curve[-1]:.4f} with r_g = {shares[-1]}; the smallest, {curve.min():.4f}, is at r_g "
        f"= {best}."
    )


def _label(refine_steps: int) -> str:
    return f"{plural(refine_steps, 'step')} of refinement" if refine_steps else "no refinement"


def _figures(shares: Sequence[int], errors: Mapping[int, Matrix], pooled: Matrix) -> dict[str, Any]:
    from perdl_experiments import plots  # an extra: clients must not need it

    medians = {_label(t): np.median(table, axis=2) for t, table in errors.items()}
    panels = [
        plots.Panel(
            "number of global atoms",
            f"error, {kind}",
            shares,
            {label: table[i].tolist() for label, table in medians.items()},
            {_label(t): np.quantile(table[i], [0, 1], axis=1) for t, table in errors.items()},
            linear=True,
            levels={"pooled data": float(pooled[i])},
        )
        for i, kind in enumerate(KINDS.values())
    ]
    trails = {label: table[::-1].T for label, table in medians.items()}
    names = [str(g) for g in shares]
    return {
        "errors": plots.panels(panels),
        "trade-off": plots.trails(trails, names, x="error, all kinds", y="error, own kind"),
    }
