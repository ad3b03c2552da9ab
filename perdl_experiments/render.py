"""From a study's records to what a person reads: metric names, tables, the first sentence.

A study returns records; its TOML file says what to make of them. The same tables go to the
terminal (`perdl_experiments.terminal.Rows`), to report.html (`html_table`) and to the docs
(`markdown_table`).

=============== ================================================================================
part of a TOML  what it says
=============== ================================================================================
``finding``     one or more templates of the first sentence; the first whose numbers are there
``metrics``     name in results.json, as a template -> metric, or ``{of, statistic, FIELD = [...],
                except, by_seed}``, with the fields' values that are meant, or left out; by_seed:
                a record has a value per seed, which results.json has, too
``words``       field -> value -> how a reader sees that value
``tables``      title, caption, ``rows`` (a field), ``columns``; ``split``: a table per value of a
                field; ``only``: conditions on fields; ``best = "row"``: the best of each row is
                bold, by default the best of each column
``columns``     title, metric, ``show`` (a template of statistics), ``each``: a column per value of
                these fields; ``only``; ``better``: "lower" or "higher"; ``over``: a gain, over the
                record with these other fields: the share of a lower one, the difference of a higher
``figures``     file, title, caption; ``alt``: what is seen, by default computed from the drawing
``notes``       templates, or ``{text, when}`` / ``{text, unless}`` with the name of a fact
=============== ================================================================================

A template refers to options, to metrics by their names in results.json, to the module's constants
in small letters, and to the facts that the study adds, which come before metrics of the same name;
its fact ``words`` adds to the page's.
``{name:*noun}`` is a count with its noun, ``{name:MB}`` the size of so many numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import product
from string import Formatter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from perdl_experiments.words import megabytes, plural

Page = Mapping[str, Any]
Fields = dict[str, Any]

#: Text in a cell that is longer than this wraps.
LONG = 40
#: The heads of a table of more columns wrap.
WIDE = 4
#: Less is less by more than this share (of an area under a curve: of what is missing to one), or by
#: so many decibels, and by more than rounding.
SHARE, DECIBELS, ROUNDING = 0.01, 0.1, 1e-9
#: A run with less than this share of an experiment's clients or rounds is not judged.
FEW = 0.5
#: Of bootstrap intervals: level, resamples, and the most values whose interval is their range.
LEVEL, RESAMPLES, FEWEST = 0.95, 2000, 5
#: The metric of a record that says why a method failed.
FAILED = "failed"
#: What rows of clients are called; of more than `MANY` a reader sees quantiles and the `WORST`.
_CLIENTS, MANY, WORST = ("client", "node", "site"), 50, 20
QUANTILES = {
    "minimum": 0.0,
    "lower quartile": 0.25,
    "median": 0.5,
    "upper quartile": 0.75,
    "maximum": 1.0,
}

_STATISTICS: dict[str, Callable[[Any], Any]] = {
    "value": np.mean,
    "mean": np.mean,
    "median": np.median,
    "min": np.min,
    "max": np.max,
    "sum": np.sum,
    "count": np.size,
}
_SHARES: dict[str, Callable[[Any, float], Any]] = {"below": np.less, "from": np.greater_equal}
#: What a metric's rule has besides fields of its records.
_RULE = ("of", "statistic", "except", "by_seed")
#: A metric's place in a sentence; ``{share:%}`` is a share as a percentage, ``{error:interval}`` a
#: number with its interval, where it is the mean or the median of repetitions.
PLACE = re.compile(r"\{([^}%]+?)(?::%|:interval)?\}")
#: The number at the beginning of a cell.
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?")


class Record(NamedTuple):
    """One result.

    Attributes
    ----------
    metric : str
        What is measured.
    value : float, array or str
        The result; an array where it was repeated, as over seeds; text is for tables only.
    method : str
        Whose result it is; empty where there is one method only.
    parameters : mapping
        At which point it was measured: parameter -> value.
    unit : str
        Infinitely many ``rounds`` are -1 in results.json, "never" in a table.
    """

    metric: str
    value: ArrayLike
    method: str = ""
    parameters: Mapping[str, Any] = {}
    unit: str = ""

    @property
    def fields(self) -> Fields:
        """Everything but the value."""
        return {"metric": self.metric, "method": self.method, **self.parameters}


class Table(NamedTuple):
    """A table as a person reads it.

    Attributes
    ----------
    title, caption : str
        What it shows, and what to know about it.
    columns : sequence of str
        Heads; the first column names the rows.
    rows : sequence of sequence of str
        The cells.
    best : sequence of pairs of int, optional
        Row and column of the best cells.
    better : sequence of str, optional
        Of a table with a row per client: for each column "lower", "higher" or "".
    """

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Sequence[Sequence[int]] = ()
    better: Sequence[str] = ()


# Words ---------------------------------------------------------------------------------------


class _Words(Formatter):
    """Templates with the formats ``*noun`` and ``MB``; no number shows as infinite or NaN."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("*"):
            return plural(value, format_spec[1:])
        if isinstance(value, float) and not np.isfinite(value):
            return "-" if np.isnan(value) else "never"
        if format_spec == "MB":
            return number(megabytes(value))
        return str(super().format_field(value, format_spec))


