from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from flwr_perdl.clients import DiffusionClient
from flwr_perdl.core.packing import unpack_arrays
from flwr_perdl.diffusion import Inbox
from flwr_perdl.privacy.sealed import Keys, make_key, read_key

Array = NDArray[Any]


class Held(NamedTuple):
    nodes: NDArray[np.intp]
    value: Array
    worked: NDArray[np.int64]


class Consensus:
    """Every node replaces its value by the weighted mean of its neighbourhood's."""

    def __init__(self, data: dict[int, Array]) -> None:
        self.data = data

    def start(self, nodes: NDArray[np.intp]) -> Held:
        return Held(nodes, np.stack([self.data[int(k)] for k in nodes]), np.zeros(len(nodes), int))

    def adapt(self, state: Held, round_: int) -> Held:
        return state._replace(worked=state.worked + round_)

    def message(self, state: Held) -> tuple[Array, ...]:
        return (state.value,)

    def combine(self, state: Held, inbox: Inbox) -> Held:
        return state._replace(value=inbox.mean())

    def observe(self, state: Held) -> dict[str, Array]:
        return {"value": state.value, "worked": state.worked}


def context(node: int = 2, **node_config: Any) -> Context:
    return Context(1, 7, {"partition-id": node, **node_config}, RecordDict(), {})


def client(where: Context, value: Any = (6.0, 0.0), **options: Any) -> DiffusionClient:
    node = int(where.node_config["partition-id"])
    return DiffusionClient(Consensus({node: np.array(value)}), where, **options)


def asked(at: int, step: str = "exchange", **more: Any) -> dict[str, Any]:
    """The config of an open exchange; rounds of server and algorithm are the same."""
    config = {"perdl.step": step, "perdl.at": at, "server-round": at, "perdl.run": "run"}
    return {**config, "perdl.asleep": "", "perdl.sealed": False, **more}


def delivery(*entries: tuple[float, ...], arrays: list[Any]) -> list[Array]:
    table = np.array(entries, dtype=float).reshape(-1, 4)
    return [table, *(np.array(array, dtype=float) for array in arrays)]


NOTHING = delivery(arrays=[])


def test_two_rounds_by_hand() -> None:
    where = context()
    reply, examples, metrics = client(where).fit(NOTHING, asked(1))
    np.testing.assert_array_equal(reply, [[[6.0, 0.0]]])
    assert (examples, metrics) == (1, {"floats": 2})
    request = delivery((0, 0, 0.25, 1), (5, 0, 0.5, 1), arrays=[[[2.0, 4.0]], [[1.0, 2.0]]])
    reply, _, metrics = client(where).fit(request, asked(2))
    # 1/4 (2, 4) + 1/2 (1, 2) + 1/4 (6, 0)
    np.testing.assert_allclose(reply, [[[2.5, 2.0]]])
    assert metrics == {"floats": 2}
    shown, _, metrics = client(where).fit(NOTHING, asked(3, "show"))
    assert metrics == {}
    shown = unpack_arrays(*shown)
    np.testing.assert_allclose(shown["value"], [[2.5, 2.0]])
    assert shown["worked"].tolist() == [3]  # rounds 1 and 2


def test_a_round_that_is_asked_again_has_the_same_reply() -> None:
    where = context()
    client(where).fit(NOTHING, asked(1))
    request = delivery((0, 0, 0.5, 1), arrays=[[[2.0, 4.0]]])
    first, _, _ = client(where).fit(request, asked(2))
    again, _, _ = client(where).fit(request, asked(2))
    np.testing.assert_array_equal(first, again)


def test_who_sleeps_keeps_its_state_and_sends_nothing() -> None:
    where = context()
    client(where).fit(NOTHING, asked(1))
    request = delivery((0, 0, 0.5, 1), arrays=[[[2.0, 4.0]]])
    sleeping = asked(2, **{"perdl.asleep": "0 2"})
    reply, _, metrics = client(where).fit(request, sleeping)
    assert (reply, metrics) == ([], {})
    reply, _, _ = client(where).fit(NOTHING, asked(3))
    np.testing.assert_allclose(reply, [[[4.0, 2.0]]])
    awake = context()
    client(awake).fit(NOTHING, asked(1))
    reply, _, _ = client(awake).fit(request, asked(2, **{"perdl.asleep": "12 20"}))
    np.testing.assert_allclose(reply, [[[4.0, 2.0]]])


