"""Attacks on what clients and servers keep on disk, and through it.

A server that names as many runs and rounds as it likes; somebody who prepares folders and files
where a client or a server will keep its own; a thief of the disk when a run is over.
"""

from __future__ import annotations

import os
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flwr_perdl.clients import DiffusionClient, client_app
from flwr_perdl.core import files
from flwr_perdl.export import load
from flwr_perdl.privacy.sealed import Keys, Rejected
from flwr_perdl.protocol.client_state import (
    PrivateState,
    private_store,
    run_folder,
)
from flwr_perdl.protocol.records import decode
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA, PersonalizedFedAvg, ServerSettings
from perdl_experiments.client_app import make_client
from tests.grids import Trains, context_of
from tests.network.programs import Consensus

#: Runs that a client's folder keeps, and that it begins within one of Flower's.
MOST_RUNS, MOST_BEGUN = 256, 64
ATOMS = {"local_atoms": np.full((2, 3), 7.0)}
MEGABYTES = 2**20 * 64


RESUME = ServerSettings(resume=True)


def store(folder: Path, client: str = "ward-7") -> Any:
    return private_store(context_of(client), "dictionary", folder)


def kept(folder: Path, run: str = "run", client: str = "ward-7") -> Any:
    """Return what a restarted client finds in round 9."""
    return PrivateState(context_of(), run, store(folder, client)).before(9)


# A server that names folders ---------------------------------------------------------------------


@pytest.mark.parametrize("own", ["nobody", "node", "process"])
def test_a_run_config_names_no_folder(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is the client's to say, by its node config or its environment (the controls)."""
    foreign, kept_in = tmp_path / "foreign", tmp_path / "own"
    if own == "process":
        monkeypatch.setenv("FLWR_PERDL_STATE_DIR", str(kept_in))
    grid = InProcessGrid(
        client_app(lambda context: Trains(lambda array: array + 1), private=["1"]),
        2,
        run_config={"state-dir": str(foreign), "state_dir": str(foreign)},
        node_config=lambda node: {"state-dir": str(kept_in)} if own == "node" else {},
    )
    start = ArrayRecord([np.zeros(2), np.zeros(1)])
    PersonalizedFedAvg(["1"]).start(grid, start, num_rounds=1)
    assert not foreign.exists()
    assert len([*kept_in.rglob("round-000001.npz")]) == (0 if own == "nobody" else 2)
    experiments = context_of(0, **{"num-partitions": 3})
    experiments.run_config = {"experiment": "synthetic", "state-dir": str(foreign)}
    with pytest.raises(ValueError, match="state_dir"):
        make_client(experiments)


# A server that names runs and rounds -------------------------------------------------------------


def test_naming_runs_removes_no_runs_state(tmp_path: Path) -> None:
    """Before: nine of them did."""
    node = context_of()
    PrivateState(node, "run", store(tmp_path)).save(1, ATOMS)
    for i in range(1, MOST_BEGUN):
        PrivateState(node, f"another {i}", store(tmp_path)).save(1, ATOMS)
    for i in range(MOST_RUNS):
        with pytest.raises(ValueError, match="64"):
            PrivateState(node, f"one more {i}", store(tmp_path)).save(1, ATOMS)
    assert kept(tmp_path) is not None
    assert len(list(store(tmp_path).folder.iterdir())) == MOST_BEGUN
    PrivateState(node, "run", store(tmp_path)).save(2, ATOMS)  # goes on


def test_the_newest_runs_are_kept_for_a_month(tmp_path: Path) -> None:
    """So that the disk does not fill, and no key of a run that was given up stays for ever."""
    now = time.time()
    for i in range(MOST_RUNS + 2):
        folder = run_folder(store(tmp_path), f"{i}")
        folder.mkdir(parents=True)
        os.utime(folder, (now - 3600 + i,) * 2)
    os.utime(run_folder(store(tmp_path), "40"), (now - 31 * 86400,) * 2)
    PrivateState(context_of(), "run", store(tmp_path)).save(1, ATOMS)
    gone = {i for i in range(MOST_RUNS + 2) if not run_folder(store(tmp_path), f"{i}").exists()}
    assert gone == {40, 0, 1}


@pytest.mark.parametrize("round_", [-1, 10**6, 10**30])
def test_no_round_leaves_a_file_that_is_never_removed(tmp_path: Path, round_: int) -> None:
    """Before: a file for each round outside of 0 to 999,999, as many as the server likes."""
    with pytest.raises(ValueError, match=r"^round"):
        PrivateState(context_of(), "run", store(tmp_path)).save(round_, ATOMS)
    assert list(tmp_path.iterdir()) == []


# Prepared folders and files ----------------------------------------------------------------------


@pytest.mark.parametrize("which", ["client", "run"])
def test_a_link_in_place_of_a_folder_changes_nothing_elsewhere(tmp_path: Path, which: str) -> None:
    """Before: the folder that it leads to was made 0700, and its files of rounds were deleted."""
    elsewhere = tmp_path / "elsewhere"
    files.save_round(elsewhere, 9, {}, {})
    elsewhere.chmod(0o755)
    own = store(tmp_path / "all")
    link = own.folder if which == "client" else run_folder(own, "run")
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    state = PrivateState(context_of(), "run", own)
    for touch in (lambda: state.save(1, ATOMS), lambda: state.before(2)):
        with pytest.raises(ValueError, match=link.name):
            touch()
    assert elsewhere.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in elsewhere.iterdir()] == ["round-000009.npz"]


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path, warned: Any) -> None:
    PrivateState(context_of(), "run", store(tmp_path)).save(1, ATOMS)
    path = run_folder(store(tmp_path), "run") / "round-000001.npz"
    path.rename(tmp_path / "elsewhere.npz")
    path.symlink_to(tmp_path / "elsewhere.npz")
    assert kept(tmp_path) is None
    assert "round-000001.npz" in warned.text


