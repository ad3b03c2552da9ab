"""The wheel and the sdist; environments that have nothing but the wheel and the extras asked for.

In such environments run a foreign Flower project, the Python blocks of README.md and the guides,
and the examples.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterable
from email import message_from_bytes
from email.message import Message
from functools import cache
from importlib.metadata import Distribution, distribution
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from packaging.requirements import Requirement

from flwr_perdl import __version__
from tests.examples.readme import EXAMPLES, copied, read, run, tells

pytestmark = [pytest.mark.slow, pytest.mark.environments]

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if "```python\n" in page.read_text() and page.name != "trackers.md"  # tests/test_trackers.py
]

# How a page says what its blocks need: extras, and other packages. What holds is the command above
# a block. And the blocks.
INSTALL = re.compile(
    r"pip install (?:-e )?(?:\.(?=[`\s])|'\.\[(?P<extras>[\w,]+)\]')(?P<others>(?: [\w-]+)*)"
)
BLOCK = re.compile(
    r"^(?:<!-- begin (?P<example>examples/[\w-]+)/\S+ -->\n)?```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

# Runs files, each in the folder that it is in; warnings are errors, as in the other tests.
RUN_ALL = """
import os, runpy, sys, traceback, warnings

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "'click.utils.get_", DeprecationWarning)  # typer's imports
warnings.filterwarnings("ignore", "Tip. In future versions of Ray", FutureWarning)
failed = 0
for path in sys.argv[1:]:
    folder = os.path.dirname(path)
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        runpy.run_path(path)
    except Exception:
        failed += 1
        traceback.print_exc()
    sys.path.remove(folder)
sys.exit(failed)
"""

BUILD = (sys.executable, "-m", "build", "--no-isolation")

# Imports that a server or a client on a cluster must not wait for.
HEAVY = {"PIL", "joblib", "matplotlib", "networkx", "skimage", "sklearn"}

# The host project has packages of its own that are called like ours.
HOST_PACKAGES = ("clients", "simulations", "strategies")

FOREIGN = """
import sys
from importlib.util import find_spec

import numpy as np
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

import clients, simulations, strategies
from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA

assert {package.OWNER for package in (clients, simulations, strategies)} == {"host"}
server_app = ServerApp()


def make_client(context):
    rng = np.random.default_rng([7, context.node_config["partition-id"]])
    return DictionaryClient(rng.standard_normal((40, 6)), OrthogonalLearner(4), context)


@server_app.main()
def main(grid, context):
    strategy = PerMA(n_global=2, num_clients=3, seed=5)
    np.save(sys.argv[1], strategy.start(grid, num_rounds=3).arrays.to_numpy_ndarrays()[0])


if __name__ == "__main__":
    app = client_app(make_client)
    if find_spec("ray"):
        resources = {"client_resources": {"num_cpus": 1}}
        run_simulation(server_app, app, 3, backend_config=resources)
    else:
        server_app(InProcessGrid(app, 3), Context(1, 1, {}, RecordDict(), {}))
