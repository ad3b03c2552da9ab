"""A server that learns a private intercept from exact losses of models that it chooses.

Of a linear model without a slope the loss is c - 2 b m + b^2 with the intercept b: two values of b
give c and m, and a third loss, with the client's own b, gives that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from flwr_perdl.clients import adapt, client_app, keep_private
from flwr_perdl.network.messages import Delivery
from flwr_perdl.strategies import PersonalizedFedAvg
from tests.attacks.test_routes import ABOUT
from tests.grids import Tapped, as_app, asks, context_of, partition_of

NAMES = ["slope", "intercept"]
UNTRAINED, NO_EVALUATE = 4503, 4501


class Linear(NumPyClient):
    """Fits an intercept; a client's own data are apart from others'."""

    def __init__(self, context: Context) -> None:
        self.y = np.random.default_rng(partition_of(context)).standard_normal(20) + 3

    def fit(self, parameters: Any, config: Any) -> Any:
        slope, b = parameters
        return [slope, b + 0.3 * (self.y.mean() - b)], 20, {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(((self.y - parameters[1]) ** 2).mean()), 20, {}


def with_mod(app: ClientApp) -> ClientApp:
    found = ClientApp(mods=[keep_private("intercept")])
    found.train()(app)
    found.evaluate()(app)
    return found


PART: Any = {"private": ["intercept"]}
APPS: dict[str, Callable[..., Any]] = {
    "client": lambda **o: client_app(Linear, names=NAMES, **PART, **o),
    "app": lambda **o: client_app(as_app(Linear), **PART, **o),
    "mod": lambda **o: client_app(with_mod(as_app(Linear)), **o),
    "left to the server": lambda **o: client_app(Linear, **o),
}
ABOUT_US = {**ABOUT, "arrays": [["slope", [1], "<f8"], ["intercept", [], "<f8"]]}
NODE = {"perdl.protocol": "diffusion_averaging", "perdl.averaging": json.dumps(ABOUT_US)}
TUNE = {"perdl.step": "tune", "perdl.n-fits": 0, "prefix": "0/"}
#: How a server asks for the loss of a model that it sends.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "evaluate": ("evaluate", {}),
    "measure": (
        "train",
        {"perdl.protocol": "clustered", "perdl.step": "measure-models", "prefix": "0/"},
    ),
    "clustered": (
        "evaluate",
        {"perdl.protocol": "clustered", "perdl.step": "evaluate", "prefix": "0/"},
    ),
    "ditto": ("evaluate", {"perdl.protocol": "ditto", "perdl.step": "evaluate"}),
    "tune": ("train", {"perdl.protocol": "own_models", **TUNE}),
    "ditto's tune": ("train", {"perdl.protocol": "ditto", **TUNE}),
    "node's tune": ("train", {"perdl.protocol": "diffusion_averaging", **TUNE}),
    "node": ("evaluate", {}),
    "half floats": ("evaluate", {"perdl.transport": '{"half": true, "share": null}'}),
    "earlier round": ("evaluate", {"server-round": 0, "perdl.run": "trained"}),
}


class Server:
    """One client's, which asks for what it likes; errors have their codes."""

    def __init__(self, app: Any, context: Context, *, left_out: bool) -> None:
        self.app, self.context, self.round = app, context, 0
        self.left_out = {"perdl.left-out": '["intercept"]'} if left_out else {}
        self.codes: set[int] = set()

    def ask(self, kind: str, run: str, b: float, **config: Any) -> Mapping[str, Any]:
        """Return the reply's records, none where it is an error."""
        self.round += 1
        arrays = {"slope": np.zeros(1), config.pop("called", "intercept"): np.array(b)}
        prefix = config.pop("prefix", "")
        told = {"server-round": self.round, "perdl.run": run, "perdl.seed": 0}
        told |= {**self.left_out, **config}
        record = ArrayRecord({f"{prefix}{name}": Array(array) for name, array in arrays.items()})
        if "perdl.averaging" in told:
            record = ArrayRecord(Delivery(start=[*arrays.values()]).to_arrays())
        content = RecordDict({"arrays": record, "config": ConfigRecord(told)})
        reply = self.app(asks(content, kind=kind), self.context)
        if reply.has_error():
            self.codes.add(reply.error.code)
            return {}
        return reply.content

    def loss(self, way: str, run: str, b: float) -> float:
        """Return the loss of a model that the server has sent, NaN where there is none."""
        kind, config = WAYS[way]
        content = self.ask(kind, run, b, **config)
        if not content:
            return np.nan
        if way == "measure":
            return float(next(iter(content["arrays"].values())).numpy()[0])
        name = "loss-before" if "tune" in way else "loss"
        return float(content["metrics"].get(name, content["metrics"].get("eval_loss")))


