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
