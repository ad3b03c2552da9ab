"""Clients in the form of Flower's examples, on every engine.

``advanced-pytorch`` keeps its classification head in ``context.state`` and restores it before each
training and evaluation; ``quickstart-huggingface`` returns the arrays with an evaluation;
``fedbn`` keeps batch normalization in ``context.state``, and names its data set in the reply.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from benchmarks._deployment import Deployment
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import (
    ClusteredFedAvg,
    Diagnosis,
    DiffusionAveraging,
    Ditto,
    PersonalizedFedAvg,
    ServerSettings,
)
from tests.engines import on_ray, project

PROJECT = '''\
import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_perdl.clients import client_app
from flwr_perdl.network import Topology
from flwr_perdl.strategies import (
    ClusteredFedAvg, DiffusionAveraging, Ditto, PersonalizedFedAvg, ServerSettings
)

app = ClientApp()
PATTERNS = {"advanced": "fc2.", "huggingface": "", "fedbn": "bn."}
NAMES = ("net.weight", "fc2.bias", "bn.shift")


def load(message, context):
    """Return the model with what this client keeps, the name of that, and data."""
    pattern = message.content["config"]["pattern"]
    i, own = int(context.node_config["partition-id"]), PATTERNS[pattern]
    model = {name: array.numpy() for name, array in message.content["arrays"].items()}
    if own and own in context.state:
        model.update({name: array.numpy() for name, array in context.state[own].items()})
    rng = np.random.default_rng(i)
    X = rng.standard_normal((40, 3))
    y = X @ [1.0, -1.0, 0.5 + i] + 3 * i + 0.1 * rng.standard_normal(40)
    return model, own, X, y


def errors(model, X, y):
    """Return the model's errors."""
    return X @ model["net.weight"] + model["fc2.bias"] + model["bn.shift"] - y


@app.train()
def train(message, context):
    """Restore the own layer, train, keep it, and return the model."""
    model, own, X, y = load(message, context)
    for _ in range(5):
        wrong = errors(model, X[:20], y[:20])
        step = {"net.weight": X[:20].T @ wrong / 20, "fc2.bias": wrong.mean(keepdims=True)}
        step["bn.shift"] = 0.5 * step["fc2.bias"]
        model = {name: array - 0.1 * step[name] for name, array in model.items()}
    record = ArrayRecord({name: Array(array) for name, array in model.items()})
    if own:
        kept = {name: array for name, array in record.items() if name.startswith(own)}
        context.state[own] = ArrayRecord(kept)
    metrics = MetricRecord({"num-examples": 20, "train_loss": float(np.mean(wrong**2))})
    return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    """Restore the own layer, and evaluate; what else the reply has is the pattern's."""
    model, own, X, y = load(message, context)
    wrong = errors(model, X[20:], y[20:])
    loss = float(np.mean(wrong**2))
    mae = float(np.abs(wrong).mean())
    metrics = MetricRecord({"num-examples": 20, "eval_loss": loss, "mae": mae})
    content = RecordDict({"metrics": metrics})
    if message.content["config"]["pattern"] == "huggingface":
        content["arrays"] = ArrayRecord({name: Array(array) for name, array in model.items()})
    if own == "bn.":
        content["about"] = ConfigRecord({"data-set": f"site {context.node_config['partition-id']}"})
    return Message(content, reply_to=message)


client = client_app(app)


def strategies(pattern, few):
    """Yield strategies that fit a pattern."""
    options = {"server": ServerSettings(evaluate_every=2), "num_clients": 2}
    own = ["net.weight"] if pattern == "fedbn" else ["fc2.*"]
    yield "personalized", PersonalizedFedAvg(own, fine_tune=1, **options)
    if pattern == "advanced" and not few:
        yield "clustered", ClusteredFedAvg(2, fine_tune=2, **options)
        yield "averaging", DiffusionAveraging(Topology.complete(2), fine_tune=2, num_clients=2)
        yield "ditto", Ditto(fine_tune=2, **options)


def first():
    """Return the first model."""
    zeros = {"net.weight": np.zeros(3), "fc2.bias": np.zeros(1), "bn.shift": np.zeros(1)}
    return ArrayRecord({name: Array(array) for name, array in zeros.items()})


def serve(grid, few=False):
    """Run the strategies, and return what the clients measured last."""
    found = {}
    for pattern in PATTERNS:
        config = ConfigRecord({"pattern": pattern})
        for name, one in strategies(pattern, few):
            configs = {"train_config": config, "evaluate_config": config}
            one.start(grid, first(), num_rounds=2, **configs)
            last = [report for report in one.history if report.step in ("evaluate", "tune")]
            reports = [[report.step, report.metrics, report.dropped] for report in last]
            found[f"{pattern}, {name}"] = json.loads(json.dumps(reports))
    return found


