"""The package as a whole: versions that agree, floors, public names, the Flower app bundle."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flwr_perdl
from perdl_experiments._run_config import all_keys, read_run_config
from tests.test_reference import PACKAGES as DOCUMENTED

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flwr_perdl", "perdl_experiments")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = ROOT / "tests" / "public_names.txt"
APPS = [file.parent for file in sorted(ROOT.glob("examples/*/pyproject.toml"))]

# An import only ever points down: what each package may import of the others.
ROOMS = [
    *("core", "dictionary", "regression", "network", "protocol", "privacy", "parts"),
    *("clients", "strategies", "simulations", "estimators", "export", "pytorch"),
]
FLOORS = {
    **{room: set(ROOMS[:position]) for position, room in enumerate(ROOMS)},
    "dictionary": {"core"},
    "regression": {"core"},
    "network": {"core", "dictionary"},
    "protocol": {"core"},
    "export": {"core", "protocol", "strategies"},
    "pytorch": {"core"},
}


@cache
def imported_modules(file: Path) -> set[str]:
    """Return the modules that a file imports anywhere, by their full names."""
    package = file.relative_to(ROOT).with_suffix("").parts[:-1]
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (above, node.module)))
            modules.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
    return modules


def test_one_version_everywhere() -> None:
    assert PYPROJECT["project"]["version"] == flwr_perdl.__version__
    versions = re.findall(r"^ *version: (.+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert versions == [flwr_perdl.__version__] * 2  # the second one is in the BibTeX
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == flwr_perdl.__version__


def public_names() -> str:
    """Return all public names of the library's rooms, a line each."""
    rooms = [import_module(f"flwr_perdl.{room}") for room in sorted([*ROOMS, "random"])]
    each = [(room.__name__, name) for room in rooms for name in getattr(room, "__all__", ())]
    return "".join(f"{room}.{name}\n" for room, name in each)


def test_the_public_names_are_those_in_the_list() -> None:
    assert public_names() == NAMES.read_text(), (
        "if it is meant: python -c 'import tests.test_package as t; "
        "t.NAMES.write_text(t.public_names())'"
    )


def test_flower_pins_are_within_the_supported_range() -> None:
    flwr = next(
        requirement
        for requirement in map(Requirement, PYPROJECT["project"]["dependencies"])
        if requirement.name == "flwr"
    )
    assert (ROOT / ".ci" / "flwr-newest").read_text().strip() in flwr.specifier
    assert "1.26.1" in flwr.specifier
    assert "1.26.0" not in flwr.specifier
    assert version("flwr") in flwr.specifier


def bounds(*extras: str) -> dict[str, str]:
    """Return the lower bound of each dependency, with those of the extras."""
    optional = PYPROJECT["project"]["optional-dependencies"]
    lines = PYPROJECT["project"]["dependencies"] + [one for own in extras for one in optional[own]]
    found = {}
    for requirement in map(Requirement, lines):
        if requirement.name != "flwr-perdl":
            (found[requirement.name],) = (s.version for s in requirement.specifier if ">" in str(s))
    return found


def test_make_test_lowest_takes_each_dependency_at_its_lower_bound() -> None:
    extras = ("experiments", "benchmarks", "privacy", "test")
    lines = (ROOT / ".ci" / "lowest.txt").read_text().partition("\n\n")[0].splitlines()
    assert lines == [f"{name}=={low}" for name, low in sorted(bounds(*extras).items())]


def test_install_md_says_what_each_extra_is_for() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    for extra in PYPROJECT["project"]["optional-dependencies"]:
        assert re.search(rf"`(?:pip install '\.\[)?{extra}(?:\]')?`", page), extra


def test_one_word_of_maturity() -> None:
    (status,) = (one for one in PYPROJECT["project"]["classifiers"] if one.startswith("Dev"))
    assert f"Status: {status.split(' - ')[1].lower()}" in (ROOT / "README.md").read_text()


def test_the_library_imports_nothing_of_the_application() -> None:
    above = {"perdl_experiments", "matplotlib", "rich", "typer", "joblib", "sklearn", "skimage"}
    for file in sorted((ROOT / "flwr_perdl").rglob("*.py")):
        roots = {module.split(".")[0] for module in imported_modules(file)}
        roots -= {"sklearn"} if file.parent.name == "estimators" else set()
        assert not roots & above, f"{file.name} imports {roots & above}"


