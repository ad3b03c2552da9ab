"""A real SuperLink and real SuperNodes, with TLS and node authentication."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from flwr_perdl.simulations import run_experiment
from flwr_perdl.simulations.deployment import Deployment, make_certificates, make_key

pytestmark = [pytest.mark.slow, pytest.mark.deployment]


def test_registered_nodes_learn_what_a_run_in_process_learns_and_others_are_refused(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    with Deployment(tmp_path / "deployment", 3, tls=True) as deployment:
        deployment.make_key("stranger")
        stranger = deployment.start_node(0, key="stranger", name="stranger")
        deployment.run({"experiment": "digits", "rounds": 2, "out": str(out)}, timeout=400)
        refused = stranger.poll()
        processes = [*deployment.nodes]
    assert refused not in (None, 0), "the unregistered SuperNode is still running"
    assert all(process.poll() is not None for process in processes)
    local = tmp_path / "local"
    run_experiment("digits", clients=3, rounds=2, out=local)
    with np.load(out / "arrays.npz") as deployed, np.load(local / "arrays.npz") as in_process:
        np.testing.assert_array_equal(deployed["global_atoms"], in_process["global_atoms"])


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    with (
        Deployment(tmp_path, 2) as deployment,
        pytest.raises(RuntimeError, match="rounds must be at least 1, got 0"),
    ):
        deployment.run({"experiment": "digits", "rounds": 0}, timeout=300)


def test_secrets_are_the_owners_alone(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    public = make_key(tmp_path, "node")
    for secret in ("server.key", "node"):
        assert stat.S_IMODE((tmp_path / secret).stat().st_mode) == 0o600
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")


def test_a_superlink_that_does_not_come_up_is_named_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    broken = folder / "flower-superlink"
    broken.write_text("#!/bin/sh\necho no room left\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    with (
        pytest.raises(RuntimeError, match=r"(?s)superlink did not come up.*no room left"),
        Deployment(tmp_path / "deployment", 1),
    ):
        pass
