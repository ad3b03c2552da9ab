"""What a run takes after its last round, by number of clients.

Run from the repository's root: ``python benchmarks/reports.py``; it writes
``benchmarks/results/reports.json`` and its table, ``reports.md``. The experiment is ``synthetic``,
of one seed and 20 rounds, whose errors are drawn instead of learned. Measured are tables and
pictures, the files, and ``flwr-perdl report``, which writes report.html and prints every table.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from _measure import cell, in_turn, main
from typer.testing import CliRunner

from perdl_experiments.cli import app
from perdl_experiments.outcome import to_results, write
from perdl_experiments.render import markdown_table
from perdl_experiments.studies import configure, find, synthetic

SIZES, ROUNDS, TURNS = (100, 1_000, 10_000), 20, 3


def seed(n_clients: int) -> dict[str, np.ndarray]:
    """Return what a federation leaves: errors of a tenth of the clients that failed alone."""
    rng = np.random.default_rng(0)
    alone = np.where(rng.random(n_clients) < 0.1, rng.random(n_clients), 1e-9)
    return {
        "global": np.geomspace(0.1, 1e-9, ROUNDS),
        "local": 10 ** rng.uniform(-9, -7, n_clients),
        "alone": alone,
        "atoms": np.eye(3, 6),
        "cost": np.array([ROUNDS, 360.0, 360.0]),
    }


def after(n_clients: int) -> None:
    """Do all that follows the last round."""
    study = find("synthetic")
    config: Any = configure(study, clients=n_clients, rounds=ROUNDS, options={"seeds": 1})
    learned = seed(n_clients)
    outcome = synthetic.run(config, None, lambda *_: learned)
    results = to_results(
        outcome,
        study.page,
        **study.describe(config),
        seed=0,
        engine="in-process",
        seconds=0.0,
        clients={str(i): {"asked": ROUNDS, "failed": i % 7 == 0} for i in range(n_clients)},
    )
    with TemporaryDirectory() as folder:
        write(Path(folder), outcome, results)
        printed = CliRunner().invoke(app, ["report", folder], catch_exceptions=False)
        assert printed.exit_code == 0


def measured() -> dict[str, Any]:
    """Return the seconds of each size."""
    turns = in_turn({n: partial(after, n) for n in SIZES}, TURNS)
    *_, before, last = SIZES
    growth = turns[before] / before / (turns[last] / last)
    name = f"each of {before:,} / each of {last:,}: a report"
    return {"seconds": {str(n): of for n, of in turns.items()}, "ratios": {name: growth}}


def tables(results: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    rows = [[f"{int(n):,}", cell(of, ".2f")] for n, of in results["seconds"].items()]
    said = (
        "Experiment `synthetic`, one seed: tables, pictures, results.json, report.html, and every "
        f"table on a terminal. Medians of {TURNS} turns, and their range.\n\n"
    )
    return said + markdown_table(["clients", "processor seconds"], rows)


if __name__ == "__main__":
    main("reports", __doc__.partition("\n")[0], measured, dict, tables)
