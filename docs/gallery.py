"""Make the papers' figures and tables of results again, and judge them: ``make gallery``.

``python docs/gallery.py [NAME…]`` does all entries of ``gallery/entries.toml``, or those named;
``--small`` the quick ones; ``--pages`` only makes the pages again; ``--check`` runs one seed of
each and says which stored numbers have moved (``make gallery-check``). Every run of an entry is
repeated with five seeds or as many as the entry says (where an experiment runs many seeds, with as
many batches of them) in its own folder under ``runs/gallery``; what the same code has finished is
not run again, what was interrupted goes on. ``--more`` runs only the seeds that are not stored yet,
where an entry's option ``seeds`` was raised. Runs have one thread each and the kernels `KERNELS`,
so that a processor's own don't change the third digit of what hangs on a choice.

An entry that needs a file of the papers' data is run only with ``--data FOLDER`` (``make gallery
DATA=FOLDER``), the folder of these files; ``flwr-perdl fetch`` builds them. Without
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
import shutil
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from hashlib import file_digest, sha256
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure as Drawing
from numpy.typing import NDArray
from PIL import Image, ImageOps
from scipy.stats import t as student_t

from perdl_experiments import run_experiment
from perdl_experiments.data import digest
from perdl_experiments.fetch import PAPERS
from perdl_experiments.outcome import CHART, DPI, vector
from perdl_experiments.pictures import heat_map, intervals
from perdl_experiments.render import (
    FEWEST,
    LEVEL,
    SHARE,
    bootstrap,
    claim_holds,
    fill,
    markdown_table,
    markdown_text,
    number,
)
from perdl_experiments.studies import configure, find
from perdl_experiments.words import data_size, megabytes, plural

ROOT = Path(__file__).resolve().parent.parent
README, PAGES = ROOT / "README.md", ROOT / "docs" / "gallery"
ENTRIES, RESULTS = PAGES / "entries.toml", PAGES / "results.json"
THUMBNAILS = PAGES / "thumbnails"
RUNS = ROOT / "runs" / "gallery"
STUDIES = "../../perdl_experiments/studies"  # from a page
STUDIES_AT = ROOT / "perdl_experiments" / "studies"

REPEATS, PROCESSES, KERNEL = 5, 2, "Haswell"
#: With these OpenBLAS and PyTorch (oneDNN, its own, MKL) take their kernels for AVX2.
KERNELS = {
    "OPENBLAS_CORETYPE": KERNEL,
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
}
MOVED, TINY = 1e-6, 1e-12  # of its size, and rounding of a zero: what a stored number may move
TABLE = "methods"  # the picture that is drawn of the table of methods
BETTER, REPRODUCED, NOT_REPRODUCED, NOT_COMPARABLE = (
    "better than the paper",
    "reproduced",
    "not reproduced",
    "not comparable",
)
YES, NO, UNDECIDED, CONFIRMED = "yes", "no", "undecided", "confirmed"
#: The rules, as the index page shows them.
MEANING = {
    BETTER: "Even our worst run beats the paper's number by more than the tolerance.",
    REPRODUCED: "Our median is as good as the paper's number, within the tolerance; where the "
    "paper has no number, each of its claims is true of our medians.",
    NOT_REPRODUCED: "Neither.",
    NOT_COMPARABLE: "The paper doesn't say enough to run the same experiment.",
    YES: "A question of our own: the intervals of all paired differences exclude 0, or the margin "
    "that it names. Positive is better; errors are in percent.",
    NO: "Another is better: we lose.",
    UNDECIDED: "An interval includes 0, or there are fewer than five seeds.",
}
RULES = (
    "The tolerance is 5 % of the paper's number, unless [entries.toml](entries.toml) has another. "
    f"A claim compares medians, which must differ by more than {100 * SHARE:g} %.",
    "Numbers are medians over seeds, or means where a page says so, with the "
    f"{100 * LEVEL:g} % bootstrap interval of the same statistic; for five seeds or fewer, with "
    "the range. Where a page says so, clients are resampled. "
    "Pictures are of the first run. In bold: what a page is about.",
)
RULES_AT = "index.md#how-verdicts-are-computed"
LARGE, WIDTH = 30_000, 960  # bytes of a picture; pixels to which a larger one is brought
THUMBNAIL, ROWS = (504, 378), 6  # pixels, and rows of a table in one
LONG_ALT = 30  # words of an alternative text at most; a longer one lists the points of many lines
FLOATS = "floats_"  # metrics that count float64 values: pages have MB
_KEPT = 6  # significant digits
_BRACKETS = str.maketrans("[]", "()")  # in alt text


# The entries ---------------------------------------------------------------------------------


class Figure(NamedTuple):
    """A row of the numbers; see ``entries.toml`` for the fields of these five."""

    metric: str
    words: str
    paper: float | None = None
    better: str = ""
    tolerance: float = 0.05
    counts: bool = True


class Claim(NamedTuple):
    """What a paper claims."""

    less: Sequence[Sequence[str | float]]
    holds: str
    fails: str
    source: str
    factor: float = 1.0


class Question(NamedTuple):
    """A question of our own, which a difference answers."""

    asks: str
    ours: str
    better: str
    rivals: Mapping[str, str | float]
    margin: float = 0.0
    interval: Sequence[str] = ()
    over: str = "seeds"
    says: str = ""


class Column(NamedTuple):
    """A column of the table of methods."""

    words: str
    metric: str
    better: str
    of: Mapping[str, str] = {}


class Entry(NamedTuple):
    """A section of a page."""

    name: str
    title: str
    experiment: str
    finding: str
    about: str
    pictures: Sequence[str]
    runs: Mapping[str, Mapping[str, Any]]
    limits: Sequence[str]
    tuning: str = ""
    paper: str = ""
    shows: Sequence[str] = ()
    incomparable: str = ""
    data: Sequence[str] = ()
    small: bool = False
    needs: str = ""
    extras: str = "experiments"
    repeats: int = REPEATS
    figures: Sequence[Figure] = ()
    claims: Sequence[Claim] = ()
    questions: Sequence[Question] = ()
    columns: Sequence[Column] = ()
    names: Mapping[str, str] = {}
    ours: Sequence[str] = ()
    rows: str = "method"
    drawn: Mapping[str, Any] = {}
    charted: Literal["", "heat", "dots"] = ""

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
    def statistic(self) -> Callable[..., Any]:
        """The mean if its metrics are that of one run's seeds, else the median."""
        rules = find(self.experiment).page["metrics"].values()
        named = {rule.get("statistic") for rule in rules if "by_seed" in rule}
        return np.mean if self.repeats == 1 and named == {"mean"} else np.median

    @property
    def files(self) -> list[str]:
        """The names of all files that its runs need."""
        return sorted({name for run in self.runs if (name := self.data_of(run))})

    def folder(self, run: str, seed: int) -> Path:
        """Return where the run of a seed goes."""
        return RUNS / self.name / run / f"seed-{seed}"


