"""What a run shows: the log, a bar, lines where there is no tqdm, or nothing; and short reprs."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import PerMA

X = np.random.default_rng(0).standard_normal((3, 30, 6))


def grid() -> InProcessGrid:
    def make_client(context: Context) -> DictionaryClient:
        own = X[int(context.node_config["partition-id"])]
        return DictionaryClient(own, OrthogonalLearner(5), context)

    return InProcessGrid(client_app(make_client), len(X))


@pytest.mark.parametrize("verbose", ["log", "bar", "lines", "quiet"])
def test_a_run_shows_what_is_asked(
    verbose: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if verbose == "lines":
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    logger = logging.getLogger("flwr")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, "flwr")
    strategy = PerMA(n_global=2)
    strategy.start(grid(), num_rounds=2, verbose="bar" if verbose == "lines" else verbose)
    assert logger.level == logging.INFO
    assert bool(caplog.records) == (verbose == "log")
    error = capfd.readouterr().err
    last = strategy.history[-1].aggregate["loss"]
    if verbose == "bar":
        assert "PerMA: 100%" in error
        assert f"loss={last:.4g}" in error
    elif verbose == "lines":
        assert error.splitlines()[-1].startswith("PerMA: round 2 of 2: mse ")
        assert error.rstrip().endswith(f"loss {last:.4g}")
    else:
        assert not error


def test_an_unknown_way_to_show_is_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match="verbose must"):
        PerMA(n_global=2).start(grid(), verbose="loud")
