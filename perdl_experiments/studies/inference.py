"""Dual inference over a network: rounds until every agent has the solution, Fig. 6.

Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015, Section
IV-A: signal-to-noise ratios of the codes y and of the dual variables nu against iterations, on
connected graphs of agents with one random atom each. The truth is `exact_dual`; how well
a general solver (SciPy's L-BFGS-B on the dual) agrees with it is reported.

The paper's figure is that of a fully connected network of the document experiment (IV-B): the Huber
loss, mu = 0.5, ten agents at first. Documents have few of all terms, and so have atoms: an option
says how many entries are not zero. A round of ATC is one gradient step, a round of an ADMM an exact
inner minimization, so that methods are compared by rounds, by numbers sent, and by time.

The paper's figure is ``-o agents=10 -o connectivity=1 -o loss=huber -o step=0.5``, with sparse
atoms such as ``-o dimension=2000 -o density=0.05``; or with documents: ``--data`` as for
`novel_documents`. Then agents have the atoms that they learn from the first block with the paper's
settings, fully connected, and a sample is a document of the second block that some atom explains;
``dimension`` is the number of terms.

Metrics: ``rounds_to_40db_METHOD`` (median; -1: not within ``--rounds``) and
``rounds_to_40db_METHOD_max``, on the worst agent's dual variables, and until then, where it is
reached, ``floats_to_40db_METHOD`` (sent by an agent) and ``milliseconds_to_40db_METHOD``
(processor's time of all agents, per sample), for ``admm`` (the library's), ``atc`` (the paper's
diffusion), ``exact_diffusion`` and ``jacobian_admm``; ``agreement_db`` of the reference with an
independent solver; with documents ``decibels_METHOD``, of the dual variables after 500 rounds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from flwr_perdl.core.checks import Matrix, check_choice
from flwr_perdl.network import HuberNMF, InMemoryNetwork, Objective, SparseSVD, Topology, exact_dual
from flwr_perdl.network.inference import (
    ATC,
    ConsensusADMM,
    DualInference,
    DualState,
    ExactDiffusion,
)
from flwr_perdl.random import DATA, spawn
from perdl_experiments.jacobian_admm import JacobianADMM
from perdl_experiments.measures import rounds_to
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import Record
from perdl_experiments.studies import novel_documents
from perdl_experiments.studies._experiment import Arrays, Keep, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import keep_all

#: The paper's settings of Section IV-B.
OBJECTIVES: dict[str, Objective] = {
    "squared": SparseSVD(0.05, 0.1),
    "huber": HuberNMF(0.05, 0.1, 0.2),
}
#: What counts as found, and where curves end, in dB.
FOUND, TOP = 40.0, 100.0
#: Rounds after which the paper's diffusion is at 40 to 50 dB (Fig. 6).
PAPER_ROUNDS = 500
#: The first time step of Section IV-B: iterations of each batch's inference, documents of a block.
LEARNING, BLOCK = 100, 1000
#: The time of a round is the median of so many runs of so many rounds with so many samples.
_TIMES, _ROUNDS, SAMPLES = 3, 40, 16


class Method(NamedTuple):
    """One way to infer: what a reader sees, the program, and its options."""

    words: str
    kind: type[DualInference]
    options: Mapping[str, float] = MappingProxyType({})


_KINDS: dict[str, tuple[Any, ...]] = {
    "admm": (ConsensusADMM,),
    "plain_admm": (ConsensusADMM, {"relaxation": 0.5}),
    "jacobian_admm": (JacobianADMM,),
    "exact_diffusion": (ExactDiffusion,),
    "atc": (ATC,),
}
METHODS = {name: Method(words("inference")[name], *kind) for name, kind in _KINDS.items()}


class Case(NamedTuple):
    """A graph, a sample, and the answer.

    Attributes
    ----------
    objective : Objective
        Loss and regulariser.
    topology : Topology
        Who hears whom.
    X : ndarray of shape (1, n_features)
        The sample.
    atoms : ndarray of shape (n_agents, 1, n_features)
        An atom per agent.
    codes, nu : ndarray
        The optimum, (n_agents,) and (n_features,).
    """

    objective: Objective
    topology: Topology
    X: Matrix
    atoms: Matrix
    codes: Matrix
    nu: Matrix

    def program(self, method: Method, **options: Any) -> DualInference:
        """Return a method's program."""
        given = {**method.options, **options}
        return method.kind(self.objective, self.topology, list(self.atoms), self.X, **given)


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of inference.toml."""

    agents: int
    dimension: int
    connectivity: float
    loss: str
    density: float
    step: float

    def check(self) -> None:
        """Reject options that do not fit together."""
        if self.clients:
            raise ValueError(f"clients must be given as agents, got {self.clients}.")

    @property
    def documents(self) -> novel_documents.Config:
        """The first time step of a fully connected network with the paper's settings."""
        return novel_documents.Config(
            clients=self.agents,
            rounds=LEARNING,
            seed=0,
            data=self.data,
            score="paper",
            learning="paper",
            counts="plain",
            connectivity=1.0,
            terms=self.dimension,
            block=BLOCK,
        )


