"""``flwr-perdl diagnose``: which strategy serves the clients of a Flower app in a folder."""

from __future__ import annotations

import re
import sys
import tomllib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app
from flwr_perdl.core.checks import brief_repr
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import Diagnosed, Diagnosis, TooFewReplies
from perdl_experiments.terminal import is_plain

#: Nodes where neither the command nor the app says how many.
NODES = 10


def diagnose_app(
    folder: Path,
    initial: str,
    *,
    clients: int | None = None,
    rounds: int = 40,
    private: Sequence[str] = (),
    metric: str = "loss",
    higher_is_better: bool | None = None,
    train_config: Sequence[str] = (),
    candidates: Sequence[str] = (),
    seed: int = 0,
) -> Diagnosed:
    """Return what `Diagnosis` finds on a Flower app, in process.

    Parameters
    ----------
    folder : Path
        The app's folder, with its pyproject.toml.
    initial : str
        ``"module:name"`` of the initial arrays: an ArrayRecord, what has a ``state_dict()``, a list
        of arrays, or a function without arguments that returns one of these.
    clients : int, optional
        Number of clients; by default the app's ``num-supernodes``, or 10.
    train_config : sequence of str
        ``"key=value"``, values as in TOML: what the server sends with every training.
    candidates : sequence of str
        ``"module:name"`` of functions as in ``Diagnosis.candidates``, which join the defaults.
    rounds, private, metric, higher_is_better, seed
        See `Diagnosis`.

    Raises
    ------
    ValueError
        If the folder has no app, a name is not there, ``train_config`` is not TOML or lacks a key
        that the app reads, or `Diagnosis` rejects an option.
    """
    trains = _config(train_config)
    file = folder / "pyproject.toml"
    if not file.is_file():
        raise ValueError(f"APP_FOLDER must have a pyproject.toml, got {str(folder)!r}.")
    said = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("flwr", {})
    app = said.get("app", {})
    if "clientapp" not in app.get("components", {}):
        raise ValueError(f"{file} must name a clientapp in [tool.flwr.app.components].")
    sys.path.insert(0, str(folder.resolve()))
    try:
        own = {name: _named("candidate", name) for name in candidates}
        client = _named("clientapp", app["components"]["clientapp"])
        if (torch := sys.modules.get("torch")) is not None:
            torch.manual_seed(seed)  # of the initial model
        start = _record(initial)
    finally:
        sys.path.pop(0)
    if not isinstance(client, ClientApp):
        raise ValueError(f"clientapp must be a ClientApp, got {type(client).__name__}.")
    diagnosis = Diagnosis(
        private or None,
        metric=metric,
        higher_is_better=higher_is_better,
        candidates=Diagnosis.defaults | own if own else None,
        seed=seed,
    )
    config = dict(_flat(app.get("config", {})))
    grid = InProcessGrid(client_app(client), clients or _nodes(said), run_config=config)
    try:
        shown = "quiet" if is_plain() else "bar"  # whose redraws are no use in a pipe
        diagnosis.start(grid, start, rounds, train_config=trains, verbose=shown)
    except TooFewReplies as error:
        lacking = re.search(r"KeyError: '([^']+)'", str(error))
        if lacking is None or lacking[1] in trains:
            raise
        raise ValueError(
            "train_config must have the keys that the app reads from its config, got none called "
            f"{lacking[1]!r}: add --train-config '{lacking[1]}=VALUE'. {error}"
        ) from error
    return diagnosis.result


def _named(what: str, name: str) -> Any:
    """Return what ``"module:name"`` stands for."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} must be 'module:name', got {name!r}: {error}.") from None


def _record(initial: str) -> ArrayRecord:
    """Return the initial arrays."""
    given = _named("initial", initial)
    try:
        if callable(given) and not hasattr(given, "state_dict"):
            given = given()
        if isinstance(given, type):
            given = given()
        given = given.state_dict() if hasattr(given, "state_dict") else given
        return given if isinstance(given, ArrayRecord) else ArrayRecord(given)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            "initial must name an ArrayRecord, a model with state_dict(), a list of arrays, or a "
            "function without arguments that returns one, got "
            f"{initial!r}, {brief_repr(given)}: {error}."
        ) from error


def _config(given: Sequence[str]) -> ConfigRecord:
    """Return what is given as ``key=value``, by commas or one by one."""
    text = ", ".join(given)
    try:
        return ConfigRecord(dict(_flat(tomllib.loads(f"config = {{{text}}}")["config"])))
    except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
        raise ValueError(
            f"train_config must be 'key=value, ...' as in TOML, got {text!r}: {error}."
        ) from None


def _flat(config: Mapping[str, Any], prefix: str = "") -> Any:
    """Yield a run config's keys as Flower has them, with dots."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nodes(said: Mapping[str, Any]) -> int:
    """Return how many nodes the app's federation has."""
    federations = said.get("federations", {})
    options = federations.get(str(federations.get("default")), {}).get("options", {})
    return int(options.get("num-supernodes", NODES))


def report(found: Diagnosed, picture: Path) -> str:
    """Return an HTML page with the recommendation, the table, the code, and the picture."""
    image = b64encode(picture.read_bytes()).decode()
    return (
        '<!doctype html><meta charset="utf-8"><title>Diagnosis</title>'
        f'{found._repr_html_()}<img alt="" width="800" src="data:image/png;base64,{image}">\n'
    )


def picture(found: Diagnosed) -> Any:
    """Return the drawing of every client's metric by candidate, those who are alike together."""
    from perdl_experiments import pictures  # an extra

    order = sorted(range(len(found.clients)), key=lambda i: found.groups.get(found.clients[i], -1))
    rows = [f"{found.clients[i]} (group {found.groups.get(found.clients[i], '-')})" for i in order]
    values = np.stack(list(found.values.values()), axis=1)[order]
    most, better = max(found.rounds.values()), found.higher_is_better
    columns = [f"{n} (stopped early)" if found.rounds[n] < most else n for n in found.values]
    return pictures.heat_map(values, rows, columns, higher_is_better=better)
