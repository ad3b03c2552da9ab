"""Surveillance video: Section 5.3, Fig. 4 and 6 of PerMA, frames as clients.

Liang, Shi, Al Kontar, Fattahi, "Personalized Dictionary Learning for Heterogeneous Datasets",
NeurIPS 2023. The frames share the background; the moving objects are local: with the codes of both,
``C_g @ D_g`` is a frame's background (A.3). Its objects are the residual, for every method.

==============================  =================================================================
paper (A.3)                     here
==============================  =================================================================
frame i, N = 62                 client i; ``to_samples(frame, patch)``, see `clips`
Y_i, 576 x 1600                 pixels of a 40x40 patch are samples, patches x channels features
r^g = 30, r_i = 576             ``n_global``, ``n_atoms``
k = 50 atoms of a code          ``n_nonzero``, by OMP; all atoms of the client by default
Algorithm 5                     ``learner="gradient"``
Algorithm 6                     `separate`, at the end; ``refine_steps`` before every round too
==============================  =================================================================

Deviations, and why. Patches are small (2x2): the background of all frames then has an exact
dictionary of 4 atoms, in which an object finds little room. The server takes the coordinate-wise
median of the clients' atoms, which an object that passes does not move; means leave its ghost in
the background. PerMA and PerPCA run with both, so that the two methods are compared and not their
aggregations. The local atoms that a frame is taken apart with start from the principal directions
of what the global atoms leave of it, and Algorithm 6 refines them; refined before every round
(``refine_steps=5``, the paper's), they take a share of the background with them.

Where something covers a pixel in most of the frames, neither this nor the temporal median sees what
is behind it. Nothing of a frame is private here: its first atom is the frame itself, made small.

Without ``--data`` it draws a street: houses, noise, light that drifts, cars. It takes a video file,
a GIF, a folder of frames, or ``FILE.npz`` with ``X`` (frames, h, w[, 3]) and, if known, ``mask``
(frames, h, w), not zero where an object is. Videos are read by imageio, which scikit-image brings;
for most formats ``pip install 'imageio[pyav]'``. Of a clip of more than 60 frames, 60 are taken,
evenly spread; ``--clients`` takes so many.

Metrics, the suffixes ``_perma_mean`` (PerMA with the mean), ``_perpca`` and ``_perpca_median``
(PerPCA with the mean and with the median), and, of all frames in one place, ``_hmf`` and ``_tcmf``
(`perdl_experiments.components`), ``_pcp`` (robust PCA), ``_median`` and ``_median_masked`` (of
the frames, and of those in which the first median finds no object) standing for the methods beside
the one that the options describe: ``psnr_background`` (dB, all frames' backgrounds together),
``auc_objects`` and ``f1_objects`` (pixels, where a mask is known); ``psnr_raw`` (the frames as they
are), ``perma_seconds``. Where the true background is not known, it is the median over the frames in
which no object covers a pixel, brought to every frame's light. Besides figures there is
``video.gif``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from flwr_perdl.clients import DictionaryClient
from flwr_perdl.core.checks import Matrix, check_count
from flwr_perdl.dictionary import (
    Learner,
    WarmStart,
    normalize_atoms,
    principal_directions,
    refine_local,
    remainder,
)
from flwr_perdl.protocol.records import PARTITION_ID, to_arrays
from flwr_perdl.strategies import PerMA
from perdl_experiments.clips import Clip, load_clip, still, to_frame, to_samples
from perdl_experiments.components import hmf, robust_components
from perdl_experiments.data import cached_by_file
from perdl_experiments.engine import EvaluateFn
from perdl_experiments.engine import federate as federate_here
from perdl_experiments.outcome import Outcome
from perdl_experiments.perpca import personalized_pca
from perdl_experiments.render import FAILED, Record
from perdl_experiments.robust_pca import principal_component_pursuit
from perdl_experiments.studies._experiment import (
    GENERAL,
    Arrays,
    Federate,
    Keep,
    LearnerConfig,
    attempt,
)

ERROR = "psnr_background"

#: Iterations of Algorithm 6 with which a frame is taken apart at the end.
REFINE = 5
#: Rounds of HMF. More change nothing in the first two decimals of its PSNR.
HMF_ROUNDS = 20
#: TCMF, chosen on drawn streets of seeds that no page shows; see video.toml.
TCMF = partial(robust_components, n_local=0, n_rounds=0, n_iter=16, decay=0.65, floor=0.1)
#: Pixels (sigma of a Gaussian) over which an object's strength is averaged, for every method.
BLUR = 1.0
#: A pixel is taken for an object's where that is so many times its median over the clip.
FOUND = 3.0
_SHOWN = 4  # frames in the strip
_MOST_WIDTH = 200  # of a panel of the film, in pixels


@dataclass(frozen=True, kw_only=True)
class Config(LearnerConfig):
    """The options of video.toml."""

    patch: int
    n_global: int
    n_nonzero: int
    refine_steps: int

    def check(self) -> None:
        """Reject options that do not fit together."""
        check_count("n_global", self.n_global, 1, min(self.patch**2, self.n_atoms))

    def make_learner(self, n_atoms: int | None = None) -> Learner:
        """Return the learner; a sample is coded with `n_nonzero` atoms, or with all."""
        count = self.n_atoms if n_atoms is None else n_atoms
        return GENERAL[self.learner](count, n_nonzero=min(self.n_nonzero or count, count))

    @property
    def clip(self) -> Clip:
        """The frames that are clients."""
        return _taken(self.data, self.seed, self.clients)


class Scores(NamedTuple):
    """How good a separation is; what needs a mask is NaN without one."""

    psnr_background: float
    auc_objects: float
    f1_objects: float


def client(context: Context, config: Config) -> DictionaryClient:
    """Return the client of frame ``context.node_config["partition-id"]``."""
    frame = config.clip.frames[int(context.node_config[PARTITION_ID])]
    samples, learner = to_samples(frame, config.patch), config.make_learner()
    return DictionaryClient(samples, learner, context, start=principal_start, **config.private)


def strategy(config: Config, **options: Any) -> PerMA:
    """Return the strategy; ``options`` are the server's own."""
    given = {"refine_steps": config.refine_steps, "evaluate_every": config.rounds}
    return config.strategy(config.n_global, **{**given, **options})


