"""Surveillance video: Section 5.3, Fig. 4 and 6 of P0, frames as clients.

P0 = Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023. What all frames share is the background, what each has for itself the moving objects:
with the codes of both, ``C_g @ D_g`` is a frame's background and ``C_l @ D_l`` its objects (A.3).

==============================  =================================================================
paper (A.3)                     here
==============================  =================================================================
frame i, N = 62                 client i; ``to_samples(frame, patch)``, see `clips`
Y_i, 576 x 1600                 pixels of a 40x40 patch are samples, patches x channels features
r^g = 30, r_i = 576             ``n_global``, ``n_atoms``
Algorithm 5                     ``learner="gradient"``
Algorithm 6                     `separate`, at the end; ``refine_steps`` before every round too
k = 50 atoms                    all atoms of the client (orthogonal matching pursuit)
==============================  =================================================================

Deviations, and why. Patches are small (2x2): the background of all frames then has an exact
dictionary of 4 atoms, in which an object finds little room. The server takes the coordinate-wise
median of the clients' atoms, which an object that passes does not move; means leave its ghost in
the background. The local atoms that a frame is taken apart with start from the principal directions
of what the global atoms leave of it, and Algorithm 6 refines them; refined before every round
(``refine_steps=5``, the paper's), they take a share of the background with them.

Where something covers a pixel in most of the frames, neither this nor the temporal median sees what
is behind it. Nothing of a frame is private here: its first atom is the frame itself, made small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from flwr_perdl._checks import Matrix, check_choice, check_count
from flwr_perdl._records import PARTITION_ID, to_arrays
from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import Learner, WarmStart, normalize_atoms, refine_local
from flwr_perdl.dictionary.atoms import principal_directions
from flwr_perdl.dictionary.coding import remainder
from flwr_perdl.dictionary.perpca import personalized_pca
from flwr_perdl.strategies import PerMA
from perdl_experiments.clips import Clip, load_clip, still, to_frame, to_samples
from perdl_experiments.data import cached_by_file
from perdl_experiments.engine import Config, EvaluateFn
from perdl_experiments.outcome import Film, Outcome, Picture, Table
from perdl_experiments.studies._experiment import (
    GENERAL,
    MIN_SUPPORT,
    Federate,
    Keep,
    Value,
    make_strategy,
    private,
)

NAME = "video"
ABOUT = "Background and moving objects of a video, every frame a client"
SOURCE = "Liang et al., NeurIPS 2023, Section 5.3, Fig. 4 and 6"
DEFAULTS: dict[str, Value] = {
    "clients": 0,
    "rounds": 6,
    "seed": 0,
    "data": "",
    "patch": 2,
    "n_atoms": 8,
    "n_global": 4,
    "learner": "gradient",
    "refine_steps": 0,
    "aggregation": "median",
    "matching": "consensus",
    "min_support": MIN_SUPPORT,
}
HELP: dict[str, str] = {
    "clients": "number of frames; 0: as many as the clip has, at most 60",
    "data": "a video file, a folder of frames, or `.npz` with `X`",
    "patch": "side of a patch: its pixels are samples, the patches features",
    "n_atoms": "atoms of each frame",
    "n_global": "of which global; a background has at most patch²",
    "learner": "a frame's algorithm: `gradient` (Algorithm 5), `mod` or `ksvd`",
    "refine_steps": (
        "iterations of local refinement before every round; the paper's is 5, which "
        "costs background here: at the end every frame is refined anyway"
    ),
    "aggregation": (
        "how updates are averaged: `median`, or as elsewhere; averages leave ghosts of the cars"
    ),
}
FIGURES: tuple[str, ...] = ("strip.png", "psnr.png", "video.gif")
ERROR = "psnr_background"

#: Iterations of Algorithm 6 with which a frame is taken apart at the end.
REFINE = 5
#: Pixels (sigma of a Gaussian) over which an object's strength is averaged, for every method.
BLUR = 1.0
#: A pixel is taken for an object's where that is so many times its median over the clip.
FOUND = 3.0
#: Shares of ``n_global`` that PerPCA is tuned over.
PCA_SHARES = (1.0, 0.5, 0.25)
_SHOWN = 4  # frames in the strip
_MOST_WIDTH = 200  # of a panel of the film, in pixels


class Parts(NamedTuple):
    """What a method makes of a clip, both like ``clip.frames``."""

    background: Matrix
    objects: Matrix


class Scores(NamedTuple):
    """How good a separation is; what needs a mask is NaN without one."""

    psnr: float
    auc: float
    f1: float


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of frame ``context.node_config["partition-id"]``."""
    clip, patch = _clip(config), _patch(config)
    frame = clip.frames[int(context.node_config[PARTITION_ID])]
    return DictionaryClient(
        to_samples(frame, patch),
        _learner(config),
        context,
        start=principal_start,
        **private(config),
    )


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own."""
    given = {"refine_steps": int(config["refine_steps"]), "evaluate_every": int(config["rounds"])}
    return make_strategy(config, _n_global(config), {**given, **options})


def federations(config: Config) -> list[Config]:
    """Return the config of the one federation, with as many clients as frames."""
    frames = len(load_clip(str(config["data"]), int(config["seed"])).frames)
    clients = int(config["clients"]) or frames
    return [{**config, "clients": check_count("clients", clients, 2, frames)}]


def principal_start(X: Matrix, learner: Learner, *, rng: np.random.Generator) -> WarmStart:
    """Start from the principal directions of a frame, which frames have nearly in common.

    Atoms beyond their number are random unit vectors, of another draw at every client.
    """
    found = principal_directions(X, min(learner.n_atoms, X.shape[1]))
    more = rng.standard_normal((learner.n_atoms - len(found), X.shape[1])).astype(X.dtype)
    D = np.vstack([found, normalize_atoms(more)])
    loss = learner.loss(X, learner.code(X, D), D)
    return WarmStart(D, loss, (loss,))


def separate(X: Matrix, G: Matrix, learner: Learner) -> tuple[Matrix, Matrix]:
    """Take a frame apart: what its global and what its local atoms make of it (A.3).

    Parameters
    ----------
    X : ndarray of shape (n_samples, n_features)
        The frame's samples.
    G : ndarray of shape (n_global, n_features)
        The global atoms.
    learner : Learner
        With ``n_atoms``, global and local ones.

    Returns
    -------
    background, objects : ndarray of shape (n_samples, n_features)
    """
    rest = remainder(X, learner.code(X, G) @ G)
    local = principal_directions(rest, max(learner.n_atoms - len(G), 0))
    D = refine_local(X, np.vstack([G, local]), len(G), learner, n_iter=REFINE)
    C = learner.code(X, D)
    return C[:, : len(G)] @ G, C[:, len(G) :] @ D[len(G) :]


def run(config: Config, federate: Federate, keep: Keep) -> Outcome:
    """Run the federation and PerPCA, take the clip apart with both, and measure."""
    (config,) = federations(config)
    clip, patch = _clip(config), _patch(config)
    truth = still(clip) if clip.background is None else clip.background
    samples = [to_samples(frame, patch) for frame in clip.frames]
    rank = max(int(np.linalg.matrix_rank(X)) for X in samples)
    if rank < _n_global(config):
        raise ValueError(
            f"n_global must be at most {rank}, as no frame's patches have more in them, got "
            f"{config['n_global']}."
        )

    federated = federate(config, evaluate_fn=_on_all_frames(samples, clip, truth, config))
    global_atoms, learner = federated.arrays[0], _learner(config)
    ours = _assembled([separate(X, global_atoms, learner) for X in samples], clip, patch)
    tuned = keep("perpca", lambda: _perpca(samples, clip, truth, config))
    median = still(Clip(clip.frames))
    methods = {
        "": ours,
        "_perpca": Parts(tuned["background"], tuned["objects"]),
        "_median": Parts(median, clip.frames - median),
    }
    scores = {name: _scores(parts, clip, truth) for name, parts in methods.items()}
    metrics = {"psnr_raw": _psnr(clip.frames, truth), "perma_seconds": federated.seconds}
    for name, score in scores.items():
        metrics |= _named(score, name)
    metrics["n_global_perpca"] = float(tuned["n_global"])
    if clip.background is None:  # then the median is what backgrounds are held against
        del metrics["psnr_background_median"]
    evaluations = federated.result.evaluate_metrics_serverapp
    curve = [float(str(evaluations[r][ERROR])) for r in sorted(evaluations)]
    return Outcome(
        metrics=metrics,
        curves={ERROR: curve},
        arrays={
            "global_atoms": global_atoms,
            "background": _bytes(ours.background),
            "objects": ours.objects.astype(np.float16),
        },
        tables=[_table(metrics, tuned)],
        pictures=_pictures(clip, methods, curve, metrics),
        notes=list(_notes(config, clip, tuned)),
        rounds=federated.rounds,
        floats_up=federated.floats_up,
        floats_down=federated.floats_down,
        films=[_film(clip, methods)],
    )


# The options ---------------------------------------------------------------------------------


def _patch(config: Config) -> int:
    return check_count("patch", config["patch"], 2, 40)


def _n_global(config: Config) -> int:
    most = min(_patch(config) ** 2, int(config["n_atoms"]))
    return check_count("n_global", config["n_global"], 1, most)


def _learner(config: Config) -> Learner:
    """Return the learner; every sample is coded with all atoms."""
    n_atoms = check_count("n_atoms", config["n_atoms"], 1)
    name = check_choice("learner", config["learner"], GENERAL)
    return GENERAL[name](n_atoms, n_nonzero=n_atoms)


@cached_by_file(maxsize=2)
def _taken(data: str, seed: int, count: int) -> Clip:
    return load_clip(data, seed).take(count)


def _clip(config: Config) -> Clip:
    """Return the frames that are clients."""
    return _taken(str(config["data"]), int(config["seed"]), int(config["clients"]))


# The methods ---------------------------------------------------------------------------------


def _assembled(parts: Sequence[tuple[Matrix, Matrix]], clip: Clip, patch: int) -> Parts:
    """Return frames of what every frame's samples were taken apart into."""
    height, width, channels = clip.frames.shape[1:]
    return Parts(
        *(
            np.stack([to_frame(one[kind], (height, width, channels), patch) for one in parts])
            for kind in range(2)
        )
    )


