"""Every study once, small: what its page has is whole, and what it shows holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

from perdl_experiments.data import planted_clients
from perdl_experiments.studies import EXPERIMENTS, find
from tests.studies import (
    Kept,
    clip,
    counted,
    materials,
    mixed,
    news,
    run_study,
    save,
    slopes,
    subjects,
    weather,
)


class Case(NamedTuple):
    """A study, its options, and what holds of its metrics."""

    study: str
    options: dict[str, Any]
    """With a function as ``data`` that makes a file's arrays."""
    claims: tuple[str, ...]
    """Metrics or numbers in ascending order, as in "a b* < 0.5": all of the left are less."""


def sites(folder: Path) -> str:
    """Write a file for each of three sites with three atoms in common."""
    made = planted_clients(np.random.default_rng(0), [6] * 3, [200] * 3, 3, n_features=8)
    for i, X in enumerate(made.samples):
        save(folder, f"{i}.npz", X=X)
    return str(folder)


def digits() -> dict[str, Any]:
    X, y = load_digits(return_X_y=True)
    return {"X": X, "y": y, "client": np.arange(len(X)) % 4}


def topics() -> dict[str, Any]:
    """Return 2,000 documents, the last topic in the second half only."""
    rng = np.random.default_rng(0)
    terms = rng.random((5, 40)) ** 6
    y = np.r_[rng.integers(4, size=1000), rng.integers(5, size=1000)]
    return counted(rng.poisson(4 * terms[y]).astype(float), y)


def stream() -> dict[str, Any]:
    found = news(2, n_terms=1500)
    return counted(found.counts, found.topics)


