"""A federation in which everything goes wrong, by a schedule drawn from one seed.

``schedule(seed)`` draws what happens to whom in which round and where the server is killed;
``ChaoticGrid`` does it to the clients; ``run(seed, out)`` lets PerMA learn through it, resuming it
whenever its server was killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.core import files
from flwr_perdl.dictionary import OrthogonalLearner, dictionary_distance
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA, ServerSettings, TooFewReplies
from perdl_experiments.data import Planted, planted_clients

N_CLIENTS, N_ROUNDS, MIN_CLIENTS = 10, 10, 3
REMEMBER = N_ROUNDS
BAD = ("error", "garbage", "nan", "huge", "shape", "empty", "duplicated", "late")
MOMENTS = ("asking", "replies", "before", "during", "after")


class Killed(BaseException):
    """The server is killed here."""


class Schedule(NamedTuple):
    """What goes wrong: by round and client, and where the server is killed."""

    #: Rounds in which a client sleeps or is dead.
    absent: dict[int, set[int]]
    #: By client: the round in which it is back under a new node id, and whether it lost its memory.
    rejoins: dict[int, tuple[int, bool]]
    #: By round and client: what is wrong with its reply.
    bad: dict[tuple[int, int], str]
    #: Rounds and moments at which the server is killed.
    kills: list[tuple[int, str]]
    #: Whether all clients' memories die with the server, too.
    all_die: bool


def schedule(seed: int) -> Schedule:
    """Draw a schedule."""
    rng = np.random.default_rng([seed, 2024])
    absent: dict[int, set[int]] = {round_: set() for round_ in range(1, N_ROUNDS + 1)}
    rejoins: dict[int, tuple[int, bool]] = {}
    for client in range(N_CLIENTS):
        fate = rng.choice(["well", "sleeps", "dies", "rejoins"], p=[0.5, 0.25, 0.1, 0.15])
        start = int(rng.integers(1, N_ROUNDS + 1))
        length = {"well": 0, "dies": N_ROUNDS}.get(str(fate), int(rng.integers(1, 5)))
        for round_ in range(start, min(start + length, N_ROUNDS + 1)):
            absent[round_].add(client)
        if fate == "rejoins":
            rejoins[client] = (start + length, bool(rng.random() < 0.7))
    bad = {
        (round_, client): str(rng.choice(BAD))
        for round_ in range(1, N_ROUNDS + 1)
        for client in range(N_CLIENTS)
        if rng.random() < 0.08
    }
    if rng.random() < 0.05:  # almost everybody is gone for good
        start = int(rng.integers(2, N_ROUNDS + 1))
        for round_ in range(start, N_ROUNDS + 1):
            absent[round_] = set(range(MIN_CLIENTS - 1, N_CLIENTS))
    kills = sorted(
        (int(rng.integers(1, N_ROUNDS + 1)), str(rng.choice(MOMENTS)))
        for _ in range(rng.integers(0, 3))
    )
    return Schedule(absent, rejoins, bad, kills, bool(rng.random() < 0.5))


class ChaoticGrid(InProcessGrid):
    """An in-process grid on which the schedule happens."""

    def __init__(self, app: Any, plan: Schedule, seed: int, folder: Path) -> None:
        super().__init__(app, N_CLIENTS, node_config=lambda _: {"state-dir": str(folder)})
        self.plan, self.round = plan, 0
        self.rng = np.random.default_rng([seed, 7])
        self.late: list[Message] = []
        self.kill: str | None = None
        self.rejoined: set[int] = set()
        self.on_disk: dict[int, int] = {}
        self.folder = folder

    def get_node_ids(self) -> Iterable[int]:
        """Return who is there; dead and sleeping nodes are still registered."""
        for client, (round_, forgets) in self.plan.rejoins.items():
            if self.round + 1 >= round_ and client not in self.rejoined:
                self.rejoined.add(client)
                self.move(client, forgets=forgets)
        return super().get_node_ids()

    def move(self, client: int, *, forgets: bool) -> None:
        """Give a client a new node id and, where it was restarted, an empty memory."""
        old = next(n for n, c in self.contexts.items() if c.node_config["partition-id"] == client)
        context = self.contexts.pop(old)
        context.node_id = int(self.rng.integers(10**6, 10**9))
        if forgets:
            context.state = RecordDict()
        self.contexts[context.node_id] = context

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies that come, as they come."""
        messages = list(messages)
        if not messages or messages[0].metadata.message_type != "train":
            return super().send_and_receive(messages)
        self.round = int(messages[0].content["config"]["server-round"])
        self._die("asking")
        gone = self.plan.absent[self.round]
        reached = [m for m in messages if self._client(m) not in gone]
        clients = {self._client(m): m for m in reached}
        pushed = list(self.push_messages(reached))
        replies: list[Message] = [*self.late]
        self.late = []
        for client, identifier in zip(clients, pushed, strict=True):
            own = newest_run(self.folder / f"client-{client}")
            self.on_disk[client] = files.rounds_in(own)[-1]
            replies += self._spoil(client, list(self.pull_messages([identifier])))
        self._die("replies")
        self.rng.shuffle(replies)
        return replies

    def _client(self, message: Message) -> int:
        return int(self.contexts[message.metadata.dst_node_id].node_config["partition-id"])

    def _die(self, moment: str) -> None:
        if self.kill == moment:
            raise Killed

    def _spoil(self, client: int, replies: list[Message]) -> list[Message]:
        """Return what arrives of a client's reply."""
        bad, (reply,) = self.plan.bad.get((self.round, client)), replies
        if bad is None or not reply.has_content():
            return replies
        if bad == "late":
            self.late.append(reply)
            return []
        if bad == "duplicated":
            return [reply, reply]
        if bad == "error":
            return []
        array = next(iter(reply.content["arrays"].values()))
        good = array.numpy()
        spoilt = {
            "garbage": lambda: Array("float64", (3, 6), "numpy.ndarray", self.rng.bytes(300)),
            "nan": lambda: Array(np.full_like(good, np.nan)),
            "huge": lambda: Array(np.full((1000, 1000), 1e300)),
            "shape": lambda: Array(np.ones((2, 7, 3))),
            "empty": lambda: None,
        }[bad]()
        reply.content["arrays"] = ArrayRecord({} if spoilt is None else {"0": spoilt})
        if bad == "empty":
            reply.content["metrics"] = MetricRecord()
        return [reply]


