"""What an experiment is: a TOML file with its options and texts, and a module with its code.

An option in the TOML file:

=============== ================================================================================
key             meaning
=============== ================================================================================
``default``     its type is the option's
``help``        one line; `shared.toml` has those of options that several studies have
``least``,      bounds; of ``above`` the value itself is excluded
``above``,
``most``
``limit``       maximum of an integer that only protects time and memory; a million if not stated
``enough``      of clients or rounds: so many are judged; half the default if not stated
``choices``     the words that it may be, "{choices}" in ``help``; `CHOICES` has the library's
``type``        of a text: "integers" or "words", separated by commas; or "count or auto",
                "number or auto"
=============== ================================================================================

A study's `Config` is a frozen dataclass with a field per option, so that code reads
``config.n_atoms`` and a type checker knows that it is an int.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl.core.checks import check_choice, check_count, check_real
from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    LassoLearner,
    Learner,
    MODLearner,
    OrthogonalLearner,
)
from flwr_perdl.strategies import PerMA, ProtocolStrategy
from flwr_perdl.strategies.perma import AGGREGATIONS, MATCHINGS
from perdl_experiments.engine import EvaluateFn, Federated, arranged
from perdl_experiments.measures import half_width
from perdl_experiments.outcome import Outcome
from perdl_experiments.render import FAILED, Page, Record

Value = int | float | str | bool
Arrays = dict[str, NDArray[Any]]
Auto = Literal["auto"]

_FOLDER = Path(__file__).parent
_TYPES: dict[type, str] = {int: "an integer", float: "a number", str: "text"}

#: Learners whose atoms need not be orthogonal. Thresholds serve them badly where atoms are alike,
#: as on images, so they code by orthogonal matching pursuit with so many atoms.
GENERAL: dict[str, Callable[..., Learner]] = {
    "gradient": GradientLearner,
    "mod": MODLearner,
    "ksvd": KSVDLearner,
}
GENERAL_N_NONZERO = 10

#: Words that options may be, where the library says them.
CHOICES = {"aggregation": AGGREGATIONS, "matching": MATCHINGS}


# Options -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """An option of an experiment; see the module's table."""

    name: str
    default: Value
    help: str
    least: float = 0
    above: float | None = None
    most: float = inf
    limit: int = 1_000_000
    enough: int | None = None
    choices: tuple[str, ...] = ()
    type: str = ""

    def read(self, given: Value) -> Value:
        """Return what a user gave, as the type of the default."""
        kind = type(self.default)
        if given == "auto" and self.type.endswith("or auto"):
            return given
        try:
            if kind is int and isinstance(given, float):
                raise ValueError
            value: Value = kind(given)
        except (ValueError, OverflowError):
            raise ValueError(f"{self.name} must be {_TYPES[kind]}, got {given!r}.") from None
        if isinstance(value, int) and self.name != "seed" and value > self.limit:
            raise ValueError(f"{self.name} must be at most {self.limit}, got {value}.")
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{self.name} must be a finite number, got {given!r}.")
        return value

    def parse(self, value: Value) -> Any:
        """Return a value that was read as the code takes it, or say what is wrong with it."""
        if self.choices and self.type != "words":
            return check_choice(self.name, value, self.choices)
        if self.type == "words":
            return tuple(check_choice(self.name, o, self.choices) for o in str(value).split(","))
        most = None if self.most == inf else int(self.most)
        if self.type == "integers":
            return tuple(
                check_count(self.name, one, int(self.least), most) for one in self._listed(value)
            )
        if self.type.endswith("or auto"):
            return value if value == "auto" else self._number(str(value))
        if isinstance(value, float):
            low = self.least if self.above is None else self.above
            return check_real(self.name, value, low, self.most, open_low=self.above is not None)
        if isinstance(value, int):
            return check_count(self.name, value, int(self.least), most)
        return value

    def _listed(self, text: Value) -> list[int]:
        try:
            return [int(part) for part in str(text).split(",")]
        except ValueError:
            raise ValueError(
                f"{self.name} must be integers such as '4,6,8', got {text!r}."
            ) from None

    def _number(self, text: str) -> int | float:
        """Return the number that stands in place of "auto"."""
        what = f"a number above {self.least:.0f}"
        try:
            if self.type == "number or auto":
                return check_real(self.name, float(text), self.least, open_low=True)
            what = f"an integer of at least {self.least:.0f}"
            return check_count(self.name, int(text), int(self.least))
        except ValueError:
            raise ValueError(f"{self.name} must be 'auto' or {what}, got {text!r}.") from None


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options that every experiment has.

    Attributes
    ----------
    clients, rounds, seed : int
        At least 2 clients, or 0 for as many as the data have; at least 1 round; a seed from 0.
    data : str
        The user's file; empty where there is none.
    seeds : int
        How often all is repeated, each time with the next seed.
    state_dir : str, optional
        Where clients keep their private state on disk.
    options : mapping
        Everything as it was given: ``"experiment"`` and every option, for results.json.
    """

    clients: int
    rounds: int
    seed: int
    data: str = ""
    seeds: int = 1
    state_dir: str | None = None
    options: Mapping[str, Value] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check what the bounds of single options cannot say."""
        self.check()

    def check(self) -> None:
        """Reject options that do not fit together."""

    @property
    def each_seed(self) -> range:
        """The seeds of all repetitions."""
        return range(self.seed, self.seed + self.seeds)

    def check_nodes(self, n_nodes: int, each: str) -> None:
        """Reject a number of clients that is not the number of nodes that the options make."""
        if self.clients not in (0, n_nodes):
            raise ValueError(f"clients must be {n_nodes}, one per {each}, got {self.clients}.")


