"""How the replies of a round become one: a value that a request holds, and what is made of it.

A protocol says which rule it wants (`Request.combine`); the driver checks the replies, adds those
of absent clients that are remembered, and puts what they come to into `Replies.combined`. The rules
are those of `flwr_perdl.regression.aggregate`, for arrays of any shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from flwr_perdl.core.checks import (
    FLOATS,
    Matrix,
    check_choice,
    check_kind,
    check_list,
    check_magnitude,
)
from flwr_perdl.core.robust import EFFECTS
from flwr_perdl.protocol.records import Reply
from flwr_perdl.regression.clustering import ROBUST, average_updates

if TYPE_CHECKING:
    from flwr_perdl.protocol.request import Replies


@dataclass(frozen=True, kw_only=True)
class Combine:
    """How replies become one, or one per group.

    Parameters
    ----------
    start : sequence of ndarray
        What the replies' arrays began from: a reply has arrays of these shapes. With ``group``
        each has a first axis of groups, which a reply has not.
    rule : str, default "mean"
        "mean", weighted by numbers of examples; "filtered", "clip", "trimmed", "median" or
        "geometric-median", of the changes from ``start`` (`flwr_perdl.regression.aggregate`), which
        clients that lie do not move far. The report says what a rule did to whom.
    group : str, optional
        The metric that says which group a reply belongs to, from 0; by default all are of one.

    Raises
    ------
    ValueError
        If ``rule`` is unknown, or the arrays of ``start`` are none, or not of as many groups.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.protocol.records import Reply
    >>> from flwr_perdl.strategies import Combine, Replies
    >>> replies = Replies({0: Reply([np.array([1.0])], 1, {}), 1: Reply([np.array([4.0])], 2, {})})
    >>> Combine(start=[np.zeros(1)])(replies)
    [array([3.])]
    """

    start: Sequence[Matrix]
    rule: str = "mean"
    group: str | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        for array in check_list("start in combine", self.start):
            check_kind("start in combine", array, np.ndarray, "a list of arrays of numbers")
            if array.dtype not in FLOATS or (self.group is not None and not array.ndim):
                raise ValueError(
                    "start in combine must be float32 or float64 arrays, with a first axis of "
                    f"groups where there are any, got {array.dtype} of shape {array.shape}."
                )
        if not len(self.start) or (
            self.group is not None and len({len(a) for a in self.start}) > 1
        ):
            raise ValueError(
                "start in combine must have at least one array, all with as many groups, got "
                f"{len(self.start)} of different lengths."
            )
        check_kind("group in combine", self.group, (str, type(None)), "a name or None")
        check_choice("rule in combine", self.rule, ROBUST)

    @property
    def n_groups(self) -> int:
        """The number of groups."""
        return 1 if self.group is None else len(self.start[0])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of a reply's arrays."""
        return [array.shape[self.group is not None :] for array in self.start]

    def check(self, reply: Reply) -> None:
        """Accept arrays of the shapes that are asked for, and the number of a group."""
        check_shapes(self.shapes, reply)
        if self.group is not None:
            check_group(self.group, reply, self.n_groups)

    def __call__(self, replies: Replies) -> list[Matrix]:
        """Return what the replies come to; a group without replies stays at its start."""
        grouped = self.group is not None
        stacks = [array if grouped else array[None] for array in self.start]
        average = self._means if self.rule == "mean" else self._robust
        found = average(stacks, replies)
        return found if grouped else [np.asarray(stack[0]) for stack in found]

    def _labels(self, replies: Replies) -> list[int]:
        """Return each reply's group."""
        if self.group is None:
            return [0] * len(replies)
        return [int(reply.metrics[self.group]) for reply in replies.values()]

    def _means(self, stacks: list[Matrix], replies: Replies) -> list[Matrix]:
        """Return each group's mean, array by array: no model is copied into a vector."""
        labels = np.array(self._labels(replies))
        moved = [stack.copy() for stack in stacks]
        for j in np.unique(labels).tolist():
            own = np.where(labels == j, sizes_of(replies), 0)
            own /= own.sum()
            for position, stack in enumerate(moved):
                mean = np.zeros_like(stack[j])
                for weight, reply in zip(own.tolist(), replies.values(), strict=True):
                    if weight:
                        mean += weight * reply.arrays[position]
                stack[j] = mean
        return moved

    def _robust(self, stacks: list[Matrix], replies: Replies) -> list[Matrix]:
        """Return what the rule makes of the changes, each reply's as one vector."""
        before = joined(stacks)
        packed = np.empty((len(replies), 1, before.shape[1] + 1), before.dtype)
        for (row,), j, reply in zip(packed, self._labels(replies), replies.values(), strict=True):
            row[0] = j
            row[1:] = joined([array[None] for array in reply.arrays])[0] - before[j]
        mean = average_updates(packed, sizes_of(replies), len(before), "cluster", self.rule)
        replies.note(EFFECTS[self.rule], dict(zip(replies, mean.odd.tolist(), strict=True)))
        steps = split(mean.change, [stack.shape[1:] for stack in stacks])
        return [(stack + s).astype(stack.dtype) for stack, s in zip(stacks, steps, strict=True)]


def check_shapes(shapes: Sequence[tuple[int, ...]], reply: Reply) -> None:
    """Accept arrays of these shapes, whose squares do not overflow."""
    given = [array.shape for array in reply.arrays]
    if given != list(shapes):
        raise ValueError(f"wrong shapes: {list(shapes)} are asked for, got {given}")
    for array in reply.arrays:
        check_magnitude("arrays", array, floor=np.inf)


def check_group(name: str, reply: Reply, n_groups: int) -> None:
    """Accept the number of one of the groups."""
    group = reply.metrics.get(name, np.nan)
    if group not in range(n_groups):
        raise ValueError(f"{name} must be one of {n_groups}, from 0, got {group:g}")


def sizes_of(replies: Replies) -> Matrix:
    """Return the replies' numbers of examples."""
    return np.array([float(reply.num_examples) for reply in replies.values()])


def joined(stacks: Sequence[Matrix]) -> Matrix:
    """Return a stack of models as rows."""
    rows: Matrix = np.concatenate([stack.reshape(len(stack), -1) for stack in stacks], axis=1)
    return rows


def split(rows: Matrix, shapes: Sequence[tuple[int, ...]]) -> list[Matrix]:
    """Return rows as stacks of arrays of these shapes."""
    ends = np.cumsum([prod(shape) for shape in shapes])[:-1]
    parts = np.split(rows, ends, axis=1)
    return [part.reshape(len(rows), *shape) for part, shape in zip(parts, shapes, strict=True)]
