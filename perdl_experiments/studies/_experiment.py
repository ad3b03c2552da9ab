"""What an experiment is, and how its options are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from math import isfinite
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from numpy.typing import NDArray

from flwr_perdl._checks import check_choice, check_count, check_real
from flwr_perdl.dictionary import (
    GradientLearner,
    KSVDLearner,
    Learner,
    MODLearner,
    OrthogonalLearner,
)
from flwr_perdl.strategies import PerMA
from perdl_experiments.engine import Config, EvaluateFn, Federated, Federation, arranged
from perdl_experiments.outcome import Outcome

Value = int | float | str | bool
Number = TypeVar("Number", int, float)

#: Samples that must stand behind what a client sends, unless ``min_support`` says otherwise.
MIN_SUPPORT = 3

#: The most that an option may ask for: more would fill any machine's memory, or days. Unlike these,
#: limits that the data set are the experiments' own.
_MOST = {
    "clients": 100_000,
    "agents": 5_000,
    "atoms": 10_000,
    "dimension": 100_000,
    "size": 10_000,
    "seeds": 10_000,
    "splits": 10_000,
    "samples_per_client": 10**9,
}
_MOST_OF_OTHERS = 1_000_000

#: What options mean that several experiments have; an experiment's `HELP` says the others, and
#: what one of these means there.
SHARED_HELP: dict[str, str] = {
    "clients": "number of clients",
    "rounds": "communication rounds",
    "seed": "the run's one seed",
    "data": "your own data",
    "seeds": "repetitions, one per seed",
    "samples": "samples per client",
    "samples_per_client": "images per client; fewer where the data have fewer",
    "n_atoms": "atoms of each client",
    "n_global": "of which global",
    "local_steps": "iterations of a client's learner per round",
    "weak": "number of weak clients",
    "weak_samples": "samples of each weak client",
    "aggregation": (
        "how updates are averaged: `statistics`, `mean`, `weighted`, `median`, "
        "`geometric-median` or `trimmed`"
    ),
    "matching": "how atoms are matched: `consensus` or `paths`",
    "learner": "a client's algorithm: `orthogonal`, `gradient`, `mod` or `ksvd`",
    "min_support": (
        "samples that must stand behind what a client sends; 0, the paper's, sends everything"
    ),
    "methods": "what is compared: `main`; or `all`, which adds Table 1",
}

#: Learners whose atoms need not be orthogonal; thresholds serve them badly where atoms are alike,
#: as on images, so that they code by orthogonal matching pursuit with so many atoms.
GENERAL: dict[str, Callable[..., Learner]] = {
    "gradient": GradientLearner,
    "mod": MODLearner,
    "ksvd": KSVDLearner,
}
GENERAL_N_NONZERO = 10


class Federate(Protocol):
    """Run one federation on the chosen engine."""

    def __call__(self, config: Config, evaluate_fn: EvaluateFn | None = None) -> Federated:
        """Return what the federation of ``config`` ends with."""


class Keep(Protocol):
    """Keep what a part of a run comes to."""

    def __call__(
        self, name: str, compute: Callable[[], dict[str, NDArray[Any]]], *, of: int = 0
    ) -> dict[str, NDArray[Any]]:
        """Return what ``compute()`` does; a resumed run finds it on disk.

        ``of`` says, for the progress of a run without federations or after them, how many parts
        there are.
        """


class Described(Protocol):
    """A module of this package that runs with ``flwr-perdl run NAME``.

    Attributes
    ----------
    NAME, ABOUT, SOURCE : str
        Its name, one line about it, the place in the paper.
    DEFAULTS : dict
        Every option with its default, ``clients``, ``rounds``, ``seed`` and ``data`` included;
        only an experiment with ``data`` among them reads a user's file.
    HELP : dict
        What the options mean that `SHARED_HELP` does not explain, or that mean something else
        here; the tables of docs/cli.md have the same words.
    FIGURES : tuple of str
        The files of all figures that it may write.
    ERROR : str
        The metric to show while it runs.
    """

    NAME: str
    ABOUT: str
    SOURCE: str
    DEFAULTS: dict[str, Value]
    HELP: dict[str, str]
    FIGURES: tuple[str, ...]
    ERROR: str


@runtime_checkable
class FederatedExperiment(Described, Federation, Protocol):
    """An experiment with a server and clients: it runs on every engine."""

    def federations(self, config: Config) -> list[Config]:
        """Return the config of every federation that `run` asks for, in order."""

    def run(self, config: Config, federate: Federate, keep: Keep) -> Outcome:
        """Run the federations and everything that they are compared with."""


class NetworkExperiment(Described, Protocol):
    """An experiment on neighbours without a server: it runs in process."""

    def run(self, config: Config, keep: Keep) -> Outcome:
        """Run the networks and everything that they are compared with."""


Experiment = FederatedExperiment | NetworkExperiment


def configure(
    experiment: Experiment,
    *,
    clients: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    data: str | None = None,
    options: Mapping[str, Value] | None = None,
) -> dict[str, Value]:
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
    dict
        A new one, with ``"experiment"`` and every option.

    Raises
    ------
    ValueError
        If an option is unknown, or its value is not as it must be.
    """
    config: dict[str, Value] = {"experiment": experiment.NAME, **experiment.DEFAULTS}
    named = {"clients": clients, "rounds": rounds, "seed": seed, "data": data}
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in {**given, **(options or {})}.items():
        if name == "data" and "data" not in experiment.DEFAULTS:
            raise ValueError(f"{experiment.NAME} makes its own data: data must not be given.")
        check_name(f"option of {experiment.NAME}", name, experiment.DEFAULTS)
        config[name] = _read(name, value, experiment.DEFAULTS[name])
    if config["clients"] or experiment.DEFAULTS["clients"]:  # 0: as many as the data have
        check_count("clients", config["clients"], 2)
    check_count("rounds", config["rounds"], 1)
    check_count("seed", config["seed"])
    return config


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


