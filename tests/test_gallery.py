"""The gallery: complete, made of its results alone, judged by its numbers, and still true."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import binom, ttest_1samp
from sklearn.datasets import load_digits

from perdl_experiments import run_experiment
from perdl_experiments.fetch import PAPERS as FETCHED
from perdl_experiments.render import PLACE
from perdl_experiments.studies import EXPERIMENTS, configure

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "gallery"
SVG = "{http://www.w3.org/2000/svg}"

#: What the papers show.
#: Fig. 6 twice: of the paper's documents, and of synthetic atoms.
PAPERS = {
    "perma": [*(f"Fig. {n}" for n in range(2, 8)), "Table 1"],
    "distributed": ["Fig. 6", "Fig. 6", "Fig. 7", "Fig. 8", "Table IV"],
    "regression": ["Fig. 1", "Fig. 2", "Fig. 3"],
    "diffusion": ["Section 3: image patches", "Section 3: unmixing"],
}
#: Words that readers of the field wouldn't use, or that say of a loss that it "holds".
AVOIDED = re.compile(
    r"\bP[0-3]\b|\b(alone|liars?|promises?|kinds|floats|trained further)\b"
    r"|(?<!matching )pursuit|\*\*(Holds|Does not hold|Beaten|Matched)",
    re.IGNORECASE,
)


def _load() -> ModuleType:
    """Return docs/gallery.py, which is a script and in no package."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import gallery
    finally:
        sys.path.pop(0)
    return gallery


gallery = _load()
OWN = ("yes", "no", "undecided")
ENTRIES = {entry.name: entry for entry in gallery.entries()}
STORED: dict[str, Any] = json.loads((FOLDER / "results.json").read_text())

each = pytest.mark.parametrize("name", ENTRIES)


def changed(name: str, change: Callable[[dict[str, Any]], None]) -> Any:
    """Return an entry's results after a change to the first run's metrics."""
    results = copy.deepcopy(STORED)
    change(results[name][next(iter(ENTRIES[name].runs))]["metrics"])
    return gallery.Found(ENTRIES[name], results)


def test_every_figure_and_table_of_the_papers_has_an_entry() -> None:
    shown = [(entry.paper, one) for entry in ENTRIES.values() for one in entry.shows]
    assert sorted(shown) == sorted((paper, one) for paper, them in PAPERS.items() for one in them)
    assert gallery.papers().keys() == PAPERS.keys()


@each
def test_results_are_of_the_entry_as_it_stands(name: str) -> None:
    entry, stored = ENTRIES[name], STORED[name]
    code = gallery.fingerprint(entry)
    (commit,) = {one["commit"] for one in stored.values()}
    assert re.fullmatch("[0-9a-f]{10}", commit)
    assert {run: one["options"] for run, one in stored.items()} == entry.runs
    for run, one in stored.items():
        assert one["seeds"] == entry.seeds(run)
        assert len(one["seeds"]) == entry.repeats
        measured = one.get("data", {"file": "", "sha256": "0" * 64})
        assert measured["file"] == entry.data_of(run)
        assert re.fullmatch("[0-9a-f]{64}", measured["sha256"])
        assert one["code"] == code, f"make gallery-check ARGS={name}"
        assert one["kernel"] == gallery.KERNEL
        assert one["versions"].keys() >= {"flwr", "numpy", "scipy"}
        configure(EXPERIMENTS[entry.experiment], seed=0, options=entry.runs[run])
        for spread in [one["seconds"], *one["metrics"].values()]:
            low, median, high = (
                float("inf") if spread[key] is None else spread[key]
                for key in ("low", "median", "high")
            )
            assert low <= median <= high


@pytest.mark.parametrize(
    ("worse", "verdict"),
    [(0.0, "equal within 0.01 at 1/5 the bytes"), (0.01, "undecided"), (0.03, "loss")],
)
def test_the_readme_says_equal_only_within_the_margin(worse: float, verdict: str) -> None:
    ours = copy.deepcopy(STORED["rotated-digits"])
    accuracies = ours["defaults"]["metrics"]["accuracy_one-shot"]
    accuracies["values"] = [one - worse for one in accuracies["values"]]
    table = gallery.readme(STORED | {"rotated-digits": ours}).splitlines()
    (row,) = [line for line in table if "rotated groups" in line]
    assert f"| {verdict}: " in row