def entries() -> list[Entry]:
    """Return what the gallery shows."""
    kinds = {"figures": Figure, "claims": Claim, "questions": Question, "columns": Column}
    return [
        Entry(**{k: [kinds[k](**one) for one in v] if k in kinds else v for k, v in entry.items()})
        for entry in tomllib.loads(ENTRIES.read_text())["entries"]
    ]


class Page(NamedTuple):
    """A page of the gallery: one or more entries that answer one question."""

    name: str
    title: str
    question: str
    sentence: str
    entries: tuple[str, ...]


def listed() -> list[Page]:
    """Return the pages, in the order of the index."""
    found = tomllib.loads(ENTRIES.read_text())["pages"]
    return [Page(**page | {"entries": tuple(page["entries"])}) for page in found]


class Row(NamedTuple):
    """A row of README's table; see ``entries.toml``."""

    task: str
    who: str
    entry: str
    ours: str
    by: str
    local: str
    one: str
    tuned: str = ""
    question: int = 0
    cost: str = ""


def papers() -> dict[str, dict[str, str]]:
    """Return the papers' short names and links."""
    found: dict[str, dict[str, str]] = tomllib.loads(ENTRIES.read_text())["papers"]
    return found


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
        if self.made_by().get("code") != fingerprint(self.entry):
            return False
        return _without_folder(json.loads(begun.read_text())) == _without_folder(self.config)

    def made_by(self) -> dict[str, str]:
        """Return the study's hash, the commit and the kernel that its results were made by."""
        file = self.folder / "made_by.json"
        found: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
        return found

    def work(self) -> float:
        """Run it, or go on with it; return the seconds."""
        code, commit, made_by = fingerprint(self.entry), _commit(), self.made_by()
        begun = self.folder / "run.json"
        found = json.loads(begun.read_text()) if begun.is_file() else {}
        same = (made_by.get("code", code), made_by.get("commit", commit)) == (code, commit)
        same &= _without_folder(found) == _without_folder(self.config)
        started = time.perf_counter()
        run_experiment(
            self.entry.experiment,
            seed=self.seed,
            options=self.options,
            out=self.folder,
            resume=same,
            overwrite=not same,
        )
        kernel = os.environ.get("OPENBLAS_CORETYPE", "the processor's own")
        made_by = {"code": code, "commit": commit, "kernel": kernel}
        (self.folder / "made_by.json").write_text(json.dumps(made_by))
        return time.perf_counter() - started

    def moved(self, results: Mapping[str, Any]) -> list[str]:
        """Run its seed; return which stored metrics differ by more than `MOVED`.

        Of one run of many seeds, which keeps each seed's values, the first seed is run.
        """
        stored = results.get(self.entry.name, {}).get(self.run, {})
        if stored.get("options") != self.entry.runs[self.run] or self.seed not in stored["seeds"]:
            return ["not stored with these options"]
        n_seeds = len(stored["seeds"])
        every = configure(find(self.entry.experiment), options=self.options).seeds
        many = n_seeds == 1 < every and any(
            len(one["values"]) == every for one in stored["metrics"].values()
        )
        options = {**self.options, **({"seeds": 1} if many else {})}
        ran = run_experiment(self.entry.experiment, seed=self.seed, options=options)
        found = ran["metrics"] | _points(self.entry, ran["curves"])
        return [
            f"{name} {one['values'][0]} is {found.get(name)}"
            for name, one in stored["metrics"].items()
            if len(one["values"]) == (every if many else n_seeds)
            and "seconds" not in name
            and not (name in found and _same(name, found[name], one["values"][0]))
        ]

    def more(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Run the seeds that are not stored; return what is stored, with theirs added.

        The stored ones stay if the first of them, run again, comes out as stored. A run that has
        all of its seeds, beside one that gets more, is only checked in this way.
        """
        stored, options = results[self.entry.name][self.run], self.entry.runs[self.run]
        n_stored = stored["options"].get("seeds", 1)
        n_more = options.get("seeds", 1) - n_stored
        if n_more < 0 or options | {"seeds": n_stored} != stored["options"] | {"seeds": n_stored}:
            raise ValueError("its option seeds must be as stored or greater, all others the same.")
        if "clients" in stored:
            raise ValueError("its questions must compare over seeds.")
        if moved := self._of(stored["options"], self.seed).moved(results):
            raise ValueError(f"its first seed must come out as stored: {', '.join(moved[:3])}.")
        if not n_more:
            return stored | {"code": fingerprint(self.entry), "commit": _commit()}
        rest = self._of({**options, "seeds": n_more}, self.seed + n_stored)
        if not rest.done():
            rest.work()
        same = {name: stored[name] for name in ("seeds", "figures")}  # captions are the first's
        found = _summary([rest]) | same | {"options": dict(options)}
        return found | _joined(stored, found, self.entry.statistic)

    def _of(self, options: Mapping[str, Any], seed: int) -> Job:
        """Return the job with other options and another seed."""
        return self._replace(entry=self.entry._replace(runs={self.run: options}), seed=seed)


def _same(name: str, found: float, stored: float | None) -> bool:
    """Return whether a number within `MOVED` of the one found is stored as that."""
    kept = spread(name, [found])["values"][0]
    if stored is None or kept is None:
        return stored is kept
    low, high = sorted(float(f"{found * (1 + way):.{_KEPT}g}") for way in (-MOVED, MOVED))
    return low <= stored <= high or abs(found - stored) < TINY


def _commit() -> str:
    """Return the last commit of the code that results are made by; a plus: changed since."""
    code = ("--", "perdl_experiments", "flwr_perdl")
    last = ("git", "log", "-1", "--format=%h", "--abbrev=10", *code)
    name = subprocess.run(last, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    changed = subprocess.run(("git", "diff", "--quiet", "HEAD", *code), cwd=ROOT).returncode
    return name + "+" * bool(changed)


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
    now, missing = _commit(), list[Job]()
    for entry in {job.entry.name: job.entry for job in jobs}.values():
        its = [job for job in jobs if job.entry is entry]
        if not _complete(its):
            missing += [job for job in its if not job.done() or job.made_by()["commit"] != now]
    missing.sort(key=lambda job: -_seconds(results, job))
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} of them finished before", flush=True)
    good = True
    for name in {job.entry.name for job in jobs}:
        _collect([job for job in jobs if job.entry.name == name], results)
    with _processes() as pool:
        waiting = {pool.submit(Job.work, job): job for job in missing}
        for passed, job, ended in _as_they_end(waiting):
            what = f"{job.entry.name}, {job.run}, seed {job.seed}"
            error = ended.exception()
            good &= error is None
            said = f"{ended.result():.0f} s" if error is None else f"failed: {error}"
            print(f"{passed} {what}: {said}", flush=True)
            _collect([one for one in jobs if one.entry is job.entry], results)
            with suppress(KeyError):  # an entry asks for numbers that its next runs have
                write_pages(results)
    write_pages(results)
    return good


def check(
    chosen: Sequence[Entry],
    results: dict[str, Any],
    data: Path | None = None,
    *,
    restamp: bool = False,
) -> bool:
    """Run one seed of every run; print which entries are stale; return whether none is.

    With ``restamp`` an entry of which nothing has moved gets the hash of the study as it stands.
    """
    jobs = [job for job in runnable(chosen, data) if job.seed == job.entry.seeds(job.run)[0]]
    jobs.sort(key=lambda job: -_seconds(results, job))
    stale = set[str]()
    with _processes() as pool:
        waiting = {pool.submit(Job.moved, job, results): job for job in jobs}
        for passed, job, ended in _as_they_end(waiting):
            error = ended.exception()
            moved = ended.result() if error is None else [f"failed: {error}"]
            stale |= {job.entry.name} if moved else set()
            said = ", ".join(moved[:3]) + f" and {len(moved) - 3} more" * (len(moved) > 3)
            print(f"{passed} {job.entry.name}, {job.run}: {said or 'as stored'}", flush=True)
    for entry in chosen:
        runs = {job.run for job in jobs if job.entry.name == entry.name}
        if entry.name in stale:
            print(f"{entry.name} is stale: make gallery ARGS={entry.name}")
        elif restamp and runs == entry.runs.keys():
            for one in results[entry.name].values():
                one["code"] = fingerprint(entry)
    if restamp:
        _store(results)
    return not stale


def grow(chosen: Sequence[Entry], results: dict[str, Any], data: Path | None = None) -> bool:
    """Run the seeds of entries that are not stored yet; return whether all went well."""
    jobs = sorted(runnable(chosen, data), key=lambda job: -_seconds(results, job))
    found = dict[str, dict[str, Any]]()
    with _processes() as pool:
        waiting = {pool.submit(Job.more, job, results): job for job in jobs}
        for passed, job, ended in _as_they_end(waiting):
            error = ended.exception()
            said = f"failed: {error}" if error else "its seeds are added"
            print(f"{passed} {job.entry.name}, {job.run}: {said}", flush=True)
            its = found.setdefault(job.entry.name, {})
            its |= {} if error else {job.run: ended.result()}
            if its.keys() == job.entry.runs.keys():
                results[job.entry.name] = its
                _store(results)
    return all(found.get(entry.name, {}).keys() == entry.runs.keys() for entry in chosen)


def _as_they_end(waiting: Mapping[Future[Any], Job]) -> Iterator[tuple[str, Job, Future[Any]]]:
    """Yield jobs as they end, and before each how many have, and after how many minutes."""
    started = time.perf_counter()
    for n, ended in enumerate(as_completed(waiting), 1):
        minutes = (time.perf_counter() - started) / 60
        yield f"[{n}/{len(waiting)}, {minutes:.1f} min]", waiting[ended], ended


def _processes() -> ProcessPoolExecutor:
    """Return processes for runs, with the kernels `KERNELS` and a thread each."""
    os.environ |= KERNELS  # read when a process starts: not by this one
    os.environ["OMP_NUM_THREADS"] = "1"  # the others have the other cores
    return ProcessPoolExecutor(PROCESSES, get_context("spawn"), quiet)


def quiet() -> None:
    """Keep Flower's rounds out of the progress."""
    logging.getLogger("flwr").setLevel(logging.WARNING)


def _seconds(results: Mapping[str, Any], job: Job) -> float:
    """Return how long a run took last time; what is not known comes first."""
    before = results.get(job.entry.name, {}).get(job.run)
    return float(before["seconds"]["median"]) if before else float("inf")


def _complete(jobs: Sequence[Job]) -> bool:
    """Return whether all of an entry's runs have ended, and are of one commit."""
    return all(job.done() for job in jobs) and len({job.made_by()["commit"] for job in jobs}) == 1


def _collect(jobs: Sequence[Job], results: dict[str, Any]) -> None:
    """Bring an entry's runs, once all have ended, into the results file and the pictures."""
    if not _complete(jobs):
        return
    entry, stored = jobs[0].entry, results.get(jobs[0].entry.name, {})
    made = {run: _summary([j for j in jobs if j.run == run]) for run in {j.run for j in jobs}}
    results[entry.name] = {run: (stored | made)[run] for run in entry.runs if run in stored | made}
    _store(results)
    if next(iter(entry.runs)) in made and not entry.drawn:
        _keep_pictures(jobs[0])


def _keep_pictures(job: Job) -> None:
    """Bring the pictures of an entry's first run among the pages: charts as SVG."""
    for figure in json.loads((job.folder / "results.json").read_text())["figures"]:
        file = Path(figure["file"])
        if file.stem in job.entry.pictures and figure["kind"] == CHART:
            shutil.copyfile(
                job.folder / file.with_suffix(".svg"), _picture(job.entry, file.stem, ".svg")
            )
            _picture(job.entry, file.stem, ".png").unlink(missing_ok=True)
            if file.stem == job.entry.pictures[0]:
                _thumbnail(job.entry, job.folder / file)
        elif file.stem in job.entry.pictures:
            _shrink(job.folder / file, _picture(job.entry, file.stem, ".png"))


def _picture(entry: Entry, name: str, suffix: str) -> Path:
    """Return where a picture lies among the pages."""
    return PAGES / f"{entry.name}-{name}{suffix}"


def redraw(chosen: Sequence[Entry], results: dict[str, Any], data: Path | None) -> None:
    """Draw the pictures anew, by the first seed of each first run; all numbers stay.

    An entry whose pictures show numbers has options to draw all seeds at once.
    """
    for entry in chosen:
        run = next(iter(entry.runs))
        job = Job(entry, run, entry.seeds(run)[0], data)
        if entry.drawn:
            options = {"pictures": {**entry.runs[run], **entry.drawn}}
            job = Job(entry._replace(runs=options), "pictures", 0, data)
        if not job.ready:
            print(f"{entry.name}: the stored pictures stay, as it needs DATA/{entry.data_of(run)}")
            continue
        with _processes() as pool:
            took = 0.0 if job.done() else pool.submit(Job.work, job).result()
        _keep_pictures(job)
        said = json.loads((job.folder / "results.json").read_text())
        results[entry.name][run] |= {"figures": said["figures"]}
        _store(results)
        print(f"{entry.name}: {took:.0f} s", flush=True)


def _store(results: Mapping[str, Any]) -> None:
    """Write the results file, in the order of the entries."""
    ordered = {one.name: results[one.name] for one in entries() if one.name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def fingerprint(entry: Entry) -> str:
    """Return the SHA-256 of the study's own file, without its comments and docstrings."""
    name = find(entry.experiment).code.__name__.rpartition(".")[2]
    tree = ast.parse((STUDIES_AT / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return sha256(ast.unparse(tree).encode()).hexdigest()


def _summary(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return what the runs of one setting came to; captions are the first's."""
    found = [json.loads((job.folder / "results.json").read_text()) for job in jobs]
    first = found[0]
    metrics = [one["metrics"] | _points(jobs[0].entry, one["curves"]) for one in found]
    by_seed = first["by_seed"] if len(found) == 1 else {}
    return {
        "options": dict(jobs[0].entry.runs[jobs[0].run]),
        **jobs[0].made_by(),
        "seeds": [job.seed for job in jobs],
        **_data(jobs[0].file),
        "versions": first["versions"],
        "seconds": spread("seconds", [one["seconds"] for one in found]),
        **{cost: first[cost] for cost in ("rounds", "floats_up", "floats_down")},
        **_of_clients(jobs[0]),
        "metrics": {
            name: spread(name, [one[name] for one in metrics], by_seed.get(name))
            for name in metrics[0]
            if all(name in one for one in metrics)
        },
        "figures": first["figures"],
    }


def _joined(
    stored: Mapping[str, Any], more: Mapping[str, Any], statistic: Callable[..., Any]
) -> dict[str, Any]:
    """Return the metrics and seconds of a stored run of many seeds with those of another."""
    metrics = {}
    for name, one in stored["metrics"].items():
        if len(one["values"]) != stored["options"]["seeds"]:
            raise ValueError(f"metrics must have each seed's value, {name} has not.")
        values = [*one["values"], *more["metrics"][name]["values"]]
        metrics[name] = spread(name, [statistic(values)], values)
    seconds = sum(one["seconds"]["median"] for one in (stored, more))
    return {"metrics": metrics, "seconds": spread("seconds", [seconds])}


def _of_clients(job: Job) -> dict[str, Any]:
    """Return each client's mean over a run's seeds, of metrics that are compared over clients."""
    asked = [one for one in job.entry.questions if one.over != "seeds"]
    named = {str(metric) for one in asked for metric in (one.ours, *one.rivals.values())}
    if not named:
        return {}
    with np.load(job.folder / "arrays.npz") as arrays:
        means = {name: arrays[name].mean(axis=0) for name in sorted(named)}
    return {"clients": {name: [_kept(one) for one in values] for name, values in means.items()}}


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
        self.runs = results[entry.name]
        self.first = next(iter(entry.runs))
        self.statistic = entry.statistic

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

    def clients(self, reference: str | float) -> list[float]:
        """Return a metric of the first run for each client."""
        values: list[float] = self.runs[self.first]["clients"][str(reference)]
        return values

    def interval(self, reference: str | float) -> tuple[float, float]:
        """Return the bootstrap interval of a metric: of its mean where that is the number."""
        values = self.values(str(reference))
        if len(values) <= FEWEST:  # of which not all may have been kept
            return self.get(reference, "low"), self.get(reference, "high")
        return bootstrap(values, self.statistic)

    def fill(self, template: str) -> str:
        """Return a sentence with its metrics filled in."""
        return fill(template, self._said)

    def _said(self, reference: str) -> float | str:
        value = self.get(reference)
        return data_size(value) if FLOATS in reference else value


def verdict_of(figure: Figure, found: Found) -> str:
    """Return a figure's verdict, empty if it is only shown."""
    if figure.paper is None or not figure.better:
        return ""
    sign = 1 if figure.better == "lower" else -1
    worst = sign * found.get(figure.metric, "high" if sign > 0 else "low")
    paper, room = sign * figure.paper, figure.tolerance * abs(figure.paper)
    if worst < paper - room:
        return BETTER
    return REPRODUCED if sign * found.get(figure.metric) <= paper + room else NOT_REPRODUCED


def holds(claim: Claim, found: Found) -> bool:
    """Return whether a claim is true of the medians."""
    return claim_holds(claim.less, found.get, claim.factor)


class Gain(NamedTuple):
    """By how much ours is better than a rival, and the p-value of a paired t-test, if any."""

    low: float
    middle: float
    high: float
    p: float | None = None
    pairs: float = np.inf


#: Answers by entry and number.
Confirmed = Set[tuple[str, int]]


class Answer(NamedTuple):
    """A question's answer, how far ours is from the best rival's, and the p-value, if any."""

    word: str
    difference: str
    interval: str
    rival: str
    p: float | None


def answer(question: Question, found: Found) -> Answer:
    """Return a question's answer: yes if the paired differences to all of its rivals say so.

    It names the rival that decides. Where a lower number is better, a difference is a share of the
    rival's. A yes is as probable by chance as its least certain difference.
    """
    margin, lower = question.margin, question.better == "lower"
    gains = {name: _gains(question, rival, found) for name, rival in question.rivals.items()}
    rival = min(gains, key=lambda name: (gains[name].low + margin >= 0, gains[name]))
    gain = gains[rival]
    word = YES if gain.low + margin > 0 else NO if gain.high + margin < 0 else UNDECIDED
    of = [one.p for one in (gains.values() if word == YES else [gain])]
    p = None if None in of else max(one for one in of if one is not None)
    if gain.pairs < REPEATS:
        word = UNDECIDED
    if lower:
        return Answer(word, _lower(gain.middle), _lower(gain.low, gain.high), rival, p)
    low, middle, high = (f"{one:+.3g}" if one else "0" for one in gain[:3])
    return Answer(word, middle, f"{low} to {high}", rival, p)


def _lower(*gains: float) -> str:
    """Return by how much an error is lower or higher, with an interval's ends in words."""
    words = {one: "lower" if one > 0 else "higher" if one < 0 else "" for one in gains}
    senses = {*words.values()} - {""}
    if len(senses) < 2:
        sizes = sorted(abs(100 * one) for one in gains)
        return " ".join([" to ".join(f"{one:.3g}" for one in sizes), "%", *(senses or ["lower"])])
    return " to ".join(f"{abs(100 * one):.3g} % {word}" for one, word in words.items())


def _gains(question: Question, rival: str | float, found: Found) -> Gain:
    """Return by how much ours is better than a rival."""
    lower = question.better == "lower"
    if question.interval:
        low, high = (found.get(metric) for metric in question.interval)
        return Gain(low, found.get(question.ours), high)
    if question.over != "seeds":

        def gain(pairs: Any, axis: int) -> Any:
            """Return by how much our mean over clients is better."""
            ours, theirs = np.moveaxis(pairs.mean(axis=axis), -1, 0)
            return 1 - ours / theirs if lower else ours - theirs

        both = np.transpose([found.clients(one) for one in (question.ours, rival)])
        low, high = bootstrap(both.tolist(), gain)
        return Gain(low, float(gain(both, 0)), high, _chance(np.diff(both)[:, 0], 0), len(both))
    pairs = found.values(question.ours), found.values(str(rival))
    gains = [_gain(ours, theirs, lower=lower) for ours, theirs in zip(*pairs, strict=True)]
    low, high = bootstrap(gains)
    p = _chance(gains, question.margin)
    return Gain(low, float(np.median(gains)), high, p, len(gains))


def _chance(gains: Sequence[float] | NDArray[Any], margin: float) -> float | None:
    """Return the p-value of a t-test of gains against a margin; None where there are too few."""
    away = np.asarray(gains) + margin
    if len(away) < REPEATS:
        return None
    if not np.isfinite(away).all():  # a method that never gets there
        return 1.0
    error = away.std(ddof=1) / np.sqrt(len(away))
    if error < TINY:  # all alike: a sign test
        return float(2.0 ** (1 - len(away))) if away.all() else 1.0
    return float(2 * student_t.sf(abs(away.mean()) / error, len(away) - 1))


def _gain(ours: float, theirs: float, *, lower: bool) -> float:
    """Return by how much ours is better; rounds may be infinite."""
    if ours == theirs:
        return 0.0
    return 1 - ours / theirs if lower else ours - theirs


def verdict(entry: Entry, found: Found) -> str:
    """Return a section's verdict: of the paper, or the answer to its first question."""
    if entry.incomparable:
        return NOT_COMPARABLE
    if not entry.shows:
        return answer(entry.questions[0], found).word
    figures = [verdict_of(figure, found) for figure in entry.figures if figure.counts]
    figures = [one for one in figures if one]
    if NOT_REPRODUCED in figures or not all(holds(claim, found) for claim in entry.claims):
        return NOT_REPRODUCED
    return BETTER if figures and set(figures) == {BETTER} else REPRODUCED


def judgement(entry: Entry, found: Found, sure: Confirmed) -> Iterator[str]:
    """Yield an item for each claim of the paper, and for each question its answer."""
    for claim in entry.claims:
        good = holds(claim, found)
        said = markdown_text(found.fill(claim.holds if good else claim.fails))
        word = REPRODUCED if good else NOT_REPRODUCED
        yield f"- **{word.capitalize()}** ({claim.source}): {said}"
    for i, question in enumerate(entry.questions):
        one = answer(question, found)
        lead = f"lead over {one.rival} {one.difference}"
        said = lead if question.interval else f"{one.difference} {_than(question)} {one.rival}"
        said += f" (interval {one.interval})."
        said = f"{said} {found.fill(question.says)}".strip()
        word = f"{one.word.capitalize()}{f', {CONFIRMED}' * ((entry.name, i) in sure)}"
        yield f"- {question.asks} **{word}**: {markdown_text(said)}"


def _than(question: Question) -> str:
    """Return the word before a rival's name."""
    return "than" if question.better == "lower" and not question.interval else "against"


def confirmed(results: Mapping[str, Any]) -> tuple[Confirmed, int]:
    """Return which answers stand Holm's correction, and of how many questions it is."""
    every = [
        (one.p, one.word, (entry.name, i))
        for entry in entries()
        if entry.name in results
        for i, question in enumerate(entry.questions)
        for one in [answer(question, Found(entry, results))]
        if one.p is not None
    ]
    found = set()
    for rank, (p, word, which) in enumerate(sorted(every)):
        if p > (1 - LEVEL) / (len(every) - rank):
            break
        if word != UNDECIDED:
            found.add(which)
    return found, len(every)


# The pages -----------------------------------------------------------------------------------


def write_pages(results: Mapping[str, Any]) -> None:
    """Write every page that the results make, and the index's thumbnails."""
    known = {entry.name: entry for entry in entries()}
    for name, text in pages(results).items():
        (PAGES / name).write_text(text)
    before, begin, rest = README.read_text().partition("<!-- begin evidence -->\n\n")
    _, end, after = rest.partition("\n<!-- end -->")
    README.write_text(before + begin + readme(results) + end + after)
    for entry in known.values():
        if entry.charted and entry.name in results:
            drawn = chart(entry, Found(entry, results))
            _picture(entry, TABLE, ".svg").write_bytes(vector(drawn))
            with BytesIO() as image:
                best = chart(entry, Found(entry, results), ROWS)
                best.savefig(image, format="png", dpi=DPI, bbox_inches="tight")
                _thumbnail(entry, image)
    for page in listed():
        entry = known[page.entries[0]]
        picture = _picture(entry, entry.pictures[0], ".png")
        if picture.is_file():
            _thumbnail(entry, picture)


def readme(results: Mapping[str, Any]) -> str:
    """Return README's table, decided rows first, and how all questions were answered."""
    known = {entry.name: entry for entry in entries()}
    made = []
    for row in tomllib.loads(ENTRIES.read_text())["readme"]:
        one = Row(**row)
        question, found = known[one.entry].questions[one.question], Found(known[one.entry], results)
        said = answer(question, found)
        figures = [one.local, one.one, one.tuned, question.rivals[said.rival], one.ours]
        *alone, theirs, ours = (number(found.get(x)) for x in figures if x)
        won = {YES: "equal" if question.margin else "win", NO: "loss"}.get(said.word, said.word)
        at = f" within {question.margin:g} {one.cost}" if won == "equal" else ""
        theirs, ours = (
            f"**{shown}**" if won == wins else shown
            for shown, wins in ((theirs, "loss"), (ours, "win"))
        )
        cells = [
            *(f"{one.task}, {one.who}", ", ".join(alone), f"{theirs} ({said.rival})"),
            *(f"{ours} ({one.by})", f"{won}{at}: {said.interval}"),
        ]
        made.append((("win", "equal", "loss", UNDECIDED).index(won), cells))
    made.sort(key=lambda one: one[0])  # rows of one verdict as they are listed
    asked = _asked((entry, Found(entry, results)) for entry in known.values())
    heads = ["task", "local, FedAvg, FedAvg-FT", "strongest other", "flwr-perdl", "verdict"]
    return (
        markdown_table(heads, [cells for _, cells in made])
        + f"\n[All {len(asked)} questions](docs/gallery/index.md): {_counts(asked)}.\n"
    )


def _asked(sections: Iterable[Section]) -> list[tuple[Question, Answer]]:
    """Return all questions of sections, with their answers."""
    return [(one, answer(one, of)) for entry, of in sections for one in entry.questions]


def _counts(asked: Sequence[tuple[Question, Answer]]) -> str:
    """Return how questions were answered; equal: a yes within a margin."""
    equal = sum(said.word == YES and question.margin > 0 for question, said in asked)
    words = [said.word for _, said in asked]
    yes, no, undecided = (f"{words.count(one)} {one}" for one in (YES, NO, UNDECIDED))
    return f"{yes} ({equal} of them equal), {no}, {undecided}"


def _thumbnail(entry: Entry, source: Path | BytesIO) -> None:
    """Write a card's picture: the entry's; of a tall one the top, cut where a row is blank."""
    for page in listed():
        if page.entries[0] == entry.name:
            with Image.open(source) as picture:
                whole = picture.convert("RGB")
            width, height = whole.size
            if height > width:
                height = width * THUMBNAIL[1] // THUMBNAIL[0]
                rows = np.asarray(whole)[height // 2 : height] == 255
                blank = np.flatnonzero(rows.all(axis=(1, 2)))
                height = height // 2 + int(blank[-1]) if blank.size else height
            shown = ImageOps.pad(whole.crop((0, 0, width, height)), THUMBNAIL, color="white")
            shown.quantize(64).save(THUMBNAILS / f"{page.name}.png", optimize=True)


def pages(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the pages' text by file name."""
    known = {entry.name: entry for entry in entries()}
    found: dict[Page, list[tuple[Entry, Found]]] = {}
    for page in listed():
        there = [known[name] for name in page.entries if name in results]
        if there:
            found[page] = [(entry, Found(entry, results)) for entry in there]
    sure = confirmed(results)
    made = {f"{page.name}.md": "\n".join(_page(page, one, sure[0])) for page, one in found.items()}
    whole = {"index.md": _index(found, *sure), "papers.md": _papers(found)}
    return {name: "\n".join(lines) for name, lines in whole.items()} | made


Section = tuple[Entry, "Found"]


def _index(
    found: Mapping[Page, Sequence[Section]], sure: Confirmed, n_tested: int
) -> Iterator[str]:
    every = [section for sections in found.values() for section in sections]
    verdicts = [verdict(*section) for section in every if section[0].shows]
    counts = {one: verdicts.count(one) for one in MEANING if one in verdicts}
    papers_ = ", ".join(f"{n} {one}" for one, n in counts.items())
    asked = _asked(every)
    judged = sum(said.word != UNDECIDED and said.p is not None for _, said in asked)
    yield "# Gallery\n"
    yield f"**[Experiments of the papers](papers.md): {papers_}."
    yield f"Our own {len(asked)} questions: {_counts(asked)}.**\n"
    question = ""
    for page, sections in found.items():
        if page.question != question:
            yield from ["</div>\n"] if question else []
            question = page.question
            yield f'## {question}\n\n<div class="grid cards" markdown>\n'
        yield from _card(page, sections)
    yield "</div>\n"
    yield "## Run it\n"
    yield "```sh\nmake gallery                  # all, resumable: runs/gallery"
    yield "make gallery DATA=FOLDER      # with the papers' data: papers.md#data"
    yield "make gallery ARGS=--small     # the quick ones"
    yield "make gallery ARGS=synthetic   # by page\n```\n"
    runs = [one for _, of in every for one in of.runs.values()]
    kernels = ", ".join(f"`{one}`" for one in sorted({run["kernel"] for run in runs}))
    minutes = _minutes(of for _, of in every)
    yield f"All runs took {plural(minutes, 'minute')} with OpenBLAS's kernel {kernels} "
    yield "(`OPENBLAS_CORETYPE`); another kernel may change the third digit of close choices. "
    yield "[results.json](results.json) has every metric and each commit.\n"
    yield "## How verdicts are computed\n"
    yield markdown_table(["verdict", "rule"], [[f"**{k}**", v] for k, v in MEANING.items()])
    holm = (
        f"**Confirmed**: paired t-tests of the {n_tested} questions with at least five pairs, with "
        f"Holm's correction, stand by {len(sure)} of {judged} yes or no."
    )
    yield "".join(f"- {rule}\n" for rule in (holm, *RULES))


def _card(page: Page, sections: Sequence[Section]) -> Iterator[str]:
    """Yield what the index says of a page: a picture and a sentence."""
    entry, found = sections[0]
    kinds = {Path(one["file"]).stem: one["kind"] for one in _shown(entry, found)}
    chart = "#chart" if kinds[entry.pictures[0]] == CHART else ""
    yield f"- [![{page.title}](thumbnails/{page.name}.png{chart})]({page.name}.md)\n"
    word, _, than = _verdict(entry, found, against=True).partition(" (")
    badge = f'<mark class="{word.lower().replace(" ", "-")}">{word}</mark>'
    said = f"{badge} {than.removesuffix(')')}".rstrip() + f"<br>{markdown_text(page.sentence)}"
    yield f"    **[{page.title}]({page.name}.md)**<br>{said}\n"


def _page(page: Page, sections: Sequence[Section], sure: Confirmed) -> Iterator[str]:
    yield f"# {page.title}\n"
    captions: set[str] = set()
    for entry, found in sections:
        if entry.name != page.entries[0]:
            yield f"## {entry.title}\n"
        yield from _section(entry, found, captions, sure)
    yield "## How to run\n"
    yield f"```sh\n{_commands(page, sections)}\n```\n"
    code = ", ".join(_once(_source(entry) for entry, _ in sections))
    yield f"Code: {code}. [How verdicts are computed]({RULES_AT}).\n"
    yield "## Limitations\n"
    yield from _once(f"- {markdown_text(f.fill(one))}" for e, f in sections for one in e.limits)
    runs = [one for _, found in sections for one in found.runs.values() if "data" in one]
    for one in _once(json.dumps(run["data"]) for run in runs):
        yield _measured_on(**json.loads(one))
    versions = (found.runs[found.first]["versions"] for _, found in sections)
    yield from _once(f"- {', '.join(f'{n} {v}' for n, v in one.items())}." for one in versions)
    yield ""


def _measured_on(file: str, sha256: str) -> str:
    """Return an item about a data file: how it is made, and how that differs from this one."""
    name = file.removesuffix(".npz")
    differs = PAPERS[name].get("differs")
    built = f"; `flwr-perdl fetch {name}`: {differs}" if differs else ""
    return f"- [`{file}`](papers.md#data), SHA-256 `{sha256}`{built}."


def _papers(found: Mapping[Page, Sequence[Section]]) -> Iterator[str]:
    """Yield the page of all figures and tables of the papers, and of the data files."""
    yield "# The papers\n"
    yield "**Every figure and table of results of the four papers, with one command each.**\n"
    rows = [
        [
            f"[{papers()[entry.paper]['name']}]({papers()[entry.paper]['link']})",
            f"[{', '.join(entry.shows)}]({page.name}.md)",
            verdict(entry, of).capitalize(),
            f"`make gallery ARGS={entry.name}{' DATA=FOLDER' if entry.files else ''}`",
            str(
                _minutes(one for _, one in sections) if entry.name == page.name else _minutes([of])
            ),
            ", ".join(f"[`{file}`](#data)" for file in entry.files) or "made by the run",
        ]
        for page, sections in found.items()
        for entry, of in sections
        if entry.shows
    ]
    order = [one["name"] for one in papers().values()]
    rows.sort(key=lambda row: (order.index(row[0][1:].partition("]")[0]), row[1]))
    heads = ["paper", "figure or table", "verdict", "command", "minutes", "data"]
    yield markdown_table(heads, rows)
    yield "Minutes: of the whole command, all seeds, once it has made its `.venv`. "
    yield f"It writes the page anew. [How verdicts are computed]({RULES_AT}).\n"
    yield "## Data\n"
    yield "No data set may be passed on here. `flwr-perdl fetch NAME` downloads the originals, or"
    yield "takes them from `--folder FOLDER`, and builds the file; `make gallery DATA=FOLDER` looks"
    yield "for it in FOLDER. The converters are tested on small files of the originals' layout, not"
    yield "on the originals.\n"
    yield markdown_table(
        ["file", "what it has", "original", "command", "against the measured file"],
        [
            [
                f"`{name}.npz`",
                said["arrays"],
                f"[{said['source']}]({said['home']})",
                f"`flwr-perdl fetch {name}`" if said["originals"] else "none",
                said.get("differs", "the same construction" if said["originals"] else "-"),
            ]
            for name, said in PAPERS.items()
        ],
    )


def _once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _section(entry: Entry, found: Found, said: set[str], sure: Confirmed) -> Iterator[str]:
    """Yield the verdict, the pictures, what was found, and the numbers."""
    asked = "" if entry.shows else f"{entry.questions[0].asks} "
    why = f" {entry.incomparable}" if entry.incomparable else ""
    yield f"{asked}**{_verdict(entry, found)}**{_of(entry)}.{why}\n"
    for figure in _shown(entry, found):
        name = Path(figure["file"]).stem
        if name in entry.pictures and not figure["file"].endswith(".gif"):
            alt = figure.get("alt") or figure["title"]
            alt = figure["title"] if len(alt.split()) > LONG_ALT else alt
            alt = markdown_text(alt).translate(_BRACKETS)
            chart = figure["kind"] == CHART
            vector = chart and _picture(entry, name, ".svg").is_file()
            file = _picture(entry, name, ".svg" if vector else ".png").name
            yield f"![{alt}]({file}{'#chart' if chart else ''})\n"
            if figure["caption"] not in said:
                yield f"*{markdown_text(figure['caption'])}*\n"
                said.add(figure["caption"])
    yield f"**{markdown_text(found.fill(entry.finding))}**\n"
    yield " ".join(entry.about.split()) + "\n"
    yield from judgement(entry, found, sure)
    yield ""
    yield from filter(None, [_methods(entry, found), _figures(entry, found)])
    yield from [" ".join(entry.tuning.split()) + "\n"] if entry.tuning else []


def _of(entry: Entry) -> str:
    """Return which part of which paper an entry is about."""
    if not entry.paper:
        return ""
    paper = papers()[entry.paper]
    return f": [{paper['name']}]({paper['link']}), {', '.join(entry.shows)}"


def _source(entry: Entry) -> str:
    """Return a link to the study's program."""
    code = find(entry.experiment).code.__name__.rpartition(".")[2]
    return f"[{code}.py]({STUDIES}/{code}.py)"


def _shown(entry: Entry, found: Found) -> list[dict[str, str]]:
    """Return the figures of a section: the table's own, then the first run's."""
    figures: list[dict[str, str]] = found.runs[found.first]["figures"]
    if not entry.charted:
        return figures
    lines = {"heat": "", "dots": "; lines: intervals"}[entry.charted]
    said = {"title": entry.title, "caption": f"Blue: this page's methods; bold: the best{lines}."}
    return [{"file": f"{TABLE}.svg", "kind": CHART, **said}, *figures]


def chart(entry: Entry, found: Found, n_rows: int | None = None) -> Drawing:
    """Draw the table of methods: a heat map, or the first column's intervals, of the best alone."""
    methods, cells = _rows(entry, found)
    higher = entry.columns[0].better == "higher"
    if entry.charted == "heat":
        columns, names = [one.words for one in entry.columns], [entry.names[one] for one in methods]
        values = [[found.get(cell) if cell else np.nan for cell in row] for row in cells]
        blue = [one in entry.ours for one in methods]
        return heat_map(np.array(values).T, columns, names, ours=blue, higher_is_better=higher)
    rows = {
        entry.names[method]: (*found.interval(first), found.get(first))
        for method, (first, *_) in zip(methods[:n_rows], cells[:n_rows], strict=True)
    }
    ours = [entry.names[one] for one in methods if one in entry.ours]
    return intervals({"": rows}, ours=ours, x=entry.columns[0].words, higher_is_better=higher)


def _rows(entry: Entry, found: Found) -> tuple[list[str], list[list[str]]]:
    """Return the methods of the table, the best by the first column first, and their metrics."""
    rows = [
        (method, cells)
        for method in entry.names
        if any(cells := [_reference(column, method, found) for column in entry.columns])
    ]
    first = 1 if entry.columns[0].better == "lower" else -1
    rows.sort(key=lambda row: first * found.get(row[1][0]) if row[1][0] else np.inf)
    return [method for method, _ in rows], [cells for _, cells in rows]


def _methods(entry: Entry, found: Found) -> str:
    """Return the table of methods, the best by the first column first."""
    if not entry.columns:
        return ""
    rows = [
        [
            f"**{entry.names[method]}**" if method in entry.ours else entry.names[method],
            *(_measured(cell, found) if cell else "" for cell in cells),
        ]
        for method, cells in zip(*_rows(entry, found), strict=True)
    ]
    senses = [f" ({column.better} is better)" for column in entry.columns]
    all_, each = (senses[0], [""] * len(senses)) if len(set(senses)) == 1 else ("", senses)
    heads = [column.words + sense for column, sense in zip(entry.columns, each, strict=True)]
    return markdown_table([f"{entry.rows}{all_}", *heads], rows)


def _reference(column: Column, method: str, found: Found) -> str:
    """Return the metric of a method in a column, "" where it has none."""
    run, _, name = method.rpartition(":")
    of, _, metric = column.of.get(method, column.metric).rpartition(":")
    metric = metric.format(name)
    return f"{run or of}:{metric}" if metric in found.metrics(run or of or found.first) else ""


def _figures(entry: Entry, found: Found) -> str:
    """Return the table of further numbers, beside the paper's where it has some."""
    if not entry.figures:
        return ""
    rows = []
    for figure in entry.figures:
        judged = verdict_of(figure, found)
        judged = f"({judged})" if judged and not figure.counts else judged
        paper = "" if figure.paper is None else number(figure.paper)
        rows.append([figure.words, _measured(figure.metric, found), paper, judged])
    if not any(row[2] for row in rows):
        return markdown_table(["", "measured"], [row[:2] for row in rows])
    return markdown_table(["", "measured", "paper", "verdict"], rows)


def _measured(metric: str, found: Found) -> str:
    """Return a metric's median, and its interval if that has any width."""
    scale = megabytes(1) if FLOATS in metric else 1
    low, high = (number(scale * end) for end in found.interval(metric))
    span = f" ({low}\N{EN DASH}{high})" if low != high else ""
    return f"{number(scale * found.get(metric))}{span}"


def _minutes(found: Iterable[Found]) -> int:
    """Return how long all runs took, one after the other."""
    seconds = [one["seconds"] for of in found for one in of.runs.values()]
    return int(np.ceil(sum(one["median"] * len(one["values"]) for one in seconds) / 60))


def _verdict(entry: Entry, found: Found, *, against: bool = False) -> str:
    """Return a section's verdict; of a question of our own with its interval, or difference."""
    if entry.shows:
        return verdict(entry, found).capitalize()
    one = answer(entry.questions[0], found)
    word = one.word.capitalize()
    if not against:
        return f"{word} ({one.interval})"
    than = f" ({one.difference} {_than(entry.questions[0])} {one.rival})"
    return f"{word}{than * (one.word != UNDECIDED)}"


def _commands(page: Page, sections: Sequence[Section]) -> str:
    """Return the commands of the page and of each of its runs."""
    folder = " DATA=FOLDER" if any(entry.files for entry, _ in sections) else ""
    extras = ",".join(_once(one for entry, _ in sections for one in entry.extras.split(",")))
    minutes = plural(_minutes(found for _, found in sections), "minute")
    lines = [
        f"make gallery ARGS={page.name}{folder}   # {minutes}, own .venv",
        f"pip install '.[{extras}]'",
    ]
    for entry, _ in sections:
        lines += [f"# {', '.join(entry.shows)}:"] * (len(sections) > 1 and bool(entry.shows))
        for run, options in entry.runs.items():
            name = entry.data_of(run)
            given = [f"--data FOLDER/{name}"] if name else []
            given += [f"-o\0{n}={value}" for n, value in options.items() if n != "data"]
            command = " ".join(["flwr-perdl run", entry.experiment, *given])
            wrapped = textwrap.wrap(command, 96, break_on_hyphens=False, break_long_words=False)
            lines.append(" \\\n    ".join(wrapped).replace("\0", " "))
    return "\n".join(_once([*lines, *(line for entry, _ in sections for line in entry.data)]))


def main(arguments: Sequence[str]) -> int:
    """Run the gallery; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="pages or entries; by default all")
    parser.add_argument("--small", action="store_true", help="only the quick ones")
    parser.add_argument("--pages", action="store_true", help="only make the pages again")
    parser.add_argument("--pictures", action="store_true", help="only draw the pictures again")
    parser.add_argument("--check", action="store_true", help="run one seed: which are stale?")
    parser.add_argument("--restamp", action="store_true", help="check; unmoved ones fit the code")
    parser.add_argument(
        "--more", action="store_true", help="run only the seeds that are not stored"
    )
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
    chosen = [known[name] for name in dict.fromkeys(names or known)]
    chosen = [entry for entry in chosen if entry.small or not given.small]
    if given.check or given.restamp:
        return 0 if check(chosen, results, given.data, restamp=given.restamp) else 1
    if given.more:
        good = grow(chosen, results, given.data)
        write_pages(results)
        return 0 if good else 1
    if given.pictures:
        redraw([entry for entry in chosen if not entry.drawn], results, given.data)
    good = given.pages or given.pictures or run_all(chosen, results, given.data)
    if not given.pages:
        redraw([entry for entry in chosen if entry.drawn], results, given.data)
    write_pages(results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