def run(config: Config, keep: Keep) -> Outcome:
    """Run all methods on every seed's graph."""
    atoms = keep("atoms", partial(_learned, config))["atoms"] if config.data else None
    kept = keep_all(
        keep, {f"seed-{seed}": partial(_one_seed, config, seed, atoms) for seed in config.each_seed}
    )
    curves = {
        f"{name}_{what}": np.stack([one[f"{name}_{what}"] for one in kept])
        for name in METHODS
        for what in ("y", "nu")
    }
    per_round = np.array([float(one["numbers"]) for one in kept]) / config.agents
    floats = config.rounds * float(per_round.mean())
    return Outcome(
        records=[
            Record("agreement_db", min(float(one["agreement"]) for one in kept), unit="dB"),
            *_records(
                curves, per_round, {n: [float(one[f"{n}_ms"]) for one in kept] for n in METHODS}
            ),
            *(
                Record("decibels", curves[f"{name}_nu"][:, PAPER_ROUNDS - 1], name, unit="dB")
                for name in METHODS
                if config.data and config.rounds >= PAPER_ROUNDS
            ),
        ],
        curves={f"snr_{name}": np.median(c, axis=0).tolist() for name, c in curves.items()},
        arrays={f"snr_{name}": values for name, values in curves.items()},
        figures={"inference": _figure(curves)},
        rounds=config.rounds,
        floats_up=floats,
        floats_down=floats,
        facts={
            "chosen": f"{config.step:g}" if config.step else "0.9 times Table III's bound",
            "documents": bool(config.data),
            "about_documents": novel_documents.stream_of(config.documents).about
            if config.data
            else "",
        },
    )


def draw(
    loss: str,
    n_agents: int,
    n_features: int,
    connectivity: float,
    rng: np.random.Generator,
    impulses: float = 0.0,
    density: float = 1.0,
) -> Case:
    """Draw a connected random graph, atoms, and a sample that a fifth of them explain.

    Atoms and codes are normal, absolute values of such under the Huber loss; the sample is brought
    to norm 1 after some noise, before impulses. At least one atom is in the sample.

    Parameters
    ----------
    loss : {"squared", "huber"}
        Names the objective.
    n_agents, n_features : int
        Size.
    connectivity : float
        Probability of an edge.
    rng : numpy.random.Generator
        Draws everything.
    impulses : float, default 0.0
        Share of the entries that get a number up to 1 on top, which the Huber loss is for.
    density : float, default 1.0
        Probability that an entry of an atom, or of the noise, is not zero; in documents it is low.
    """
    objective = OBJECTIVES[check_choice("loss", loss, OBJECTIVES)]
    topology = Topology.erdos_renyi(n_agents, connectivity, seed=int(rng.integers(2**31)))
    W = rng.standard_normal((n_agents, n_features))
    y = rng.standard_normal(n_agents) * (rng.random(n_agents) < 0.2)
    noise = 0.02 * rng.standard_normal(n_features)
    if density < 1:
        W *= rng.random(W.shape) < density
        noise *= rng.random(n_features) < density
    if not y.any():
        y[0] = 1.0
    if objective.nonnegative:
        W, y, noise = np.abs(W), np.abs(y), np.abs(noise)
    W /= np.linalg.norm(W, axis=1, keepdims=True)
    x = y @ W + noise
    x /= np.linalg.norm(x)
    x += (rng.random(n_features) < impulses) * rng.random(n_features)
    return _solved(objective, topology, x, W)


