"""Malformed calls of public functions and methods: each is right, or an error names what is wrong.

``python tests/fuzz/calls.py SECONDS`` (`make fuzz-calls`) draws new calls until the time is over. A
call is a valid one in which one argument is malformed. It may find that right, but for an object of
no kind; otherwise it raises a ValueError or TypeError of the library's own that names the argument,
within ``LIMIT`` seconds, and leaves the other arguments as they are. NaN in a result is no result.
At its end it lists what it does not reach.
"""

from __future__ import annotations

import dis
import inspect
import re
import secrets
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl import (
    clients,
    dictionary,
    network,
    privacy,
    regression,
    simulations,
    strategies,
)
from flwr_perdl.regression.ridge import RandomFeatures

ROOMS = (dictionary, regression, network, privacy, strategies, clients, simulations)
LIMIT = 2.0
#: Amounts of work: a large one takes long, as it should.
WORK = {
    "max_iter",
    "n_rounds",
    "n_steps",
    "n_iterations",
}
#: Other names of an argument, anywhere or in one method, as an error may call it.
ALSO = {
    "learner": "Learner",
    "matrix": "weights",
    "objective": "Objective",
    "ModelDiffusion(SparseSVD).fit.X": "n_features",
    "ModelDiffusion(HuberNMF).fit.X": "n_features",
    "OrthogonalLearner.step.D": "S",
}

N, D, K = 12, 4, 3
OPTIONS = strategies.FedX(2).options
RING = network.Topology.ring(3)
APP = clients.client_app(lambda context: None)
MODEL = network.ModelDiffusion(network.SparseSVD(0.1, 0.1), n_iterations=3)


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _normal(*shape: int) -> Any:
    return np.random.default_rng(1).standard_normal(shape)


def _folds() -> Any:
    X, y = _normal(N, 20, 1), _normal(N, 20)
    return np.stack(
        [regression.sufficient_statistics(a, b, 4, rng=_rng()) for a, b in zip(X, y, strict=True)]
    )


def _features() -> Any:
    return RandomFeatures.draw(np.zeros(D), np.ones(D), 0, scale=1.0, seed=0)


def _atoms() -> Any:
    return np.eye(K, D)


def _context() -> Context:
    return Context(1, 1, {"partition-id": 0}, RecordDict(), {})


