"""The experiment cameras: its sites, and what it measures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from perdl_experiments.studies import cameras
from tests.studies import config_of, save

#: Which camera undoes another; all others undo themselves.
BACK = {f"turned {a}": f"turned {b}" for a, b in (("left", "right"), ("right", "left"))}
BACK |= {f"moved {a}": f"moved {b}" for a, b in (("left", "right"), ("right", "left"))}
BACK |= {"moved up": "moved down", "moved down": "moved up"}


def test_no_image_to_choose_by_or_to_measure_is_one_that_a_site_trained_with() -> None:
    sites, shape, _ = cameras.load_sites(config_of("cameras"), 0)
    everything = {row.tobytes() for row in load_digits().data / 16}
    trained, held_out = set(), [set(), set()]
    for site in sites:
        back = BACK.get(site.camera, site.camera)
        usual = [site.train[:60], cameras.seen(site.train[60:], shape, back)]
        trained |= {np.ascontiguousarray(row).tobytes() for X in usual for row in X}
        for known, (seen, own) in zip(held_out, (site.choose, site.test), strict=True):
            for X in (seen, cameras.seen(own, shape, back)):
                known |= {np.ascontiguousarray(row).tobytes() for row in X}
    assert len(trained) == 8 * 90
    assert trained | held_out[0] | held_out[1] <= everything
    assert not trained & (held_out[0] | held_out[1])
    assert not held_out[0] & held_out[1]


def test_images_need_no_labels_may_be_few_and_of_any_shape(tmp_path: Path) -> None:
    X = np.random.default_rng(0).random((60, 6, 9))
    config = config_of("cameras", data=save(tmp_path, X=X), sites=4, common=20, own=10)
    sites, shape, (common, own) = cameras.load_sites(config, 0)
    assert shape == (6, 9)
    assert (common, own) == (8, 4)
    assert len({site.camera for site in sites}) == 4
    assert not any("turned" in site.camera for site in sites)
    assert config.sized.n_atoms == 27
    with pytest.raises(ValueError, match=r"^data"):
        cameras.load_sites(config_of("cameras", data=config.data, sites=14, own=1), 0)
    with pytest.raises(ValueError, match=r"^sites"):
        cameras.load_sites(config_of("cameras", data=config.data, sites=15), 0)
