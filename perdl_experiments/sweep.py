"""Runs beside each other: a sweep over options, or any finished runs, in one table and picture."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO, StringIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.files import replacing
from perdl_experiments.outcome import DPI
from perdl_experiments.render import PLACE, number
from perdl_experiments.report import read_results
from perdl_experiments.runner import Progress, check_run, run_experiment, run_state
from perdl_experiments.studies import EXPERIMENTS, Experiment, Value, find
from perdl_experiments.studies._experiment import check_name
from perdl_experiments.studies._parts import in_processes
from perdl_experiments.terminal import Rows, plain_logs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Values further apart than this factor have a logarithmic axis.
_WIDE = 50
_RUN = "run"


class Comparison(NamedTuple):
    """Finished runs beside each other.

    Attributes
    ----------
    names, metrics : list of str
        The options in which the runs differ, and the metrics to compare.
    runs : list of list
        Of each run the values of ``names``, then of ``metrics``; None where it has none.
    """

    names: list[str]
    metrics: list[str]
    runs: list[list[Any]]

    @property
    def table(self) -> Rows:
        """The runs as a person reads them."""
        r = len(self.names)
        rows = [
            [*map(str, run[:r]), *("-" if one is None else number(one) for one in run[r:])]
            for run in self.runs
        ]
        return Rows([*self.names, *self.metrics], rows)

    def write(self, out: Path, stem: str) -> None:
        """Write STEM.csv, STEM.json and STEM.png to a folder."""
        out.mkdir(parents=True, exist_ok=True)
        drawn, text = BytesIO(), StringIO()
        self.picture().savefig(drawn, format="png", dpi=DPI, bbox_inches="tight")
        csv.writer(text).writerows([[*self.names, *self.metrics], *self.runs])
        for end, content in (
            ("png", drawn.getvalue()),
            ("csv", text.getvalue().encode(errors="backslashreplace")),
            ("json", json.dumps(self._asdict(), indent=1).encode()),
        ):
            with replacing(out / f"{stem}.{end}") as stream:
                stream.write(content)

    def picture(self) -> Figure:
        """Draw each metric against the first option, with a line for each value of the others.

        Against the runs' folders where options do not tell the runs apart, or all lines are points.
        """
        from perdl_experiments.plots import Panel, panels  # an extra: matplotlib

        r, first = len(self.names), int(self.names[0] == _RUN)
        keys = [list(map(str, run[first:r])) for run in self.runs]
        if first and (r == 1 or len(set(map(str, keys))) < len(keys) or _apart(keys)):
            first, keys = 0, [[str(run[0])] for run in self.runs]
        ticks = list(dict.fromkeys(key[0] for key in keys))
        lines: dict[str, NDArray[Any]] = {}
        for key, run in zip(keys, self.runs, strict=True):
            others = zip(self.names[first + 1 :], key[1:], strict=False)
            label = ", ".join(f"{name}={value}" for name, value in others) or "runs"
            empty = np.full((len(self.metrics), len(ticks)), np.nan)
            lines.setdefault(label, empty)[:, ticks.index(key[0])] = run[r:]
        at, drawings = list(range(len(ticks))), []
        for i, metric in enumerate(self.metrics):
            every = np.concatenate([line[i] for line in lines.values()])
            linear = not 0 < _WIDE * np.nanmin(every) < np.nanmax(every)
            shown = {label: line[i] for label, line in lines.items()}
            drawings.append(Panel(self.names[first], metric, at, shown, linear=linear))
        drawn = panels(drawings)
        turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if max(map(len, ticks)) > 8 else {}
        for axes in drawn.axes:
            axes.set_xticks(at, ticks, **turned)
        return drawn


def run_sweep(
    name: str,
    options: Sequence[tuple[str, str]],
    *,
    out: Path,
    metrics: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
    **given: Any,
) -> tuple[Comparison, dict[Path, str]]:
    """Run an experiment with every combination of options, each in a folder of its own in ``out``.

    Runs are in process, on as many cores as there are, with one thread each.

    Parameters
    ----------
    name : str
        The experiment.
    options : sequence of pair of str
        Name and values, separated by commas. Where a value itself may have commas (a list, or
        ``data``), it is one value, and the name may be given several times.
    out : Path
        Folder of the sweep; the caller writes the comparison there.
    metrics : sequence of str, optional
        By default those of which the experiment's report speaks first.
    resume, overwrite : bool, default False
        As in `run_experiment`, for each run: what is finished is not run again, what was begun
        goes on, and values may be added.
    progress : callable, optional
        Called after every run; its rounds are runs.
    **given
        ``clients``, ``rounds``, ``seed`` and ``data`` of `run_experiment`.

    Returns
    -------
    comparison : Comparison
    failed : dict of Path to str
        Folders of the runs that failed, and why.

    Raises
    ------
    ValueError
        If one of the runs would be rejected, before any of them begins; or if all fail.
    """
    experiment = find(name)
    for metric in metrics:
        _check_metric(experiment, metric)
    if resume and overwrite:
        raise ValueError("resume and overwrite must not be given together.")
    given_each = _combinations(experiment, options)
    names = [n for n in given_each[0] if len({one[n] for one in given_each}) > 1]
    if not (resume or overwrite) and (out / "sweep.json").exists():
        raise ValueError(
            f"out must be a folder without a sweep, got {str(out)!r}: continue it with --resume, "
            "or replace it with --overwrite."
        )
    folders, parts = [], {}
    for one in given_each:
        folder = out / ",".join(f"{n}={quote(str(one[n]), safe=',')}" for n in names)
        state = run_state(folder)
        how = {"out": folder, "resume": resume and state != "", "overwrite": overwrite}
        check_run(name, how=how, options=one, **given)
        folders.append(folder)
        if not (resume and state == "finished"):
            parts[folder] = partial(_run, os.getpid(), name, options=one, **how, **given)
    done, failed = len(folders) - len(parts), {}
    if progress is not None:
        progress(Progress(done, len(folders), doing="training"))
    for folder, stopped in zip(parts, in_processes(list(parts.values())), strict=True):
        done += 1
        if stopped:
            failed[folder] = stopped
        elif progress is not None:
            value = read_results(folder)["metrics"].get(experiment.error)
            progress(Progress(done, len(folders), value, "training", experiment.error))
    if len(failed) == len(folders):
        raise ValueError(next(iter(failed.values())))
    return compare([one for one in folders if one not in failed], metrics, names), failed


def compare(
    folders: Sequence[Path], metrics: Sequence[str] = (), names: Sequence[str] = ()
) -> Comparison:
    """Return finished runs beside each other.

    Parameters
    ----------
    folders : sequence of Path
        Of finished runs.
    metrics, names : sequence of str, optional
        Metrics as in `run_sweep`; by default ``names`` are ``run``, the name of a run's folder, and
        the options in which the runs differ.

    Raises
    ------
    ValueError
        If a folder holds no finished run, or no run has a metric.
    """
    read = [read_results(folder) for folder in folders]
    configs = [{"experiment": one["experiment"], **one.get("config", {})} for one in read]
    differ = [n for n in configs[0] if len({str(one.get(n)) for one in configs}) > 1]
    columns = list(names) or [_RUN, *(n for n in differ if all(n in one for one in configs))]
    known = dict.fromkeys(metric for one in read for metric in one.get("metrics", {}))
    shown = list(metrics) or [m for m in _headline(configs) if m in known] or ["none"]
    for metric in shown:
        check_name("metric", metric, known)
    runs = []
    for folder, config, one in zip(folders, configs, read, strict=True):
        of, found = {_RUN: folder.name, **config}, one.get("metrics", {})
        runs.append([*map(of.get, columns), *map(found.get, shown)])
    return Comparison(columns, shown, runs)


def _run(parent: int, name: str, **given: Any) -> str:
    """Run an experiment, perhaps in another process, and return why it failed, or ""."""
    plain_logs()

    def end_with_parent(_: Progress) -> None:
        if os.getpid() != parent != os.getppid():
            os._exit(1)

    try:
        run_experiment(name, progress=end_with_parent, **given)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""


def _combinations(
    experiment: Experiment, options: Sequence[tuple[str, str]]
) -> list[dict[str, Value]]:
    """Return every combination of the options' values."""
    values: dict[str, list[Value]] = {}
    for name, text in options:
        check_name(f"option of {experiment.name}", name, experiment.options)
        option = experiment.options[name]
        whole = option.type in ("integers", "words") or name == "data"
        read = [option.read(one) for one in ([text] if whole else text.split(","))]
        values.setdefault(name, []).extend(read)
    for name, found in values.items():
        if len(set(found)) < len(found):
            raise ValueError(f"{name} must have different values, got {found}.")
    if max(map(len, values.values()), default=0) < 2:
        raise ValueError(
            "option must give a name several values, such as n_atoms=8,16, got "
            f"{' '.join(f'{n}={text}' for n, text in options) or 'none'}."
        )
    return [dict(zip(values, one, strict=True)) for one in product(*values.values())]


def _check_metric(experiment: Experiment, metric: str) -> None:
    """Reject a metric that no run of the experiment can have."""
    templates = experiment.page.get("metrics", {})
    patterns = (re.sub(r"_*\\{[^}]*\\}_*", ".*", re.escape(one)) for one in templates)
    if not any(re.fullmatch(one, metric) for one in patterns):
        raise ValueError(f"metric must be like one of {', '.join(templates)}, got {metric!r}.")


def _headline(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the metrics that are shown while the experiments run, or in their first sentences."""
    found: list[str] = []
    for one in (EXPERIMENTS[c["experiment"]] for c in configs if c["experiment"] in EXPERIMENTS):
        found += [one.error, *PLACE.findall(str(one.page["finding"]))]
    return list(dict.fromkeys(found))


def _apart(keys: Sequence[Sequence[str]]) -> bool:
    """Return whether no two runs are of one line."""
    return len({str(key[1:]) for key in keys}) == len(keys) > 1