def planted() -> Planted:
    """Return the data of all clients, with noise, so that errors are not zero."""
    rng = np.random.default_rng(0)
    sizes = [200] * N_CLIENTS
    return planted_clients(rng, [6] * N_CLIENTS, sizes, 3, n_features=6, noise=0.05)


def make_client(context: Context) -> DictionaryClient:
    """Return a client of the federation."""
    X = DATA.samples[int(context.node_config["partition-id"])]
    return DictionaryClient(X, OrthogonalLearner(6, threshold=0.15), context)


DATA = planted()
APP = client_app(make_client)


class Ended(NamedTuple):
    """How a run ended."""

    #: Error of the global atoms; None where it was stopped.
    error: float | None
    #: The sentence that stopped it.
    stopped: str | None
    #: How often its server was killed.
    kills: int
    grid: ChaoticGrid


def strategy(out: Path, **settings: Any) -> PerMA:
    """Return the server of a run in ``out``."""
    return PerMA(
        3,
        min_clients=MIN_CLIENTS,
        num_clients=N_CLIENTS,
        fraction_evaluate=0.0,
        reuse_last_reply=REMEMBER,
        checkpoint_dir=out / "checkpoints",
        server=ServerSettings(**settings),
    )


def newest_run(folder: Path) -> Path:
    """Return where a client keeps the state of its last run: one that died early begins anew."""
    return max(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def error_of(result: Any) -> float:
    """Return how far the global atoms are from the planted ones."""
    return dictionary_distance(result.arrays.to_numpy_ndarrays()[0], DATA.global_atoms)


def undisturbed(out: Path) -> float:
    """Return the error of a run in which nothing goes wrong."""
    return error_of(strategy(out).start(InProcessGrid(APP, N_CLIENTS), num_rounds=N_ROUNDS))


def run(seed: int, out: Path, *, plan: Schedule | None = None, resume: bool = False) -> Ended:
    """Let PerMA learn through the schedule of ``seed``; a killed server is started again."""
    plan = schedule(seed) if plan is None else plan
    kills = [] if resume else list(plan.kills)
    grid = ChaoticGrid(APP, plan, seed, out / "state")
    killed = 0
    while True:
        server = strategy(out, resume=resume or killed > 0)
        try:
            with _killing(grid, kills[0] if kills else None, out):
                result = server.start(grid, num_rounds=N_ROUNDS)
        except Killed:
            kills.pop(0)
            killed += 1
            if plan.all_die:
                for client in range(N_CLIENTS):
                    grid.move(client, forgets=True)
        except TooFewReplies as stopped:
            return Ended(None, str(stopped), killed, grid)
        else:
            return Ended(error_of(result), None, killed, grid)


@contextmanager
def _killing(grid: ChaoticGrid, kill: tuple[int, str] | None, out: Path) -> Iterator[None]:
    """Kill the server at a round's moment: in its messages, or around its checkpoint."""
    save, replace = files.save, files.os.replace
    round_, moment = kill or (0, "")

    def saving(path: Path, arrays: Any, meta: Any, *further: Any) -> None:
        due = path.parent == out / "checkpoints" and meta["round"] == round_
        if due and moment == "before":
            raise Killed
        if due and moment == "during":
            files.os.replace = _die
        try:
            save(path, arrays, meta, *further)
        finally:
            files.os.replace = replace
        if due and moment == "after":
            raise Killed

    def _die(*_: Any) -> None:
        raise Killed

    pull = ChaoticGrid._die

    def dying(self: ChaoticGrid, where: str) -> None:
        self.kill = moment if self.round == round_ else None
        pull(self, where)

    files.save, ChaoticGrid._die = saving, dying
    try:
        yield
    finally:
        files.save, ChaoticGrid._die, files.os.replace = save, pull, replace
