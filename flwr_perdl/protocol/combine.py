"""How the replies of a round become one: a value that a request holds, and what is made of it.

A protocol says which rule it wants (`Request.combine`); the driver checks the replies, adds those
of absent clients that are remembered, and puts what they come to into `Replies.combined`. The rules
are those of `flwr_perdl.core.aggregate`, for arrays of any shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flwr_perdl.core.aggregate import RULES
from flwr_perdl.core.checks import Matrix, check_choice, check_kind, check_list
from flwr_perdl.core.models import (
    DTYPES,
    Start,
    aggregate_models,
    check_trained,
    far_too_large,
    fixed_entries,
    is_float,
    stack_changes,
)
from flwr_perdl.protocol.records import Replies, Reply, check_group, check_shapes


@dataclass(frozen=True, kw_only=True)
class Combine:
    """How replies become one, or one per group.

    Parameters
    ----------
    start : sequence of ndarray
        What the replies' arrays began from: a reply has arrays of these shapes and dtypes. With
        ``group`` each has a first axis of groups, which a reply has not. Integers are averaged by
        "mean" in any case, and rounded; booleans and entries that are not finite must stay.
    rule : str, default "mean"
        "mean", weighted by numbers of examples; "filtered", "clip", "trimmed", "median" or
        "geometric-median", of the changes from ``start`` (`flwr_perdl.core.aggregate`), which
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
            if array.dtype not in DTYPES or (self.group is not None and not array.ndim):
                raise ValueError(
                    "start in combine must be arrays of booleans, integers, float16, float32 or "
                    "float64, with a first axis of groups where there are any, got "
                    f"{array.dtype} of shape {array.shape}."
                )
        if not len(self.start) or (
            self.group is not None and len({len(a) for a in self.start}) > 1
        ):
            raise ValueError(
                "start in combine must have at least one array, all with as many groups, got "
                f"{len(self.start)} of different lengths."
            )
        check_kind("group in combine", self.group, (str, type(None)), "a name or None")
        check_choice("rule in combine", self.rule, RULES)

    @property
    def expected(self) -> list[Matrix]:
        """Arrays of the shapes and dtypes of a reply's."""
        return [array for array, _ in self._models[0]]

    @cached_property
    def _models(self) -> list[list[Start]]:
        """Each group's model: its arrays, and which of their entries stay."""
        stacks = [array[None] if self.group is None else array for array in self.start]
        each = (map(np.asarray, model) for model in zip(*stacks, strict=True))
        return [[(array, fixed_entries(array)) for array in model] for model in each]

    def check(self, reply: Reply) -> None:
        """Accept arrays of the shapes that are asked for, and the number of a group."""
        check_shapes([array.shape for array in self.expected], reply)
        if self.group is not None:
            check_group(self.group, reply, len(self._models))

    def magnitudes(self, reply: Reply) -> list[float]:
        """Return the largest value of each array, 0 if it is of no floats.

        Raises
        ------
        ValueError
            If an entry is a boolean, or no finite number, and not the one that was sent.
        """
        found = []
        starts = self._models[self._label(reply)]
        for i, (array, start) in enumerate(zip(reply.arrays, starts, strict=True)):
            size = check_trained(reply.name(i), array, *start)
            found.append(size if is_float(array) else 0.0)
        return found

    def __call__(self, replies: Replies) -> list[Matrix]:
        """Return what the replies come to; a group without replies stays at its start."""
        models, shares = [], dict.fromkeys(replies, 0.0)
        for j, start in enumerate(self._models):
            own = replies.sharing({p: r for p, r in replies.items() if self._label(r) == j})
            model = [array for array, _ in start]
            if own:
                arrays = [reply.arrays for reply in own.values()]
                model, found = aggregate_models(self.rule, start, arrays, own.sizes)
                shares.update(zip(own, found.tolist(), strict=True))
            models.append(model)
        replies.note(RULES[self.rule].effect, shares)
        return models[0] if self.group is None else stack_models(models)

    def _label(self, reply: Reply) -> int:
        """Return a reply's group."""
        return 0 if self.group is None else int(reply.metrics[self.group])

    def changes(self, replies: Replies) -> Matrix:
        """Return the changes of all floats of each reply, as a row, where there is one group."""
        return stack_changes(self._models[0], [reply.arrays for reply in replies.values()])


def check_models(
    combine: Combine, replies: Mapping[int, Reply], bound: float | None
) -> dict[int, str]:
    """Return what is wrong with replies' models, by partition.

    Without a ``bound`` of absolute values, that of each array follows from all replies, see
    `flwr_perdl.core.models.far_too_large`.
    """
    wrong: dict[int, str] = {}
    sizes: dict[int, list[float]] = {}
    for partition, reply in replies.items():
        try:
            sizes[partition] = combine.magnitudes(reply)
        except ValueError as error:
            wrong[partition] = str(error)
    if sizes:
        table = np.array(list(sizes.values())).T  # (n_arrays, n_replies)
        limits = far_too_large(table) if bound is None else np.full(len(table), bound)
        for position, i in np.argwhere(table > limits[:, None])[::-1].tolist():
            partition = list(sizes)[i]
            wrong[partition] = (
                f"array {replies[partition].name(position)!r} has numbers far too large: up to "
                f"{table[position, i]:.3g}, more than {limits[position]:.3g}"
            )
    return wrong


def stack_models(models: Sequence[Sequence[Matrix]]) -> list[Matrix]:
    """Return models as stacks: one array per array of a model."""
    return [np.stack(arrays) for arrays in zip(*models, strict=True)]
