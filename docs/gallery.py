"""Make the papers' figures and tables of results again, and judge them: ``make gallery``.

``python docs/gallery.py [NAME…]`` does all entries of ``gallery/entries.toml``, or those named;
``--small`` the quick ones; ``--pages`` only makes the pages again. Every run of an entry is
repeated with three seeds or as many as the entry says (where an experiment runs many seeds, with as
many batches of them) in its own folder under ``runs/gallery``; what is finished there is not run
again, what was interrupted goes on.

An entry that needs a file of the papers' data is run only with ``--data FOLDER`` (``make gallery
DATA=FOLDER``), the folder of these files; ``flwr-perdl fetch`` lists where each can be had. Without
it the page keeps its stored figures, with the checksum of the data that they were measured on.

What the runs came to is ``gallery/results.json``; the pages are made of that and the entries alone.

The rules behind the verdicts are in `MEANING` and `RULES`, which the index page shows.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import os
import re
import sys
import textwrap
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from hashlib import file_digest, sha256
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from perdl_experiments import run_experiment
from perdl_experiments.data import digest
from perdl_experiments.render import (
    DECIBELS,
    SHARE,
    claim_holds,
    fill,
    first_sentence,
    is_less,
    markdown_table,
    markdown_text,
    number,
)
from perdl_experiments.studies import configure, find

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "gallery"
ENTRIES, RESULTS = PAGES / "entries.toml", PAGES / "results.json"
THUMBNAILS = PAGES / "thumbnails"
RUNS = ROOT / "runs" / "gallery"
STUDIES = "../../perdl_experiments/studies"  # from a page

REPEATS, PROCESSES = 5, 2
LEVEL, RESAMPLES = 0.95, 2000  # of bootstrap intervals
BEATEN, MATCHED, NOT_REACHED = "beaten", "matched", "not reached"
HOLDS, FAILS = "holds", "does not hold"
#: The rules, as the index page shows them.
MEANING = {
    BEATEN: "Even our worst run is better than the paper's number by more than the tolerance.",
    MATCHED: "Our median is as good as the paper's number, within the tolerance; or the paper has "
    "no number, and its claim holds of our medians.",
    NOT_REACHED: "Neither is so, or one of the paper's claims does not hold of our medians.",
    HOLDS: "No paper shows it; the page's own rules hold of our medians.",
    FAILS: "One of them does not.",
}
RULES = (
    "The tolerance is 5 % of the paper's number, unless [entries.toml](entries.toml) has another. "
    "Verdicts in brackets do not count for their section.",
    f"One median is better than another by more than {SHARE:.0%} of the other, of areas under a "
    f"curve by more than {SHARE:.0%} of what is missing to one, of decibels by more than "
    f"{DECIBELS:g}. Tables of methods have every rival, the best first; n/m counts the seeds in "
    "which one is better than ours.",
    f"Numbers are medians over seeds, in brackets the {LEVEL:.0%} bootstrap interval of the "
    "median; for five seeds or fewer, the range. Pictures are of the first run.",
)
RULES_AT = "index.md#how-verdicts-are-computed"
LARGE, WIDTH = 30_000, 960  # bytes of a picture; pixels to which a larger one is brought
THUMBNAIL = 320, 200  # pixels at most
LONG_ALT = 60  # words of an alternative text at most; a longer one lists the points of many lines
_KEPT = 6  # significant digits
_BRACKETS = str.maketrans("[]", "()")  # in alt text


# The entries ---------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A figure beside the paper's; see ``entries.toml`` for the fields of these four."""

    metric: str
    words: str
    paper: float | None = None
    source: str = ""
    better: str = ""
    tolerance: float = 0.05
    counts: bool = True


class Claim(NamedTuple):
    """Something that holds or does not."""

    less: Sequence[Sequence[str | float]]
    holds: str
    fails: str
    source: str = ""
    factor: float = 1.0


class Rivals(NamedTuple):
    """Methods that a metric of ours is held against."""

    ours: str
    better: str
    others: str
    names: Mapping[str, str] = {}
    runs: Mapping[str, str] = {}


