"""The site: it builds, every public name has a page, and a browser finds nothing to complain about.

Needs what the extra `dev` brings, and Chromium; both are looked for, and named where they are
missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from flwr_perdl import __version__
from flwr_perdl.strategies import Ditto
from tests.test_reference import PACKAGES

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
REPOSITORY = "https://github.com/example/flwr-perdl"
#: Of axe-core.
RULES = [
    *("color-contrast", "image-alt", "link-name", "button-name", "document-title"),
    "scrollable-region-focusable",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.environments,
    pytest.mark.skipif(
        not find_spec("mkdocs") or not find_spec("mkdocstrings"),
        reason="MkDocs is not installed: the extra 'docs' brings it",
    ),
]
looks = pytest.mark.skipif(
    not CHROMIUM or not find_spec("playwright") or not find_spec("axe_core_python"),
    reason="Chromium, Playwright or axe-core is not installed",
)

PAGES = (
    *("index.html", "which-algorithm.html", "security.html", "decentralized-learning.html"),
    *("gallery/index.html", "gallery/synthetic.html", "tutorials/personal-dictionaries.html"),
    *("reference/index.html", "reference/flwr_perdl.strategies/PerMA.html"),
    "reference/flwr_perdl.dictionary/index.html",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of this version, built as `make site` does: a warning is an error.

    The site has an older version already.
    """
    folder = tmp_path_factory.mktemp("site")
    (folder / "0.0.9").mkdir()
    (folder / "0.0.9" / "index.html").write_text("<title>The older version</title>")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY_URL": REPOSITORY},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / __version__


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_page_with_an_example(package: str, site: Path) -> None:
    module = import_module(f"flwr_perdl.{package}")
    folder = site / "reference" / module.__name__
    index = (folder / "index.html").read_text()
    for name in module.__all__:
        link = re.search(rf'href="([^"]*\b{name}\.html)"', index)
        page = (folder / link[1]).read_text() if link else index
        assert re.search(rf'id="flwr_perdl\.(\w+\.)*{name}"', page), f"{name} has no page"
        if link:
            assert ">Examples:<" in page, f"the page of {name} has no example"
            assert "doc-symbol-module" not in page, f"the page of {name} is of a module"


def test_one_variable_says_where_the_repository_is(site: Path) -> None:
    page = (site / "faults.html").read_text()
    assert f'href="{REPOSITORY}"' in page
    assert f'href="{REPOSITORY}/edit/main/docs/faults.md"' in page
    bibtex = re.sub("<.*?>", "", (site / "methods.html").read_text())
    assert f"url = {{{REPOSITORY}}},\n  year = {{" in bibtex


def test_what_a_strategy_does_not_support_is_shown_on_hover_and_on_its_page(site: Path) -> None:
    table = (site / "which-algorithm.html").read_text()
    page = (site / "reference" / "flwr_perdl.strategies" / "Ditto.html").read_text()
    assert Ditto.unsupported
    for why in Ditto.unsupported.values():
        assert f'<abbr title="{why}">' in table
        assert f"<td>{why}</td>" in page.replace("<wbr>", "")


def test_the_page_of_a_method_has_its_formulas_deviations_and_bibtex(site: Path) -> None:
    for name, formulas in {"PerMA": 4, "PersonalizedFedAvg": 10, "DiffusionAveraging": 20}.items():
        page = (site / "reference" / "flwr_perdl.strategies" / f"{name}.html").read_text()
        assert page.count('display="block"') >= formulas
        assert "$" not in re.sub(r"(?s)<(script|pre).*?</\1>", "", page)  # no formula as text
        for title in ("Deviations from the papers", "BibTeX"):
            assert f">{title}<" in page