def say(template: str, facts: Mapping[str, Any]) -> str:
    """Return a template with its facts filled in, on one line."""
    return _Words().vformat(" ".join(template.split()), (), facts).strip()


def number(value: float) -> str:
    """Return a number with as many digits as a reader needs."""
    if not np.isfinite(value):
        return "never"
    if value and abs(value) < 1e-4:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def fill(
    template: str, get: Callable[[str], Any], interval: Callable[[str], str] = lambda _: ""
) -> str:
    """Return a sentence with its metrics filled in, each as `number` writes it."""

    def filled(place: re.Match[str]) -> str:
        value = get(place[1])
        if isinstance(value, str):
            return value
        span = interval(place[1]) if place[0].endswith(":interval}") else ""
        return f"{value:.0%}" if place[0].endswith("%}") else f"{number(value)}{span}"

    return PLACE.sub(filled, " ".join(template.split()))


def first_sentence(templates: str | Sequence[str], metrics: Mapping[str, Any]) -> str | None:
    """Return the first template whose metrics are all there; None if there is none."""
    listed = [templates] if isinstance(templates, str) else templates
    return next((one for one in listed if all(n in metrics for n in PLACE.findall(one))), None)


# Claims --------------------------------------------------------------------------------------


def is_less(left: float, right: float, metrics: str = "") -> bool:
    """Return whether a number is less than another by more than a trifle of such metrics."""
    if not np.isfinite(right):
        return left < right
    whole = 1 - abs(right) if "auc_" in metrics else abs(right)
    trifle = DECIBELS if "psnr_" in metrics else SHARE * whole
    return left < right - max(trifle, ROUNDING)


def claim_holds(
    less: Sequence[Sequence[str | float]], get: Callable[[str | float], float], factor: float = 1.0
) -> bool:
    """Return whether each first number is less than ``factor`` times the second."""
    return all(is_less(get(left), factor * get(right), f"{left} {right}") for left, right in less)


# Records -------------------------------------------------------------------------------------


class _Statistics(dict[str, Any]):
    """The statistics of a record's value by name, such as "median" or "below_1e_3"."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.fields)
        self._value = record.value

    def __missing__(self, name: str) -> Any:
        if isinstance(self._value, str):
            return self._value
        if name in _STATISTICS:
            return _STATISTICS[name](self._value)
        kind, _, level = name.partition("_")
        return np.mean(_SHARES[kind](np.asarray(self._value), float(level.replace("_", "-"))))


def statistic(record: Record, name: str) -> float:
    """Return a statistic of a record's value; of infinitely many rounds, -1."""
    value = float(_Statistics(record)[name])
    return -1.0 if record.unit == "rounds" and value == np.inf else value


def metrics(page: Page, records: Sequence[Record]) -> dict[str, float]:
    """Return results.json's metrics."""
    found: dict[str, float] = {}
    for name, record, rule in _named(page, records):
        value = statistic(record, rule.get("statistic", "value"))
        if found.setdefault(name, value) != value and not np.isnan(value):
            raise ValueError(f"metrics must have one record per name, got two of {name}.")
    return found


def by_seed(page: Page, records: Sequence[Record]) -> dict[str, list[float]]:
    """Return what each seed has of those metrics that say so."""
    return {
        name: [statistic(record._replace(value=one), "value") for one in np.ravel(record.value)]
        for name, record, rule in _named(page, records)
        if rule.get("by_seed")
    }