class Entry(NamedTuple):
    """A section of a page."""

    name: str
    title: str
    shows: Sequence[str]
    experiment: str
    about: str
    tuning: str
    data: Sequence[str]
    pictures: Sequence[str]
    small: bool
    runs: Mapping[str, Mapping[str, Any]]
    figures: Sequence[Figure] = ()
    finding: str = ""
    needs: str = ""
    repeats: int = REPEATS
    claims: Sequence[Claim] = ()
    rivals: Sequence[Rivals] = ()
    names: Mapping[str, str] = {}

    def seeds(self, run: str) -> list[int]:
        """Return the seed of each repetition; where one runs many seeds, the first of its own."""
        options = configure(find(self.experiment), options=self.runs[run])
        step = getattr(options, "splits", options.seeds)
        return [repeat * step for repeat in range(self.repeats)]

    def data_of(self, run: str) -> str:
        """Return the name of the file of the papers' data that a run needs, if any."""
        given = str(self.runs[run].get("data", ""))
        return given if given.endswith(".npz") else self.needs

    @property
    def files(self) -> list[str]:
        """The names of all files that its runs need."""
        return sorted({name for run in self.runs if (name := self.data_of(run))})

    def folder(self, run: str, seed: int) -> Path:
        """Return where the run of a seed goes."""
        return RUNS / self.name / run / f"seed-{seed}"


def entries() -> list[Entry]:
    """Return what the gallery shows."""
    kinds = {"figures": Figure, "claims": Claim, "rivals": Rivals}
    return [
        Entry(**{k: [kinds[k](**one) for one in v] if k in kinds else v for k, v in entry.items()})
        for entry in tomllib.loads(ENTRIES.read_text())["entries"]
    ]


class Page(NamedTuple):
    """A page of the gallery: one or more entries that answer one question."""

    name: str
    title: str
    question: str
    entries: tuple[str, ...]


def listed() -> list[Page]:
    """Return the pages, in the order of the index."""
    found = tomllib.loads(ENTRIES.read_text())["pages"]
    return [Page(**page | {"entries": tuple(page["entries"])}) for page in found]


# The runs ------------------------------------------------------------------------------------


class Job(NamedTuple):
    """One run."""

    entry: Entry
    run: str
    seed: int
    data: Path | None = None

    @property
    def file(self) -> Path | None:
        """The file of the papers' data that it needs, if any."""
        name = self.entry.data_of(self.run)
        return self.data / name if self.data and name else None

    @property
    def ready(self) -> bool:
        """Whether the file that it needs is there, if any."""
        return not self.entry.data_of(self.run) or (self.file is not None and self.file.is_file())

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from the defaults, the file among them."""
        return {**self.entry.runs[self.run], **({"data": str(self.file)} if self.file else {})}

    @property
    def config(self) -> dict[str, Any]:
        """The complete config, as ``run.json`` has it."""
        given = configure(find(self.entry.experiment), seed=self.seed, options=self.options)
        checksum = {"data_sha256": digest(str(self.file))} if self.file else {}
        return {**given.options, **checksum}

    @property
    def folder(self) -> Path:
        """Where it goes."""
        return self.entry.folder(self.run, self.seed)

    def done(self) -> bool:
        """Return whether the folder has the results of this very run."""
        begun = self.folder / "run.json"
        if not (self.folder / "results.json").is_file() or not begun.is_file():
            return False
        return _without_folder(json.loads(begun.read_text())) == _without_folder(self.config)

    def work(self) -> float:
        """Run it, or go on with it; return the seconds."""
        begun = self.folder / "run.json"
        found = json.loads(begun.read_text()) if begun.is_file() else {}
        same = _without_folder(found) == _without_folder(self.config)
        started = time.perf_counter()
        run_experiment(
            self.entry.experiment,
            seed=self.seed,
            options=self.options,
            out=self.folder,
            resume=same,
            overwrite=not same,
        )
        return time.perf_counter() - started


def _without_folder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with its file's name only: the file may have moved, its checksum tells."""
    return {n: Path(v).name if n == "data" and v else v for n, v in config.items()}