def test_pages_say_what_the_results_make_and_nothing_else() -> None:
    made = gallery.pages(STORED)
    assert f"\n\n{gallery.readme(STORED)}\n" in gallery.README.read_text()
    assert {page.name: page.read_text() for page in FOLDER.glob("*.md")} == made
    pages = gallery.listed()
    assert made.keys() == {"index.md", "papers.md", *(f"{page.name}.md" for page in pages)}
    assert sorted(name for page in pages for name in page.entries) == sorted(ENTRIES)
    most = {name: 41 * len(pages) if name == "index.md" else 900 for name in made}
    assert {name: n for name, text in made.items() if (n := len(text.split())) > most[name]} == {}
    for name, text in made.items():
        prose = re.sub("```.*?```|`.*?`", "", text, flags=re.DOTALL)
        assert {one[0] for one in AVOIDED.finditer(prose)} == set(), name
    rows = [
        line.split(" | ") for line in made["papers.md"].splitlines() if "make gallery ARGS" in line
    ]
    papers = {entry.name: entry for entry in ENTRIES.values() if entry.shows}
    named = [re.search(r"ARGS=(\S+?)[ `]", row[3])[1] for row in rows]
    assert sorted(named) == sorted(papers)
    for name, row in zip(named, rows, strict=True):
        entry, found = papers[name], gallery.Found(papers[name], STORED)
        ran = next((page.entries for page in pages if page.name == name), [name])
        runs = [run for one in ran for run in gallery.Found(ENTRIES[one], STORED).runs.values()]
        seconds = [value for run in runs for value in run["seconds"]["values"]]
        assert all(one in row[1] for one in entry.shows)
        assert row[2].lower() == gallery.verdict(entry, found)
        assert abs(float(row[4]) - sum(seconds) / 60) < 1 + 0.1 * sum(seconds) / 60
        assert all(one in row[5] and one.removesuffix(".npz") in FETCHED for one in entry.files)
    for page in pages:
        verdict, picture = made[f"{page.name}.md"].split("\n\n")[1:3]
        assert "**" in verdict
        assert picture.startswith("![")
    assert all(1 <= len(PLACE.findall(entry.finding)) <= 3 for entry in ENTRIES.values())


def test_pictures_of_rounds_have_the_numbers_of_the_table() -> None:
    """The pictures of all seeds: medians that a reader sees twice are the same."""
    metrics = STORED["decentralized"]["defaults"]["metrics"]
    (gaps,) = (
        one
        for one in STORED["decentralized"]["defaults"]["figures"]
        if one["file"].startswith("gaps")
    )
    for nodes, ending in ((16, ""), (64, "_larger")):
        graphs = ("fedavg", "ring", "torus", "exponential", "erdos-renyi", "complete")
        rounds = [metrics[f"rounds_to_fedavg_{one}{ending}"]["median"] for one in graphs]
        assert f"{nodes} nodes between {min(rounds):.3g} and {max(rounds):.3g}" in gaps["alt"]


def test_a_picture_of_the_table_has_all_its_rows_and_the_best_is_bold() -> None:
    charted = [entry for entry in ENTRIES.values() if entry.charted]
    assert {"personal", "cifar-labels", "cifar-skew", "cifar-rotated"} <= {e.name for e in charted}
    for entry in charted:
        drawn = list(ElementTree.parse(FOLDER / f"{entry.name}-methods.svg").iter(f"{SVG}text"))
        texts = " ".join(str(one.text) for one in drawn)
        assert all(text in texts for name in entry.names.values() for text in name.split())
        found = gallery.Found(entry, STORED)
        bold = [str(one.text) for one in drawn if "font-weight: 700" in one.get("style", "")]
        columns = entry.columns if entry.charted == "heat" else entry.columns[:1]
        for column in columns:
            cells = [gallery._reference(column, name, found) for name in entry.names]
            values = [found.get(cell) for cell in cells if cell]
            best = max(values) if column.better == "higher" else min(values)
            form = ".3f" if entry.charted == "heat" else ".4g"
            assert f"{best:{form}}" in bold
            assert all(f"{value:{form}}" in texts for value in values)


def test_every_series_of_a_picture_has_a_color_of_its_own() -> None:
    pictures = list(FOLDER.glob("*.svg"))
    for picture in pictures:
        for group in ElementTree.parse(picture).iter(f"{SVG}g"):
            heat = picture.name == "personal-methods.svg"
            if re.fullmatch(r"axes_\d+", group.get("id", "")) and not heat:
                named = [one for one in group.iter(f"{SVG}g") if "text_" in one.get("id", "")]
                words = [next(one.iter(f"{SVG}text")).get("style", "") for one in named]
                colors = re.findall(r"fill: (#\w+)", " ".join(words))
                assert len(colors) == len({*colors}), picture.name
    assert len(pictures) > 20


