"""A run's results as one self-contained page, and as lines for a terminal.

The page's words are in the study's TOML file (``studies/``), and `perdl_experiments.render` fills
in the numbers; here is the frame around them.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from flwr_perdl.core.files import replacing
from perdl_experiments.outcome import RESULTS
from perdl_experiments.render import html_table

REPORT = "report.html"

#: Clients with odd replies that the page shows, and what is counted of them; all else is a share.
MOST_CLIENTS = 20
_COUNTED = ("asked", "failed", "refused")

#: What the parts of results.json are that are shown, where they are there.
_TEXTS = ("experiment", "about", "source", "engine", "finding")
_NUMBERS = ("rounds", "floats_up", "floats_down", "seconds")
_MAPPINGS = ("config", "versions")
_LARGEST = 1e300
#: What a figure's file is called: a name in the run's own folder.
_FIGURE = re.compile(r"[^/\\\0]+\.(png|gif)")

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --ink: #1c2733; --soft: #5b6875; --line: #dce2e8; --paper: #fff; --band: #f5f7f9;
  --accent: #0b6e99 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --soft: #a3afbb; --line: #34404c; --paper: #12181e; --band: #1a222a;
    --accent: #62b6dc } }
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .3rem }
p { margin: .3rem 0 .8rem }
.finding { font-size: 1.15rem }
.soft, figcaption, .caption { color: var(--soft); font-size: .93rem }
.facts { display: flex; flex-wrap: wrap; gap: .5rem; margin: 1.2rem 0; padding: 0;
  list-style: none }
.facts li { background: var(--band); border: 1px solid var(--line); border-radius: .5rem;
  padding: .4rem .8rem }
.facts b { display: block; color: var(--accent); font-size: 1.1rem }
.facts span { color: var(--soft); font-size: .85rem }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem }
.scroll:focus-visible { outline: 2px solid var(--accent) }
table { border-collapse: collapse; width: 100%; font-size: .93rem }
th, td { padding: .4rem .6rem; text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums }
th { background: var(--band); font-weight: 600 }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 8rem }
td.long { text-align: left; white-space: normal; min-width: 20rem }
tbody tr + tr td { border-top: 1px solid var(--line) }
@media (max-width: 30rem) {
  th, td { padding: .3rem .45rem; font-size: .85rem }
  th:first-child, td:first-child { min-width: 6rem; max-width: 8rem }
  td.long { min-width: 14rem } }
figure { margin: 0 }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: .5rem }
img.chart { width: 42rem }
@media (prefers-color-scheme: dark) {
  img.chart { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen } }
figcaption { margin-top: .4rem }
details { margin-top: 2.4rem }
summary { cursor: pointer; font-weight: 600 }
code { overflow-wrap: anywhere }
</style>
</head>
<body>
<main>
<h1>$title</h1>
$finding<p class="soft">$about</p>
<ul class="facts">$facts</ul>
$body
<details><summary>Settings and versions</summary><p><code>$settings</code></p>
<p><code>$versions</code></p></details>
</main>
</body>
</html>
""")


def write_report(out: Path) -> Path:
    """Write report.html from a run folder's results.json and figures.

    Parameters
    ----------
    out : Path
        A folder that a finished run wrote.

    Returns
    -------
    Path
        The page.

    Raises
    ------
    ValueError
        If the folder holds no finished run, or something is missing in its results, or wrong.
    """
    results = read_results(out)
    try:
        page = render(results, out)
    except KeyError as error:
        path = str(out / RESULTS)
        raise ValueError(f"{path!r} must be a run's results, but lacks {error}.") from error
    with replacing(out / REPORT) as stream:
        stream.write(page.encode(errors="backslashreplace"))  # names of files may be no text
    return out / REPORT


def read_results(out: Path) -> dict[str, Any]:
    """Return what results.json in ``out`` says.

    Raises
    ------
    ValueError
        If there is none, it cannot be read, or a part of it is of the wrong type.
    """
    path = out / RESULTS
    try:
        results: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(out)!r} must be the folder of a finished run: {error}.") from error
    if not isinstance(results, dict) or "experiment" not in results:
        raise ValueError(f"{str(path)!r} must be a run's results, but names no experiment.")
    try:
        _check(results)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} must be a run's results, but {error}.") from error
    return results


