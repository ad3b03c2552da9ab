"""The wheel and the sdist, and a foreign Flower project that uses the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent

# The host project has packages of its own that are called like ours.
HOST_PACKAGES = ("clients", "simulations", "strategies")

COMMON = """
import sys
from importlib.util import find_spec

import numpy as np
from flwr.app import Context, RecordDict
from flwr.simulation import run_simulation

import clients, simulations, strategies
from flwr_perdl.clients import DictionaryClient
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA

assert {package.OWNER for package in (clients, simulations, strategies)} == {"host"}


def make_client(context):
    rng = np.random.default_rng([7, context.node_config["partition-id"]])
    return DictionaryClient(rng.standard_normal((40, 6)), OrthogonalLearner(4), context)


def strategy():
    return PerMA(n_global=2, num_clients=3, seed=5)


def save(arrays):
    np.save(sys.argv[1], arrays[0])


def run(server_app, client_app):
    if find_spec("ray"):
        resources = {"client_resources": {"num_cpus": 1}}
        run_simulation(server_app, client_app, 3, backend_config=resources)
    else:
        context = Context(1, 1, {}, RecordDict(), {})
        server_app(InProcessGrid(client_app, 3), context)
"""

NEW = """
from common import make_client, run, save, strategy
from flwr.serverapp import ServerApp

from flwr_perdl.clients import client_app

server_app = ServerApp()


@server_app.main()
def main(grid, context):
    save(strategy().start(grid, num_rounds=3).arrays.to_numpy_ndarrays())


if __name__ == "__main__":
    run(server_app, client_app(make_client))
"""

LEGACY = """
from common import make_client, run, save, strategy
from flwr.client import ClientApp
from flwr.server import ServerApp, ServerAppComponents, ServerConfig

from flwr_perdl.strategies import as_legacy


def keep(round_, arrays):
    if arrays:
        save(arrays)


def server_fn(context):
    return ServerAppComponents(
        strategy=as_legacy(strategy(), evaluate_fn=keep), config=ServerConfig(num_rounds=3)
    )


if __name__ == "__main__":
    run(
        ServerApp(server_fn=server_fn),
        ClientApp(client_fn=lambda context: make_client(context).to_client()),
    )
"""


def execute(*command: str | Path, cwd: Path) -> None:
    """Run a command that must succeed; its output is part of the failure's message."""
    environment = os.environ | {
        "FLWR_HOME": str(cwd / "flwr-home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OPENBLAS_NUM_THREADS": "1",
        # What this checkout is must not be what the foreign project finds; Ray's workers start
        # elsewhere and find the project's modules here.
        "PYTHONPATH": str(cwd),
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    execute(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel, and this environment's libraries."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=True)
    layout = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", layout))
    # Paths from a .pth file come after the environment's own, and .pth files there are not read:
    # an editable install of this checkout does not come along.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = Path(sysconfig.get_path("scripts", "venv", layout)) / "python"
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", python)
    execute(*pip, "install", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=folder)
    return python


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for package in HOST_PACKAGES:
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text('OWNER = "host"\n')
    for name, source in {"common": COMMON, "new": NEW, "legacy": LEGACY}.items():
        (folder / f"{name}.py").write_text(source)
    return folder


def test_the_wheel_has_the_package_and_its_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    packages = {"flwr_perdl", "perdl_experiments"}
    sources = [file for name in packages for file in (ROOT / name).rglob("*.py")]
    assert {str(file.relative_to(ROOT)) for file in sources} | {"flwr_perdl/py.typed"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == packages
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    headers = message_from_bytes(archive.read(metadata))
    core = {line for line in headers.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {line.split("<")[0].split(">")[0] for line in core} == {"flwr", "numpy", "scipy"}
    assert headers["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_sdist_has_what_a_developer_needs(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", ".ci/run"}
    assert wanted <= files
    assert {"flwr_perdl/py.typed", "tests/test_wheel.py", "docs/conventions.md"} <= files
    assert not {name for name in files if name.startswith((".venv", "runs/"))}


def test_the_wheel_is_what_a_fresh_environment_imports(python: Path, project: Path) -> None:
    where = "import flwr_perdl, sys; sys.exit(not flwr_perdl.__file__.startswith(sys.prefix))"
    execute(python, "-c", where, cwd=project)


def test_a_foreign_project_runs_new_style_and_legacy(python: Path, project: Path) -> None:
    execute(python, "new.py", "new.npy", cwd=project)
    execute(python, "legacy.py", "legacy.npy", cwd=project)
    new, legacy = np.load(project / "new.npy"), np.load(project / "legacy.npy")
    assert new.shape == (2, 6)
    np.testing.assert_allclose(np.linalg.norm(new, axis=1), 1, rtol=1e-12)
    np.testing.assert_array_equal(new, legacy)
