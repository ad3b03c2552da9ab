"""Clips: a street that the experiment draws, the user's videos, and frames as clients' samples.

A frame becomes a client's samples as in PerMA (Liang et al., NeurIPS 2023, 5.3): it is cut into
patches; a sample is one pixel of all patches, so that rows are places inside a patch and columns
the patches. All samples of a frame are then small copies of it, shifted by a pixel, and few atoms
make the background of all frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from flwr_perdl.core.checks import Matrix
from flwr_perdl.random import DATA, spawn
from perdl_experiments.data import (
    IMAGES,
    cached_by_file,
    check_kind,
    check_pixels,
    read_arrays,
    read_npz,
    to_unit_range,
)

#: Of a longer clip as many frames, evenly spread, are taken.
MOST_FRAMES = 60
#: What the street is drawn with: frames, height, width, standard deviation of the noise, light.
_FRAMES, _HEIGHT, _WIDTH, _NOISE, _DRIFT = 40, 96, 144, 0.03, 0.1
#: Pixels darker than this say little about the light.
_DARK = 0.05


class Clip(NamedTuple):
    """A clip and what is known of it.

    Attributes
    ----------
    frames : ndarray of shape (n_frames, height, width, channels)
        Values in [0, 1]; 1 or 3 channels; float32.
    mask : ndarray of bool of shape (n_frames, height, width), or None
        Where the moving objects are.
    background : ndarray like frames, or None
        Every frame without objects and noise.
    """

    frames: Matrix
    mask: NDArray[np.bool_] | None = None
    background: Matrix | None = None

    def take(self, count: int) -> Clip:
        """Return ``count`` of the frames, evenly spread."""
        chosen = np.round(np.linspace(0, len(self.frames) - 1, count)).astype(int)
        return Clip(
            self.frames[chosen],
            None if self.mask is None else self.mask[chosen],
            None if self.background is None else self.background[chosen],
        )


@cached_by_file(maxsize=2)
def load_clip(path: str, seed: int) -> Clip:
    """Return the clip at ``path``, or the street of ``seed`` where it is ``""``.

    Parameters
    ----------
    path : str
        A video file or a GIF; a folder of frames, taken by name; or an ``.npz`` file with ``X``
        (n_frames, height, width) or (n_frames, height, width, 3) and, if known, ``mask``
        (n_frames, height, width), not zero where an object is.
    seed : int
        Of the street.

    Returns
    -------
    Clip
        At most ``MOST_FRAMES`` frames.

    Raises
    ------
    ValueError
        If there is no such file, it cannot be read, or its arrays are not as described.
    """
    if not path:
        return draw_street(spawn(seed, DATA))
    place, mask = Path(path), None
    if place.is_dir():
        X = _from_folder(place)
    elif place.suffix.lower() == ".npz":
        (X,), mask = read_arrays(path, "X"), read_npz(path, "mask").get("mask")
    elif place.is_file():
        X = _from_video(place)
    else:
        raise ValueError(f"data must be a file or a folder, got {path!r}.")
    frames = _checked(X, path)
    if mask is not None:
        check_kind("mask", path, mask, "biuf", f"numbers of shape {X.shape[:3]}", X.shape[:3])
        mask = mask != 0
    clip = Clip(frames, mask)
    return clip.take(MOST_FRAMES) if len(clip.frames) > MOST_FRAMES else clip


def _checked(X: NDArray[Any], path: str) -> Matrix:
    gray = X.ndim == 3
    if not gray and not (X.ndim == 4 and X.shape[3] in (1, 3, 4)):
        raise ValueError(f"X in {path} must be (frames, h, w[, 3]), got shape {X.shape}.")
    if len(X) < 3 or min(X.shape[1:3]) < 8:
        raise ValueError(
            f"X in {path} must be at least 3 frames of at least 8x8 pixels, got shape {X.shape}."
        )
    check_pixels(X, path)
    frames = to_unit_range(X[..., None] if gray else X[..., :3])
    return np.ascontiguousarray(frames, np.float32)


def _from_folder(folder: Path) -> NDArray[Any]:
    """Return the frames of a folder, in the order of their names."""
    import imageio.v3 as iio  # an extra

    files = sorted(one for one in folder.iterdir() if one.suffix.lower() in IMAGES)
    if not files:
        raise ValueError(
            f"data must be a folder with frames ({', '.join(IMAGES)}), got {str(folder)!r} with "
            "none."
        )
    frames = []
    for one in files:
        try:
            frames.append(np.asarray(iio.imread(one.read_bytes(), extension=one.suffix)))
        except Exception as error:
            raise ValueError(f"data must be readable frames, got {str(one)!r}: {error}") from error
    return _stacked(frames, folder)


def _from_video(path: Path) -> NDArray[Any]:
    """Return the frames of a video file or of an animated picture."""
    import imageio.v3 as iio  # an extra

    try:
        frames = [np.asarray(one) for one in iio.imiter(path.read_bytes(), extension=path.suffix)]
    except Exception as error:
        raise ValueError(
            f"data must be a video that imageio can read, got {str(path)!r}; for most of them "
            "pip install 'imageio[pyav]'."
        ) from error
    return _stacked(frames, path)


def _stacked(frames: Sequence[NDArray[Any]], path: Path) -> NDArray[Any]:
    shapes = {frame.shape for frame in frames}
    if len(shapes) != 1:
        raise ValueError(f"data must be frames of one shape, got {sorted(shapes)} in {path}.")
    return np.stack(frames)


# Frames and samples --------------------------------------------------------------------------


def to_samples(frame: Matrix, patch: int) -> Matrix:
    """Return a frame's samples: a row per place inside a patch, a column per patch and channel.

    Parameters
    ----------
    frame : ndarray of shape (height, width, channels)
        Repeated at its ends where ``patch`` does not divide its sides.
    patch : int
        Side of a patch in pixels.

    Returns
    -------
    ndarray of shape (patch * patch, n_patches * channels)
    """
    height, width, channels = frame.shape
    down, across = -height % patch, -width % patch
    whole = np.pad(frame, ((0, down), (0, across), (0, 0)), mode="edge")
    grid = whole.reshape(len(whole) // patch, patch, -1, patch, channels)
    return grid.transpose(1, 3, 0, 2, 4).reshape(patch * patch, -1)


def to_frame(X: Matrix, shape: tuple[int, int, int], patch: int) -> Matrix:
    """Return the frame of ``shape`` (height, width, channels) that samples make."""
    height, width, channels = shape
    rows, columns = -(-height // patch), -(-width // patch)
    grid = X.reshape(patch, patch, rows, columns, channels).transpose(2, 0, 3, 1, 4)
    frame: Matrix = grid.reshape(rows * patch, columns * patch, channels)[:height, :width]
    return frame


def still(clip: Clip) -> Matrix:
    """Return the median background, brought to the light of every frame, like ``clip.frames``.

    Every pixel's median over the frames in which, as far as is known, no object covers it. A
    frame's light is the median of its pixels' ratios to that picture.
    """
    picture = np.median(clip.frames, axis=0)
    light = _light(clip, picture)
    even = clip.frames / light
    if clip.mask is None:
        picture = np.median(even, axis=0)
    else:  # what is covered is sorted to the end and not counted, unless it always is
        hidden = clip.mask & ~clip.mask.all(axis=0)
        even[hidden] = np.inf
        even.sort(axis=0)
        seen = (~hidden).sum(axis=0)[None, ..., None]
        middle = [np.take_along_axis(even, at, axis=0)[0] for at in ((seen - 1) // 2, seen // 2)]
        picture = (middle[0] + middle[1]) / 2
    return _light(clip, picture) * picture


def _light(clip: Clip, picture: Matrix) -> Matrix:
    """Return every frame's light against ``picture``, (n_frames, 1, 1, 1)."""
    light = np.ones((len(clip.frames), 1, 1, 1), clip.frames.dtype)
    for t, frame in enumerate(clip.frames):
        told = picture.max(axis=2) > _DARK
        if clip.mask is not None:
            told &= ~clip.mask[t]
        if told.any():
            light[t] = np.median(frame[told] / np.maximum(picture[told], _DARK)) or 1
    return light


