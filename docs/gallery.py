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
import json
import logging
import os
import re
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from hashlib import file_digest
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
NOT_COMPARABLE, HOLDS, FAILS = "not comparable", "holds", "does not hold"
#: The rules, as the index page shows them.
MEANING = {
    BEATEN: "Even our worst run is better than the paper's number by more than the tolerance.",
    MATCHED: "Our median is as good as the paper's number, within the tolerance; or the paper has "
    "no number, and its claim holds of our medians.",
    NOT_REACHED: "Neither is so, or one of the paper's claims does not hold of our medians.",
    NOT_COMPARABLE: "Our data stand in for the paper's. The page says how to run it on those.",
    HOLDS: "No paper shows it. The page's own rules hold of our medians.",
    FAILS: "No paper shows it. One of the page's rules does not hold of our medians.",
}
RULES = (
    "Each figure beside a number of a paper has a verdict. The tolerance is 5 % of the paper's "
    "number, unless the entry in [entries.toml](entries.toml) has another one.",
    "A page is *not reached* if one of its figures or one of the paper's claims is not; *beaten* "
    "if all its figures are; else *matched*. A figure that does not count, such as the paper's own "
    "variant beside ours, is judged and shown, but does not change the verdict of its page.",
    f"One median is better than another if the difference is more than {SHARE:.0%} of the other "
    f"(for decibels: more than {DECIBELS:g} dB), and more than rounding. A page lists every rival "
    "with its median. Where runs share seeds, it also counts the seeds in which the rival is "
    "better by this rule.",
    f"Numbers are medians over runs with different seeds. In brackets stands the {LEVEL:.0%} "
    "bootstrap interval of the median. For five runs or fewer, this interval is the range of the "
    "runs.",
)
PAPERS = {
    "P0": "Personalized dictionaries (P0: Liang, Shi, Al Kontar and Fattahi, NeurIPS 2023)",
    "P1": "Dictionaries over networks (P1: Chen, Towfic and Sayed, IEEE TSP 2015)",
    "P2": "Clustered regression (P2: Su, Xu and Yang, NeurIPS 2022)",
    "P3": "One dictionary from distributed data (P3: Chainais and Richard, iTWIST 2014)",
    "": "Not in the papers",
}
LARGE, WIDTH = 30_000, 960  # bytes of a picture; pixels to which a larger one is brought
THUMBNAIL = 320, 200  # pixels at most
MANY = 6  # comparisons in a cell at most
#: Figures that are no charts, of stored runs that do not say which of theirs are.
_PICTURES = {"abundances", "images", "reconstructions", "strip"}
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


class Entry(NamedTuple):
    """A page of the gallery."""

    name: str
    title: str
    shows: Sequence[str]
    experiment: str
    about: str
    tuning: str
    stand_in: str
    data: Sequence[str]
    pictures: Sequence[str]
    small: bool
    runs: Mapping[str, Mapping[str, Any]]
    figures: Sequence[Figure]
    needs: str = ""
    repeats: int = REPEATS
    claims: Sequence[Claim] = ()
    rivals: Sequence[Rivals] = ()
    paper_tables: Sequence[Mapping[str, Any]] = ()

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


def runnable(chosen: Sequence[Entry], data: Path | None) -> list[Entry]:
    """Return the entries whose files are there; print the others."""
    there = []
    for entry in chosen:
        missing = [name for name in entry.files if data is None or not (data / name).is_file()]
        if missing:
            print(f"{entry.name}: the stored figures stay, as it needs DATA/{missing[0]}")
        else:
            there.append(entry)
    return there


def run_all(chosen: Sequence[Entry], results: dict[str, Any], data: Path | None = None) -> bool:
    """Run what is missing, longest first; write results and pages as entries end."""
    chosen = runnable(chosen, data)
    jobs = [Job(e, run, seed, data) for e in chosen for run in e.runs for seed in e.seeds(run)]
    missing = [job for job in jobs if not job.done()]
    missing.sort(key=lambda job: -_seconds(results, job))
    for job in missing:
        results.pop(job.entry.name, None)  # it may be of other options or metrics
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them finished before", flush=True)
    started, good = time.perf_counter(), True
    for entry in chosen:
        _collect(entry, results, data)
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
            _collect(job.entry, results, data)
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