def _perpca(
    samples: list[Matrix], clip: Clip, truth: Matrix, config: Config
) -> dict[str, NDArray[Any]]:
    """Return the best of PerPCA over its grid, judged by the background that it ought to find."""
    n_global, n_local = _n_global(config), max(int(config["n_atoms"]) - _n_global(config), 1)
    tried: dict[int, tuple[float, Parts]] = {}
    for count in sorted({max(round(share * n_global), 1) for share in PCA_SHARES}):
        found = personalized_pca(samples, count, n_local, n_rounds=int(config["rounds"]))
        U = found.global_components
        parts = _assembled(
            [
                ((X @ U.T) @ U, (X @ V.T) @ V)
                for X, V in zip(samples, found.local_components, strict=True)
            ],
            clip,
            _patch(config),
        )
        tried[count] = _psnr(parts.background, truth), parts
    best = max(tried, key=lambda count: tried[count][0])
    return {
        "background": tried[best][1].background,
        "objects": tried[best][1].objects,
        "n_global": np.array(best),
        "tried": np.array(list(tried)),
    }


def _on_all_frames(samples: list[Matrix], clip: Clip, truth: Matrix, config: Config) -> EvaluateFn:
    """Return the server's evaluation: all frames' backgrounds with the global atoms alone."""
    learner, patch = _learner(config), _patch(config)

    def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        atoms = to_arrays(arrays)
        if round_ == 0 or not atoms:
            return None
        G = atoms[0]
        found = [(learner.code(X, G) @ G, X) for X in samples]
        return MetricRecord({ERROR: _psnr(_assembled(found, clip, patch).background, truth)})

    return evaluate


