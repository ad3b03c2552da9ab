"""What studies compute by themselves, by hand and by other code; and what they may look at."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from skimage.metrics import structural_similarity as reference

from flwr_perdl.network import InMemoryNetwork
from flwr_perdl.privacy.noise import noise_multiplier
from perdl_experiments.engine import federate
from perdl_experiments.measures import quality, rounds_to, structural_similarity
from perdl_experiments.studies import (
    decentralized,
    federations,
    inference,
    personal,
    private,
    rotated_digits,
)
from tests.studies import Kept, config_of, materials, run_study, save


def test_as_many_clients_fail_as_asked_half_of_them_with_nan() -> None:
    options = {"seeds": 1, "sizes": "8,30", "weak_samples": "20,200", "clients": 40, "rounds": 8}
    config = config_of("federations", **options)
    config = replace(config, axis="failing", failing=50, weak=0, method="consensus")
    report = federate(federations, config).history
    reasons = [reason for one in report for reason in one.dropped.values()]
    silent = sum("this client fails" in reason for reason in reasons)
    assert 0.4 < len(reasons) / 320 < 0.6
    assert 0.35 < silent / len(reasons) < 0.65
    assert all("NaN" in reason for reason in reasons if "this client fails" not in reason)


def test_the_best_of_five_starts_has_the_lowest_validation_loss_and_costs_all_five() -> None:
    kept = Kept()
    options = {"clients": 8, "rounds": 2, "seeds": 1, "hidden": 8, "starts": "best"}
    found = run_study("rotated-digits", kept, **options)
    tries = [kept[f"best-{draw}-seed-0"] for draw in range(5)]
    losses = [float(one["loss"]) for one in tries]
    assert len(set(losses)) == 5
    assert found.metrics["accuracy_best"] == tries[int(np.argmin(losses))]["accuracy"][-1]
    assert found.outcome.floats_up == sum(float(one["up"]) for one in tries)


def test_the_share_of_clients_in_the_right_cluster_by_hand() -> None:
    assert rotated_digits.share_right({0: 3, 1: 2, 2: 0, 3: 1, 4: 3}) == 1
    assert rotated_digits.share_right({0: 0, 1: 0, 2: 1, 3: 2}) == 0.75  # two kinds in a cluster
    assert rotated_digits.share_right({0: 0, 4: 4, 1: 1, 5: 1}) == 0.75  # a kind in two clusters


def test_a_step_moves_the_named_arrays_and_descends() -> None:
    config = config_of("personal", clients=8, images=20)
    own = personal.splits(config, "labels", 0)
    model = personal.first_model(config, own, 0)
    client = personal.Client(own[0], 0, 0, 0.5)
    names = {"server-round": 1, "train-names": '["head.weight", "head.bias"]'}
    moved = client.fit(model, names)[0]
    same = [np.array_equal(*pair) for pair in zip(model, moved, strict=True)]
    assert same == [True, True, False, False]
    trained = model
    for round_ in range(30):
        trained = client.fit(trained, {"server-round": round_ + 1})[0]
    assert client.accuracy(trained, client.train) > 0.9


@pytest.mark.parametrize(("trust", "shares"), [("distributed", 5 / 4), ("central", 1)])
def test_the_components_second_moments_have_the_noise_of_the_promise(
    trust: str, shares: float
) -> None:
    one = config_of("private", clients=5, trust=trust)
    images = np.vstack([one.space.project(X) for X in one.task.clients])
    images /= np.linalg.norm(images, axis=1, keepdims=True)
    noise = private.noised_moments(one) - images.T @ images
    np.testing.assert_array_equal(noise, noise.T)
    sigma = sqrt(shares) * noise_multiplier(one.epsilon, private.DELTA)
    apart = noise[np.triu_indices(len(noise), 1)]
    assert apart.std() == pytest.approx(sigma / sqrt(2), rel=0.1)
    assert np.diag(noise).std() == pytest.approx(sigma, rel=0.3)
    found = private.principal_components(replace(one, epsilon=1e3))
    exact = np.linalg.svd(images, full_matrices=False)[1][: private.N_ATOMS]
    assert np.sum((images @ found.T) ** 2) == pytest.approx(np.sum(exact**2), rel=1e-3)


def test_more_frequencies_than_pixels_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"^basis"):
        config_of("private", basis=65)


def test_learning_rates_are_chosen_on_held_out_training_images() -> None:
    config = config_of("decentralized", clients=4)
    whole, part = decentralized.Nodes(config, 0), decentralized.Nodes(config, 0, choose=True)
    for (X, _), (rest, _) in zip(whole.train, part.train, strict=True):
        assert len(rest) == round(0.8 * len(X))
        assert {image.tobytes() for image in rest} < {image.tobytes() for image in X}
    trained = {image.tobytes() for image in whole.pooled.X}
    assert all(image.tobytes() in trained for image in part.test[0])
    options = {"clients": 4, "rounds": 4, "seeds": 1, "shards": 0}
    found = run_study("decentralized", step=0.15, **options).metrics
    # 0.15 is too short a step for so few rounds; three times as long a one is chosen.
    longer = run_study("decentralized", step=0.45, tune=0, **options).metrics
    assert found["accuracy_tuned_fedavg"] == longer["accuracy_fedavg"] > found["accuracy_fedavg"]
    assert found["accuracy_tuned_exact_diffusion"] == longer["accuracy_worst_ring"]
    assert abs(found["accuracy_tuned_pooled"] - found["accuracy_tuned_fedavg"]) < 0.02


def test_from_which_round_on_a_target_is_reached() -> None:
    assert rounds_to(np.array([0.9, 0.5, 0.9, 0.9]), 0.8) == 3
    assert rounds_to(np.array([0.9, 0.5]), 0.8) == np.inf


def test_the_truth_changes_what_is_measured_and_not_what_is_found(tmp_path: Path) -> None:
    data = materials()
    known = run_study("unmixing", data=save(tmp_path, **data), tiles=2, rounds=40)
    del data["endmembers"]
    without = run_study("unmixing", data=save(tmp_path, "b.npz", **data), tiles=2, rounds=40)
    assert not [name for name in without.metrics if name.startswith("sad")]
    assert without.metrics["error"] == pytest.approx(known.metrics["error"])
    found = [one.arrays["spectra_network"] for one in (known, without)]
    np.testing.assert_array_equal(*found)


def test_jacobian_admm_is_the_papers_recursion_with_one_sign() -> None:
    case = inference.draw("squared", 6, 12, 0.5, np.random.default_rng(0))
    program = case.program(inference.METHODS["jacobian_admm"], penalty=0.3, step=0.4)
    B, W, o = case.topology.adjacency.toarray(), case.atoms[:, 0], inference.OBJECTIVES["squared"]
    c = 0.3 / B.sum(axis=1).mean()
    a = 1 / 6 + 2 * c * B.sum(axis=1)
    multiplier, nu = np.zeros((6, 6, 12)), np.zeros((6, 12))
    for _ in range(6):
        b = case.X / 6 + multiplier.sum(axis=1) + 2 * c * B @ nu
        s = (W * b).sum(axis=1) / a
        y = (s - np.clip(s, -o.gamma, o.gamma)) / (o.delta + 1 / a)
        nu = (b - y[:, None] * W) / a[:, None]
        multiplier -= 0.4 * c * B[..., None] * (nu[:, None] - nu)
    found = InMemoryNetwork(case.topology).run(program, 6).observed["nu"]
    np.testing.assert_allclose(found[:, 0], nu, atol=1e-12)


def test_the_papers_figure_of_a_fully_connected_network() -> None:
    """The slowest error shrinks by 1 - mu eta / N per round: 40 dB after at most 458 rounds."""
    options = {"dimension": 300, "density": 0.1, "connectivity": 1.0, "loss": "huber", "step": 0.5}
    network = {"agents": 10, "seeds": 1, "rounds": 500}
    found = run_study("inference", **network, **options)
    latest = np.ceil(np.log(100) / -np.log(1 - 0.5 * 0.2 / 10))
    assert 0.9 * latest < found.metrics["rounds_to_40db_atc"] <= latest
    assert found.curves["snr_atc_nu"][99] < 40 < found.curves["snr_atc_y"][99]
    assert found.metrics["rounds_to_40db_admm"] < 100


@pytest.mark.parametrize(
    ("shape", "window"), [((28, 28), 11), ((8, 8), 7), ((5, 9), 5), ((3, 3), 3)]
)
def test_ssim_is_scikit_images(shape: tuple[int, int], window: int) -> None:
    rng = np.random.default_rng(0)
    images = rng.random((6, *shape))
    rebuilt = images + 0.3 * rng.standard_normal(images.shape)
    expected = [
        reference(x, y, data_range=1, gaussian_weights=True, sigma=1.5, win_size=window)
        for x, y in zip(images, np.clip(rebuilt, 0, 1), strict=True)
    ]
    np.testing.assert_allclose(structural_similarity(images, rebuilt), expected, atol=1e-12)


def test_quality_by_hand() -> None:
    images = np.array([np.full(9, 0.5), np.zeros(9)])
    rebuilt = np.array([np.full(9, 0.6), np.full(9, 0.01)])
    found = quality(images, rebuilt, (3, 3))
    assert found.mse == pytest.approx((0.01 + 0.0001) / 2)
    assert found.psnr == pytest.approx((20 + 40) / 2)
