"""Log runs to MLflow, TensorBoard or Weights & Biases.

Pass ``on_round=MLflowTracker(URI)`` to any strategy. A round's metrics are named ``STEP/METRIC``
(as in `RoundReport.aggregate`), ``STEP/METRIC/client-PARTITION`` and, where clients report their
cluster, ``STEP/METRIC/cluster-NUMBER``.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.clients.clustered import CLUSTER
from flwr_perdl.core.extras import load_extra
from flwr_perdl.protocol.report import RoundReport, summarize

__all__ = ["MLflowTracker", "TensorBoardTracker", "Tracker", "WandbTracker", "round_metrics"]

#: What a run has come to: arrays by name, the files that it wrote, or None where it failed.
Result = Mapping[str, NDArray[Any]] | Sequence[Path] | None

_PROJECT = "flwr-perdl"
#: Metrics and options in a request to MLflow, at most.
_BATCH, _PARAMS = 1000, 100
_LONGEST = 500  # characters of an option
#: How MLflow asks a server when a run begins: once, for ten seconds. By default: for minutes.
_ONCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_FLOATS = ("floats_down", "floats_up")


def round_metrics(report: RoundReport) -> dict[str, float]:
    """Return an exchange's metrics by name: over all clients, per client and per cluster.

    Characters that a tool does not accept in a name become ``_``.

    Parameters
    ----------
    report : RoundReport

    Returns
    -------
    dict of str to float

    Examples
    --------
    >>> from flwr_perdl.strategies import RoundReport
    >>> from flwr_perdl.trackers import round_metrics
    >>> report = RoundReport(1, "update", {3: {"mse": 0.5}}, {"mse": 0.5}, {}, 12.0, 6.0, {})
    >>> sorted(round_metrics(report))
    ['update/floats_down', 'update/floats_up', 'update/mse', 'update/mse/client-3']
    """
    parts = {"": {**report.aggregate, **{n: getattr(report, n) for n in _FLOATS}}}
    parts |= {f"/client-{partition}": own for partition, own in report.metrics.items()}
    for number in sorted({own[CLUSTER] for own in report.metrics.values() if CLUSTER in own}):
        members = {p: own for p, own in report.metrics.items() if own.get(CLUSTER) == number}
        parts[f"/cluster-{number:g}"] = summarize(members)
    return {
        f"{_plain(report.step)}/{_plain(name)}{whose}": float(value)
        for whose, numbers in parts.items()
        for name, value in numbers.items()
    }


def _plain(name: str) -> str:
    return re.sub(r"[^\w-]", "_", name)[:100]


class Tracker(ABC):
    """Receives a run's options, metrics and result: ``on_round=`` of a strategy.

    A subclass has these three methods; a plain callable receives only the reports. An error in a
    tracker is logged once, and the run goes on without it.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.clients import DictionaryClient, client_app
    >>> from flwr_perdl.dictionary import OrthogonalLearner
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import PerMA
    >>> from flwr_perdl.trackers import Tracker, round_metrics
    >>> class Printed(Tracker):
    ...     def begin(self, options):
    ...         print(options["strategy"], options["n_global"])
    ...     def __call__(self, report):
    ...         print(report.round, round_metrics(report)["start/clients"])
    ...     def end(self, result):
    ...         print([array.shape for array in result.values()])
    >>> X = np.random.default_rng(0).standard_normal((2, 50, 6))
    >>> def make_client(context):
    ...     own = X[context.node_config["partition-id"]]
    ...     return DictionaryClient(own, OrthogonalLearner(5), context)
    >>> strategy = PerMA(n_global=2, fraction_evaluate=0.0, on_round=Printed())
    >>> result = strategy.start(InProcessGrid(client_app(make_client), 2), num_rounds=1)
    PerMA 2
    1 2.0
    [(2, 6)]
    """

    @abstractmethod
    def begin(self, options: Mapping[str, Any]) -> None:
        """Receive the options of the run that begins.

        Parameters
        ----------
        options : mapping
            By name.
        """

    @abstractmethod
    def __call__(self, report: RoundReport) -> None:
        """Take an exchange's report, of which `round_metrics` makes numbers."""

    @abstractmethod
    def end(self, result: Result) -> None:
        """Receive the result of the run.

        Parameters
        ----------
        result : mapping, or None
            Arrays and files by name; None if the run failed.
        """