# Measures ------------------------------------------------------------------------------------


def strength(objects: Matrix) -> Matrix:
    """Return how strongly every pixel belongs to an object.

    Parameters
    ----------
    objects : ndarray of shape (n_frames, height, width, channels)
        What is not background.

    Returns
    -------
    ndarray of shape (n_frames, height, width)
        Root mean square over channels and, with Gaussian weights, over neighbours.
    """
    energy = gaussian_filter(np.square(objects, dtype=np.float32).mean(axis=3), (0, BLUR, BLUR))
    result: Matrix = np.sqrt(energy)
    return result


def found(objects: Matrix) -> NDArray[np.bool_]:
    """Return which pixels are taken for objects': a strength of three times the clip's median."""
    values = strength(objects)
    result: NDArray[np.bool_] = values > FOUND * np.median(values)
    return result


def _scores(parts: Parts, clip: Clip, truth: Matrix) -> Scores:
    psnr = _psnr(parts.background, truth)
    if clip.mask is None or clip.mask.all() or not clip.mask.any():
        return Scores(psnr, np.nan, np.nan)
    from sklearn.metrics import f1_score, roc_auc_score  # an extra: clients must not need it

    mask = clip.mask.ravel()
    return Scores(
        psnr,
        float(roc_auc_score(mask, strength(parts.objects).ravel())),
        float(f1_score(mask, found(parts.objects).ravel(), zero_division=0)),
    )