def test_a_link_in_place_of_a_journal_cuts_no_other_file(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "history.jsonl").symlink_to(victim)
    with pytest.raises(ValueError, match=r"history\.jsonl"):
        files.Journal(tmp_path / "history.jsonl").append([1])
    assert victim.read_text() == "precious"


def compressed(path: Path) -> None:
    np.savez_compressed(path, meta=np.zeros(MEGABYTES // 8))


def overlapping(path: Path) -> None:
    """A member that the archive's directory names many times."""
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("a.npy", "w") as stream:
            np.save(stream, np.zeros(2**17))
        first = archive.infolist()[0]
        for i in range(64):
            again = zipfile.ZipInfo(f"{i}.npy")
            for name in ("header_offset", "CRC", "compress_size", "file_size"):
                setattr(again, name, getattr(first, name))
            archive.filelist.append(again)


def lying(path: Path) -> None:
    """An array whose header says more than there is."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d,), }" % (MEGABYTES // 8)
    with zipfile.ZipFile(path, "w") as archive:
        array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)
        archive.writestr("meta.npy", array)


@pytest.mark.parametrize("make", [compressed, overlapping, lying])
def test_a_small_file_takes_little_memory(
    tmp_path: Path, warned: Any, make: Callable[[Path], None]
) -> None:
    """Before: 64 megabytes, or three gigabytes for a file of three megabytes."""
    state = PrivateState(context_of(), "run", store(tmp_path))
    for round_ in (1, 2):
        state.save(round_, ATOMS)
    path = run_folder(store(tmp_path), "run") / "round-000002.npz"
    make(path)
    assert path.stat().st_size < 2**21
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    make(checkpoints / "round-000001.npz")
    tracemalloc.start()
    try:
        found = kept(tmp_path)
        PerMA(1, checkpoint_dir=checkpoints, server=RESUME).open([np.ones((1, 2))])
        with pytest.raises(ValueError, match=r"^path"):
            load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**22
    np.testing.assert_array_equal(found["local_atoms"], ATOMS["local_atoms"])
    for name in ("round-000002.npz", "round-000001.npz"):
        assert name in warned.text


def test_a_file_of_another_client_run_or_round_is_not_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Any
) -> None:
    """Encrypted files of one machine's clients have one key: each still opens in its place only."""
    monkeypatch.setenv("FLWR_PERDL_STATE_KEY", "0f" * 32)
    own = run_folder(store(tmp_path, "a"), "run")
    foreign = []
    for client, run, round_ in [("a", "run", 1), ("b", "run", 2), ("a", "old", 2)]:
        PrivateState(context_of(), run, store(tmp_path, client)).save(round_, ATOMS)
        path = run_folder(store(tmp_path, client), run) / f"round-{round_:06d}.npz"
        foreign.append(path.read_bytes())
        path.unlink()
    for content in foreign:
        (own / "round-000002.npz").write_bytes(content)
        assert kept(tmp_path, client="a") is None
        # The same with the record that belongs there, and the checksum put right.
        arrays, meta = files.load(own / "round-000002.npz")
        del meta["format"]
        meta |= {"client": "a", "run": "run", "round": 2}
        files.save(own / "round-000002.npz", arrays, meta)
        warned.clear()
        assert kept(tmp_path, client="a") is None
        assert "round-000002.npz" in warned.text


def test_a_locked_file_cut_short_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: Any
) -> None:
    monkeypatch.setenv("FLWR_PERDL_STATE_KEY", "0f" * 32)
    PrivateState(context_of(), "run", store(tmp_path)).save(1, ATOMS)
    path = run_folder(store(tmp_path), "run") / "round-000001.npz"
    arrays, meta = files.load(path)
    for size in (0, 5, 12, 27, len(arrays["sealed"]) - 1):
        files.save(path, {"sealed": arrays["sealed"][:size]}, meta)
        assert kept(tmp_path) is None


def test_a_prepared_checkpoint_writes_in_its_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    strategy = PerMA(1, checkpoint_dir=folder)
    run = strategy.open([np.ones((1, 2))])
    run.save()
    (path,) = folder.glob("round-*.npz")
    arrays, meta = files.load(path)
    del meta["format"]
    files.save(path, arrays, {**meta, "run": "/../../elsewhere/x"})
    (tmp_path / "elsewhere").mkdir()
    (folder / "history-").mkdir()
    for journal in folder.glob("*.jsonl"):
        journal.unlink()
    run = PerMA(1, checkpoint_dir=folder, server=RESUME).open([np.ones((1, 2))])
    run.save()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [{"run": "a" * 300}, {"round": -5}, {"round": 10**30}, {"evaluated": 10**30}],
    ids=lambda change: next(iter(change)),
)
def test_a_prepared_checkpoint_of_no_run_or_round_is_left_out(
    tmp_path: Path, warned: Any, change: dict[str, Any]
) -> None:
    """Before: a raw OSError, an error in the next save, or a run that evaluates never again."""
    run = PerMA(1, checkpoint_dir=tmp_path).open([np.ones((1, 2))])
    for run.record.done in (1, 2):
        run.save()
    (tmp_path / next(tmp_path.glob("history-*")).name).unlink()
    newest = files.round_path(tmp_path, 2)
    saved = files.load(newest)
    files.save(newest, saved.arrays, {**saved.meta, **change})
    resumed = PerMA(1, checkpoint_dir=tmp_path, server=RESUME).open([np.ones((1, 2))])
    resumed.save()
    assert resumed.record.done == 1
    assert f"{next(iter(change))}" in warned.text


