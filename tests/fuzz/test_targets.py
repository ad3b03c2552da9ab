"""What the fuzzer runs for minutes, for a second: and every case that it ever found."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_perdl.strategies import ServerSettings
from tests.fuzz import targets

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = {
    "checkpoint": ["format", "run", "round", "evaluated", "finished", "history", "server_metrics"],
    "state": ["format", "run", "round"],
}

RESUME = ServerSettings(resume=True)


@pytest.mark.parametrize("name", targets.TARGETS)
def test_seeds_are_read(name: str) -> None:
    for data in targets.seeds(name):
        targets.TARGETS[name](data)


@pytest.mark.parametrize("name", targets.TARGETS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_bytes_are_read_or_refused(name: str, data: Any) -> None:
    seed = data.draw(st.sampled_from(targets.seeds(name)))
    cut = data.draw(st.integers(0, len(seed)))
    targets.TARGETS[name](seed[:cut] + data.draw(st.binary(max_size=40)) + seed[cut + 8 :])


@pytest.mark.parametrize("name", KEYS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_record_is_read_or_refused(name: str, data: Any) -> None:
    record = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS[name], ANYTHING)))
    targets.TARGETS[name](json.dumps(record).encode() + b"\n")


#: Inputs that once raised something else, by target.
FOUND = {
    "reply: a header that Python's tokenizer does not end": (
        "reply",
        b"\x00\x93NUMPY\x01\x00v\x00"
        b"{'descr': '<.f8', 'fortran_order': False, 'shape':\xc7\xa82, 2), }",
    ),
    "reply: more in the header than its length": (
        "reply",
        b"\x00\x93NUMPY\x01\x00\x05\x00what?",
    ),
    "checkpoint: no state in it": (
        "checkpoint",
        b'{"run": "x", "round": 1, "evaluated": 0, "finished": false, "history": [],'
        b' "server_metrics": {}}',
    ),
    "checkpoint: no history in it": ("checkpoint", b'{"finished": true}'),
    "checkpoint: a history of nothing": (
        "checkpoint",
        b'{"finished": true, "run": 1, "round": 1, "evaluated": 0, "history": 3}',
    ),
    "data: text that is no Unicode in place of numbers": (
        "data",
        bytes([targets.LOADERS.index(targets.unmixing._load.__wrapped__), 47])
        + b64decode(
            "6Xzp6enp6RBuc3QBAAAAAAABAQAAAAAAAAAjICDgFT////8/ICc8ZjgnLCAnZm9ydHL/////fv///2Fu"
            "T29yZCdkZXNjcic/ICf/"
        ),
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_was_found_stays_fixed(case: str) -> None:
    name, data = FOUND[case]
    targets.TARGETS[name](data)


def test_a_header_makes_no_room_for_what_is_not_there() -> None:
    """A terabyte by the header, a few bytes in the reply."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (137438953472,), }"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)
    with pytest.raises(ValueError, match="137438953472"):
        targets.read_reply(_reply(data).content)


def _reply(data: bytes) -> Any:
    request = targets.Message(targets.RecordDict(), dst_node_id=1, message_type="train")
    answer = targets.reply_to(request, [np.zeros(1)], 1, {})
    answer.content["arrays"]["0"] = targets.Array("float64", (1,), "numpy.ndarray", data)
    return answer
