"""What every client has: an identity, and private state that lasts from round to round.

`Member` identifies the client. `PrivateState` keeps arrays in Flower's ``context.state`` and, on
request, on disk.

The states after the last two rounds are kept, by round, in one record (engines send it with every
message). A server that crashed repeats a round; the client then takes the newest state from
*before* that round, so the same request has the same reply.

Every run has its own folder in its client's folder, and the newest 256 are kept: a resumed run
finds its files although other runs came in between. The server says which run a request belongs to.
So that it cannot have folders deleted by naming many runs, a Flower run may begin only 64. A file
is bound to the client's name, which does not depend on the run, and to the algorithm. A file that
is damaged, or of another client or algorithm, is logged and ignored: the client starts afresh. One
encrypted with another key, or of another version of this library, stops the client before anything
is overwritten.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from hashlib import sha256
from logging import WARNING
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple
from urllib.parse import quote

from flwr.app import Array, ArrayRecord, ConfigRecord, Context
from numpy.typing import NDArray

from flwr_perdl.core import files
from flwr_perdl.core.checks import as_array, check_count, check_flag, check_kind
from flwr_perdl.protocol.at_rest import locked, read
from flwr_perdl.protocol.compat import NumPyClient, log, new_record
from flwr_perdl.protocol.records import (
    NAME,
    PARTITION_ID,
    Scalar,
    encode,
    named_partition,
    read_partition,
    view,
)

PrivateArrays = dict[str, NDArray[Any]]

#: The environment variable with the folder of a client's private state, where the node config has
#: no ``state-dir``.
FOLDER_VARIABLE = "FLWR_PERDL_STATE_DIR"

PREFIX = "perdl.private."
#: What follows a run's token where arrays are kept beside those of its protocol: those of an app
#: inside it, what transport has not sent yet, and the client's model at the end.
INNER, UNSENT, OWN = "/app", "/unsent", "/own"
#: Runs whose folders are kept, the newest ones; how many of them one Flower run may begin, and
#: where ``context.state``, which lasts as long as a Flower run, has which those are.
_RUNS, _RUNS_BEGUN = 256, 64
_BEGUN = "perdl.runs-on-disk"
#: Seconds without a word from it after which a run is taken for given up: thirty days.
_STANDSTILL = 30 * 86400.0
#: The most characters of a run's token, and bytes of a folder's name.
_TOKEN, _NAME_MAX = 256, 255


def identify(context: Context) -> dict[str, Scalar]:
    """Return who a client is: its partition id, and its name where the node config gives one.

    Flower's node ids are random in every run; ``partition-id`` (set by the simulation, or by
    ``--node-config``) is not. A node with a ``name`` alone gets its partition id from the name.

    Raises
    ------
    ValueError
        If the node config has neither, or its partition id is no integer.
    """
    config = check_kind("context", context, Context, "the Context of Flower").node_config
    name = str(config.get(NAME, ""))
    partition = config.get(PARTITION_ID)
    if partition is None:
        if not name:
            raise ValueError(
                f"node_config must have {PARTITION_ID!r} or {NAME!r}, got {dict(config)}."
            )
        partition = named_partition(name)
    properties: dict[str, Scalar] = {PARTITION_ID: read_partition(partition)}
    return {**properties, NAME: name} if name else properties


class Member(NumPyClient):
    """A client that knows its identity and sends it.

    Parameters
    ----------
    context : Context
        The argument of the client's factory.

    Raises
    ------
    ValueError
        If the context does not say who the client is.

    Examples
    --------
    >>> from flwr.app import Context, RecordDict
    >>> from flwr_perdl.clients import Member
    >>> context = Context(1, 1, {"partition-id": 3}, RecordDict(), {})
    >>> Member(context).partition
    3
    """

    def __init__(self, context: Context) -> None:
        self.properties = identify(context)
        self.partition = int(self.properties[PARTITION_ID])

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return who this client is: ``"partition-id"`` and, where it has one, ``"name"``."""
        return dict(self.properties)


class StateStore(NamedTuple):
    """Where a client keeps its private state on disk, and what the files are bound to.

    Attributes
    ----------
    folder : Path
        The client's own folder.
    client : str
        Its name, the same in every run.
    algorithm : str
        What the state is of: one algorithm's is no other's.
    """

    folder: Path
    client: str
    algorithm: str


