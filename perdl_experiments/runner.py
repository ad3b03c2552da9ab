"""Running an experiment from its options to its files: what the command line is a shell over."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, cast

from flwr.app import ArrayRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_perdl import export
from flwr_perdl.clients import DictionaryClient, kept_local_atoms
from flwr_perdl.core import files
from flwr_perdl.core.checks import check_count
from flwr_perdl.core.threads import one_blas_thread
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.protocol.report import Observers, OnRound
from flwr_perdl.strategies import Learned, RoundReport, client_report
from perdl_experiments.data import digest
from perdl_experiments.engine import EvaluateFn, Federated, check_engine, mishaps
from perdl_experiments.engine import federate as run_federation
from perdl_experiments.fetch import save
from perdl_experiments.outcome import ARRAYS, CHART, NEXT, RESULTS, to_results, write
from perdl_experiments.report import REPORT, read_results, write_report
from perdl_experiments.studies import (
    EXPERIMENTS,
    Config,
    Experiment,
    Value,
    configure,
    find,
)
from perdl_experiments.studies._experiment import FederatedStudy, NetworkStudy

Options = Mapping[str, Value]

#: What the extra ``experiments`` brings.
_NEEDED = ("matplotlib", "sklearn", "skimage", "joblib")
_RUN = "run.json"
_CHECKPOINTS, _STATE, _KEPT = _FOLDERS = "checkpoints", "state", "kept"
LOCAL_ATOMS = "local-atoms.npz"
_FILES = (RESULTS, ARRAYS, REPORT, LOCAL_ATOMS)
_DIGEST = "data_sha256"  # of --data, beside the config in run.json


class Progress(NamedTuple):
    """How far a run is.

    Attributes
    ----------
    done, total : int
        Communication rounds, over all federations of the run; and the parts that need none.
    value : float or None
        The experiment's metric so far.
    doing : str
        What the run does now.
    metric : str
        The metric's name, such as "accuracy".
    """

    done: int
    total: int
    value: float | None = None
    doing: str = ""
    metric: str = ""


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
    overwrite: bool = False,
    options: Mapping[str, Value] | None = None,
    progress: Callable[[Progress], None] | None = None,
    keep_local: bool = False,
    on_round: OnRound = None,
) -> dict[str, Any]:
    """Run an experiment and write its results.

    Parameters
    ----------
    name : str
        An experiment's name, such as ``"digits"``; ``flwr-perdl list`` prints all.
    engine : str or Grid, default "in-process"
        ``"in-process"``, ``"ray"``, or the Grid of a running ServerApp, whose clients are already
        configured: then the experiment must be a single federation.
    clients, rounds, seed : int, optional
        By default the experiment's own.
    data : str or Path, optional
        Your own data, for experiments that take a file.
    out : str or Path, optional
        Folder for results.json, arrays.npz, figures, report.html and checkpoints; by default
        nothing is written.
    resume : bool, default False
        Continue the run in ``out``; finished parts are not repeated.
    overwrite : bool, default False
        Replace the run in ``out``. The new run is written to its subfolder ``next``, and replaces
        the earlier one when it has finished.
    options : mapping, optional
        The experiment's further options by name.
    progress : callable, optional
        Called with a `Progress` after every round, or part of a run without rounds, and when the
        run begins something else.
    keep_local : bool, default False
        Write the clients' local atoms to local-atoms.npz in ``out``, an array per client. PerMA
        keeps them from the server: the file is only for those who may see all clients' data.
    on_round : callable, or sequence of callables, optional
        As of a strategy; rounds are counted over all federations of the run.

    Returns
    -------
    dict
        The contents of results.json.

    Raises
    ------
    ValueError
        If a name, an option or the data is invalid, ``out`` holds another run or other files, or
        the data changed since the run to resume was begun. Nothing on disk is changed then.
    """
    how = {"out": out, "resume": resume, "overwrite": overwrite}
    experiment, config, folder = _prepared(
        name,
        engine,
        how,
        clients=clients,
        rounds=rounds,
        seed=seed,
        data=None if data is None else str(data),
        options=options,
    )
    session = _Session(experiment, config, engine, folder, resume, progress, on_round)
    session.say("loading data")
    if keep_local:
        session.check_keeps_local()
    session.check()
    started = time.perf_counter()
    with one_blas_thread(), session.tidy():
        if experiment.federated:
            federate = partial(session.federate, experiment.federated)
            outcome = experiment.federated.run(config, federate, session.keep)
        else:
            outcome = cast(NetworkStudy, experiment.code).run(config, session.keep)
        session.say("writing figures and report")
        results = to_results(
            outcome,
            experiment.page,
            **experiment.describe(config),
            seed=config.seed,
            engine=engine if isinstance(engine, str) else "flower",
            seconds=time.perf_counter() - started + session.seconds_before,
            clients=session.clients,
        )
        results["notes"] += session.mishaps
        if folder is not None:
            session.begin()
            write(folder.work, outcome, results)
            write_report(folder.work)
            if keep_local:
                save(folder.work / LOCAL_ATOMS, kept_local_atoms(folder.work / _STATE))
    if folder is not None:
        folder.finish()
    return results


def export_models(folder: Path, out: Path) -> None:
    """Write the models of a finished run to a folder, as `flwr_perdl.export.save` does.

    Raises
    ------
    ValueError
        If the run is not finished, or has not just one federation whose clients have models.
    """
    run = _read_run(folder / _RUN) or {}
    run.pop(_DIGEST, None)
    experiment = find(run.pop("experiment")) if _state(folder) == "finished" else None
    study, federations = None if experiment is None else experiment.federated, list[Any]()
    if experiment and study and (folder / _CHECKPOINTS).is_dir():
        federations = study.federations(configure(experiment, options=run))
    if study is None or len(federations) != 1:
        raise ValueError(
            "folder must be that of a finished run of one federation, which seeds=1 makes of many, "
            f"got {str(folder)!r}."
        )
    (config,) = federations
    server = {"seed": config.seed, "checkpoint_dir": folder / _CHECKPOINTS, "resume": True}
    strategy = study.strategy(config, **server)
    strategy.open([])  # from its checkpoint: no client is asked
    result = getattr(strategy, "result", None)
    if not isinstance(result, Learned):
        raise ValueError(f"folder must be of a strategy with models, got {strategy!r}.")
    export.save(out, result, state_dir=folder / _STATE)


def resumable(folder: Path) -> bool:
    """Return whether a folder has a run that ``resume`` continues."""
    return "unfinished" in (_state(folder / NEXT), _state(folder))


def check_extras(purpose: str) -> None:
    """Raise a ValueError that says what to install, if what the extra brings is not there."""
    missing = [extra for extra in _NEEDED if find_spec(extra) is None]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} must be installed {purpose}: the extra 'experiments' brings "
            "it (in a clone of flwr-perdl: pip install '.[experiments]')."
        )


def _prepared(
    name: str, engine: str | Grid, how: Mapping[str, Any], **given: Any
) -> tuple[Experiment, Config, _Folder | None]:
    """Return the experiment, its config of what is ``given``, its folder; nothing is written."""
    check_extras("to run experiments")
    experiment, out = find(name), how["out"]
    if not isinstance(engine, Grid):
        check_engine(engine)
    if engine != "in-process" and not experiment.federated:
        raise ValueError(f"{name} must run in process: there is no server in it.")
    if how["resume"] and out is None:
        raise ValueError("resume must come with the folder of the run to continue (out).")
    if how["resume"] and how["overwrite"]:
        raise ValueError("resume and overwrite must not be given together.")
    config: Config = configure(experiment, **given)
    if out is None:
        return experiment, config, None
    resume, overwrite = how["resume"], how["overwrite"]
    folder = _Folder(Path(out), config.options, resume=resume, overwrite=overwrite)
    return experiment, config, folder


class _Folder:
    """The folder of a run, in which an earlier run stays until this one has finished.

    Making one writes nothing.

    Parameters
    ----------
    path : Path
        The folder; made when missing.
    config : mapping
        What to run.
    resume : bool
        Whether the run that was begun there is continued.
    overwrite : bool
        Whether a run there is replaced.

    Raises
    ------
    ValueError
        If it holds files that are no run's or a run that is not to be replaced, the run to resume
        is another one or of other data, or nothing can be written there.
    """

    def __init__(self, path: Path, config: Options, *, resume: bool, overwrite: bool) -> None:
        self.path = self.work = path
        _check_writable(path)
        found = digest(str(config.get("data", "")))
        self._run = {**config, **({_DIGEST: found} if found else {})}
        self._begun = False
        self._made: list[Path] = []
        if resume:
            self.work = self._to_resume(config, found)
            self._begun = True
            return
        earlier = _read_run(path / _RUN)
        foreign = [name for name in _foreign(path, earlier, config) if (path / name).exists()]
        if foreign:
            raise ValueError(
                f"out must be a new folder or an earlier run's, got {str(path)!r}, whose "
                f"{', '.join(foreign)} no run has written."
            )
        for place in (path, path / NEXT):
            state = _state(place)
            if state and not overwrite:
                of = (_read_run(place / _RUN) or {})["experiment"]
                how = "continue it with --resume, or " if state == "unfinished" else ""
                raise ValueError(
                    f"out must be a folder without a run, got {str(path)!r}, which holds "
                    f"{'an' if state[0] == 'u' else 'a'} {state} run of {of}: {how}replace it "
                    "with --overwrite."
                )
        if _state(path) or _read_run(path / NEXT / _RUN):
            self.work = path / NEXT

    def _to_resume(self, config: Options, found: str) -> Path:
        """Return where the run to continue is."""
        earlier = {
            place: run
            for place in (self.path / NEXT, self.path)
            if (run := _read_run(place / _RUN)) is not None
        }
        if not earlier:
            raise ValueError(
                f"out must hold the run to resume, got {str(self.path)!r}, which holds no run."
            )
        said = {place: run.pop(_DIGEST, "") for place, run in earlier.items()}
        place = next((one for one in earlier if earlier[one] == config), next(iter(earlier)))
        if earlier[place] != config:
            raise ValueError(
                "out must hold the run to resume, got one with other options in "
                f"{str(self.path)!r}: {_difference(earlier[place], config)}."
            )
        if said[place] != found:
            raise ValueError(
                f"data must be as when the run to resume was begun, got changed ones in "
                f"{config['data']!r}."
            )
        return place

    def begin(self) -> None:
        """Begin the run, at the first call."""
        if self._begun:
            return
        self._begun = True
        for folder in (*reversed(self.work.parents), self.work):
            if not folder.exists():
                folder.mkdir()
                self._made.append(folder)
        _remove_run(self.work)
        with files.replacing(self.work / _RUN) as stream:
            stream.write(json.dumps(self._run).encode())

    def abandon(self) -> None:
        """Remove what was written, and the folders that were made for it, unless it can go on."""
        if not self._begun or _state(self.work):
            return
        _remove_run(self.work)
        for folder in reversed(self._made):
            with suppress(OSError):
                folder.rmdir()

    def finish(self) -> None:
        """Let the finished run take the earlier one's place."""
        if self.work == self.path:
            return
        _remove_run(self.path)
        entries = sorted(self.work.iterdir(), key=lambda one: one.name == _RUN)  # run.json last
        for entry in entries:
            place = self.path / entry.name
            if place.is_dir():  # of a replacement that was interrupted
                shutil.rmtree(place)
            entry.replace(place)
        self.work.rmdir()