#: A valid value of each argument by its name, for all callables that say nothing else below.
VALID: dict[str, Callable[[], Any]] = {
    "A": _atoms,
    "B": _atoms,
    "C": lambda: _normal(N, K),
    "D": _atoms,
    "S": lambda: _normal(K, D),
    "U": lambda: np.eye(D)[:, :2],
    "X": lambda: _normal(N, D),
    "y": lambda: _normal(N),
    "adjacency": lambda: np.ones((3, 3)) - np.eye(3),
    "alpha": lambda: 0.1,
    "arrays": lambda: {"a": _atoms()},
    "app": ClientApp,
    "at": lambda: lambda round_: [(0, 1)],
    "n_nodes": lambda: 2,
    "beta": lambda: 1.0,
    "columns": lambda: 3,
    "clients": lambda: lambda node: _Untrained(),
    "data": lambda: [_normal(N, D) for _ in range(3)],
    "degree": lambda: 2,
    "edges": lambda: [(0, 1)],
    "grid": lambda: simulations.InProcessGrid(APP, 3),
    "matrix": lambda: np.full((3, 3), 1 / 3),
    "model": lambda: MODEL.start(3, D),
    "n": lambda: 2,
    "n_agents": lambda: 3,
    "n_features": lambda: D,
    "node": lambda: 1,
    "options": lambda: OPTIONS,
    "p": lambda: 0.5,
    "round_": lambda: 1,
    "rows": lambda: 3,
    "run": lambda: "run",
    "atoms": lambda: np.eye(K, 2),
    "bits": lambda: 4,
    "centers": lambda: _normal(2, D),
    "context": _context,
    "current": _atoms,
    "delta": lambda: 1.0,
    "dictionaries": lambda: [_atoms(), _atoms()[::-1].copy(), _atoms()],
    "epsilon": lambda: 1.0,
    "estimates": lambda: np.repeat(np.eye(3), 3, axis=0),
    "eta": lambda: 0.5,
    "fallback": _atoms,
    "fitted": lambda: _normal(N, D),
    "gamma": lambda: 0.5,
    "global_atoms": lambda: _atoms()[:2].copy(),
    "history": list,
    "k": lambda: 2,
    "learner": lambda: dictionary.GradientLearner(K),
    "make_client": lambda: _context,
    "network": lambda: network.Topology.ring(3),
    "n_atoms": lambda: K,
    "n_clients": lambda: 2,
    "n_clusters": lambda: 2,
    "n_components": lambda: 1,
    "n_global": lambda: 1,
    "n_nonzero": lambda: 1,
    "n_rounds": lambda: 3,
    "n_samples": lambda: 5,
    "name": lambda: "count",
    "num_nodes": lambda: 2,
    "objective": lambda: network.SparseSVD(gamma=0.1, delta=0.1),
    "orthogonal": lambda: True,
    "rng": _rng,
    "scales": lambda: [2.0, 1.0],
    "share": lambda: 0.5,
    "shared": lambda: np.array([True, False]),
    "shape": lambda: (2, 3),
    "stack": lambda: np.stack([_atoms(), _atoms()]),
    "protocol": lambda: "own",
    "program": lambda: network.Averaging(np.array([0.0, 1.0, 5.0])),
    "theta": lambda: _normal(D),
    "threshold": lambda: 0.5,
    "topology": lambda: network.Topology.ring(3),
    "variances": lambda: np.array([1.0, 1.0, 8.0]),
    "values": lambda: np.array([0.0, 1.0, 5.0]),
}
OWN: dict[str, dict[str, Callable[[], Any]]] = {
    "Combine": {"start": lambda: [_normal(D)]},
    "Request": {"step": lambda: "train"},
    "adapt": {
        "app": lambda: clients.client_app(lambda context: _Untrained()),
        "result": lambda: ArrayRecord([np.ones(2)]),
    },
    "aggregate_atoms": {"weights": lambda: np.ones(2)},
    "Topology.k_regular": {"n_nodes": lambda: 5},
    "Topology.small_world": {"n_nodes": lambda: 5},
    "diffusion_averaging": {"initial": lambda: [np.ones(2)], "metrics": lambda: ("loss",)},
    "NeighborRelay": {"fraction_evaluate": lambda: 0.0},
    "PublicBasis": {"matrix": lambda: np.eye(2, D)},
    "imbalanced_partition": {"y": lambda: np.arange(40) % 2},
    "natural_partition": {"owners": lambda: np.repeat([3, 8], 20)},
    "RidgeModel": {"features": _features, "coefficients": lambda: np.ones((1 + D, 2))},
    "RidgeModel.of": {
        "arrays": lambda: regression.RidgeModel(_features(), np.ones((1 + D, 2)), 2).to_arrays()
    },
    "fit_mixed_model": {"statistics": lambda: _folds().sum(axis=1), "correlated": lambda: False},
    "choose_mixture": {"statistics": _folds, "restarts": lambda: 1, "shrinkage": lambda: 1.0},
    "cluster_anchors": {"n_clusters": lambda: 3},
    "infer": {"dictionaries": lambda: [np.eye(D)[i : i + 1] for i in range(3)]},
    "lasso": {"start": lambda: np.zeros((N, K))},
    "ModelDiffusion(HuberNMF).fit": {"X": lambda: np.abs(_normal(N, D))},
    "local_costs": {"nu": lambda: _normal(3, N, D), "dictionaries": lambda: np.eye(3, D)[:, None]},
    "may_send": {"weights": lambda: np.abs(_normal(N, K)), "min_support": lambda: 2},
    "moment_step": {"step": lambda: "least-squares"},
    "model_error": {"theta": lambda: _normal(2, D)},
    "PersonalizedFedAvg": {"private": lambda: ["head.*"]},
    "DiffusionAveraging": {"metrics": lambda: ("loss",), "fraction_evaluate": lambda: 0.0},
    "residual_moment": {"thetas": lambda: _normal(1, D), "Q": lambda: np.eye(D)[None]},
    "sparse_code": {"n_nonzero": lambda: 1},
}
#: What needs Ray, a folder, a round of a run, is Flower's own, has *arguments, or is made in every
#: step by the library alone.
LEFT_OUT = {
    "Local",  # made by the dispatcher alone
    "Inbox",
    "Member",
    "answer",
    "keep_private",
    "kept_local_atoms",
    "local_atoms",
    "make_key",
    "private_store",
    "two_phases",
}
#: Files and folders; any text is one.
PATHS = {"checkpoint_dir", "state_dir"}
#: What is right: functions may be classes, and a path any text.
RIGHT = {
    *((key, "10**6") for key in (*WORK, "restarts", "n_iter", "num_nodes")),
    *((key, "10**30") for key in WORK),
    *((key, label) for key in PATHS for label in ("'no'", "''")),
    *((key, "type") for key in ("callback", "node_config", "start")),
}

