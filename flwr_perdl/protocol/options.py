"""Options of every strategy, and their checks.

A strategy declares what it supports: ``unsupported``, the reason for each thing that it does not,
and ``needs``, what an option demands of others. docs/which-algorithm.md shows both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from flwr_perdl.core.checks import (
    check_count,
    check_flag,
    check_kind,
    check_list,
    check_real,
    own_numbers,
)
from flwr_perdl.protocol.part import Part, in_turn
from flwr_perdl.protocol.records import LARGEST_INT
from flwr_perdl.protocol.report import OnRound, list_observers

#: Reasons of several algorithms: against robust rules where the server gets sums, secure sums
#: without privacy, and reuse of replies.
JUDGED = "a robust rule judges single replies, of which the server gets a sum only"
SECURE = "only privacy bounds what a client sends, as a secure sum needs"
OLD = "a reply is a step from a model that has changed since"
#: Against the user's own parts, where clients are the library's.
NO_MODEL = "what its clients send is no model"
_METRICS = "strategy.history has every client's metrics, by round"
_FIXED = "it is always"
#: Options of Flower's FedAvg, of both interfaces: the option here, or what takes its place.
_FEDAVG = {
    "min_available_nodes": "num_clients",
    "min_available_clients": "num_clients",
    "min_train_nodes": "min_clients",
    "min_fit_clients": "min_clients",
    "min_evaluate_nodes": "min_clients",
    "min_evaluate_clients": "min_clients",
    "fraction_fit": "fraction_train",
    "evaluate_fn": "give it to start",
    "initial_parameters": "give start(initial_arrays=...)",
    "on_fit_config_fn": "give start(train_config=...), and override configure_train to change it "
    "by round",
    "on_evaluate_config_fn": "give start(evaluate_config=...), and override configure_evaluate to "
    "change it by round",
    "proximal_mu": 'give start(train_config=ConfigRecord({"proximal-mu": ...})), which reaches the '
    "clients' training",
    "accept_failures": "give min_clients, the fewest good replies with which a round goes on",
    "inplace": "leave it out",
    "weighted_by_key": f'{_FIXED} "num-examples"',
    "arrayrecord_key": f'{_FIXED} "arrays"',
    "configrecord_key": f'{_FIXED} "config"',
    "train_metrics_aggr_fn": _METRICS,
    "evaluate_metrics_aggr_fn": _METRICS,
    "fit_metrics_aggregation_fn": _METRICS,
    "evaluate_metrics_aggregation_fn": _METRICS,
}


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Less common server options: ``server=ServerSettings(...)`` of every strategy.

    A strategy's ``options`` are such settings, with its `ServerOptions` among them.

    Parameters
    ----------
    resume : bool, default False
        Continue from the newest checkpoint in ``checkpoint_dir``; without one, begin.
    evaluate_every : int, default 1
        Rounds between two evaluations by the clients; the last round has one if it is a multiple.
    allow_fewer : bool, default False
        Whether to begin with fewer than ``num_clients``, but at least ``min_clients``, if not all
        join in time; otherwise the run stops with `TooFewReplies`.
    node_timeout : float, default 60.0
        Seconds to wait for them.
    max_reply_bytes : int, optional
        Maximum size of a reply's arrays; a larger reply is rejected before they are read. By
        default the size of the expected values; 2**28 where their number is unknown.
    max_magnitude : float, optional
        Largest absolute value of a number in a reply, metrics included; a reply with a larger one
        is rejected. By default it is relative for the arrays of a user's model: 100 times the lower
        median, over the round's replies, of the array's largest absolute values, but at least 100
        (`DiffusionAveraging`: over a node and its neighbors). Elsewhere 1e100, and 1e30 where the
        model is in single precision.
    clients_by_node : mapping of int to int, optional
        The partition of every node that may take part, by Flower's node id. Other nodes are not
        asked, and a node that claims another partition is left out. Without it, the first node that
        claims a partition keeps it while it is connected.

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule.

    Examples
    --------
    >>> from flwr_perdl.strategies import PerMA, ServerSettings
    >>> settings = ServerSettings(evaluate_every=5, node_timeout=300)
    >>> strategy = PerMA(n_global=2, server=settings)
    >>> strategy.options.evaluate_every
    5
    """

    resume: bool = False
    evaluate_every: int = 1
    allow_fewer: bool = False
    node_timeout: float = 60.0
    max_reply_bytes: int | None = None
    max_magnitude: float | None = None
    clients_by_node: Mapping[int, int] | None = None
    # Given to the strategy itself.
    fraction_train: float = field(default=1.0, init=False)
    fraction_evaluate: float = field(default=1.0, init=False)
    min_clients: int = field(default=2, init=False)
    num_clients: int | None = field(default=None, init=False)
    seed: int = field(default=0, init=False)
    checkpoint_dir: str | Path | None = field(default=None, init=False)
    on_round: OnRound = field(default=None, init=False)
    parts: Sequence[Part] = field(default=(), init=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ServerSettings:
        """Return the settings of a strategy with these options, complete and checked.

        Parameters
        ----------
        given : mapping
            Some of `ServerOptions`.

        Raises
        ------
        ValueError, TypeError
            If an option is not known, or breaks its rule.

        Examples
        --------
        >>> from flwr_perdl.strategies import ServerSettings
        >>> ServerSettings.of({"num_clients": 10}).num_clients
        10
        """
        check_kind("given", given, Mapping, "a mapping of ServerOptions")
        refuse_unknown("ServerOptions", given, ServerOptions.__annotations__)
        direct = dict(given)
        server = check_kind("server", direct.pop("server", cls()), cls, "a ServerSettings")
        settings: ServerSettings = copy(server)
        vars(settings).update(direct)  # frozen, but nobody else has the copy yet
        settings.__post_init__()
        if settings.resume and settings.checkpoint_dir is None:
            raise ValueError("resume must come with a checkpoint_dir, got checkpoint_dir=None.")
        return settings

    def __post_init__(self) -> None:
        """Check the settings."""
        own_numbers(self)
        check_flag("resume", self.resume)
        check_count("evaluate_every", self.evaluate_every, 1)
        check_flag("allow_fewer", self.allow_fewer)
        check_real("node_timeout", self.node_timeout, 0)
        if self.max_reply_bytes is not None:
            check_count("max_reply_bytes", self.max_reply_bytes, 1)
        if self.max_magnitude is not None:
            check_real("max_magnitude", self.max_magnitude, 0, open_low=True)
        check_real("fraction_train", self.fraction_train, 0, 1, open_low=True)
        check_real("fraction_evaluate", self.fraction_evaluate, 0, 1)
        check_count("min_clients", self.min_clients, 1)
        if self.num_clients is not None:
            check_count("num_clients", self.num_clients, 1)
        check_count("seed", self.seed, 0, LARGEST_INT)
        kinds = (str, Path, type(None))
        check_kind("checkpoint_dir", self.checkpoint_dir, kinds, "a path or None")
        list_observers(self.on_round)
        if check_list("parts", self.parts):
            self.__dict__["parts"] = in_turn(self.parts)  # frozen, but nobody else has it yet
        nodes = self.clients_by_node
        check_kind("clients_by_node", nodes, (Mapping, type(None)), "a mapping or None")
        if nodes is not None and not nodes:
            raise ValueError("clients_by_node must name at least one node, got an empty mapping.")
        for node, partition in (nodes or {}).items():
            check_count("node ids in clients_by_node", node)
            check_count("partitions in clients_by_node", partition, 0, LARGEST_INT)


class ServerOptions(TypedDict, total=False):
    """The options that every strategy of this library takes, all by keyword.

    fraction_train, fraction_evaluate : float, default 1.0
        Share of the clients sampled for training in a round, and for evaluating the model after it
        by their own ``evaluate``. ``fraction_evaluate=0`` turns evaluation off: for clients without
        ``evaluate``, and for protocols whose arrays are no model.
    min_clients : int, default 2
        Minimum number of good replies for a round to count; also the fewest clients sampled.
    num_clients : int or None, default None
        Number of clients to wait for before round one. None waits until ``min_clients`` are
        connected and no other has joined for a few seconds.
    seed : int, default 0
        The run's one seed, below 2**63.
    checkpoint_dir : str, Path or None, default None
        Folder for a checkpoint after every round. A folder that holds a run is rejected without
        ``resume``.
    on_round : callable, or sequence of callables, optional
        Called with each `RoundReport` during the run, such as `print` or one of
        `flwr_perdl.trackers`. An error in it is logged once, and the run goes on.
    parts : sequence of Part, default ()
        Your own parts: what all messages go through, see `Part`. Clients need
        ``client_app(parts=[...])``.
    server : ServerSettings
        Everything else: ``resume``, ``events``, ``clients_by_node``, …

    Examples
    --------
    >>> from flwr_perdl.strategies import PerMA, ServerOptions
    >>> options = ServerOptions(fraction_train=0.5, min_clients=3, seed=7)
    >>> PerMA(n_global=2, **options).options.min_clients
    3
    """

    fraction_train: float
    fraction_evaluate: float
    min_clients: int
    num_clients: int | None
    seed: int
    checkpoint_dir: str | Path | None
    on_round: OnRound
    parts: Sequence[Part]
    server: ServerSettings


def spell_fields(argument: str, kind: type) -> dict[str, str]:
    """Return how each field of a dataclass that is an argument is given, by its name."""
    names = [field.name for field in fields(kind) if field.init]
    return {name: f"{argument}={kind.__name__}({name}=...)" for name in names}


def refuse_unknown(
    owner: str, given: Iterable[str], known: Iterable[str], inside: Mapping[str, str] | None = None
) -> None:
    """Raise a TypeError that says what there is instead if an option is given that is not known.

    Parameters
    ----------
    owner : str
        Whose options they are.
    given, known : iterable of str
        The options that are given, and those that there are.
    inside : mapping of str to str, optional
        How options are given that are fields of another one, by their names.
    """
    names, inside = list(known), {} if inside is None else inside
    for name in [str(name) for name in given if name not in names]:
        if name in inside:
            raise TypeError(f"{owner} has no option {name!r}: it is given as {inside[name]}.")
        place = _FEDAVG.get(name, "")
        if place in names or " " in place:
            given_as = place if " " in place else f"give {place}"
            raise TypeError(f"{owner} has no option {name!r}: {given_as}.")
        close = get_close_matches(name, [*names, *inside], n=1)
        place = f", given as {inside[close[0]]}" if close and close[0] in inside else ""
        meant = f"did you mean {close[0]!r}{place}? " if close else ""
        raise TypeError(f"{owner} has no option {name!r}: {meant}It takes {', '.join(names)}.")


class Needs(NamedTuple):
    """What an option must be, or must not be, where one of some others is given.

    Attributes
    ----------
    given : tuple of str
        The others, which are given unless they are None or False.
    option : str
        The option's name.
    values : tuple
        What it must be one of.
    why : str
        The reason, after "since".
    never : bool
        Whether it must be none of the ``values`` instead.
    """

    given: tuple[str, ...]
    option: str
    values: tuple[Any, ...]
    why: str
    never: bool = False

    def __str__(self) -> str:
        """Return the rule and its reason."""
        rule = f"must {'not ' * self.never}be {' or '.join(map(repr, self.values))}"
        return f"{self.option} {rule} with {' or '.join(self.given)}, since {self.why}"


def check_support(algorithm: Any, options: Mapping[str, Any]) -> None:
    """Raise an error that names the option, the rule and the value if one breaks a declaration.

    Parameters
    ----------
    algorithm : object
        What has the two declarations.
    options : mapping of str to object
        The options that are given, by name, each checked on its own before.

    Raises
    ------
    TypeError
        If an option is one that the algorithm does not support.
    ValueError
        If an option is not what another one needs.
    """
    for name, value in options.items():
        if value is not None and (reason := algorithm.unsupported.get(name)):
            name_of = type(algorithm).__name__
            raise TypeError(f"{name_of} has no option {name!r}, since {reason}, got {value!r}.")
    for need in algorithm.needs:
        given = any(options.get(name) not in (None, False) for name in need.given)
        if given and (options[need.option] in need.values) == need.never:
            raise ValueError(f"{need}, got {options[need.option]!r}.")