DICTIONARY = {"n_atoms": 12, "n_global": 6, "samples_per_client": 40}
SMALL_CAMERAS = {"sites": 2, "common": 16, "own": 8, "n_atoms": 4, "n_nonzero": 2}
COMPARED = {"dimensions": "6", "sizes": "4", "densities": "20", "weak_samples": 12}
NETWORKS = {"agents": 10, "dimension": 30, "connectivity": 0.5, "seeds": 1, "rounds": 400}
CASES = [
    Case(
        "digits",
        {**DICTIONARY, "clients": 3, "rounds": 6, "methods": "all"},
        ("mse_tuned_perma_full_10 < mse_tuned_perma_10 mse_tuned_naive_10",),
    ),
    Case(
        "images", {**DICTIONARY, "data": digits, "clients": 4, "rounds": 2, "methods": "main"}, ()
    ),
    Case(
        "sites",
        {"data": sites, "rounds": 8, "n_atoms": 6, "n_global": "3", "learner": "orthogonal"},
        ("mse_full < 1e-12 < mse_global",),
    ),
    Case(
        "cameras",
        {**SMALL_CAMERAS, "seeds": 1, "rounds": 2},
        ("0 < error_common_* error_own_*", "error_common_* < 0.1"),
    ),
    Case(
        "synthetic",
        {"seeds": 2, "atoms": "5,6,7", "start": "good", "rounds": 5},
        ("error_local_max error_start_max < 1e-6", "0.9 < share_below_1e_6"),
    ),
    Case(
        "synthetic",
        {"seeds": 2, "weak": 3, "start": "good"},
        ("1e-2 < error_independent_max", "0.9 < share_below_1e_6"),
    ),
    Case(
        "global-atoms",
        {"seeds": 1, "n_global": "0,4,10"},
        ("0.9 < correct_0 correct_4 correct_10 correct_paths_4 correct_consensus_4",),
    ),
    Case(
        "comparison",
        {**COMPARED, "clients": 6, "rounds": 12, "seeds": 1},
        (
            "error_perma error_shared_local error_own_local < 1e-6",
            "0.1 < error_averaging* error_naive error_perpca error_pooled*",
            "error_shared_weak_perma < 1e-2 < error_shared_weak_local",
        ),
    ),
    Case(
        "complete",
        {"samples_per_client": 60, "rounds": 8, "n_atoms": 32},
        (
            "mse_perma_10 < mse_local_10 < mse_zero_10 < mse_huang_10",
            "mse_omp_huang_10 < mse_omp_perma_10 < mse_omp_local_10",
        ),
    ),
    Case(
        "federations",
        {"seeds": 1, "sizes": "8,30", "failures": "0,40", "weak": 4, "weak_samples": "20,200"}
        | {"clients": 10, "rounds": 6},
        (
            "0.9 < recovered_*_consensus",
            "0.05 < error_clients_30_alone error_failing_40_alone error_weak_size_20_alone",
            "error_weak_size_200_alone < 1e-6",
        ),
    ),
    Case(
        "private",
        {"clients": 4, "rounds": 3, "epsilon": 200.0, "trust": "central"},
        ("error_not_private < error_public",),
    ),
    Case(
        "video",
        {"data": partial(clip, 0, n_frames=10, size=32), "rounds": 6},
        ("0.9 < auc_objects", "psnr_raw < psnr_background"),
    ),
    Case(
        "personal",
        {"clients": 8, "rounds": 40, "seeds": 1, "images": 20, "hidden": 16}
        | {"kinds": "labels", "methods": "fedper"},
        ("accuracy_labels_fedavg < 0.5 < accuracy_labels_alone < accuracy_labels_fedper",),
    ),
    Case(
        "rotated-digits",
        {"clients": 12, "rounds": 6, "seeds": 1, "hidden": 16, "starts": "one-shot,given"},
        ("accuracy_fedavg < accuracy_oracle", "0.99 < right_one-shot"),
    ),
    Case(
        "patients",
        {"data": mixed, "seeds": 2, "rounds": 1, "n_train": 12},
        (
            "error_slopes error_alone < error_pooled error_intercepts error_fedavg",
            "error_fedavg-tuned < error_fedavg",
            "error_exchange-columns < error_exchange < error_forest error_boosting",
            "lead_low_slopes < lead_slopes < lead_high_slopes",
        ),
    ),
    Case(
        "people",
        {"seeds": 1, "rounds": 3, "shares": "60", "hidden": 8}
        | {
            "methods": "fedavg-long,fedper,lg-fedavg,ditto,clustered,diffusion,ifca,exchange-small,"
            "exchange-alone,pooled,forest,boosting"
        },
        (
            "accuracy_60_fedavg accuracy_60_pooled < 0.9 < accuracy_60_alone",
            "accuracy_60_forest accuracy_60_boosting < 0.92 < accuracy_60_exchange-alone",
            "0.92 < accuracy_60_exchange-small",
            "accuracy_60_alone < accuracy_60_fedavg-tuned",
            "megabytes_60_fedavg < megabytes_60_fedavg-long < megabytes_60_exchange-small",
            "megabytes_60_lg-fedavg < megabytes_60_fedper < megabytes_60_fedavg",
        ),
    ),
    Case(
        "stations",
        {"seeds": 1, "rounds": 4, "n_atoms": 12, "n_nonzero": 3, "days": 40},
        (
            "error_filled_perma < error_filled_alone error_filled_shared error_filled_averaging",
            "n_global < 12",
        ),
    ),
    Case(
        "mixed-regression",
        {"setting": "C1", "seeds": 1, "rounds": 12},
        (
            "error_ours < error_fedavg",
            "0.99 < share_within_5pct_of_oracle",
            "0.9999 < error_over_oracle_max < 1.0001",
            "5 < rounds_median < 9",
        ),
    ),
    Case("regression", {"splits": 2}, ("ev_pooled < ev_clustered", "1.9 < k < 2.1")),
    Case(
        "regression",
        {"splits": 1, "bundled": "diabetes", "rounds": 10},
        ("0.9 < k < 1.1",),
    ),
    Case("regression", {"data": slopes, "splits": 1}, ("ev_pooled < 0.2", "0.9 < ev_fedx")),
    Case(
        "decentralized",
        {"clients": 6, "rounds": 12, "seeds": 1, "local_steps": 2},
        (
            "spectral_gap_ring < spectral_gap_torus < spectral_gap_complete",
            "accuracy_alone < 0.6 < accuracy_fedavg",
        ),
    ),
    Case(
        "decentralized",
        {"clients": 4, "rounds": 4, "seeds": 1, "shards": 0, "changing": 1}
        | {"larger": 8, "larger_rounds": 2},
        ("spectral_gap_ring_larger < spectral_gap_ring", "0.6 < accuracy_alone"),
    ),
    Case(
        "forecast",
        {"data": weather, "seeds": 1, "rounds": 12, "days": 15},
        ("error_exact < error_alone", "megabytes_topk < megabytes_tracking"),
    ),
    *(
        Case(
            "inference",
            {**NETWORKS, "loss": loss},
            (
                "rounds_to_40db_atc < 0 < rounds_to_40db_admm < rounds_to_40db_plain_admm",
                "100 < agreement_db",
            ),
        )
        for loss in ("squared", "huber")
    ),
    Case(
        "inference",
        {"data": topics, "agents": 4, "rounds": 500, "seeds": 2, "connectivity": 1.0}
        | {"loss": "huber", "step": 0.5, "dimension": 40},
        ("40 < decibels_atc",),
    ),
    Case("patches", {"seeds": 2, "rounds": 12, "samples": 60}, ("-1 < recovered_min_least",)),
    *(
        Case(
            "novel-documents",
            {"data": stream, "clients": 3, "rounds": 40, "terms": 300, "block": 40, **more},
            ("0.7 < area_network",),
        )
        for more in (
            {},
            {"score": "paper", "connectivity": 1.0, "rounds": 60},
            {"learning": "codes", "counts": "log", "connectivity": 1.0},
        )
    ),
    Case(
        "biclustering",
        {"data": subjects, "seeds": 1, "atoms": 2, "rounds": 2},
        ("0.95 < ari_ssvd", "0.6 < ari_diffusion", "2.9 < k < 3.1"),
    ),
    Case(
        "denoise",
        {"size": 64, "atoms": 49, "rounds": 60},
        (
            "psnr_noisy < 21 < 25 < psnr_denoised psnr_sklearn psnr_nlm",
            "ssim_noisy < ssim_denoised",
        ),
    ),
    Case(
        "unmixing",
        {"rounds": 30, "tiles": 3},
        ("sad_mean < sad_worst < 0.05 < sad_isolated",),
    ),
    Case("unmixing", {"data": materials, "tiles": 2, "rounds": 40}, ("sad_worst < sad_isolated",)),
]


