"""The apps of examples/perdl-*: in process, by `flwr run`, and on SuperNodes that install them."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from benchmarks._deployment import free_port
from flwr_perdl.simulations import InProcessGrid
from tests.examples.index import serve, write_index
from tests.examples.readme import ROOT, Step, copied, read, run
from tests.examples.test_examples import ENVIRONMENT, OTHER

PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())
    for path in sorted((ROOT / "examples").glob("perdl-*/pyproject.toml"))
}
TORCH = {name for name, one in PROJECTS.items() if "torch" in str(one["project"]["dependencies"])}
_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")


def apps(*marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Parametrize by the apps; those with PyTorch are marked, and need it."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, id=f"{name}-pytorch", marks=[_torch, *marks])
            if name in TORCH
            else name
            for name in PROJECTS
        ],
    )


NODES = re.compile(r"num-supernodes=(\d+)")
MEASURED = re.compile(r"\b[01]\.\d+")


def compare(printed: str, step: Step) -> None:
    """Compare what was printed with the README's lines; an accuracy may be .03 off."""
    for line in step.printed:
        pattern = MEASURED.pattern.join(map(re.escape, MEASURED.split(line)))
        found = re.search(pattern, printed)
        assert found, f"{line!r} is not in {printed[-6000:]}"
        values, said = ([float(one) for one in MEASURED.findall(x)] for x in (found[0], line))
        np.testing.assert_allclose(values, said, atol=0.03)


def module(name: str, file: str) -> Any:
    return import_module(f"{name.replace('-', '_')}.{file}")


def run_here(name: str, n_nodes: int, **run_config: Any) -> None:
    config = {**PROJECTS[name]["tool"]["flwr"]["app"]["config"], **run_config}
    grid = InProcessGrid(module(name, "client_app").app, n_nodes, run_config=config)
    module(name, "server_app").app(grid, Context(1, 0, {}, RecordDict(), config))


@apps(pytest.mark.torch)
def test_in_process_it_prints_what_its_readme_says(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / name)
    step = read(name).steps[0]
    nodes = NODES.search(step.commands)
    out = tmp_path / "out"
    run_here(name, int(nodes[1]) if nodes else 2, out=str(out))
    if "\npython join.py model" in step.commands:  # a new site joins from the saved files
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["join.py", str(out)])
        runpy.run_path(str(ROOT / "examples" / name / "join.py"))
        assert (tmp_path / "own.pt").exists()
    compare(capsys.readouterr().out, step)
    files = {one.stem for one in out.iterdir()} if out.is_dir() else set()
    found = {
        "perdl-clustered": {f"cluster-{j}" for j in range(4)},
        "perdl-personal": {"shared", *(f"client-{i}" for i in range(16))},  # here heads are at hand
    }
    assert files - {"README", "models"} == found.get(name, set())
    assert out.is_file() == (name == "perdl-perma")


@_torch
@pytest.mark.torch
def test_lora_with_pytorch_where_sites_have_labels_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "perdl-lora"
    monkeypatch.syspath_prepend(ROOT / "examples" / name)
    step = read(name).steps[1]
    assert "'differ=\"labels\"'" in step.commands
    run_here(name, 12, differ="labels")
    compare(capsys.readouterr().out, step)


@apps()
def test_a_node_reads_the_data_that_its_config_names(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / name)
    load = module(name, "client_app").load_data
    config = PROJECTS[name]["tool"]["flwr"]["app"]["config"]

    def loaded(**node_config: Any) -> Any:
        return load(Context(1, 1, node_config, RecordDict(), config))

    X, file = np.arange(640.0).reshape(10, 64), tmp_path / "own.npz"
    np.savez(file, X=X.reshape(10, 1, 8, 8) if "clust" in name else X, y=range(10))
    if name == "perdl-lora":
        texts = [f"gout rash\tulcer {k}" for k in range(10)]
        file.write_text("".join(f"{k}\t{text}\n" for k, text in enumerate(texts)))
        X = module(name, "reports").to_tokens(texts)
    own = loaded(data=str(file), name="ward-7")
    if name == "perdl-perma":
        np.testing.assert_array_equal(own, X)
    elif name in TORCH:
        parts = [loader.dataset.tensors for loader in own]
        np.testing.assert_array_equal(np.vstack([one.flatten(1) for one, _ in parts]), X)
        assert [label for _, y in parts for label in y.tolist()] == list(range(10))
    else:
        np.testing.assert_array_equal(np.vstack([one for one, _ in own]), X)
        np.testing.assert_array_equal(np.hstack([y for _, y in own]), range(10))
    loaded(name="ward-7")  # a SuperNode may have a name alone
    with pytest.raises(ValueError, match="'partition-id'"):
        loaded()


