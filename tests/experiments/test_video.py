from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from flwr_perdl.dictionary import GradientLearner
from perdl_experiments import run_experiment
from perdl_experiments.clips import Clip, load_clip, still, to_frame, to_samples
from perdl_experiments.studies.video import separate


def make_clip(
    seed: int, *, n_frames: int = 14, size: int = 48, noise: float = 0.02, rise: float = 0.2
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return grey frames, mask and background: squares cross a texture, the light rises."""
    rng = np.random.default_rng(seed)
    grain = rng.standard_normal((2, size, size))
    scene = 0.45 + 0.1 * gaussian_filter(grain[0], 1) + 0.4 * gaussian_filter(grain[1], 4)
    mask = np.zeros((n_frames, size, size), dtype=bool)
    frames = np.tile(scene, (n_frames, 1, 1))
    for t in range(n_frames):
        for row, speed in ((size // 8, 5), (size * 5 // 8, -4)):
            columns = np.arange(speed * t + row, speed * t + row + size // 5) % size
            mask[t][np.ix_(np.arange(row, row + size // 5), columns)] = True
    frames[mask] = 0.95
    light = np.linspace(1, 1 - rise, n_frames)[:, None, None]
    noisy = frames * light + noise * rng.standard_normal(frames.shape)
    return np.clip(noisy, 0, 1), mask, scene * light


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(-10 * np.log10(np.mean((a - b) ** 2)))


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("street")
    return run_experiment("video", clients=20, out=out), out


@pytest.mark.slow
def test_the_street_is_taken_apart_and_better_than_by_perpca(street: Any) -> None:
    results, out = street
    metrics = results["metrics"]
    assert metrics["auc_objects"] >= 0.95
    assert metrics["auc_objects"] > metrics["auc_objects_perpca"]
    assert metrics["psnr_background"] >= metrics["psnr_raw"] + 3
    assert metrics["psnr_background"] > metrics["psnr_background_perpca"]
    assert metrics["f1_objects"] > 0.6
    assert results["curves"]["psnr_background"][-1] == pytest.approx(
        metrics["psnr_background"], abs=0.5
    )
    clip = load_clip("", 0).take(20)
    with np.load(out / "arrays.npz") as arrays:
        assert arrays["global_atoms"].shape == (4, 48 * 72 * 3)
        again = psnr(arrays["background"] / 255, clip.background)
        assert again == pytest.approx(metrics["psnr_background"], abs=0.1)
        assert arrays["objects"].shape == clip.frames.shape


@pytest.mark.slow
def test_a_clip_that_nothing_was_tuned_on(tmp_path: Path) -> None:
    X, mask, background = make_clip(0)
    np.savez(tmp_path / "clip.npz", X=X, mask=mask)
    results = run_experiment("video", data=tmp_path / "clip.npz", out=tmp_path / "out")
    metrics = results["metrics"]
    assert metrics["auc_objects"] >= 0.95
    assert metrics["psnr_background"] >= metrics["psnr_raw"] + 3
    assert metrics["psnr_background"] > metrics["psnr_background_perpca"]
    assert metrics["psnr_background_tcmf"] > metrics["psnr_background_hmf"]
    backgrounds = [float(row[1]) for row in results["tables"][0]["rows"]]
    assert backgrounds == sorted(backgrounds, reverse=True)
    assert len(backgrounds) == 10
    assert metrics["psnr_background_median"] > metrics["psnr_background"]
    with np.load(tmp_path / "out" / "arrays.npz") as arrays:  # against the truth, not the median
        assert psnr(arrays["background"][..., 0] / 255, background) > psnr(X, background) + 3


def test_a_video_file_and_a_folder_are_the_same_clip(tmp_path: Path) -> None:
    X = (255 * make_clip(0, n_frames=5, size=16)[0]).astype(np.uint8)
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
    X, mask, background = make_clip(1, noise=0.0)
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