# Judgement -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("better", "low", "median", "high", "verdict"),
    [
        ("lower", 0.5, 0.8, 0.89, "better than the paper"),
        ("lower", 0.5, 0.8, 0.91, "reproduced"),
        ("lower", 1.0, 1.09, 9.0, "reproduced"),
        ("lower", 1.0, 1.11, 9.0, "not reproduced"),
        ("lower", 0.5, None, None, "not reproduced"),
        ("higher", 1.11, 1.5, 1.6, "better than the paper"),
        ("higher", 1.09, 1.5, 1.6, "reproduced"),
        ("higher", 0.1, 0.91, 1.0, "reproduced"),
        ("higher", 0.1, 0.89, 2.0, "not reproduced"),
    ],
)
def test_a_figure_is_judged_by_its_worst_run_and_its_median(
    better: str, low: float, median: float | None, high: float | None, verdict: str
) -> None:
    metric = ENTRIES["inference"].figures[0].metric
    found = changed(
        "inference",
        lambda metrics: metrics.update({metric: {"low": low, "median": median, "high": high}}),
    )
    figure = gallery.Figure(metric, "", paper=1.0, better=better, tolerance=0.1)
    assert gallery.verdict_of(figure, found) == verdict
    assert gallery.verdict_of(figure._replace(better=""), found) == ""


@each
def test_a_worse_number_changes_the_verdict(name: str) -> None:
    entry = ENTRIES[name]
    now = gallery.verdict(entry, gallery.Found(entry, STORED))
    assert len({figure.words for figure in entry.figures}) == len(entry.figures)
    if entry.incomparable:
        assert now == "not comparable"
        return
    assert now in (
        ("reproduced", "better than the paper", "not reproduced") if entry.shows else OWN
    )

    found = changed(name, lambda them: None)

    def put(reference: str | float, value: float) -> None:
        if not isinstance(reference, str):
            return
        run, _, metric = reference.rpartition(":")
        count = len(found.metrics(run or found.first)[metric]["values"])
        spread = dict.fromkeys(("low", "median", "high"), value)
        found.metrics(run or found.first)[metric] = {**spread, "values": [value] * count}

    for figure in entry.figures:
        if figure.counts and figure.paper is not None:
            put(figure.metric, figure.paper * (10 if figure.better == "lower" else 0.1))
    for left, right in (pair for claim in entry.claims for pair in claim.less):
        put(left, 1e9)
        put(right, 1.0 if isinstance(left, str) else 0.0)
    if not entry.shows:
        question = entry.questions[0]
        value = 1e9 if question.better == "lower" else -1e9
        for metric in [question.ours, *question.interval]:
            put(metric, value)
        if question.over != "seeds":
            clients = found.runs[found.first]["clients"]
            clients[question.ours] = [value] * len(clients[question.ours])
        if question.over == "seeds" and not question.interval:
            few = len(found.values(question.ours)) < gallery.REPEATS
            assert gallery.verdict(entry, found) == ("undecided" if few else "no")
            return
    assert gallery.verdict(entry, found) == ("not reproduced" if entry.shows else "no")


@pytest.mark.parametrize(
    ("name", "ours", "rival"),
    [
        ("cameras", "error_perma", "error_finetuned"),
        ("digits", "mse_global_10", "mse_local_10"),
        ("cifar-labels", "accuracy_labels_fedper-tuned", "accuracy_labels_tuned"),
    ],
)
def test_a_rival_in_the_place_of_ours_changes_the_answer(name: str, ours: str, rival: str) -> None:
    def swapped(metrics: dict[str, Any]) -> None:
        metrics[ours], metrics[rival] = metrics[rival], metrics[ours]

    assert gallery.verdict(ENTRIES[name], gallery.Found(ENTRIES[name], STORED)) == "yes"
    assert gallery.verdict(ENTRIES[name], changed(name, swapped)) == "no"