def runnable(chosen: Sequence[Entry], data: Path | None) -> list[Job]:
    """Return the runs whose files are there; print the others."""
    there = []
    for entry in chosen:
        for run in entry.runs:
            jobs = [Job(entry, run, seed, data) for seed in entry.seeds(run)]
            if all(job.ready for job in jobs):
                there += jobs
            else:
                needs = entry.data_of(run)
                print(f"{entry.name}, {run}: the stored figures stay, as it needs DATA/{needs}")
    return there


def run_all(chosen: Sequence[Entry], results: dict[str, Any], data: Path | None = None) -> bool:
    """Run what is missing, longest first; write results and pages as entries end."""
    jobs = runnable(chosen, data)
    missing = [job for job in jobs if not job.done()]
    missing.sort(key=lambda job: -_seconds(results, job))
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them finished before", flush=True)
    started, good = time.perf_counter(), True
    for name in {job.entry.name for job in jobs}:
        _collect([job for job in jobs if job.entry.name == name], results)
    write_pages(results)
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), quiet) as pool:
        waiting = {pool.submit(Job.work, job): job for job in missing}
        for number, ended in enumerate(as_completed(waiting), 1):
            job = waiting[ended]
            what = f"{job.entry.name}, {job.run}, seed {job.seed}"
            error = ended.exception()
            good &= error is None
            said = f"{ended.result():.0f} s" if error is None else f"failed: {error}"
            passed = (time.perf_counter() - started) / 60
            print(f"[{number}/{len(missing)}, {passed:.1f} min] {what}: {said}", flush=True)
            _collect([one for one in jobs if one.entry is job.entry], results)
            write_pages(results)
    return good