def test_who_missed_a_round_has_heard_nobody_in_it() -> None:
    where = context()
    client(where).fit(NOTHING, asked(1))
    request = delivery((0, 0, 0.5, 1), arrays=[[[2.0, 4.0]]])
    reply, _, _ = client(where).fit(request, asked(3))
    np.testing.assert_array_equal(reply, [[[6.0, 0.0]]])


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ((0, 0, 0.5, 1), [[2.0, 4.0, 1.0]]),
        ((0, 0, 0.5, 1), [[np.nan, 4.0]]),
        ((0, 0, 0.5, 1), [2.0, 4.0]),
        ((0, 1, 0.5, 1), [[2.0, 4.0]]),
        ((0, -1, 0.5, 1), [[2.0, 4.0]]),
        ((2, 0, 0.5, 1), [[2.0, 4.0]]),
    ],
    ids=["shape", "nan", "flat", "late", "early", "own"],
)
def test_a_bad_message_is_left_out_and_its_sender_named(
    entry: tuple[float, ...], text: list[Any]
) -> None:
    where = context()
    client(where).fit(NOTHING, asked(1))
    request = delivery(entry, (5, 0, 0.25, 1), arrays=[text, [[2.0, 4.0]]])
    reply, _, metrics = client(where).fit(request, asked(2))
    np.testing.assert_allclose(reply, [[[5.0, 1.0]]])  # 1/4 (2, 4) + 3/4 (6, 0)
    assert metrics == {"floats": 2, f"rejected-{entry[0]}": 1}


def test_messages_of_another_number_of_arrays_do_not_shift_the_others() -> None:
    where = context()
    client(where).fit(NOTHING, asked(1))
    entries = [(0, 0, 0.25, 2), (1, 0, 0.25, 0), (5, 0, 0.25, 1)]
    request = delivery(*entries, arrays=[[[9.0, 9.0]], [[9.0, 9.0]], [[2.0, 4.0]]])
    reply, _, metrics = client(where).fit(request, asked(2))
    np.testing.assert_allclose(reply, [[[5.0, 1.0]]])
    assert metrics == {"floats": 2, "rejected-0": 1, "rejected-1": 1}


def test_a_message_counts_once() -> None:
    where = context()
    client(where).fit(NOTHING, asked(1))
    request = delivery((0, 0, 0.25, 1), (0, 0, 0.25, 1), arrays=[[[2.0, 4.0]], [[2.0, 4.0]]])
    reply, _, metrics = client(where).fit(request, asked(2))
    np.testing.assert_allclose(reply, [[[5.0, 1.0]]])
    assert metrics["rejected-0"] == 1


def test_late_messages_are_taken_where_that_is_agreed() -> None:
    where = context()
    for at in (1, 2):
        client(where, max_delay=1).fit(NOTHING, asked(at))
    request = delivery((0, 1, 0.5, 1), arrays=[[[2.0, 4.0]]])
    reply, _, metrics = client(where, max_delay=1).fit(request, asked(3))
    np.testing.assert_allclose(reply, [[[4.0, 2.0]]])
    assert metrics == {"floats": 2}


@pytest.mark.parametrize("weights", [(-0.1, 0.5), (0.6, 0.6), (np.nan, 0.1)])
def test_weights_that_are_none_are_refused(weights: tuple[float, float]) -> None:
    where = context()
    client(where).fit(NOTHING, asked(1))
    entries = [(sender, 0, weight, 1) for sender, weight in enumerate(weights)]
    request = delivery(*entries, arrays=[[[1.0, 1.0]], [[1.0, 1.0]]])
    with pytest.raises(ValueError, match=r"weights must|messages must"):
        client(where).fit(request, asked(2))


def test_a_broken_estimate_stays_at_home() -> None:
    reply, _, metrics = client(context(), (np.inf, 0.0)).fit(NOTHING, asked(1))
    assert (reply, metrics) == ([], {"floats": 2, "broken": 1})


@pytest.mark.parametrize(
    ("shows", "names"),
    [
        ("nothing", []),
        ("observed", ["value", "worked"]),
        ("state", ["value", "worked", "state.nodes", "state.value", "state.worked"]),
    ],
)
def test_a_node_shows_what_it_wants_to(shows: str, names: list[str]) -> None:
    ends: list[Held] = []
    one = client(context(), shows=shows, on_end=ends.append)
    shown, _, metrics = one.fit(NOTHING, asked(1, "show"))
    assert metrics == {}
    assert [list(unpack_arrays(packed)) for packed in shown] == ([names] if names else [])
    (end,) = ends
    np.testing.assert_array_equal(end.value, [[6.0, 0.0]])