def meaning(experiment: Experiment, option: str) -> str:
    """Return what an option of an experiment means."""
    return experiment.HELP.get(option) or SHARED_HELP[option]


def _read(name: str, value: Value, default: Value) -> Value:
    """Return ``value`` as the type of ``default``."""
    kind = type(default)
    try:
        if kind is int and isinstance(value, float):
            raise ValueError
        read: Value = kind(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{name} must be {_WORDS[kind]}, got {value!r}.") from None
    if name != "seed" and isinstance(read, int):
        most = _MOST.get(name, _MOST_OF_OTHERS)
        if read > most:
            raise ValueError(f"{name} must be at most {most}, got {read}.")
    if isinstance(read, float) and not isfinite(read):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    return read


_WORDS: dict[type, str] = {int: "an integer", float: "a number", str: "text"}


def numbers(name: str, text: Value, low: int, high: int) -> list[int]:
    """Return the integers of a list such as "4,6,8", each within ``[low, high]``."""
    values = _listed(name, text, int, "integers such as '4,6,8'")
    return [check_count(name, value, low, high) for value in values]


def reals(name: str, text: Value, low: float) -> list[float]:
    """Return the numbers of a list such as "0.5,1,2", each at least ``low``."""
    values = _listed(name, text, float, "numbers such as '0.5,1,2'")
    return [check_real(name, value, low) for value in values]


def _listed(name: str, text: Value, kind: Callable[[str], Number], words: str) -> list[Number]:
    try:
        return [kind(part) for part in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{name} must be {words}, got {text!r}.") from None


def seeds_of(config: Config) -> range:
    """Return as many seeds as ``config["seeds"]`` says, from ``config["seed"]`` on."""
    first = int(config["seed"])
    return range(first, first + check_count("seeds", config["seeds"], 1))


def make_learner(config: Config, n_atoms: int) -> Learner:
    """Return the learner that ``config["learner"]`` names."""
    name = check_choice("learner", config["learner"], ("orthogonal", *GENERAL))
    if name == "orthogonal":
        return OrthogonalLearner(n_atoms)
    return GENERAL[name](n_atoms, n_nonzero=min(GENERAL_N_NONZERO, n_atoms))


def make_strategy(
    config: Config, n_global: int | Literal["auto"], options: Mapping[str, Any]
) -> PerMA:
    """Return PerMA as ``config`` describes it, with the server's own ``options``."""
    return PerMA(
        n_global,
        matching=str(config["matching"]),
        aggregation=str(config["aggregation"]),
        local_steps=check_count("local_steps", config.get("local_steps", 1), 1),
        **arranged(options),
    )


def private(config: Config) -> dict[str, Any]:
    """Return what a client is told of its privacy: its least support, and where it keeps state."""
    least = check_count("min_support", config["min_support"])
    return {"min_support": least, "state_dir": config.get("state_dir")}


def check_nodes(config: Config, n_nodes: int, each: str) -> None:
    """Refuse a number of clients that is not the number of nodes that the options make."""
    if config["clients"] not in (0, n_nodes):
        raise ValueError(f"clients must be {n_nodes}, one per {each}, got {config['clients']}.")
