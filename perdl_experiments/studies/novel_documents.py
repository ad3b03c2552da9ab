"""Novel documents: Section IV-B, Fig. 7 and Table IV of P1, on news counts or planted ones.

P1 = Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015. Documents
arrive in blocks. In time step t a network of 10 t agents, one atom each, learns from one block,
then says of each document of the next how new it is (Algorithm 2); ten agents with random atoms
join, and the network is drawn anew. A document is novel if no earlier block has its topic.

The paper's settings run as they are with ``score=paper``: Huber's loss, ATC diffusion stopped long
before convergence, the raw cost as score. The default has converged inference, the score
normalised, and squared loss with ``eta`` times the paper's gamma and delta: the same problem as
with Huber's loss as far as no residual exceeds eta, up to the factor eta. Steps ``mu_w / eta`` then
move the atoms alike. As documents have unit norm, their f(x) is then the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl._checks import Matrix, check_choice, check_count, check_real
from flwr_perdl.diffusion.model_diffusion import Model, ModelDiffusion
from flwr_perdl.diffusion.novelty import novelty_scores
from flwr_perdl.diffusion.objectives import HuberNMF, NonnegativeMF
from flwr_perdl.diffusion.topology import Topology
from perdl_experiments.baselines import sklearn_seed
from perdl_experiments.data import cached_by_file
from perdl_experiments.documents import BLOCK, Csr, load_documents
from perdl_experiments.engine import Config
from perdl_experiments.outcome import Outcome, Picture, Table
from perdl_experiments.studies._experiment import Keep, Value

NAME = "novel-documents"
ABOUT = "Agents with one atom each tell which documents are of a topic not seen before"
SOURCE = "Chen, Towfic, Sayed, IEEE TSP 2015, Section IV-B, Fig. 7 and Table IV"
DEFAULTS: dict[str, Value] = {
    "clients": 10,
    "rounds": 100,
    "seed": 0,
    "data": "",
    "score": "normalised",
    "connectivity": 0.5,
    "terms": 3000,
    "block": BLOCK,
}
HELP: dict[str, str] = {
    "clients": "agents at first, and agents that join in every time step",
    "rounds": "iterations of the inference of a batch; at most four times as many",
    "data": "your documents: `.npz` of counts, or `reuters`, or `20newsgroups`",
    "score": (
        "`normalised`; or `paper`: the paper's settings, diffusion stopped long before it converges"
    ),
    "connectivity": "of the sparse network; 1 is fully connected",
    "terms": "terms that are kept: those in the most documents",
    "block": "documents per time step",
}
FIGURES: tuple[str, ...] = ("fig7.png",)
ERROR = "auc"

SCORES = ("normalised", "paper")
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
METHODS = {
    "network": "the network",
    "full": "fully connected",
    "nmf": "NMF in one place",
}


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
    check_choice("score", config["score"], SCORES)
    connectivity = check_real("connectivity", config["connectivity"], 0, 1, open_low=True)
    stream = _stream(
        str(config["data"]), int(config["seed"]), int(config["terms"]), int(config["block"])
    )
    last = stream.steps[-1]
    networks = ("network", "full") if connectivity < 1 else ("network",)
    parts = last * len(networks) + len(stream.steps)
    found: dict[str, list[Mapping[str, NDArray[Any]]]] = {}
    for name in networks:
        found[name] = []
        for t in range(1, last + 1):
            before = found[name][-1]["dictionary"] if t > 1 else None
            work = partial(_time_step, config, stream, name, t, before)
            found[name].append(keep(f"{name}-{t}", work, of=parts))
    nmf = {t: keep(f"nmf-{t}", partial(_nmf, config, stream, t), of=parts) for t in stream.steps}
    scores = {
        name: {t: steps[t - 1]["scores"] for t in stream.steps} for name, steps in found.items()
    }
    scores["nmf"] = {t: kept["scores"] for t, kept in nmf.items()}
    areas = {
        name: {t: _areas(stream.novel[t], by_step[t]) for t in stream.steps}
        for name, by_step in scores.items()
    }
    own = found["network"]
    prefix = {"network": "auc", "full": "auc_full", "nmf": "auc_nmf"}
    sent = float(sum(one["floats"] for one in own))
    return Outcome(
        metrics={
            f"{prefix[name]}_{t}": float(np.mean(area))
            for name, by_step in areas.items()
            for t, area in by_step.items()
        },
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
        tables=[_table(config, stream, areas, own)],
        pictures=_pictures(stream, scores, areas),
        notes=_notes(config, stream, own),
        rounds=int(sum(int(one["rounds"]) for one in own)),
        floats_up=sent,
        floats_down=sent,
    )


def _time_step(
    config: Config, stream: Stream, name: str, t: int, before: Matrix | None
) -> dict[str, NDArray[Any]]:
    """Return the atoms after learning from block ``t - 1``, and the scores of block ``t``."""
    clients, seed = int(config["clients"]), int(config["seed"])
    connectivity = 1.0 if name == "full" else float(config["connectivity"])
    learner, paper = _learner(config, name, t), config["score"] == "paper"
    if before is None:
        model = learner.start(clients, stream.X.shape[1], np.float32)
    else:
        model = learner.grow(Model(before), clients)
    n_agents = len(model.dictionaries)
    topology = (
        Topology.complete(n_agents)
        if connectivity == 1
        else Topology.erdos_renyi(n_agents, connectivity, seed=seed + t)
    )
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
    }


def _learner(config: Config, name: str, t: int) -> ModelDiffusion:
    """Return the learner of a time step, for the network or a fully connected one."""
    rounds, seed = int(config["rounds"]), int(config["seed"])
    if config["score"] == "paper":
        mu, times = FULL if name == "full" or config["connectivity"] == 1 else SPARSE
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
        options={"penalty": PENALTY / (int(config["clients"]) * t)},
    )


def _nmf(config: Config, stream: Stream, t: int) -> dict[str, NDArray[Any]]:
    """Return what scikit-learn's NMF of all earlier blocks leaves of the documents of block t."""
    from sklearn.decomposition import NMF  # an extra: not needed to import this module
    from sklearn.exceptions import ConvergenceWarning

    size = stream.novel.shape[1]
    seed = sklearn_seed(int(config["seed"]))
    model = NMF(int(config["clients"]) * t, max_iter=NMF_ITERATIONS, random_state=seed)
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