def _solved(objective: Objective, topology: Topology, x: Matrix, W: Matrix) -> Case:
    exact = exact_dual(objective, x[None], list(W[:, None]))
    codes = np.concatenate(exact.codes, axis=1)[0]
    return Case(objective, topology, x[None], W[:, None], codes, exact.nu[0])


def _learned(config: Config) -> Arrays:
    """Return the atoms, (n_agents, n_terms), that a fully connected network learns from block 0."""
    step = config.documents
    learner, X = novel_documents.learner_of(step, "full", 1), novel_documents.stream_of(step)
    model = learner.start(config.agents, X.X.shape[1], np.float32)
    model = learner.partial_fit(model, X.block(0).toarray(), Topology.complete(config.agents))
    return {"atoms": model.dictionaries[:, 0].astype(np.float64)}


def document(config: Config, atoms: Matrix, rng: np.random.Generator) -> Case:
    """Draw a connected random graph, and a document of the second block that some atom explains.

    Parameters
    ----------
    config : Config
        The study's options, with ``data``.
    atoms : ndarray of shape (n_agents, n_terms)
        An atom per agent.
    rng : numpy.random.Generator
        Draws both.
    """
    seed = int(rng.integers(2**31))
    topology = Topology.erdos_renyi(config.agents, config.connectivity, seed=seed)
    X = novel_documents.stream_of(config.documents).block(1).toarray().astype(np.float64)
    each = (
        _solved(OBJECTIVES[config.loss], topology, X[i], atoms) for i in rng.permutation(len(X))
    )
    found = next((case for case in each if case.codes.any()), None)
    if found is None:
        raise ValueError(f"data must have a document that some atom explains, got {config.data!r}.")
    return found


def trace(
    case: Case, program: DualInference, n_rounds: int, top: float = TOP
) -> tuple[Matrix, Matrix]:
    """Return the ratios (dB) of y, and of nu at the worst agent, after every round.

    A run ends when both have reached ``top``, where curves are cut.

    Parameters
    ----------
    case : Case
        With the answer.
    program : DualInference
        The method.
    n_rounds : int
        Rounds at most.
    top : float
        In dB.
    """
    curves = np.full((2, n_rounds), top)

    def watch(round_: int, state: DualState) -> None:
        correlations = np.einsum("kf,kf->k", state.nu[:, 0], case.atoms[:, 0])
        curves[0, round_ - 1] = _decibels(case.objective.code(correlations), case.codes)
        curves[1, round_ - 1] = _decibels(state.nu[:, 0], case.nu).min()
        done.append(bool((curves[:, round_ - 1] >= top).all()))

    done: list[bool] = []
    InMemoryNetwork(case.topology).run(program, n_rounds, callback=watch, stop=lambda _: done[-1])
    return np.minimum(curves[0], top), np.minimum(curves[1], top)