def _psnr(frames: Matrix, truth: Matrix) -> float:
    """Return the PSNR of a whole clip, in dB; 100 where nothing differs."""
    return float(-10 * np.log10(max(np.mean((frames - truth) ** 2, dtype=np.float64), 1e-10)))


def _named(score: Scores, method: str) -> dict[str, float]:
    named = zip(("psnr_background", "auc_objects", "f1_objects"), score, strict=True)
    return {f"{name}{method}": value for name, value in named if not np.isnan(value)}


# The report ----------------------------------------------------------------------------------


def _table(metrics: Mapping[str, float], tuned: Mapping[str, NDArray[Any]]) -> Table:
    names = {
        "": "PerMA",
        "_perpca": f"PerPCA ({int(tuned['n_global'])} shared)",
        "_median": "Temporal median",
    }

    def cell(name: str, digits: int) -> str:
        return f"{metrics[name]:.{digits}f}" if name in metrics else "-"

    return Table(
        "Background and objects",
        "PSNR (dB) of all frames' backgrounds; area under the ROC curve and F1 of the pixels of "
        "moving objects, where it is known which they are. The temporal median, brought to every "
        "frame's light, sees all frames in one place: the mark that separation by a federation "
        "is to come near. Raw frames have the objects and the noise in them.",
        ["", "background PSNR", "objects AUC", "objects F1"],
        [
            ["Raw frames", f"{metrics['psnr_raw']:.2f}", "-", "-"],
            *(
                [
                    title,
                    cell(f"psnr_background{method}", 2),
                    cell(f"auc_objects{method}", 4),
                    cell(f"f1_objects{method}", 3),
                ]
                for method, title in names.items()
            ),
        ],
    )