def federations(config: Config) -> list[Config]:
    """Return the config of the one federation, with as many clients as frames."""
    frames = len(load_clip(config.data, config.seed).frames)
    return [replace(config, clients=check_count("clients", config.clients or frames, 2, frames))]


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
    clip, patch = config.clip, config.patch
    truth = still(clip) if clip.background is None else clip.background
    samples = [to_samples(frame, patch) for frame in clip.frames]
    rank = max(int(np.linalg.matrix_rank(X)) for X in samples)
    if rank < config.n_global:
        raise ValueError(
            f"n_global must be at most {rank}, as no frame's patches have more in them, got "
            f"{config.n_global}."
        )

    federated = federate(config, evaluate_fn=_on_all_frames(samples, clip, truth, config))
    global_atoms, learner = federated.arrays[0], config.make_learner()
    ours = _assembled([separate(X, global_atoms, learner)[0] for X in samples], clip, patch)
    other = "median" if config.aggregation == "mean" else "mean"
    rivals = {
        name: keep(name, partial(attempt, compute), of=6)
        for name, compute in {
            f"perma_{other}": partial(_perma, samples, clip, replace(config, aggregation=other)),
            "perpca": partial(_perpca, samples, clip, config, "mean"),
            "perpca_median": partial(_perpca, samples, clip, config, "median"),
            "hmf": partial(_hmf, samples, clip, config),
            "tcmf": partial(_tcmf, samples, clip, config),
            "pcp": partial(_robust_pca, clip),
        }.items()
    }
    median = still(Clip(clip.frames))
    again = still(Clip(clip.frames, found(clip.frames - median)))
    methods = {"perma": ours}
    for name, one in rivals.items():
        if FAILED not in one:
            methods[name] = one["background"]
    methods |= {"median": median, "median_masked": again}
    evaluations = federated.result.evaluate_metrics_serverapp
    curve = [float(str(evaluations[r][ERROR])) for r in sorted(evaluations)]
    raw = _psnr(clip.frames, truth)
    return Outcome(
        records=list(_records(methods, rivals, raw, federated.seconds, clip, truth)),
        curves={ERROR: curve},
        arrays={
            "global_atoms": global_atoms,
            "background": _bytes(ours),
            "objects": (clip.frames - ours).astype(np.float16),
        },
        figures=_figures(clip, methods),
        facts=_facts(config, clip),
        **federated.cost,
    )


