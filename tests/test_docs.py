"""Links, tables and lists of README.md and the guides; test_wheel.py runs their Python blocks."""

from __future__ import annotations

import inspect
import json
import re
import runpy
from importlib import import_module
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from flwr_perdl.strategies import ProtocolStrategy
from perdl_experiments.studies import EXPERIMENTS

ROOT = Path(__file__).resolve().parent.parent


def test_links_between_pages_lead_somewhere() -> None:
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    for page in [*top, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target and not target.startswith("reference/"):  # made with the site
                assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_pages_show_tables_as_the_benchmarks_wrote_them_and_files_of_examples_as_they_are() -> None:
    fence = r"(?:```\w+\n)?(.*?)(?:```\n)?"
    region = re.compile(rf"<!-- begin (\S+\.md|examples/\S+) -->\n{fence}<!-- end -->", re.DOTALL)
    shown = 0
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for source, text in region.findall(page.read_text()):
            assert text == (ROOT / source).read_text(), f"{page.name} has an older {source}"
            shown += 1
    assert shown > 5


def test_the_guides_are_short() -> None:
    assert sum(len(one.read_text().split()) for one in (ROOT / "docs").glob("*.md")) <= 28_000


def test_the_results_of_the_readme_are_on_the_pages_that_it_links_to() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| \[.+?\]\((\S+\.md)\S*\): (.+)\|$", readme, re.MULTILINE)
    assert len(rows) == 6
    for page, row in rows:
        check_numbers(row, ROOT / page)


def test_the_numbers_of_the_guides_are_in_the_gallery() -> None:
    """A table's cell, or the text since the last link, has numbers of the page that it links to."""
    rows = 0
    for name in (
        "clustered-learning.md",
        "decentralized-learning.md",
        "keep-a-part-private.md",
        "kinds-of-heterogeneity.md",
        "model-diffusion.md",
        "perma.md",
        "rounds-and-learning-rate.md",
    ):
        text = " ".join((ROOT / "docs" / name).read_text().split())
        for said, page in re.findall(r"([^|\]]*)\]\((gallery/\S+?\.md)\)", text):
            check_numbers(said, ROOT / "docs" / page)
            rows += bool(re.search(r"0\.\d+", said))
    assert rows > 10


def test_the_numbers_of_speed_and_scale_are_in_the_benchmarks_tables() -> None:
    """A table, and the text before a link, has numbers of the results that its section links to."""
    numbers = 0
    for name in ("speed.md", "scale.md", "one-exchange.md"):
        for section in (ROOT / "docs" / name).read_text().split("\n## "):
            linked = r"\]\(((?:\.\./benchmarks/results|gallery)/\S+?\.md)\)"
            pages = set(re.findall(linked, section))
            texts = " ".join((ROOT / "docs" / page).read_text() for page in pages)
            measured = set(re.findall(r"\d+\.\d+", texts))
            before = r"^\|.+|[^|\].]*(?:\.[^|\].]+)*\]\((?:\.\./|gallery/)"
            said = re.findall(before, section, re.MULTILINE)
            for text in said:
                for shown in re.findall(r"\b\d+\.\d+\b", re.sub("`.+?`", "", text)):
                    assert shown in measured, f"{name}: {shown} is not in {pages}"
                    numbers += 1
    assert numbers > 50


def test_the_guides_say_what_the_benchmarks_measured() -> None:
    results, docs = ROOT / "benchmarks" / "results", ROOT / "docs"
    table = (results / "clustered.md").read_text().partition("Ray")[0]
    times = [float(ratio) for ratio in re.findall(r": ([\d.]+) \(", table.partition("---:")[2])]
    one, choice, between = (np.round(times[i::3], 1) for i in range(3))
    guide = " ".join((docs / "clustered-learning.md").read_text().split())
    said = re.search(r"most ([\d.]+) times .* takes (\d) to (\d) times .* most ([\d.]+)", guide)
    assert said is not None
    shown = [float(number) for number in said.groups()]
    assert shown == [one.max(), choice.min().round(), choice.max().round(), between.max()]


def test_the_guides_without_a_server_have_the_medians_of_the_gallery() -> None:
    results = json.loads((ROOT / "docs" / "gallery" / "results.json").read_text())
    stored = {name: results[name]["defaults"]["metrics"] for name in ("decentralized", "patches")}
    found = {name: {k: one["median"] for k, one in own.items()} for name, own in stored.items()}
    rounds = found["decentralized"]
    guide = (ROOT / "docs" / "decentralized-learning.md").read_text()
    for graph, degree in {
        "fedavg": 1,
        "ring": 2,
        "torus": 4,
        "exponential": 7,
        "complete": 15,
    }.items():
        small, large = (rounds[f"rounds_to_fedavg_{graph}{size}"] for size in ("", "_larger"))
        sent = degree * small / rounds["rounds_to_fedavg_fedavg"]
        assert f"| {small:.0f} | {sent:.1f} | {large:.0f} |\n" in guide, graph
    guide = " ".join((ROOT / "docs" / "model-diffusion.md").read_text().split())
    atoms = {name: f"{one:.0f}" for name, one in found["patches"].items()}
    for text, name in {
        "finds all {} true atoms": "recovered_min_median",
        "without neighbors {}": "recovered_isolated",
        "finds {} of 48 atoms": "recovered_none",
        "finds {} on this ring": "recovered_paper_ring",
        "and {} on a complete graph": "recovered_paper",
        "find {} of 48 atoms": "recovered_ring_many",
    }.items():
        assert text.format(atoms[name]) in guide, name


def check_numbers(text: str, page: Path) -> None:
    """Check that a page has the numbers of a text, which may be rounded."""
    measured = [float(one) for one in re.findall(r"\d*\.\d+", page.read_text())]
    for shown in re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", text):
        half = 0.5001 * 10.0 ** -len(shown.partition(".")[2])  # of the last digit
        assert any(abs(one - float(shown)) < half for one in measured), f"{page}: no {shown}"


def test_the_diagrams_are_what_their_script_draws_and_the_readme_says_what_its_own_shows() -> None:
    diagrams = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))
    pictures = diagrams["drawn"]()
    assert {file: file.read_text() for file in pictures} == pictures
    assert set((ROOT / "docs" / "images" / "diagrams").iterdir()) <= pictures.keys()
    readme = (ROOT / "README.md").read_text()
    assert f'<img alt="{diagrams["words"]()}" src="docs/images/overview-light.svg"' in readme
    assert len(readme.split()) <= 900