def _pictures(
    clip: Clip, methods: Mapping[str, Parts], curve: list[float], metrics: Mapping[str, float]
) -> list[Picture]:
    from perdl_experiments import pictures, plots  # an extra: clients must not need it

    ours, theirs = methods[""], methods["_perpca"]
    at = np.linspace(0, len(clip.frames) - 1, min(_SHOWN, len(clip.frames))).astype(int)
    columns = {
        "frame": clip.frames[at],
        "PerMA: background": ours.background[at],
        "PerMA: objects": _grey(ours.objects[at]),
        "PerPCA: background": theirs.background[at],
        "PerPCA: objects": _grey(theirs.objects[at]),
    }
    if clip.mask is not None:
        columns["objects found (PerMA)"] = _outlined(clip, ours)[at]
    levels = {"raw frames": "psnr_raw", "PerPCA": "psnr_background_perpca"}
    return [
        Picture(
            "strip",
            "Frames taken apart",
            "Global atoms make the background, a frame's own atoms its moving objects (drawn on "
            "grey); the paper's Fig. 4, and PerPCA beside it (Fig. 6). "
            + (
                "Last: pixels found in green, missed in red, found wrongly in blue."
                * (clip.mask is not None)
            ),
            pictures.side_by_side({title: _rgb(them) for title, them in columns.items()}),
        ),
        Picture(
            "psnr",
            "The background against rounds",
            "All frames' backgrounds from the global atoms alone. Round 1 is the matching round.",
            plots.lines(
                {"PerMA": curve},
                x="communication round",
                y="PSNR (dB)",
                levels={title: metrics[name] for title, name in levels.items()},
            ),
        ),
    ]


def _film(clip: Clip, methods: Mapping[str, Parts]) -> Film:
    """Return frame, background and objects; below it PerPCA's, under the frame what is found."""
    ours, theirs = methods[""], methods["_perpca"]
    top = [clip.frames, ours.background, _grey(ours.objects)]
    below = [_outlined(clip, ours), theirs.background, _grey(theirs.objects)]
    rows = [np.concatenate([_bytes(_rgb(panel)) for panel in row], axis=2) for row in (top, below)]
    film = np.concatenate(rows, axis=1)
    every = -(-clip.frames.shape[2] // _MOST_WIDTH)
    return Film(
        "video",
        "The clip",
        "Above: the frames, PerMA's background and PerMA's objects. Below: the objects' pixels "
        "that PerMA finds (green; missed red, found wrongly blue, where the truth is known), "
        "PerPCA's background and objects.",
        film[:, ::every, ::every],
    )


def _grey(objects: Matrix) -> Matrix:
    shown: Matrix = np.clip(objects + np.float32(0.5), 0, 1)
    return shown


def _rgb(frames: Matrix) -> Matrix:
    return np.broadcast_to(frames, (*frames.shape[:3], 3))


def _outlined(clip: Clip, parts: Parts) -> Matrix:
    """Return pale frames with the pixels found in green, missed in red, found wrongly in blue."""
    pale = 0.5 + 0.5 * _rgb(clip.frames.mean(axis=3, keepdims=True))
    there = found(parts.objects)
    mask = there if clip.mask is None else clip.mask
    painted = pale.copy()
    painted[there & mask] = (0.1, 0.65, 0.2)
    painted[~there & mask] = (0.85, 0.1, 0.1)
    painted[there & ~mask] = (0.1, 0.3, 0.9)
    return painted


def _bytes(frames: Matrix) -> NDArray[np.uint8]:
    return (255 * np.clip(frames, 0, 1)).round().astype(np.uint8)


def _notes(config: Config, clip: Clip, tuned: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    n_frames, height, width, channels = clip.frames.shape
    patch = _patch(config)
    yield (
        f"{n_frames} frames of {height}x{width} pixels, "
        f"{'colour' if channels == 3 else 'grey'}; a client's samples are the {patch * patch} "
        f"pixels of a {patch}x{patch} patch, its features the patches."
    )
    if clip.background is None:
        yield (
            "The true background is not known: backgrounds are held against the median over the "
            "frames"
            + (" in which no object covers the pixel" if clip.mask is not None else "")
            + ", brought to every frame's light."
        )
    if clip.mask is None:
        yield "Which pixels are objects' is not known: there are no AUC and F1 (mask in the file)."
    tried = ", ".join(str(one) for one in tuned["tried"])
    yield (
        f"PerPCA has as many rounds and local components as PerMA, and of {tried} shared ones the "
        "number with the best background; PerMA's settings are the defaults."
    )
    yield (
        "A pixel's strength is the root mean square of the objects over its neighbours, with "
        f"Gaussian weights (sigma {BLUR:g}), for all methods; found is what has {FOUND:g} times "
        "the clip's median."
    )
