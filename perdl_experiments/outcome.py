"""What a run leaves: results.json, arrays, figures and films, each written whole or not at all."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl import __version__
from flwr_perdl._store import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = "results.json"
ARRAYS = "arrays.npz"
#: In the folder of a run that is being replaced: the run that takes its place when it has finished.
NEXT = "next"
_FRAME_TIME = 100  # of a film, in milliseconds


class Table(NamedTuple):
    """A table as a person reads it.

    Attributes
    ----------
    title, caption : str
        What it shows, and what to know about it.
    columns : sequence of str
        Heads; the first column names the rows.
    rows : sequence of sequence of str
        The cells.
    """

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Picture(NamedTuple):
    """A figure with its words.

    Attributes
    ----------
    name : str
        The file's name without ending.
    title, caption : str
        What it shows, and what to know about it.
    figure : matplotlib.figure.Figure
        The drawing.
    """

    name: str
    title: str
    caption: str
    figure: Figure


class Film(NamedTuple):
    """A moving picture with its words, written as a GIF.

    Attributes
    ----------
    name, title, caption : str
        As a `Picture`'s.
    frames : ndarray of uint8 of shape (n_frames, height, width, 3)
        Shown ten per second.
    """

    name: str
    title: str
    caption: str
    frames: NDArray[np.uint8]


class Outcome(NamedTuple):
    """What an experiment found.

    Attributes
    ----------
    metrics : mapping of str to float
        Figures under stable names.
    curves : mapping of str to sequence of float
        Figures per round, or per path.
    arrays : mapping of str to ndarray
        What was learned.
    tables : sequence of Table
    pictures : sequence of Picture
    notes : sequence of str
        Sentences a reader should know.
    rounds : int
        Communication rounds of one federation.
    floats_up, floats_down : float
        Floats that a client sent and received in one federation, the mean over clients.
    films : sequence of Film
    """

    metrics: Mapping[str, float]
    curves: Mapping[str, Sequence[float]]
    arrays: Mapping[str, NDArray[Any]]
    tables: Sequence[Table]
    pictures: Sequence[Picture]
    notes: Sequence[str]
    rounds: int
    floats_up: float
    floats_down: float
    films: Sequence[Film] = ()


def to_results(outcome: Outcome, **run: Any) -> dict[str, Any]:
    """Return what results.json says of an outcome.

    Parameters
    ----------
    outcome : Outcome
        What the experiment found.
    **run
        ``experiment``, ``about``, ``source``, ``config``, ``seed``, ``engine``, ``seconds``,
        ``clients`` (what happened to each client's replies, by partition).

    Returns
    -------
    dict
        Nothing in it but what JSON can say.

    Raises
    ------
    ValueError
        If a metric or a curve is not finite.
    """
    metrics = {name: float(value) for name, value in outcome.metrics.items()}
    curves = {name: [float(v) for v in values] for name, values in outcome.curves.items()}
    for name, values in [*curves.items(), *((name, [v]) for name, v in metrics.items())]:
        if not np.isfinite(values).all():
            raise ValueError(f"{name} must be finite, got {values}.")
    return {
        **run,
        "versions": versions(),
        "metrics": metrics,
        "curves": curves,
        "rounds": int(outcome.rounds),
        "floats_up": float(outcome.floats_up),
        "floats_down": float(outcome.floats_down),
        "tables": [table._asdict() for table in outcome.tables],
        "figures": [
            {"file": f"{one.name}.{ending}", "title": one.title, "caption": one.caption}
            for ending, shown in (("png", outcome.pictures), ("gif", outcome.films))
            for one in shown
        ],
        "notes": list(outcome.notes),
    }


def versions() -> dict[str, str]:
    """Return the versions that a figure may depend on."""
    others = {name: version(name) for name in ("flwr", "numpy", "scipy")}
    return {"flwr-perdl": __version__, "python": platform.python_version(), **others}


def write(out: Path, outcome: Outcome, results: Mapping[str, Any]) -> None:
    """Write an outcome's files to the folder ``out``; results.json comes last.

    Parameters
    ----------
    out : Path
        The folder; made when missing.
    outcome : Outcome
        Its arrays and pictures are written.
    results : mapping
        What `to_results` returned.
    """
    out.mkdir(parents=True, exist_ok=True)
    for picture in outcome.pictures:
        with replacing(out / f"{picture.name}.png") as stream:
            picture.figure.savefig(stream, format="png", dpi=144, bbox_inches="tight")
    for film in outcome.films:
        _write_film(out / f"{film.name}.gif", film)
    named: dict[str, Any] = dict(outcome.arrays)
    with replacing(out / ARRAYS) as stream:
        np.savez_compressed(stream, **named)
    with replacing(out / RESULTS) as stream:
        stream.write(json.dumps(results, indent=1, allow_nan=False).encode())


def _write_film(path: Path, film: Film) -> None:
    from PIL import Image  # comes with matplotlib

    first, *rest = [Image.fromarray(frame) for frame in film.frames]
    with replacing(path) as stream:
        first.save(
            stream, format="GIF", save_all=True, append_images=rest, duration=_FRAME_TIME, loop=0
        )