def test_float32_is_kept() -> None:
    program = Consensus({2: np.array([1.0, 2.0], dtype=np.float32)})
    where = context()
    reply, _, _ = DiffusionClient(program, where).fit(NOTHING, asked(1))
    assert reply[0].dtype == np.float32
    shown, _, _ = DiffusionClient(program, where).fit(NOTHING, asked(2, "show"))
    assert {k: v.dtype for k, v in unpack_arrays(*shown).items()} == {
        "value": np.float32,
        "worked": np.int64,
    }


def test_state_on_disk_survives_the_loss_of_the_context(tmp_path: Path) -> None:
    client(context(**{"state-dir": str(tmp_path)})).fit(NOTHING, asked(1))
    request = delivery((0, 0, 0.5, 1), arrays=[[[2.0, 4.0]]])
    reply, _, _ = client(context(**{"state-dir": str(tmp_path)})).fit(request, asked(2))
    np.testing.assert_allclose(reply, [[[4.0, 2.0]]])
    assert [path.name for path in tmp_path.iterdir()] == ["client-2"]
    reply, _, _ = client(context(), state_dir=tmp_path).fit(request, asked(2))
    np.testing.assert_allclose(reply, [[[4.0, 2.0]]])


# Sealed ------------------------------------------------------------------------------------------


def sealed(at: int, step: str = "exchange") -> dict[str, Any]:
    return asked(at, step, **{"perdl.sealed": True, "server-round": at + 1})


def to(*neighbours: Keys) -> list[Array]:
    cards = [keys.card for keys in neighbours]
    ids = np.array([float(keys.node) for keys in neighbours])
    return [ids, np.stack(cards) if cards else np.zeros((0, 1))]


def test_sealed_messages_by_hand() -> None:
    where, other = context(), Keys(5, "run")
    (card,), _, _ = client(where).fit(NOTHING, sealed(0, "announce"))
    again, sent = client(where).fit([*NOTHING, *to(other)], sealed(1))[0]
    np.testing.assert_array_equal(card, again)
    np.testing.assert_array_equal(other.open(sent, 2, 1), [[[6.0, 0.0]]])
    mine = other.seal((np.array([[2.0, 4.0]]),), 2, 1, card)
    request = [*delivery((5, 0, 0.5, 1), arrays=[]), *to(other), mine]
    (_, sent), _, metrics = client(where).fit(request, sealed(2))
    np.testing.assert_allclose(other.open(sent, 2, 2), [[[4.0, 2.0]]])
    assert metrics == {"floats": 2}


def test_what_the_program_reports_comes_with_the_next_reply_and_again_after_the_end() -> None:
    class Telling(Consensus):
        def report(self, state: Held) -> dict[str, Array]:
            return {"first": state.value[:, 0], "second": np.full(1, np.nan)}

    where, other = context(), Keys(5, "run")

    def ask(request: list[Array], config: dict[str, Any]) -> Any:
        return DiffusionClient(Telling({2: np.array([6.0, 0.0])}), where).fit(request, config)

    (card, _), _, metrics = ask([*NOTHING, *to(other)], sealed(1))
    assert metrics == {"floats": 2}  # no round is over
    mine = other.seal((np.array([[2.0, 4.0]]),), 2, 1, card)
    request = [*delivery((5, 0, 0.5, 1), arrays=[]), *to(other), mine]
    last = ask(request, sealed(2, "show"))
    assert last[2] == {"first": 4.0}
    again = ask([*NOTHING, *to(other)], sealed(3, "show"))  # the key is gone, the end is not
    np.testing.assert_array_equal(again[0], last[0])
    assert again[1:] == last[1:]


def test_a_sealed_message_of_several_arrays_does_not_spoil_the_others() -> None:
    """Before, the whole request was refused with a sentence about unpacking."""
    where, other = context(), Keys(5, "run")
    ((card, *_), _, _) = client(where).fit([*NOTHING, *to(other)], sealed(1))
    mine = other.seal((np.array([[2.0, 4.0]]),), 2, 1, card)
    request = [*delivery((6, 0, 0.25, 2), (5, 0, 0.5, 1), arrays=[]), *to(other), mine, mine, mine]
    (_, message), _, metrics = client(where).fit(request, sealed(2))
    np.testing.assert_allclose(other.open(message, 2, 2), [[[4.0, 2.0]]])
    assert metrics == {"floats": 2, "rejected-6": 1}


