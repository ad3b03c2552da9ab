"""Denoising by a dictionary that is spread over a network: 196 agents with one atom each.

Chen, Towfic, Sayed, "Dictionary Learning over Distributed Models", IEEE TSP 2015, and the
image denoising that it refers to. The samples are the noisy image's own patches: batch by batch,
their duals are inferred and every agent updates its atom (Algorithm 1). Then all patches are
coded, and every pixel is the mean of the patches that cover it.

With ``connectivity = 1`` inference is computed in one place (``method="exact"``): its result is
what the agents of any connected network agree on in the end. Below 1, the agents find it by
messages between the neighbors of a random network, in far more time.

``--data FILE.npz`` with ``X`` (n, h, w), or one image (h, w), or, with ``y`` in the file, rows that
are square images; without it, scikit-image's camera. ``--rounds`` (400) counts batches of 64
patches.

Metrics: ``psnr_noisy``, ``psnr_denoised``, ``psnr_sklearn`` (the same coder),
``psnr_sklearn_lasso``, ``psnr_nlm`` (scikit-image's non-local means, which know the noise level, as
all do), ``ssim_`` and ``seconds_`` of the same.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.checks import Matrix
from flwr_perdl.network import ModelDiffusion, Objective, SparseSVD, Topology, exact_dual
from flwr_perdl.random import DATA, SERVER, spawn
from perdl_experiments.baselines import sklearn_seed
from perdl_experiments.data import (
    cached_by_file,
    check_pixels,
    read_arrays,
    read_npz,
    to_unit_range,
)
from perdl_experiments.measures import quality
from perdl_experiments.outcome import Outcome
from perdl_experiments.patches import Patches, cut, join
from perdl_experiments.render import FAILED, Record
from perdl_experiments.studies._experiment import Arrays, Keep, attempt
from perdl_experiments.studies._experiment import Config as Common

#: Height and width of a patch.
SIDE = 10
#: Patches whose duals travel together; the option `rounds` counts such batches.
BATCH = 64
#: gamma, in units of the noise's standard deviation.
GAMMA = 2.0
#: The step of the t-th batch is STEP * agents / t^DECAY: of many atoms, each is used less often.
STEP, DECAY = 0.015, 0.5
#: Relative error of the dual variables at which inference ends.
TOLERANCE = 0.05

#: Non-local means as scikit-image's documentation has them; ``h`` in units of the noise's sigma.
NLM: dict[str, int] = {"patch_size": 5, "patch_distance": 6}
NLM_H = 0.6

#: Patches coded in one piece.
_PIECE = 500


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of denoise.toml."""

    sigma: float
    atoms: int
    delta: float
    connectivity: float
    size: int
    images: int

    def check(self) -> None:
        """Reject options that do not fit together."""
        self.check_nodes(self.atoms, "atom")

    @property
    def task(self) -> Task:
        """The images, with noise and without."""
        level = self.sigma / 255
        return _make_task(self.data, level, self.size, self.images, self.seed, self.rounds)

    @property
    def objective(self) -> SparseSVD:
        """What the agents minimize."""
        return SparseSVD(gamma=GAMMA * self.sigma / 255, delta=self.delta)


class Task(NamedTuple):
    """What a config makes of the images.

    Attributes
    ----------
    clean, noisy : ndarray of shape (n_images, height, width)
        The images in [0, 1], and with noise.
    patches : list of Patches
        The noisy images'.
    order : ndarray of shape (n_rounds, BATCH)
        Rows of all patches together: what is learned from, round by round.
    """

    clean: Matrix
    noisy: Matrix
    patches: list[Patches]
    order: NDArray[np.intp]

    @property
    def X(self) -> Matrix:
        """All patches, (n_patches, SIDE * SIDE)."""
        return np.concatenate([one.X for one in self.patches])

    def rebuild(self, X: Matrix) -> Matrix:
        """Return the images that all patches together make, (n_images, height, width)."""
        ends = np.cumsum([len(one.X) for one in self.patches])[:-1]
        parts = zip(self.patches, np.split(X, ends), strict=True)
        return np.stack([join(one._replace(X=part)) for one, part in parts])


