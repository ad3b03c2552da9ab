import json
from html.parser import HTMLParser
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from perdl_experiments import plots
from perdl_experiments.outcome import Outcome, to_results, write
from perdl_experiments.render import Record
from perdl_experiments.report import odd_clients, read_results, render, write_report

RUN = {
    "experiment": "digits",
    "about": "A <b>bold</b> claim",
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


def test_results_have_every_key_of_the_schema(tmp_path):
    outcome = make_outcome()
    write(tmp_path, outcome, to_results(outcome, PAGE, **RUN))
    results = json.loads((tmp_path / "results.json").read_text())
    types = {
        "experiment": str,
        "config": dict,
        "seed": int,
        "engine": str,
        "versions": dict,
        "metrics": dict,
        "curves": dict,
        "rounds": int,
        "floats_up": float,
        "floats_down": float,
        "seconds": float,
    }
    for key, kind in types.items():
        assert type(results[key]) is kind, key
    assert results["metrics"] == {"mse": 0.5}
    assert results["curves"] == {"error": [1.0, 0.5]}
    assert set(results["versions"]) == {"flwr-perdl", "flwr", "numpy", "scipy", "python"}
    with np.load(tmp_path / "arrays.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["global_atoms"], np.eye(2))


@pytest.mark.parametrize(
    "changes", [{"records": [Record("mse", np.nan)]}, {"curves": {"mse": [1, np.inf]}}]
)
def test_results_refuse_what_is_not_finite(changes):
    with pytest.raises(ValueError, match="mse must be finite"):
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
    counts = {"0": {"asked": 5.0}, "1": {"asked": 5.0, "left out": 2.5, "refused": 1.0}}
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
    assert odd_clients(read_results(tmp_path))["rows"] == [["1", "5", "50%", "1"]]
    assert odd_clients({"clients": {"0": {"asked": 5.0}}}) is None


@pytest.mark.parametrize("content", [None, "not json", "[]", "{}", '{"experiment": "digits"}'])
def test_a_report_needs_a_finished_run(tmp_path, content):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match="must be") as caught:
        write_report(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_sheet_puts_pictures_side_by_side_with_margins():
    sheet = plots._sheet(np.arange(12.0).reshape(3, 4), (2, 2), columns=2)
    gap = np.nan
    np.testing.assert_array_equal(
        sheet,
        [
            [0, 1, gap, 4, 5, gap],
            [2, 3, gap, 6, 7, gap],
            [gap] * 6,
            [8, 9, gap, gap, gap, gap],
            [10, 11, gap, gap, gap, gap],
            [gap] * 6,
        ],
    )


def test_atoms_are_scaled_to_their_greatest_entry_with_zero_in_the_middle():
    scaled = plots._scaled(np.array([[0.0, -4.0, 2.0], [0.0, 0.0, 0.0]]))
    np.testing.assert_array_equal(scaled, [[0.5, 1.0, 0.25], [0.5, 0.5, 0.5]])


def test_levels_and_curves_are_drawn_and_named():
    figure = plots.lines({"a": [1.0, 0.0]}, x="round", y="error", levels={"b": 0.5}, log=True)
    (axes,) = figure.axes
    assert axes.get_legend_handles_labels()[1] == ["a", "b"]
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [1, 1e-16])
    assert [text.get_text() for text in axes.texts] == ["a", "b"]


def test_dots_show_every_value_and_none_below_the_floor():
    figure = plots.dots({"a": [[1.0, 2.0, 4.0]], "b": [[0.0]]}, x="client", y="error", floor=1e-8)
    first, second = (line.get_ydata() for line in figure.axes[0].lines)
    np.testing.assert_array_equal(first, [1, 2, 4])
    np.testing.assert_array_equal(second, [1e-8])


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.lists(st.floats(0.01, 0.15), min_size=6, max_size=6),
)
@settings(deadline=None, max_examples=50)
def test_names_of_lines_do_not_overlap_and_keep_their_order(ends, sizes):
    ends, sizes = np.array(ends), np.array(sizes[: len(ends)])
    at = plots._pushed_apart(ends, sizes)
    order = np.argsort(ends)
    gaps = np.diff(at[order])
    ties = np.diff(ends[order]) == 0
    room = (sizes[order][1:] + sizes[order][:-1]) / 2
    assert (np.abs(gaps) >= room - 1e-9).all()
    assert (gaps[~ties] > 0).all()
    assert (at - sizes / 2 >= -1e-9).all()
    alone = plots._pushed_apart(np.array([0.5]), np.array([0.1]))
    np.testing.assert_array_equal(alone, [0.5])


def test_a_figure_is_described_by_what_it_shows():
    figure = plots.lines(
        {"PerMA": [0.5, 1.0, 0.001]}, x="round", y="error", levels={"alone": 0.25}, log=True
    )
    assert plots.describe(figure) == (
        "error against round: PerMA from 0.5 by way of 1 to 0.001; alone at 0.25."
    )
    shown = plots.atoms({"planted": np.eye(4), "learned": np.eye(4)}, (2, 2))
    assert plots.describe(shown) == "picture: planted. picture: learned."


#: Deuteranopia (Machado, Oliveira, Fernandes 2009, severity 1), on linear RGB; linear RGB to XYZ.
DEUTERANOPIA = [
    [0.367322, 0.860646, -0.227968],
    [0.280085, 0.672501, 0.047413],
    [-0.011820, 0.042940, 0.968881],
]
XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]


def linear(color):
    values = np.array(to_rgb(color))
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE L*a*b* of linear RGB, white D65."""
    xyz = XYZ @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_colors_of_lines_stay_apart_without_red_and_green_and_read_on_white():
    for one in plots.COLORS:
        assert 1.05 / (XYZ[1] @ linear(one) + 0.05) > 4.5, one  # WCAG's contrast for text
    for one, other in combinations(plots.COLORS, 2):
        for seen in (np.eye(3), np.array(DEUTERANOPIA)):
            assert np.linalg.norm(lab(seen @ linear(one)) - lab(seen @ linear(other))) > 20


def test_the_report_says_what_its_figures_show_and_inverts_no_picture(tmp_path):
    chart = plots.lines({"a": [1.0, 0.5]}, x="round", y="error")
    sheet = plots.atoms({"planted": np.eye(4)}, (2, 2))
    outcome = make_outcome(figures={"error": chart, "atoms": sheet})
    figures = [*PAGE["figures"], {"file": "atoms.png", "title": "Atoms", "caption": "Four."}]
    said = {**figures[1], "alt": "Planted atoms, the error is {mse:g}."}
    page = {**PAGE, "figures": [figures[0], said]}
    write(tmp_path, outcome, to_results(outcome, page, **RUN))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<img class='chart' alt='error against round: a from 1 to 0.5.'" in text
    assert "<img alt='Planted atoms, the error is 0.5.'" in text


def test_a_file_name_that_is_no_text_is_shown_with_its_bytes(tmp_path):
    outcome = make_outcome()
    run = {**RUN, "config": {"clients": 3, "data": b"a\xff.npz".decode(errors="surrogateescape")}}
    write(tmp_path, outcome, to_results(outcome, PAGE, **run))
    assert r"data=a\udcff.npz" in write_report(tmp_path).read_text(encoding="utf-8")
