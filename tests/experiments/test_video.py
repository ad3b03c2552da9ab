from __future__ import annotations

from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest

from flwr_perdl.dictionary import GradientLearner
from perdl_experiments import run_experiment
from perdl_experiments.clips import Clip, load_clip, still, to_frame, to_samples
from perdl_experiments.studies.video import separate
from tests.studies import clip


def test_a_video_file_and_a_folder_are_the_same_clip(tmp_path: Path) -> None:
    X = (255 * clip(0, n_frames=5, size=16)["X"]).astype(np.uint8)
    (tmp_path / "frames").mkdir()
    for t, frame in enumerate(X):
        iio.imwrite(tmp_path / "frames" / f"{t:02}.png", frame)
    (tmp_path / "frames" / "notes.txt").write_text("no frame")
    iio.imwrite(tmp_path / "clip.gif", X)
    folder = load_clip(str(tmp_path / "frames"), 0).frames
    np.testing.assert_array_equal(folder, (X / 255).astype(np.float32)[..., None])
    film = load_clip(str(tmp_path / "clip.gif"), 0).frames
    np.testing.assert_allclose(film.mean(axis=3), folder[..., 0], atol=0.01)
    results = run_experiment("video", data=tmp_path / "clip.gif", rounds=2)
    assert not {"auc_objects", "psnr_background_median"} & results["metrics"].keys()
    assert any("there are no AUC" in note for note in results["notes"])


@pytest.mark.parametrize(("shape", "patch"), [((12, 8, 3), 4), ((13, 10, 1), 4), ((9, 9, 3), 2)])
def test_samples_are_pixels_of_all_patches(shape: tuple[int, int, int], patch: int) -> None:
    frame = np.random.default_rng(0).random(shape)
    X = to_samples(frame, patch)
    assert X.shape[0] == patch**2
    np.testing.assert_array_equal(X[1, : shape[2]], frame[0, 1])
    np.testing.assert_array_equal(X[patch, : shape[2]], frame[1, 0])
    np.testing.assert_array_equal(to_frame(X, shape, patch), frame)


def test_the_median_background_follows_the_light_and_leaves_objects_out() -> None:
    X, mask, background = clip(1, noise=0.0).values()
    X[:, 20:24, 20:24], mask[:8, 20:24, 20:24] = 0.9, True  # a car that parks, and then is scenery
    X[8:, 20:24, 20:24] = background[8:, 20:24, 20:24]
    frames = X[..., None].astype(np.float32)
    assert np.abs(still(Clip(frames, mask))[..., 0] - background).max() < 1e-5
    assert np.abs(still(Clip(frames))[..., 0] - background).max() > 0.2


def test_a_frame_comes_apart_along_the_atoms() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((60, 6)))[0].T
    back, front = rng.standard_normal((16, 4)) @ basis[:4], rng.standard_normal((16, 2)) @ basis[4:]
    background, objects = separate(back + front, basis[:4], GradientLearner(6, n_nonzero=6))
    np.testing.assert_allclose(background, back, atol=1e-8)
    np.testing.assert_allclose(objects, front, atol=1e-8)


def test_frames_with_less_in_them_than_the_global_atoms_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "grey.npz", X=np.ones((8, 24, 32)))
    with pytest.raises(ValueError, match=r"^n_global"):
        run_experiment("video", data=tmp_path / "grey.npz", rounds=2)
    given = {"n_global": 1, "n_atoms": 2}
    results = run_experiment("video", data=tmp_path / "grey.npz", rounds=2, options=given)
    assert results["metrics"]["psnr_background"] == 100
