"""What a run leaves: results.json, arrays, figures and films, each written whole or not at all."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_perdl import __version__
from flwr_perdl.core.files import replacing
from perdl_experiments.render import Page, Record, Table, report, say

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = "results.json"
ARRAYS = "arrays.npz"
#: In the folder of a run that is being replaced: the run that takes its place when it has finished.
NEXT = "next"
#: Pixels per inch of a figure: a page shows it at about half of that.
DPI = 180
#: Coordinates in an SVG's tags: two digits after the point are a hundredth of a pixel.
_TAG, _LONG_NUMBER = re.compile(rb"<[^>]*>"), re.compile(rb"(\d\.\d\d)\d+")
#: The kind of a figure that is lines, bars or dots: it's written as SVG, too.
CHART = "chart"
_FRAME_TIME = 100  # of a film, in milliseconds


class Outcome(NamedTuple):
    """What an experiment found.

    Attributes
    ----------
    records : sequence of Record
        Its results; the study's TOML file says which metrics and tables they make.
    curves : mapping of str to sequence of float
        Results per round, or per path.
    arrays : mapping of str to ndarray
        What was learned.
    figures : mapping of str to matplotlib.figure.Figure or ndarray
        Drawings by the names of their files without ending; frames of a film as uint8 of shape
        (n_frames, height, width, 3).
    rounds : int
        Communication rounds of one federation.
    floats_up, floats_down : float
        Floats that a client sent and received in one federation, the mean over clients.
    facts : mapping, optional
        What the texts of the TOML file refer to besides options and metrics; ``headline`` says
        of which federation the floats are.
    tables : sequence of Table, optional
        Tables that are none of records.
    """

    records: Sequence[Record]
    curves: Mapping[str, Sequence[float]]
    arrays: Mapping[str, NDArray[Any]]
    figures: Mapping[str, Figure | NDArray[np.uint8]]
    rounds: int
    floats_up: float
    floats_down: float
    facts: Mapping[str, Any] = {}
    tables: Sequence[Table] = ()


def to_results(outcome: Outcome, page: Page, **run: Any) -> dict[str, Any]:
    """Return what results.json says of an outcome.

    Parameters
    ----------
    outcome : Outcome
        What the experiment found.
    page : mapping
        The study's TOML file.
    **run
        ``experiment``, ``title``, ``about``, ``source``, ``config``, ``seed``, ``engine``,
        ``seconds``, ``clients`` (what happened to each client's replies, by its name).

    Returns
    -------
    dict
        Nothing in it but what JSON can say.

    Raises
    ------
    ValueError
        If a metric or a curve is not finite.
    """
    facts = {**page.get("constants", {}), **run["config"], **outcome.facts}
    found = report(page, outcome.records, facts)
    curves = {name: [float(v) for v in values] for name, values in outcome.curves.items()}
    for name, values in [*curves.items(), *((n, [v]) for n, v in found["metrics"].items())]:
        if not np.isfinite(values).all():
            raise ValueError(f"{name} must be finite, got {values}.")
    told = {**found["metrics"], **facts}
    return {
        **run,
        "versions": versions(),
        **found,
        "curves": curves,
        "rounds": int(outcome.rounds),
        "floats_up": float(outcome.floats_up),
        "floats_down": float(outcome.floats_down),
        "costs_of": outcome.facts.get("headline", ""),
        "tables": [*found["tables"], *(table._asdict() for table in outcome.tables)],
        "figures": [
            {
                "file": one["file"],
                **{part: say(one[part], told) for part in ("title", "caption")},
                **_seen(outcome.figures[Path(one["file"]).stem], one, told),
            }
            for one in page.get("figures", ())
            if Path(one["file"]).stem in outcome.figures
        ],
    }


def _seen(drawn: Figure | NDArray[np.uint8], one: Page, told: Mapping[str, Any]) -> dict[str, str]:
    """Return what a figure shows for those who do not see it, and whether it is a chart.

    The colors of a chart, which holds no picture, may be inverted on a dark page.
    """
    chart = not isinstance(drawn, np.ndarray) and not any(axes.images for axes in drawn.axes)
    if "alt" in one:
        alt = say(one["alt"], told)
    elif isinstance(drawn, np.ndarray):
        alt = f"Film of {len(drawn)} frames."
    else:
        from perdl_experiments.plots import describe  # an extra: matplotlib

        alt = describe(drawn)
    return {"alt": alt, "kind": CHART if chart else "picture"}


def vector(figure: Figure) -> bytes:
    """Return a chart as SVG, whose text stays text and which is the same bytes each time."""
    from matplotlib import rc_context  # an extra

    drawn = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flwr-perdl"}):
        figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
    return _TAG.sub(lambda tag: _LONG_NUMBER.sub(rb"\1", tag[0]), drawn.getvalue())


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    others = {name: version(name) for name in ("flwr", "numpy", "scipy")}
    return {"flwr-perdl": __version__, "python": platform.python_version(), **others}


def write(out: Path, outcome: Outcome, results: Mapping[str, Any]) -> None:
    """Write an outcome's files to the folder ``out``; results.json comes last.

    Parameters
    ----------
    out : Path
        The folder; made when missing.
    outcome : Outcome
        Its arrays and figures are written.
    results : mapping
        What `to_results` returned.
    """
    out.mkdir(parents=True, exist_ok=True)
    for named in results["figures"]:
        path = out / named["file"]
        drawn = outcome.figures[path.stem]
        if isinstance(drawn, np.ndarray):
            _write_film(path, drawn)
            continue
        with replacing(path) as stream:
            drawn.savefig(stream, format="png", dpi=DPI, bbox_inches="tight")
        if named["kind"] == CHART:
            with replacing(path.with_suffix(".svg")) as stream:
                stream.write(vector(drawn))
    arrays: dict[str, Any] = dict(outcome.arrays)
    with replacing(out / ARRAYS) as stream:
        np.savez_compressed(stream, **arrays)
    with replacing(out / RESULTS) as stream:
        stream.write(json.dumps(results, indent=1, allow_nan=False).encode())


def _write_film(path: Path, frames: NDArray[np.uint8]) -> None:
    from PIL import Image  # an extra

    first, *rest = [Image.fromarray(frame) for frame in frames]
    with replacing(path) as stream:
        first.save(
            stream, format="GIF", save_all=True, append_images=rest, duration=_FRAME_TIME, loop=0
        )