@cached_by_file(maxsize=1)
def _stream(data: str, seed: int, terms: int, block: int) -> Stream:
    """Return the documents as unit TF-IDF vectors, in blocks.

    A term's weight is its count times ``log(n / documents that have it)``. Of the terms, those
    that occur in the most documents are kept.
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
    weighted = counts[:, kept] @ sparse.diags_array(np.log(n / having[kept]))
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


# What a person reads ------------------------------------------------------------------------


def _table(
    config: Config,
    stream: Stream,
    areas: Mapping[str, Mapping[int, Sequence[float]]],
    own: Sequence[Mapping[str, NDArray[Any]]],
) -> Table:
    rows = []
    for t in stream.steps:
        network = areas["network"][t]
        others = (f"{np.mean(areas[name][t]):.3f}" for name in ("full", "nmf") if name in areas)
        rows.append(
            [
                str(t),
                str(int(stream.novel[t].sum())),
                str(len(network)),
                f"{np.mean(network):.3f}",
                f"{min(network):.3f}",
                *others,
            ]
        )
    return Table(
        "Table IV: area under the ROC curve",
        "Per time step: novel documents of its block, agents, the mean over the agents' own "
        "scores, the least of them; on a fully connected network; and the residuals of "
        "scikit-learn's NMF of all earlier blocks in one place, as many components as agents.",
        [
            "time step",
            "novel",
            "agents",
            f"network, p = {float(config['connectivity']):g}",
            "least agent",
            *(METHODS[name] for name in ("full", "nmf") if name in areas),
        ],
        rows,
    )


def _pictures(
    stream: Stream,
    scores: Mapping[str, Mapping[int, Matrix]],
    areas: Mapping[str, Mapping[int, Sequence[float]]],
) -> list[Picture]:
    from sklearn.metrics import roc_curve  # an extra: not needed to import this module

    from perdl_experiments.plots import COLORS, _figure, _plain  # an extra

    columns = min(3, len(stream.steps))
    n_rows = -(-len(stream.steps) // columns)
    figure = _figure(3.2 * columns + 0.6, 3.0 * n_rows + 0.6)
    grid = figure.subplots(n_rows, columns, sharey=True, squeeze=False).ravel()
    for axes, t in zip(grid, stream.steps, strict=False):
        _plain(axes)
        for color, (name, by_step) in zip(COLORS, scores.items(), strict=False):
            false, true, _ = roc_curve(stream.novel[t], by_step[t][0])
            area = np.mean(areas[name][t])
            line = "--" if name == "full" else "-"  # it often lies on the network's
            axes.plot(false, true, line, color=color, label=f"{METHODS[name]}: {area:.2f}")
        axes.plot([0, 1], [0, 1], ls=":", lw=1, color="black")
        axes.set_title(f"time step {t}", fontsize=10, loc="left")
        axes.legend(frameon=False, loc="lower right", fontsize=8)
    for axes in grid[len(stream.steps) :]:
        axes.set_visible(False)
    figure.supxlabel("false alarms", fontsize=10)
    figure.supylabel("novel documents detected", fontsize=10)
    return [
        Picture(
            "fig7",
            "Fig. 7: novel documents",
            "ROC curves by time step; the networks' are those of the first agent. The numbers are "
            "areas, means over agents.",
            figure,
        )
    ]


def _notes(config: Config, stream: Stream, own: Sequence[Mapping[str, NDArray[Any]]]) -> list[str]:
    n_blocks, block = stream.novel.shape
    clients = int(config["clients"])
    notes = [
        stream.about,
        f"{n_blocks} blocks of {block} documents, {stream.left} left over; the first is only "
        f"learned from. {len(stream.terms):,} terms, those in the most documents; TF-IDF of the "
        "whole collection, unit norm.",
        f"{clients} agents with one atom each, and {clients} more in every time step; connected "
        f"with probability {float(config['connectivity']):g}, drawn anew in every time step. All "
        f"agents see the documents, in batches of {BATCH}, once.",
    ]
    if config["score"] == "paper":
        notes.append(
            f"The paper's settings: Huber's loss, gamma = {GAMMA:g}, delta = {DELTA:g}, eta = "
            f"{ETA:g}; mu_w = 1 / t; ATC with mu = {SPARSE[0]:g} in "
            f"{SPARSE[1] * int(config['rounds'])} rounds, fully connected {FULL[0]:g} in "
            f"{FULL[1] * int(config['rounds'])}; the raw cost, averaged by (68) with mu_g = "
            f"{MU_G:g}. The inference stays far from its limit."
        )
    else:
        worst = max(float(one["residual"]) for one in own)
        notes.append(
            f"Squared loss, gamma = {ETA * GAMMA:g}, delta = {ETA * DELTA:g} (the paper's times "
            f"eta), mu_w = {1 / ETA:g} / t; consensus ADMM, at most "
            f"{CONVERGED * int(config['rounds'])} rounds per batch; the cost over that of "
            f"explaining nothing. The duals' relative error, by the agents' own estimates, was "
            f"{worst:.2g} at most."
        )
    return notes
