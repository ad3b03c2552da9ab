"""A run's results as one self-contained page, and as lines for a terminal.

The page's words are in the study's TOML file (``studies/``), and `perdl_experiments.render` fills
in the numbers; here is the frame around them.
"""

from __future__ import annotations

import json
import re
import tomllib
from base64 import b64encode
from collections.abc import Mapping
from html import escape
from pathlib import Path
from statistics import median
from string import Template
from typing import Any

from flwr_perdl.core.files import replacing
from perdl_experiments.outcome import RESULTS
from perdl_experiments.render import brief, html_table
from perdl_experiments.words import data_size

REPORT = "report.html"

#: Figures that are shown at once, as the first table is; the others are folded.
_FIGURES = 2
#: Clients with odd replies that the page shows, and what is counted of them; all else is a share.
MOST_CLIENTS = 20
_COUNTED = ("asked", "failed", "refused")
#: A client stands out whose share is so large, and so many times that of the median client.
_SHARE, _TIMES = 0.25, 3

#: What a figure's file is called: a name in the run's own folder.
_LARGEST = 1e300
_FIGURE = re.compile(r"[^/\\\0]+\.(png|gif)")

_PAGE = Template(tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["page"])


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
    if not path.is_file():
        raise ValueError(
            f"{str(out)!r} must be the folder of a finished run, but has no {RESULTS}."
        )
    try:
        results: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} must be a run's results, but can't be read.") from error
    if not isinstance(results, dict) or "experiment" not in results:
        raise ValueError(f"{str(path)!r} must be a run's results, but names no experiment.")
    try:
        _check(results)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} must be a run's results, but {error}.") from error
    return results


def is_number(value: object) -> bool:
    """Return whether a value of a JSON file is a number that can be shown."""
    return isinstance(value, int | float) and abs(value) < _LARGEST


def fits(value: Any, form: Any) -> bool:
    """Return whether a value of a JSON file has a form.

    Parameters
    ----------
    value : object
        What was read.
    form : dict, list, type or callable
        ``{name: form}``: an object with these entries; ``{"*": form}``: all of whose entries have
        the form; ``[form]``: a list of such; a type; or a test.
    """
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return False
        if "*" in form:
            return all(fits(one, form["*"]) for one in value.values())
        return all(name in value and fits(value[name], one) for name, one in form.items())
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(one, form[0]) for one in value)
    return isinstance(value, form) if isinstance(form, type) else bool(form(value))


def _is_figure(name: object) -> bool:
    return isinstance(name, str) and bool(_FIGURE.fullmatch(name))


#: The parts of results.json that are shown.
_FORMS: dict[str, Any] = {
    **dict.fromkeys(
        ("experiment", "title", "about", "source", "engine", "finding", "costs_of"), str
    ),
    **dict.fromkeys(("rounds", "floats_up", "floats_down", "seconds"), is_number),
    **dict.fromkeys(("config", "versions"), dict),
    "metrics": {"*": is_number},
    "notes": [str],
    "tables": [{"title": str, "caption": str, "columns": [str], "rows": [[str]]}],
    "figures": [{"title": str, "caption": str, "file": _is_figure}],
    "clients": {"*": {"*": is_number}},
}


def _check(results: Mapping[str, Any]) -> None:
    """Raise a ValueError that says which part is of the wrong form.

    Somebody else may have written the file. Names of figures are names of files that are read,
    shown and, where a run is replaced, removed.
    """
    wrong = [name for name in _FORMS if name in results and not fits(results[name], _FORMS[name])]
    if not wrong:
        tables, figures = results.get("tables", []), results.get("figures", [])
        whole = all(
            one["columns"] and all(len(row) == len(one["columns"]) for row in one["rows"])
            for one in tables
        )
        marks = ("best", [[int]]), ("better", [str])
        if not whole or not all(fits(one.get(n, []), form) for one in tables for n, form in marks):
            wrong.append("tables")
        if not all(isinstance(one.get("alt", ""), str) for one in figures):
            wrong.append("figures")
    if wrong:
        raise ValueError(f"{', '.join(wrong)} has another form")


def render(results: Mapping[str, Any], out: Path) -> str:
    """Return the page of ``results``, whose figures lie in ``out``."""
    facts = {  # none of it: what does not apply
        "clients": str(results["config"]["clients"]),
        "rounds": str(results["rounds"]),
        "sent per client": data_size(results["floats_up"]),
        "received per client": data_size(results["floats_down"]),
        "seconds": f"{results['seconds']:.1f}",
        "engine": results["engine"],
        "seed": results["seed"],
    }
    figures = [_figure(one, out) for one in results["figures"]]
    tables = [html_table(brief(one)) for one in results["tables"]]
    odd = odd_clients(results)
    body = [*figures[:_FIGURES], *tables[:1], *([] if odd is None else [html_table(odd)])]
    more = [*figures[_FIGURES:], *tables[1:]]
    found = results.get("finding", "")
    notes = [f"<p>{escape(note)}</p>" for note in results["notes"]]
    settings = [
        f"<p><code>{escape(_listing(results[part]))}</code></p>" for part in ("config", "versions")
    ]
    folded = {
        "More figures and tables": more,
        "Notes": notes,
        "Settings and versions": settings,
    }
    body += [
        f"<details><summary>{name}</summary>{''.join(parts)}</details>"
        for name, parts in folded.items()
        if parts
    ]
    return _PAGE.substitute(
        title=escape(results["title"]),
        finding=f"<p class='finding'>{escape(found)}</p>\n" if found else "",
        about=f"{escape(results['about'])}. Experiment "
        f"<code>{escape(results['experiment'])}</code>; source: {escape(results['source'])}.",
        facts="".join(
            _fact(escape(str(value)), name)
            for name, value in facts.items()
            if value not in ("0", "0 bytes")
        ),
        body="\n".join(body),
    )


def odd_clients(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the table of clients whose replies failed or stood out; None: there are none.

    Parameters
    ----------
    results : mapping
        What results.json says.
    """
    clients = results.get("clients", {})
    named = {what for counts in clients.values() for what in counts if what != "asked"}

    def value(name: str, kind: str) -> float:
        number: float = clients[name].get(kind, 0)
        return number if kind in _COUNTED else number / max(clients[name].get("asked", 0), 1)

    def least(kind: str) -> float:
        if kind in _COUNTED:
            return 1
        return max(_SHARE, _TIMES * median(value(name, kind) for name in clients))

    bounds = {kind: least(kind) for kind in named}
    out = {n: [k for k in sorted(named) if value(n, k) >= bounds[k]] for n in clients}
    odd = sorted((n for n in out if out[n]), key=lambda n: -sum(value(n, k) for k in out[n]))
    kinds = sorted({kind for name in odd for kind in out[name]})
    if not odd:
        return None

    def shown(name: str, kind: str) -> str:
        number = value(name, kind)
        return f"{number:.4g}" if kind in _COUNTED else f"{number:.0%}"

    rows = [
        [name, *(shown(name, kind) for kind in ("asked", *kinds))] for name in odd[:MOST_CLIENTS]
    ]
    return {
        "title": "Clients whose replies failed or stood out",
        "caption": f"{len(odd)} of {len(clients)} clients. Asked: exchanges that included the "
        "client; failed: errors and missing replies; refused: replies that broke a rule; others: "
        "the share of the client's replies that the aggregation changed, if at least "
        f"{_SHARE:.0%} and {_TIMES} times that of the median client."
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
