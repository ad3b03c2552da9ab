"""Running an experiment from its options to its files: what the command line is a shell over."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_perdl import _store
from flwr_perdl._checks import check_choice
from flwr_perdl._records import PARTITION_ID
from flwr_perdl._threads import one_blas_thread
from flwr_perdl.strategies import RoundReport, client_report
from flwr_perdl.strategies._events import EVENTS, EventLog
from perdl_experiments.data import digest
from perdl_experiments.engine import ENGINES, Config, EvaluateFn, Federated, mishaps
from perdl_experiments.engine import federate as run_federation
from perdl_experiments.outcome import ARRAYS, RESULTS, to_results, write
from perdl_experiments.report import REPORT, read_results, write_report
from perdl_experiments.studies import (
    Experiment,
    FederatedExperiment,
    Value,
    configure,
    find,
)

_RUN = "run.json"
_CHECKPOINTS, _STATE, _KEPT = _FOLDERS = "checkpoints", "state", "kept"
_DIGEST = "data_sha256"  # beside the config in run.json; older runs have none


class Progress(NamedTuple):
    """How far a run is.

    Attributes
    ----------
    done, total : int
        Communication rounds, over all federations of the run; and the parts that need none.
    error : float or None
        The experiment's error so far.
    """

    done: int
    total: int
    error: float | None


def run_experiment(
    name: str,
    *,
    engine: str | Grid = "in-process",
    clients: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    options: Mapping[str, Value] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Run an experiment and write what it found.

    Parameters
    ----------
    name : str
        ``"digits"``, ``"images"``, ``"synthetic"``, ``"global-atoms"``,
        ``"mixed-regression"`` or ``"regression"``.
    engine : str or Grid, default "in-process"
        ``"in-process"``, ``"ray"``, or the Grid of a running ServerApp, whose clients have their
        config already: then the experiment must need no more than one federation.
    clients, rounds, seed : int, optional
        By default the experiment's own.
    data : str or Path, optional
        The user's file, for experiments that take one.
    out : str or Path, optional
        Folder for results.json, arrays.npz, figures, report.html and checkpoints; by default
        nothing is written.
    resume : bool, default False
        Continue the run that was begun in ``out``; what it has finished is not run again.
    options : mapping, optional
        The experiment's further options by name.
    progress : callable, optional
        Called with a `Progress` after every round, or part of a run that is no federation.

    Returns
    -------
    dict
        What results.json says.

    Raises
    ------
    ValueError
        If a name, an option or the data is not as it must be, ``out`` holds another run or folders
        that are no run's, or the data have changed since the run to resume was begun.
    """
    missing = [extra for extra in ("matplotlib", "sklearn") if find_spec(extra) is None]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} must be installed to run experiments: the extra "
            "'experiments' brings it (in a clone of flwr-perdl: pip install '.[experiments]')."
        )
    experiment = find(name)
    if not isinstance(engine, Grid):
        check_choice("engine", engine, ENGINES)
    if engine != "in-process" and not isinstance(experiment, FederatedExperiment):
        raise ValueError(f"{name} must run in process: there is no server in it.")
    config = configure(
        experiment,
        clients=clients,
        rounds=rounds,
        seed=seed,
        data=None if data is None else str(data),
        options=options,
    )
    folder = None if out is None else _Folder(Path(out), config, resume=resume)
    if folder is None and resume:
        raise ValueError("resume must come with the folder of the run to continue (out).")
    session = _Session(experiment, config, engine, folder, resume, progress)
    started = time.perf_counter()
    with one_blas_thread(), session.told():
        if isinstance(experiment, FederatedExperiment):
            outcome = experiment.run(config, partial(session.federate, experiment), session.keep)
        else:
            outcome = experiment.run(config, session.keep)
    results = to_results(
        outcome._replace(notes=[*outcome.notes, *session.mishaps]),
        experiment=experiment.NAME,
        about=experiment.ABOUT,
        source=experiment.SOURCE,
        config={name: value for name, value in config.items() if name != "experiment"},
        seed=config["seed"],
        engine=engine if isinstance(engine, str) else "flower",
        seconds=time.perf_counter() - started,
        clients=session.clients,
    )
    if folder is not None:
        session.begin()
        write(folder.path, outcome, results)
        write_report(folder.path)
    return results