def run(config: Config, keep: Keep) -> Outcome:
    """Denoise the images by atoms learned from them, by scikit-learn's, and by non-local means."""
    task, objective = config.task, config.objective
    ours = keep("network", partial(_by_the_network, task, objective, config), of=3)
    theirs = keep(
        "scikit-learn", partial(attempt, partial(_by_sklearn, task, objective, config)), of=3
    )
    nlm = keep("non-local-means", partial(_by_nlm, task, config.sigma / 255), of=3)
    images = {"noisy": task.noisy, "denoised": ours["images"], "nlm": nlm["images"]}
    seconds = {"denoised": ours["seconds"], "nlm": nlm["seconds"]}
    if FAILED not in theirs:
        images |= {"sklearn": theirs["images"], "sklearn_lasso": theirs["images_lasso"]}
        seconds |= {"sklearn": theirs["seconds"], "sklearn_lasso": theirs["seconds_lasso"]}
    return Outcome(
        records=[
            *_records(task, images, seconds),
            Record("codes_per_patch", float(ours["codes_per_patch"])),
            *([Record(FAILED, str(theirs[FAILED]), "sklearn")] if FAILED in theirs else []),
        ],
        curves={},
        arrays={
            "atoms": ours["atoms"],
            **({"atoms_sklearn": theirs["atoms"]} if "atoms" in theirs else {}),
            "clean": task.clean,
            **{f"images_{name}": them for name, them in images.items()},
        },
        figures=_figures(task, images),
        rounds=int(ours["rounds"]),
        floats_up=float(ours["floats"]),
        floats_down=float(ours["floats"]),
        facts={
            "n_images": len(task.clean),
            "height": task.clean.shape[1],
            "width": task.clean.shape[2],
            "n_patches": sum(len(one.X) for one in task.patches),
            "n_learned": task.order.size,
            "agreed": config.connectivity == 1,
            "sent": int(ours["rounds"]),
        },
    )


# The network ---------------------------------------------------------------------------------


def _pieces(X: Matrix) -> list[Matrix]:
    return [X[start : start + _PIECE] for start in range(0, len(X), _PIECE)]


def _by_the_network(task: Task, objective: SparseSVD, config: Config) -> Arrays:
    """Learn and denoise over the network; return images, atoms and what it took."""
    n_agents, seed = config.atoms, config.seed
    share = config.connectivity
    topology = Topology.complete(n_agents)
    if share < 1:
        topology = Topology.erdos_renyi(n_agents, share, seed=seed)
    learner = ModelDiffusion(
        objective, step=STEP * n_agents, decay=DECAY, batch_size=BATCH, seed=seed
    )
    if share == 1:
        learner = replace(learner, method="exact", options={"tolerance": TOLERANCE})
    else:
        learner = replace(learner, tolerance=TOLERANCE)
    X = task.X
    model = learner.start(n_agents, X.shape[1], X.dtype)
    started = time.perf_counter()
    model = learner.partial_fit(model, X[task.order.ravel()], topology)
    learning = time.perf_counter() - started
    started, rounds, exchanges = time.perf_counter(), model.rounds, model.rounds * BATCH
    codes = []
    for part in _pieces(X):  # nu takes memory
        found = learner.infer(model, part, topology)
        codes.append(np.concatenate(found.codes, axis=1))
        rounds += found.rounds
        exchanges += found.rounds * len(part)
    Y = np.concatenate(codes)
    images = task.rebuild(Y @ model.dictionaries[:, 0])
    return {
        "images": images,
        "atoms": model.dictionaries[:, 0],
        "codes_per_patch": np.array(np.count_nonzero(Y) / len(X)),
        "seconds": np.array([learning, time.perf_counter() - started]),
        "rounds": np.array(rounds),
        "floats": np.array(exchanges * X.shape[1] * float(topology.degrees.mean())),
    }


def _coded(objective: Objective, X: Matrix, W: Matrix) -> Matrix:
    """Return the codes that the network would find with these atoms."""
    return exact_dual(objective, X, [W], tolerance=TOLERANCE).codes[0]


# scikit-learn --------------------------------------------------------------------------------