# The street ----------------------------------------------------------------------------------


def draw_street(rng: np.random.Generator) -> Clip:
    """Draw a street by day: houses, a road, cars in two lanes, noise, and light that drifts.

    Parameters
    ----------
    rng : Generator
        Draws everything.

    Returns
    -------
    Clip
        In color, with the mask and the background.
    """
    n_frames, height, width = _FRAMES, _HEIGHT, _WIDTH
    scene = _scenery(rng, height, width)
    lanes = (0.62, 1), (0.82, -1)  # where the wheels are, share of the height; which way
    cars = [
        _Car(
            lane * height,
            direction * width * rng.uniform(1.0, 1.6) / n_frames,
            rng.uniform(0, 2 * width),
            height * rng.uniform(0.13, 0.17) * (0.8 + lane / 2),
            rng.choice(_PAINTS),
        )
        for lane, direction in lanes
        for _ in range(2)
    ]
    phase = rng.uniform(0, 2 * np.pi)
    light = 1 + _DRIFT * np.sin(phase + np.linspace(0, np.pi, n_frames))
    frames, mask = np.empty((n_frames, height, width, 3)), np.empty((n_frames, height, width), bool)
    for t in range(n_frames):
        frames[t] = scene
        mask[t] = False
        for car in cars:
            mask[t] |= car.draw(frames[t], t)
    light = light[:, None, None, None]
    noisy = frames * light + _NOISE * rng.standard_normal(frames.shape)
    return Clip(
        np.clip(noisy, 0, 1).astype(np.float32),
        mask,
        np.clip(scene * light, 0, 1).astype(np.float32),
    )