# What is left behind -----------------------------------------------------------------------------


def test_what_a_killed_process_left_is_removed_and_a_live_writers_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("file.npz")
    with files.replacing(path):
        (live,) = tmp_path.iterdir()
        killed = tmp_path / f"{live.name.removesuffix('.tmp')}-killed.tmp"
        os.link(live, killed)
    files.save(path, {}, {})
    assert killed.exists()  # it may be another process's
    long_ago = time.time() - 2 * 3600
    foreign = tmp_path / ".report.tmp"
    foreign.touch()
    for file in (killed, foreign):
        os.utime(file, (long_ago,) * 2)
    files.save(path, {}, {})
    assert {file.name for file in tmp_path.iterdir()} == {"file.npz", ".report.tmp"}


def test_a_client_with_a_long_name_keeps_its_state(tmp_path: Path) -> None:
    """Before: an OSError of the file system."""
    folders = set()
    for name in ("n" * 248, "n" * 249, "n" * 300, "m" * 300, "\N{SNOWMAN}" * 100):
        node = context_of(2, **{"state-dir": str(tmp_path), "name": name})
        own = private_store(node, "dictionary")
        assert own is not None
        PrivateState(node, "run", own).save(1, ATOMS)
        assert PrivateState(context_of(), "run", own).before(2) is not None
        folders.add(own.folder.name)
    assert folders == {path.name for path in tmp_path.iterdir()}
    assert len(folders) == 5
    assert f"client-{'n' * 248}" in folders  # as it was called before


