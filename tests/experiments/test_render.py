"""Records become names, tables and sentences, as a page says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perdl_experiments import render
from perdl_experiments.render import FAILED, Record

RECORDS = [
    Record("error", [1.0, 3.0, 2.0], "ours", {"k": 5}),
    Record("error", [4.0, 4.0, 4.0], "ours", {"k": 10}),
    Record("error", [0.5, 0.5, 9.0], "theirs", {"k": 5}),
    Record("rounds", [7.0, np.inf, np.inf], "ours", unit="rounds"),
    Record("setting", "step 2", "ours"),
]


def page(**parts: Any) -> dict[str, Any]:
    return {"metrics": {"error_{method}_{k}": {"of": "error", "statistic": "median"}}, **parts}


def test_a_table_is_records_by_rows_and_columns() -> None:
    spec = {
        "title": "Errors",
        "caption": "With {rounds:*round}.",
        "rows": "method",
        "columns": [
            {"title": "k = {k}", "metric": "error", "show": "{min:.1f}…{max:.1f}", "each": ["k"]},
            {"title": "rounds", "metric": "rounds", "show": "{median:.0f}"},
            {"title": "set to", "metric": "setting", "show": ""},
        ],
    }
    words = {"method": {"ours": "ours ({rounds})"}}
    failed = [*RECORDS, Record(FAILED, "no memory", "other")]
    shown = page(tables=[spec], words=words, notes=["{k:*client}.", {"text": "no", "when": "x"}])
    facts = {"rounds": 1, "k": 2, "x": False}
    (table,) = render.tables(shown, failed, facts)
    assert table.caption == "With 1 round."
    assert list(table.columns) == ["", "k = 5", "k = 10", "rounds", "set to"]
    assert list(table.rows) == [
        ["ours (1)", "1.0…3.0", "4.0…4.0", "never", "step 2"],
        ["theirs", "0.5…9.0", "-", "-", "-"],
        ["other", "failed", "-", "-", "-"],
    ]
    notes = render.report(shown, failed, facts)["notes"]
    assert notes == ["2 clients.", "other failed: no memory."]
    assert render.tables(page(tables=[spec]), [], facts) == []


def test_a_table_marks_the_best_and_says_what_is_gained() -> None:
    error = {"title": "error", "metric": "error", "show": "{mean:.2f}", "better": "lower"}
    gain = {"title": "gain", "metric": "error", "show": "{median:+.0%}", "better": "lower"}
    score = {"title": "score", "metric": "score", "show": "{value}", "better": "higher"}
    lead = {**score, "title": "lead", "show": "{value:+.1f}", "over": {"method": "a"}}
    spec = {"title": "", "caption": "", "rows": "method"}
    spec["columns"] = [error, {**gain, "over": {"method": "a"}}, score, lead]
    records = [Record("error", np.array([2.0, 4.0]), "a"), Record("error", np.array([1, 1.0]), "b")]
    records += [Record("score", 0.5, "a"), Record("score", 0.25, "b"), Record("error", 0.0, "c")]
    (table,) = render.tables({"tables": [spec]}, records, {})
    assert list(table.rows) == [
        ["a", "3.00", "-", "0.5", "-"],
        ["b", "1.00", "+62%", "0.25", "-0.2"],
        ["c", "0.00", "-", "-", "-"],  # of other seeds
    ]
    assert table.best == [[2, 1], [0, 3]]
    (across,) = render.tables({"tables": [{**spec, "best": "row"}]}, records, {})
    assert across.best == [[0, 3], [1, 3]]
    assert "<b>0.00</b></td>" in render.html_table(table._asdict())


def test_a_table_of_many_clients_shows_quantiles_and_the_worst_and_keeps_all() -> None:
    first = {"title": "first", "metric": "first", "show": "{value:.0f}", "better": "higher"}
    columns = [first, {**first, "title": "last", "metric": "last", "better": "lower"}]
    columns.append({"title": "note", "metric": "note", "show": ""})
    spec = {"title": "", "caption": "All.", "rows": "client", "columns": columns}

    def table(n: int, rows: str) -> Any:
        values = {"first": range(n), "last": [i // 2 for i in range(n)], "note": ["x"] * n}
        records = [
            Record(metric, value, parameters={rows: f"c{i}"})
            for metric, them in values.items()
            for i, value in enumerate(them)
        ]
        return render.tables({"tables": [{**spec, "rows": rows}]}, records, {})[0]._asdict()

    every = table(101, "client")
    shown = render.brief(every)
    assert len(every["rows"]) == 101
    assert [row[1:] for row in shown["rows"][:5]] == [
        [str(n), str(n // 2), "-"] for n in (0, 25, 50, 75, 100)
    ]
    # The last column decides, and where it is equal, the one before, of which less is worse.
    assert [row[0] for row in shown["rows"][5:9]] == ["c100", "c98", "c99", "c96"]
    assert len(shown["rows"]) == 25
    assert shown["caption"].startswith("All. ")
    for same in (table(50, "client"), table(101, "method")):
        assert render.brief(same) == same


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0, 2.0, 6.0], "It is 2 (range 1 to 6)."),
        ([*range(41)], "It is 20 (95 % interval 14 to 26)."),
        ([3.0, 3.0], "It is 3."),
        (3.0, "It is 3."),
    ],
)
def test_a_number_of_the_first_sentence_has_the_interval_of_its_repetitions(
    values: Any, said: str
) -> None:
    median = {"of": "error", "statistic": "median"}
    shown = {"finding": "It is {error:interval}.", "metrics": {"error": median}}
    records = [Record("error", np.asarray(values))]
    assert render.report(shown, records, {})["finding"] == said


def test_one_number_is_less_than_another_by_more_than_a_trifle() -> None:
    assert not render.is_less(20.0, 20.05, "psnr_a psnr_b")
    assert render.is_less(20.0, 20.2, "psnr_a psnr_b")
    assert not render.is_less(20.0, 20.15)