server = ServerApp()


@server.main()
def main(grid, context):
    folder = Path(context.run_config["out"])
    (folder / "found.json").write_text(json.dumps(serve(grid, few=True)))
'''


def in_process() -> Any:
    """Return what is found in this process."""
    app = project(PROJECT)
    return app["serve"](InProcessGrid(app["client"], 2))


def test_in_process() -> None:
    found = in_process()
    for name, reports in found.items():
        assert not any(dropped for *_, dropped in reports), name
        step, metrics, _ = reports[-1]
        assert (step, [*metrics]) == ("tune", ["0", "1"])
        for own in metrics.values():
            assert own["eval_loss"] <= own["eval_loss-before"]
    before = found["fedbn, personalized"][0][1]
    assert [own["data-set"] for own in before.values()] == ["site 0", "site 1"]


@pytest.mark.slow
@pytest.mark.ray
def test_on_flowers_simulation() -> None:
    app = project(PROJECT)
    assert on_ray(app["client"], app["serve"], 2) == in_process()


@pytest.mark.slow
@pytest.mark.deployment
def test_on_two_supernodes(tmp_path: Path) -> None:
    with Deployment(tmp_path / "run", 2, app=PROJECT) as deployment:
        deployment.run({"out": str(tmp_path)}, timeout=400)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 3
    assert found == {name: own for name, own in in_process().items() if name in found}


# Layers in context.state

ADVANCED: dict[str, Any] = dict.fromkeys(
    ("train_config", "evaluate_config"), ConfigRecord({"pattern": "advanced"})
)


def own_loss(app: dict[str, Any], client: int, model: ArrayRecord) -> float:
    """Return a client's loss of a model, without what it keeps."""
    content = RecordDict({"arrays": model, "config": ADVANCED["train_config"]})
    message = Message(content, 1, "evaluate")
    context = Context(1, 1, {"partition-id": client}, RecordDict(), {})
    own, _, X, y = app["load"](message, context)
    return float(np.mean(app["errors"](own, X[20:], y[20:]) ** 2))


@pytest.mark.parametrize(
    "strategy",
    [
        lambda topology: ClusteredFedAvg(2, start_rounds=2, fine_tune=6),
        lambda topology: PersonalizedFedAvg(["bn.*"], fine_tune=6),
        lambda topology: Ditto(fine_tune=6),
        lambda topology: DiffusionAveraging(topology.complete(4), fine_tune=6),
        lambda topology: DiffusionAveraging(
            topology.complete(4), groups="auto", local_rounds=1, fine_tune=6
        ),
    ],
    ids=["clustered", "personalized", "ditto", "averaging", "groups"],
)
def test_what_is_measured_is_what_model_of_gives(strategy: Any) -> None:
    """Each training's own layer goes with its model, whatever was evaluated in between."""
    app = project(PROJECT)
    one = strategy(app["Topology"])
    one.start(InProcessGrid(app["client"], 4), app["first"](), num_rounds=3, **ADVANCED)
    (report,) = (report for report in one.history if report.step == "tune")
    kept = {client: own for client, own in report.metrics.items() if own["fits-kept"]}
    assert kept
    for client, own in kept.items():
        model = one.result.model_of(client)
        assert own_loss(app, client, model) == pytest.approx(own["eval_loss"], rel=1e-9)


def test_candidates_of_a_diagnosis_train_as_they_do_alone() -> None:
    """Those that are stopped and taken up again, too, with what the app keeps in its state."""
    app, reports = project(PROJECT), list[Any]()
    options: dict[str, Any] = {"num_clients": 4, "seed": 3}
    grid = InProcessGrid(app["client"], 4)
    own = {
        "fedavg": lambda *_, **more: ClusteredFedAvg(1, **more),
        "ditto": lambda *_, **more: Ditto(**more),
    }
    diagnosis = Diagnosis(candidates=own, **options, on_round=reports.append)
    diagnosis.start(grid, app["first"](), 6, **ADVANCED)
    alone = Ditto(**options, server=ServerSettings(evaluate_every=1))
    alone.start(InProcessGrid(app["client"], 4), app["first"](), 6, **ADVANCED)
    third = len(alone.history) // 3  # then comes the rest of the other candidate, and its own
    last = [*reports[third : 2 * third], *reports[-2 * third :]]
    assert [one.metrics for one in last] == [one.metrics for one in alone.history]