MALFORMED: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "-1": lambda: -1,
    "0": lambda: 0,
    "10**6": lambda: 10**6,
    "10**30": lambda: 10**30,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-1.0": lambda: -1.0,
    "1e300": lambda: 1e300,
    "True": lambda: True,
    "'no'": lambda: "no",
    "''": lambda: "",
    "b'no'": lambda: b"no",
    "object": object,
    "[]": list,
    "{}": dict,
    "()": tuple,
    "[None]": lambda: [None],
    "[nan]": lambda: [float("nan")],
    "{0: None}": lambda: {0: None},
    "{'a': -1}": lambda: {"a": -1},
    "[[1], [1, 2]]": lambda: [[1.0], [1.0, 2.0]],
    "type": lambda: int,
    "complex": lambda: np.eye(K, dtype=complex),
    "0-d": lambda: np.array(1.0),
    "empty": lambda: np.zeros((0, 0)),
    "1-d": lambda: np.ones(3),
    "3-d": lambda: np.ones((2, 2, 2)),
    "(5, 7)": lambda: np.ones((5, 7)),
    "zeros": lambda: np.zeros((N, D)),
    "ints": lambda: np.ones((N, D), dtype=int),
    "objects": lambda: np.array([[None, "a"]], dtype=object),
    "huge": lambda: np.full((N, D), 1e200),
    "tiny": lambda: np.full((N, D), 1e-200),
}
#: Of an array also itself with one entry that is none, and without its last row.
CHANGED: dict[str, Callable[[Any], Any]] = {
    "NaN within": lambda value: _with(value, np.nan),
    "inf within": lambda value: _with(value, np.inf),
    "-1 within": lambda value: _with(value, -1.0),
    "a row less": lambda value: value[:-1],
    "a column less": lambda value: value[..., :-1],
    "one more axis": lambda value: value[None],
    "float16": lambda value: value.astype(np.float16),
}


def _with(value: Any, entry: float) -> Any:
    changed = np.array(value, float)
    changed.flat[0] = entry
    return changed


def _is_record(called: Any) -> bool:
    protocol = getattr(called, "_is_protocol", False)
    kinds = tuple | dict | Exception | strategies.Learned  # nobody makes a result
    return isinstance(called, type) and (
        issubclass(called, kinds) or protocol or inspect.isabstract(called)
    )