def test_the_readme_has_the_verdicts_of_the_papers_figures_as_the_gallery_has_them() -> None:
    shown = r"Fig\. \d+|Table \w+|image patches|unmixing"
    verdict = r"^\*\*(Reproduced|Not \w+)\*\*: \[.+?\]\((\S+)\), (.+)"
    measured = {
        (paper, one, word)
        for page in (ROOT / "docs" / "gallery").glob("*.md")
        for word, paper, rest in re.findall(verdict, page.read_text(), re.MULTILINE)
        for one in re.findall(shown, rest)
    }
    row = r"^\| \[.+?\]\((\S+arxiv\S+)\) \| (.*?)\| (.*?)\| `flwr-perdl run"
    said = {
        (paper, one, "Not comparable" if aside else word)
        for paper, *cells in re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
        for word, cell in zip(("Reproduced", "Not reproduced"), cells, strict=True)
        for one, aside in re.findall(rf"({shown})( \(not comparable\))?", cell)
    }
    assert said == measured
    assert len(said) > 10


def test_the_diff_of_the_readme_is_that_of_its_example() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = (ROOT / "examples" / "quickstart-clustered" / "README.md").read_text().splitlines()
    changed = [line for line in diff.splitlines() if line.startswith(("+", "-"))]
    assert len(changed) == 6
    assert set(changed) <= set(example)


