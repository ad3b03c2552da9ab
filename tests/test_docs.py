"""Links, tables and lists of README.md and the guides; test_wheel.py runs their Python blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perdl_experiments.studies import EXPERIMENTS

ROOT = Path(__file__).resolve().parent.parent


def test_links_between_pages_lead_somewhere() -> None:
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    for page in [*top, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target and not target.startswith("reference/"):  # made with the site
                assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_pages_show_the_tables_as_the_benchmarks_wrote_them() -> None:
    region = re.compile(r"<!-- begin (\S+\.md) -->\n(.*?)<!-- end -->", re.DOTALL)
    shown = 0
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]:
        for source, text in region.findall(page.read_text()):
            assert text == (ROOT / source).read_text(), f"{page.name} has an older {source}"
            shown += 1
    assert shown > 8


def test_pages_show_the_files_of_examples_as_they_are() -> None:
    region = re.compile(r"<!-- begin (examples/\S+) -->\n```\w+\n(.*?)```\n<!-- end -->", re.DOTALL)
    shown = 0
    for page in (ROOT / "docs").glob("*.md"):
        for source, text in region.findall(page.read_text()):
            assert text == (ROOT / source).read_text(), f"{page.name} has an older {source}"
            shown += 1
    assert shown > 2


#: A measured figure: with a unit, "19 of 20", or a fraction; no bound ("at most 2 %"), no version.
MEASURED = re.compile(
    r"(?<!than )(?<!most )(?<!least )(?<!above )(?<!below )(?<![\w.,`=-])"
    r"(?:\d[\d,]*(?:\.\d+)?\s?(?:%|ms\b|dB\b|seconds?\b|minutes?\b|times\b|s\b(?!'))"
    r"|\d+ of \d+\b|0?\.(?!0+\b)\d{2,}(?![\w.]))"
)
#: Where it comes from: a page or a part of one, a stored table, a script, a command, a test, or
#: what the page itself shows below or above.
POINTER = re.compile(
    r"\]\([\w./-]*(?:\.md|#)[\w.#-]*\)|`[\w/.-]+\.(?:py|md|json)\b|benchmarks/\w+"
    r"|flwr-perdl (?:run|bench)|make \w|`-o |python \w|<!-- (?:begin|code)|\b(?:below|above)\b"
)


def unbacked(page: str) -> list[str]:
    """Return the paragraphs that have a measured figure and do not say where it comes from.

    Generated regions, blocks of code and tables are left out.
    """
    text = re.sub(r"<!-- begin \S+ -->\n.*?<!-- end -->", "", page, flags=re.DOTALL)
    text = re.sub(r":\s*```.*?```", ": <!-- code -->\n", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    paragraphs = [part.strip() for part in re.split(r"\n\s*\n", text)]
    return [
        one
        for one in paragraphs
        if not one.startswith("|")
        and MEASURED.search(re.sub(r"`[^`]*`", "", one))
        and not POINTER.search(one)
    ]


def test_a_measured_figure_without_a_pointer_is_found() -> None:
    assert unbacked("It takes 40 ms.\n\nIt ends at .95.\n\n19 of 20 runs do.") != []
    assert len(unbacked("It is 3.5 times faster.\n\nIt gains 2 %.\n\nThree clients.")) == 2
    assert unbacked("It is 3 times faster ([measured](gallery/index.md#cards)).") == []
    assert unbacked("It ends at 40 dB:\n\n```sh\nflwr-perdl run denoise\n```\n") == []
    assert unbacked("A share of at most 2 % is left out. It needs Flower 1.41.") == []


@pytest.mark.parametrize(
    "page",
    # The manual of the command line defines options and metrics; it measures nothing.
    [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "cli.md")],
    ids=lambda page: page.name,
)
def test_every_measured_figure_says_where_it_comes_from(page: Path) -> None:
    assert unbacked(page.read_text()) == []


def test_every_test_that_the_security_page_names_is_there() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 30
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {test}"
    assert page.count("::") == len(named)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_manual_has_every_option_and_its_default(name: str) -> None:
    manual = (ROOT / "docs" / "cli.md").read_text()
    section = re.split(r"^##+ ", manual.partition(f"### {name}\n")[2], flags=re.MULTILINE)[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section, re.MULTILINE))
    options = dict(EXPERIMENTS[name].defaults)
    for common in ("clients", "rounds", "seed", "data"):
        options.pop(common, None)
    assert listed == {option: str(default) for option, default in options.items()}