def _check(results: Mapping[str, Any]) -> None:
    """Raise a ValueError that says which part is of the wrong type.

    Somebody else may have written the file. Names of figures are names of files that are read,
    shown and, where a run is replaced, removed.
    """
    for name, value in results.items():
        if name in _TEXTS:
            _demand(isinstance(value, str), f"{name} is no text")
        elif name in _NUMBERS:
            _demand(_is_number(value), f"{name} is no number")
        elif name in _MAPPINGS:
            _demand(isinstance(value, dict), f"{name} is no object")
        elif name == "notes":
            _demand(_are_texts(value), "notes is no list of texts")
    for table in _entries(results, "tables", ("title", "caption")):
        heads: Any = table.get("columns")
        rows = table.get("rows")
        _demand(_are_texts(heads) and heads != [], "tables has one without columns of texts")
        whole = isinstance(rows, list) and all(
            _are_texts(row) and len(row) == len(heads) for row in rows
        )
        _demand(whole, "tables has one without a text for every row and column")
    for figure in _entries(results, "figures", ("file", "title", "caption")):
        _demand(isinstance(figure.get("alt", ""), str), "figures has an alt that is no text")
        named = _FIGURE.fullmatch(figure["file"])
        _demand(named, f"figures has {figure['file']!r}, which is no name of a .png or .gif file")
    clients = results.get("clients", {})
    counted = isinstance(clients, dict) and all(
        isinstance(counts, dict) and all(map(_is_number, counts.values()))
        for counts in clients.values()
    )
    _demand(counted, "clients does not hold each client's numbers")


def _demand(holds: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _LARGEST


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _entries(results: Mapping[str, Any], name: str, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return a list of objects with these texts."""
    found: list[dict[str, Any]] = results.get(name, [])
    whole = isinstance(found, list) and all(
        isinstance(one, dict) and all(isinstance(one.get(text), str) for text in texts)
        for one in found
    )
    _demand(whole, f"{name} is no list of objects with the texts {', '.join(texts)}")
    return found


def render(results: Mapping[str, Any], out: Path) -> str:
    """Return the page of ``results``, whose figures lie in ``out``."""
    facts = {  # "0" stands for what does not apply
        "clients": str(results["config"]["clients"]),
        "rounds": str(results["rounds"]),
        "floats sent per client": f"{results['floats_up']:,.0f}",
        "floats received per client": f"{results['floats_down']:,.0f}",
        "seconds in all": f"{results['seconds']:.1f}",
        "engine": results["engine"],
        "seed": results["seed"],
    }
    body = [*map(html_table, results["tables"]), *(_figure(f, out) for f in results["figures"])]
    odd = odd_clients(results)
    if odd is not None:
        body.append(html_table(odd))
    found = results.get("finding", "")
    if results["notes"]:
        notes = "".join(f"<p>{escape(note)}</p>" for note in results["notes"])
        body.append(f"<h2>Notes</h2>{notes}")
    return _PAGE.substitute(
        title=escape(results["experiment"]),
        finding=f"<p class='finding'>{escape(found)}</p>\n" if found else "",
        about=escape(f"{results['about']} (after {results['source']})."),
        facts="".join(
            _fact(escape(str(value)), name) for name, value in facts.items() if value != "0"
        ),
        body="\n".join(body),
        settings=escape(_listing(results["config"])),
        versions=escape(_listing(results["versions"])),
    )


def odd_clients(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the table of clients whose replies failed or stood out; None: there are none.

    Parameters
    ----------
    results : mapping
        What results.json says.
    """
    clients = {
        name: {what: n for what, n in counts.items() if what != "asked"}
        for name, counts in results.get("clients", {}).items()
    }
    odd = sorted((n for n in clients if clients[n]), key=lambda n: -sum(clients[n].values()))
    kinds = sorted({what for counts in clients.values() for what in counts})
    if not odd:
        return None

    def shown(name: str, kind: str) -> str:
        number, asked = (results["clients"][name].get(key, 0) for key in (kind, "asked"))
        return f"{number:.4g}" if kind in _COUNTED else f"{number / max(asked, 1):.0%}"

    rows = [
        [name, *(shown(name, kind) for kind in ("asked", *kinds))] for name in odd[:MOST_CLIENTS]
    ]
    return {
        "title": "Clients whose replies failed or stood out",
        "caption": f"{len(odd)} of {len(clients)} clients: exchanges in which each "
        "was asked; failed: errors and silence; refused: replies that broke a rule; the others: "
        "what the aggregation did, to which share of the client's replies. Honest clients whose "
        "data differ much are clipped, too."
        + (f" The first {MOST_CLIENTS} are shown." if len(odd) > MOST_CLIENTS else ""),
        "columns": ["client", "asked", *kinds],
        "rows": rows,
    }


def _listing(items: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in items.items() if value != "")


def _fact(value: str, name: str) -> str:
    return f"<li><b>{value}</b><span>{name}</span></li>"


def _figure(figure: Mapping[str, str], out: Path) -> str:
    path = out / figure["file"]
    if path.is_symlink() or not path.is_file():
        raise ValueError(
            f"{str(out / RESULTS)!r} must name figures in its folder, got {figure['file']!r}, "
            "which is no file there."
        )
    source = f"data:image/{path.suffix[1:]};base64,{b64encode(path.read_bytes()).decode()}"
    title, alt = escape(figure["title"]), escape(figure.get("alt") or figure["title"])
    kind = " class='chart'" if figure.get("kind") == "chart" else ""
    return (
        f"<h2>{title}</h2><figure><img{kind} alt='{alt}' src='{source}'>"
        f"<figcaption>{escape(figure['caption'])}</figcaption></figure>"
    )
