"""Private state that only the holder of a key can read, and change, on disk.

Arrays are encrypted and authenticated with ChaCha20-Poly1305 under a key from the environment;
what the file says in the clear (whose it is, of which algorithm, run and round) is authenticated
with them. Nonces are random. An older file of the same client and run, put back, is not noticed
but for the round that its name and its content say.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from io import BytesIO
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

from flwr_perdl.core import files
from flwr_perdl.protocol.compat import log

#: The environment variable with the key: 64 hexadecimal digits, as `openssl rand -hex 32` prints.
KEY_VARIABLE = "FLWR_PERDL_STATE_KEY"

_KEY, _NONCE = 32, 12
_SEALED = "sealed"
#: What a file says of its key in the clear.
_KEY_NAME = "key"


class StateKey:
    """A key for private state.

    Parameters
    ----------
    key : bytes
        32 random bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        #: Tells keys apart without giving them away.
        self.name = hashlib.sha256(b"flwr-perdl state key" + key).hexdigest()[:16]

    def lock(
        self, arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]
    ) -> dict[str, NDArray[Any]]:
        """Return what stands for ``arrays`` on disk; ``about`` cannot be changed without notice."""
        text, nonce = BytesIO(), os.urandom(_NONCE)
        named: dict[str, Any] = dict(arrays)
        np.savez(text, **named)
        sealed = nonce + self._cipher.encrypt(nonce, text.getvalue(), _bound(about))
        return {_SEALED: np.frombuffer(sealed, dtype=np.uint8)}

    def unlock(
        self, locked: Mapping[str, NDArray[Any]], about: Mapping[str, Any]
    ) -> dict[str, NDArray[Any]]:
        """Return the arrays that `lock` was given.

        Raises
        ------
        ValueError
            If they are not locked, or they, or what is said about them, were changed.
        """
        if set(locked) != {_SEALED}:
            raise ValueError(f"it is not encrypted, and there is a key in {KEY_VARIABLE}")
        sealed = locked[_SEALED].tobytes()
        try:
            text = self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], _bound(about))
        except (InvalidTag, ValueError):
            raise ValueError("it was changed after it was encrypted") from None
        with np.load(BytesIO(text), allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}


def key_from_environment() -> StateKey | None:
    """Return the key in the environment, None where there is none.

    Raises
    ------
    ValueError
        If it is not 64 hexadecimal digits; the value is not repeated.
    """
    given = os.environ.get(KEY_VARIABLE, "").strip()
    if not given:
        return None
    try:
        key = bytes.fromhex(given)
    except ValueError:
        key = b""
    if len(key) != _KEY:
        raise ValueError(
            f"{KEY_VARIABLE} must be {2 * _KEY} hexadecimal digits (openssl rand -hex {_KEY}), "
            f"got {len(given)} characters that are not."
        )
    return StateKey(key)


def locked(
    arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any]
) -> tuple[Mapping[str, NDArray[Any]], dict[str, Any]]:
    """Return what a file of private state holds; the arrays are locked if there is a key."""
    key = key_from_environment()
    about = {**about, _KEY_NAME: None if key is None else key.name}
    return arrays if key is None else key.lock(arrays, about), about


def read(
    path: Path, names: Collection[str], check: Callable[[Mapping[str, Any]], None]
) -> files.Saved | None:
    """Return the arrays of a file of private state, and what it says under these names.

    None, with a line in the log, if the file cannot be read, was changed, or ``check`` raises a
    ValueError for what it says.

    Raises
    ------
    ValueError
        If the file is of another version of this library, or locked with a key that is not the one
        in the environment.
    """
    key = key_from_environment()
    try:
        files.refuse_link(path)
        saved = files.load(path)
        about = {name: saved.meta.get(name) for name in (*names, _KEY_NAME)}
        check(about)
    except files.OtherFormatError:
        raise
    except ValueError as error:
        log(WARNING, "%s It is left out.", error)
        return None
    if about[_KEY_NAME] not in (None, None if key is None else key.name):
        raise ValueError(
            f"{KEY_VARIABLE} must be the key that {path.name} is encrypted with, got "
            f"{'none' if key is None else 'another one'}: {path}."
        )
    if key is None:
        return files.Saved(saved.arrays, about)
    try:
        return files.Saved(key.unlock(saved.arrays, about), about)
    except ValueError as error:
        log(WARNING, "%s is left out: %s.", path, error)
        return None


def _bound(about: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(about), sort_keys=True).encode()