# A thief of the disk, after the run --------------------------------------------------------------


#: Every node has (6, 0), and takes the mean of what it hears.
MEAN = Consensus(np.tile([6.0, 0.0], (6, 1)))


class Node:
    """A node of a sealed run, with its state in ``context.state`` and on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = context_of(2, **{"state-dir": str(folder)})

    def ask(self, arrays: list[Any], step: str, round_: int, **more: Any) -> Any:
        config = {"perdl.step": step, "perdl.at": round_, "server-round": round_ + 1}
        config |= {"perdl.protocol": "neighbor_relay", "perdl.seed": 0}
        config |= {"perdl.run": "run", "perdl.asleep": "", "perdl.sealed": True, **more}
        self.ends: list[Any] = []
        client = DiffusionClient(MEAN, self.context, on_end=self.ends.append)
        return client.fit(arrays, config)

    def run_keys(self) -> list[bytes]:
        """Return every key of the run that the node's memory and disk have."""
        found = [saved.arrays for saved in map(files.load, self.folder.rglob("*.npz"))]
        for record in self.context.state.array_records.values():
            found += [{key.partition("/")[2]: decode(array)} for key, array in record.items()]
        return [arrays["run-key"].tobytes() for arrays in found if "run-key" in arrays]


def recorded(tmp_path: Path) -> tuple[Node, Keys, list[Any], Any]:
    """Return a node that waits for its end, its neighbor, the last request, and a letter to it."""
    node, other = Node(tmp_path), Keys(5, "run")
    cards = [np.array([5.0]), other.card[None]]
    (card,), _, _ = node.ask([], "announce", 0)
    node.ask([np.zeros((0, 4)), *cards], "exchange", 1)
    letter = other.seal((np.array([2.0, 4.0]),), 2, 1, card)
    return node, other, [np.array([[5.0, 0.0, 0.5, 1.0]]), *cards, letter], letter


def test_after_the_last_round_nothing_on_the_node_opens_recorded_letters(tmp_path: Path) -> None:
    node, _, request, letter = recorded(tmp_path)
    stolen = node.run_keys()
    assert len(stolen) == 2  # memory and disk: until then the thief reads
    (message,) = Keys(2, "run", run_key=stolen[0]).open(letter, 5, 1)
    np.testing.assert_array_equal(message, [2.0, 4.0])
    shown, _, metrics = node.ask(request, "show", 2)
    assert node.run_keys() == []
    np.testing.assert_array_equal(node.ends[0].value, [[4.0, 2.0]])
    assert metrics == {}
    # A server that crashed asks again, of a node that was restarted, too.
    for again in (node, Node(tmp_path)):
        repeated, _, _ = again.ask(request, "show", 2)
        np.testing.assert_array_equal(repeated, shown)
        np.testing.assert_array_equal(again.ends[0].value, [[4.0, 2.0]])
    assert node.run_keys() == []
    with pytest.raises(Rejected):
        Keys(2, "run").open(letter, 5, 1)


@pytest.mark.parametrize("round_", [0, 1, 2, 7])
def test_a_node_that_has_shown_its_result_takes_no_further_step(
    tmp_path: Path, round_: int
) -> None:
    """A server can ask early for what a node shows, and then ends the run for it.

    Before: after every round, as often as it liked.
    """
    node, _, request, _ = recorded(tmp_path)
    shown, _, _ = node.ask(request, "show", 2)
    for again in (node, Node(tmp_path)):
        for step in ("announce", "exchange"):
            with pytest.raises(ValueError, match=r"^step"):
                again.ask(request, step, round_)
        repeated, _, _ = again.ask([np.zeros((0, 4))], "show", round_, **{"perdl.sealed": False})
        np.testing.assert_array_equal(repeated, shown)
    assert node.run_keys() == []


def test_names_are_on_the_disk_when_a_save_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a file's name could be lost in a power failure although its content was safe."""
    calls: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace")}

    def fsync(handle: int) -> None:
        real["fsync"](handle)
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")

    def replace(*paths: Any) -> None:
        real["replace"](*paths)
        calls.append("replace")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    files.save(tmp_path / "file.npz", {}, {})
    assert calls == ["file", "replace", "folder"]


def test_a_pipe_in_place_of_a_file_is_rejected_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "round-000001.npz"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="round-000001"):
        files.load(pipe)