def _collect(entry: Entry, results: dict[str, Any], data: Path | None) -> None:
    """Bring an entry whose runs are all there into the results file and the pictures."""
    jobs = {run: [Job(entry, run, seed, data) for seed in entry.seeds(run)] for run in entry.runs}
    if not all(job.done() for of_run in jobs.values() for job in of_run):
        return
    results[entry.name] = {run: _summary(of_run) for run, of_run in jobs.items()}
    ordered = {one.name: results[one.name] for one in entries() if one.name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    first = next(iter(jobs.values()))[0].folder
    for picture in entry.pictures:
        _shrink(first / f"{picture}.png", PAGES / f"{entry.name}-{picture}.png")


def _summary(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return what the runs of one setting came to; tables, notes and captions are the first's."""
    found = [json.loads((job.folder / "results.json").read_text()) for job in jobs]
    first = found[0]
    metrics = [one["metrics"] | _points(jobs[0].entry, one["curves"]) for one in found]
    return {
        "options": dict(jobs[0].entry.runs[jobs[0].run]),
        "seeds": [job.seed for job in jobs],
        **_data(jobs[0].file),
        "versions": first["versions"],
        "seconds": spread("seconds", [one["seconds"] for one in found]),
        **{cost: first[cost] for cost in ("rounds", "floats_up", "floats_down")},
        "metrics": {
            name: spread(name, [one[name] for one in metrics])
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


def spread(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Return median, low, high and all values; None stands for never, in a number of rounds."""
    rounds = name.startswith("rounds_")
    known = [np.inf if rounds and value == -1 else value for value in values]
    found = {"median": np.median(known), "low": min(known), "high": max(known)}
    kept = {key: _kept(value) for key, value in found.items()}
    return {**kept, "values": [_kept(value) for value in known]}


def _kept(value: float) -> float | None:
    return float(f"{value:.{_KEPT}g}") if np.isfinite(value) else None


def _shrink(source: Path, target: Path) -> None:
    """Copy a picture; a large one no wider than a page and with 64 colors."""
    if source.stat().st_size <= LARGE:
        target.write_bytes(source.read_bytes())
        return
    with Image.open(source) as picture:
        width = min(picture.width, WIDTH)
        size = width, round(picture.height * width / picture.width)
        small = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        small.quantize(64).save(target, optimize=True)


# What follows from the numbers ---------------------------------------------------------------


class Found:
    """An entry's results, by reference: METRIC of the first run, or RUN:METRIC."""

    def __init__(self, entry: Entry, results: Mapping[str, Any]) -> None:
        self.runs = results[entry.name]
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

    def values(self, metric: str) -> list[float]:
        """Return a metric of the first run for each seed; none where they were not kept."""
        values = self.metrics(self.first)[metric].get("values", [])
        return [float("inf") if value is None else value for value in values]

    def interval(self, reference: str | float) -> tuple[float, float]:
        """Return the bootstrap interval of a metric's median."""
        run, _, metric = str(reference).rpartition(":")
        values = self.metrics(run or self.first)[metric].get("values", [])
        if len(values) <= 5:  # then the interval is the range, see `bootstrap`
            return self.get(reference, "low"), self.get(reference, "high")
        return bootstrap([float("inf") if value is None else value for value in values])

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
    """Return the sentence that says what was found, with the medians of the first run."""
    templates = find(entry.experiment).page["finding"]
    template = first_sentence(templates, found.metrics(found.first))
    return "" if template is None else found.fill(template)


def verdict_of(figure: Figure, entry: Entry, found: Found) -> str:
    """Return a figure's verdict, empty if it is only shown."""
    if figure.paper is None or not figure.better:
        return ""
    if entry.stand_in:
        return NOT_COMPARABLE
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
    """Return the page's verdict."""
    if not entry.shows:
        return HOLDS if all(holds(claim, found) for claim in entry.claims) else FAILS
    if entry.stand_in:
        return NOT_COMPARABLE
    figures = [verdict_of(figure, entry, found) for figure in entry.figures if figure.counts]
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
    for metric in found.metrics(found.first):
        match = re.fullmatch(rivals.others, metric)
        if match:
            name = rivals.names.get(match[1], match[1].replace("_", " "))
            pairs = list(zip(found.values(metric), found.values(rivals.ours), strict=False))
            wins = sum(is_better(theirs, ours) for theirs, ours in pairs)
            better = is_better(found.get(metric), found.get(rivals.ours))
            seeds = f"{wins} of {len(pairs)}" if pairs else ""
            compared.append(Rival(name, metric, better, seeds))
    return compared


def judgement(entry: Entry, found: Found) -> str:
    """Return what is to be said, in words, with all numbers filled in."""
    said = [found.fill(one.holds if holds(one, found) else one.fails) for one in entry.claims]
    judged = [verdict_of(figure, entry, found) for figure in entry.figures if figure.counts]
    counts = {name: judged.count(name) for name in (BEATEN, MATCHED, NOT_REACHED)}
    if any(counts.values()):
        words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        said.append(f"Of the paper's numbers: {words}.")
    return " ".join(said)


def beaten_by_rivals(entry: Entry, found: Found) -> bool:
    """Return whether a rival does better in one figure or more."""
    return any(rival.better for rivals in entry.rivals for rival in compare(rivals, found))


def against(rivals: Rivals, found: Found) -> Iterator[str]:
    """Yield a sentence that says who does better than ours, and the table of all, best first."""
    compared = compare(rivals, found)
    better = [f"{one.name} ({number(found.get(one.metric))})" for one in compared if one.better]
    ours = f"`{rivals.ours}`, ours {number(found.get(rivals.ours))}"
    rule = f"by more than {SHARE:.0%}"
    if "psnr_" in rivals.ours:
        rule = f"by more than {DECIBELS:g} dB"
    if better:
        yield f"**Better than ours** {rule} ({ours}): {'; '.join(better)}.\n"
    else:
        yield f"No rival is better than ours {rule} ({ours}).\n"
    sign = 1 if rivals.better == "lower" else -1
    rows = []
    for one in sorted(
        [Rival("ours", rivals.ours, False, ""), *compared],
        key=lambda one: sign * found.get(one.metric),
    ):
        said = "" if one.metric == rivals.ours else "yes" if one.better else "no"
        rows.append([one.name, _with_interval(one.metric, found), said, one.seeds])
    if not any(row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    columns = ["", f"median, {rivals.better} is better", "better than ours", "in how many seeds"]
    yield markdown_table(columns[: len(rows[0])], rows)


# The pages -----------------------------------------------------------------------------------


def write_pages(results: Mapping[str, Any]) -> None:
    """Write every page that the results make, and the index's thumbnails."""
    for name, text in pages(results).items():
        (PAGES / name).write_text(text)
    for entry in entries():
        picture = PAGES / f"{entry.name}-{entry.pictures[0]}.png"
        if entry.name in results and picture.is_file():
            _thumbnail(picture, THUMBNAILS / f"{entry.name}.png")


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
    made = {f"{e.name}.md": "\n".join(_page(e, results)) for e in entries() if e.name in results}
    return {"index.md": "\n".join(_index(results)), **made}


def _index(results: Mapping[str, Any]) -> Iterator[str]:
    every = [entry for entry in entries() if entry.name in results]
    verdicts = [verdict(entry, Found(entry, results)) for entry in every]
    counts = ", ".join(f"{verdicts.count(one)} {one}" for one in MEANING if one in verdicts)
    yield "# Gallery\n"
    yield f"**{len(every)} pages: {counts}.**\n"
    yield (
        "The figures and tables in which the four papers show results, made again by one command, "
        "beside the papers' own numbers; and results that the papers do not have. Diagrams and "
        "tables of definitions are left out. Pages on the papers' own data say which file they "
        "were measured on, with its checksum. All numbers come from [results.json](results.json), "
        "from which these pages are made. Pictures and tables are those of the first run.\n"
    )
    yield "```sh\nmake gallery                  # all of it, resumable: runs/gallery"
    yield "make gallery DATA=FOLDER      # with the papers' data: flwr-perdl fetch lists the files"
    yield "make gallery ARGS=--small     # the quick ones"
    yield "make gallery ARGS=synthetic   # some, by the names of their pages\n```\n"
    minutes = 0.0
    for paper, heading in PAPERS.items():
        yield f"## {heading}\n"
        for entry in every:
            if (entry.shows[0][:2] if entry.shows else "") == paper:
                found = Found(entry, results)
                minutes += sum(
                    one["seconds"]["median"] * len(one["seeds"]) / 60 for one in found.runs.values()
                )
                yield from _card(entry, found)
    yield "## How verdicts are computed\n"
    yield markdown_table(["verdict", "rule"], [[f"**{k}**", v] for k, v in MEANING.items()])
    yield "".join(f"- {rule}\n" for rule in RULES)
    yield f"The runs shown took {minutes:.0f} minutes in all, one after the other.\n"


def _card(entry: Entry, found: Found) -> Iterator[str]:
    """Yield what the index says of an entry."""
    headline = entry.figures[0]
    value = f"{headline.words}: {_with_interval(headline.metric, found)}"
    if headline.paper is not None:
        value += f"; the paper {number(headline.paper)}"
    shows = f"{', '.join(entry.shows)}. " if entry.shows else ""
    alt = f"Thumbnail of the first picture of {entry.title}"
    yield f"### [{entry.title}]({entry.name}.md)\n"
    figures = found.runs[found.first]["figures"]
    [first] = [one for one in figures if one["file"] == f"{entry.pictures[0]}.png"]
    yield f"[![{alt}](thumbnails/{entry.name}.png{_ending(first)})]({entry.name}.md)\n"
    yield f"**{markdown_text(finding(entry, found))}**\n"
    yield (
        f"{shows}Verdict: {_verdict(entry, found)}. Headline: {markdown_text(value)}. "
        f"{_source(entry)}\n"
    )


def _source(entry: Entry) -> str:
    """Return links to the study's program and to its texts."""
    code = find(entry.experiment).code.__name__.rpartition(".")[2]
    files = f"{code}.py", f"{entry.experiment.replace('-', '_')}.toml"
    return f"Source: {', '.join(f'[{name}]({STUDIES}/{name})' for name in files)}."


def _page(entry: Entry, results: Mapping[str, Any]) -> Iterator[str]:
    found = Found(entry, results)
    first = found.runs[found.first]
    yield f"# {entry.title}\n"
    found_first = finding(entry, found)
    if found_first:
        yield f"**{markdown_text(found_first)}**\n"
    yield (
        f"{', '.join(entry.shows) or 'Not in the papers'}. Verdict: {_verdict(entry, found)} "
        f"([rules](index.md#how-verdicts-are-computed)). {_source(entry)}\n"
    )
    yield f"{' '.join(entry.about.split())}\n"
    yield f"```sh\n{_command(entry)}\n```\n"
    for figure in first["figures"]:
        name, _, ending = figure["file"].rpartition(".")
        if name in entry.pictures and ending == "png":
            alt = markdown_text(figure.get("alt") or figure["title"]).translate(_BRACKETS)
            yield f"![{alt}]({entry.name}-{name}.png{_ending(figure)})\n"
            yield f"*{markdown_text(figure['caption'])}*\n"
    yield "## Judgement\n"
    yield f"{markdown_text(judgement(entry, found))}\n"
    if entry.rivals:
        yield "## Beside other methods\n"
        for rivals in entry.rivals:
            yield from against(rivals, found)
        yield f"{' '.join(entry.tuning.split())}\n"
    yield "## Beside the paper\n" if entry.shows else "## Figures\n"
    yield _figures(entry, found)
    yield from _claims(entry, found)
    if entry.stand_in:
        yield "## On the paper's data\n"
        yield f"The paper has {entry.stand_in}. This makes it comparable:\n"
    elif entry.data:
        yield "## On your data\n"
    if entry.data:
        yield "```sh\n{}\n```\n".format("\n".join(entry.data))
    for table in entry.paper_tables:
        yield f"## {table['title']}\n"
        yield markdown_table(table["columns"], table["rows"])
    yield "## Tables\n"
    for run, one in found.runs.items():
        for table in one["tables"]:
            yield f"**{markdown_text(table['title'])}** ({_run_words(run, one, len(found.runs))})\n"
            yield markdown_table(table["columns"], table["rows"])
            yield f"{markdown_text(table['caption'])}\n"
    yield "## Notes\n"
    yield from (f"- {markdown_text(note)}" for note in first["notes"])
    measured = [one["data"] for one in found.runs.values() if "data" in one]
    for file, checksum in {one["file"]: one["sha256"] for one in measured}.items():
        yield (
            f"- Measured on `{file}`, SHA-256 `{checksum}`; `flwr-perdl fetch` without a name "
            "lists where it can be had."
        )
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    yield f"- {versions}.\n"
    yield "## All metrics\n"
    for run, one in found.runs.items():
        seconds = one["seconds"]
        yield (
            f"**{run}**: {_options(one['options']) or 'the defaults'}; seeds "
            f"{', '.join(map(str, one['seeds']))}; {number(seconds['median'])} s "
            f"({number(seconds['low'])} to {number(seconds['high'])}); {one['rounds']} rounds, "
            f"{number(one['floats_up'])} floats up and {number(one['floats_down'])} down per "
            "client.\n"
        )
        yield markdown_table(
            ["metric", "median", "low", "high"],
            [
                [f"`{n}`", *(number(found.get(f"{run}:{n}", k)) for k in ("median", "low", "high"))]
                for n in one["metrics"]
            ],
        )


def _ending(figure: Mapping[str, str]) -> str:
    """Return what tells the site that a picture is a chart, whose colors a dark page inverts."""
    stem = figure["file"].rpartition(".")[0]
    chart = figure.get("kind", "picture" if stem in _PICTURES else "chart") == "chart"
    return "#chart" if chart else ""


def _figures(entry: Entry, found: Found) -> str:
    """Return the table of figures, beside the paper's where there is one."""
    rows = []
    for figure in entry.figures:
        low, high = map(number, found.interval(figure.metric))
        span = f"{low} to {high}" if entry.repeats > 1 else ""
        rows.append([figure.words, number(found.get(figure.metric)), span])
    few = entry.repeats <= 5  # then the interval is the range, see `bootstrap`
    columns = ["", "here, median", f"range of {entry.repeats}" if few else f"{LEVEL:.0%} interval"]
    if not entry.shows:
        return markdown_table(columns, rows)
    for row, figure in zip(rows, entry.figures, strict=True):
        judged = verdict_of(figure, entry, found)
        if judged and not figure.counts and not entry.stand_in:
            judged += " (does not count)"
        known = "curve only" if figure.source else ""
        row.insert(1, known if figure.paper is None else number(figure.paper))
        row += [judged, figure.source]
    return markdown_table(["", "paper", *columns[1:], "verdict", "where in the paper"], rows)


def _claims(entry: Entry, found: Found) -> Iterator[str]:
    """Yield the table of the paper's claims, if it makes any."""
    rows = []
    for claim in (claim for claim in entry.claims if claim.source):
        pairs = [(found.get(left), claim.factor * found.get(right)) for left, right in claim.less]
        words = [f"{number(left)} < {number(right)}" for left, right in pairs]
        said = ", ".join(words)
        if len(words) > MANY:
            closest = max(range(len(pairs)), key=lambda i: pairs[i][0] - pairs[i][1])
            said = f"{len(words)} times less, the closest: {words[closest]}"
        rows.append([claim.source, said, "holds" if holds(claim, found) else "does not hold"])
    if rows:
        yield markdown_table(["the paper's claim", "asked of our medians", ""], rows)


def _verdict(entry: Entry, found: Found) -> str:
    said = f"**{verdict(entry, found)}**"
    return f"{said}; a baseline does better" if beaten_by_rivals(entry, found) else said


def _with_interval(metric: str, found: Found) -> str:
    low, high = map(number, found.interval(metric))
    return f"{number(found.get(metric))} ({low} to {high})"


def _command(entry: Entry) -> str:
    """Return the commands of the first seed's runs, and that of all."""
    folder = " DATA=FOLDER" if entry.files else ""
    lines = [f"make gallery ARGS={entry.name}{folder}   # all runs of this page; or one of them:"]
    for run, options in entry.runs.items():
        seed = entry.seeds(run)[0]
        out = entry.folder(run, seed).relative_to(ROOT)
        name = entry.data_of(run)
        given = f" --data FOLDER/{name}" if name else ""
        named = _options({n: v for n, v in options.items() if n != "data"})
        given += f" {named}" if named else ""
        lines.append(f"flwr-perdl run {entry.experiment} --seed {seed} --out {out}{given}")
    return "\n".join(lines)


def _options(options: Mapping[str, Any]) -> str:
    return " ".join(f"-o {name}={value}" for name, value in options.items())


def _run_words(run: str, one: Mapping[str, Any], runs: int) -> str:
    seed = f"seed {one['seeds'][0]}"
    return seed if runs == 1 else f"{run}, {seed}"


def main(arguments: Sequence[str]) -> int:
    """Run the gallery; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="entries; by default all")
    parser.add_argument("--small", action="store_true", help="only the quick ones")
    parser.add_argument("--pages", action="store_true", help="only make the pages again")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with the papers' data")
    given = parser.parse_args(arguments)
    known = {entry.name: entry for entry in entries()}
    if given.data is not None and not given.data.is_dir():
        parser.error(f"--data must be a folder, got {str(given.data)!r}.")
    unknown = sorted(set(given.names) - set(known))
    if unknown:
        parser.error(f"NAME must be of {', '.join(known)}, got {', '.join(unknown)}.")
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    chosen = [known[name] for name in given.names or known]
    chosen = [entry for entry in chosen if entry.small or not given.small]
    good = given.pages or run_all(chosen, results, given.data)
    write_pages(results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
