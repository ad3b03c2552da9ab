import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from flwr_perdl.clients import client_app
from flwr_perdl.core import files
from flwr_perdl.simulations import InProcessGrid
from perdl_experiments import run_experiment
from perdl_experiments.studies import configure, find, synthetic


def test_options_are_read_as_their_defaults_type():
    options = {"n_atoms": "12", "n_global": 6, "aggregation": "mean", "rounds": 3}
    config = configure(find("digits"), clients=4, seed=7, options=options)
    assert config.n_atoms == 12
    assert (config.clients, config.rounds, config.seed) == (4, 3, 7)
    assert configure(find("global-atoms"), options={"noise": "0.05"}).noise == 0.05
    assert configure(find("synthetic"), options={"atoms": 6}).atoms == (6,)


def test_images_takes_any_size_and_says_when_there_are_few(tmp_path):
    rng = np.random.default_rng(0)
    y = np.repeat([3, 5], 10)
    X = rng.integers(0, 255, (20, 9, 7)).astype(np.uint8)
    np.savez(tmp_path / "mine.npz", X=X, y=y)
    options = {"n_atoms": 8, "n_global": 4, "samples_per_client": 1000}
    results = run_experiment(
        "images",
        data=tmp_path / "mine.npz",
        clients=2,
        rounds=2,
        out=tmp_path / "out",
        options=options,
    )
    assert results["metrics"]["samples_per_client"] == 9
    assert any("9 images instead of 1000" in note for note in results["notes"])
    with np.load(tmp_path / "out" / "arrays.npz") as arrays:
        assert arrays["global_atoms"].shape == (4, 63)
        np.testing.assert_array_equal(arrays["image_shape"], [9, 7])


def test_a_number_of_shared_atoms_is_chosen_and_drawn(tmp_path):
    X, y = load_digits(return_X_y=True)
    np.savez(tmp_path / "mixed.npz", X=X, y=y, client=np.arange(len(X)) % 4)  # alike: sharing pays
    options = {**SMALL, "n_global": "auto", "samples_per_client": 30}
    data, out = tmp_path / "mixed.npz", tmp_path / "out"
    found = run_experiment("images", data=data, clients=4, rounds=4, out=out, options=options)
    assert "choice.png" in [figure["file"] for figure in found["figures"]]
    with np.load(out / "arrays.npz") as arrays:
        assert f"{len(arrays['global_atoms'])} global atoms" in found["finding"]


class Killed(BaseException):
    """What a test raises in the middle of a run."""


def kill_after(rounds):
    def progress(state):
        if state.done == rounds:
            raise Killed

    return progress


def first_done(seen):
    """Return how far a resumed run is when it goes on."""
    assert (seen[0].done, seen[0].doing) == (0, "loading data")
    return next(one.done for one in seen if one.done)


def test_a_run_that_was_begun_in_process_is_resumed_in_process(tmp_path):
    given = {"clients": 3, "rounds": 3, "options": {"seeds": 1, "start": "short"}, "out": tmp_path}
    with pytest.raises(Killed):
        run_experiment("synthetic", progress=kill_after(2), **given)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["nodes"]
    with pytest.raises(ValueError, match=r"^engine"):
        run_experiment("synthetic", engine="ray", resume=True, **given)
    with pytest.raises(ValueError, match="--resume"):
        run_experiment("synthetic", **given)
    seen = []
    run_experiment("synthetic", resume=True, progress=seen.append, **given)
    assert first_done(seen) == 2  # the refused run has deleted nothing


@pytest.mark.parametrize(
    ("rounds", "options", "killed_after"),
    [(5, {"seeds": 1, "start": "short"}, 3), (3, {"seeds": 2, "start": "poor"}, 4)],
)
def test_a_killed_run_continues_to_the_same_bits(tmp_path, rounds, options, killed_after):
    given = {"clients": 4, "rounds": rounds, "options": options}
    whole = run_experiment("synthetic", out=tmp_path / "whole", **given)
    with pytest.raises(Killed):
        run_experiment(
            "synthetic", out=tmp_path / "cut", progress=kill_after(killed_after), **given
        )
    assert not (tmp_path / "cut" / "results.json").exists()
    seen = []
    resumed = run_experiment(
        "synthetic", out=tmp_path / "cut", resume=True, progress=seen.append, **given
    )
    finished = (killed_after - 1) // rounds * rounds  # is not run again
    assert first_done(seen) > finished
    assert seen[-1].done == seen[-1].total
    assert whole["metrics"] == resumed["metrics"]
    assert whole["curves"] == resumed["curves"]
    with (
        np.load(tmp_path / "whole" / "arrays.npz") as expected,
        np.load(tmp_path / "cut" / "arrays.npz") as found,
    ):
        for key in expected.files:
            np.testing.assert_array_equal(expected[key], found[key])


