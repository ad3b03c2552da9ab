"""A hook of MkDocs: every version of the site has a folder, and the header leads to the others.

The folder of the site, such as ``site/``, has a folder per version that was built into it, their
list in ``versions.js``, and an ``index.html`` that opens the newest. The list is a program, which
`docs/site.js` loads: a browser reads no data files of a page that was opened from disk.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
FIRST = """<!doctype html>
<html lang="en">
<title>flwr-perdl</title>
<meta http-equiv="refresh" content="0; url={0}/index.html">
<a href="{0}/index.html">flwr-perdl {0}</a>
</html>
"""
_serving = False


def on_startup(*, command: Literal["build", "gh-deploy", "serve"], dirty: bool) -> None:
    """Note whether the site is only served: then it has one version."""
    global _serving
    _serving = command == "serve"


def on_config(config: Any) -> Any:
    """Put the site into the folder of its version; where the repository is known, link to it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.copyright = f"{project['name']} {project['version']}"
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    if not _serving:
        config.site_dir = str(Path(config.site_dir) / project["version"])
    return config


def on_post_template(output: str, *, template_name: str, **_: Any) -> str:
    """Leave out the page for unknown addresses: its links do not know the version's folder."""
    return "" if template_name == "404.html" else output


def on_post_page(output: str, **_: Any) -> str:
    """Leave out what would ask the repository's host how many stars it has."""
    return output.replace(' data-md-component="source"', "")


def on_post_build(config: Any) -> None:
    """Write the list of versions, and the page that opens the newest."""
    if not _serving:
        write_versions(Path(config.site_dir).parent)


def write_versions(folder: Path) -> list[str]:
    """Write ``versions.js`` and ``index.html`` of a folder of versions; return these, newest first.

    A version is a folder whose name begins with a number, such as ``0.1.0``, and which has an
    ``index.html``.
    """
    names = (page.parent.name for page in folder.glob("[0-9]*/index.html"))
    found = sorted(names, key=Version, reverse=True)
    (folder / "versions.js").write_text(f"showVersions({json.dumps(found)});\n")
    (folder / "index.html").write_text(FIRST.format(found[0]))
    return found
