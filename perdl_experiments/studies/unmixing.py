"""Blind hyperspectral unmixing over a network of tiles: the paper's application.

Chainais and Richard, "A diffusion strategy for distributed dictionary learning", iTWIST 2014.
The image is cut into tiles, each a node with its own pixels; its neighbors are the tiles beside it
and the three with the most similar mean spectrum. Every node finds materials in its own tile
(vertex component analysis), receives those of the others, and learns with its neighbors. The
measure is the spectral angle to the true spectra.

``--data FILE.npz`` with ``X`` (pixels row by row, bands), ``shape`` (2,) and, if known,
``endmembers`` (p, bands) and ``abundances`` (pixels, p); without it, a scene that the experiment
draws.

Metrics: spectral angles in radians: ``sad_mean``, ``sad_worst`` (the worst node), ``sad_isolated``,
``sad_isolated_worst`` (nodes without cooperation), ``sad_own_start``, ``sad_own_start_worst`` (each
tile from its own spectra), ``sad_central``, ``sad_nmf``, ``sad_vca`` (all pixels in one place);
``error``, ``error_isolated`` (share of energy left), ``disagreement``. Without ``endmembers`` in
the file the last three only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from flwr_perdl.core.checks import Matrix, check_array, check_count
from flwr_perdl.network import Topology
from flwr_perdl.random import DATA, SERVER, spawn
from perdl_experiments.data import cached_by_file, check_kind, read_arrays, read_npz
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import FAILED, Record
from perdl_experiments.studies._experiment import Arrays, Keep, attempt, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.unmixing import (
    abundances,
    match_spectra,
    tile_pixels,
    tile_topology,
    unmix,
    vca,
)

#: The drawn scene: pixels, bands, noise as a share of the root mean square.
SIDE, BANDS, NOISE = 60, 100, 0.02
NMF_ITERATIONS = 500
METHODS = tuple(words("unmixing"))
#: Methods of others: one that fails does not end the run.
RIVALS = ("nmf", "vca")
TRUTH = "the truth"


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of unmixing.toml."""

    tiles: int
    n_endmembers: int

    def check(self) -> None:
        """Reject options that do not fit together."""
        self.check_nodes(self.tiles**2, "tile")

    @property
    def scene(self) -> Scene:
        """The image."""
        return _load(self.data) if self.data else _drawn(self.seed, self.n_endmembers)


class Scene(NamedTuple):
    """A hyperspectral image.

    Attributes
    ----------
    X : ndarray of shape (height * width, n_bands)
        Pixels, row by row.
    shape : tuple of int
        Height and width.
    endmembers : ndarray of shape (n_endmembers, n_bands) or None
        The true spectra, where they are known.
    shares : ndarray of shape (height * width, n_endmembers) or None
        The true shares of the materials, where they are known.
    """

    X: Matrix
    shape: tuple[int, int]
    endmembers: Matrix | None
    shares: Matrix | None = None


def run(config: Config, keep: Keep) -> Outcome:
    """Learn with and without neighbors, and with all pixels in one place."""
    scene, p = config.scene, _n_endmembers(config)
    kept: dict[str, Arrays] = {}
    for name in METHODS:
        compute = partial(_computed, name, scene, p, config)
        kept[name] = keep(
            name, partial(attempt, compute) if name in RIVALS else compute, of=len(METHODS)
        )
    failed = {name: str(one[FAILED]) for name, one in kept.items() if FAILED in one}
    kept = {name: one for name, one in kept.items() if name not in failed}
    spectra = {name: one["spectra"] for name, one in kept.items()}
    ours, truth = kept["network"], scene.endmembers
    maps = _maps(scene, spectra["network"], config.tiles)
    return Outcome(
        records=[*_records(truth, kept), *(Record(FAILED, why, m) for m, why in failed.items())],
        curves={},
        arrays={
            **{f"spectra_{name}": values for name, values in spectra.items()},
            "abundances": maps,
            "error": ours["error"],
        },
        figures=_figures(scene, spectra, maps, config.tiles),
        rounds=int(ours["rounds"]),
        floats_up=float(ours["floats"]),
        floats_down=float(ours["floats"]),
        facts={
            "height": scene.shape[0],
            "width": scene.shape[1],
            "n_bands": scene.X.shape[1],
            "known": truth is not None,
        },
    )