@dataclass(frozen=True, kw_only=True)
class ClientConfig(Config):
    """Options of an experiment with dictionary clients."""

    min_support: int

    @property
    def private(self) -> dict[str, Any]:
        """What a client is told of its privacy: its least support, where it keeps its state."""
        return {"min_support": self.min_support, "state_dir": self.state_dir}


@dataclass(frozen=True, kw_only=True)
class PermaConfig(ClientConfig):
    """Options of an experiment with PerMA."""

    aggregation: str
    matching: str
    local_steps: int = 1

    def strategy(self, n_global: int | Literal["auto", "agree"], **options: Any) -> PerMA:
        """Return PerMA as the options describe it, with the server's own ``options``."""
        return PerMA(
            n_global,
            matching=self.matching,
            aggregation=self.aggregation,
            local_steps=self.local_steps,
            **arranged(options),
        )


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(PermaConfig):
    """Options of an experiment that lets the user choose the clients' algorithm."""

    learner: str
    n_atoms: int
    alpha: float | Auto = "auto"

    def make_learner(self, n_atoms: int | None = None) -> Learner:
        """Return the learner; it has ``n_atoms`` atoms if this is given."""
        count = self.n_atoms if n_atoms is None else n_atoms
        if self.learner == "orthogonal":
            return OrthogonalLearner(count)
        if self.learner == "lasso":
            return LassoLearner(count, self.alpha)
        return GENERAL[self.learner](count, n_nonzero=min(GENERAL_N_NONZERO, count))


# Experiments ---------------------------------------------------------------------------------


class Federate(Protocol):
    """Run one federation on the chosen engine."""

    def __call__(self, config: Any, evaluate_fn: EvaluateFn | None = None) -> Federated:
        """Return what the federation of ``config`` ends with."""


class Keep(Protocol):
    """Keep what a part of a run comes to."""

    def __call__(self, name: str, compute: Callable[[], Arrays], *, of: int = 0) -> Arrays:
        """Return what ``compute()`` does; a resumed run finds it on disk.

        ``of`` says, for the progress of a run without federations or after them, how many parts
        there are.
        """


