"""What all tests share: a quiet private Flower, and small planted federations."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from flwr.app import Context
from hypothesis import HealthCheck, settings

from benchmarks._deployment import free_port
from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import Learner, OrthogonalLearner
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA
from perdl_experiments.data import Planted, planted_clients

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")

# A change must not pass or fail by luck, nor by the machine's speed; `make fuzz` draws at random.
settings.register_profile(
    "fuzz",
    derandomize=False,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fixed", settings.get_profile("fuzz"), derandomize=True, max_examples=50)
settings.load_profile("fixed")
#: How many times the examples of `make test` each test draws in one pass of `make fuzz`.
MORE = 5

HAS_RAY = find_spec("ray") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, and count, what needs Ray where Ray is not installed; begin with what waits longest.

    Deployments wait for processes to start and for nodes to report: beside them, the other worker
    goes through everything else.
    """
    items.sort(key=lambda item: item.get_closest_marker("deployment") is None)
    for item in items:
        if item.get_closest_marker("ray") and not HAS_RAY:
            item.add_marker(pytest.mark.skip(reason="Flower's simulation extra is not installed"))
    if config.getoption("--hypothesis-profile") == "fuzz":
        # A test's own max_examples goes before the profile's; hypothesis has no public way around.
        name = "_hypothesis_internal_use_settings"
        for test in {item.obj for item in items if item.get_closest_marker("hypothesis")}:
            own = getattr(test, name)
            setattr(test, name, settings(own, max_examples=MORE * own.max_examples))


@pytest.fixture(autouse=True, scope="session")
def _private_flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Flower and Ray keep their files in folders of this process's tests.

    Ray connects to whatever cluster its folder names: one that other tests run, or that has died.
    Its sockets' paths must be short, so that the folder is not one of pytest's.
    """
    os.environ["FLWR_HOME"] = str(tmp_path_factory.mktemp("flwr"))
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        yield


@pytest.fixture(scope="session")
def flower_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return an environment for Flower's commands with a home of their own.

    `flwr run` starts a SuperLink that stays; it is ended at the end.
    """
    home = tmp_path_factory.mktemp("flower-home")
    yield {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "FLWR_LOCAL_SUPERLINK_PORT": str(free_port()),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    subprocess.run(["pkill", "-f", str(home)], check=False)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Return what Flower's logger warns of; it does not propagate, unless a test made it."""
    logger = logging.getLogger("flwr")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagates


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Return all that Flower's logger says; nothing is shown."""
    monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, "flwr")
    return caplog


class Federation(NamedTuple):
    """A small federation with planted dictionaries."""

    planted: Planted
    make_client: Callable[[Context], DictionaryClient]

    def grid(self, **options: Any) -> InProcessGrid:
        """Return an in-process grid of all its clients."""
        return InProcessGrid(client_app(self.make_client), len(self.planted.samples), **options)

    def learn(self, strategy: PerMA, rounds: int = 4, **options: Any) -> np.ndarray:
        """Run the strategy in process and return the global atoms."""
        result = strategy.start(self.grid(**options), num_rounds=rounds)
        return result.arrays.to_numpy_ndarrays()[0]


@pytest.fixture
def federation() -> Callable[..., Federation]:
    """Return a maker of federations: ``federation(n_clients=…, noise=…)``."""

    def make(
        n_clients: int = 5,
        *,
        seed: int = 0,
        n_global: int = 3,
        learner: Learner | None = None,
        n_samples: int = 200,
        min_support: int = 3,
        **options: Any,
    ) -> Federation:
        planted = planted_clients(
            np.random.default_rng(seed),
            [6] * n_clients,
            [n_samples] * n_clients,
            n_global,
            n_features=6,
            **options,
        )
        local = learner or OrthogonalLearner(6)

        def make_client(context: Context) -> DictionaryClient:
            X = planted.samples[int(context.node_config["partition-id"])]
            return DictionaryClient(X, local, context, min_support=min_support)

        return Federation(planted, make_client)

    return make