def _named(page: Page, records: Sequence[Record]) -> Iterator[tuple[str, Record, Fields]]:
    """Yield metrics' names, records and rules: the only place where their names are made."""
    for template, given in page.get("metrics", {}).items():
        rule: Fields = {"of": given} if isinstance(given, str) else given
        only = {n: v for n, v in rule.items() if n not in _RULE}
        for record in records:
            left_out = "except" in rule and _matches(record, rule["except"])
            if record.metric == rule["of"] and _matches(record, only) and not left_out:
                yield re.sub("_+", "_", say(template, record.fields)).strip("_"), record, rule


def _matches(record: Record, only: Mapping[str, Any]) -> bool:
    """Return whether a record's fields have the values that are asked for.

    A record without a parameter stands for all its values.
    """
    return all(
        name not in record.fields
        or record.fields[name] in (wanted if isinstance(wanted, list) else [wanted])
        for name, wanted in only.items()
    )


# Tables --------------------------------------------------------------------------------------


def tables(page: Page, records: Sequence[Record], facts: Mapping[str, Any]) -> list[Table]:
    """Return all tables that have rows."""
    words = _Vocabulary(page, facts)
    made = []
    for spec in page.get("tables", ()):
        split = spec.get("split")
        for value in _values(records, split) if split else [None]:
            only = spec.get("only", {}) | ({split: value} if split else {})
            chosen = [one for one in records if _matches(one, only)]
            told = {**facts, **({split: words.of(split, value)} if split else {})}
            table = _table(spec, chosen, told, words)
            made += [table] if table.rows else []
    return made


class _Vocabulary:
    """How a reader sees the values of fields: the page's words, and those that a study adds."""

    def __init__(self, page: Page, facts: Mapping[str, Any]) -> None:
        self._words, self._more = page.get("words", {}), facts.get("words", {})
        self._facts = facts

    def of(self, field: str, value: Any) -> str:
        """Return the words for a field's value."""
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        word = self._more.get(field, {}).get(shown) or self._words.get(field, {}).get(shown)
        return shown if word is None else say(word, self._facts)


def _table(
    spec: Page, records: Sequence[Record], facts: Mapping[str, Any], words: _Vocabulary
) -> Table:
    field = spec["rows"]
    failures = [one for one in records if one.metric == FAILED]
    columns = [(one, at) for one in spec["columns"] for at in _places(one, records)]
    shown = {FAILED, *(one["metric"] for one in spec["columns"])}
    by_fields = {_key(one.fields): one for one in reversed(records)}
    by_row: dict[Any, list[Record]] = {}
    for one in records:
        if field in one.fields:
            by_row.setdefault(one.fields[field], []).append(one)
    rows = []
    for value in _values([one for one in records if one.metric in shown], field):
        own = by_row[value]
        cells = [_cell(column, at, [*own, *failures], by_fields) for column, at in columns]
        if any(one in own for one in failures):  # a method's row
            cells = ["failed", *["-"] * (len(cells) - 1)]
        rows.append([words.of(field, value), *cells])
    heads = [
        say(column["title"], {**facts, **{f: words.of(f, v) for f, v in at.items()}})
        for column, at in columns
    ]
    title, caption = (say(spec[part], facts) for part in ("title", "caption"))
    better = ["", *("" if "over" in one else one.get("better", "") for one, _ in columns)]
    best = _best(rows, better, along=spec.get("best", "column"))
    columns_ = [say(spec.get("head", ""), facts), *heads]
    return Table(title, caption, columns_, rows, best, better if field in _CLIENTS else [])