#: What the application imports and that no public room has, by module.
INNER = {
    "protocol.client_state": {"identify"},
    "clients.perma": {"CHOOSE", "held_out_errors"},
    "core": {"files"},
    "core.aggregate": {"OUTLIER"},
    "core.arrays": {"squared_norm"},
    "core.checks": {"LARGE", "brief_repr", "check_each"},
    "core.extras": {"load_extra"},
    "core.npy": {"view_file"},
    "dictionary.coding": {"nonnegative_from_gram"},
    "dictionary.learners": {"update_weights"},
    "network.data_diffusion": {"Diffused", "DictionaryState", "REPLACEMENTS"},
    "network.exchange": {"run_program"},
    "network.inference": {"ATC", "ConsensusADMM", "DualInference", "DualState", "ExactDiffusion"},
    "network.model_diffusion": {"Model", "update_dictionary"},
    "network.schedule": {"rounds_to_all"},
    "protocol.report": {"Observers", "OnRound"},
    "protocol.request": {"FAILED", "REFUSED"},
    "regression.losses": {"SQUARED"},
    "regression.moments": {"random_models"},
    "regression.phases": {"Answers", "Ask", "Stage"},
    "strategies.perma": {"AGGREGATIONS", "MATCHINGS"},
}


def test_the_application_imports_public_names_where_there_are_any() -> None:
    found: dict[str, set[str]] = {}
    for file in (ROOT / "perdl_experiments").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
            room, _, rest = module.removeprefix("flwr_perdl.").partition(".")
            if module.startswith("flwr_perdl."):
                public = {*import_module(f"flwr_perdl.{room}").__dict__.get("__all__", ())}
                if f"{room}.{rest}" in DOCUMENTED:
                    public |= {*import_module(module).__all__}
                if inner := {one.name for one in node.names} - public:
                    found.setdefault(f"{room}.{rest}".rstrip("."), set()).update(inner)
    assert found == INNER


def test_a_name_is_defined_in_one_module() -> None:
    homes = Counter[str]()
    for file in (ROOT / "flwr_perdl").rglob("*.py"):
        found = set()
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
        homes.update(name for name in found if not name.startswith("_"))
    assert {name for name, n in homes.items() if n > 1} <= {"load", "save"}  # of files of any kind


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_declared(package: str) -> None:
    """By its own name: what other packages depend on may change."""
    project = PYPROJECT["project"]
    lists = [project["optional-dependencies"][own] for own in ("datasets", "privacy")]
    lists += [project["dependencies"], project["optional-dependencies"]["experiments"]]
    declared = {canonicalize_name(Requirement(line).name) for lines in lists for line in lines}
    names = packages_distributions()
    for file in sorted((ROOT / package).rglob("*.py")):
        roots = {module.split(".")[0] for module in imported_modules(file)}
        for root in roots - set(sys.stdlib_module_names) - set(PACKAGES):
            known = map(canonicalize_name, [root, *names.get(root, ())])
            assert declared & set(known), f"{file.name} imports {root}"