def private_store(
    context: Context, algorithm: str, state_dir: str | Path | None = None
) -> StateStore | None:
    """Return where a client keeps its private state on disk, or None.

    Parameters
    ----------
    context : Context
        The client's Flower context; its node config identifies the client.
    algorithm : str
        Whose state it is.
    state_dir : str or Path, optional
        Folder of all clients. By default ``state-dir`` of the node config, then the environment
        variable ``FLWR_PERDL_STATE_DIR`` of the client's process. A ``state-dir`` in the run config
        comes from the server, and is ignored.

    Returns
    -------
    StateStore or None

    Examples
    --------
    >>> from flwr.app import Context, RecordDict
    >>> from flwr_perdl.clients import private_store
    >>> context = Context(1, 1, {"partition-id": 3}, RecordDict(), {})
    >>> private_store(context, "perma") is None  # the node config has no state-dir
    True
    """
    check_kind("context", context, Context, "a Context")
    given = state_dir or context.node_config.get("state-dir") or os.environ.get(FOLDER_VARIABLE)
    if not given:
        return None
    own = str(context.node_config.get(NAME) or context.node_config.get(PARTITION_ID))
    name = f"client-{quote(own, safe='')}"
    if len(name) > _NAME_MAX:  # no quoted name has "="
        name = f"client-sha256={sha256(own.encode()).hexdigest()}"
    return StateStore(Path(str(given)) / name, own, algorithm)


def run_folder(store: StateStore, run: str) -> Path:
    """Return the folder of a run's files; the run's token comes from the server."""
    return store.folder / f"run-{sha256(run.encode()).hexdigest()[:16]}"


