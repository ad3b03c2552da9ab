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
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

#: The environment variable with the key: 64 hexadecimal digits, as `openssl rand -hex 32` prints.
KEY_VARIABLE = "FLWR_PERDL_STATE_KEY"

_KEY, _NONCE = 32, 12
_SEALED = "sealed"


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
            raise ValueError(f"it is not locked, and there is a key in {KEY_VARIABLE}")
        sealed = locked[_SEALED].tobytes()
        try:
            text = self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], _bound(about))
        except (InvalidTag, ValueError):
            raise ValueError("it was changed after it was locked") from None
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


def _bound(about: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(about), sort_keys=True).encode()
