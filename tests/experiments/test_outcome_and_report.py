from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure

from perdl_experiments.outcome import Outcome, to_results, write
from perdl_experiments.render import Record
from perdl_experiments.report import odd_clients, read_results, render, write_report

RUN = {
    "experiment": "digits",
    "title": "A <b>bold</b> claim",
    "about": "What it is about",
    "source": "a paper",
    "config": {"clients": 3, "rounds": 2},
    "seed": 0,
    "engine": "in-process",
    "seconds": 1.25,
}


PAGE = {
    "finding": "The error is {mse}.",
    "metrics": {"mse": "mse"},
    "tables": [
        {
            "title": "Errors",
            "caption": "All of them.",
            "rows": "method",
            "columns": [{"title": "k & 5", "metric": "mse", "show": "{value:.1f}"}],
        }
    ],
    "figures": [{"file": "error.png", "title": "Error", "caption": "Falls."}],
    "notes": ["A note."],
}


def make_outcome(**changes):
    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot([0, 1])
    outcome = Outcome(
        records=[Record("mse", np.float64(0.5), "a < b")],
        curves={"error": np.array([1.0, 0.5])},
        arrays={"global_atoms": np.eye(2)},
        figures={"error": figure},
        rounds=2,
        floats_up=10,
        floats_down=20,
    )
    return outcome._replace(**changes)


def test_a_chart_is_written_as_svg_too_with_its_text_and_the_same_bytes(tmp_path):
    figure = Figure(figsize=(1, 1))
    figure.add_subplot().plot([0, 1], label="a line")
    figure.axes[0].text(0, 0, "0.02533")
    outcome = make_outcome(figures={"error": figure})
    results = to_results(outcome, PAGE, **RUN)
    write(tmp_path, outcome, results)
    drawn = (tmp_path / "error.svg").read_bytes()
    assert b">0.02533</text>" in drawn
    write(tmp_path, outcome, results)
    assert (tmp_path / "error.svg").read_bytes() == drawn


@pytest.mark.parametrize(
    "changes", [{"records": [Record("mse", np.nan)]}, {"curves": {"mse": [1, np.inf]}}]
)
def test_results_refuse_what_is_not_finite(changes):
    with pytest.raises(ValueError, match=r"^mse"):
        to_results(make_outcome(**changes), PAGE, **RUN)


class Page(HTMLParser):
    """Checks that tags close in order, and collects text and what the page refers to."""

    void = frozenset({"meta", "img", "br"})

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.links = [], [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_report_is_one_page_that_needs_nothing_else(tmp_path):
    outcome = make_outcome()
    write(tmp_path, outcome, to_results(outcome, PAGE, **RUN))
    path = write_report(tmp_path)
    page = Page(path.read_text(encoding="utf-8"))
    assert len(page.links) == 1
    assert page.links[0].startswith("data:image/png;base64,")
    text = " ".join(page.text)
    for words in (
        "A <b>bold</b> claim",
        "a < b",
        "k & 5",
        "The error is 0.5.",
        "All of them.",
        "Falls.",
    ):
        assert words in text
    assert "url(" not in path.read_text(encoding="utf-8")
    assert render(read_results(tmp_path), tmp_path) == path.read_text(encoding="utf-8")


def test_the_report_names_clients_whose_replies_were_odd(tmp_path):
    honest = {name: {"asked": 5.0, "left out": 1.2} for name in "0234"}  # by little, as many others
    counts = {**honest, "1": {"asked": 5.0, "left out": 4.0, "refused": 1.0}}
    outcome = make_outcome()
    write(tmp_path, outcome, to_results(outcome, PAGE, **RUN, clients=counts))
    text = " ".join(Page(write_report(tmp_path).read_text(encoding="utf-8")).text)
    assert "Clients whose replies failed or stood out" in text
    assert odd_clients(read_results(tmp_path))["columns"] == [
        "client",
        "asked",
        "left out",
        "refused",
    ]
    assert odd_clients(read_results(tmp_path))["rows"] == [["1", "5", "80%", "1"]]
    assert odd_clients({"clients": {"0": {"asked": 5.0}}}) is None


@pytest.mark.parametrize("content", [None, "not json", "[]", "{}", '{"experiment": "digits"}'])
def test_a_report_needs_a_finished_run(tmp_path, content):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=tmp_path.name):
        write_report(tmp_path)
