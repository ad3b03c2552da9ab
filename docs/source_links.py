"""A hook of MkDocs: pages of the examples, tabs, and links to files of the repository.

In the repository ``../../perdl_experiments/studies/patches.py`` leads to the file. The site has
only what is below ``docs/``: an example's README becomes a page with the example's code, and each
other file that a page links to is copied to ``source/``, as text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
#: How a search weighs pages whose addresses begin so: who searches for a word wants a guide.
BOOSTS = {
    "index": 0.2,
    "reference/": 0.2,
    "gallery/": 0.2,
    "examples/": 0.2,
    "tutorials/": 0.5,
    "security-tests": 0.2,
    "rivals": 0.2,
    "speed": 0.2,
    "glossary": 0.2,
}
#: Words that users type and a page does not have, or has in passing.
TAGS = {
    "add-your-method": "own method, own strategy, custom strategy, new method, own protocol",
    "clustered-learning": "IFCA, ClusteredFedAvg",
    "coming-from": "PFLlib, fluke, FL4Health, NVFLARE, SCAFFOLD, pFedMe, APFL, FedBABU, MOON",
    "decentralized-learning": "DiffusionAveraging",
    "faults": "checkpoint, Byzantine",
    "hospital-network": "HIPAA, GDPR, DICOM, DSGVO",
    "keep-a-part-private": "PersonalizedFedAvg, FedPer, FedRep",
    "kinds-of-heterogeneity": "non-IID",
    "methods": "cite, citation, BibTeX",
    "model-diffusion": "novelty detection, novel documents",
    "my-data": "DataLoader",
    "perma": "K-SVD, number of atoms, sparse coding",
    "pytorch-and-gpus": "PyTorch, GPU, CUDA",
    "rounds-and-learning-rate": "step size, epochs",
    "use-a-clients-model": "personalized FedAvg, FedAvg-FT, fine-tune, new client",
    "which-algorithm": "strategy, which strategy, strategies, choose",
}
LINK = re.compile(r"\]\(((?!https?:)[^)#\s]+)(#[^)]*)?\)")
#: Blocks that follow each other and whose first comments name what they are written with.
TABS = re.compile(r"(?:^```python\n# (?:PyTorch|NumPy)\n(?:.*\n)*?```\n\n?){2,}", re.MULTILINE)
TAB = re.compile(r"^```python\n# (PyTorch|NumPy)\n((?:.*\n)*?)```$", re.MULTILINE)


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for every example, and a copy of every other file that a page links to."""
    for readme in sorted((ROOT / "examples").glob("**/README.md")):
        files.append(File.generated(config, address(readme), content=example(readme)))
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("README.md")]
    linked = {(page.parent / match[1]).resolve() for page in pages for match in links(page)}
    for file in sorted(linked):
        uri = address(file)
        if uri.startswith("source/") and file.is_file():
            files.append(File.generated(config, uri, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point the page's links to the site, and lay blocks of two libraries over each other."""
    uri = page.file.src_uri
    if uri == "index.md":  # its columns would be empty
        page.meta["hide"] = ["navigation", "toc"]
    for start, boost in BOOSTS.items():
        if uri.startswith(start):
            page.meta.setdefault("search", {"boost": boost})
    if uri.startswith(("gallery/", "tutorials/", "methods.")):
        page.edit_url = None  # a program writes them
    if words := TAGS.get(uri.removesuffix(".md")):
        page.meta["tags"] = words.split(", ")
    name = Path(uri).stem
    if uri.startswith("reference/") and re.search("[a-z]{6}[A-Z][a-z]", name):
        page.meta["tags"] = [name.lower()]  # the search takes it apart
    source = ROOT / "docs" / uri
    if uri.startswith("examples/"):
        source = next(one for one in (ROOT / "examples").rglob("README.md") if address(one) == uri)

    def link(found: re.Match[str]) -> str:
        file = (source.parent / found[1]).resolve()
        if not file.is_file():  # a page of the reference, or no link but code
            return found[0]
        return f"]({os.path.relpath(address(file), Path(uri).parent)}{found[2] or ''})"

    if uri == "methods.md" and config.repo_url:  # of the BibTeX
        markdown = markdown.replace("  year = {", f"  url = {{{config.repo_url}}},\n  year = {{")
    markdown = LINK.sub(link, markdown)
    return TABS.sub(lambda blocks: TAB.sub(tab, blocks[0]), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put diagrams into the page: their text can be selected, and their colors are the page's."""

    def drawn(found: re.Match[str]) -> str:
        picture = (ROOT / "docs" / "images" / "diagrams" / found[2]).read_text()
        return picture.replace("<svg ", f'<svg role="img" aria-label="{found[1]}" ', 1)

    return re.sub(r'<img alt="([^"]*)" src="[^"]*/diagrams/([\w-]+\.svg)" ?/?>', drawn, html)


def links(page: Path) -> list[re.Match[str]]:
    """Return the links of a page to files."""
    return list(LINK.finditer(page.read_text()))


def address(file: Path) -> str:
    """Return the address of a file of the repository; of an example's code, that of its page."""
    path = file.relative_to(ROOT)
    match path.parts:
        case ("docs", *rest):
            return "/".join(rest)
        case ("README.md",):  # the home page says the same
            return "index.md"
        case ("examples", "README.md"):
            return "examples/index.md"
        case ("examples", name, "README.md"):
            return f"examples/{name}.md"
    return f"source/{path}.txt"


def example(readme: Path) -> str:
    """Return an example's README, and below it the code."""
    text, folder = readme.read_text(), readme.parent
    if folder.name == "examples":
        return text
    code = [*sorted(folder.rglob("*.py")), *folder.glob("pyproject.toml")]
    shown = [file for file in code if len(file.read_text().splitlines()) > 1]
    if shown:
        text += "\n## The code\n"
    for file in shown:
        language = "python" if file.suffix == ".py" else "toml"
        block = f"```{language}\n{file.read_text().rstrip()}\n```"
        text += f'\n??? example "{file.relative_to(folder)}"\n\n{indented(block)}\n'
    return text


def tab(block: re.Match[str]) -> str:
    """Return a block as a tab."""
    code = f"```python\n{block[2]}```"
    return f'=== "{block[1]}"\n\n{indented(code)}'


def indented(text: str) -> str:
    """Return the lines of a tab or of an admonition."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
