"""Sealed messages: encrypted end to end, so that only the receiving neighbor can read them.

Every node draws an X25519 key pair for every run, and may also have a lasting one in a key file.
Its *card*, which it announces, holds the public keys of both pairs. A message from one node
to another is encrypted and authenticated with ChaCha20-Poly1305 under a key that only these two can
compute,

    HKDF-SHA256( e_a·e_b || s_a·e_b || e_a·s_b,  salt = run,  info = sender, receiver, both cards )

where e are the run's keys and s the lasting ones (a < b; without lasting keys on both sides the
first product alone counts: this is the triple Diffie-Hellman of the Signal protocol). Run, sender,
receiver and round are authenticated with the message, so that a message of another round, edge or
run cannot be unsealed. Nonces are random.

Secrecy is forward per run, not per round: a node has one key for all rounds of a run and deletes it
after the last one. From then on neither its disk nor a lasting key unseals a recorded message.
Until then, and at a node that the server never asks for its last step, an attacker with that key
and recorded messages reads those to and from this node.

Cards pass through the server. A server that delivers its own cards instead of the nodes' could
read and write messages, unless the nodes *pin* their neighbors' lasting public keys: then such a
card is rejected, or the message cannot be unsealed. Without pinned keys messages are safe from an
honest-but-curious server only. In all cases the server sees the size of every message, its sender
and its receiver.

Flower's replies carry floats: bytes travel as float64 arrays, seven in each number.

A client and a server know of a card that it is an array, and of `Keys` its properties and methods:
another way of sealing is a change of this file.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from flwr_perdl.core.arrays import Array
from flwr_perdl.core.npy import pack, read_files, unpack, write_files
from flwr_perdl.network.messages import Rejected
from flwr_perdl.protocol.records import KEY_FILE, PINNED_KEYS

#: The cipher, and the bytes of its key and of its nonce.
_CIPHER, _KEY, _NONCE = ChaCha20Poly1305, 32, 12
_CARD = 2 * _KEY
_NONE = bytes(_KEY)  # in place of the lasting key of a node without one


class Keys:
    """The keys of one node in one run.

    Parameters
    ----------
    node : int
        The node's id.
    run : str
        Token of the run.
    own_key : X25519PrivateKey, optional
        The node's lasting key.
    pinned : mapping of int to bytes, optional
        The lasting public keys of the only nodes whose cards and messages are accepted.
    run_key : bytes, optional
        The private key of this run, as `run_key` gave it; a new one by default.

    Raises
    ------
    ValueError
        If there are pinned keys, but no key of its own.
    """

    def __init__(
        self,
        node: int,
        run: str,
        *,
        own_key: X25519PrivateKey | None = None,
        pinned: Mapping[int, bytes] | None = None,
        run_key: bytes | None = None,
    ) -> None:
        if pinned is not None and own_key is None:
            raise ValueError("pinned keys must come with a key of this node's own, got none.")
        self.node, self.run, self._own, self._pinned = node, run, own_key, pinned
        if run_key is None:
            self._run = X25519PrivateKey.generate()
        else:
            self._run = X25519PrivateKey.from_private_bytes(run_key)
        lasting = _NONE if own_key is None else own_key.public_key().public_bytes_raw()
        self._card = lasting + self._run.public_key().public_bytes_raw()

    @property
    def run_key(self) -> bytes:
        """The private key of this run: for the node's private state."""
        return self._run.private_bytes_raw()

    @property
    def card(self) -> NDArray[np.uint8]:
        """The public keys that this node announces."""
        return pack(self._card)

    def seal(
        self, arrays: Sequence[Array], receiver: int, round_: int, card: Array
    ) -> NDArray[np.uint8]:
        """Return the sealed message that carries ``arrays`` to a neighbor.

        Parameters
        ----------
        arrays : tuple of ndarray
            The message.
        receiver : int
            The neighbor.
        round_ : int
            The round of the message.
        card : ndarray
            The neighbor's card.

        Raises
        ------
        Rejected
            If the card is not the neighbor's.
        """
        key = self._key(self.node, receiver, _bytes(card))
        nonce = os.urandom(_NONCE)
        bound = self._bound(self.node, receiver, round_)
        sealed = _CIPHER(key).encrypt(nonce, write_files(arrays), bound)
        return pack(self._card + nonce + sealed)

    def seal_each(
        self, arrays: Sequence[Array], round_: int, cards: Mapping[int, Array]
    ) -> tuple[list[Array], dict[int, str]]:
        """Return the sealed message to each neighbor, and whose cards were rejected, and why.

        A message of size 0 stands for that to a neighbor whose card was rejected.
        """
        sealed: list[Array] = []
        rejected: dict[int, str] = {}
        for receiver, card in cards.items():
            try:
                sealed.append(self.seal(arrays, receiver, round_, card))
            except Rejected as reason:
                sealed.append(pack(b""))
                rejected[receiver] = str(reason)
        return sealed, rejected

    def open(self, sealed: Array, sender: int, round_: int) -> tuple[Array, ...]:
        """Return the arrays of a sealed message.

        Parameters
        ----------
        sealed : ndarray
            What `seal` of the sender returned.
        sender : int
            Its sender, according to the server.
        round_ : int
            Its round, according to the server.

        Raises
        ------
        Rejected
            If it is not from this sender, for this node, or of this run and round, or was changed.
        """
        data = _bytes(sealed)
        if len(data) < _CARD + _NONCE:
            raise Rejected(f"{len(data)} bytes are no message")
        card, nonce, cipher = data[:_CARD], data[_CARD : _CARD + _NONCE], data[_CARD + _NONCE :]
        key = self._key(sender, self.node, card)
        try:
            bound = self._bound(sender, self.node, round_)
            opened = _CIPHER(key).decrypt(nonce, cipher, bound)
        except InvalidTag:
            raise Rejected("it was changed, or is of another sender, round or run") from None
        try:
            return tuple(read_files(opened))
        except ValueError as error:
            raise Rejected(f"it holds no arrays: {error}") from None

    def _bound(self, sender: int, receiver: int, round_: int) -> bytes:
        """Return what is authenticated with a message."""
        return struct.pack("<QQQ", sender, receiver, round_) + self.run.encode()

    def _key(self, sender: int, receiver: int, card: bytes) -> bytes:
        """Return the key of the messages from one node to another; one of them is this node."""
        other = receiver if sender == self.node else sender
        if len(card) != _CARD:
            raise Rejected(f"{len(card)} bytes are no card")
        lasting, fresh = card[:_KEY], X25519PublicKey.from_public_bytes(card[_KEY:])
        if self._pinned is not None and self._pinned.get(other) != lasting:
            known = "the pinned one" if other in self._pinned else "pinned"
            raise Rejected(f"its key is not {known}")
        try:
            secret = self._run.exchange(fresh)
            if self._own is not None and lasting != _NONE:
                parts = (
                    self._own.exchange(fresh),
                    self._run.exchange(X25519PublicKey.from_public_bytes(lasting)),
                )
                secret += b"".join(parts if self.node < other else parts[::-1])
        except ValueError:  # a point of small order: not the public key of any key pair
            raise Rejected("its card is no public key") from None
        cards = (self._card, card) if sender == self.node else (card, self._card)
        info = b"flwr-perdl letter" + struct.pack("<QQ", sender, receiver) + b"".join(cards)
        return HKDF(hashes.SHA256(), _KEY, salt=self.run.encode(), info=info).derive(secret)