def brief(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a table as a reader sees it: of many clients, quantiles over them and the worst.

    The worst by the last column that has a better side; where that is equal, by the one before.
    """
    rows, better = table["rows"], table.get("better", ())
    judged = [j for j, side in enumerate(better[: len(table["columns"])]) if side]
    if not judged or len(rows) <= MANY:
        return table
    cells = [[row[j] for row in rows] for j in range(1, len(table["columns"]))]
    ordered = [sorted(filter(_NUMBER.match, column), key=_number) or ["-"] for column in cells]
    quantiles = [
        [name, *(column[round(share * (len(column) - 1))] for column in ordered)]
        for name, share in QUANTILES.items()
    ]

    def badness(row: Sequence[str]) -> list[float]:
        numbers = [(_number(row[j]), better[j] == "higher") for j in reversed(judged)]
        return [-one if higher and one < np.inf else one for one, higher in numbers]

    worst = sorted(rows, key=badness, reverse=True)[:WORST]
    said = (
        f"{table['caption']} Quantiles over all {len(rows):,} clients, each column by itself; then "
        f'the {WORST} worst by "{table["columns"][judged[-1]]}". results.json has all.'
    )
    return {**table, "caption": said, "rows": [*quantiles, *worst], "best": ()}


def _number(cell: str) -> float:
    """Return the number at the beginning of a cell; infinite if there is none."""
    found = _NUMBER.match(cell)
    return float(found[0].replace(",", "")) if found else float("inf")


def _key(fields: Fields) -> frozenset[tuple[str, Any]]:
    return frozenset(fields.items())


def _best(rows: Sequence[Sequence[str]], better: Sequence[str], along: str) -> list[list[int]]:
    """Return where the best numbers of each column (or row) are; nowhere, if they are all equal."""
    groups: dict[int, list[tuple[float, list[int]]]] = {}
    for i, row in enumerate(rows):
        for j, (cell, which) in enumerate(zip(row, better, strict=True)):
            if which and _NUMBER.match(cell):
                signed = _number(cell) if which == "lower" else -_number(cell)
                groups.setdefault(i if along == "row" else j, []).append((signed, [i, j]))
    return [
        place
        for group, values in ((one, {value for value, _ in one}) for one in groups.values())
        if len(values) > 1
        for least in [min(values)]
        for value, place in group
        if value == least
    ]


def _places(column: Page, records: Sequence[Record]) -> list[Fields]:
    """Return the fields' values for which a column is repeated; none if it has no record."""
    named, only = column.get("each", []), column.get("only", {})
    there = [o for o in records if o.metric in (column["metric"], FAILED) and _matches(o, only)]
    if not there:
        return []
    return [
        dict(zip(named, values, strict=True))
        for values in product(*(_values(there, field) for field in named))
    ]


def _cell(column: Page, at: Fields, records: Sequence[Record], every: Mapping[Any, Record]) -> str:
    """Return a cell of the row of these records, in a table of ``every`` one, by its fields."""
    wanted = {"metric": column["metric"], **column.get("only", {}), **at}
    for record in records:
        if _matches(record, wanted):
            if "over" in column:
                record = record._replace(value=_gain(column, record, every))
            text = isinstance(record.value, str)
            return str(record.value) if text else say(column["show"], _Statistics(record))
    failed = {**wanted, "metric": FAILED}
    return "failed" if "only" in column and any(_matches(o, failed) for o in records) else "-"


def _gain(column: Page, record: Record, records: Mapping[Any, Record]) -> Any:
    """Return by how much a record is better than that of the column's other fields."""
    found = records.get(_key({**record.fields, **column["over"]}))
    if found is None or found is record or np.shape(found.value) != np.shape(record.value):
        return float("nan")
    value, base = np.asarray(record.value, float), np.asarray(found.value, float)
    if column["better"] == "higher":
        return value - base
    return 1 - np.divide(value, base, out=np.full_like(base, np.nan), where=base > 0)


def _values(records: Sequence[Record], field: str) -> list[Any]:
    """Return a field's values in the order of the records, each once."""
    return list(dict.fromkeys(one.fields[field] for one in records if field in one.fields))


# The report ----------------------------------------------------------------------------------


def report(page: Page, records: Sequence[Record], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a page says of records: metrics, by seed too, finding, tables and notes.

    Parameters
    ----------
    page : mapping
        A study's TOML file.
    records : sequence of Record
        Its results.
    facts : mapping
        Options, and what the study adds: what templates refer to besides metrics.
    """
    found = metrics(page, records)
    told = {**found, **facts}
    known = {**facts, **found}
    return {
        "metrics": found,
        "by_seed": by_seed(page, records),
        "finding": " ".join(_findings(page, records, known)),
        "tables": [one._asdict() for one in tables(page, records, told)],
        "notes": list(_notes(page, records, told)),
    }


def too_few(page: Page, config: Mapping[str, Any]) -> str:
    """Return the sentence that a run has too few clients or rounds to judge; "" if it has not."""
    options = page.get("options", {})
    short = [
        f"{name} ({config[name]}; default {option['default']})"
        for name in ("clients", "rounds")
        if name in config and (option := options.get(name, {})).get("default")
        if config[name] < option.get("enough", FEW * option["default"])
    ]
    return f"Too few {' and '.join(short)} to judge." if short else ""


def _findings(page: Page, records: Sequence[Record], found: Mapping[str, Any]) -> Iterator[str]:
    """Yield that a run is too small, and the first sentence; verdicts take more than one run."""

    def get(reference: str | float) -> Any:
        value = found[reference] if isinstance(reference, str) else reference
        never = isinstance(reference, str) and reference.startswith("rounds_") and value == -1
        return float("inf") if never else value

    def interval(name: str) -> str:
        for metric, record, rule in _named(page, records):
            if metric == name and np.size(record.value) > 1:
                median = rule.get("statistic") == "median"
                values = np.ravel(record.value).tolist()
                low, high = map(number, bootstrap(values, np.median if median else np.mean))
                kind = "range" if len(values) <= FEWEST else f"{100 * LEVEL:g} % interval"
                return f" ({kind} {low} to {high})" if low != high else ""
        return ""

    if few := too_few(page, found):
        yield few
    first = first_sentence(page.get("finding", ()), found)
    if first is not None:
        yield fill(first, get, interval)


def bootstrap(
    values: Sequence[Any], statistic: Callable[..., Any] = np.median
) -> tuple[float, float]:
    """Return the percentile interval of the median, or another statistic, of resampled values.

    The median of five draws is the smallest of five values in 5.8 % of the resamples: of `FEWEST`
    values or fewer, the range is returned.
    """
    if len(values) <= FEWEST and np.ndim(values) == 1:
        return float(np.min(values)), float(np.max(values))
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    found = statistic(np.asarray(values)[drawn], axis=1)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(found, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def _notes(page: Page, records: Sequence[Record], facts: Mapping[str, Any]) -> Iterator[str]:
    for note in page.get("notes", ()):
        one: dict[str, str] = {"text": note} if isinstance(note, str) else note
        if facts.get(one.get("when", ""), True) and not facts.get(one.get("unless", ""), False):
            yield say(one["text"], facts)
    words = _Vocabulary(page, facts)
    for record in records:
        if record.metric == FAILED:
            yield f"{words.of('method', record.method)} failed: {record.value}."


# Formats -------------------------------------------------------------------------------------


def html_table(table: Mapping[str, Any]) -> str:
    """Return a table with its title and caption as HTML."""
    columns = [escape(column) for column in table["columns"]]
    head = "".join(f"<th scope='col'>{column}</th>" for column in columns)
    best = {tuple(cell) for cell in table.get("best", ())}
    wide = " class='wide'" if len(columns) > WIDE else ""
    rows = ""
    for i, row in enumerate(table["rows"]):
        bold = [(i, j) in best for j in range(len(row))]
        rows += f"<tr>{''.join(map(_html_cell, row, bold))}</tr>"
    title = escape(table["title"])
    return (
        f"<h2>{title}</h2>"
        f"<div class='scroll' tabindex='0' role='region' aria-label='{title}'><table{wide}>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p class='caption'>{escape(table['caption'])}</p>"
    )


def _html_cell(cell: str, best: bool) -> str:
    long = " class='long'" if len(cell) > LONG else ""
    text = f"<b>{escape(cell)}</b>" if best else escape(cell)
    return f"<td{long}>{text}</td>"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown; columns of numbers, except the first, are right-aligned."""
    sides = [
        "---:" if all(re.match(r"[-\d]|never|$", row[i]) for row in rows) else "---"
        for i in range(1, len(columns))
    ]
    shown = [[markdown_text(cell) for cell in row] for row in rows]
    lines = [[markdown_text(column) for column in columns], ["---", *sides], *shown]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def markdown_text(text: str) -> str:
    """Return text in which only code has a meaning to Markdown."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"(?=[|_])", r"\\", part.replace("<", "&lt;")) for part in parts[::2]]
    return "`".join(parts)