def _by_sklearn(task: Task, objective: SparseSVD, config: Config) -> Arrays:
    """Learn as many atoms from the same patches in the same order, and denoise with both coders.

    In float64 and by coordinate descent, with which it is fastest here.
    """
    from sklearn.decomposition import MiniBatchDictionaryLearning  # an extra
    from sklearn.exceptions import ConvergenceWarning

    X = task.X
    learner = MiniBatchDictionaryLearning(
        config.atoms,
        alpha=objective.gamma,
        batch_size=BATCH,
        max_iter=1,
        max_no_improvement=None,
        tol=0,
        shuffle=False,
        fit_algorithm="cd",
        transform_algorithm="lasso_cd",
        transform_alpha=objective.gamma,
        random_state=sklearn_seed(config.seed),
    )
    pieces = _pieces(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        started = time.perf_counter()
        learner.fit(X[task.order.ravel()].astype(np.float64))
        learned = time.perf_counter()
        W = learner.components_.astype(X.dtype)
        rebuilt = np.concatenate([_coded(objective, part, W) @ W for part in pieces])
        images = task.rebuild(rebuilt)
        alike = time.perf_counter()
        codes = np.concatenate([learner.transform(part.astype(np.float64)) for part in pieces])
        images_lasso = task.rebuild((codes @ learner.components_).astype(X.dtype))
        ended = time.perf_counter()
    return {
        "images": images,
        "images_lasso": images_lasso,
        "atoms": W,
        "seconds": np.array([learned - started, alike - learned]),
        "seconds_lasso": np.array([learned - started, ended - alike]),
    }


# Non-local means -----------------------------------------------------------------------------


def _by_nlm(task: Task, sigma: float) -> Arrays:
    """Denoise each image by non-local means."""
    from skimage.restoration import denoise_nl_means  # an extra

    started = time.perf_counter()
    each = [denoise_nl_means(one, h=NLM_H * sigma, sigma=sigma, **NLM) for one in task.noisy]
    return {"images": np.stack(each), "seconds": np.array([0.0, time.perf_counter() - started])}


# Images --------------------------------------------------------------------------------------


@cached_by_file(maxsize=1)
def _make_task(data: str, sigma: float, size: int, count: int, seed: int, rounds: int) -> Task:
    rng, images = spawn(seed, DATA), _load(data, size)
    chosen = np.sort(rng.choice(len(images), min(count, len(images)), replace=False))
    clean = images[chosen].astype(np.float32)
    noisy = (clean + sigma * rng.standard_normal(clean.shape)).astype(np.float32)
    patches = [cut(image, SIDE) for image in noisy]
    n = sum(len(one.X) for one in patches)
    draws = spawn(seed, SERVER)
    wanted = rounds * BATCH
    order = np.concatenate([draws.permutation(n) for _ in range(-(-wanted // n))])[:wanted]
    return Task(clean, noisy, patches, order.reshape(rounds, BATCH))


def _load(path: str, size: int) -> Matrix:
    """Return images in [0, 1], (n_images, height, width).

    Parameters
    ----------
    path : str
        An ``.npz`` file with ``X``: (n, height, width), one image (height, width), or, with ``y``
        (n,) beside it, (n, height * width) of square images; ``""`` for scikit-image's camera.
    size : int
        Height and width to which the camera is brought.
    """
    if not path:
        import skimage  # an extra: not needed to import this module

        untyped: Any = skimage
        camera = untyped.data.camera()
        image: Matrix = untyped.transform.resize(camera, (size, size), anti_aliasing=True)
        return image[None]
    (X,) = read_arrays(path, "X")
    if X.ndim == 2:
        in_rows = "y" in read_npz(path, "y")
        side = round(X.shape[1] ** 0.5)
        if in_rows and side * side != X.shape[1]:
            raise ValueError(
                f"X in {path} must have a square number of features, as y is there, got {X.shape}."
            )
        X = X.reshape(-1, side, side) if in_rows else X[None]
    if X.ndim != 3 or not len(X) or min(X.shape[1:]) < SIDE:
        raise ValueError(
            f"X in {path} must be an image, or images (n, h, w), of at least {SIDE}x{SIDE} pixels, "
            f"got shape {X.shape}."
        )
    check_pixels(X, path)
    return to_unit_range(X)


# The report ----------------------------------------------------------------------------------


def _records(
    task: Task, images: Mapping[str, Matrix], seconds: Mapping[str, Matrix]
) -> Iterator[Record]:
    n, *shape = task.clean.shape
    for name, them in images.items():
        found = quality(task.clean.reshape(n, -1), them.reshape(n, -1), (shape[0], shape[1]))
        yield Record("psnr", found.psnr, name, unit="dB")
        yield Record("ssim", found.ssim, name)
    for name, (learning, coding) in seconds.items():
        yield Record("learning", float(learning), name, unit="s")
        yield Record("coding", float(coding), name, unit="s")
        yield Record("seconds", float(seconds[name].sum()), name, unit="s")


def _figures(task: Task, images: Mapping[str, Matrix]) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: matplotlib

    shown = {"clean": task.clean, "noisy": images["noisy"], "denoised": images["denoised"]}
    if "sklearn" in images:
        shown["scikit-learn, same coder"] = images["sklearn"]
    return {"images": pictures.side_by_side(shown)}