@pytest.mark.parametrize(
    ("better", "values", "word", "interval"),
    [
        ("lower", [0.9, 1.6, 2.7, 0.9, 0.9], "yes", "10 to 20 % lower"),
        ("lower", [1.1, 1.8, 3.0, 1.0, 1.0], "undecided", "10 % higher to 10 % lower"),
        ("lower", [1.1, 2.4, 3.0, 1.0, 1.0], "undecided", "0 to 20 % higher"),
        ("higher", [0.9, 1.6, 2.7, 0.9, 0.9], "no", "-0.4 to -0.1"),
        ("higher", [1.5, 2.5, 4.0, 2.0, 2.0], "yes", "+0.5 to +1"),
        ("higher", [1.5, 2.5, 4.0], "undecided", "+0.5 to +1"),
    ],
)
def test_a_question_is_answered_by_the_paired_difference_to_the_best_rival(
    better: str, values: list[float], word: str, interval: str
) -> None:
    def spread(values: list[float]) -> dict[str, Any]:
        return {"low": min(values), "median": values[1], "high": max(values), "values": values}

    n = len(values)
    best, worst = [1.0, 2.0, 3.0, 1.0, 1.0][:n], [9.0] * n if better == "lower" else [0.0] * n
    metrics = {"ours": spread(values), "best": spread(best), "worst": spread(worst)}
    found = changed("digits", lambda them: them.update(metrics))
    rivals = {"a bad one": "worst", "a good one": "best"}
    question = gallery.Question("?", "ours", better, rivals)
    answer = gallery.answer(question, found)
    assert (answer.word, answer.interval, answer.rival) == (word, interval, "a good one")
    assert gallery.answer(question._replace(margin=9.0), found).word == (
        "yes" if n == 5 else "undecided"
    )
    if word == "yes":  # but not if another rival's median is worse and one of its seeds is better
        last = [9.0, 9.0, 0.1, 9.0, 9.0] if better == "lower" else [0.0, 0.0, 9.0, 0.0, 0.0]
        found.metrics(found.first)["worst"]["values"] = last
        answer = gallery.answer(question, found)
        assert (answer.word, answer.rival) == ("undecided", "a bad one")


def test_over_clients_the_means_of_resampled_clients_are_compared() -> None:
    found = changed("parkinsons", lambda them: None)
    question = ENTRIES["parkinsons"].questions[0]._replace(ours="a", rivals={"b": "b"})
    found.metrics(found.first)["b"] = {"median": 2.0}
    clients = {"a": [1.0, 2.0], "b": [2.0, 2.0]}  # means of those drawn: 1, 1.5 or 2 against 2
    found.runs[found.first]["clients"] = clients
    answer = gallery.answer(question, found)
    assert (answer.word, answer.difference) == ("undecided", "25 % lower")
    assert answer.interval == "0 to 50 % lower"
    clients["a"] = [1.0, 1.8]
    assert gallery.answer(question, found).interval == "10 to 50 % lower"
    assert gallery.answer(question, found).word == "undecided"  # two clients decide nothing
    clients |= {"a": [1.0, 1.8] * 3, "b": [2.0] * 6}
    assert gallery.answer(question, found).word == "yes"


def test_holms_correction_confirms_the_surest_answers() -> None:
    """Of m p-values the smallest times m, the next times m - 1 and so on are at most 0.05."""
    sure, n_tested = gallery.confirmed(STORED)
    tested = {
        (name, i): one
        for name, entry in ENTRIES.items()
        for i, question in enumerate(entry.questions)
        if (one := gallery.answer(question, gallery.Found(entry, STORED))).p is not None
    }
    assert len(tested) == n_tested
    p = np.sort([one.p for one in tested.values()])
    corrected = np.maximum.accumulate(p * np.arange(len(p), 0, -1))
    limit = p[corrected <= 0.05].max()
    assert sure == {
        which for which, one in tested.items() if one.p <= limit and one.word != "undecided"
    }
    question, found = ENTRIES["cameras"].questions[0], gallery.Found(ENTRIES["cameras"], STORED)
    worst = max(
        ttest_1samp(1 - np.divide(found.values(question.ours), found.values(rival)), 0).pvalue
        for rival in question.rivals.values()
    )
    assert tested["cameras", 0].p == pytest.approx(worst)


def test_an_interval_is_of_the_statistic_beside_it() -> None:
    values = [0.0, 0.0, 0.0, 0.0, 1.0, 5.0]
    for name, statistic in (("digits", np.median), ("rotated-digits", np.mean)):
        spread = {"low": 0.0, "median": statistic(values), "high": 5.0, "values": values}
        found = changed(name, partial(dict.update, x=spread))
        assert found.interval("x") == gallery.bootstrap(values, statistic)