@cached_by_file(maxsize=2)
def _taken(data: str, seed: int, count: int) -> Clip:
    return load_clip(data, seed).take(count)


# The methods ---------------------------------------------------------------------------------


def _assembled(backgrounds: Sequence[Matrix], clip: Clip, patch: int) -> Matrix:
    """Return the frames of which these are the samples."""
    shape = clip.frames.shape[1:]
    return np.stack([to_frame(one, shape, patch) for one in backgrounds])


class _Frames:
    """The federation that the experiment is, for an engine."""

    client, strategy = staticmethod(client), staticmethod(strategy)


def _perma(samples: list[Matrix], clip: Clip, config: Config) -> Arrays:
    """Return what PerMA makes of the clip with another aggregation; in process on every engine."""
    (global_atoms,) = federate_here(_Frames, config).arrays
    learner = config.make_learner()
    backgrounds = [separate(X, global_atoms, learner)[0] for X in samples]
    return {"background": _assembled(backgrounds, clip, config.patch)}


def _perpca(samples: list[Matrix], clip: Clip, config: Config, aggregation: str) -> Arrays:
    """Return what PerPCA makes of the clip, with as many components as PerMA has atoms."""
    n_global, n_local = config.n_global, max(config.n_atoms - config.n_global, 1)
    learned = personalized_pca(
        samples, n_global, n_local, n_rounds=config.rounds, aggregation=aggregation
    )
    U = learned.global_components
    return {"background": _assembled([(X @ U.T) @ U for X in samples], clip, config.patch)}


def _hmf(samples: list[Matrix], clip: Clip, config: Config) -> Arrays:
    """Return what HMF makes of the clip, with as many components as PerMA has atoms."""
    n_local = max(config.n_atoms - config.n_global, 1)
    factors = hmf(samples, config.n_global, n_local, n_rounds=HMF_ROUNDS)
    return {"background": _assembled([one.common for one in factors], clip, config.patch)}


def _tcmf(samples: list[Matrix], clip: Clip, config: Config) -> Arrays:
    """Return what TCMF makes of the clip: a frame's objects are outliers, not components."""
    factors = TCMF(samples, config.n_global).factors
    return {"background": _assembled([one.common for one in factors], clip, config.patch)}


def _robust_pca(clip: Clip) -> Arrays:
    """Return what principal component pursuit makes of all frames in one place."""
    learned = principal_component_pursuit(clip.frames.reshape(len(clip.frames), -1))
    return {"background": learned.low_rank.reshape(clip.frames.shape)}


