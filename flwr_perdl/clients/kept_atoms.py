"""A client's local atoms, read where the client keeps them.

They are never sent. Anyone who can read a client's Flower context, or the ``state-dir`` of the node
config, can read them: the client itself, and in a simulation the process that runs all clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flwr.app import Array, Context, RecordDict

from flwr_perdl.clients._states import NodeStates
from flwr_perdl.clients.dictionary import LOCAL_ATOMS
from flwr_perdl.core import files
from flwr_perdl.core.checks import Matrix, check_kind
from flwr_perdl.protocol.client_state import (
    PREFIX,
    PrivateState,
    StateStore,
    private_store,
    run_folder,
)
from flwr_perdl.protocol.records import PARTITION_ID, encode


def local_atoms(source: Context | str | Path) -> Matrix:
    """Return the local atoms that a `DictionaryClient` has learned.

    Parameters
    ----------
    source : Context, str or Path
        The client's Flower context, which `InProcessGrid` has for every node in ``contexts``; or
        the client's folder, ``client-NAME`` in its ``state-dir``. Of several runs in a folder, the
        last to write is read. An encrypted folder needs the key in the environment
        (docs/security.md).

    Returns
    -------
    ndarray of shape (n_local, n_features)
        Unit atoms of the last round that the client took part in. Empty (``n_local`` = 0) if all
        atoms are global.

    Raises
    ------
    ValueError
        If there is no state of a client that took part in an update round of `PerMA`, or if the key
        is missing or wrong.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import DictionaryClient, client_app, local_atoms
    >>> from flwr_perdl.dictionary import OrthogonalLearner
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PerMA
    >>> X = np.random.default_rng(0).standard_normal((3, 50, 6))
    >>> def make_client(context):
    ...     own = X[context.node_config["partition-id"]]
    ...     return DictionaryClient(own, OrthogonalLearner(5), context)
    >>> grid = InProcessGrid(client_app(make_client), 3)
    >>> result = PerMA(n_global=2).start(grid, num_rounds=2)
    >>> [local_atoms(context).shape for context in grid.contexts.values()]
    [(3, 6), (3, 6), (3, 6)]
    """
    check_kind("source", source, (Context, str, Path), "a Context or a path")
    state = _of_context(source) if isinstance(source, Context) else _of_folder(Path(source))
    kept = None if state is None else state.newest()
    if kept is None or LOCAL_ATOMS not in kept:
        where = "a Context without them" if isinstance(source, Context) else repr(str(source))
        raise ValueError(
            "source must be the Context, or the folder client-NAME, of a DictionaryClient that has "
            f"taken part in an update round, got {where}."
        )
    atoms: Matrix = kept[LOCAL_ATOMS]
    return atoms


def kept_local_atoms(state_dir: str | Path) -> dict[str, Matrix]:
    """Return the local atoms of every client whose state is in a folder.

    They were not sent: this reads what the clients, or the process that simulated them, keep on
    this machine. Local atoms reveal each client's own structure, which `PerMA` keeps from the
    server.

    Parameters
    ----------
    state_dir : str or Path
        A SuperNode's ``state-dir``, `InProcessGrid`'s ``state_dir``, or the folder ``state`` of a
        run of ``flwr-perdl run --out``. An encrypted folder needs the key in the environment
        (docs/security.md).

    Returns
    -------
    dict of str to ndarray of shape (n_local, n_features)
        By the client's name, or its partition if it has none; see `local_atoms`.

    Raises
    ------
    ValueError
        If there is no client's state, or one without local atoms; or if the key is missing or
        wrong.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> import numpy as np
    >>> from flwr_perdl.clients import DictionaryClient, client_app, kept_local_atoms
    >>> from flwr_perdl.dictionary import OrthogonalLearner
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PerMA
    >>> X = np.random.default_rng(0).standard_normal((2, 50, 6))
    >>> def make_client(context):
    ...     own = X[context.node_config["partition-id"]]
    ...     return DictionaryClient(own, OrthogonalLearner(5), context)
    >>> with TemporaryDirectory() as folder:
    ...     grid = InProcessGrid(client_app(make_client), 2, state_dir=folder)
    ...     result = PerMA(n_global=2).start(grid, num_rounds=2)
    ...     {name: atoms.shape for name, atoms in kept_local_atoms(folder).items()}
    {'0': (3, 6), '1': (3, 6)}
    """
    check_kind("state_dir", state_dir, (str, Path), "a path")
    folder = Path(state_dir)
    contexts = NodeStates(folder).contexts()
    found = {str(context.node_config[PARTITION_ID]): local_atoms(context) for context in contexts}
    clients = [path for path in sorted(folder.glob("client-*")) if path.is_dir()]
    found |= {_name(path): local_atoms(path) for path in clients}
    if not found:
        raise ValueError(
            "state_dir must have the state of a client (client-NAME or nodes/nodes.npz), got "
            f"{str(folder)!r} without one."
        )
    return found


def _of_context(context: Context) -> PrivateState | None:
    """Return the one private state that a context keeps."""
    names = (name for name in context.state if name.startswith(PREFIX))
    runs = [run for name in names if "/" not in (run := name.removeprefix(PREFIX))]
    return PrivateState(context, runs[0]) if runs else None


def kept_local(context: Context, run: str, _: Sequence[str] = ()) -> dict[str, Array] | None:
    """Return the local atoms that a client has of a run, in a model's form; or None."""
    store = private_store(context, "")
    state = None if store is None else _of_folder(store.folder, run_folder(store, run).name)
    kept = (state or PrivateState(context, run)).newest()
    return {LOCAL_ATOMS: encode(kept[LOCAL_ATOMS])} if kept and LOCAL_ATOMS in kept else None


def _of_folder(folder: Path, runs: str = "run-*") -> PrivateState | None:
    """Return the private state of the run that wrote into a client's folder last."""
    written = [
        files.round_path(run, max(rounds))
        for run in folder.glob(runs)
        if (rounds := files.rounds_in(run))
    ]
    if not written:
        return None
    newest = max(written, key=lambda path: path.stat().st_mtime_ns)
    files.refuse_link(newest.parent)
    files.refuse_link(newest)
    client, algorithm, run = _about(newest)
    empty = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={})
    return PrivateState(empty, run, StateStore(folder, client, algorithm))


def _name(folder: Path) -> str:
    """Return the name of the client that a folder is of."""
    written = sorted(folder.glob("run-*/*.npz"))
    return _about(written[0])[0] if written else folder.name


def _about(path: Path) -> list[str]:
    """Return the client, the algorithm and the run that a file of private state is of."""
    meta = files.load(path).meta
    said = [meta.get(name) for name in ("client", "algorithm", "run")]
    if not all(isinstance(one, str) for one in said):
        raise ValueError(f"{path} must name its client, algorithm and run, got {said}.")
    return [str(one) for one in said]