def test_every_study_is_here() -> None:
    assert {case.study for case in CASES} == {*EXPERIMENTS}


@pytest.mark.parametrize("case", CASES, ids=[f"{one.study}-{i}" for i, one in enumerate(CASES)])
def test_a_study_shows_what_its_page_says(case: Case, tmp_path: Path) -> None:
    experiment, kept, options = find(case.study), Kept(), dict(case.options)
    if (data := options.get("data")) is not None:
        options["data"] = data(tmp_path) if data is sites else save(tmp_path, **data())
    with threadpool_limits(1):  # boosting's threads wait in loops, on cores that others need
        ran = run_study(case.study, kept, **options)
    for claim in case.claims:
        for less, more in pairwise(claim.split(" < ")):
            values = [[*values_of(side, ran.metrics)] for side in (less, more)]
            assert max(values[0]) < min(values[1]), f"{claim}: {values}"
    json.dumps(ran.results, allow_nan=False)
    for table in ran.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title
        assert not {"failed", "nan"} & {cell for row in table.rows for cell in row}, table.title
    said = [ran.results["finding"], *ran.notes, *(one.caption for one in ran.tables)]
    assert all(said)
    assert not any("{" in one or "nan" in one.split() for one in said)
    assert ran.figures
    assert {*ran.figures} <= {*experiment.figures}
    if not experiment.federated:
        kept.whole = True
        assert run_study(case.study, kept, **options).metrics == ran.metrics


def values_of(side: str, metrics: dict[str, float]) -> Iterator[float]:
    """Yield the numbers of a side of a claim; a pattern's are those of all metrics that fit."""
    for word in side.split():
        try:
            yield float(word)
        except ValueError:
            found = [value for name, value in metrics.items() if fnmatch(name, word)]
            assert found, f"{word} is none of {sorted(metrics)}"
            yield from found
