"""Plots of fitted estimators, for notebooks: each takes axes, and returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from flwr_perdl.core.checks import Matrix
from flwr_perdl.estimators import MixedRegression, PersonalizedDictionaryLearning
from perdl_experiments.plots import COLORS

#: The most names of groups below an axis.
_NAMES = 30


def plot_atoms(D: Matrix, names: Sequence[str] | None = None, *, axes: Axes | None = None) -> Axes:
    """Draw atoms as rows of colors: red above zero, blue below.

    Parameters
    ----------
    D : ndarray of shape (n_atoms, n_features)
        Such as ``model.global_atoms_`` or ``model.local_atoms_[0]``.
    names : sequence of str, optional
        Names of the features.
    axes : Axes, optional
        Where to draw; by default pyplot's current axes.

    Returns
    -------
    matplotlib.axes.Axes
    """
    axes = _axes(axes)
    most = float(np.abs(D).max(initial=0)) or 1.0
    image = axes.imshow(D, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    axes.set(xlabel="feature", ylabel="atom", yticks=range(len(D)))
    if names is not None:
        axes.set_xticks(range(len(names)), names, rotation=90)
    _bar(axes, image, "weight")
    return axes


def plot_sharing(
    model: PersonalizedDictionaryLearning,
    tables: Sequence[Any] | Mapping[str, Any],
    *,
    axes: Axes | None = None,
) -> Axes:
    """Draw which site uses which global atom: each site's codes, as shares of their sum.

    The last column is the share of the site's local atoms together.

    Parameters
    ----------
    model : PersonalizedDictionaryLearning
        Fitted.
    tables : sequence or mapping of array_like of shape (n_samples_i, n_features)
        A table per site, in the order of ``fit``, or by the names of ``fit``.
    axes : Axes, optional
        Where to draw; by default pyplot's current axes.

    Returns
    -------
    matplotlib.axes.Axes
    """
    axes = _axes(axes)
    shares = sharing(model, tables)
    image = axes.imshow(shares, cmap="Blues", vmin=0, aspect="auto")
    n_global = shares.shape[1] - 1
    shown = [*range(0, n_global, 1 + n_global // 12), n_global]
    axes.set_xticks(shown, [*map(str, shown[:-1]), "own"])
    axes.set_yticks(range(len(shares)), list(map(str, _sites(model, tables))))
    axes.set(xlabel="global atom", ylabel="site")
    _bar(axes, image, "share of the site's codes")
    return axes


def sharing(
    model: PersonalizedDictionaryLearning, tables: Sequence[Any] | Mapping[str, Any]
) -> Matrix:
    """Return the shares that `plot_sharing` draws.

    Returns
    -------
    ndarray of shape (n_sites, n_global + 1)
        Rows sum to 1; rows of zeros where a table has no codes.

    Parameters
    ----------
    model, tables
        As in `plot_sharing`.
    """
    n_global, rows = len(model.global_atoms_), []
    given = tables.values() if isinstance(tables, Mapping) else tables
    for table, site in zip(given, _sites(model, tables), strict=True):
        used = np.abs(np.asarray(model.transform(table, client=site))).sum(axis=0)
        rows.append([*used[:n_global], used[n_global:].sum()])
    used_by = np.array(rows)
    shares: Matrix = used_by / np.maximum(used_by.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    return shares


def _sites(
    model: PersonalizedDictionaryLearning, tables: Sequence[Any] | Mapping[str, Any]
) -> list[Any]:
    """Return each table's site: its name where it is known, else its number."""
    if isinstance(tables, Mapping):
        return list(tables)
    names = getattr(model, "site_names_", [])  # a site that joined later has none
    return [*names, *range(len(names), len(tables))][: len(tables)]


def plot_clusters(
    model: MixedRegression, X: Matrix, y: Matrix, groups: Any, *, axes: Axes | None = None
) -> Axes:
    """Draw each group's error under every model: its own model is the lowest point.

    Clusters are clear where that point is far below the others.

    Parameters
    ----------
    model : MixedRegression
        Fitted.
    X, y, groups : array_like
        As in ``fit``.
    axes : Axes, optional
        Where to draw; by default pyplot's current axes.

    Returns
    -------
    matplotlib.axes.Axes
    """
    axes = _axes(axes)
    squares = (np.asarray(y)[:, None] - (np.asarray(X) @ model.coef_.T + model.intercept_)) ** 2
    owners = np.asarray(groups)
    errors = np.array([np.sqrt(squares[owners == g].mean(axis=0)) for g in model.groups_])
    order = np.argsort(model.labels_, kind="stable")
    for j, column in enumerate(errors[order].T):
        color = COLORS[j % len(COLORS)]
        axes.plot(column, "osD^v"[j % 5], ms=4, color=color, label=f"model {j}")
    axes.set(xlabel="group, by its model", ylabel="root mean squared error", ylim=(0, None))
    shown = range(0, len(order), 1 + len(order) // _NAMES)
    axes.set_xticks(shown, [str(model.groups_[order[i]]) for i in shown], rotation=90)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
    return axes


def _axes(axes: Axes | None) -> Axes:
    """Return the given axes, or pyplot's current ones."""
    if axes is not None:
        return axes
    from matplotlib import pyplot  # has a state, which only notebooks want

    return pyplot.gca()


def _bar(axes: Axes, image: Any, label: str) -> None:
    """Put the colors' scale beside the axes."""
    figure: Any = axes.figure
    figure.colorbar(image, ax=axes, label=label)
