"""What a client has spent of its own guarantee: on its disk, over all runs and processes.

One file per client has an account for each guarantee that the client was started with. It is
written before an answer leaves, so that a crash may cost budget and never gives some back. A file
that cannot be read stops the client: a new one would be a new budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flwr_perdl.core import files
from flwr_perdl.privacy.noise import Noise

_FILE, _LOCK = "noise.npz", "noise.lock"


class Own(NamedTuple):
    """What a client insists on.

    Attributes
    ----------
    noise : Noise
        The weakest guarantee that it answers.
    folder : Path or None
        The client's folder, with the file; None: it counts within one run of Flower only.
    client : str
        The client's name, the same in every run.
    """

    noise: Noise
    folder: Path | None
    client: str


@contextmanager
def account(own: Own, folder: Path) -> Iterator[dict[str, Any]]:
    """Let the block change what a client has spent; it is on the disk when the block has ended."""
    files.refuse_link(folder)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    path, noise = folder / _FILE, own.noise
    promise = f"{noise.epsilon!r} {noise.delta!r} {noise.trust} {noise.level}"
    with files.locking(folder / _LOCK):
        files.refuse_link(path)
        accounts: dict[str, Any] = {"client": own.client}
        if path.exists():
            accounts = files.load(path).meta
        if accounts.get("client") != own.client:
            raise ValueError(f"{path} must be of client {own.client!r}, got another one's.")
        yield accounts.setdefault(promise, {})
        files.save(path, {}, accounts)