class _Untrained(NumPyClient):
    """Returns the model as it is."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 1, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return 0.0, 1, {}


#: Of which classes methods are called, each of an instance; class methods are of all classes.
MADE: dict[str, Callable[[], Any]] = {
    **{
        name: partial(getattr(dictionary, name), K)
        for name in dictionary.__all__
        if name.endswith("Learner") and name != "Learner"
    },
    "DataDiffusion": lambda: network.DataDiffusion(K, n_nonzero=1),
    "LogisticLoss": regression.LogisticLoss,
    "PrivateState": lambda: clients.PrivateState(_context(), "run"),
    "PublicBasis": lambda: privacy.PublicBasis(np.eye(2, D)),
    "RidgeModel": lambda: regression.RidgeModel(_features(), np.ones((1 + D, 2)), 2),
    "RandomQuantization": lambda: network.RandomQuantization(4),
    "RegressionClient": lambda: clients.RegressionClient(_normal(N, D), _normal(N), _context()),
    "SquaredLoss": regression.SquaredLoss,
    "TopK": lambda: network.TopK(0.5),
    "Topology": lambda: RING,
    "TwoPhase": regression.TwoPhase,
}
#: What only the library calls: methods with these arguments, which come in messages, and others.
MESSAGES = {"config", "parameters", "request", "sent", "sums"}
INNER = {
    *("level", "steps", "weights", "values", "gradient", "curvature", "encode"),
    *(
        "DataDiffusion.adapted",
        "DataDiffusion.program",
    ),
    *(
        "TwoPhase.adapts",
        "TwoPhase.sent_options",
        "ServerSettings.of",
        "Schedule.of",
    ),
}


def _methods() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Yield the methods that users call, by room and name."""
    for room in ROOMS:
        for kind in room.__all__:
            owner = getattr(room, kind)
            for name in dir(owner) if isinstance(owner, type) else ():
                called = getattr(MADE.get(kind, lambda owner=owner: owner)(), name, None)
                if name[0] == "_" or not inspect.ismethod(called):
                    continue
                keys = inspect.signature(called).parameters.keys()
                if keys and not (keys & MESSAGES or {name, f"{kind}.{name}"} & INNER):
                    yield room.__name__.split(".")[-1], f"{kind}.{name}", called
    for objective in (network.SparseSVD(0.1, 0.1), network.HuberNMF(0.1, 0.1, 0.5)):
        name = f"ModelDiffusion({type(objective).__name__}).fit"
        yield "network", name, network.ModelDiffusion(objective, n_iterations=3).fit
    for name in ("start", "grow", "partial_fit", "infer"):
        yield "network", f"ModelDiffusion.{name}", getattr(MODEL, name)


def callables() -> dict[str, tuple[str, Callable[..., Any]]]:
    """Return all public callables by name, each with its room."""
    found = {name: (room, method) for room, name, method in _methods()}
    for room in ROOMS:
        for name in sorted(set(room.__all__) - LEFT_OUT):
            called = getattr(room, name)
            function = inspect.isroutine(called) or isinstance(called, type)
            if function and not _is_record(called) and inspect.signature(called).parameters:
                found[name] = room.__name__.split(".")[-1], called
    return found


def unreached() -> list[str]:
    """Return the public functions, classes and methods that are not called."""
    reached, found = callables(), set[str]()
    for room in ROOMS:
        for name in room.__all__:
            owner = getattr(room, name)
            if not callable(owner) or getattr(owner, "_is_protocol", False):
                continue
            found.add(name)
            if isinstance(owner, type):
                own = [key for key in vars(owner) if key[0] != "_"]
                found |= {f"{name}.{key}" for key in own if inspect.isroutine(vars(owner)[key])}
    return sorted(found - reached.keys())


def _options(kind: str) -> dict[str, Any]:
    """Return the defaults of a call's ``**options``, where their kind is known."""
    if "ServerOptions" in kind:
        own = set(strategies.ServerOptions.__annotations__) - {"server"}
        return {
            field.name: field.default
            for field in fields(strategies.ServerSettings)
            if field.name in own
        }
    return valid("LearnerClient", clients.LearnerClient) if "LearnerOptions" in kind else {}


