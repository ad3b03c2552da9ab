from __future__ import annotations

import hashlib
import hmac
import stat
import struct
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from flwr_perdl.core.npy import pack, unpack
from flwr_perdl.privacy.sealed import Keys, Rejected, make_key
from tests.clients.test_diffusion import client
from tests.grids import context_of

MESSAGE = (np.arange(6.0).reshape(1, 3, 2), np.array([7.5], dtype=np.float32))


def lasting() -> tuple[X25519PrivateKey, bytes]:
    key = X25519PrivateKey.generate()
    return key, key.public_key().public_bytes_raw()


def pinned_pair() -> tuple[Keys, Keys, dict[str, X25519PrivateKey]]:
    """Nodes 3 and 8, who have pinned each other's keys."""
    (a, a_public), (b, b_public) = lasting(), lasting()
    low = Keys(3, "run", own_key=a, pinned={8: b_public})
    high = Keys(8, "run", own_key=b, pinned={3: a_public})
    return low, high, {"low": a, "high": b}


def test_the_key_is_the_one_of_the_docstring() -> None:
    """RFC 5869's HKDF and the three products by hand open a sealed message."""
    low, high, own = pinned_pair()
    e_low = X25519PrivateKey.from_private_bytes(low.run_key)
    e_high = X25519PrivateKey.from_private_bytes(high.run_key)

    def times(private: X25519PrivateKey, public: X25519PrivateKey) -> bytes:
        raw = public.public_key().public_bytes_raw()
        return private.exchange(X25519PublicKey.from_public_bytes(raw))

    secret = times(e_low, e_high) + times(own["low"], e_high) + times(e_low, own["high"])
    for sender, receiver in ((low, high), (high, low)):
        ids = struct.pack("<QQ", sender.node, receiver.node)
        cards = unpack(sender.card) + unpack(receiver.card)
        extracted = hmac.digest(b"run", secret, hashlib.sha256)
        info = b"flwr-perdl letter" + ids + cards
        key = hmac.digest(extracted, info + b"\x01", hashlib.sha256)
        data = unpack(sender.seal(MESSAGE, receiver.node, 5, receiver.card))
        assert data[:64] == unpack(sender.card)
        bound = ids + struct.pack("<Q", 5) + b"run"
        text = ChaCha20Poly1305(key).decrypt(data[64:76], data[76:], bound)
        assert MESSAGE[0].tobytes() in text
        assert MESSAGE[0].tobytes() not in data


def test_two_sealed_messages_of_one_content_have_nothing_in_common() -> None:
    a, b, c = Keys(0, "run"), Keys(1, "run"), Keys(2, "run")
    sealed = [unpack(a.seal(MESSAGE, k.node, 1, k.card)) for k in (b, b, c)]
    for i in range(3):
        assert sealed[i][:64] == unpack(a.card)
        assert sealed[i][64:80] != sealed[i - 1][64:80]
        assert sealed[i][80:96] != sealed[i - 1][80:96]


@pytest.mark.parametrize("position", [0, 40, 64, 70, 80, -1])
def test_a_changed_byte_is_noticed(position: int) -> None:
    a, b = Keys(0, "run"), Keys(1, "run")
    data = bytearray(unpack(a.seal(MESSAGE, 1, 5, b.card)))
    data[position] ^= 1
    with pytest.raises(Rejected):
        b.open(pack(bytes(data)), 0, 5)


def test_a_message_opens_in_its_round_run_and_on_its_edge_only() -> None:
    a, b, c = Keys(0, "run"), Keys(1, "run"), Keys(2, "run")
    sealed = a.seal(MESSAGE, 1, 5, b.card)
    b.open(sealed, 0, 5)
    later_run = Keys(1, "another run", run_key=b.run_key)
    for who, sender, round_ in [(b, 0, 6), (b, 0, 4), (b, 2, 5), (c, 0, 5), (later_run, 0, 5)]:
        with pytest.raises(Rejected):
            who.open(sealed, sender, round_)
    with pytest.raises(Rejected):  # a message that comes back to its sender
        a.open(sealed, 1, 5)
    with pytest.raises(Rejected):  # a message of another run under the same token: fresh keys
        Keys(1, "run").open(sealed, 0, 5)


@pytest.mark.parametrize("card", [b"", bytes(63), bytes(64)])
def test_what_is_no_card_is_rejected(card: bytes) -> None:
    with pytest.raises(Rejected):
        Keys(0, "run").seal(MESSAGE, 1, 5, pack(card))


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "node.pem"
    public = make_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        make_key(path)
    with pytest.raises(ValueError, match=r"^path must.*''"):
        make_key("")
    assert len(bytes.fromhex(public)) == 32


def test_bad_keys_are_named(tmp_path: Path) -> None:
    other = generate_private_key(SECP256R1())
    pem = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "other").write_bytes(pem)
    for name, text in (("empty", ""), ("short", '{"1": "00"}'), ("low", f'{{"1": "{"00" * 32}"}}')):
        (tmp_path / name).write_text(text)
    for key, names in (
        ("key-file", ("missing", "empty", "other")),
        ("neighbor-keys", ("missing", "empty", "short", "low")),
    ):
        for name in names:
            with pytest.raises(ValueError, match=f"^{key}"):
                client(context_of(0, **{key: str(tmp_path / name)}))