def quiet() -> None:
    """Keep Flower's rounds out of the progress, and to one core: other runs have the others."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    os.environ["OMP_NUM_THREADS"] = "1"


def _seconds(results: Mapping[str, Any], job: Job) -> float:
    """Return how long a run took last time; what is not known comes first."""
    before = results.get(job.entry.name, {}).get(job.run)
    return float(before["seconds"]["median"]) if before else float("inf")


def _collect(jobs: Sequence[Job], results: dict[str, Any]) -> None:
    """Bring an entry's runs, once all have ended, into the results file and the pictures."""
    if not all(job.done() for job in jobs):
        return
    entry, stored = jobs[0].entry, results.get(jobs[0].entry.name, {})
    made = {run: _summary([j for j in jobs if j.run == run]) for run in {j.run for j in jobs}}
    results[entry.name] = {run: (stored | made)[run] for run in entry.runs if run in stored | made}
    ordered = {one.name: results[one.name] for one in entries() if one.name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    first = next(iter(entry.runs))
    for picture in entry.pictures if first in made else ():
        source = entry.folder(first, entry.seeds(first)[0]) / f"{picture}.png"
        _shrink(source, PAGES / f"{entry.name}-{picture}.png")


def fingerprint(entry: Entry, run: str) -> str:
    """Return the SHA-256 of the study's code, without its comments, and of all options of a run.

    The code is the study's module and the helpers of all studies that it takes something from.
    """
    code = find(entry.experiment).code
    used = {getattr(one, "__module__", getattr(one, "__name__", "")) for one in vars(code).values()}
    helpers = {str(one) for one in used if str(one).startswith("perdl_experiments.studies._")}
    parts = [repr(sorted(Job(entry, run, 0).config.items()))]
    for name in sorted({code.__name__, *helpers} - {"perdl_experiments.studies._experiment"}):
        tree = ast.parse(Path(str(sys.modules[name].__file__)).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
                node
            ):
                node.body = node.body[1:]
        parts.append(ast.unparse(tree))
    return sha256("\n".join(parts).encode()).hexdigest()


def _summary(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return what the runs of one setting came to; tables, notes and captions are the first's."""
    found = [json.loads((job.folder / "results.json").read_text()) for job in jobs]
    first = found[0]
    metrics = [one["metrics"] | _points(jobs[0].entry, one["curves"]) for one in found]
    by_seed = first["by_seed"] if len(found) == 1 else {}
    return {
        "options": dict(jobs[0].entry.runs[jobs[0].run]),
        "code": fingerprint(jobs[0].entry, jobs[0].run),
        "seeds": [job.seed for job in jobs],
        **_data(jobs[0].file),
        "versions": first["versions"],
        "seconds": spread("seconds", [one["seconds"] for one in found]),
        **{cost: first[cost] for cost in ("rounds", "floats_up", "floats_down")},
        "metrics": {
            name: spread(name, [one[name] for one in metrics], by_seed.get(name))
            for name in metrics[0]
            if all(name in one for one in metrics)
        },
        "tables": first["tables"],
        "notes": first["notes"],
        "figures": first["figures"],
    }


def _data(path: Path | None) -> dict[str, Any]:
    """Return the name and the SHA-256 of a file of the papers' data."""
    if path is None:
        return {}
    with path.open("rb") as stream:
        return {"data": {"file": path.name, "sha256": file_digest(stream, "sha256").hexdigest()}}


def _points(entry: Entry, curves: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return those points of curves, as CURVE[i], that the entry refers to."""
    named = [figure.metric for figure in entry.figures]
    named += [str(side) for claim in entry.claims for pair in claim.less for side in pair]
    found = {}
    for reference in named:
        match = re.fullmatch(r"(?:.*:)?((\w+)\[(\d+)\])", reference)
        if match and match[2] in curves:
            found[match[1]] = curves[match[2]][int(match[3])]
    return found


def spread(
    name: str, values: Sequence[float], by_seed: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return median, low, high and all values; None stands for never, in a number of rounds.

    The values of one run of many seeds are ``by_seed``.
    """
    rounds = name.startswith("rounds_")
    runs, known = (
        [np.inf if rounds and value == -1 else value for value in them]
        for them in (values, by_seed or values)
    )
    found = {"median": np.median(runs), "low": min(known), "high": max(known)}
    kept = {key: _kept(value) for key, value in found.items()}
    return {**kept, "values": [_kept(value) for value in known]}


def _kept(value: float) -> float | None:
    return float(f"{value:.{_KEPT}g}") if np.isfinite(value) else None


def _shrink(source: Path, target: Path) -> None:
    """Copy a picture; a large one no wider than a page and with 256 colors."""
    if source.stat().st_size <= LARGE:
        target.write_bytes(source.read_bytes())
        return
    with Image.open(source) as picture:
        width = min(picture.width, WIDTH)
        size = width, round(picture.height * width / picture.width)
        small = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        small.quantize(256, Image.Quantize.FASTOCTREE).save(target, optimize=True)


# What follows from the numbers ---------------------------------------------------------------


class Found:
    """An entry's results, by reference: METRIC of the first run, or RUN:METRIC."""

    def __init__(self, entry: Entry, results: Mapping[str, Any]) -> None:
        self.runs, self.names = results[entry.name], entry.names
        self.first = next(iter(entry.runs))

    def metrics(self, run: str) -> Mapping[str, Mapping[str, Any]]:
        """Return all metrics of a run."""
        metrics: Mapping[str, Mapping[str, Any]] = self.runs[run]["metrics"]
        return metrics

    def get(self, reference: str | float, key: str = "median") -> float:
        """Return the median, low or high of a metric, or the number that is given."""
        if not isinstance(reference, str):
            return float(reference)
        run, _, metric = reference.rpartition(":")
        value: float | None = self.metrics(run or self.first)[metric][key]
        return float("inf") if value is None else value

    def values(self, reference: str) -> list[float]:
        """Return a metric for each seed; none where they were not kept."""
        run, _, metric = reference.rpartition(":")
        values = self.metrics(run or self.first)[metric].get("values", [])
        return [float("inf") if value is None else value for value in values]

    def interval(self, reference: str | float) -> tuple[float, float]:
        """Return the bootstrap interval of a metric's median."""
        values = self.values(str(reference))
        if len(values) <= 5:  # then the interval is the range, see `bootstrap`
            return self.get(reference, "low"), self.get(reference, "high")
        return bootstrap(values)

    def fill(self, template: str) -> str:
        """Return a sentence with its metrics filled in."""
        return fill(template, self.get)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the percentile interval of the median of resampled values.

    The median of five draws is the smallest of five values in 5.8 % of the resamples, so that the
    interval of five values is their range.
    """
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[drawn], axis=1)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(medians, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def finding(entry: Entry, found: Found) -> str:
    """Return the sentence that says what was found, by default with the first run's medians."""
    if entry.finding:
        return found.fill(entry.finding)
    templates = find(entry.experiment).page["finding"]
    template = first_sentence(templates, found.metrics(found.first))
    return "" if template is None else found.fill(template)


def verdict_of(figure: Figure, found: Found) -> str:
    """Return a figure's verdict, empty if it is only shown."""
    if figure.paper is None or not figure.better:
        return ""
    sign = 1 if figure.better == "lower" else -1
    worst = sign * found.get(figure.metric, "high" if sign > 0 else "low")
    paper, room = sign * figure.paper, figure.tolerance * abs(figure.paper)
    if worst < paper - room:
        return BEATEN
    return MATCHED if sign * found.get(figure.metric) <= paper + room else NOT_REACHED


def holds(claim: Claim, found: Found) -> bool:
    """Return whether a claim holds of the medians."""
    return claim_holds(claim.less, found.get, claim.factor)


def verdict(entry: Entry, found: Found) -> str:
    """Return a section's verdict."""
    if not entry.shows:
        return HOLDS if all(holds(claim, found) for claim in entry.claims) else FAILS
    figures = [verdict_of(figure, found) for figure in entry.figures if figure.counts]
    figures = [one for one in figures if one]
    if NOT_REACHED in figures or not all(holds(c, found) for c in entry.claims if c.source):
        return NOT_REACHED
    return BEATEN if figures and set(figures) == {BEATEN} else MATCHED


class Rival(NamedTuple):
    """A method beside ours: its metric, and whether its median is better."""

    name: str
    metric: str
    better: bool
    seeds: str
    """In how many of the seeds that both have it is better; "" where values were not kept."""


def compare(rivals: Rivals, found: Found) -> list[Rival]:
    """Return all rivals, held against ours."""
    sign = 1 if rivals.better == "lower" else -1

    def is_better(theirs: float, ours: float) -> bool:
        return is_less(sign * theirs, sign * ours, rivals.ours)

    compared = []
    for metric, name in _named(rivals, found).items():
        if metric == rivals.ours:
            continue
        pairs = list(zip(found.values(metric), found.values(rivals.ours), strict=False))
        wins = sum(is_better(theirs, ours) for theirs, ours in pairs)
        better = is_better(found.get(metric), found.get(rivals.ours))
        seeds = f"{wins}/{len(pairs)}" if len(pairs) > 1 else ""
        compared.append(Rival(name, metric, better, seeds))
    return compared


def _named(rivals: Rivals, found: Found) -> dict[str, str]:
    """Return the metrics of all rivals, in words; with ours, if that is a method like them."""
    named = {f"{run}:{rivals.ours}": words for run, words in rivals.runs.items()}
    names = {**found.names, **rivals.names}
    run, colon, _ = rivals.ours.rpartition(":")
    for metric in found.metrics(run or found.first):
        if match := re.fullmatch(rivals.others, metric):
            named[f"{run}{colon}{metric}"] = names.get(match[1], match[1].replace("_", " "))
    return named


def judgement(entry: Entry, found: Found) -> Iterator[str]:
    """Yield an item for each claim: whether it holds, and a sentence with its numbers."""
    for claim in entry.claims:
        good = holds(claim, found)
        said = markdown_text(found.fill(claim.holds if good else claim.fails))
        source = f" *({markdown_text(claim.source)})*" if claim.source else ""
        yield f"- **{(HOLDS if good else FAILS).capitalize()}**: {said}{source}"


def beaten_by_rivals(entry: Entry, found: Found) -> bool:
    """Return whether a rival does better in one figure or more."""
    return any(rival.better for rivals in entry.rivals for rival in compare(rivals, found))


# The pages -----------------------------------------------------------------------------------


def write_pages(results: Mapping[str, Any]) -> None:
    """Write every page that the results make, and the index's thumbnails."""
    known = {entry.name: entry for entry in entries()}
    for name, text in pages(results).items():
        (PAGES / name).write_text(text)
    for page in listed():
        first = known[page.entries[0]]
        picture = PAGES / f"{first.name}-{first.pictures[0]}.png"
        if picture.is_file():
            _thumbnail(picture, THUMBNAILS / f"{page.name}.png")


def _thumbnail(source: Path, target: Path) -> None:
    """Write a small picture: of a tall one the upper part."""
    target.parent.mkdir(exist_ok=True)
    width, height = THUMBNAIL
    with Image.open(source) as picture:
        shown = picture.convert("RGB")
        shown = shown.crop((0, 0, shown.width, min(shown.height, shown.width * height // width)))
        shown.thumbnail(THUMBNAIL, Image.Resampling.LANCZOS)
        shown.quantize(64).save(target, optimize=True)


def pages(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the pages' text by file name."""
    known = {entry.name: entry for entry in entries()}
    found: dict[Page, list[tuple[Entry, Found]]] = {}
    for page in listed():
        there = [known[name] for name in page.entries if name in results]
        if there:
            found[page] = [(entry, Found(entry, results)) for entry in there]
    made = {f"{page.name}.md": "\n".join(_page(page, one)) for page, one in found.items()}
    return {"index.md": "\n".join(_index(found)), **made}


Section = tuple[Entry, "Found"]


def _index(found: Mapping[Page, Sequence[Section]]) -> Iterator[str]:
    every = [section for sections in found.values() for section in sections]
    verdicts = [verdict(*section) for section in every]
    counts = ", ".join(f"{verdicts.count(one)} {one}" for one in MEANING if one in verdicts)
    yield "# Gallery\n"
    yield f"**{len(found)} pages with {len(every)} experiments: {counts}.**\n"
    yield (
        "The papers' figures and tables, made again by one command, and results that the papers "
        "do not have. [results.json](results.json) has every metric.\n"
    )
    yield "```sh\nmake gallery                  # all, resumable: runs/gallery"
    yield "make gallery DATA=FOLDER      # with the papers' data: flwr-perdl fetch"
    yield "make gallery ARGS=--small     # the quick ones"
    yield "make gallery ARGS=synthetic   # by page\n```\n"
    question = ""
    for page, sections in found.items():
        if page.question != question:
            question = page.question
            yield f"## {question}\n"
        yield from _card(page, sections)
    seconds = [one["seconds"] for _, of in every for one in of.runs.values()]
    minutes = sum(one["median"] * len(one["values"]) for one in seconds) / 60
    yield "## How verdicts are computed\n"
    yield markdown_table(["verdict", "rule"], [[f"**{k}**", v] for k, v in MEANING.items()])
    yield "".join(f"- {rule}\n" for rule in RULES)
    yield f"The runs shown took {minutes:.0f} minutes in all.\n"


def _card(page: Page, sections: Sequence[Section]) -> Iterator[str]:
    """Yield what the index says of a page."""
    entry, found = sections[0]
    [picture] = [
        one
        for one in found.runs[found.first]["figures"]
        if one["file"] == f"{entry.pictures[0]}.png"
    ]
    thumbnail = f"thumbnails/{page.name}.png{_ending(picture)}"
    yield f"### [{page.title}]({page.name}.md)\n"
    yield f"[![{page.title}]({thumbnail})]({page.name}.md)\n"
    yield f"{markdown_text(finding(entry, found))}\n"
    shown = [figure for one, _ in sections for figure in one.shows]
    judged = ", ".join(f"**{verdict(*section)}**" for section in sections)
    better = any(beaten_by_rivals(*section) for section in sections)
    judged += "; a baseline does better" if better else ""
    yield f"{'. '.join(filter(None, [', '.join(shown), judged]))}.\n"


def _page(page: Page, sections: Sequence[Section]) -> Iterator[str]:
    yield f"# {page.title}\n"
    captions: set[str] = set()
    for _, group in groupby(sections, lambda section: find(section[0].experiment).code):
        together = list(group)
        for entry, found in together:
            if entry.name != page.entries[0]:
                yield f"## {entry.title}\n"
            yield from _section(entry, found, captions)
        if len(together) > 1:
            yield "## Results\n"
        yield from filter(None, [_methods(together), _figures(together)])
        yield from _once(" ".join(entry.tuning.split()) + "\n" for entry, _ in together)
    yield "## Run it\n"
    yield f"```sh\n{_commands(page, [entry for entry, _ in sections])}\n```\n"
    yield f"{' '.join(_once(_source(entry) for entry, _ in sections))} [Rules]({RULES_AT}).\n"
    yield "## Data, settings and limits\n"
    firsts = [found.runs[found.first] for _, found in sections]
    yield from (f"- {markdown_text(note)}" for note in _once(n for f in firsts for n in f["notes"]))
    runs = [one for _, found in sections for one in found.runs.values() if "data" in one]
    for file, checksum in {one["data"]["file"]: one["data"]["sha256"] for one in runs}.items():
        yield f"- `{file}`: SHA-256 `{checksum}`; `flwr-perdl fetch` says where to get it."
    yield from _once(
        f"- {', '.join(f'{name} {version}' for name, version in first['versions'].items())}."
        for first in firsts
    )
    yield ""


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _section(entry: Entry, found: Found, said: set[str]) -> Iterator[str]:
    """Yield what was found, the pictures, what holds, and the numbers."""
    yield f"**{markdown_text(finding(entry, found))}**\n"
    shows = ", ".join(entry.shows) or "Not in the papers"
    yield f"{shows}. Verdict: {_verdict(entry, found)}. {' '.join(entry.about.split())}\n"
    for figure in found.runs[found.first]["figures"]:
        name, _, ending = figure["file"].rpartition(".")
        if name in entry.pictures and ending == "png":
            alt = figure.get("alt") or figure["title"]
            alt = figure["title"] if len(alt.split()) > LONG_ALT else alt
            alt = markdown_text(alt).translate(_BRACKETS)
            yield f"![{alt}]({entry.name}-{name}.png{_ending(figure)})\n"
            if figure["caption"] not in said:
                yield f"*{markdown_text(figure['caption'])}*\n"
                said.add(figure["caption"])
    yield from judgement(entry, found)
    yield ""


def _source(entry: Entry) -> str:
    """Return links to the study's program and to its texts."""
    code = find(entry.experiment).code.__name__.rpartition(".")[2]
    files = f"{code}.py", f"{entry.experiment.replace('-', '_')}.toml"
    return f"{', '.join(f'[{name}]({STUDIES}/{name})' for name in files)}."


def _ending(figure: Mapping[str, str]) -> str:
    """Return what tells the site that a picture is a chart, whose colors a dark page inverts."""
    return "#chart" if figure["kind"] == "chart" else ""


def _methods(sections: Sequence[Section]) -> str:
    """Return the table of all methods, the best by the first metric first."""
    cells: dict[str, dict[str, str]] = {}
    order: dict[str, float] = {}
    columns: dict[str, None] = {}
    for entry, found in sections:
        for rivals in entry.rivals:
            column = _column(f"`{rivals.ours}` ({rivals.better} is better)", entry, sections)
            columns[column] = None
            sign = 1 if rivals.better == "lower" else -1
            ours = _named(rivals, found).get(rivals.ours, "ours")
            for one in [Rival(ours, rivals.ours, False, ""), *compare(rivals, found)]:
                cell = " ".join(filter(None, [_measured(one.metric, found), one.seeds]))
                cells.setdefault(one.name, {})[column] = f"{cell} (better)" if one.better else cell
                order.setdefault(one.name, sign * found.get(one.metric))
    return _table(columns, {name: cells[name] for name in sorted(cells, key=order.__getitem__)})


def _figures(sections: Sequence[Section]) -> str:
    """Return the table of the figures that a paper has, or that no table of methods has."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for entry, found in sections:
        compared = {one.metric for rivals in entry.rivals for one in compare(rivals, found)}
        compared |= {rivals.ours for rivals in entry.rivals}
        for figure in entry.figures:
            if figure.paper is None and figure.metric in compared:
                continue
            said = {"here": _measured(figure.metric, found)}
            if figure.paper is not None:
                said["paper"] = number(figure.paper)
                judged = verdict_of(figure, found)
                said["verdict"] = f"({judged})" if judged and not figure.counts else judged
            for kind, cell in said.items():
                column = _column(kind, entry, sections)
                columns[column] = None
                cells.setdefault(figure.words, {})[column] = cell
    return _table(columns, cells)


def _column(name: str, entry: Entry, sections: Sequence[Section]) -> str:
    return f"{entry.name}: {name}" if len(sections) > 1 else name


def _table(columns: Iterable[str], cells: Mapping[str, Mapping[str, str]]) -> str:
    if not cells:
        return ""
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in cells.items()]
    return markdown_table(["", *columns], rows)


def _measured(metric: str, found: Found) -> str:
    """Return a metric's median, and its interval if that has any width."""
    low, high = map(number, found.interval(metric))
    span = f" ({low}\N{EN DASH}{high})" if low != high else ""
    return f"{number(found.get(metric))}{span}"


def _verdict(entry: Entry, found: Found) -> str:
    said = f"**{verdict(entry, found)}**"
    return f"{said}; a baseline does better" if beaten_by_rivals(entry, found) else said


def _commands(page: Page, sections: Sequence[Entry]) -> str:
    """Return the commands of the page and of each of its runs."""
    folder = " DATA=FOLDER" if any(entry.files for entry in sections) else ""
    lines = [f"make gallery ARGS={page.name}{folder}   # all seeds; or one run:"]
    for entry in sections:
        for run, options in entry.runs.items():
            name = entry.data_of(run)
            given = [f"--data FOLDER/{name}"] if name else []
            given += [f"-o\0{n}={value}" for n, value in options.items() if n != "data"]
            command = " ".join(["flwr-perdl run", entry.experiment, *given])
            wrapped = textwrap.wrap(command, 96, break_on_hyphens=False, break_long_words=False)
            lines.append(" \\\n    ".join(wrapped).replace("\0", " "))
    return "\n".join(_once([*lines, *(line for entry in sections for line in entry.data)]))


def main(arguments: Sequence[str]) -> int:
    """Run the gallery; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="pages or entries; by default all")
    parser.add_argument("--small", action="store_true", help="only the quick ones")
    parser.add_argument("--pages", action="store_true", help="only make the pages again")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with the papers' data")
    given = parser.parse_args(arguments)
    known = {entry.name: entry for entry in entries()}
    of_page = {page.name: page.entries for page in listed()}
    if given.data is not None and not given.data.is_dir():
        parser.error(f"--data must be a folder, got {str(given.data)!r}.")
    unknown = sorted(set(given.names) - {*known, *of_page})
    if unknown:
        parser.error(
            f"NAME must be of {', '.join({**of_page, **known})}, got {', '.join(unknown)}."
        )
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    names = [name for named in given.names for name in of_page.get(named, [named])]
    chosen = [known[name] for name in names or known]
    chosen = [entry for entry in chosen if entry.small or not given.small]
    good = given.pages or run_all(chosen, results, given.data)
    write_pages(results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
