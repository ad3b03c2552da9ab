"""Secure aggregation: the server gets the weighted mean of the replies, and no single one.

Flower's `SecAggPlusWorkflow` does the work, in four exchanges of messages: public keys; shares of
the secret keys, encrypted between clients; masked replies; the shares that unmask the sum. Here the
workflow sends a strategy's own requests, and the replies are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flwr_perdl.core.checks import LARGE, check_count, check_kind, check_real, own_numbers
from flwr_perdl.core.npy import view_file
from flwr_perdl.privacy.secure_client import MASK_BITS
from flwr_perdl.protocol.compat import SECAGG, log, secagg_server
from flwr_perdl.protocol.options import refuse_unknown
from flwr_perdl.protocol.records import (
    LARGEST_INT,
    MAX_WEIGHT,
    MIN_CLIENTS,
    NORM,
    Kept,
    Limits,
    Reply,
    Scalar,
    brief,
    encode,
    read_parts,
)
from flwr_perdl.protocol.request import FAILED, REFUSED, Lost, Sent, read_replies

#: Share of the clients that must answer to the end: with two thirds, no two halves of the clients
#: can be told different things and both be enough.
_THRESHOLD = 2 / 3
#: A client's keys are shared among at most so many clients: all pairs of a thousand clients would
#: be a million messages' worth of shares.
_MOST_SHARES = 51
#: The most bits of a masked sum that one client's number takes (Flower's 32 have a sign). A few
#: clients count in far smaller steps than with Flower's own 22 bits for each.
_MOST_BITS = 30
#: How often a sum is asked for where too many clients fail on the way.
_ATTEMPTS = 2
_MASKED = 2  # the exchange in which the masked replies come
_REMEDY = " (make the ClientApp with client_app, which takes part in secure sums)"


@dataclass(frozen=True)
class SecureMean:
    """Secure aggregation: the server gets the clients' weighted mean, and no single reply.

    Flower's SecAgg+ adds up masked replies. Every good reply then holds the mean in place of the
    client's own array, so a protocol that averages its replies does not change. Numbers of examples
    and metrics are each client's own, in the clear.

    Parameters
    ----------
    shape : tuple of int
        Shape of a reply's one array.
    norm : float, default 1.0
        Largest norm of that array; a client scales a longer one down. With equal weights and up to
        1,000 clients, the rounding of the mean is below a millionth of this bound.
    max_weight : int, default 1
        A client counts by its number of examples, up to this; with 1 all have equal weights. The
        rounding is coarser by the ratio of this to the clients' mean number.
    reconstruction_threshold : float, optional
        Share of clients that must answer to the end, above 0.5; by default two thirds. With more
        than 51 clients, a share of the 51 that hold the shares of each client's keys.
    min_clients : int, default 2
        Fewest clients in a sum that is unmasked; the strategy's ``min_clients`` if that is more.

    Raises
    ------
    ValueError
        If an option breaks its rule.

    Examples
    --------
    >>> from flwr_perdl.strategies import Request, SecureMean
    >>> request = Request("add", secure=SecureMean((2, 3), norm=10.0))
    >>> request.secure.shape
    (2, 3)
    """

    shape: tuple[int, ...]
    norm: float = 1.0
    max_weight: int = 1
    reconstruction_threshold: float | None = None
    min_clients: int = 2

    def __post_init__(self) -> None:
        """Check the options."""
        own_numbers(self)
        check_kind("shape in secure", self.shape, tuple, "a tuple of integers")
        for size in self.shape:
            check_count("sizes of shape in secure", size, 1)
        check_real("norm in secure", self.norm, 0, LARGE, open_low=True)
        check_count("max_weight in secure", self.max_weight, 1, LARGEST_INT)
        check_count("min_clients in secure", self.min_clients, 2)
        if self.reconstruction_threshold is not None:
            threshold = self.reconstruction_threshold
            check_real("reconstruction_threshold in secure", threshold, 0.5, 1, open_low=True)

    #: A run of secure sums ends with its rounds.
    ended = ""

    def begin(
        self, kept: Kept, rounds: int | None, min_clients: int, save: Callable[[], None]
    ) -> SecureMean:
        """Return the channel of a run."""
        return replace(self, min_clients=max(self.min_clients, min_clients))

    def config(self, n_clients: int) -> dict[str, Scalar]:
        """Return what the clients are told."""
        return {MAX_WEIGHT: self.max_weight, NORM: float(self.norm)}

    def gather(
        self, grid: Grid, sent: Sent, round_: int, *, limits: Limits, timeout: float | None
    ) -> tuple[dict[int, Reply], dict[int, Lost]]:
        """Ask requests of the clients under SecAgg+.

        Returns
        -------
        good : dict of int to Reply
            By partition: numbers of examples and metrics are the client's own, the array is the
            weighted mean over all clients here.
        lost : dict of int to Lost
            Why the other clients are not in the mean. If too few are left, the sum is not opened
            but asked for once more, of those who answered; if that fails too, all are lost.
        """
        asked, missing = list(sent), dict[int, Lost]()
        for _ in range(_ATTEMPTS):
            good, lost, failed = self._gather(grid, asked, len(sent), round_, limits, timeout)
            if good or not failed:
                break
            log(WARNING, "Round %d: the secure sum is lost, and requested again.", round_)
            # Without those who failed, if that leaves enough: they may be gone for long.
            rest = [one for one in asked if one[0] not in failed]
            if len(rest) >= MIN_CLIENTS:
                missing |= {partition: lost[partition] for partition in failed}
                asked = rest
        log(INFO, "secure sum: %d clients included, %d not", len(good), len(sent) - len(good))
        return good, missing | lost

    def _gather(
        self, grid: Grid, sent: Sent, n: int, round_: int, limits: Limits, timeout: float | None
    ) -> tuple[dict[int, Reply], dict[int, Lost], set[int]]:
        """Return what `gather` does of ``n`` clients, and who made those there lose it."""
        if len(sent) < 2:
            alone = Lost(FAILED, "a sum over one client hides nothing")
            return {}, {partition: alone for partition, _ in sent}, set()
        # Flower's workflow knows nodes, and reports speak of partitions.
        asked = {message.metadata.dst_node_id: (partition, message) for partition, message in sent}
        state, exchanges = secagg_server().WorkflowState(), _Exchanges(grid, self.shape, limits)
        workflow, reason = self._workflow(len(sent), n, timeout), ""
        try:
            results = _run(workflow, exchanges, state, asked, round_, self.min_clients)
        except Exception as error:  # a client's keys or shares that Flower's code cannot read
            # Any of them can end the workflow; the round is lost then, and the run is not.
            results, reason = [], f": {type(error).__name__}: {error}"
        lost = {asked[node][0]: why for node, why in exchanges.lost.items()}
        if results:
            return *self._open({asked[p.node_id][0]: r for p, r in results}, lost, limits), set()
        needed = max(state.threshold, self.min_clients) if state.threshold else 0
        there = f"{exchanges.answered} of {len(sent)} clients answered, and the shares of "
        there += f"{needed} are needed" if needed else "more are needed"
        why = brief(f"the secure sum was lost: {there}{reason}")
        # All fail alike where they cannot take part; not once replies were masked.
        failed = set(lost) if len(lost) < len(sent) or exchanges.masked else set[int]()
        return {}, {p: lost.get(p, Lost(FAILED, why)) for p, _ in sent}, failed

    def _workflow(self, n_asked: int, n_clients: int, timeout: float | None) -> Any:
        """Return Flower's workflow for a sum over ``n_asked`` of the round's clients."""
        threshold = self.reconstruction_threshold
        return secagg_server().SecAggPlusWorkflow(
            1.0 if n_asked <= _MOST_SHARES else _MOST_SHARES,
            _THRESHOLD if threshold is None else threshold,
            max_weight=float(self.max_weight),
            clipping_range=1.0,
            quantization_range=largest_range(n_clients),
            modulus_range=2**MASK_BITS,
            timeout=timeout,
        )

    def _open(
        self, results: Mapping[int, Any], lost: dict[int, Lost], limits: Limits
    ) -> tuple[dict[int, Reply], dict[int, Lost]]:
        """Return the replies, each with the mean in it, and who is not among them."""
        (file,) = next(iter(results.values())).parameters.tensors
        mean = encode(self.norm * view_file(file)[0]).data
        good: dict[int, Reply] = {}
        for partition, fitted in results.items():
            lost.pop(partition, None)  # it was silent after its masked reply had come
            try:  # metrics travel in the clear, and are checked as those of any reply
                good[partition] = read_parts([mean], fitted.metrics, limits)
            except ValueError as error:
                lost[partition] = Lost(REFUSED, brief(str(error)))
        return good, lost


def largest_range(n_clients: int) -> int:
    """Return in how many steps a client's number is counted where so many are added up."""
    return int(2 ** min(_MOST_BITS, MASK_BITS - n_clients.bit_length()))