def _check_writable(path: Path) -> None:
    """Refuse a folder in which nothing can be written, or that cannot be made."""
    nearest = next(one for one in (path, *path.absolute().parents) if one.exists())
    try:
        if not nearest.is_dir():
            raise NotADirectoryError(f"{str(nearest)!r} is a file")
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"out must be a folder that can be written, got {str(path)!r}: {reason}."
        ) from None


def _foreign(path: Path, earlier: Mapping[str, Any] | None, config: Options) -> list[str]:
    """Return the names that the run would use and that no earlier run has made."""
    figures = _figures(str(config["experiment"]))
    if earlier is None:
        return [] if _read_run(path / NEXT / _RUN) else [_RUN, *_FILES, *_FOLDERS, NEXT, *figures]
    own = set(_own_figures(path))
    return [name for name in figures if name not in own]


def _figures(experiment: object) -> list[str]:
    """Return the names of an experiment's figures; none for one that is not known here."""
    found = EXPERIMENTS.get(str(experiment))
    names = [] if found is None else found.figures
    return [*names, *(f"{name[:-4]}.svg" for name in names if name.endswith(".png"))]


def _own_figures(path: Path) -> list[str]:
    """Return the names of the figures that the run in a folder has, or may have, written."""
    try:
        figures = read_results(path).get("figures", [])
        charts = [one["file"] for one in figures if one.get("kind") == CHART]
        return [*(one["file"] for one in figures), *(f"{name[:-4]}.svg" for name in charts)]
    except ValueError:
        return _figures((_read_run(path / _RUN) or {}).get("experiment"))