def test_a_replayed_or_changed_message_is_left_out_and_its_sender_named() -> None:
    where, other, third = context(), Keys(5, "run"), Keys(6, "run")
    ((card, *_), _, _) = client(where).fit(NOTHING, sealed(0, "announce"))
    empty = [*NOTHING, *to()]
    client(where).fit(empty, sealed(1))
    client(where).fit(empty, sealed(2))
    message = (np.array([[2.0, 4.0]]),)
    changed = other.seal(message, 2, 2, card)
    changed[-1] = np.nextafter(changed[-1], 2)
    bad = {
        "an earlier round": other.seal(message, 2, 1, card),
        "another edge": third.seal(message, 2, 2, card),
        "for another node": other.seal(message, 6, 2, third.card),
        "changed": changed,
        "another run": Keys(5, "other").seal(message, 2, 2, card),
    }
    for text in bad.values():
        request = [*delivery((5, 0, 0.5, 1), arrays=[]), *to(other), text]
        (_, sent), _, metrics = client(where).fit(request, sealed(3))
        assert metrics == {"floats": 2, "rejected-5": 1}
        np.testing.assert_array_equal(other.open(sent, 2, 3), [[[6.0, 0.0]]])  # nobody heard
    request = [*delivery((5, 0, 0.5, 1), arrays=[]), *to(other), other.seal(message, 2, 2, card)]
    assert client(where).fit(request, sealed(3))[2] == {"floats": 2}


def keyed(folder: Path, *nodes: int) -> tuple[dict[int, dict[str, str]], dict[int, str]]:
    """Key files of nodes who have pinned each other, as node config, and their public keys."""
    public = {node: make_key(folder / f"{node}.pem") for node in nodes}
    (folder / "keys.json").write_text(json.dumps(public))
    shared = {"neighbour-keys": str(folder / "keys.json")}
    return {node: {"key-file": str(folder / f"{node}.pem"), **shared} for node in nodes}, public


def test_a_substituted_card_is_rejected_where_keys_are_pinned(tmp_path: Path) -> None:
    config, public = keyed(tmp_path, 2, 5)
    where = context(**config[2])
    pinned = {node: bytes.fromhex(key) for node, key in public.items()}
    other = Keys(5, "run", own_key=read_key(tmp_path / "5.pem"), pinned=pinned)
    impostor = Keys(5, "run")
    (card,), _, _ = client(where).fit(NOTHING, sealed(0, "announce"))
    (_, sent), _, metrics = client(where).fit([*NOTHING, *to(impostor)], sealed(1))
    assert sent.size == 0
    assert metrics == {"floats": 2, "rejected-5": 1}
    message = (np.array([[2.0, 4.0]]),)
    forged = impostor.seal(message, 2, 1, card)
    request = [*delivery((5, 0, 0.5, 1), arrays=[]), *to(other), forged]
    (_, sent), _, metrics = client(where).fit(request, sealed(2))
    assert metrics == {"floats": 2, "rejected-5": 1}
    np.testing.assert_array_equal(other.open(sent, 2, 2), [[[6.0, 0.0]]])
    request[-1] = other.seal(message, 2, 1, card)
    (_, sent), _, metrics = client(where).fit(request, sealed(2))
    assert metrics == {"floats": 2}
    np.testing.assert_array_equal(other.open(sent, 2, 2), [[[4.0, 2.0]]])


def test_a_server_cannot_talk_a_node_out_of_sealing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="node 2 sends sealed messages only"):
        client(context(), sealed=True).fit(NOTHING, asked(1))
    config, _ = keyed(tmp_path, 2)
    with pytest.raises(ValueError, match="node 2 sends sealed messages only"):
        client(context(**config[2])).fit(NOTHING, asked(1))


def test_the_key_of_the_run_survives_on_disk(tmp_path: Path) -> None:
    there = {"state-dir": str(tmp_path)}
    (card,), _, _ = client(context(**there)).fit(NOTHING, sealed(0, "announce"))
    again, *_ = client(context(**there)).fit([*NOTHING, *to()], sealed(1))[0]
    np.testing.assert_array_equal(card, again)
    for path in tmp_path.rglob("*.npz"):
        assert path.stat().st_mode & 0o077 == 0
