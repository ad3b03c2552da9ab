"""Drawings for the reports; no global state, no display.

A figure is at most `WIDTH` wide: on a screen of 420 pixels its text is then 14 pixels high. Lines
differ in color and in dashes, and carry their names; `describe` says in words what a figure shows,
for those who do not see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from textwrap import fill
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from flwr_perdl.core.checks import Matrix
from perdl_experiments.render import MANY, QUANTILES, WORST
from perdl_experiments.words import plural

#: Colors that stay apart for readers who do not tell red from green, each readable on white.
COLORS = ("#0065a3", "#c85200", "#1b7837", "#b03a9e", "#5a5a5a", "#000000", "#8a6d00")
DASHES: tuple[Any, ...] = ("-", (0, (6, 1.5)), (0, (1.5, 1.2)), (0, (7, 1.5, 1.5, 1.5)))
_MARKERS = "os^Dv*"
#: Inches of the widest figure, and points of its smallest text.
WIDTH, SMALL = 4.1, 10.0
#: Characters of a line's name before it wraps, and the height of its lines in inches.
_WRAP, _LEADING = 17, 0.17
#: Characters of the name of a panel's vertical axis before it wraps.
_AXIS = 26
#: Lines with more points than this have no marker at each; panels with more have no tick at each.
_MARKED, _TICKS = 30, 12
#: Points of a line that are drawn.
_POINTS = 200
#: Inches of the tallest figure of `dots`.
_TALLEST = 12.0
_LEGEND: dict[str, Any] = {"frameon": False, "ncols": 2, "fontsize": SMALL, "handlelength": 2}
#: Panels and lines that a description names.
_MOST_PANELS, _MOST_LINES = 8, 6
#: What matplotlib labels the axes of a scale of colors.
_BAR = "<colorbar>"


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return axes


def style(index: int) -> dict[str, Any]:
    """Return color and dashes of a line by its place; the first seven differ in color."""
    return {"color": COLORS[index % len(COLORS)], "ls": DASHES[index % len(DASHES)]}


def panel_grid(
    n_panels: int, *, columns: int = 2, height: float = 2.6, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels, row by row.

    Parameters
    ----------
    n_panels : int
        At least 1.
    columns : int, default 2
        At most so many side by side. The text of more than two is too small on a small screen.
    height : float, default 2.6
        Inches of a row.
    **shared
        Such as ``sharex=True``, for ``Figure.subplots``.
    """
    columns = min(columns, n_panels)
    rows = ceil(n_panels / columns)
    figure = _figure(max(WIDTH, columns * WIDTH / 2), height * rows + 0.5)
    every = figure.subplots(rows, columns, squeeze=False, **shared).ravel()
    for axes in every[n_panels:]:
        axes.remove()
    if shared.get("sharex"):  # the last of every column
        for axes in every[n_panels - columns : n_panels]:
            axes.tick_params(labelbottom=True)
    return figure, list(every[:n_panels])


def name_lines(axes: Axes) -> None:
    """Write the names of lines at their right ends, pushed apart where they meet.

    To be called when all lines are drawn and the axis has its scale.
    """
    lines = [line for line in axes.get_lines() if np.size(line.get_ydata())]
    named = [line for line in lines if not str(line.get_label()).startswith("_")]
    names = [fill(str(line.get_label()), _WRAP) for line in named]
    height = axes.bbox.height / axes.figure.dpi  # inches
    sizes = np.array([_LEADING * (1.4 + name.count("\n")) / height for name in names])
    axes.set_ylim(axes.get_ylim())
    to_axes = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[0]
    ends = [to_axes.transform((x, float(np.asarray(one.get_ydata())[-1])))[1] for one in named]
    for line, name, at in zip(named, names, _pushed_apart(np.array(ends), sizes), strict=True):
        axes.annotate(
            name,
            (1.0, at),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
            fontsize=SMALL,
        )


def _pushed_apart(ends: Matrix, sizes: Matrix) -> Matrix:
    """Return centers of texts of these heights, near ``ends`` and in their order, in [0, 1]."""
    order, at = np.argsort(-ends, kind="stable"), np.clip(ends, 0, 1)
    ceiling = np.inf
    for i in order:  # downward: each below the one above it
        at[i] = min(at[i], ceiling - sizes[i] / 2)
        ceiling = at[i] - sizes[i] / 2
    floor = min(ceiling, 0.0) if sizes.sum() > 1 else 0.0
    for i in order[::-1]:  # upward: the lowest back into the figure, each above the one below it
        at[i] = max(at[i], floor + sizes[i] / 2)
        floor = at[i] + sizes[i] / 2
    return at