def check_secure(secure: bool | Mapping[str, float]) -> dict[str, float] | None:
    """Return the options of SecAgg+, None where it is not wanted.

    Raises
    ------
    ValueError, TypeError
        If an option is unknown or breaks its rule.
    """
    check_kind("secure", secure, (bool, Mapping), "True, False or a mapping of options")
    if isinstance(secure, bool):
        return {} if secure else None
    options: dict[str, Any] = dict(secure)
    refuse_unknown("secure", options, ("reconstruction_threshold",))
    SecureMean((1,), **options)  # checks them
    return options


def _run(
    workflow: Any,
    exchanges: _Exchanges,
    state: Any,
    asked: Mapping[int, tuple[int, Message]],
    round_: int,
    min_clients: int,
) -> list[tuple[Any, Any]]:
    """Take the workflow's four steps, and return pairs of a client and its FitRes, none if lost."""
    results: list[tuple[Any, Any]] = []

    def aggregate_fit(round_: int, fitted: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        results.extend(fitted)
        return None, {}

    secagg = secagg_server()
    number = secagg.WorkflowKey.CURRENT_ROUND
    # The parts of a FitIns, a LegacyContext and a legacy strategy that the workflow uses.
    parameters = SimpleNamespace(tensors=[], tensor_type="")
    nothing = SimpleNamespace(parameters=parameters, config={})
    calls = [(SimpleNamespace(node_id=node), nothing) for node in asked]
    context: Any = SimpleNamespace(
        state=RecordDict(
            {
                secagg.MAIN_CONFIGS_RECORD: ConfigRecord({number: round_}),
                secagg.MAIN_PARAMS_RECORD: ArrayRecord(),
            }
        ),
        strategy=SimpleNamespace(configure_fit=lambda *_: calls, aggregate_fit=aggregate_fit),
        client_manager=SimpleNamespace(num_available=lambda: len(calls)),
    )
    given = cast(Grid, exchanges), context, state
    if not (workflow.setup_stage(*given) and workflow.share_keys_stage(*given)):
        return []
    # Flower would go on to ask for shares of keys that clients lost until here never shared.
    state.sampled_node_ids = set(state.active_node_ids)
    for neighbors in state.nid_to_neighbours.values():
        neighbors.intersection_update(state.sampled_node_ids)
    state.nid_to_fitins = {node: RecordDict(dict(m.content)) for node, (_, m) in asked.items()}
    masked = workflow.collect_masked_vectors_stage(*given)
    if not masked or len(state.active_node_ids) < min_clients:
        return []
    return results if workflow.unmask_stage(*given) else []


class _Exchanges:
    """What the workflow needs of a grid; hands on the replies that are what was asked for."""

    def __init__(self, grid: Grid, shape: tuple[int, ...], limits: Limits) -> None:
        self._grid, self._limits = grid, limits
        self._shapes = [(1,), shape]  # SecAgg+ puts the weight first
        word = secagg_server().Key
        #: What a reply to each of SecAgg+'s exchanges holds.
        self._answers: tuple[dict[str, type], ...] = (
            {word.PUBLIC_KEY_1: bytes, word.PUBLIC_KEY_2: bytes},
            {word.DESTINATION_LIST: list, word.CIPHERTEXT_LIST: list},
            {word.MASKED_PARAMETERS: list},
            {word.NODE_ID_LIST: list, word.SHARE_LIST: list},
        )
        self._number = 0
        #: Whether masked replies were asked for.
        self.masked = False
        #: Why nodes have not answered, or not well; and how many have in the last exchange.
        self.lost: dict[int, Lost] = {}
        self.answered = 0

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Return the good replies of one exchange, at most one per node."""
        asked = list(messages)
        self.masked = self._number >= _MASKED
        replies = self._grid.send_and_receive(asked, timeout=timeout)
        sent = [(message.metadata.dst_node_id, message) for message in asked]
        good, lost = read_replies(sent, replies, self._checked)
        for node in [node for node, reply in good.items() if reply.metadata.src_node_id != node]:
            del good[node]
            lost[node] = Lost(REFUSED, "the reply is another node's")
        if not self._number:  # what may be missing at a client that cannot answer
            lost = {node: why._replace(reason=why.reason + _REMEDY) for node, why in lost.items()}
        self.lost |= lost
        self.answered = len(good)
        self._number += 1
        return list(good.values())

    def _checked(self, reply: Message) -> Message:
        """Return a reply, or raise a ValueError unless it is what SecAgg+ asks for now."""
        record = reply.content.get(SECAGG)
        answers: Mapping[str, Any] = record if isinstance(record, ConfigRecord) else {}
        for name, kind in self._answers[self._number].items():
            if not isinstance(answers.get(name), kind):
                raise ValueError(f"no {name!r} of SecAgg+ in the reply")
        if self._number == _MASKED:
            files = answers[secagg_server().Key.MASKED_PARAMETERS]
            if sum(map(len, files)) > self._limits.n_bytes:
                raise ValueError(f"too large: at most {self._limits.n_bytes} bytes are read")
            found = [(view.shape, view.dtype) for view, _ in map(view_file, files)]
            if found != [(shape, np.dtype(np.int64)) for shape in self._shapes]:
                raise ValueError(
                    f"wrong shape: masked arrays of {self._shapes} are asked for, got "
                    f"{[shape for shape, _ in found]}"
                )
        return reply