class _Folder:
    """The folder of a run, in which an earlier run stays until this one has something to write.

    Parameters
    ----------
    path : Path
        The folder; made when missing.
    config : mapping
        What to run.
    resume : bool
        Whether the run that was begun there is continued.

    Raises
    ------
    ValueError
        If it holds folders that are no run's, or the run to resume is another one or of other data.
    OSError
        If nothing can be written there.
    """

    def __init__(self, path: Path, config: Config, *, resume: bool) -> None:
        self.path = path
        found = digest(str(config.get("data", "")))
        self._run = {**config, **({_DIGEST: found} if found else {})}
        earlier = _read_run(path / _RUN)
        self._earlier = earlier is not None
        self._begun = resume and self._earlier
        if earlier is None:
            others = [name for name in (_RUN, *_FOLDERS) if (path / name).exists()]
            if others:
                raise ValueError(
                    f"out must be a new folder or an earlier run's, got {str(path)!r}, whose "
                    f"{', '.join(others)} no run has written."
                )
        elif resume:
            of = earlier.pop(_DIGEST, found)
            if earlier != config:
                raise ValueError(
                    f"out must hold the run to resume, {config}, got one of {earlier}."
                )
            if of != found:
                raise ValueError(
                    f"data must be as when the run to resume was begun, got changed ones in "
                    f"{config['data']!r}."
                )
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):  # to say at once that nothing can be written there
            pass

    @property
    def untouched(self) -> bool:
        """Whether an earlier run is still as it was."""
        return self._earlier and not self._begun

    def begin(self) -> bool:
        """Begin the run, at the first call; return whether an earlier run's files were removed."""
        if self._begun:
            return False
        self._begun = True
        if self._earlier:
            self._remove()
        with _store.replacing(self.path / _RUN) as stream:
            stream.write(json.dumps(self._run).encode())
        return self._earlier

    def _remove(self) -> None:
        figures: list[str] = []
        with suppress(ValueError):
            figures = [one["file"] for one in read_results(self.path).get("figures", [])]
        for name in (EVENTS, RESULTS, ARRAYS, REPORT, *figures):
            (self.path / name).unlink(missing_ok=True)
        for name in _FOLDERS:
            if (self.path / name).is_dir():
                shutil.rmtree(self.path / name)


def _read_run(path: Path) -> dict[str, Any] | None:
    """Return what a run's run.json says; None where there is none, or it is something else's."""
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    ours = isinstance(said, dict) and {"experiment", "rounds", "seed"} <= set(said)
    return said if ours else None