class Study(Protocol):
    """The code of an experiment: a module of this package."""

    Config: type[Config]


class FederatedStudy(Study, Protocol):
    """A study with a server and clients: it runs on every engine."""

    def client(self, context: Context, config: Any) -> Any:
        """Return the client of ``context``'s partition."""

    def strategy(self, config: Any, **options: Any) -> ProtocolStrategy:
        """Return the strategy; ``options`` are the server's."""

    def federations(self, config: Any) -> list[Any]:
        """Return the config of every federation that `run` asks for, in order."""

    def run(self, config: Any, federate: Federate, keep: Keep) -> Outcome:
        """Run the federations and everything that they are compared with."""


class NetworkStudy(Study, Protocol):
    """A study of neighbors without a server: it runs in process."""

    def run(self, config: Any, keep: Keep) -> Outcome:
        """Run the networks and everything that they are compared with."""


@dataclass(frozen=True)
class Experiment:
    """What runs with ``flwr-perdl run NAME``.

    Attributes
    ----------
    name, about, source : str
        Its name, one line about it, the place in the paper.
    error : str
        The metric to show while it runs.
    options : dict of str to Option
        By name, ``clients``, ``rounds`` and ``seed`` included; only an experiment with ``data``
        among them reads a user's file.
    page : mapping
        The TOML file: what the report says.
    code : module
        The study.
    """

    name: str
    about: str
    source: str
    error: str
    options: Mapping[str, Option]
    page: Page
    code: Study

    @property
    def federated(self) -> FederatedStudy | None:
        """The study, if it has a server and clients."""
        return cast(FederatedStudy, self.code) if hasattr(self.code, "client") else None

    @property
    def defaults(self) -> dict[str, Value]:
        """Every option's default."""
        return {name: option.default for name, option in self.options.items()}

    @property
    def figures(self) -> list[str]:
        """The files of all figures that it may write."""
        return [one["file"] for one in self.page.get("figures", ())]

    def describe(self, config: Config) -> dict[str, Any]:
        """Return what results.json says of the experiment, and of the options of a run."""
        return {
            "experiment": self.name,
            "title": self.page["title"],
            "about": self.about,
            "source": self.source,
            "config": {name: own for name, own in config.options.items() if name != "experiment"},
        }


def load(name: str) -> Experiment:
    """Return the experiment that ``NAME.toml`` in this folder describes.

    Parameters
    ----------
    name : str
        Its module's name. A file with ``extends = "OTHER"`` changes OTHER's, whose code it runs.
    """
    page = dict(read_page(name))
    shared = read_page("shared")["options"]
    options = {
        option: _read_option(option, {**shared.get(option, {}), **said})
        for option, said in page["options"].items()
    }
    code = import_module(f"{__package__}.{page.get('extends', name)}")
    constants = {
        n.lower(): v for n, v in vars(code).items() if n.isupper() and type(v) in (int, float)
    }
    page["constants"] = constants
    about, source, error = (str(page[key]) for key in ("about", "source", "error"))
    return Experiment(page["name"], about, source, error, options, page, cast(Study, code))


def _read_option(name: str, said: Mapping[str, Any]) -> Option:
    """Return an option as its file describes it."""
    choices = tuple(said.get("choices", CHOICES.get(name, ())))
    listed = " or ".join(", ".join(f"`{one}`" for one in choices).rsplit(", ", 1))
    text = said["help"].replace("{choices}", listed)
    return Option(name, **{**said, "choices": choices, "help": text})


@cache
def read_page(name: str) -> dict[str, Any]:
    """Return what ``NAME.toml`` in this folder says, with what it extends."""
    own = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    if "extends" not in own:
        return own
    base = read_page(own["extends"])
    kept = {n: said for n, said in base["options"].items() if n not in own.get("without", ())}
    changed = own.get("options", {})
    return base | own | {"options": {n: said | changed.get(n, {}) for n, said in kept.items()}}