def _on_all_frames(samples: list[Matrix], clip: Clip, truth: Matrix, config: Config) -> EvaluateFn:
    """Return the server's evaluation: all frames' backgrounds with the global atoms alone."""
    learner, patch = config.make_learner(), config.patch

    def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
        atoms = to_arrays(arrays)
        if round_ == 0 or not atoms:
            return None
        G = atoms[0]
        found = [learner.code(X, G) @ G for X in samples]
        return MetricRecord({ERROR: _psnr(_assembled(found, clip, patch), truth)})

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
        Root mean square over channels and, with Gaussian weights, over neighbors.
    """
    energy = gaussian_filter(np.square(objects, dtype=np.float32).mean(axis=3), (0, BLUR, BLUR))
    result: Matrix = np.sqrt(energy)
    return result


def found(objects: Matrix) -> NDArray[np.bool_]:
    """Return which pixels are taken for objects': a strength of three times the clip's median."""
    values = strength(objects)
    result: NDArray[np.bool_] = values > FOUND * np.median(values)
    return result


def _scores(background: Matrix, clip: Clip, truth: Matrix) -> Scores:
    psnr, objects = _psnr(background, truth), clip.frames - background
    if clip.mask is None or clip.mask.all() or not clip.mask.any():
        return Scores(psnr, np.nan, np.nan)
    from sklearn.metrics import f1_score, roc_auc_score  # an extra: clients must not need it

    mask = clip.mask.ravel()
    return Scores(
        psnr,
        float(roc_auc_score(mask, strength(objects).ravel())),
        float(f1_score(mask, found(objects).ravel(), zero_division=0)),
    )


def _psnr(frames: Matrix, truth: Matrix) -> float:
    """Return the PSNR of a whole clip, in dB; 100 where nothing differs."""
    return float(-10 * np.log10(max(np.mean((frames - truth) ** 2, dtype=np.float64), 1e-10)))


def _records(
    methods: Mapping[str, Matrix],
    rivals: Mapping[str, Arrays],
    raw: float,
    seconds: float,
    clip: Clip,
    truth: Matrix,
) -> Iterator[Record]:
    """Yield the scores of all methods, the best background's first, and those that failed.

    What needs a mask is left out where there is none.
    """
    yield Record("perma_seconds", seconds, unit="s")
    scores = {"raw": Scores(raw, np.nan, np.nan)}
    scores |= {method: _scores(them, clip, truth) for method, them in methods.items()}
    if clip.background is None and clip.mask is None:  # the median is what they are compared with
        scores["median"] = scores["median"]._replace(psnr_background=np.nan)
    for method in sorted(scores, key=lambda one: -np.nan_to_num(scores[one].psnr_background)):
        for name, value in scores[method]._asdict().items():
            if not np.isnan(value):
                yield Record(name, value, method)
    for method, one in rivals.items():
        if FAILED in one:
            yield Record(FAILED, str(one[FAILED]), method)


def _facts(config: Config, clip: Clip) -> dict[str, Any]:
    n_frames, height, width, channels = clip.frames.shape
    return {
        "n_frames": n_frames,
        "height": height,
        "width": width,
        "color": "color" if channels == 3 else "gray",
        "n_samples": config.patch**2,
        "unknown": clip.background is None,
        "masked": clip.mask is not None,
        "uncovered": " in which no object covers the pixel" * (clip.mask is not None),
        "blur": BLUR,
        "times": FOUND,
        "painted": (
            "Last: pixels found in green, missed in red, found wrongly in blue."
            * (clip.mask is not None)
        ),
    }


def _figures(clip: Clip, methods: Mapping[str, Matrix]) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: clients must not need it

    at = np.linspace(0, len(clip.frames) - 1, min(_SHOWN, len(clip.frames))).astype(int)
    named = {"PerMA": methods["perma"]}
    titles = {"perpca": "PerPCA", "tcmf": "TCMF"}  # PerPCA as its authors have it, with the mean
    named |= {title: methods[name] for name, title in titles.items() if name in methods}
    columns = {"frame": clip.frames[at]}
    for title, background in named.items():
        columns[f"{title}: background"] = background[at]
        columns[f"{title}: objects"] = _gray((clip.frames - background)[at])
    if clip.mask is not None:
        columns["objects found (PerMA)"] = _outlined(clip, methods["perma"])[at]
    return {
        "strip": pictures.side_by_side({title: _rgb(them) for title, them in columns.items()}),
        "video": _film(clip, methods),
    }


def _film(clip: Clip, methods: Mapping[str, Matrix]) -> NDArray[np.uint8]:
    """Return frame, background and objects; below it PerPCA's, under the frame what is found."""
    ours = methods["perma"]
    theirs = methods.get("perpca", clip.frames)
    top = [clip.frames, ours, _gray(clip.frames - ours)]
    below = [_outlined(clip, ours), theirs, _gray(clip.frames - theirs)]
    rows = [np.concatenate([_bytes(_rgb(panel)) for panel in row], axis=2) for row in (top, below)]
    every = -(-clip.frames.shape[2] // _MOST_WIDTH)
    return np.concatenate(rows, axis=1)[:, ::every, ::every]


def _gray(objects: Matrix) -> Matrix:
    shown: Matrix = np.clip(objects + np.float32(0.5), 0, 1)
    return shown


def _rgb(frames: Matrix) -> Matrix:
    return np.broadcast_to(frames, (*frames.shape[:3], 3))


def _outlined(clip: Clip, background: Matrix) -> Matrix:
    """Return pale frames with the pixels found in green, missed in red, found wrongly in blue."""
    pale = 0.5 + 0.5 * _rgb(clip.frames.mean(axis=3, keepdims=True))
    there = found(clip.frames - background)
    mask = there if clip.mask is None else clip.mask
    painted = pale.copy()
    painted[there & mask] = (0.1, 0.65, 0.2)
    painted[~there & mask] = (0.85, 0.1, 0.1)
    painted[there & ~mask] = (0.1, 0.3, 0.9)
    return painted


def _bytes(frames: Matrix) -> NDArray[np.uint8]:
    return (255 * np.clip(frames, 0, 1)).round().astype(np.uint8)