_PAINTS = np.array(
    [(0.75, 0.1, 0.1), (0.95, 0.95, 0.95), (0.1, 0.2, 0.6), (0.9, 0.7, 0.1), (0.05, 0.05, 0.08)]
)


class _Car(NamedTuple):
    """A car: its wheels' height, pixels per frame, place at first, height, color."""

    bottom: float
    speed: float
    start: float
    height: float
    paint: Matrix

    def draw(self, frame: Matrix, t: int) -> NDArray[np.bool_]:
        """Paint the car into a frame; return where it is."""
        rows, columns = np.indices(frame.shape[:2])
        length, road = 2.4 * self.height, 2 * frame.shape[1]
        # The road goes on for as much again out of sight.
        x = (columns - self.start - self.speed * t) % road
        y = (self.bottom - rows) / self.height
        body = (x < length) & (y >= 0.1) & (y < 0.6)
        cabin = (x > 0.2 * length) & (x < 0.8 * length) & (y >= 0.6) & (y < 1)
        glass = cabin & (x > 0.27 * length) & (x < 0.73 * length) & (y < 0.9)
        wheels = np.zeros_like(body)
        for place in (0.22, 0.78):
            wheels |= np.hypot(x / self.height - 2.4 * place, y - 0.12) < 0.2
        frame[body | cabin] = self.paint
        frame[glass] = (0.55, 0.7, 0.8)
        frame[wheels] = 0.08
        covered: NDArray[np.bool_] = body | cabin | wheels
        return covered


def _scenery(rng: np.random.Generator, height: int, width: int) -> Matrix:
    """Return a street without cars, (height, width, 3)."""
    rows = np.arange(height) / height
    scene = np.empty((height, width, 3))
    scene[:] = np.array([0.55, 0.7, 0.85]) - 0.15 * rows[:, None, None]
    left = 0
    while left < width:
        right = left + int(width * rng.uniform(0.12, 0.25))
        roof = int(height * rng.uniform(0.08, 0.25))
        scene[roof : height // 2, left:right] = rng.uniform(0.35, 0.75, 3)
        side = max(height // 16, 3)
        for top in range(roof + side, height // 2 - 2 * side, 2 * side):
            for window in range(left + side, right - side, 2 * side):
                scene[top : top + side, window : window + side - 1] = rng.uniform(0.1, 0.35)
        left = right
    scene[rows >= 0.45] = (0.6, 0.58, 0.55)  # pavement
    scene[(rows >= 0.5) & (rows < 0.92)] = (0.36, 0.36, 0.38)  # road
    dashes = np.arange(width) // (width // 18) % 2 == 0
    scene[np.ix_((rows >= 0.68) & (rows < 0.7), dashes)] = 0.85
    rough = gaussian_filter(rng.standard_normal((height, width)), 0.8)
    smooth = gaussian_filter(rng.standard_normal((height, width)), 5)
    relief = 0.03 * rough / rough.std() + 0.03 * smooth / smooth.std()
    rough_scene: Matrix = np.clip(scene + relief[..., None], 0, 1)
    return rough_scene
