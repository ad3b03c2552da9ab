"""A run's models, and which of them is each client's: how its record is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord

from flwr_perdl.core.checks import Matrix
from flwr_perdl.protocol.records import CLUSTER, to_record
from flwr_perdl.protocol.report import RunRecord

#: In what a run keeps: clients with their models, where the server finds these.
MEMBERS = "members"


@dataclass(frozen=True, kw_only=True)
class Models:
    """What a strategy says of its run's models; by default there is one.

    Parameters
    ----------
    names : sequence of str, default ()
        The names of a model's arrays, where they are not those of the initial ones.
    numbered : bool, default False
        Whether there are several, one after the other; evaluations call arrays "NUMBER/NAME".
    stack : int, optional
        Which array has a row for each model, where they are not one after the other.
    form : callable, optional
        ``model -> its arrays by name``, where they are not those in the record.
    first : tuple of str, default ()
        Steps before there are clusters: what clients said of theirs until then is of other models.
    drops_empty : bool, default False
        Whether models that no client has are left out of the result: nobody has set their number.
    """

    names: Sequence[str] = ()
    numbered: bool = False
    stack: int | None = None
    form: Callable[[Sequence[Matrix]], dict[str, Matrix]] | None = None
    first: tuple[str, ...] = ()
    drops_empty: bool = False

    def names_in(self, record: RunRecord) -> list[str]:
        """Return the names of a model's arrays."""
        return [*(self.names or record.array_names)]

    def split(self, record: RunRecord) -> list[list[Matrix]]:
        """Return the models."""
        model, at = record.model, self.stack
        if at is not None:
            rows = [row for stack in model[at : at + 1] for row in stack]
            return [[*model[:at], row, *model[at + 1 :]] for row in rows]
        size = (self.numbered and len(self.names_in(record))) or len(model) or 1
        return [model[i : i + size] for i in range(0, len(model), size)]

    def named(self, model: Sequence[Matrix], record: RunRecord) -> ArrayRecord:
        """Return one of the models, with the names of its arrays."""
        if self.form is None:
            return to_record(model, self.names_in(record))
        arrays = self.form(model)
        return to_record([*arrays.values()], [*arrays])

    def members(self, record: RunRecord, n: int, clients: Collection[int]) -> dict[int, int]:
        """Return which of ``n`` models is each client's, by partition: as it said last."""
        kept = record.kept.get(MEMBERS)
        if n == 1 and kept is None:
            return dict.fromkeys(clients, 0)
        members: dict[int, int] = {}
        for report in reversed(record.history):
            if report.step in self.first:
                break
            for p in report.metrics.keys() - members.keys():
                j = report.metrics[p].get(CLUSTER)
                if isinstance(j, int | float) and 0 <= j < n:
                    members[p] = int(j)
        found = {} if kept is None else dict(kept.tolist())
        return dict(sorted({**members, **found}.items()))
