"""Where clustered learning of any model starts: groups of clients by how they change one model.

Every client trains the same model alone. Two clients are alike if their changes of it point the
same way: what is compared are cosines, since clients with more samples, or more steps, only go
farther. The methods follow, for other distances and models:

- groups: one-shot clustering (Ghosh et al., "Robust Federated Learning in a Heterogeneous
  Environment", 2019), here by Ward's method on the changes' directions;
- anchors: farthest-point traversal (Gonzalez, 1985), then k-medoids;
- the number of groups: the standard-error rule of Breiman et al. (1984) on held-out losses.

With malicious clients, the farthest is no anchor, and one does not decide the number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import squareform

from flwr_perdl.core.arrays import row_norms
from flwr_perdl.core.checks import Matrix

#: Digits of cosines: what is equal up to rounding is equal.
_DIGITS = 9
#: Standard errors within which two numbers of groups are as good as each other.
_ERRORS = 2
#: Median squared distances of a client that no group suits.
_UNSUITED = 8
#: Standard error of a median of normal draws, times sqrt(n), over the median distance to it.
_OF_MEDIAN = 1.858


def cosines(changes: Matrix) -> Matrix:
    """Return the cosine of each pair of rows; a change of nothing has cosine 0 with others."""
    norms = row_norms(changes)[:, None]
    directions = changes / np.where(norms > 0, norms, 1)
    found = np.round(np.clip(directions @ directions.T, -1, 1), _DIGITS).astype(float)
    np.fill_diagonal(found, 1)
    return found


class Nested(NamedTuple):
    """Groups of clients, for one group up to the largest number of groups.

    Attributes
    ----------
    members : ndarray of bool, of shape (n_groups, n_clients)
        Who is in each of all the groups; at most 2 most - 1 of them, as each further number of
        groups splits one of those before.
    of : ndarray of int, of shape (most, n_clients)
        Row k - 1: each client's group, a row of ``members``, where there are k.
    """

    members: NDArray[np.bool_]
    of: NDArray[np.intp]


def nested_groups(changes: Matrix, most: int) -> Nested:
    """Group clients whose changes point the same way (Ward's method on the directions).

    ``changes`` (n_clients, d); ``most`` is the largest number of groups.
    """
    alike = cosines(changes)
    cuts = np.ones((1, len(alike)), dtype=np.intp)
    if most > 1:
        apart = np.sqrt(2 - 2 * alike)  # between directions, vectors of length 1
        tree = linkage(squareform(apart, checks=False), "ward")
        cuts = cut_tree(tree, range(1, min(most, len(alike) - 1) + 1)).T
    if 1 < most == len(alike):  # SciPy's cut into as many groups as clients is one group
        cuts = np.vstack([cuts, np.arange(most)])
    rows: dict[bytes, int] = {}
    of = np.empty(cuts.shape, dtype=np.intp)
    for groups, own in zip(cuts, of, strict=True):
        for label in dict.fromkeys(groups.tolist()):  # in the order of their first clients
            own[groups == label] = rows.setdefault((groups == label).tobytes(), len(rows))
    members = np.stack([np.frombuffer(row, dtype=np.bool_) for row in rows])
    return Nested(members, of)


def find_supported_groups(changes: Matrix, n_groups: int) -> NDArray[np.intp]:
    """Return the clients whose groups may start a model with malicious clients.

    Malicious clients that collude are a group, too, for which two of the others share one. So more
    groups than are wanted are made, and the largest of them kept, if that suits more clients: of
    all numbers of groups the one where the fewest clients of the ``n_groups`` largest are alone,
    and then where the squared distances of the directions from their group's mean are least, of
    which those of clients that are left out, and all that are larger, count for ``_UNSUITED``
    medians. At least half of the clients are kept.

    Returns rows of ``changes`` (n_clients, d), ascending.
    """
    n = len(changes)
    if n_groups == 1 or n <= n_groups:
        return np.arange(n)
    alike = cosines(changes)
    nested = nested_groups(changes, n_groups + n // 2)
    sizes = nested.members.sum(axis=1)
    to_mean = nested.members @ alike / sizes[:, None]
    own = np.where(nested.members, to_mean, 0).sum(axis=1) / sizes  # the means' squared lengths
    squares = np.maximum(1 - 2 * to_mean + own[:, None], 0)
    found = []
    for groups in nested.of[n_groups - 1 :]:
        labels = np.unique(groups)
        largest = labels[np.argsort(-sizes[labels], kind="stable")[:n_groups]]
        kept = np.isin(groups, largest)
        if 2 * kept.sum() >= n:
            size = sizes[groups[kept]]  # of few clients the mean is nearer than the truth
            apart = squares[groups[kept], np.flatnonzero(kept)] * size / np.maximum(size - 1, 1)
            found.append((int((sizes[largest] == 1).sum()), apart, np.flatnonzero(kept)))
    worst = _UNSUITED * max(min(float(np.median(apart)) for _, apart, _ in found), 10.0**-_DIGITS)
    cost = [
        (alone, np.minimum(apart, worst).sum() + (n - len(rows)) * worst)
        for alone, apart, rows in found
    ]
    return found[cost.index(min(cost))][-1]


def choose_anchors(changes: Matrix, n_anchors: int, robust: bool = False) -> NDArray[np.intp]:
    """Return clients whose changes stand for all: far from each other, then central in their group.

    The first anchor is the most central client, each further one the farthest from those before;
    robust: they are the most central clients of the groups of `nested_groups`, since what is
    farthest may be a lie. Then, again and again, every client joins the nearest anchor, and the
    most central client of each group becomes its anchor, until none changes.

    Returns rows of ``changes`` (n_clients, d), ascending.
    """
    alike = cosines(changes)
    anchors = [int(alike.sum(axis=1).argmax())]
    if robust:
        groups = nested_groups(changes, n_anchors)
        anchors = [_central(alike, groups.members[j]) for j in np.unique(groups.of[-1])]
    while len(anchors) < n_anchors:
        nearest = alike[:, anchors].max(axis=1)
        nearest[anchors] = np.inf
        anchors.append(int(nearest.argmin()))
    for _ in range(len(alike)):
        group = alike[:, anchors].argmax(axis=1)
        group[anchors] = np.arange(n_anchors)
        before, anchors = anchors, [_central(alike, group == j) for j in range(n_anchors)]
        if anchors == before:
            break
    return np.sort(np.array(anchors, dtype=np.intp))


def _central(alike: Matrix, members: NDArray[np.bool_]) -> int:
    """Return the member that is most like the others."""
    own = np.flatnonzero(members)
    return int(own[alike[np.ix_(own, own)].sum(axis=1).argmax()])


def smallest_as_good(losses: Matrix, robust: bool = False) -> int:
    """Return the smallest number of groups that is as good as the best but for chance.

    As good: the mean difference of the clients' losses is at most two of its standard errors;
    robust: their median difference too, of losses that exceed the client's least by no more than
    the median client's do.

    ``losses`` (n_clients, most): each client's held-out loss with one group, two groups, ...
    """
    if robust:
        losses = losses - losses.min(axis=1, keepdims=True)
        losses = np.minimum(losses, np.median(losses.max(axis=1)))
    worse = losses - losses[:, [losses.mean(axis=0).argmin()]]
    error = worse.std(axis=0, ddof=len(losses) > 1) / np.sqrt(len(losses))
    good = worse.mean(axis=0) <= _ERRORS * error
    if robust:
        middle = np.median(worse, axis=0)
        away = np.median(np.abs(worse - middle), axis=0)
        good &= middle <= _ERRORS * _OF_MEDIAN * away / np.sqrt(len(losses))
    return int(good.argmax()) + 1


def perturb(model: Sequence[Matrix], n_models: int, rng: np.random.Generator) -> list[Matrix]:
    """Return random models around one, as a stack: per array, one of shape (n_models, ...).

    The standard deviation of the perturbation is that of the array's own values: where these are
    all alike it stays what it is; if all arrays are such, it is 1 / sqrt(columns).
    """
    units = [float(array.std()) if array.size else 0.0 for array in model]
    if not any(units):
        units = [max(array.shape[-1:], default=1) ** -0.5 for array in model]
    draws = [rng.standard_normal((n_models, *array.shape)) for array in model]
    return [
        (array + unit * draw).astype(array.dtype)
        for array, unit, draw in zip(model, units, draws, strict=True)
    ]