def make_key(path: str | Path) -> str:
    """Write a new lasting private key to a file that only its owner can read.

    Parameters
    ----------
    path : str or Path
        The new file (PEM, as ``openssl genpkey -algorithm x25519`` writes it).

    Returns
    -------
    str
        The public key, in hexadecimal digits, for neighbors to pin.

    Raises
    ------
    FileExistsError
        If the file exists: a key is never overwritten.
    ValueError
        If its folder does not exist.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from flwr_perdl.privacy import make_key
    >>> with TemporaryDirectory() as folder:
    ...     key = make_key(Path(folder, "node.pem"))
    >>> len(key)
    64
    """
    key = X25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileNotFoundError:
        raise ValueError(f"path must be a file in a folder that is there, got {path!r}.") from None
    with os.fdopen(opened, "wb") as stream:
        stream.write(pem)
    return key.public_key().public_bytes_raw().hex()


def lasting_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lasting keys that a node's config names, as arguments of `Keys`."""
    key_file, pinned = config.get(KEY_FILE), config.get(PINNED_KEYS)
    return {
        "own_key": read_key(str(key_file)) if key_file else None,
        "pinned": read_pinned(str(pinned)) if pinned else None,
    }


def read_key(path: str | Path) -> X25519PrivateKey:
    """Return the lasting private key in a file.

    Raises
    ------
    ValueError
        If there is no X25519 key in it.
    """
    try:
        key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{KEY_FILE} must hold a private key in PEM form, got {error}.") from error
    if not isinstance(key, X25519PrivateKey):
        raise ValueError(f"{KEY_FILE} must hold an X25519 key, got {type(key).__name__}.")
    return key


def read_pinned(path: str | Path) -> dict[int, bytes]:
    """Return the public keys of a node's neighbors from a JSON file: node -> hexadecimal digits.

    Raises
    ------
    ValueError
        If the file holds anything else.
    """
    try:
        pinned = {int(k): bytes.fromhex(v) for k, v in json.loads(Path(path).read_text()).items()}
    except (AttributeError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{PINNED_KEYS} must be JSON of nodes and keys, got {error}.") from error
    for node, key in pinned.items():
        if len(key) != _KEY or key == _NONE:
            raise ValueError(
                f"{PINNED_KEYS} must be of {_KEY} bytes, not all zero, got {key.hex()} for {node}."
            )
    return pinned


def _bytes(array: Array) -> bytes:
    try:
        return unpack(array)
    except ValueError as error:
        raise Rejected(str(error)) from None