def complaints(browser: Any, url: str, width: int, scheme: str) -> list[str]:
    """Return what the console, the layout and axe-core have to say of a page."""
    axe = Path(import_module("axe_core_python").__file__ or "").parent / "axe.min.js"
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    found: list[str] = []
    page.on("console", lambda one: found.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", lambda request: found.append(f"not loaded: {request.url}"))
    page.goto(url)
    page.wait_for_load_state("load")
    wider = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    if wider > 0:
        found.append(f"{wider} pixels wider than the window")
    page.evaluate(axe.read_text())
    said = page.evaluate("rules => axe.run({runOnly: {type: 'rule', values: rules}})", RULES)
    for violation in said["violations"]:
        for node in violation["nodes"]:
            found.append(f"{violation['id']}: {node['html'][:120]}")
    context.close()
    return found


def assert_no_complaints(browser: Any, file: Path) -> None:
    for width in (1280, 420):
        for scheme in ("light", "dark"):
            found = complaints(browser, file.as_uri(), width, scheme)
            assert not found, f"{width} pixels, {scheme}: {found}"


@looks
@pytest.mark.parametrize("page", PAGES)
def test_a_page_opens_from_disk_without_error_overflow_or_poor_contrast(
    page: str, site: Path, browser: Any
) -> None:
    assert_no_complaints(browser, site / page)


def test_the_folder_of_the_site_opens_the_newest_version(site: Path) -> None:
    assert f'url={__version__}/index.html"' in (site.parent / "index.html").read_text()
    names = re.findall(r'"([\d.]+)"', (site.parent / "versions.js").read_text())
    assert names == [__version__, "0.0.9"]


@looks
def test_a_page_leads_to_the_other_versions_when_it_is_opened_from_disk(
    site: Path, browser: Any
) -> None:
    page = browser.new_page()
    page.goto((site / "gallery" / "index.html").as_uri())
    page.locator(".md-version__current", has_text=__version__).focus()
    page.locator(".md-version__link", has_text="0.0.9").click()
    page.wait_for_url("**/0.0.9/index.html")
    assert page.title() == "The older version"
    page.close()


@looks
def test_the_home_page_is_light_and_asks_nobody_else(site: Path, browser: Any) -> None:
    page, loaded = browser.new_page(), set()
    page.on("request", lambda request: loaded.add(request.url))
    page.goto((site / "index.html").as_uri())
    page.wait_for_load_state("networkidle")
    page.close()
    assert all(url.startswith(("file:", "data:")) for url in loaded)
    files = {Path(unquote(urlsplit(url).path)) for url in loaded if url.startswith("file:")}
    assert "<text" in (site / "index.html").read_text()  # the schematics can be selected
    assert sum(file.stat().st_size for file in files) < 500_000


#: What users type, and the pages that answer it.
SEARCHES = {
    "PFLlib": "coming-from",
    "FL4Health": "coming-from",
    "fluke": "coming-from|rivals",
    "SCAFFOLD": "coming-from",
    "pFedMe": "coming-from",
    "cite": "methods",
    "DICOM": "hospital-network",
    "HIPAA GDPR": "hospital-network",
    "number of atoms": "perma",
    "protocol of your own": "add-your-method|use-in-your-project",
    "K-SVD": "perma",
    "add a new method": "add-your-method",
    "custom strategy": "add-your-method",
    "which strategy": "which-algorithm",
    "step size": "rounds-and-learning-rate",
    "novelty detection": "model-diffusion|gallery/novel-documents",
    "personalized FedAvg": "use-a-clients-model|keep-a-part-private",
    "IFCA": "clustered-learning",
    "global_matching": "reference/flwr_perdl.dictionary/global_matching",
    "byzantine": "faults|decentralized-learning|security",
    "non-iid": "kinds-of-heterogeneity",
    "pytorch": "from-fedavg|pytorch-and-gpus",
    "gpu": "pytorch-and-gpus",
    "dataloader": "my-data",
    "debug": "debug-a-client",
    "checkpoint": "faults|use-in-your-project",
    "learning rate": "rounds-and-learning-rate",
    "fine-tune": "use-a-clients-model|keep-a-part-private",
    "new client": "use-a-clients-model",
}


@pytest.mark.skipif(not shutil.which("node"), reason="Node is not installed")
def test_searches_lead_to_the_right_page_by_the_sites_own_search(site: Path) -> None:
    command = ["node", ROOT / "tests" / "site_search.mjs", site, *SEARCHES]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = {
        words: pages[:1]
        for (words, right), pages in zip(SEARCHES.items(), found, strict=True)
        if not pages or not re.fullmatch(rf"({right})\.html(#.*)?", pages[0])
    }
    assert len(wrong) <= 2, wrong


@looks
def test_a_search_leads_to_the_guide_when_the_site_is_opened_from_disk(
    site: Path, browser: Any
) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("f")
    page.keyboard.type("dataloader")
    link = page.locator(".md-search-result__link").first
    link.wait_for(state="attached")
    page.wait_for_timeout(300)  # results of the last letter
    found = urlsplit(link.get_attribute("href")).path.partition(f"/{__version__}/")[2]
    assert found == "my-data.html"
    page.close()


@looks
def test_a_runs_report_opens_without_error_overflow_or_poor_contrast(
    tmp_path: Path, browser: Any
) -> None:
    command = "-m perdl_experiments run synthetic -o seeds=2 --rounds 3 --out"
    run = [sys.executable, *command.split(), tmp_path / "run"]
    subprocess.run(run, cwd=ROOT, check=True, capture_output=True)
    assert_no_complaints(browser, tmp_path / "run" / "report.html")
    page = browser.new_page(viewport={"width": 420, "height": 860})
    page.goto((tmp_path / "run" / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollHeight") <= 5 * 860
    plot, text = (page.locator(one).first.bounding_box() for one in ("img", "p"))
    assert plot["width"] == text["width"]
    page.close()