@pytest.mark.slow
def test_all_but_secure_sums_works_without_flowers_private_modules() -> None:
    script = """
import importlib, sys
import flwr.app, flwr.clientapp, flwr.serverapp.strategy, numpy as np

GONE = ("flwr.server", "flwr.client", "flwr.common", "flwr.compat", "flwr.simulation")
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name in GONE or name.startswith(tuple(f"{one}." for one in GONE)):
            raise ModuleNotFoundError(name)
for name in [one for one in sys.modules if f"{one}.".startswith(tuple(f"{g}." for g in GONE))]:
    del sys.modules[name]
sys.meta_path.insert(0, Gone())

for room in sys.argv[1:]:
    loaded = importlib.import_module(f"flwr_perdl.{room}")
    for name in getattr(loaded, "__all__", ()):
        getattr(loaded, name)
from flwr.app import ArrayRecord
from flwr_perdl import clients, simulations, strategies

class Mean:  # no NumPyClient
    def __init__(self, context): self.value = float(context.node_config["partition-id"])
    def fit(self, parameters, config): return [np.array([self.value])], 1, {}
    def evaluate(self, parameters, config): return abs(self.value - parameters[0][0]), 1, {}

class Average(strategies.ProtocolStrategy):
    def protocol(self, initial, state):
        mean, secure = np.zeros(1), strategies.SecureMean((1,)) if initial else None
        while True:
            replies = yield strategies.Request("mean", [mean], secure=secure)
            mean = np.mean([one.arrays[0] for one in replies.values()], axis=0)

grid = simulations.InProcessGrid(clients.client_app(Mean), 3)
result = Average().start(grid, num_rounds=2)
print(result.arrays.to_numpy_ndarrays())
try: Average().start(grid, ArrayRecord([np.zeros(1)]), num_rounds=2)
except ImportError as error: print(str(error).split(" needs Flower's ")[0])
"""
    command = [sys.executable, "-c", script, *FLOORS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[array([1.])]", "a secure sum"], done.stderr


def test_a_client_app_loads_little() -> None:
    """A SuperNode starts a process for each message."""
    script = "import sys; from flwr_perdl.clients import client_app; print(*sys.modules)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert sum(name.startswith("flwr_perdl") for name in loaded) <= 32
    assert not {"numba", "scipy", "flwr_perdl.dictionary", "flwr_perdl.regression"} & {*loaded}


@pytest.mark.parametrize("floor", sorted(FLOORS))
def test_imports_point_down(floor: str) -> None:
    above = {f"flwr_perdl.{name}" for name in FLOORS if name not in FLOORS[floor] | {floor}}
    room = ROOT / "flwr_perdl" / floor
    files = sorted(room.rglob("*.py")) or [room.with_suffix(".py")]
    for file in files:
        for module in imported_modules(file):
            assert ".".join(module.split(".")[:2]) not in above, f"{file.name} imports {module}"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Wherever an import stands: at the top, in a function, or for types alone."""
    files = [file for file in (ROOT / "flwr_perdl").rglob("*.py") if file.stem != "__init__"]
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    TopologicalSorter({names[file]: imported_modules(file) for file in files}).prepare()


def test_the_library_imports_none_of_its_modules_by_a_string() -> None:
    found = set()
    for file in sorted((ROOT / "flwr_perdl").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
                found |= {
                    (file.parent.name, text)
                    for text in re.findall(r"'(flwr_perdl[^']*)'", ast.unparse(node))
                }
    assert not found


def test_the_maths_needs_neither_flower_nor_files() -> None:
    allowed = {"numpy", "scipy", "flwr_perdl"} | set(sys.stdlib_module_names) - {"os", "pathlib"}
    for maths in ("dictionary", "network", "regression"):
        for file in sorted((ROOT / "flwr_perdl" / maths).rglob("*.py")):
            for module in imported_modules(file):
                assert module.split(".")[0] in allowed, f"{file.name} imports {module}"


def test_every_option_of_every_federated_experiment_is_a_run_config_key() -> None:
    listed = PYPROJECT["tool"]["flwr"]["app"]["config"]
    assert listed == all_keys()
    assert read_run_config(listed) == ("digits", {})
    for key in ("n-atoms", "n_atoms"):  # Flower's spelling, and the option's own
        assert read_run_config({**listed, key: 12}) == ("digits", {"n_atoms": 12})


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of Flower
@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_an_app_bundle_follows_format_1(app: Path) -> None:
    """What Flower demands of it, also where the installed Flower does not know the format."""
    build_fab_from_disk(app)
    project = tomllib.loads((app / "pyproject.toml").read_text())
    about = project["tool"]["flwr"]["app"]
    (flwr,) = (
        one for one in map(Requirement, project["project"]["dependencies"]) if one.name == "flwr"
    )
    assert about["fab-format-version"] == 1
    assert about["publisher"]
    assert project["project"]["description"]
    assert {*about["components"]} == {"clientapp", "serverapp"}
    assert {">=", "<"} == {bound.operator for bound in flwr.specifier}
    assert about["flwr-version-target"] in flwr.specifier
    assert project["project"]["license"] == {"file": "LICENSE"}
    assert not [key for key in (*about, *about.get("config", {})) if "_" in key]


def test_the_app_bundle_carries_both_packages_and_nothing_else(tmp_path: Path) -> None:
    app = tmp_path / "app"
    tracked = (*PACKAGES, "tests", "pyproject.toml", "README.md", "LICENSE", ".gitignore")
    app.mkdir()
    for name in tracked:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, app / name)
    (app / ".venv" / "lib").mkdir(parents=True)
    (app / ".venv" / "lib" / "stray.py").write_text("")
    subprocess.run(
        [Path(sys.executable).with_name("flwr"), "build", "--app", app],
        cwd=tmp_path,
        env=os.environ | {"FLWR_HOME": str(tmp_path / "flwr")},
        check=True,
        capture_output=True,
    )
    (bundle,) = tmp_path.glob("*.fab")
    carried = set(zipfile.ZipFile(bundle).namelist())
    files = [file for name in PACKAGES for file in (ROOT / name).rglob("*")]
    sources = [file for file in files if file.suffix in (".py", ".toml")]
    assert {str(file.relative_to(ROOT)) for file in sources} <= carried
    assert not {name for name in carried if name.startswith(".venv")}