def test_a_table_of_methods_has_the_best_first_and_ours_in_bold() -> None:
    def spread(value: float) -> dict[str, Any]:
        return dict.fromkeys(("low", "median", "high"), value)

    found = changed("digits", lambda them: them.update(x_ours=spread(2.0), x_other=spread(1.0)))
    columns = [gallery.Column("error", "x_{}", "lower")]
    names = {"ours": "the method", "other": "the rival", "absent": "no row"}
    entry = ENTRIES["digits"]._replace(columns=columns, names=names, ours=["ours"])
    rows = [row.split(" | ") for row in gallery._methods(entry, found).splitlines()[2:]]
    assert [row[0] for row in rows] == ["| the rival", "| **the method**"]


def test_intervals_of_a_few_runs_are_their_range_and_of_many_are_narrower() -> None:
    few = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert gallery.bootstrap(few) == (1.0, 5.0)
    low, high = gallery.bootstrap([float(n) for n in range(41)])
    # Of order statistics: the binomial interval of the median of 41 values.
    below = int(binom.ppf(0.025, 41, 0.5)), int(binom.ppf(0.975, 41, 0.5))
    assert abs(low - below[0]) <= 1
    assert abs(high - below[1]) <= 1


def test_one_run_of_many_seeds_has_its_statistic_and_the_seeds_values() -> None:
    none = gallery.spread("rounds_max", [-1.0], [3.0, -1.0, 2.0])
    assert none == {"median": None, "low": 2.0, "high": None, "values": [3.0, None, 2.0]}
    share = gallery.spread("share", [0.8])
    assert share == {"median": 0.8, "low": 0.8, "high": 0.8, "values": [0.8]}


# Runs ----------------------------------------------------------------------------------------


def test_an_entry_runs_on_the_papers_data_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gallery, "RUNS", tmp_path / "runs")
    digits, entry = load_digits(), ENTRIES["mnist"]
    small = {"methods": "main", "n_atoms": 4, "n_global": 4, "samples_per_client": 9, "rounds": 2}
    runs = {"defaults": {**small, "clients": 2}}
    entry = entry._replace(runs=runs, repeats=1, figures=[], claims=[], questions=[])
    assert gallery.runnable([entry], None) == gallery.runnable([entry], tmp_path) == []
    assert capsys.readouterr().out.count(entry.needs) == 2
    file = tmp_path / entry.needs
    np.savez(file, X=digits.images[:200], y=digits.target[:200])
    (job,) = gallery.runnable([entry], tmp_path)
    job.work()
    assert job.done()
    made_by = job.made_by()
    assert made_by.keys() == {"code", "commit", "kernel"}
    (job.folder / "made_by.json").write_text(json.dumps(made_by | {"code": "another"}))
    assert not job.done()
    (job.folder / "made_by.json").write_text(json.dumps(made_by))
    found = gallery._summary([job])
    assert found["data"] == {
        "file": entry.needs,
        "sha256": sha256(file.read_bytes()).hexdigest(),
    }
    assert str(tmp_path) not in json.dumps(found)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    file.rename(moved / entry.needs)
    assert job._replace(data=moved).done()
    np.savez(moved / entry.needs, X=digits.images[:199], y=digits.target[:199])
    assert not job._replace(data=moved).done()


class Here(Executor):
    """Runs what it gets at once, in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(fn(*args, **kwargs))
        except ValueError as error:
            future.set_exception(error)
        return future


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any], Path]:
    """An entry whose runs take a moment, its results, and where they lie."""
    folder = tmp_path_factory.mktemp("gallery")
    small = {"clients": 2, "rounds": 1, "n_atoms": 2, "n_global": 1, "samples_per_client": 9}
    runs = {"defaults": small, "more": small | {"rounds": 2}}
    entry = ENTRIES["digits"]._replace(runs=runs, repeats=2, figures=[], claims=[], drawn={"a": 1})
    results: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        at(folder, patch)
        assert gallery.run_all([entry], results)
    return entry, results, folder


def at(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the gallery keep its runs and results in a folder, and run in this process."""
    patch.setattr(gallery, "RUNS", folder / "runs")
    patch.setattr(gallery, "RESULTS", folder / "results.json")
    patch.setattr(gallery, "_processes", Here)
    patch.setattr(gallery, "write_pages", lambda results: None)


