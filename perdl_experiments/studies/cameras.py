"""Feature shift, where personalization pays: sites share a common view and have their own cameras.

Every site has images in the common view, and others from its own camera: mirrored, upside down,
turned or shifted. Each method ends with a dictionary per site, and is evaluated on held-out images,
in the common view and in that of the site's camera.

=============  ===================================================================================
method         what it is
=============  ===================================================================================
``perma``      `PerMA`: some atoms shared, the others private
``alone``      local training, five times the iterations
``shared``     `PerMA` with all atoms shared: the dictionary of all sites' images
``finetuned``  ``shared``, fine-tuned by each site
``averaging``  one dictionary, averaged in every round from a common start
``either``     an own and a shared dictionary of half as many atoms: for each image the better one
``both``       the atoms of both
``perpca``     PerPCA: shared and own orthonormal components
``hmf``        HMF: the same, by the paper that followed PerPCA's
=============  ===================================================================================

Hyperparameters are tuned on validation images: the penalty of ``alone``, ``shared`` and
``averaging`` (three values), the steps of ``finetuned`` at each site, the shared components of
``perpca`` and ``hmf`` and then their learning rate (three values), and the shared atoms of
``perma``, which has the penalty of ``shared``. Components are rotated to their principal axes.
`ClusteredFedAvg` has no row: no two sites have the same camera.

The learners, the start and the rivals are those of `images` (`_methods`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import mode
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

from flwr_perdl.core.checks import Matrix
from flwr_perdl.dictionary import reconstruct, sparse_code
from flwr_perdl.random import DATA, spawn
from perdl_experiments.components import STEP, hmf
from perdl_experiments.data import load_images
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import FAILED, Record, is_less
from perdl_experiments.studies import _methods
from perdl_experiments.studies._experiment import Arrays, Auto, Keep, reason, words
from perdl_experiments.studies._experiment import Config as Common
from perdl_experiments.studies._parts import keep_all
from perdl_experiments.studies.images import start

#: How a camera is held, and where it looks: steps of a quarter of the image, down and right.
TURNS: dict[str, Callable[[Matrix], Matrix]] = {
    "mirrored": lambda stack: stack[:, :, ::-1],
    "upside down": lambda stack: stack[:, ::-1, ::-1],
    "turned left": partial(np.rot90, axes=(1, 2)),
    "turned right": partial(np.rot90, k=-1, axes=(1, 2)),
}
SHIFTS = {"moved up": (-1, 0), "moved down": (1, 0), "moved left": (0, -1), "moved right": (0, 1)}
#: Shares of a site's atoms that PerMA, PerPCA and HMF are tried with, beside all of them; PerPCA's
#: and HMF's steps, the library's in the middle.
SHARES = (0.25, 0.5, 0.625, 0.75, 0.875)
PCA_STEPS, HMF_STEPS = (0.5, 1.0, 2.0), (STEP / 2, STEP, 2 * STEP)
#: The most images of a view to choose by, and as many to measure; those of the data to train with.
MOST, TRAIN = 200, 0.8
#: By default a site has half as many atoms as pixels, and at most so many; of these an image is
#: rebuilt from one in so many.
ATOMS, SPARSITY = 60, 8
#: Local atoms of so many sites are drawn, and images of each view.
DRAWN, SHOWN = 3, 4
VIEWS, METHODS = words("cameras", "view"), words("cameras")
RIVALS = ("alone", "shared", "finetuned")


@dataclass(frozen=True, kw_only=True)
class Config(Common):
    """The options of cameras.toml."""

    sites: int
    common: int
    own: int
    n_atoms: int
    n_global: int | Auto
    n_nonzero: int
    learner: str

    def check(self) -> None:
        """Reject options that do not fit together."""
        self.check_nodes(self.sites, "site")
        if self.n_atoms and self.n_global != "auto" and self.n_global > self.n_atoms:
            raise ValueError(
                f"n_global must be at most n_atoms={self.n_atoms}, got {self.n_global}."
            )

    @property
    def sized(self) -> Config:
        """The same, with the numbers of atoms that follow from the images' size."""
        n_atoms = self.n_atoms or min(ATOMS, load_images(self.data, labeled=False).X.shape[1] // 2)
        n_nonzero = self.n_nonzero or max(n_atoms // SPARSITY, 1)
        return replace(self, n_atoms=n_atoms, n_nonzero=n_nonzero)

    @property
    def tried(self) -> list[int]:
        """The numbers of shared atoms on the curve; the last is all."""
        given = set() if self.n_global == "auto" else {self.n_global}
        parts = {max(int(share * self.n_atoms), 1) for share in SHARES}
        return sorted(parts | given | {self.n_atoms})

    def sharing(self, n_global: int, seed: int) -> _methods.Config:
        """Return what a method learns with."""
        return _methods.Config(
            clients=self.sites,
            rounds=self.rounds,
            seed=seed,
            learner=self.learner,
            n_atoms=self.n_atoms,
            n_global=n_global,
            aggregation="statistics",
            matching="consensus",
            min_support=3,
        )


class Site(NamedTuple):
    """A site's images: for training, and in both views to choose by and to measure."""

    camera: str
    train: Matrix
    choose: Sequence[Matrix]
    test: Sequence[Matrix]


# The sites -----------------------------------------------------------------------------------


def cameras(shape: tuple[int, int]) -> list[str]:
    """Return the cameras that images of a shape can have, the simplest first."""
    turns = [turn for turn in TURNS if shape[0] == shape[1] or not turn.startswith("turned")]
    return [*turns, *SHIFTS, *map(", ".join, product(turns, SHIFTS))]


def seen(X: Matrix, shape: tuple[int, int], camera: str) -> Matrix:
    """Return images as a camera shows them.

    Parameters
    ----------
    X : ndarray of shape (n_images, height * width)
        As usual.
    shape : tuple of int
        Height and width.
    camera : str
        One of `cameras`.
    """
    stack = X.reshape(-1, *shape)
    for part in camera.split(", "):
        if part in TURNS:
            stack = TURNS[part](stack)
        else:
            steps = [way * max(n // 4, 1) for way, n in zip(SHIFTS[part], shape, strict=True)]
            stack = np.roll(stack, steps, axis=(1, 2))
    return stack.reshape(len(X), -1)


def load_sites(config: Config, seed: int) -> tuple[list[Site], tuple[int, int], tuple[int, int]]:
    """Return all sites, the images' shape, and how many of each view a site trains with.

    Where the data have fewer images than asked for, both numbers shrink alike.
    """
    images, n = load_images(config.data, labeled=False), config.sites
    named = cameras(images.shape)
    if n > len(named):
        raise ValueError(f"sites must be at most {len(named)}, one per camera, got {n}.")
    share = min(1.0, TRAIN * len(images.X) / (n * (config.common + config.own)))
    common, own = int(share * config.common), int(share * config.own)
    X = images.X[spawn(seed, DATA).permutation(len(images.X))]
    train, rest = np.split(X, [n * (common + own)])
    m = min(MOST, len(rest) // 4)
    if min(common, own, m) < 1:
        raise ValueError(
            f"data must have more images for {n} sites of {config.common} + {config.own}, got "
            f"{len(X)}."
        )
    held_out, found = rest[: 4 * m].reshape(4, m, -1), []
    for camera, mine in zip(named, train.reshape(n, common + own, -1), strict=False):
        view = partial(seen, shape=images.shape, camera=camera)
        usual, choose, test = mine[:common], held_out[:2], held_out[2:]
        trained = np.vstack([usual, view(mine[common:])])
        sets = [[kept[0], view(kept[1])] for kept in (choose, test)]
        found.append(Site(camera, trained, *sets))
    return found, images.shape, (common, own)


# The methods ---------------------------------------------------------------------------------


class Try(NamedTuple):
    """Every site's dictionary by a method, with what is left open set in one way.

    Errors are of shape (n_sites, n_views), of the images to choose by and those to measure.
    """

    dictionaries: Sequence[Matrix]
    choose: Matrix
    test: Matrix
    setting: float
    floats: tuple[float, float] = (0.0, 0.0)


def best(tries: Sequence[Try]) -> Try:
    """Return the one that is best on the images to choose by."""
    return min(tries, key=lambda one: float(one.choose.mean()))


class Comparison:
    """All methods on one split of the images."""

    def __init__(self, config: Config, seed: int, sites: Sequence[Site]) -> None:
        self.config, self.seed, self.sites = config, seed, sites
        self.samples = [site.train for site in sites]
        self.all_shared = config.sharing(config.n_atoms, seed)

    def rebuilt(self, X: Matrix, D: Matrix) -> Matrix:
        """Return images rebuilt from ``n_nonzero`` atoms each."""
        return reconstruct(sparse_code(X, D, n_nonzero=min(self.config.n_nonzero, len(D))), D)

    def measured(self, sets: Sequence[Matrix], rebuilt: Sequence[Matrix]) -> list[float]:
        """Return the error on each set of a site's images."""
        return [float(np.mean((X - Y) ** 2)) for X, Y in zip(sets, rebuilt, strict=True)]

    def errors(self, sets: Sequence[Matrix], D: Matrix) -> list[float]:
        """Return the errors of a site's images with a dictionary."""
        return self.measured(sets, [self.rebuilt(X, D) for X in sets])

    def judged(self, dictionaries: Sequence[Matrix], setting: float, **more: Any) -> Try:
        """Return dictionaries with their errors."""

        def errors(name: str) -> Matrix:
            pairs = zip(self.sites, dictionaries, strict=True)
            return np.array([self.errors(getattr(site, name), D) for site, D in pairs])

        return Try(dictionaries, errors("choose"), errors("test"), setting, **more)

    def learn(self, method: str, n_global: int, setting: float) -> Try:
        """Return what a method of `_methods` learns."""
        config = self.config.sharing(n_global, self.seed)
        if method == "perpca":  # no more directions than pixels
            most = self.samples[0].shape[1]
            few = min(config.n_atoms, most), min(n_global, most)
            config = replace(config, n_atoms=few[0], n_global=few[1])
        found = _methods.learn(method, setting, self.samples, config, start(config))
        dictionaries = found.full or found.shared * len(self.samples)
        return self.judged(dictionaries, setting, floats=(found.floats_up, found.floats_down))

    def penalized(self, method: str) -> Try:
        """Return a method that parts no atoms, with its best penalty."""
        settings = _methods.settings(method, self.samples, self.all_shared)
        return best([self.learn(method, self.config.n_atoms, one) for one in settings])

    def curve(self) -> tuple[dict[int, Try], int]:
        """Return PerMA by the number of shared atoms, of which the last is all, and the best."""
        *some, every = self.config.tried
        shared = self.penalized("perma")
        found = {n: self.learn("perma", n, shared.setting) for n in some} | {every: shared}
        given = list(found) if self.config.n_global == "auto" else [self.config.n_global]
        return found, min(given, key=lambda n: float(found[n].choose.mean()))

    def finetuned(self, shared: Try) -> Try:
        """Return a shared dictionary, fine-tuned at each site for its best number of steps."""

        def error(site: int, D: Matrix) -> float:
            return float(np.mean(self.errors(self.sites[site].choose, D)))

        learner = _methods.make_learner(self.all_shared, self.config.n_atoms, shared.setting)
        found = _methods.finetuned(learner, shared.dictionaries[0], self.samples, error)
        return self.judged([D for D, _ in found], float(np.median([steps for _, steps in found])))

    def halves(self) -> dict[str, Try]:
        """Return an own and a shared dictionary at equal storage: half as many atoms each.

        ``either`` takes for each image the one that rebuilds it better, ``both`` atoms of both.
        """
        half = replace(self.config, n_atoms=max(self.config.n_atoms // 2, 1), n_global="auto")
        smaller = type(self)(half, self.seed, self.sites)
        own, shared = (smaller.penalized(name).dictionaries for name in ("local", "perma"))
        pairs = list(zip(own, shared, strict=True))

        def either(name: str) -> Matrix:
            sets = [getattr(site, name) for site in self.sites]
            each = zip(sets, pairs, strict=True)
            return np.array([self.measured(X, [self._better(Y, *D) for Y in X]) for X, D in each])

        n = float(half.n_atoms)
        return {
            "either": Try([], either("choose"), either("test"), n),
            "both": self.judged([np.vstack(pair) for pair in pairs], n),
        }

    def _better(self, X: Matrix, *dictionaries: Matrix) -> Matrix:
        """Return each image as the dictionary rebuilds it that does so better."""
        tries = np.array([self.rebuilt(X, D) for D in dictionaries])
        best = np.nanmean((tries - X) ** 2, axis=2).argmin(axis=0)
        return np.asarray(tries[best, np.arange(len(X))])

    def parted(self, learn: Callable[[int, float], Try], steps: Sequence[float]) -> Try:
        """Return a method with its best number of shared components, and with its best step."""
        low, middle, high = steps
        first = best([learn(n, middle)._replace(setting=n) for n in self.config.tried])
        n = int(first.setting)
        return best([first, *(learn(n, step)._replace(setting=n) for step in (low, high))])

    def hmf(self, n_global: int, step: float) -> Try:
        """Return what HMF learns, on principal axes."""

        def axes(X: Matrix, W: Matrix) -> Matrix:
            return _methods.principal_axes(X, np.linalg.qr(W.T)[0].T)

        n_local, rounds = self.config.n_atoms - n_global, self.config.rounds
        found = hmf(self.samples, n_global, n_local, n_rounds=rounds, step=step)
        shared = axes(np.vstack(self.samples), found[0].global_components)
        pairs = zip(self.samples, found, strict=True)
        own = [axes(X, one.local_components) for X, one in pairs]
        return self.judged([np.vstack([shared, V]) for V in own], n_global)


def compare(config: Config, seed: int) -> Arrays:
    """Return every site's errors by every method, the curve of shared atoms, and the pictures.

    Parameters
    ----------
    config : Config
        The study's options.
    seed : int
        Which images the sites have, and the methods' draws.
    """
    config = config.sized
    these, tried = Comparison(config, seed, load_sites(config, seed)[0]), config.tried
    curve, n_global = these.curve()
    shared = curve[tried[-1]]
    found = {"perma": curve[n_global]._replace(setting=n_global)}
    found |= {"alone": these.penalized("local"), "shared": shared}
    found["finetuned"] = these.finetuned(shared)
    found |= these.halves()
    rivals: dict[str, Callable[[], Try]] = {
        "averaging": partial(these.penalized, "averaging"),
        "perpca": partial(these.parted, partial(these.learn, "perpca"), PCA_STEPS),
        "hmf": partial(these.parted, these.hmf, HMF_STEPS),
    }
    failed = {}
    for name, learn in rivals.items():
        try:
            found[name] = learn()
        except Exception as error:  # whatever stops one rival must not stop the run
            failed[f"{FAILED}_{name}"] = np.array(reason(error))
    at = min(1, config.sites - 1)
    shown = np.vstack([X[:SHOWN] for X in these.sites[at].test])
    return failed | {
        **{f"error_{name}": one.test for name, one in found.items()},
        **{f"setting_{name}": np.array(one.setting) for name, one in found.items()},
        "curve": np.array([one.test.mean(axis=0) for one in curve.values()]),
        "floats": np.array(curve[n_global].floats),
        "atoms": np.array(curve[n_global].dictionaries),
        "original": shown,
        **{
            f"rebuilt_{name}": these.rebuilt(shown, one.dictionaries[at])
            for name, one in found.items()
            if one.dictionaries
        },
    }


# The run -------------------------------------------------------------------------------------


def run(config: Config, keep: Keep) -> Outcome:
    """Compare all methods with every seed."""
    parts = {f"seed-{seed}": partial(compare, config, seed) for seed in config.each_seed}
    config = config.sized
    kept, tried = keep_all(keep, parts), config.tried
    sites, shape, (common, own) = load_sites(config, config.seed)
    first, n_global = kept[0], mode(int(one["setting_perma"]) for one in kept)
    errors = {  # (n_seeds, n_sites, n_views)
        name: np.array([one[f"error_{name}"] for one in kept])
        for name in METHODS
        if all(f"error_{name}" in one for one in kept)
    }
    curve = np.array([one["curve"] for one in kept])  # (n_seeds, n_tried, n_views)
    views = {"": slice(None), **{view: slice(i, i + 1) for i, view in enumerate(VIEWS)}}
    order = sorted(errors, key=lambda name: float(np.median(errors[name].mean(axis=(1, 2)))))
    records = [
        *(
            Record("error", errors[name][:, :, part].mean(axis=(1, 2)), name, {"view": view})
            for name in order
            for view, part in views.items()
        ),
        *(Record("setting", np.array([o[f"setting_{n}"] for o in kept]), n) for n in order),
        *(Record(FAILED, str(first[f"{FAILED}_{n}"]), n) for n in METHODS if n not in errors),
        *_gains(sites, errors),
        *(
            Record("curve", curve[:, i, part].mean(axis=1), "", {"shared": n, "view": view})
            for i, n in enumerate(tried)
            for view, part in views.items()
        ),
        Record("n_global", n_global),
    ]
    medians = np.median(curve, axis=0)
    return Outcome(
        records=[*records, *_differences(curve, tried)],
        curves={
            "n_global": tried,
            "curve": medians.mean(axis=1).tolist(),
            **{f"curve_{view}": medians[:, i].tolist() for i, view in enumerate(VIEWS)},
        },
        arrays={
            "global_atoms": first["atoms"][0][: int(first["setting_perma"])],
            "local_atoms": first["atoms"][:, int(first["setting_perma"]) :],
            "image_shape": np.array(shape),
            **{f"error_{name}": values for name, values in errors.items()},
        },
        figures=_figures(
            config, first, sites, shape, {n: errors[n] for n in order}, curve, n_global
        ),
        rounds=config.rounds,
        floats_up=float(first["floats"][0]),
        floats_down=float(first["floats"][1]),
        facts={
            "n_atoms": config.n_atoms,
            "n_nonzero": config.n_nonzero,
            "usual": common,
            "held": own,
            "fewer": common < config.common,
            "n_test": len(sites[0].test[0]),
            **_below(curve, tried),
            "shown_camera": sites[min(1, len(sites) - 1)].camera,
        },
    )


def _differences(curve: Matrix, tried: Sequence[int]) -> Iterator[Record]:
    """Yield how far PerMA's errors are from those with all atoms shared, by number of shared atoms.

    Both have the same images with each seed: what is told is the 95 % interval of the mean of
    paired differences, as shares of the errors with all shared (`_intervals`); `upper` is its end.
    """
    for interval, n in zip(_intervals(curve), tried[:-1], strict=False):
        for (low, high), view in zip(interval, VIEWS, strict=True):
            at = {"shared": n, "view": view}
            yield Record("upper", float(high), "", at)
            yield Record("interval", f"{low:+.1%} to {high:+.1%}", "", at)


def _intervals(curve: Matrix) -> Matrix:
    """Return intervals of shape (n_tried, n_views, 2); of one seed there are none."""
    if len(curve) < 2:
        return np.empty((0, len(VIEWS), 2))
    differences = curve / curve[:, -1:] - 1
    room = student.ppf(0.975, len(curve) - 1) * differences.std(axis=0, ddof=1)
    room, mean = room / np.sqrt(len(curve)), differences.mean(axis=0)
    return np.stack([mean - room, mean + room], axis=-1)


def _below(curve: Matrix, tried: Sequence[int]) -> dict[str, str]:
    """Return with which numbers of shared atoms PerMA is below all shared in both views.

    By three rules, as none is the only right one: its medians are less; by more than a trifle; the
    interval of paired differences excludes zero.
    """
    medians = np.median(curve, axis=0)
    rules = {
        "below": [bool((one < medians[-1]).all()) for one in medians],
        "clearly_below": [all(map(is_less, one, medians[-1])) for one in medians],
        "surely_below": [bool((one[:, 1] < 0).all()) for one in _intervals(curve)],
    }
    return {
        rule: ", ".join(str(n) for n, yes in zip(tried, found, strict=False) if yes) or "none"
        for rule, found in rules.items()
    }


def _gains(sites: Sequence[Site], errors: Mapping[str, Matrix]) -> Iterator[Record]:
    """Yield every site's errors, and by how much PerMA's is below the least of the rivals'."""
    each = {name: np.median(errors[name].mean(axis=2), axis=0) for name in ("perma", *RIVALS)}
    for i, site in enumerate(sites):
        at = {"site": f"{i + 1}: {site.camera}"}
        for name, values in each.items():
            yield Record("site_error", float(values[i]), name, at)
        least = min(RIVALS, key=lambda name: float(each[name][i]))
        gain = 1 - each["perma"][i] / each[least][i]
        yield Record("gain", float(gain), "", at)
        yield Record("least", METHODS[least], "", at)


def _figures(
    config: Config,
    first: Mapping[str, Any],
    sites: Sequence[Site],
    shape: tuple[int, int],
    errors: Mapping[str, Matrix],
    curve: Matrix,
    n_global: int,
) -> dict[str, Any]:
    from perdl_experiments import pictures, plots  # an extra: clients must not need it

    n = int(first["setting_perma"])
    local = zip(sites[:DRAWN], first["atoms"][:DRAWN, n:], strict=True)
    each = {name: values.mean(axis=1) for name, values in errors.items()}  # (n_seeds, n_views)
    views = {
        **{
            view: {METHODS[m]: each[m][:, i] for m in errors}
            for i, view in enumerate(VIEWS.values())
        },
        "both views": {METHODS[m]: each[m].mean(axis=1) for m in errors},
    }
    dots = {title: pictures.ranges(values) for title, values in views.items()}
    rows = {"original": first["original"]}
    rows |= {METHODS[m]: first[f"rebuilt_{m}"] for m in ("perma", *RIVALS)}
    whole = np.insert(curve, 0, each["alone"], axis=1)
    drawn = {"both views": whole.mean(axis=2)}
    drawn |= {view: whole[:, :, i] for i, view in enumerate(VIEWS.values())}
    return {
        "atoms": pictures.shared_and_own(
            first["atoms"][0, :n], {f"private: {s.camera}": D for s, D in local}, shape
        ),
        "reconstructions": plots.images(
            {name: np.insert(X, SHOWN, np.nan, axis=0) for name, X in rows.items()}, shape
        ),
        "errors": pictures.intervals(dots, ours=[METHODS["perma"]]),
        "curve": pictures.chosen(
            [0, *config.tried],
            drawn,
            n_global,
            x=f"atoms that are shared, of {config.n_atoms}",
            y="mean squared error",
        ),
    }