def test_every_test_that_the_security_page_names_is_there() -> None:
    page = (ROOT / "docs" / "security-tests.md").read_text()
    rows = re.findall(r"^\| `([\w/]+\.py)`[^|]* \| (.+) \|$", page, re.MULTILINE)
    named = [(file, test) for file, tests in rows for test in re.findall(r"`(\w+)`", tests)]
    assert len(named) > 100
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {test}"
    assert len(re.findall(r"`test_\w+`", page)) == len(named)


def test_what_strategies_support_is_on_the_page_as_they_declare_it() -> None:
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    page = (ROOT / "docs" / "which-algorithm.md").read_text()
    assert f"<!-- begin support -->\n{figures['support']()}<!-- end -->" in page
    assert len(figures["learners"]()) == 9
    for strategy in figures["learners"]().values():
        assert strategy.unsupported.keys() <= figures["SUPPORT"].keys()
        for name in ("secure", "privacy", "robust", "reuse_last_reply"):
            assert (name in signature(strategy).parameters) == (name not in strategy.unsupported)
            if name in strategy.unsupported:
                with pytest.raises(TypeError, match=f"'{name}'") as error:
                    ProtocolStrategy.__init__(object.__new__(strategy), **{name: True})
                assert strategy.unsupported[name] in str(error.value)


def test_the_page_of_methods_is_what_its_generator_writes_and_has_every_strategy() -> None:
    methods = runpy.run_path(str(ROOT / "docs" / "methods.py"))
    page = (ROOT / "docs" / "methods.md").read_text()
    assert page == methods["page"]()
    learners = runpy.run_path(str(ROOT / "docs" / "figures.py"))["learners"]()
    listed = {
        type(methods["written"](one)) for rows in methods["QUESTIONS"].values() for one in rows
    }
    assert set(learners.values()) <= listed
    assert all(paper.link in page for paper in methods["PAPERS"].values())


def test_every_method_has_its_formulas_its_deviations_and_its_papers() -> None:
    methods = runpy.run_path(str(ROOT / "docs" / "methods.py"))
    every = [one for rows in methods["QUESTIONS"].values() for one in rows]
    assert {one.name for one in every} == methods["MATHS"].keys()
    cited = set()
    for one in every:
        maths = methods["MATHS"][one.name]
        assert maths.keys() - {"modules", "deviation"} == {"objective", "update", "sent"}
        for latex in (maths["objective"], maths["update"]):
            assert latex.count("{") == latex.count("}"), one.name
            assert latex.count("(") == latex.count(")"), one.name
        listed = [inspect.getdoc(import_module(name)) or "" for name in maths.get("modules", ())]
        assert all(re.search(r"Deviation|Not in the\s+paper", text) for text in listed), one.name
        assert listed or maths["deviation"], one.name
        cited |= set(methods["sources"](one))
    options = {key for *_, keys in methods["OPTIONS"] for key in keys}
    assert cited | options == methods["PAPERS"].keys()


def test_the_two_commands_of_the_readme_are_there_and_ci_runs_its_tests() -> None:
    readme, ci, make = (
        (ROOT / name).read_text().splitlines() for name in ("README.md", ".ci/run", "Makefile")
    )
    commands = [line.partition("#")[0].strip() for line in readme if line.startswith("make ")]
    assert commands == ["make run", "make test"]
    assert commands[1] in ci
    for target in (command.removeprefix("make ") for command in commands):
        assert any(line.startswith(f"{target}: ") for line in make)


def test_pages_say_nothing_that_others_contradict() -> None:
    read = {
        name: " ".join((ROOT / name).read_text().split())
        for name in ("README.md", "CONTRIBUTING.md", "docs/cli.md", "docs/gallery/index.md")
    }
    experiments = read["docs/cli.md"].partition("## Experiments")[2].partition("## ")[0]
    assert {name for name in EXPERIMENTS if f"`{name}`" not in experiments} == set()

    minutes = re.findall(r"make gallery #[^#]*?(\d+) minutes", read["CONTRIBUTING.md"])
    assert set(minutes) <= set(re.findall(r"(\d+) minutes", read["docs/gallery/index.md"]))