class _Session:
    """One run: where its federations' files go, and how far it is."""

    def __init__(
        self,
        experiment: Experiment,
        config: Config,
        engine: str | Grid,
        folder: _Folder | None,
        resume: bool,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._federations: list[Config] = []
        if isinstance(experiment, FederatedExperiment):
            self._federations = experiment.federations(config)
        self._shown = experiment.ERROR
        self._engine = engine
        self._folder = folder
        self._resume = resume
        self._progress = progress
        self._total = sum(int(one["rounds"]) for one in self._federations)
        self._error: float | None = None
        self._kept = 0
        self._ran = 0
        self._events = EventLog(None if folder is None else folder.path / EVENTS)
        self._about = {"experiment": experiment.NAME, "config": config, "resumed": resume}
        #: What happened to each client's replies, over all federations (`client_report`).
        self.clients: dict[str, dict[str, float]] = {}
        self.mishaps: list[str] = []
        if not isinstance(engine, str) and len(self._federations) > 1:
            raise ValueError(
                f"inside a Flower run {experiment.NAME} must be one federation, got "
                f"{len(self._federations)}: choose one seed (seeds=1) and one setting."
            )

    @contextmanager
    def told(self) -> Iterator[None]:
        """Note in the run's events that it begins, and how it ends."""
        self._tell_run()
        started = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self._done(started, str(error) or type(error).__name__)
            raise
        self._done(started, None)

    def begin(self) -> None:
        """Begin the run in its folder, now that there is something to write there."""
        if self._folder is not None and self._folder.begin():
            self._tell_run()

    def _tell_run(self) -> None:
        self._write("run", rounds=self._total, **self._about)

    def _done(self, started: float, stopped: str | None) -> None:
        seconds = round(time.perf_counter() - started, 3)
        self._write("done", seconds=seconds, stopped=stopped, clients=self.clients)

    def _write(self, event: str, **fields: Any) -> None:
        """Write an event, unless the file is still that of an earlier run."""
        if self._folder is None or not self._folder.untouched:
            self._events.write(event, **fields)

    def federate(
        self,
        experiment: FederatedExperiment,
        config: Config,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Federated:
        """Run the federation of ``config``, one of the experiment's.

        A run of one federation has checkpoints and continues in the middle of it; a run of many
        short ones keeps what each came to (`keep`), and continues with the first unfinished one.
        """
        number = self._federations.index(config)
        if not self._ran:
            self._check(experiment, config)
        self.begin()
        before = sum(int(one["rounds"]) for one in self._federations[:number])
        options: dict[str, Any] = {"on_round": lambda report: self._tell(before, report)}
        if self._folder is not None:
            options["events"] = self._folder.path / EVENTS
        if self._folder is not None and len(self._federations) == 1:
            options["checkpoint_dir"] = self._folder.path / _CHECKPOINTS
            options["resume"] = self._resume
            config = {**config, "state_dir": str((self._folder.path / _STATE).absolute())}
        federated = run_federation(
            experiment,
            config,
            engine=self._engine,
            evaluate_fn=None if evaluate_fn is None else self._noting(evaluate_fn),
            **options,
        )
        self._ran += 1
        found = client_report(federated.history)
        _add(self.clients, {str(partition): counts for partition, counts in found.items()})
        if len(self._federations) == 1:
            self.mishaps = mishaps(federated.history)
        return federated

    def _check(self, experiment: FederatedExperiment, config: Config) -> None:
        """Refuse options and data that the server, or a client that is here, does not accept."""
        experiment.strategy(config)
        if isinstance(self._engine, str):
            context = Context(
                run_id=0,
                node_id=0,
                node_config={PARTITION_ID: 0},
                state=RecordDict(),
                run_config={},
            )
            experiment.client(context, config)

    def keep(
        self, name: str, compute: Callable[[], dict[str, NDArray[Any]]], *, of: int = 0
    ) -> dict[str, NDArray[Any]]:
        """Return what ``compute()`` returns, from disk where a resumed run has it already."""
        self._tell_parts(of)
        path = None if self._folder is None else self._folder.path / _KEPT / f"{name}.npz"
        others, self.clients = self.clients, {}
        if path is not None and self._resume and path.is_file():
            arrays, meta = _store.load(path)
            self.clients = meta["clients"]
        else:
            arrays = compute()
            self.begin()
            if path is not None:
                _store.save(path, arrays, {"clients": self.clients})
        _add(self.clients, others)
        self._kept += 1
        self._write("part", name=name, done=self._kept, of=of)
        self._tell_parts(of)
        return arrays

    def _tell_parts(self, of: int) -> None:
        """Report how many parts are done, of a run without federations or after all of them."""
        if self._progress is not None and of and self._ran == len(self._federations):
            done, total = self._total + self._kept, self._total + of
            self._progress(Progress(done, total, self._error))

    def _noting(self, evaluate_fn: EvaluateFn) -> EvaluateFn:
        def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
            record = evaluate_fn(round_, arrays)
            if record is not None:
                self._note(dict(record))
            return record

        return evaluate

    def _tell(self, before: int, report: RoundReport) -> None:
        self._note(report.aggregate)
        if self._progress is not None:
            self._progress(Progress(before + report.round, self._total, self._error))

    def _note(self, metrics: Mapping[str, Any]) -> None:
        if self._shown in metrics:
            self._error = float(metrics[self._shown])


def _add(totals: dict[str, dict[str, float]], more: Mapping[str, Mapping[str, float]]) -> None:
    """Add further counts of clients to ``totals``."""
    for client, counts in more.items():
        total = totals.setdefault(client, {})
        for what, count in counts.items():
            total[what] = total.get(what, 0.0) + count