def describe(figure: Figure) -> str:
    """Return in words what a figure shows: its panels, their axes, and where each line goes.

    Returns
    -------
    str
        Such as "error against round: PerMA from 0.5 to 0.001; local training from 0.5 to 0.2."
    """
    panels = [axes for axes in figure.axes if axes.get_visible() and axes.get_label() != _BAR]
    told = [said for said in map(_describe, panels) if said]
    rest = len(told) - _MOST_PANELS
    more = [f"and {plural(rest, 'panel')} more"] if rest > 0 else []
    return ". ".join([*told[:_MOST_PANELS], *more]) + "." if told else ""


def _describe(axes: Axes) -> str:
    title = axes.get_title(loc="left") or axes.get_title()
    if axes.images:
        return " ".join(f"picture: {title or axes.get_ylabel()}".split()).rstrip(":")
    lines = [said for said in map(_describe_line, axes.get_lines()) if said]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {plural(len(lines) - _MOST_LINES, 'line')} more"]
    y, x = axes.get_ylabel(), axes.get_xlabel()
    what = f"{y} against {x}" if x and y else x or y
    head = ", ".join(dict.fromkeys(part for part in (title, what) if part))
    return " ".join(": ".join(part for part in (head, "; ".join(lines)) if part).split())


def _describe_line(line: Line2D) -> str:
    axes: Any = line.axes
    data = line.get_xdata() if axes.yaxis_inverted() else line.get_ydata()  # of `dots`, the values
    label, values = str(line.get_label()), np.asarray(data, dtype=float)
    values = values[np.isfinite(values)]
    if label.startswith("_") or not len(values):
        return ""
    if np.ptp(values) == 0:
        return f"{label} at {values[0]:.3g}"
    if line.get_linestyle() == "None":
        return f"{label} between {values.min():.3g} and {values.max():.3g}"
    between = "".join(
        f" by way of {extreme:.3g}"
        for extreme in (values.min(), values.max())
        if extreme not in (values[0], values[-1])
    )
    return f"{label} from {values[0]:.3g}{between} to {values[-1]:.3g}"


def atoms(groups: Mapping[str, Matrix], shape: tuple[int, int], *, columns: int = 12) -> Figure:
    """Draw groups of atoms as small pictures, each to its own scale with zero in the middle gray.

    Parameters
    ----------
    groups : mapping of str to ndarray of shape (n_atoms, height * width)
        Title -> atoms; a group of none is left out.
    shape : tuple of int
        Height and width of an atom.
    columns : int
        Atoms side by side.
    """
    sheets = {t: _sheet(_scaled(D), shape, columns) for t, D in groups.items() if len(D)}
    heights = [sheet.shape[0] for sheet in sheets.values()]
    width = next(iter(sheets.values())).shape[1]
    figure = _figure(WIDTH, WIDTH * sum(heights) / width + 0.4 * len(heights))
    rows = figure.subplots(len(sheets), 1, squeeze=False, height_ratios=heights)
    for axes, (title, sheet) in zip(rows[:, 0], sheets.items(), strict=True):
        _show(axes, sheet, title)
    return figure


def images(rows: Mapping[str, Matrix], shape: tuple[int, int]) -> Figure:
    """Draw rows of images in [0, 1], the row's title on its left (Fig. 3).

    Parameters
    ----------
    rows : mapping of str to ndarray of shape (n_images, height * width)
        Title -> images.
    shape : tuple of int
        Height and width of an image.
    """
    count = len(next(iter(rows.values())))
    figure = _figure(WIDTH, 4.8 * len(rows) / count * shape[0] / shape[1])
    grid = figure.subplots(len(rows), 1, squeeze=False)
    for axes, (title, values) in zip(grid[:, 0], rows.items(), strict=True):
        _show(axes, _sheet(np.clip(values, 0, 1), shape, count), "")
        _name_row(axes, title)
    return figure


def _name_row(axes: Axes, title: str) -> None:
    """Write a row's title on the left of its first image."""
    at: dict[str, Any] = {"rotation": 0, "ha": "right", "va": "center", "labelpad": 8}
    axes.set_ylabel(fill(title, _WRAP), parse_math=False, **at)