def valid(name: str, called: Callable[..., Any]) -> dict[str, Any]:
    """Return all arguments of a valid call."""
    arguments = {}
    for key, parameter in inspect.signature(called).parameters.items():
        make = OWN.get(name, {}).get(key)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= _options(str(parameter.annotation))
            continue
        if make is None and parameter.default is inspect.Parameter.empty:
            make = VALID[key]
        arguments[key] = parameter.default if make is None else make()
    return arguments | {key: make() for key, make in OWN.get(name, {}).items()}


def call(called: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Return the result; that of a generator is all that it yields."""
    result = called(**arguments)
    return list(result) if inspect.isgenerator(result) else result


def _stop(*_: Any) -> None:
    raise TimeoutError


def _numbers(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the arrays of a result."""
    if isinstance(value, np.ndarray | float):
        yield np.asarray(value)
    elif isinstance(value, list | tuple) and depth:
        for one in value:
            yield from _numbers(one, depth - 1)


def _kept(arguments: dict[str, Any]) -> Any:
    return {key: [a.tobytes() for a in _numbers(value)] for key, value in arguments.items()}


def finding(
    called: Callable[..., Any], arguments: dict[str, Any], key: str, also: set[str] = frozenset()
) -> str | None:
    """Return what is wrong with the answer to a call in which ``key`` is malformed, or None."""
    before = _kept(arguments)
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            result = call(called, arguments)
    except TimeoutError:
        return f"over {LIMIT:g} seconds"
    except (ValueError, TypeError) as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        frame, at = list(traceback.walk_tb(error.__traceback__))[-1][0], error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        raised = at is not None and dis.opname[frame.f_code.co_code[at.tb_lasti]] == "RAISE_VARARGS"
        said = f"{type(error).__name__}: {error}"
        if "flwr_perdl" not in frame.f_globals.get("__name__", "") or not raised:
            return f"not our own {said} ({frame.f_globals.get('__name__')}:{frame.f_lineno})"
        if not any(re.search(rf"\b{re.escape(name)}\b", str(error)) for name in {key, *also}):
            return f"unnamed {said}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    else:
        if type(arguments.get(key)) is object:
            return "taken"
        if any(a.dtype.kind in "fc" and np.isnan(a).any() for a in _numbers(result)):
            return "NaN in the result"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None if _kept(arguments) == before else "an argument was modified"


def draws(seed: int) -> Iterator[tuple[str, str, str, str, str | None]]:
    """Yield without end: room, callable, argument, what it is instead, and the finding if any."""
    rng, all_of = np.random.default_rng(seed), callables()
    for name, (_, called) in all_of.items():
        call(called, valid(name, called))  # compiled here, where no time is measured
    while True:
        for name in rng.permutation(list(all_of)).tolist():
            room, called = all_of[name]
            arguments = valid(name, called)
            arrays = [key for key, value in arguments.items() if isinstance(value, np.ndarray)]
            key = str(rng.choice(list(arguments)))
            value = arguments[key]
            label = str(rng.choice([*MALFORMED, *(CHANGED if key in arrays else ())]))
            if (key, label) in RIGHT:
                continue
            with np.errstate(over="ignore"):
                new = CHANGED[label](value) if label in CHANGED else MALFORMED[label]()
            arguments[key] = new
            also = {ALSO.get(f"{name}.{key}") or ALSO.get(key, key)}
            if isinstance(new, int | float | np.ndarray) and not isinstance(new, bool):
                also |= set(arguments)  # of two that do not fit either may be the wrong one
            yield room, name, key, label, finding(called, arguments, key, also)


def main(seconds: float) -> int:
    """Draw calls for so long, print every finding once, and return their number."""
    end, found, count, seed = time.monotonic() + seconds, {}, 0, secrets.randbits(32)
    for room, name, key, label, wrong in draws(seed):
        count += 1
        if wrong is not None and (name, key, label) not in found:
            found[name, key, label] = wrong
            print(f"{room}.{name}({key}={label}): {wrong}", flush=True)
        if time.monotonic() > end:
            break
    print(f"Not reached: {', '.join(unreached())}.")
    print(f"{count} calls (seed {seed}), {len(found)} findings")
    return len(found)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])) > 0)