@pytest.fixture
def quick(
    ran: tuple[Any, dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, dict[str, Any]]:
    """That entry, and its results to change."""
    entry, results, folder = ran
    at(folder, monkeypatch)
    return entry, copy.deepcopy(results)


def test_an_entry_is_stale_once_a_number_has_moved(
    quick: tuple[Any, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    entry, results = quick
    code = gallery.fingerprint(entry)
    for run in results["digits"].values():
        run["code"] = "of a study before its imports changed"
    assert gallery.check([entry], results)
    assert {run["code"] for run in results["digits"].values()} != {code}
    assert gallery.check([entry], results, restamp=True)
    assert {run["code"] for run in results["digits"].values()} == {code}
    assert json.loads(gallery.RESULTS.read_text()) == results

    run = results["digits"]["more"]
    for value in run["metrics"].values():
        value["values"][0] = value["values"][0] and value["values"][0] * (1 + 2e-5)
    run["code"] = "another"
    capsys.readouterr()
    assert not gallery.check([entry], results, restamp=True)
    assert run["code"] == "another"
    said = capsys.readouterr().out
    assert "digits, defaults: as stored" in said
    assert "digits is stale" in said


def test_seeds_that_an_entry_has_got_are_added_to_the_stored_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at(tmp_path, monkeypatch)
    small = {"kinds": "labels", "methods": "fedper", "clients": 4, "images": 10, "rounds": 1}

    def of(n_seeds: int) -> Any:
        runs = {"defaults": {**small, "seeds": n_seeds}, "other": {**small, "images": 12}}
        return ENTRIES["personal"]._replace(runs=runs, questions=[])

    whole, grown = dict[str, Any](), dict[str, Any]()
    assert gallery.run_all([of(2)], whole)
    assert gallery.run_all([of(1)], grown)
    assert gallery.grow([of(2)], grown)
    assert grown["personal"]["other"]["metrics"] == whole["personal"]["other"]["metrics"]
    one, other = (found["personal"]["defaults"] for found in (whole, grown))
    for name, metric in one["metrics"].items():
        assert other["metrics"][name]["values"] == metric["values"]
        assert other["metrics"][name]["median"] == pytest.approx(metric["median"], rel=1e-5)
    assert other["options"] == one["options"]
    assert json.loads(gallery.RESULTS.read_text()) == grown

    other["metrics"]["accuracy_labels_fedper"]["values"][0] += 0.01
    before = copy.deepcopy(grown)
    for n_seeds, reason in ((1, "option seeds must"), (3, "accuracy_labels_fedper")):
        capsys.readouterr()
        assert not gallery.grow([of(n_seeds)], grown)
        assert reason in capsys.readouterr().out
    assert grown == before


def test_all_runs_of_an_entry_are_of_one_commit(
    quick: tuple[Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, results = quick
    monkeypatch.setattr(gallery, "_commit", lambda: "later")
    assert gallery.run_all([entry], results)  # all finished before: nothing runs again
    assert {run["commit"] for run in results["digits"].values()} != {"later"}
    (entry.folder("more", 1) / "results.json").unlink()
    assert gallery.run_all([entry], results)
    assert {run["commit"] for run in results["digits"].values()} == {"later"}
    assert (
        json.loads((entry.folder("defaults", 0) / "made_by.json").read_text())["commit"] == "later"
    )


def drifted(found: dict[str, float], stored: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    """Return metrics out of their range, widened by its own width and 2 % of the median."""
    out = {}
    for metric, value in found.items():
        low, median, high = (stored[metric][key] for key in ("low", "median", "high"))
        room = high - low + 0.02 * abs(median)
        if "seconds" not in metric and not low - room <= value <= high + room:
            out[metric] = value, low, high
    return out


def shown(entry: Any) -> set[str]:
    """Return the metrics of an entry's first run that its page judges."""
    claimed = {str(one) for claim in entry.claims for pair in claim.less for one in pair}
    asked = {str(one) for each in entry.questions for one in (each.ours, *each.rivals.values())}
    return claimed | asked | {figure.metric for figure in entry.figures}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.small])
def test_figures_have_not_drifted(name: str) -> None:
    entry = ENTRIES[name]
    run, options = next(iter(entry.runs.items()))
    stored = STORED[name][run]["metrics"]
    found = run_experiment(entry.experiment, seed=entry.seeds(run)[0], options=options)["metrics"]
    assert found.keys() == {metric for metric in stored if "[" not in metric}
    judged = {metric: value for metric, value in found.items() if metric in shown(entry)}
    assert judged
    assert drifted(judged, stored) == {}