class PrivateState:
    """The private arrays of one client in one run, by round.

    Parameters
    ----------
    context : Context
        The client's Flower context; its ``state`` keeps the arrays between messages.
    run : str
        Token of the run; arrays of another run are not used.
    store : StateStore or None
        Where this client's files are; None keeps nothing on disk.

    Raises
    ------
    ValueError
        If the token has more than 256 characters. When files are read or written: if the key in the
        environment is no key, or not theirs; if a file is of another version of this library; if
        there is a symbolic link in place of a folder; if this Flower run has already begun 64 runs.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.app import Context, RecordDict
    >>> from flwr_perdl.clients import PrivateState
    >>> context = Context(1, 1, {"partition-id": 3}, RecordDict(), {})
    >>> PrivateState(context, "run").save(1, {"atoms": np.eye(2)})
    >>> PrivateState(context, "run").after(1)["atoms"]
    array([[1., 0.],
           [0., 1.]])
    """

    def __init__(self, context: Context, run: str, store: StateStore | None = None) -> None:
        check_kind("context", context, Context, "a Context")
        check_kind("store", store, (StateStore, type(None)), "a StateStore or None")
        if len(check_kind("run", run, str, "a text")) > _TOKEN:
            raise ValueError(f"run must have at most {_TOKEN} characters, got {len(run)}.")
        base, slash, inside = run.partition("/")
        if slash and slash + inside not in (INNER, UNSENT, OWN):
            raise ValueError(f"run must be a token without '/', got {run!r}.")
        self._records = context.state
        self._run, self._base = run, base
        self._name = f"{PREFIX}{run}"
        self._store = store
        self._held = _by_round(context.state.get(self._name, {}))

    def before(self, round_: int) -> PrivateArrays | None:
        """Return the newest arrays saved before round ``round_``, if any.

        From ``context.state`` if possible; a restarted SuperNode has lost that, and reads its
        files.

        Parameters
        ----------
        round_ : int

        Returns
        -------
        dict of str to ndarray, or None
        """
        found = self._newest(check_count("round_", round_) - 1)
        if found is None and round_ > 1 and self._held:
            log(WARNING, "No state from before round %d: this client starts afresh.", round_)
        return found

    def after(self, round_: int) -> PrivateArrays | None:
        """Return the newest arrays saved in round ``round_`` or earlier, if any.

        Parameters
        ----------
        round_ : int

        Returns
        -------
        dict of str to ndarray, or None
        """
        return self._newest(check_count("round_", round_))

    def newest(self) -> PrivateArrays | None:
        """Return the most recently saved arrays, if any.

        Returns
        -------
        dict of str to ndarray, or None
        """
        return self._newest(files.LAST_ROUND)

    def _newest(self, last: int) -> PrivateArrays | None:
        in_memory = max((r for r in self._held if r <= last), default=-1)
        if self._store is not None:
            _refuse_links(self._store, self._run)
            for round_ in reversed(files.rounds_in(run_folder(self._store, self._run))):
                saved = self._read(self._store, round_) if in_memory < round_ <= last else None
                if saved is not None:
                    return saved
        if in_memory < 0:
            return None
        return {name: view(array) for name, array in self._held[in_memory].items()}

    def save(self, round_: int, arrays: Mapping[str, NDArray[Any]], *, alone: bool = False) -> None:
        """Keep ``arrays`` as the state after ``round_``, and the state before it.

        Parameters
        ----------
        round_ : int
            The round, from 0 to 999,999.
        arrays : mapping of str to ndarray
            The state.
        alone : bool, default False
            Whether to delete all earlier states, in memory and on disk.
        """
        check_count("round_", round_, 0, files.LAST_ROUND)
        for name, array in check_kind("arrays", arrays, Mapping, "a mapping").items():
            if not isinstance(name, str) or as_array("arrays", array).dtype.hasobject:
                raise ValueError(f"arrays must be arrays of numbers by name, got {name!r}.")
        alone = check_flag("alone", alone)
        if self._store is not None:
            self._write(self._store, round_, arrays, kept=1 if alone else 2)
        before = [] if alone else sorted(r for r in self._held if r < round_)[-1:]
        self._held = {r: self._held[r] for r in before}
        self._held[round_] = {name: encode(array) for name, array in arrays.items()}
        kept = {f"{r}/{name}": own for r, some in self._held.items() for name, own in some.items()}
        for name in [name for name in self._records if name.startswith(PREFIX)]:
            if name.partition("/")[0] != PREFIX + self._base:
                del self._records[name]
        self._records[self._name] = new_record(ArrayRecord, kept)

    # On disk ---------------------------------------------------------------------------------

    def _about(self, store: StateStore, round_: int) -> dict[str, Any]:
        """Return what a file says in the clear."""
        return {
            "client": store.client,
            "algorithm": store.algorithm,
            "run": self._run,
            "round": round_,
        }

    def _write(
        self, store: StateStore, round_: int, arrays: Mapping[str, NDArray[Any]], kept: int
    ) -> None:
        """Save a round; only the owner of this process may look into the folder."""
        written = locked(arrays, self._about(store, round_))
        folder = run_folder(store, self._run)
        _refuse_links(store, self._run)
        if not folder.is_dir():
            self._begin(store, folder)
        files.save_round(folder, round_, *written, kept=kept)

    def _begin(self, store: StateStore, folder: Path) -> None:
        """Make a run's folder, and delete the oldest ones."""
        begun = self._records.config_records.get(_BEGUN, ConfigRecord())
        own = run_folder(store, self._base).name  # a run has four folders at most
        if len(begun) >= _RUNS_BEGUN and own not in begun:
            raise ValueError(
                f"a Flower run must begin at most {_RUNS_BEGUN} runs of a client that keeps its "
                "state on disk, got another one."
            )
        others = [path for path in store.folder.glob("run-*") if not path.is_symlink()]
        others.sort(key=lambda path: path.stat().st_mtime)
        old = time.time() - _STANDSTILL
        for path in others:
            if path in others[: -_RUNS + 1] or path.stat().st_mtime < old:
                rmtree(path, ignore_errors=True)
        for path in (store.folder, folder):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        begun[own] = True
        self._records[_BEGUN] = begun

    def _read(self, store: StateStore, round_: int) -> PrivateArrays | None:
        """Return what a round's file holds; None if it is not ours."""
        path = files.round_path(run_folder(store, self._run), round_)
        wanted = self._about(store, round_)

        def check(about: Mapping[str, Any]) -> None:
            for name, own in wanted.items():
                if about[name] != own:
                    raise ValueError(f"{path} must be of {name} {own!r}, got {about[name]!r}.")

        saved = read(path, wanted, check)
        return None if saved is None else saved.arrays


def _refuse_links(store: StateStore, run: str) -> None:
    """Refuse folders that lead elsewhere: files there would be read, deleted, and opened to us."""
    for own in (store.folder, run_folder(store, run)):
        files.refuse_link(own)


def _by_round(record: Any) -> dict[int, dict[str, Array]]:
    """Return the arrays of one run's record in ``context.state``, by round."""
    held: dict[int, dict[str, Array]] = {}
    for key, array in record.items():
        round_, _, name = key.partition("/")
        held.setdefault(int(round_), {})[name] = array
    return held