"""


class Program(NamedTuple):
    """Python blocks that go together."""

    page: Path
    extras: str
    """Extras, and other packages after spaces, as in "privacy pandas"."""
    lines: list[str]
    """In the page's places, so that a traceback names the page's lines."""
    examples: set[str]
    """Folders of which the page shows files: its other blocks run beside these."""


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
    execute(*BUILD, "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


def metadata_of(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(archive.read(name))


def needed(lines: Iterable[str], extras: Iterable[str]) -> dict[str, Distribution]:
    """Return the installed distributions that requirements ask for, with all that these need."""
    found: dict[str, Distribution] = {}
    wanted = [(line, ("", *extras)) for line in lines]
    seen = set(wanted)
    while wanted:
        line, extras = wanted.pop()
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            found[requirement.name] = distribution(requirement.name)
            further = ("", *sorted(requirement.extras))
            new = {(line, further) for line in found[requirement.name].requires or ()} - seen
            seen |= new
            wanted += new
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what makes the interpreter of an environment of the wheel and a program's extras.

    Installing from an index takes a minute each time. Here the libraries are links to those of this
    environment: to the ones that the metadata ask for, directly or not, and to no other.
    """
    requirements = metadata_of(wheel).get_all("Requires-Dist", [])

    @cache
    def make(extras: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, with_pip=False, symlinks=True)
        layout = {"base": str(folder), "platbase": str(folder)}
        site = Path(sysconfig.get_path("purelib", "venv", layout))
        own, *others = extras.split(" ")
        for one in needed([*requirements, *others], own.split(",")).values():
            files = {site / file: Path(str(file.locate())) for file in one.files or ()}
            # uv lists no bytecode: without it every environment compiles its libraries anew.
            compiled = {
                Path(cache_from_source(str(link))): Path(cache_from_source(str(source)))
                for link, source in files.items()
                if link.suffix == ".py"
            }
            for link, source in {**files, **compiled}.items():
                if ".." not in link.parts and source.is_file() and not link.exists():
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(source)
        python = Path(sysconfig.get_path("scripts", "venv", layout)) / "python"
        pip = (sys.executable, "-m", "pip", "--quiet", "--python", python)
        execute(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
        execute(*pip, "check", cwd=folder)
        return python

    return make


def test_the_wheel_has_the_package_and_its_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    packages = {"flwr_perdl", "perdl_experiments"}
    sources = [file for name in packages for file in (ROOT / name).rglob("*.py")]
    assert {str(file.relative_to(ROOT)) for file in sources} | {"flwr_perdl/py.typed"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == packages
    headers = metadata_of(wheel)
    core = {line for line in headers.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {line.split("<")[0].split(">")[0] for line in core} == {
        "cryptography",
        "flwr",
        "numba",
        "numpy",
        "scipy",
    }
    assert headers["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert max(file.file_size for file in archive.infolist()) < 1_000_000


def test_the_sdist_has_what_a_developer_needs(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "pyproject.toml", ".ci/run"}
    assert wanted <= files
    assert {"flwr_perdl/py.typed", "tests/test_wheel.py", "docs/faq.md"} <= files
    assert not {name for name in files if name.startswith((".venv", "runs/"))}


def test_who_builds_from_the_sdist_gets_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    execute(*BUILD, "--outdir", tmp_path / "dist", source, cwd=tmp_path)
    for file in dist.iterdir():
        assert file.read_bytes() == (tmp_path / "dist" / file.name).read_bytes(), file.name


def test_the_metadata_lead_to_the_repository_that_a_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/fork")
    execute(*BUILD, "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    metadata = metadata_of(next(tmp_path.glob("*.whl")))
    links = metadata.get_all("Project-URL", [])
    readme = str(metadata.get_payload())
    assert f"](https://example.org/fork/blob/v{__version__}/docs/install.md)" in readme
    assert (
        f'src="https://example.org/fork/raw/v{__version__}/docs/images/overview-light.svg"'
        in readme
    )
    assert not re.findall(r"\]\((?!https?:)|src(?:set)?=\"(?!https?:)", readme)
    assert "Repository, https://example.org/fork" in links


def test_an_environment_has_the_wheel_and_nothing_from_elsewhere(
    environment: Callable[[str], Path], tmp_path: Path
) -> None:
    asked = """
import sys, flwr_perdl
assert flwr_perdl.__file__.startswith(sys.prefix)
own = (sys.prefix, sys.base_prefix)
assert all(path.startswith(own) for path in sys.path), sys.path
assert not [path for path in sys.path if "-packages" in path and not path.startswith(sys.prefix)]
"""
    execute(environment(""), "-I", "-c", asked, cwd=tmp_path)
    for missing in HEAVY | {"ray"}:
        assert not list(environment("").parent.parent.glob(f"lib/*/site-packages/{missing}"))


@pytest.mark.parametrize("extras", ["", "experiments"])
def test_the_library_loads_nothing_of_the_applications(
    extras: str, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    # Flower itself loads a table and a command-line library; what is loaded beyond those is ours.
    asked = f"""
import sys, flwr.app, flwr.client, flwr.server, flwr.serverapp, flwr.clientapp, flwr.simulation
flower = set(sys.modules)
import flwr_perdl.clients
assert "scipy.stats" not in sys.modules, "a client's process would start later"
from flwr_perdl import clients, dictionary, network, regression, strategies
from flwr_perdl.simulations import InProcessGrid
loaded = {{name.partition(".")[0] for name in set(sys.modules) - flower}}
assert not loaded & {HEAVY | {"numba", "perdl_experiments", "rich", "typer"}}, loaded
"""
    execute(environment(extras), "-I", "-c", asked, cwd=tmp_path)


@pytest.mark.parametrize(
    ("extras", "arguments", "missing"),
    [
        ("", "run digits --out here", "experiments"),
        ("experiments", "fetch mnist --out here.npz", "datasets"),
    ],
)
def test_a_missing_extra_is_named_before_anything_starts(
    extras: str, arguments: str, missing: str, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    command = environment(extras).with_name("flwr-perdl")
    done = subprocess.run(
        [command, *arguments.split()],
        cwd=tmp_path,
        env=os.environ
        | {"FLWR_HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path), "COLUMNS": "400"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"'{missing}'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("extras", ["", pytest.param("simulation", marks=pytest.mark.ray)])
def test_a_foreign_project_with_packages_of_the_same_names_runs(
    extras: str, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    for package in HOST_PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text('OWNER = "host"\n')
    (tmp_path / "foreign.py").write_text(FOREIGN)
    python = environment(extras)
    execute(python, "foreign.py", "new.npy", cwd=tmp_path)
    new = np.load(tmp_path / "new.npy")
    assert new.shape == (2, 6)
    np.testing.assert_allclose(np.linalg.norm(new, axis=1), 1, rtol=1e-12)


def programs(page: Path) -> list[Program]:
    """Return a page's programs: all blocks below one command.

    Where it shows a client in PyTorch and in NumPy, each runs with the page's other blocks.
    """
    if "```python\n# PyTorch\n" not in page.read_text():
        return variant(page, "")
    found = variant(page, "PyTorch")
    return found + [one for one in variant(page, "NumPy") if one not in found]


def variant(page: Path, left_out: str) -> list[Program]:
    """Return a page's programs without the blocks of a framework, and without PyTorch's extra."""
    text = page.read_text()
    installs = list(INSTALL.finditer(text))
    examples = {block["example"] for block in BLOCK.finditer(text) if block["example"]}
    found: dict[int, Program] = {}
    for block in BLOCK.finditer(text):
        if left_out and block["code"].startswith(f"# {left_out}\n"):
            continue
        above = [install for install in installs if install.start() < block.start()]
        assert above, f"{page.name} does not say what to install before its first block"
        own = [one for one in (above[-1]["extras"] or "").split(",") if one != left_out.lower()]
        extras = ",".join(own) + above[-1]["others"]
        program = Program(page, extras, [], examples)
        program = found.setdefault(above[-1].start(), program)
        if block["example"]:
            continue
        program.lines.extend([""] * (text.count("\n", 0, block.start("code")) - len(program.lines)))
        program.lines.extend(block["code"].splitlines())
    return list(found.values())


PROGRAMS = [program for page in PAGES for program in programs(page)]


@pytest.mark.parametrize(
    "extras",
    [
        pytest.param(extras, marks=[pytest.mark.ray] if "simulation" in extras else [])
        for extras in sorted({program.extras for program in PROGRAMS})
    ],
)
def test_blocks_run_with_what_their_page_says_to_install(
    extras: str, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    if "pytorch" in extras:
        pytest.importorskip("torch")
    python = environment(extras)
    files = []
    for number, program in enumerate(PROGRAMS):
        if program.extras == extras:
            file = tmp_path / f"{number}" / program.page.with_suffix(".py").name
            file.parent.mkdir()
            for example in program.examples:
                shutil.copytree(ROOT / example, file.parent, dirs_exist_ok=True)
            file.write_text("\n".join(program.lines))
            files.append(file)
    execute(python, "-I", "-c", RUN_ALL, *files, cwd=tmp_path)


@pytest.mark.parametrize("name", [one for one in EXAMPLES if not read(one).torch and tells(one)])
def test_examples_run_with_what_their_readme_says_to_install(
    name: str, environment: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their scripts do, for which the extra `simulation` need not be there."""
    readme = read(name)
    python = environment(readme.extras.replace("simulation", ""))
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    clean = {**os.environ, "PATH": path, "PYTHONPATH": ""}
    run(readme.scripts, copied(readme, tmp_path), clean)
