"""Everything that parses what others wrote, as functions of bytes: they raise what they may or
nothing.

A target takes bytes that someone else may have written, hands them to the library as a reply, a
file or a run config, and lets through no exception but the ValueError that says what is wrong.
"""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_perdl.core import files
from flwr_perdl.core.npy import pack, pack_arrays, unpack, unpack_arrays
from flwr_perdl.privacy.sealed import Keys, Rejected
from flwr_perdl.protocol.client_state import PrivateState, private_store, run_folder
from flwr_perdl.protocol.records import Limits, read_properties, read_reply, reply_to
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA, ServerSettings
from perdl_experiments._run_config import all_keys, read_run_config
from perdl_experiments.clips import load_clip
from perdl_experiments.data import load_images
from perdl_experiments.documents import read_documents
from perdl_experiments.studies import (
    EXPERIMENTS,
    biclustering,
    configure,
    find,
    regression,
    unmixing,
)

#: What a state file of the client at hand says.
_OURS = {"client": "0", "algorithm": "fuzzing", "run": "here", "round": 1, "key": None}
_SHELF: Any = private_store(Context(1, 1, {"partition-id": 0}, RecordDict(), {}), "fuzzing", ".")


#: How a PerMA of two features calls its own checkpoint.
def _identity() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        PerMA(1, checkpoint_dir=folder).open([np.ones((1, 2))]).save()
        return files.load(files.round_path(Path(folder), 0)).meta["identity"]


_IDENTITY = _identity()
LOADERS: tuple[Callable[[str], Any], ...] = (
    load_images.__wrapped__,
    read_documents,
    partial(regression._load.__wrapped__, bundled=""),
    unmixing._load.__wrapped__,
    biclustering._read,
    partial(load_clip.__wrapped__, seed=0),
)
#: For the last loader: three frames and their mask, as `npz` writes them.
CLIP = bytes([len(LOADERS) - 1, 55, 3, 3, 0, *range(192), 10, 3, 3, 0, *range(192)])

RESUME = ServerSettings(resume=True)