def _state(path: Path) -> str:
    """Return whether a folder's run is finished or unfinished; "" where there is nothing of one."""
    if _read_run(path / _RUN) is None:
        return ""
    if (path / RESULTS).exists():
        return "finished"
    kept = any(any((path / name).glob("*.npz")) for name in (_CHECKPOINTS, _KEPT))
    return "unfinished" if kept else ""


def _remove_run(path: Path) -> None:
    """Remove a run's files from a folder that has one."""
    if _read_run(path / _RUN) is None:
        return
    for name in (*_own_figures(path), *_FILES):
        (path / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
    (path / _RUN).unlink()


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return in which options two configs differ."""
    names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    return "; ".join(
        f"{name} is {found.get(name, 'missing')!r} there and {wanted.get(name, 'missing')!r} here"
        for name in names
    )


def _read_run(path: Path) -> dict[str, Any] | None:
    """Return what a run's run.json says; None where there is none, or it is something else's."""
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
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
        on_round: OnRound = None,
    ) -> None:
        self._observers = Observers(on_round)
        self._federations: list[Config] = []
        if experiment.federated:
            self._federations = experiment.federated.federations(config)
        self._engine = engine
        self._folder = folder
        self._resume = resume
        self._progress = progress
        self._total = sum(one.rounds for one in self._federations)
        self._at = Progress(0, self._total, metric=experiment.error)
        self._kept = 0
        self._ran = 0
        #: What the parts took that a resumed run has from disk.
        self.seconds_before = 0.0
        #: What happened to each client's replies, over all federations (`client_report`).
        self.clients: dict[str, dict[str, float]] = {}
        self.mishaps: list[str] = []
        self._experiment = experiment
        if not isinstance(engine, str) and len(self._federations) > 1:
            raise ValueError(
                f"inside a Flower run {experiment.name} must be one federation, got "
                f"{len(self._federations)}: choose one seed (seeds=1) and one setting."
            )

    @contextmanager
    def tidy(self) -> Iterator[None]:
        """Leave nothing of a run that stops before its first round or part is finished."""
        try:
            yield
        except BaseException:
            if self._folder is not None:
                self._folder.abandon()
            raise

    def begin(self) -> None:
        """Begin the run in its folder, now that there is something to write there."""
        if self._folder is not None:
            self._folder.begin()

    def federate(
        self,
        study: FederatedStudy,
        config: Config,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Federated:
        """Run the federation of ``config``, one of the experiment's.

        A run of one federation has checkpoints and continues in the middle of it; a run of many
        short ones keeps what each came to (`keep`), and continues with the first unfinished one.
        """
        number, of = self._federations.index(config), len(self._federations)
        self.begin()
        self.say(f"training, federation {number + 1} of {of}" if of > 1 else "training")
        before = sum(one.rounds for one in self._federations[:number])
        options: dict[str, Any] = {"on_round": lambda report: self._tell(before, report)}
        if self._folder is not None and len(self._federations) == 1:
            options["checkpoint_dir"] = self._folder.work / _CHECKPOINTS
            options["resume"] = self._resume
            state_dir = (self._folder.work / _STATE).absolute()
            if self._keeps_together(state_dir):
                options["state_dir"] = state_dir
            else:
                config = replace(config, state_dir=str(state_dir))
        federated = run_federation(
            study,
            config,
            engine=self._engine,
            evaluate_fn=None if evaluate_fn is None else self._noting(evaluate_fn),
            **options,
        )
        self._ran += 1
        self.say("baselines and evaluation")
        found = client_report(federated.history)
        _add(self.clients, {federated.names[who]: counts for who, counts in found.items()})
        if len(self._federations) == 1:
            self.mishaps = mishaps(federated.history, federated.names)
        return federated

    def _keeps_together(self, state_dir: Path) -> bool:
        """Return whether the clients' states are in one file, and not in a folder per client.

        In process they are, unless the run was begun elsewhere.
        """
        begun = {path.name.startswith("client-") for path in state_dir.glob("*")}
        if self._engine != "in-process" and False in begun:
            raise ValueError(
                "engine must be 'in-process', which the run to resume was begun with, got another."
            )
        return self._engine == "in-process" and True not in begun

    def check_keeps_local(self) -> None:
        """Refuse to keep local atoms where the run has none, or no folder."""
        study, here = self._experiment.federated, isinstance(self._engine, str) and self._folder
        single = self._client(study) if study and len(self._federations) == 1 else None
        if not here or not isinstance(single, DictionaryClient):
            raise ValueError(
                "keep_local must come with a folder (out), on an engine of this machine, and with "
                "one federation (seeds=1) of clients that have atoms."
            )

    def check(self) -> None:
        """Refuse options and data that the server, or a client that is here, does not accept."""
        study = self._experiment.federated
        if study is None:
            return
        for config in self._federations:
            study.strategy(config)
        if isinstance(self._engine, str) and self._federations:
            client = self._client(study)
            if isinstance(client, DictionaryClient) and client.learner.orthogonal:
                check_count("n_atoms", client.learner.n_atoms, 1, client.X.shape[1])

    def _client(self, study: FederatedStudy) -> Any:
        """Return the first client."""
        context = Context(
            run_id=0,
            node_id=0,
            node_config={PARTITION_ID: 0},
            state=RecordDict(),
            run_config={},
        )
        return study.client(context, self._federations[0])

    def keep(
        self, name: str, compute: Callable[[], dict[str, NDArray[Any]]], *, of: int = 0
    ) -> dict[str, NDArray[Any]]:
        """Return what ``compute()`` returns, from disk where a resumed run has it already."""
        self.say(f"computing {name}")
        self._tell_parts(of)
        path = None if self._folder is None else self._folder.work / _KEPT / f"{name}.npz"
        others, self.clients = self.clients, {}
        if path is not None and self._resume and path.is_file():
            arrays, meta = files.load(path)
            self.clients = meta["clients"]
            self.seconds_before += meta.get("seconds", 0.0)  # an earlier version kept none
        else:
            started = time.perf_counter()
            arrays = compute()
            seconds = time.perf_counter() - started
            self.begin()
            if path is not None:
                files.save(path, arrays, {"clients": self.clients, "seconds": seconds})
        _add(self.clients, others)
        self._kept += bool(of)  # others are federations, counted by rounds
        self._tell_parts(of)
        return arrays

    def say(self, doing: str) -> None:
        """Report what the run does now."""
        self._report(doing=doing)

    def _report(self, **news: Any) -> None:
        self._at = self._at._replace(**news)
        if self._progress is not None:
            self._progress(self._at)

    def _tell_parts(self, of: int) -> None:
        """Report how many parts are done, of a run without federations or after all of them."""
        if of and self._ran == len(self._federations):
            self._report(done=self._total + self._kept, total=self._total + of)

    def _noting(self, evaluate_fn: EvaluateFn) -> EvaluateFn:
        def evaluate(round_: int, arrays: ArrayRecord) -> MetricRecord | None:
            record = evaluate_fn(round_, arrays)
            if record is not None:
                self._note(dict(record))
            return record

        return evaluate

    def _tell(self, before: int, report: RoundReport) -> None:
        self._note(report.aggregate)
        self._report(done=before + report.round)
        self._observers(report._replace(round=before + report.round))

    def _note(self, metrics: Mapping[str, Any]) -> None:
        if self._at.metric in metrics:
            self._at = self._at._replace(value=float(metrics[self._at.metric]))


def _add(totals: dict[str, dict[str, float]], more: Mapping[str, Mapping[str, float]]) -> None:
    """Add further counts of clients to ``totals``."""
    for client, counts in more.items():
        total = totals.setdefault(client, {})
        for what, count in counts.items():
            total[what] = total.get(what, 0.0) + count
