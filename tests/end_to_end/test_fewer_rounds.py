"""More work per round, fewer rounds: what a deployment, where messages take seconds, lives on."""

from __future__ import annotations

from perdl_experiments import run_experiment


def test_ten_local_steps_reach_permas_error_in_a_quarter_of_the_rounds() -> None:
    """From a short start the rounds have the work to do; the matching round counts for both."""
    reached = {}
    for steps, rounds in [(1, 16), (10, 4)]:
        options = {"seeds": 1, "start": "short", "local_steps": steps}
        metrics = run_experiment("synthetic", seed=1, rounds=rounds, options=options)["metrics"]
        reached[steps] = metrics["error_global_median"]
    assert reached[10] <= reached[1] < 1e-8