def _n_endmembers(config: Config) -> int:
    """Return how many materials there are, from the truth where it is known."""
    scene = config.scene
    p = config.n_endmembers if scene.endmembers is None else len(scene.endmembers)
    tiles = check_count("tiles", config.tiles, 1, min(scene.shape))
    smallest = min(len(pixels) for pixels in tile_pixels(scene.shape, tiles))
    if smallest < p:
        raise ValueError(f"tiles must have at least {p} pixels each, got one with {smallest}.")
    return check_count("n_endmembers", p, 2, scene.X.shape[1])


# The methods --------------------------------------------------------------------------------


def _computed(name: str, scene: Scene, p: int, config: Config) -> Arrays:
    """Return the spectra that one of `METHODS` finds, and what there is to say of it."""
    if name == "vca":
        return {"spectra": _vca(scene, p, config)[None]}
    if name == "nmf":
        return {"spectra": _nmf(scene, p, config)[None]}
    if name == "central":
        return _learned(scene, p, config, [scene.X], Topology.complete(1), "own")
    tiles = config.tiles
    data = [scene.X[pixels] for pixels in tile_pixels(scene.shape, tiles)]
    if name == "isolated":
        return _learned(scene, p, config, data, Topology.from_edges(len(data), []), "own")
    topology = tile_topology(np.stack([X.mean(axis=0) for X in data]), tiles)
    return _learned(scene, p, config, data, topology, "own" if name == "network_own" else "pooled")


def _learned(
    scene: Scene, p: int, config: Config, data: list[Matrix], topology: Topology, start: str
) -> Arrays:
    learned = unmix(data, topology, p, config.rounds, start=start, seed=config.seed)
    return {
        "spectra": learned.dictionaries,
        "error": learned.error,
        "disagreement": np.array(learned.disagreement),
        "rounds": np.array(learned.rounds),
        "floats": np.array(learned.floats_sent / len(data)),
    }


def _vca(scene: Scene, p: int, config: Config) -> Matrix:
    """Return the purest pixels of the whole image."""
    return vca(scene.X, p, rng=spawn(config.seed, SERVER)).spectra