class MLflowTracker(Tracker):
    """Logs a run to MLflow: options as parameters, and the result as artifacts (extra ``mlflow``).

    Parameters
    ----------
    uri : str, optional
        The tracking server, such as ``"http://localhost:5000"``, or ``"sqlite:///runs.db"``. By
        default MLflow's own choice; an active MLflow run is continued.
    experiment : str, default "flwr-perdl"
        Name of the experiment, created if missing.

    Raises
    ------
    ImportError
        If MLflow is not installed.

    Examples
    --------
    >>> from flwr_perdl.strategies import PerMA
    >>> from flwr_perdl.trackers import MLflowTracker
    >>> tracker = MLflowTracker("http://localhost:5000")  # doctest: +SKIP
    >>> strategy = PerMA(n_global=2, on_round=tracker)  # doctest: +SKIP
    """

    def __init__(self, uri: str | None = None, *, experiment: str = _PROJECT) -> None:
        self._mlflow = load_extra("mlflow", "MLflowTracker", "mlflow")
        self.uri, self.experiment = uri, experiment

    def begin(self, options: Mapping[str, Any]) -> None:
        """Make the run, or join the active one; a server that does not answer is tried once."""
        with _tried_once():
            self._client = self._mlflow.MlflowClient(self.uri)
            active = self._mlflow.active_run() if self.uri is None else None
            self._joined = active is not None
            if active is None:
                found = self._client.get_experiment_by_name(self.experiment)
                make = self._client.create_experiment
                number = make(self.experiment) if found is None else found.experiment_id
                active = self._client.create_run(number, run_name=str(options.get("strategy")))
            self._run = active.info.run_id
        param = self._mlflow.entities.Param
        params = [param(f"perdl.{n}", str(v)[:_LONGEST]) for n, v in options.items()]
        for i in range(0, len(params), _PARAMS):
            self._client.log_batch(self._run, params=params[i : i + _PARAMS])

    def __call__(self, report: RoundReport) -> None:
        """Log an exchange's metrics with its round as the step."""
        metric, now = self._mlflow.entities.Metric, int(time.time() * 1000)
        found = [
            metric(name, value, now, report.round) for name, value in round_metrics(report).items()
        ]
        for i in range(0, len(found), _BATCH):
            self._client.log_batch(self._run, metrics=found[i : i + _BATCH])

    def end(self, result: Result) -> None:
        """Log the result's files as artifacts, and end the run."""
        with _files(result) as files:
            for path in files:
                self._client.log_artifact(self._run, str(path))
        if not self._joined:
            status = "FAILED" if result is None else "FINISHED"
            self._client.set_terminated(self._run, status)


@contextmanager
def _tried_once() -> Iterator[None]:
    """Have MLflow ask a server as `_ONCE` says in the block; what the user has set stays."""
    ours = {name: value for name, value in _ONCE.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


class TensorBoardTracker(Tracker):
    """Writes a run for TensorBoard: figures as images, options as a table under Text.

    Needs the extra ``tensorboard``. The result's files are next to the events.

    Parameters
    ----------
    folder : str or Path
        TensorBoard's ``--logdir``, or a folder in it: one per run.

    Raises
    ------
    ImportError
        If tensorboardX, which writes the events, is not installed.

    Examples
    --------
    >>> from flwr_perdl.strategies import PerMA
    >>> from flwr_perdl.trackers import TensorBoardTracker
    >>> tracker = TensorBoardTracker("runs/first")  # doctest: +SKIP
    >>> strategy = PerMA(n_global=2, on_round=tracker)  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        self._library = load_extra("tensorboardX", "TensorBoardTracker", "tensorboard")
        self.folder = Path(folder)

    def begin(self, options: Mapping[str, Any]) -> None:
        """Open the file of events, and write the options."""
        self._writer = self._library.SummaryWriter(str(self.folder))
        rows = [f"| {name} | {str(value)[:_LONGEST]} |" for name, value in options.items()]
        self._writer.add_text("options", "\n".join(["| option | value |", "|---|---|", *rows]))

    def __call__(self, report: RoundReport) -> None:
        """Write an exchange's metrics with its round as the step."""
        for name, value in round_metrics(report).items():
            self._writer.add_scalar(name, value, report.round)
        self._writer.flush()

    def end(self, result: Result) -> None:
        """Write the result's figures and files, and close the file of events."""
        with _files(result) as files:
            for path in files:
                shutil.copy(path, self.folder)
                if path.suffix == ".png":
                    picture = (
                        load_extra("PIL.Image", "figures", "experiments").open(path).convert("RGB")
                    )
                    self._writer.add_image(path.stem, np.asarray(picture), dataformats="HWC")
        self._writer.close()


class WandbTracker(Tracker):
    """Writes a run offline for Weights & Biases (extra ``wandb``); ``wandb sync`` uploads it.

    Parameters
    ----------
    folder : str or Path
        Folder of ``wandb`` with the offline runs, created if missing.
    project : str, default "flwr-perdl"
        Name of the project.

    Raises
    ------
    ImportError
        If wandb is not installed.

    Examples
    --------
    >>> from flwr_perdl.strategies import PerMA
    >>> from flwr_perdl.trackers import WandbTracker
    >>> tracker = WandbTracker("runs")  # doctest: +SKIP
    >>> strategy = PerMA(n_global=2, on_round=tracker)  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path, *, project: str = _PROJECT) -> None:
        self._wandb = load_extra("wandb", "WandbTracker", "wandb")
        self.folder, self.project = Path(folder), project

    def begin(self, options: Mapping[str, Any]) -> None:
        """Begin an offline run with the options as its config."""
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = self._wandb.Settings(console="off", silent=True, disable_git=True)
        self._run = self._wandb.init(
            mode="offline",
            dir=str(self.folder),
            project=self.project,
            config=dict(options),
            settings=quiet,
        )

    def __call__(self, report: RoundReport) -> None:
        """Log an exchange's metrics with its round as the step."""
        self._run.log(round_metrics(report), step=report.round)

    def end(self, result: Result) -> None:
        """Save the result's figures and files in the run's folder, and finish the run."""
        with _files(result) as files:
            for path in files:
                kept = shutil.copy(path, self._run.dir)
                self._run.save(kept, base_path=self._run.dir, policy="end")
                if path.suffix == ".png":
                    self._run.log({path.stem: self._wandb.Image(str(path))})
        self._run.finish(exit_code=int(result is None))


@contextmanager
def _files(result: Result) -> Iterator[Sequence[Path]]:
    """Yield the files of a result; arrays are in a file for as long as the block takes."""
    if not isinstance(result, Mapping):
        yield result or ()
        return
    with TemporaryDirectory() as folder:
        path, arrays = Path(folder, "arrays.npz"), dict[str, Any](result)
        np.savez_compressed(path, **arrays)
        yield [path]