def test_a_resumed_run_has_the_seconds_of_the_parts_that_it_does_not_repeat(tmp_path):
    given = {"clients": 3, "rounds": 2, "options": {"seeds": 2, "start": "poor"}, "out": tmp_path}
    run_experiment("synthetic", **given)
    parts = [files.load(path)[1]["seconds"] for path in (tmp_path / "kept").iterdir()]
    assert min(parts) > 0
    assert run_experiment("synthetic", resume=True, **given)["seconds"] > sum(parts)


def test_resume_refuses_another_run(tmp_path):
    given = {"clients": 3, "rounds": 2, "out": tmp_path}
    run_experiment("synthetic", options={"seeds": 1}, **given)
    with pytest.raises(ValueError, match=r"^out .*seeds"):
        run_experiment("synthetic", options={"seeds": 2}, resume=True, **given)
    empty = {**given, "out": tmp_path / "empty"}
    with pytest.raises(ValueError, match=r"^out"):
        run_experiment("synthetic", options={"seeds": 1}, resume=True, **empty)
    assert not (tmp_path / "empty").exists()


def written(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SMALL = {"n_atoms": 8, "n_global": 4, "methods": "main"}
#: Of an experiment whose figures have other names than those of `synthetic`.
OTHER = {"seeds": 1, "samples": 60, "n_global": "4"}


def test_a_run_is_replaced_when_asked_for_and_when_the_new_one_has_finished(tmp_path):
    out, given = tmp_path / "out", {"clients": 3, "rounds": 3, "options": {"seeds": 1}}
    run_experiment("global-atoms", clients=3, out=out, options=OTHER)
    (out / "mine.png").touch()
    before = written(out)
    with pytest.raises(ValueError, match="--overwrite"):
        run_experiment("synthetic", out=out, **given)
    with pytest.raises(Killed):
        run_experiment("synthetic", out=out, overwrite=True, progress=kill_after(2), **given)
    assert {path: content for path, content in written(out).items() if path in before} == before
    assert (out / "next" / "checkpoints").is_dir()
    with pytest.raises(ValueError, match=r"^out .*clients"):
        run_experiment("synthetic", out=out, resume=True)
    seen = []
    results = run_experiment("synthetic", out=out, resume=True, progress=seen.append, **given)
    assert first_done(seen) == 2
    assert json.loads((out / "results.json").read_text()) == results
    left = {path.name for path in out.iterdir()}
    figures = {one["file"] for one in results["figures"]}
    figures |= {f"{Path(one).stem}.svg" for one in figures}
    files = {"run.json", "results.json", "report.html", "arrays.npz"}
    assert left == {*files, *figures, "checkpoints", "state", "kept", "mine.png"}


def test_a_replacement_that_is_interrupted_can_be_made_again(tmp_path, monkeypatch):
    """Between the moves of a finished run's files into the place of an earlier one."""
    given = {"clients": 3, "rounds": 1, "options": {"seeds": 1}, "out": tmp_path}
    run_experiment("synthetic", **given)
    replace, moves = Path.replace, []

    def move(self, target):
        if self.parent == tmp_path / "next" and self.parent != Path(target).parent:
            moves.append(self)
            if len(moves) > 3:
                raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", move)
    with pytest.raises(KeyboardInterrupt):
        run_experiment("synthetic", overwrite=True, **given)
    monkeypatch.undo()
    results = run_experiment("synthetic", resume=True, **given)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert not (tmp_path / "next").exists()


def test_a_figure_that_is_not_the_earlier_runs_is_not_replaced(tmp_path):
    run_experiment("global-atoms", clients=3, out=tmp_path, options=OTHER)
    (tmp_path / "rounds.png").write_text("mine")
    with pytest.raises(ValueError, match=r"rounds\.png"):
        run_experiment("synthetic", clients=3, rounds=2, out=tmp_path, overwrite=True)
    assert (tmp_path / "rounds.png").read_text() == "mine"


def test_resume_refuses_data_that_have_changed(tmp_path):
    rng, data = np.random.default_rng(0), tmp_path / "data"
    data.mkdir()
    for k in range(2):
        np.savez(data / f"{k}.npz", X=rng.random((30, 5)))
    options = {"n_atoms": 3, "n_global": 1}
    given = {"data": data, "rounds": 2, "out": tmp_path / "out", "options": options}
    run_experiment("sites", **given)
    run_experiment("sites", resume=True, **given)
    np.savez(data / "1.npz", X=rng.random((30, 5)))
    with pytest.raises(ValueError, match=r"data"):
        run_experiment("sites", resume=True, **given)


def test_inside_a_flower_run_there_is_one_federation():
    given = {"clients": 4, "rounds": 4, "options": {"seeds": 1, "samples": 100}}
    experiment = find("synthetic")
    config = configure(experiment, **given)
    grid = InProcessGrid(client_app(partial(synthetic.client, config=config)), 4)
    inside = run_experiment("synthetic", engine=grid, **given)
    outside = run_experiment("synthetic", **given)
    assert inside["engine"] == "flower"
    assert inside["metrics"] == outside["metrics"]
    with pytest.raises(ValueError, match="seeds=1"):
        run_experiment("synthetic", engine=grid, clients=4)