def words(name: str, field: str = "method") -> dict[str, str]:
    """Return how ``NAME.toml`` calls the values of a field, in its order."""
    return dict(read_page(name)["words"][field])


def configure(
    experiment: Experiment,
    *,
    clients: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    data: str | None = None,
    options: Mapping[str, Value] | None = None,
) -> Any:
    """Return an experiment's complete config.

    Parameters
    ----------
    experiment : Experiment
        Its defaults apply where nothing is given.
    clients, rounds, seed : int, optional
        At least 2 clients, at least 1 round, a seed from 0.
    data : str, optional
        The user's file.
    options : mapping of str to int, float, str or bool, optional
        Options by name, the four above among them; strings are read as the default's type.

    Returns
    -------
    Config
        The study's own class.

    Raises
    ------
    ValueError
        If an option is unknown, or its value is not as it must be.
    """
    raw: dict[str, Value] = {"experiment": experiment.name, **experiment.defaults}
    named = {"clients": clients, "rounds": rounds, "seed": seed, "data": data}
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in {**given, **(options or {})}.items():
        if name == "data" and "data" not in experiment.options:
            raise ValueError(f"{experiment.name} makes its own data: data must not be given.")
        check_name(f"option of {experiment.name}", name, experiment.options)
        raw[name] = experiment.options[name].read(value)
    if raw["clients"] or experiment.options["clients"].default:  # 0: as many as the data have
        check_count("clients", raw["clients"], 2)
    parsed = {name: option.parse(raw[name]) for name, option in experiment.options.items()}
    return experiment.code.Config(**parsed, options=raw)


def check_name(what: str, name: str, names: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``names``, or raise a ValueError that says which is like it.

    Parameters
    ----------
    what : str
        What is named.
    name : str
        Its name, as given.
    names : iterable of str
        The names that there are.

    Raises
    ------
    ValueError
        If it is none of them.
    """
    known = list(names)
    if name in known:
        return name
    close = get_close_matches(str(name), known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise ValueError(f"{what} must be one of {', '.join(map(repr, known))}, got {name!r}{hint}")


# What is kept of a run -----------------------------------------------------------------------


def stacked(kept: Sequence[Arrays]) -> Arrays:
    """Return what was kept of each seed as one, seeds first."""
    return {name: np.stack([one[name] for one in kept]) for name in kept[0]}


# Methods that ours is compared with ----------------------------------------------------------


def leads(ahead: Mapping[str, NDArray[Any]], baseline: str, ratio: float = 0.0) -> Iterator[Record]:
    """Yield by how much each method is ahead: ``lead``, and its interval, but for the baseline's.

    Parameters
    ----------
    ahead : mapping of str to ndarray of shape (n_seeds,)
        By method, by how much it is ahead with each seed.
    baseline : str
        The method that it is compared with.
    ratio : float, default 0.0
        See `half_width`; zero where few rows are in two splits.
    """
    for name, each in ahead.items():
        mean, half = float(each.mean()), half_width(each, ratio)
        yield Record("lead", mean, name)
        if np.isfinite(half) and name != baseline:
            yield Record("lead_low", mean - half, name)
            yield Record("lead_high", mean + half, name)


def attempt(compute: Callable[[], Arrays]) -> Arrays:
    """Return what ``compute()`` returns, or why it failed: a rival's failure does not end a run.

    Parameters
    ----------
    compute : callable
        A part of a run whose method is not ours.

    Returns
    -------
    dict of str to ndarray
        With the sentence under `render.FAILED` where it failed; a record of this metric makes the
        method's row say so.
    """
    try:
        return compute()
    except Exception as error:  # whatever stops a rival
        return {FAILED: np.array(reason(error))}


def reason(error: Exception) -> str:
    """Return what an error says, without the full stop."""
    return str(error).rstrip(".") or type(error).__name__