class Panel(NamedTuple):
    """One of several drawings beside or below each other.

    Attributes
    ----------
    x, y : str
        What the axes show.
    at : sequence of float
        Positions.
    lines : mapping of str to array_like of shape (n_positions,) or (n_seeds, n_positions)
        Label -> a value per position. Of several seeds the median is drawn, and the range shaded;
        where one is NaN, nothing is.
    title : str, default ""
        Above the panel.
    log : bool, default False
        Whether positions are logarithmic; values are unless ``linear``.
    linear : bool, default False
        Whether values are drawn as they are.
    levels : mapping of str to float, optional
        Label -> constant.
    floor : float, default 1e-16
        Logarithmic values are raised to it: below it differences mean nothing, such as rounding.
    limits : pair of float or None, default (None, None)
        Ends of the vertical axis.
    """

    x: str
    y: str
    at: Sequence[float]
    lines: Mapping[str, ArrayLike]
    title: str = ""
    log: bool = False
    linear: bool = False
    levels: Mapping[str, float] = MappingProxyType({})
    floor: float = 1e-16
    limits: tuple[float | None, float | None] = (None, None)


def panels(drawings: Sequence[Panel], *, height: float = 2.5) -> Figure:
    """Draw lines in panels below each other (Fig. 5), their names at their ends.

    Parameters
    ----------
    drawings : sequence of Panel
        From top to bottom.
    height : float, default 2.5
        Inches of a panel.
    """
    figure, grid = panel_grid(len(drawings), columns=1, height=height)
    for axes, panel in zip(grid, drawings, strict=True):
        _plain(axes).set(
            xscale="log" if panel.log else "linear", yscale="linear" if panel.linear else "log"
        )
        few = len(panel.at) <= _TICKS
        floor = -np.inf if panel.linear else panel.floor
        for index, (label, values) in enumerate(panel.lines.items()):
            marker = _MARKERS[index % len(_MARKERS)] if few else ""
            _draw(axes, panel.at, values, label, index, floor, marker=marker, ms=4)
        _draw_levels(axes, panel.levels, len(panel.lines), floor)
        axes.set(xlabel=panel.x, ylabel=fill(panel.y, _AXIS), ylim=panel.limits)
        if few:
            axes.set_xticks(panel.at, [f"{position:g}" for position in panel.at])
            axes.set_xticks([], minor=True)
        axes.set_title(panel.title, fontsize=SMALL, loc="left")
        name_lines(axes)
    return figure


def lines(
    curves: Mapping[str, ArrayLike],
    *,
    x: str,
    y: str,
    levels: Mapping[str, float] | None = None,
    log: bool = False,
    log_x: bool = False,
    start: int = 1,
    floor: float = 1e-16,
) -> Figure:
    """Draw curves over 1, 2, … (or from ``start``), and constant levels as thin lines.

    Parameters
    ----------
    curves : mapping of str to array_like of shape (n_rounds,) or (n_seeds, n_rounds)
        Label -> values, see `Panel`.
    x, y : str
        What the axes show.
    levels : mapping of str to float, optional
        Label -> constant.
    log : bool
        Logarithmic y axis, its values raised to ``floor``.
    log_x : bool
        Logarithmic x axis, for curves that differ in the first rounds.
    start : int
        Where x starts.
    floor : float
        Below it differences mean nothing, such as rounding.
    """
    figure = _figure(WIDTH, 3.4)
    axes = _plain(figure.add_subplot(xscale="log" if log_x else "linear"))
    floor = floor if log else -np.inf
    for index, (label, values) in enumerate(curves.items()):
        length = np.shape(values)[-1]
        marker = "o" if length <= _MARKED else ""
        _draw(axes, range(start, start + length), values, label, index, floor, marker=marker)
    _draw_levels(axes, levels or {}, len(curves), floor)
    if log:
        axes.set_yscale("log")
    axes.set(xlabel=x, ylabel=y)
    if log_x:
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    name_lines(axes)
    return figure


def _draw(
    axes: Axes,
    at: Sequence[float],
    values: ArrayLike,
    label: str,
    index: int,
    floor: float,
    **look: Any,
) -> None:
    """Draw a line; of several seeds their median, and their range shaded."""
    rows = np.maximum(np.atleast_2d(np.asarray(values, dtype=float)), floor)
    known = ~np.isnan(rows).any(axis=0)
    known &= _kept(len(known), log=axes.get_xscale() == "log")
    places, (low, median, high) = np.asarray(at)[known], np.quantile(rows[:, known], [0, 0.5, 1], 0)
    if len(rows) > 1:
        axes.fill_between(places, low, high, color=style(index)["color"], alpha=0.12, lw=0)
    axes.plot(places, median, label=label, **{"ms": 3.5, **style(index), **look})


def _kept(length: int, *, log: bool) -> NDArray[np.bool_]:
    """Return which points of a line are drawn: more than `_POINTS` would only make files large."""
    kept = np.zeros(length, dtype=bool)
    space = np.geomspace(1, length, _POINTS) if log else np.linspace(1, length, _POINTS)
    kept[np.rint(space).astype(int) - 1] = True
    return kept