def follows(server: Server, way: str, *, before: bool) -> bool:
    """Whether the server finds the intercept; it asks for losses ``before`` training, or after."""
    losses: list[float] = []

    def ask() -> None:
        for b in (0.0, 1.0):
            run = f"fresh {b}"
            if way.startswith("node"):
                server.ask("train", run, b, **NODE, **{"perdl.step": "announce", "perdl.at": 0})
                run += "/app" * (way == "node")
            losses.append(server.loss(way, run, b))

    if before:
        ask()
    for _ in range(2):
        assert server.ask("train", "trained", 0.0)
    if not before:
        ask()
    c, m = losses[0], (losses[0] + 1 - losses[1]) / 2
    own = server.loss("evaluate", "trained", 0.0)
    roots = m + np.array([-1, 1]) * np.sqrt(m**2 - c + own)
    server.round = 99
    true = 0.51 * Linear(server.context).y.mean()
    return bool(np.isclose(roots, true, rtol=1e-9).any())


#: A server that decides what is private need not leave it out where it evaluates.
PAIRS = [
    (name, way) for name in APPS for way in WAYS if name != "left to the server" or "tune" in way
]


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_no_losses_of_models_that_a_server_chooses_tell_of_a_private_part(
    name: str, way: str, tmp_path: Path
) -> None:
    """As long as it has none, a client evaluates: asked then, the attack works (the control)."""
    left_out = name == "left to the server"
    if way != "earlier round" and not left_out:
        assert follows(Server(APPS[name](), context_of(1), left_out=left_out), way, before=True)
    context = context_of(1, **{"state-dir": str(tmp_path)})
    server = Server(APPS[name](), context, left_out=left_out)
    assert not follows(server, way, before=False)
    assert server.codes == {UNTRAINED}
    for restarted in (context, context_of(1, **{"state-dir": str(tmp_path)})):
        server.context = restarted
        assert np.isnan(server.loss(way, "after", 1.0))
    if name == "client":
        server.app = APPS[name](secure=True)
        assert np.isnan(server.loss("evaluate", "after", 1.0))


@pytest.mark.parametrize("name", ["client", "app", "mod"])
def test_a_whole_model_has_the_private_arrays_of_its_run(name: str) -> None:
    """A server gets no own value in by another name, nor with the part of a run inside."""
    server, tune = Server(APPS[name](), context_of(1), left_out=False), WAYS["tune"][1]
    assert server.ask("train", "run", 0.0)
    assert server.loss("tune", "run", 0.0) == server.loss("tune", "run", 9.0)
    with pytest.raises(ValueError, match="must be called 'slope', 'intercept'"):
        server.ask("train", "run", 9.0, **tune, called="other")
    assert server.ask("train", "inside/app", 0.0)
    assert np.isnan(server.loss("tune", "inside", 9.0))
    assert server.codes == {UNTRAINED}


@pytest.mark.parametrize("name", APPS)
def test_who_has_not_trained_in_a_run_is_not_asked_and_has_not_failed(name: str) -> None:
    grid = Tapped(APPS[name](), 6)

    def run(**options: Any) -> PersonalizedFedAvg:
        strategy = PersonalizedFedAvg(["intercept"], fraction_train=0.5, **options)
        start = ArrayRecord({n: Array(np.zeros(1)) for n in NAMES})
        strategy.start(grid, start, num_rounds=2, verbose="quiet")
        return strategy

    first = run().history
    assert [len(report.metrics) for report in first] == [3, 6, 3, 6]  # training, evaluation
    second = run(seed=1, fine_tune=1).history
    begun = {p for report in first[::2] for p in report.metrics}
    for at, report in enumerate(second):
        trained = {p for one in second[: at + 1] if one.step == "train" for p in one.metrics}
        assert report.metrics.keys() <= trained | (set(range(6)) - begun)
        assert (report.dropped, report.anomalies) == ({}, {})
        assert "perdl.no-finite-loss" not in report.aggregate
    assert len(second[1].metrics) < 6
    assert second[-1].step == "tune"


@pytest.mark.parametrize("app", [as_app(Linear), Linear])
def test_a_client_without_evaluation_sends_no_losses(app: Any) -> None:
    names = {"names": NAMES} if app is Linear else {}
    closed = client_app(app, evaluate=False, **PART, **names)
    server = Server(closed, context_of(1), left_out=False)
    assert np.isnan([server.loss(way, "run", 0.0) for way in WAYS if way != "node"]).all()
    assert server.codes == {NO_EVALUATE}
    with pytest.raises(ValueError, match=r"evaluate alone for a client with .*evaluate=False"):
        client_app(app, evaluate=False)(asks(RecordDict(), kind="evaluate.own"), context_of(1))
    grid = Tapped(closed, 3)
    start = ArrayRecord({name: Array(np.zeros(1)) for name in NAMES})
    with pytest.raises(ValueError, match="evaluate"):
        PersonalizedFedAvg(["intercept"], fine_tune=1).start(grid, start, num_rounds=1)
    assert {message.metadata.message_type for message in grid.asked} == {"query"}
    strategy = PersonalizedFedAvg(["intercept"])
    strategy.start(grid, start, num_rounds=2, verbose="quiet")
    assert [report.step for report in strategy.history] == ["train", "train"]
    assert [*grid.measured("loss"), *grid.measured("eval_loss")] == []
    own = adapt(closed, strategy.result, context_of(1), fits=3)  # at its site nothing leaves
    assert own["intercept"].numpy()[0] > 1
