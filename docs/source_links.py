"""A hook of MkDocs: README.md is the home page, links to programs and examples lead to copies.

In the repository ``../../perdl_experiments/studies/patches.py`` leads to the file. The site has
only what is below ``docs/``: each file that a page links to is copied to ``source/``, as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(((?:\.\./)+(\w+/[\w/.-]+\.(?:py|toml)|examples/[\w/.-]+\.md))\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add a copy of every file that a page links to."""
    sources = (page.abs_src_path for page in files.documentation_pages())
    pages = [Path(source) for source in sources if source]  # the reference has none
    named = {match[2] for page in pages for match in LINK.finditer(page.read_text())}
    for name in sorted(name for name in named if not (ROOT / "docs" / name).exists()):
        files.append(File.generated(config, f"source/{name}.txt", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point the page's links to the copies; README.md takes the home page's place."""
    if page.file.src_uri == "index.md":
        return home((ROOT / "README.md").read_text())
    up = "../" * (len(Path(page.file.src_uri).parts) - 1)
    return LINK.sub(lambda found: f"]({up}source/{found[2]}.txt)", markdown)


def home(text: str) -> str:
    """Return README.md as a page of ``docs/``: without badges, and without links that leave it."""
    text = re.sub(r"!\[[^]]+\]\(https:[^)]+\)\n", "", text)  # nothing is loaded from elsewhere
    text = re.sub(r"\[([^]]+)\]\((?!docs/|https:)[^)]+\)", r"\1", text)
    return text.replace("](docs/", "](")
