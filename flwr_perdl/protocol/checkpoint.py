"""A run on disk: after each round a file from which it goes on to the same bits."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core import files
from flwr_perdl.core.checks import brief_repr, check_count, plain
from flwr_perdl.protocol.compat import log
from flwr_perdl.protocol.options import ServerSettings
from flwr_perdl.protocol.records import Reply
from flwr_perdl.protocol.report import History, RoundReport, RunRecord

#: Characters of a run's token in a checkpoint.
_LONGEST_RUN = 64
#: Fields of a report that have an entry per client.
BY_PARTITION = ("metrics", "anomalies")
#: What a checkpoint says of a run as the run's record has it.
_AS_IT_IS = ("evaluated", "finished", "array_names", "initial", "names", "server_metrics")
#: What damaged content raises where it is read.
_DAMAGED = (ValueError, KeyError, TypeError, AttributeError)


class Checkpoints:
    """The folder of a run's checkpoints.

    Parameters
    ----------
    options : ServerSettings
        ``checkpoint_dir``, which is made when missing, and whether a run that is there goes on by
        ``resume``; otherwise there must be none.
    identity : mapping
        What makes two runs the same run; a checkpoint of another one is refused.
    run : RunRecord
        A run that has not begun: its model is what it is to begin with.

    Raises
    ------
    ValueError
        If nothing can be written there, or it holds a run that is not to go on.
    """

    def __init__(
        self, options: ServerSettings, identity: Mapping[str, Any], run: RunRecord
    ) -> None:
        self.folder, self.resume = Path(options.checkpoint_dir or ""), options.resume
        self._identity = canonical_identity(identity)
        run.initial = canonical_identity({"": run.model})[""]
        self._journal: files.Journal | None = None
        self._noted = 0  # reports that are in the journal
        self._saves = False  # whether this process has saved a round
        self._resumable = True
        _check_writable(self.folder)
        rounds = files.rounds_in(self.folder)
        if rounds and not self.resume:
            raise ValueError(
                f"checkpoint_dir must hold no run, got one after round {rounds[-1]} in "
                f"{str(self.folder)!r}: continue it with ServerSettings(resume=True), or choose "
                "another folder."
            )

    def save(self, run: RunRecord) -> None:
        """Write a checkpoint of the state after the last finished round."""
        own = self.folder / f"history-{run.token}.jsonl"
        others = set(self.folder.glob("history-*.jsonl")) - {own}
        if others and (self._saves or (not self.resume and files.rounds_in(self.folder))):
            raise ValueError(
                f"checkpoint_dir must be used by one run at a time, got {str(self.folder)!r}, "
                "where another run has saved rounds since this one began."
            )
        if self._journal is None:
            self._journal = files.Journal(own)
        self._journal.append(report._asdict() for report in run.history[self._noted :])
        self._noted = len(run.history)
        if run.state is None and self._resumable:
            self._resumable = False
            log(WARNING, "This run cannot be resumed: its protocol yields a Request without state.")
        state = run.state or {}
        numbers = [name for name, a in state.items() if not isinstance(a, np.ndarray)]
        arrays = {f"state/{name}": np.asarray(a) for name, a in state.items()}
        arrays |= {f"model/{name}": array for name, array in run.named_model.items()}
        arrays |= {f"kept/{name}": array for name, array in run.kept.items()}
        last: dict[int, list[Any]] = {}
        for p, (step, when, reply) in run.last.items():
            arrays |= {f"last/{p}/{i:04d}": array for i, array in enumerate(reply.arrays)}
            last[p] = [step, when, reply.num_examples, reply.metrics]
        meta = {
            "identity": self._identity,
            "run": run.token,
            "round": run.done,
            "numbers": None if run.state is None else numbers,
            "history": self._journal.mark,
            "arrays": _forms(arrays),
            "last": last,
            **{name: vars(run)[name] for name in _AS_IT_IS},
        }
        files.save_round(self.folder, run.done, arrays, meta)
        self._saves = True
        for other in others:
            other.unlink(missing_ok=True)  # of a run that this one replaces

    def load(self, run: RunRecord) -> Path | None:
        """Have ``run`` be what the newest readable checkpoint says; None if there is none.

        Raises
        ------
        ValueError
            If it is of another run or another version of this library, or cannot go on.
        """
        for round_ in reversed(files.rounds_in(self.folder)):
            path = files.round_path(self.folder, round_)
            try:
                saved = files.load(path)
                found, mark = _read_run(saved), dict(saved.meta["history"])
                identity = dict(saved.meta["identity"])
                if found.done != round_:
                    raise ValueError(f"round must be {round_} in this file, got {found.done}")
            except files.OtherFormatError:
                raise
            except _DAMAGED as error:
                text = "%s is no checkpoint (%r). The checkpoint before it is used."
                log(WARNING, text, path, error)
                continue
            self._check_same(identity, run, found)
            if found.state is None:
                raise ValueError(
                    f"checkpoint_dir must hold a state to go on from, got none in {path}: the "
                    "protocol yielded its Request without state=."
                )
            found.history = self._recall(mark)
            vars(run).update(vars(found))
            log(INFO, "Resuming after round %d from %s.", run.done, self.folder)
            return path
        return None

    def _check_same(self, identity: Mapping[str, Any], run: RunRecord, found: RunRecord) -> None:
        """Raise a ValueError unless a saved run is the one at hand."""
        difference = _difference(identity, self._identity)
        if difference:
            raise ValueError(
                "checkpoint_dir must hold a run with the same options, got one in which "
                f"{difference}."
            )
        given, began = map(_describe, (run, found))
        if given and given != began:
            raise ValueError(
                "initial_arrays must have the names, dtypes and shapes of those with which the "
                f"run to resume began, or be left out, got {given} instead of {began}."
            )
        if given and run.initial != found.initial:
            log(INFO, "initial_arrays are ignored: the run continues from its checkpoint.")

    def _recall(self, mark: Mapping[str, Any]) -> History:
        """Return the history; one that is damaged does not stop the run."""
        try:
            self._journal, entries = files.Journal.read(self.folder, mark)
            history = History(map(_read_report, entries))
        except (*_DAMAGED, RecursionError) as error:
            log(WARNING, "%s The run goes on without the reports of its first rounds.", error)
            self._journal, history = None, History()
        self._noted = len(history)
        return history


def _describe(run: RunRecord) -> list[tuple[str, str]]:
    """Return name, dtype and shape of the arrays that a run began with."""
    names = run.array_names or map(str, range(len(run.initial)))
    return [(n, digest.rpartition(" ")[0]) for n, digest in zip(names, run.initial, strict=False)]


def _read_run(saved: files.Saved) -> RunRecord:
    """Return the run that a checkpoint holds, but for its history."""
    meta, arrays = saved.meta, saved.arrays
    found, listed = _forms(arrays), meta["arrays"]
    if other := [one for one in {**listed, **found} if listed.get(one) != found.get(one)]:
        raise ValueError(f"arrays must be those of its record, got others at {other}")
    token = str(meta["run"])
    if not token.isalnum() or len(token) > _LONGEST_RUN:  # it is part of a file's name
        raise ValueError(
            f"run must be at most {_LONGEST_RUN} letters and digits in a checkpoint, got "
            f"{token[:_LONGEST_RUN]!r}."
        )
    done, evaluated = (
        check_count(f"{name} in a checkpoint", meta[name], 0, files.LAST_ROUND)
        for name in ("round", "evaluated")
    )
    array_names = list(map(str, meta["array_names"]))
    if len(set(array_names)) < len(array_names):
        raise ValueError(f"array_names must differ in a checkpoint, got {brief_repr(array_names)}.")
    state: dict[str, Any] | None = None
    if meta["numbers"] is not None:
        state = part(arrays, "state")
        state |= {name: state[name].item() for name in meta["numbers"]}
    last = {}
    for p, (step, when, num_examples, metrics) in meta["last"].items():
        own = list(part(arrays, f"last/{p}").values())
        last[int(p)] = str(step), int(when), Reply(own, int(num_examples), dict(metrics))
    return RunRecord(
        array_names,
        list(part(arrays, "model").values()),
        state,
        bool(meta["finished"]),
        token,
        done,
        evaluated,
        names={int(partition): str(name) for partition, name in meta["names"].items()},
        server_metrics={int(r): dict(found) for r, found in meta["server_metrics"].items()},
        last=last,
        initial=list(map(str, meta["initial"])),
        kept=part(arrays, "kept"),
    )


def canonical_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's identity as its checkpoint says it, and as it is read again.

    Tuples become lists, keys texts, arrays a digest, functions and classes their names, values such
    as `Adam` their class and attributes.

    Raises
    ------
    ValueError
        If something cannot be said.
    """

    def word(value: Any) -> Any:
        if isinstance(value, np.generic):
            return plain(value)
        if isinstance(value, np.ndarray):
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
            return f"{value.dtype} {value.shape} {digest}"
        if hasattr(value, "__qualname__"):
            return f"{value.__module__}.{value.__qualname__}"
        if sparse.issparse(value):
            entries = value.tocoo()
            return [entries.shape, entries.row, entries.col, entries.data]
        # A repr may leave out numbers: two that are not the same would be.
        return {"class": type(value).__qualname__, **vars(value)}

    try:
        text = json.dumps(identity, default=word)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "settings must be numbers, strings, arrays, functions, or lists and mappings of them, "
            f"for a checkpoint to say which run it is of, got one that is not: {error}."
        ) from None
    found: dict[str, Any] = json.loads(text)
    return found


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return in what two identities differ; an option that one lacks is None there."""
    return "; ".join(
        f"{name} is {brief_repr(found.get(name, 'missing'))} and here "
        f"{brief_repr(wanted.get(name, 'missing'))}"
        for name in {**found, **wanted}
        if not _same(found.get(name), wanted.get(name))
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two identities say the same; NaN is the same as NaN here."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _check_writable(folder: Path) -> None:
    """Raise a ValueError if nothing can be saved in a folder, which need not be there yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ValueError(
            f"checkpoint_dir must be a folder that can be written to, got {str(folder)!r}, and "
            f"{there} is not one."
        )


def part(arrays: Mapping[str, NDArray[Any]], kind: str) -> dict[str, NDArray[Any]]:
    """Return the arrays saved under ``kind/``."""
    start = f"{kind}/"
    return {name.removeprefix(start): a for name, a in arrays.items() if name.startswith(start)}


def _forms(arrays: Mapping[str, NDArray[Any]]) -> dict[str, list[Any]]:
    """Return the dtype and the shape of each array, as JSON has them."""
    return {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}


def _read_report(entry: Mapping[str, Any]) -> RoundReport:
    """Return a report as it was before it was saved (JSON's keys are strings)."""
    by_partition = {
        name: {int(partition): values for partition, values in entry[name].items()}
        for name in BY_PARTITION
    }
    return RoundReport(**{**entry, **by_partition})