def _draw_levels(axes: Axes, levels: Mapping[str, float], first: int, floor: float) -> None:
    for index, (label, level) in enumerate(levels.items(), first):
        axes.axhline(max(level, floor), lw=1.2, label=label, **style(index))


def share_legend(figure: Figure, grid: Sequence[Axes]) -> None:
    """Put one legend above all panels; each name stands once."""
    handles = {
        str(label): handle
        for axes in grid
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    named = [fill(label, _WRAP) for label in handles]
    figure.legend(handles.values(), named, loc="outside upper center", **_LEGEND)


def dots(
    panels: Mapping[str, Mapping[str, Sequence[ArrayLike]]],
    names: Sequence[str],
    *,
    x: str,
    log: bool = False,
) -> Figure:
    """Draw a row per name, with a dot for every value of a group in it (Fig. 2), in panels.

    Parameters
    ----------
    panels : mapping of str to mapping of str to sequence of array_like
        Title -> label -> for every row its values.
    names : sequence of str
        What the rows are.
    x : str
        What the axes show.
    log : bool, default False
        Whether they are logarithmic.
    """
    named = [fill(name, _WRAP + 3) for name in names]
    row = max(
        0.36 if any("\n" in name for name in named) else 0.27,
        *(0.07 * len(p) for p in panels.values()),
    )
    figure = _figure(WIDTH, min(1.2 + row * len(names), _TALLEST))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, groups) in zip(grid, panels.items(), strict=True):
        _plain(axes).set_title(title, fontsize=SMALL, loc="left")
        apart = 0.75 / len(groups)  # groups of a row lie below each other
        for index, (label, rows) in enumerate(groups.items()):
            sizes = [np.size(values) for values in rows]
            at = np.repeat(np.arange(len(rows)), sizes) + apart * (index - (len(groups) - 1) / 2)
            look: dict[str, Any] = {"ms": 5, "alpha": 0.7, "mew": 0}
            look["color"] = COLORS[index % len(COLORS)]
            values = np.concatenate([np.ravel(one) for one in rows])
            axes.plot(values, at, _MARKERS[index % len(_MARKERS)], label=label, **look)
        axes.set(xlabel=fill(x, _AXIS // len(panels)), xscale="log" if log else "linear")
        if log:
            axes.xaxis.set_major_locator(LogLocator(numticks=7 // len(panels)))
    grid[0].set_yticks(range(len(names)), named, fontsize=SMALL)
    grid[0].invert_yaxis()
    if any(len(groups) > 1 for groups in panels.values()):
        share_legend(figure, grid)
    return figure


def of_many(
    groups: Mapping[str, Matrix], names: Sequence[str]
) -> tuple[dict[str, list[Matrix]], list[str]]:
    """Return rows for `dots`: of many clients, quantiles over them and the worst.

    Parameters
    ----------
    groups : mapping of str to ndarray of shape (n_seeds, n_clients)
        Label -> errors. The worst are those of the last group; where these are equal, of the one
        before.
    names : sequence of str
        The clients'.
    """
    if len(names) <= MANY:
        return {label: list(errors.T) for label, errors in groups.items()}, list(names)
    worst = np.lexsort([errors.max(axis=0) for errors in groups.values()])[::-1][:WORST]
    shares = list(QUANTILES.values())
    rows = {
        label: [*np.quantile(errors, shares, axis=1, method="inverted_cdf"), *errors.T[worst]]
        for label, errors in groups.items()
    }
    return rows, [*QUANTILES, *(names[i] for i in worst)]


def _scaled(D: Matrix) -> Matrix:
    """Return atoms with their greatest entry positive and all entries in [0, 1], 0 at one half."""
    peak = np.take_along_axis(D, np.abs(D).argmax(axis=1, keepdims=True), axis=1)
    return 0.5 + 0.5 * D / np.where(peak == 0, 1, peak)


def _sheet(values: Matrix, shape: tuple[int, int], columns: int) -> Matrix:
    """Return small pictures side by side, a margin of one pixel around each."""
    height, width = shape
    count = ceil(len(values) / columns) * columns
    tiles = np.full((count, height + 1, width + 1), np.nan)
    tiles[: len(values), :height, :width] = values.reshape(-1, height, width)
    grid = tiles.reshape(-1, columns, height + 1, width + 1).swapaxes(1, 2)
    return grid.reshape(-1, columns * (width + 1))


def _show(axes: Axes, sheet: Matrix, title: str) -> None:
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(title, fontsize=SMALL, loc="left")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