def _one_seed(config: Config, seed: int, atoms: Matrix | None) -> Arrays:
    """Return all methods' curves on one graph, and the time of a round."""
    size, density, rng = (config.agents, config.dimension), config.density, spawn(seed, DATA)
    if atoms is None:
        case = draw(config.loss, *size, config.connectivity, rng, density=density)
    else:
        case = document(config, atoms, rng)
    kept: Arrays = {
        "agreement": np.array(_agreement(case)),
        "numbers": np.array(2 * case.topology.n_edges * case.X.shape[1]),
    }
    for name, method in METHODS.items():
        own = {"step": config.step} if name == "atc" and config.step else {}
        program = case.program(method, **own)
        kept[f"{name}_y"], kept[f"{name}_nu"] = trace(case, program, config.rounds)
        kept[f"{name}_ms"] = np.array(_milliseconds(case, program))
    return kept


def _milliseconds(case: Case, program: DualInference) -> float:
    """Return the processor's time of a round for one sample, all agents together."""
    batch = replace(program, X=np.repeat(case.X, SAMPLES, axis=0))
    network = InMemoryNetwork(case.topology)
    seconds = []
    for _ in range(_TIMES):
        started = time.process_time()
        network.run(batch, _ROUNDS)
        seconds.append(time.process_time() - started)
    return 1000 * float(np.median(seconds)) / (_ROUNDS * SAMPLES)


def _records(
    curves: Mapping[str, Matrix], per_round: Matrix, milliseconds: Mapping[str, Sequence[float]]
) -> Iterator[Record]:
    """Yield what every method comes to; what it costs only where most graphs are done."""
    for name in METHODS:
        rounds = np.array([rounds_to(row, FOUND) for row in curves[f"{name}_nu"]])
        yield Record("rounds", rounds, name, unit="rounds")
        if np.isfinite(np.median(rounds)):
            yield Record("sent", float(np.median(rounds * per_round)), name)
            yield Record("ms", float(np.median(rounds * milliseconds[name])), name, unit="ms")
        yield Record("ms_round", milliseconds[name], name, unit="ms")
        yield Record("y", curves[f"{name}_y"][:, -1], name, unit="dB")
        yield Record("nu", curves[f"{name}_nu"][:, -1], name, unit="dB")


def _agreement(case: Case) -> float:
    """Return how well a general solver of the dual (28) agrees, in dB."""
    o, x, W = case.objective, case.X[0], case.atoms[:, 0]

    def dual(nu: Matrix) -> tuple[float, Matrix]:
        S = W @ nu
        smooth = o.strong_convexity / 2 * nu @ nu - nu @ x + o.regulariser_conjugate(S)
        return float(smooth), o.conjugate_gradient(nu) - x + o.code(S) @ W

    bounds = [(-o.bound, o.bound)] * len(x) if np.isfinite(o.bound) else None
    options = {"maxiter": 20_000, "maxfun": 40_000, "maxcor": 50, "ftol": 0.0, "gtol": 1e-12}
    found = minimize(
        dual, np.zeros_like(x), jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    return min(float(_decibels(found.x, case.nu)), 300.0)


def _decibels(found: Matrix, truth: Matrix) -> Matrix:
    noise = np.square(found - truth).sum(axis=-1)
    floor = np.finfo(float).tiny
    ratio: Matrix = 10 * np.log10(np.square(truth).sum() / np.maximum(noise, floor))
    return ratio


def _figure(curves: Mapping[str, Matrix]) -> Any:
    from perdl_experiments import plots  # an extra: clients must not need it

    drawn = [
        plots.Panel(
            "communication round",
            "signal-to-noise ratio (dB)",
            range(1, 1 + curves[f"admm_{what}"].shape[1]),
            {method.words: curves[f"{name}_{what}"] for name, method in METHODS.items()},
            title=title,
            log=True,
            linear=True,
            levels={f"{FOUND:g} dB": FOUND},
            limits=(-5, TOP),
        )
        for what, title in {"y": "codes y", "nu": "dual variables nu, worst node"}.items()
    ]
    return plots.panels(drawn, height=2.9)