def test_tables_of_ones_own(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    name = "perdl-perma"
    monkeypatch.syspath_prepend(ROOT / "examples" / name)
    tables = module(name, "tables")
    X = tables.planted(0)
    np.savetxt(tmp_path / "a.csv", X, delimiter=",")
    header = ",".join("abcdefghijkl")
    np.savetxt(tmp_path / "b.csv", tables.planted(1), delimiter=",", header=header, comments="")
    np.testing.assert_array_equal(tables.read(tmp_path / "a.csv"), X)
    run_here(name, 2, data=str(tmp_path), out=str(tmp_path / "atoms.csv"))
    compare(capsys.readouterr().out, read(name).steps[0])
    # The planted atoms that both sites have in common, up to signs and order.
    atoms = np.loadtxt(tmp_path / "atoms.csv", delimiter=",")
    shared = np.linalg.qr(np.random.default_rng(0).standard_normal((12, 12)))[0][:3]
    assert (np.abs(atoms @ shared.T).max(axis=0) > 0.99).all()
    (tmp_path / "c.csv").write_text("a,b\n1,north\n2,south\n")
    with pytest.raises(ValueError, match=r"c\.csv"):
        tables.read(tmp_path / "c.csv")


@pytest.fixture(scope="module")
def environment(
    flower_environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Return an environment for Flower's commands that installs apps' dependencies."""
    home, index = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("index")
    write_index(index)
    with serve(index) as address:
        yield {
            **{key: one for key, one in ENVIRONMENT.items() if not key.startswith("UV_")},
            **{key: str(free_port()) for key in flower_environment if key.endswith("_PORT")},
            "FLWR_HOME": str(home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "0",
            "NO_PROXY": "127.0.0.1",
            "UV_CACHE_DIR": str(tmp_path_factory.mktemp("uv")),
            "UV_DEFAULT_INDEX": address,
            "UV_NO_CONFIG": "1",
        }
    subprocess.run(["pkill", "-f", str(home)], check=False)


@pytest.mark.slow
@pytest.mark.ray
@apps(pytest.mark.torch)
def test_flower_runs_it_in_a_simulation(
    name: str, environment: dict[str, str], tmp_path: Path
) -> None:
    readme = read(name)
    step = readme.steps[0]._replace(printed=[])
    if OTHER == "flwr run":  # 1.26.1
        n_nodes = (NODES.search(step.commands) or ["", "2"])[1]
        command = f"flower-simulation --app . --num-supernodes {n_nodes}"
        simulate = r"flwr run \. --stream( --federation-config '.*?')?"
        step = step._replace(commands=re.sub(simulate, command, step.commands))
    compare(run([step], copied(readme, tmp_path), environment), readme.steps[0])


@pytest.mark.slow
@pytest.mark.deployment
@pytest.mark.skipif(OTHER == "flwr run", reason="1.26.1 names the addresses otherwise")
@apps()
def test_two_supernodes_install_and_run_it(
    name: str, environment: dict[str, str], tmp_path: Path
) -> None:
    readme = read(name)
    step = readme.steps[-1]
    commands = step.commands.replace("port=9300;", f"port={free_port(3)};")
    assert commands != step.commands
    printed = run([Step(commands, [])], copied(readme, tmp_path), environment)
    compare(printed, step)
    assert re.search(r"Installed: \[.*flwr-perdl==", printed)