@contextmanager
def file_of(data: bytes, name: str = "data.npz") -> Iterator[Path]:
    """Put bytes into a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        yield path


def npz(data: bytes) -> bytes:
    """Return an ``.npz`` file made of these bytes, so that what is inside is reached too.

    The first byte says how many members there are; each is named by a byte, and is either raw or
    an array that NumPy wrote, cut into equal parts.
    """
    names = (
        *("X", "y", "client", "shape", "endmembers", "meta", "indices", "indptr", "data", "time"),
        "mask",
    )
    stream, count = io.BytesIO(), 1 + (data[0] % 6 if data else 0)
    size = max(len(data) // count, 1)
    with zipfile.ZipFile(stream, "w") as archive:
        for part in {
            data[i] % len(names): data[i + 1 : i + size] for i in range(0, len(data), size)
        }.items():
            archive.writestr(f"{names[part[0]]}.npy", _member(part[1]))
    return stream.getvalue()


def _member(data: bytes) -> bytes:
    if len(data) < 4 or data[0] % 4 == 0:
        return data
    dtype = np.dtype(("f8", "f4", "i8", "u1", "U1", "M8[s]", "c16", "?")[data[1] % 8])
    rows = 1 + data[2] % 5
    body = data[3:]
    values = np.frombuffer(body[: len(body) // dtype.itemsize * dtype.itemsize], dtype)
    if data[0] % 4 == 2:
        values = values[: len(values) // rows * rows].reshape(rows, -1)
    if data[0] % 4 == 3:  # frames
        values = values[: len(values) // 64 * 64].reshape(len(values) // 64, 8, 8)
    written = io.BytesIO()
    np.save(written, values)
    return written.getvalue()


def reply(data: bytes) -> None:
    """Read a client's reply: arrays and their headers, metrics, errors, what it says of itself."""
    request = Message(
        RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord()}),
        dst_node_id=1,
        message_type="train",
    )
    answer = reply_to(request, [], 1, {})
    kind, body = data[:1] or b"\0", data[1:]
    head, _, tail = body.partition(b"\xff\xfe")
    record = ArrayRecord()
    record["0"] = Array("float64", (2,), "numpy.ndarray", body if kind < b"\x80" else head)
    if kind >= b"\x80":
        numbers = np.frombuffer(tail[: len(tail) // 8 * 8], np.float64)
        metrics = {f"m{i}": float(value) for i, value in enumerate(numbers)}
        answer.content["metrics"] = MetricRecord({"num-examples": 3, **metrics})
    answer.content["arrays"] = record
    with suppress(ValueError):
        good = read_reply(answer.content, Limits(2**20, 2**16, 1e100))
        assert all(np.isfinite(array).all() for array in good.arrays)
        with suppress(ValueError):
            for array in good.arrays:
                unpack_arrays(array)
    said = Message(
        RecordDict({"config": ConfigRecord({"name": tail.decode("latin1")})}), reply_to=request
    )
    assert read_properties(said)


def letter(data: bytes) -> None:
    """Open a sealed letter whose writer has the key, and may have put anything into it."""
    a, b = Keys(0, "run"), Keys(1, "run")
    key = a._key(0, 1, unpack(b.card))
    text = ChaCha20Poly1305(key).encrypt(bytes(12), data, a._bound(0, 1, 5))
    for whole in (data, unpack(a.card) + bytes(12) + text):
        with suppress(Rejected):
            b.open(pack(whole), 0, 5)


def shown(data: bytes) -> None:
    """Read what a node shows at the end."""
    with suppress(ValueError):
        unpack_arrays(pack(data))


def data_file(data: bytes) -> None:
    """Read a user's file with every loader, as it is and with its insides reached."""
    load = LOADERS[data[0] % len(LOADERS)] if data else LOADERS[0]
    for content in (data[1:], npz(data[1:])):
        with file_of(content) as path, suppress(ValueError):
            load(str(path))


def checkpoint(data: bytes) -> None:
    """Resume from a checkpoint: raw bytes, or a whole file whose record and reports are."""
    mark = {"file": "history.jsonl", "bytes": len(data), "sha256": sha256(data).hexdigest()}
    for content in (data, _saved(data, {"identity": _IDENTITY, "history": mark})):
        with file_of(content, "round-000001.npz") as path, suppress(ValueError):
            (path.parent / "history.jsonl").write_bytes(data)
            PerMA(1, checkpoint_dir=path.parent, server=RESUME).open([np.ones((1, 2))])


def state(data: bytes) -> None:
    """Take up a client's private state from its disk."""
    for content in (data, _saved(data, _OURS)):
        own = run_folder(_SHELF, "here").name
        with file_of(content, f"{own}/round-000001.npz") as path, suppress(ValueError):
            context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
            PrivateState(context, "here", _SHELF._replace(folder=path.parent.parent)).before(5)


def _saved(data: bytes, known: dict[str, Any]) -> bytes:
    """Return a file as `files.save` writes it, with a record made of ``data``."""
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError):
        return npz(data)
    arrays = {"state/global_atoms": np.eye(2), "model/0000": np.eye(2)}
    with file_of(b"") as path, suppress(ValueError, TypeError, RecursionError):
        files.save(path, arrays, {**known, **meta} if isinstance(meta, dict) else {})
        return path.read_bytes()
    return data


def run_config(data: bytes) -> None:
    """Read a run config: a line per option, its first bytes say which, and of which type."""
    keys, kinds = sorted(all_keys()), (str, int, float, bool)
    given: dict[str, Any] = {}
    for line in filter(None, data.split(b"\n")):
        text = line[2:].decode("latin1")
        with suppress(ValueError):
            given[keys[line[0] % len(keys)]] = kinds[line[1] % 4](text) if line[1:] else text
    if data and data[0] % 8:
        given["experiment"] = list(EXPERIMENTS)[data[0] % len(EXPERIMENTS)]
    with suppress(ValueError):
        name, options = read_run_config(given)
        configure(find(name), options=options)


TARGETS = {
    "reply": reply,
    "letter": letter,
    "shown": shown,
    "data": data_file,
    "checkpoint": checkpoint,
    "state": state,
    "run-config": run_config,
}


def seeds(name: str) -> list[bytes]:
    """Return inputs of the right form to begin with; of files, some for each loader."""
    stream = io.BytesIO()
    np.save(stream, np.eye(2))
    whole = stream.getvalue()
    texts = {
        "run-config": ["\x03\x0012\n\x04\x0240.5\n\x05\x0121\n\x0f\x01-3", "\x02\x01abc\n\x07\x03"],
        "checkpoint": [
            '{"run": "x", "round": 1, "evaluated": 0, "finished": false, "history": [],'
            ' "server_metrics": {"1": {}}}',
            '{"format": 1, "finished": true, "round": 1, "history": [{"round": 1}]}',
        ],
        "state": ['{"run": "here"}', '{"run": 3, "format": 2}', '{"key": "another"}'],
    }
    found = [text.encode() for text in texts.get(name, [])]
    if name in ("reply", "data"):
        # The step and the number of loaders have no common divisor, so that each has a seed.
        found += [bytes([k]) + b"\x03" * 3 + whole for k in range(0, 250, 25)]
        found += [b"\x00" + whole, b"\xf0" + whole + b"\xff\xfe" + whole, CLIP]
    if name in ("letter", "shown"):
        found += [whole + whole, npz(bytes(30)), unpack(pack_arrays({"a": np.eye(2)}))]
    if name in ("checkpoint", "state"):
        with file_of(b"") as path:
            files.save(path, {"D": np.eye(2)}, _OURS)
            found.append(path.read_bytes())
    return found


InProcessGrid(ClientApp(), 1)  # so that this process can make messages