def _nmf(scene: Scene, p: int, config: Config) -> Matrix:
    """Return scikit-learn's non-negative factorization of all pixels, from those of VCA."""
    from sklearn.decomposition import NMF  # an extra: not needed to import this module
    from sklearn.exceptions import ConvergenceWarning

    H = np.maximum(_vca(scene, p, config), 1e-9)
    W = np.maximum(abundances(scene.X, H), 1e-9)
    factorization = NMF(p, init="custom", max_iter=NMF_ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        factorization.fit_transform(np.maximum(scene.X, 0), W=W, H=H)
    return np.asarray(factorization.components_)


def _mean_angles(truth: Matrix, dictionaries: Matrix) -> Matrix:
    """Return every node's mean angle to the true spectra, in radians."""
    return np.array([match_spectra(truth, D).angles.mean() for D in dictionaries])


def _maps(scene: Scene, spectra: Matrix, tiles: int) -> Matrix:
    """Return each material's share in every pixel, from the spectra of the pixel's own tile.

    Materials in the order of the truth, or else of node 0; spectra with peak one; shares sum to
    one, 0 in black pixels.
    """
    order = spectra[0] if scene.endmembers is None else scene.endmembers
    shares = np.zeros((len(scene.X), len(order)))
    for pixels, D in zip(tile_pixels(scene.shape, tiles), spectra, strict=True):
        D = D[match_spectra(order, D).indices]
        amounts = abundances(scene.X[pixels], D / D.max(axis=1, keepdims=True))
        total = amounts.sum(axis=1, keepdims=True)
        shares[pixels] = amounts / np.where(total > 0, total, 1)
    return shares.reshape(*scene.shape, -1)


# Data ---------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def _drawn(seed: int, n_endmembers: int) -> Scene:
    """Draw a scene: smooth spectra, materials in smooth patches with mixed borders, noise."""
    p = check_count("n_endmembers", n_endmembers, 2, 12)
    rng = spawn(seed, DATA)
    band = np.linspace(0, 1, BANDS)
    centers, widths = rng.random((p, 4, 1)), rng.uniform(0.05, 0.3, (p, 4, 1))
    heights = rng.uniform(0.2, 1, (p, 4, 1))
    bumps = heights * np.exp(-(((band - centers) / widths) ** 2) / 2)
    endmembers = bumps.sum(axis=1)
    endmembers /= endmembers.max(axis=1, keepdims=True)
    fields = np.stack([gaussian_filter(rng.standard_normal((SIDE, SIDE)), 8) for _ in range(p)])
    sharp = np.exp(6 * fields / fields.std())
    shares = (sharp / sharp.sum(axis=0)).reshape(p, -1).T
    X = shares @ endmembers
    X = X + NOISE * np.sqrt(np.mean(X**2)) * rng.standard_normal(X.shape)
    return Scene(np.maximum(X, 0), (SIDE, SIDE), endmembers, shares)


@cached_by_file(maxsize=2)
def _load(path: str) -> Scene:
    """Return the scene in an ``.npz`` file: ``X``, ``shape``; maybe the truth.

    That is ``endmembers`` and, with these, ``abundances``.
    """
    X, shape = read_arrays(path, "X", "shape")
    known = read_npz(path, "endmembers", "abundances")
    endmembers, shares = known.get("endmembers"), known.get("abundances")
    check_kind("X", path, X, "fiub", "numbers of shape (pixels, bands)")
    check_kind("shape", path, shape, "iu", "two integers", (2,))
    if shape.min() < 1 or prod(shape.tolist()) != len(X):
        raise ValueError(
            f"shape in {path} must be two integers from 1 whose product is {len(X)}, the number of "
            f"pixels, got {shape.tolist()}."
        )
    X = check_array(f"X in {path}", X.astype(np.float64), min_rows=1)
    if not X.any():
        raise ValueError(f"X in {path} must have a pixel that is not zero, got zeros only.")
    if endmembers is None:
        return Scene(X, (int(shape[0]), int(shape[1])), None)
    what = f"spectra of {X.shape[1]} bands"
    check_kind("endmembers", path, endmembers, "fiub", what, (len(endmembers), X.shape[1]))
    if not endmembers.any(axis=1).all():
        raise ValueError(f"endmembers in {path} must be {what}, none zero.")
    endmembers = check_array(f"endmembers in {path}", endmembers.astype(np.float64))
    if shares is not None:
        size = (len(X), len(endmembers))
        check_kind("abundances", path, shares, "fiub", f"numbers of shape {size}", size)
        shares = check_array(f"abundances in {path}", shares.astype(np.float64))
    return Scene(X, (int(shape[0]), int(shape[1])), endmembers, shares)


# The report ----------------------------------------------------------------------------------


def _records(
    truth: Matrix | None, kept: Mapping[str, Mapping[str, NDArray[Any]]]
) -> Iterator[Record]:
    """Yield the energy that is left, and the angles to the true spectra where they are known."""
    for name, one in kept.items():
        if "error" in one:
            yield Record("error", float(one["error"].mean()), name)
    yield Record("disagreement", float(kept["network"]["disagreement"]))
    if truth is None:
        return
    for name, one in kept.items():
        yield Record("angle", _mean_angles(truth, one["spectra"]), name, unit="rad")
        found = np.stack([match_spectra(truth, D).angles for D in one["spectra"]])
        for j, angle in enumerate(found.mean(axis=0)):
            yield Record("material", float(angle), name, {"material": j + 1}, "rad")


def _figures(
    scene: Scene,
    spectra: Mapping[str, Matrix],
    maps: Matrix,
    tiles: int,
) -> dict[str, Any]:
    from perdl_experiments import pictures  # an extra: matplotlib

    order = spectra["network"][0] if scene.endmembers is None else scene.endmembers
    names = [f"material {j + 1}" for j in range(len(order))]
    shown = {
        "network of tiles": "network",
        "network, local initial spectra": "network_own",
        "local training": "isolated",
        "centralized VCA": "vca",
    }
    matched = {
        label: np.stack([D[match_spectra(order, D).indices] for D in spectra[name]])
        for label, name in shown.items()
        if name in spectra
    }
    panels = {
        name: {
            **({} if scene.endmembers is None else {TRUTH: scene.endmembers[j]}),
            **{label: values[:, j] for label, values in matched.items()},
        }
        for j, name in enumerate(names)
    }
    shares = {n: maps[..., j] for j, n in enumerate(names)}
    if scene.shares is not None:
        truth = scene.shares.reshape(*scene.shape, -1)
        shares |= {f"{n}, {TRUTH}": truth[..., j] for j, n in enumerate(names)}
    return {
        "spectra": pictures.spectra(
            panels, truth=TRUTH, x="band number", y="reflectance, peak at one"
        ),
        "abundances": pictures.maps(shares, tiles, len(shares) // len(names)),
    }
