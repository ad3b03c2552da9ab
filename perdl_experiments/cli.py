"""The command line: ``flwr-perdl list``, ``run``, ``up``, ``watch``, ``report``, ``bench``."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from flwr_perdl._checks import check_choice
from perdl_experiments.deployment import Deployment
from perdl_experiments.fetch import HUB, SCIKIT_LEARN, save
from perdl_experiments.fetch import fetch as fetch_images
from perdl_experiments.report import odd_clients, read_results, write_report
from perdl_experiments.runner import Progress, run_experiment
from perdl_experiments.studies import EXPERIMENTS, sites
from perdl_experiments.watch import watch as watch_run

app = typer.Typer(
    help="Federated dictionary learning, clustered regression, learning between neighbours.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_WIDTH = 110


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text
    app(prog_name="flwr-perdl")


@app.command("list")
def list_experiments() -> None:
    """List the experiments."""
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("experiment", "what it shows", "after"):
        table.add_column(head, no_wrap=head == "experiment")
    for name, experiment in EXPERIMENTS.items():
        table.add_row(name, experiment.ABOUT, experiment.SOURCE)
    _console().print(table)


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="Its name; see `flwr-perdl list`.")],
    engine: Annotated[str, typer.Option(help="in-process or ray.")] = "in-process",
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    seed: Annotated[int, typer.Option(help="The run's one seed.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Your own data; see docs/cli.md.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="key=value; may be repeated.")
    ] = None,
) -> None:
    """Run an experiment; write results.json, arrays.npz, figures and report.html."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    console, folder = _console(), out or Path("runs") / experiment
    with _errors_in_a_sentence(), _bar(console) as progress:
        results = run_experiment(
            experiment,
            engine=engine,
            clients=clients,
            rounds=rounds,
            seed=seed,
            data=data,
            out=folder,
            resume=resume,
            options=dict(_pair(text) for text in option or []),
            progress=progress,
        )
    _show(console, results, folder)


@app.command(
    help=f"""Fetch public images for --data: {", ".join([*HUB, *SCIKIT_LEARN])},
    or any image set of the Hugging Face Hub by its name."""
)
def fetch(
    name: Annotated[str, typer.Argument(help="Which images.")],
    out: Annotated[Path | None, typer.Option(help="The .npz file; NAME.npz by default.")] = None,
    image: Annotated[str | None, typer.Option(help="The Hub's column of images.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of labels.")] = None,
    client: Annotated[str | None, typer.Option(help="The column that says whose it is.")] = None,
    split: Annotated[str | None, typer.Option(help="train, test, …")] = None,
    limit: Annotated[int | None, typer.Option(help="Keep the first so many images.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="With imagefolder: your folder of folders, one per label.")
    ] = None,
) -> None:
    """Write images, labels and, where they are known, clients to an .npz file."""
    path = out or Path(f"{name.replace('/', '-')}.npz")
    with _errors_in_a_sentence(), _console().status(Text(f"fetching {name}")):
        arrays = fetch_images(
            name,
            image=image,
            label=label,
            client=client,
            split=split,
            limit=limit,
            folder=None if folder is None else str(folder),
        )
        save(path, arrays)
    n, height, width = arrays["X"].shape
    whose = f" of {arrays['client'].max() + 1} clients" if "client" in arrays else ""
    print(f"{path}: {n} images{whose}, {height}x{width}, {len(set(arrays['y'].tolist()))} labels")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
) -> None:
    """Write report.html again from a run's files, and print its tables."""
    with _errors_in_a_sentence():
        write_report(folder)
        _show(_console(), read_results(folder), folder)


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, also one about to begin.")],
    once: Annotated[bool, typer.Option("--once", help="Print what there is, and exit.")] = False,
) -> None:
    """Show a run as it goes, from the events in its folder."""
    with _errors_in_a_sentence(), suppress(KeyboardInterrupt):
        watch_run(folder, _console(), once=once)


@app.command()
def up(
    experiment: Annotated[str, typer.Argument(help="Its name; see `flwr-perdl list`.")] = "digits",
    nodes: Annotated[int, typer.Option(help="Number of SuperNodes.")] = 3,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt, and admit registered SuperNodes only.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    seed: Annotated[int, typer.Option(help="The run's one seed.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="Your own data: a file, or a folder with one per node.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results and logs.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    keep_state: Annotated[
        bool, typer.Option("--keep-state", help="Keep the nodes' private state on disk.")
    ] = False,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="key=value; may be repeated.")
    ] = None,
) -> None:
    """Run an experiment on a real SuperLink and real SuperNodes on this machine.

    Everything is a process of its own and ends with the run. Logs, keys and certificates lie in
    the folder `deployment` beside the results.
    """
    console = _console()
    folder = (out or Path("runs") / f"{experiment}-deployed").absolute()
    config = {"experiment": experiment, "out": str(folder), "seed": seed, "resume": resume}
    config["clients"] = nodes
    own: dict[str, str] = {"state-dir": str(folder / "state")} if keep_state else {}
    if rounds is not None:
        config["rounds"] = rounds
    with _errors_in_a_sentence():
        check_choice("experiment", experiment, EXPERIMENTS)
        config.update(_pair(text) for text in option or [])
        data_of = _files(data, nodes) if data is not None and data.is_dir() else None
        if data is not None and data_of is None:
            config["data"] = str(data.absolute())

        def node_config(partition: int) -> dict[str, str]:
            return {**own, "data": data_of[partition]} if data_of else own

        with Deployment(
            folder / "deployment", nodes, tls=tls, node_config=node_config, tell=console.print
        ) as deployment:
            deployment.run(config)
        _show(console, read_results(folder), folder)


@app.command()
def bench() -> None:
    """Run the scripts in the folder benchmarks/."""
    scripts = sorted(Path("benchmarks").glob("[!_]*.py"))
    with _errors_in_a_sentence():
        if not scripts:
            raise ValueError("benchmarks must be a folder with scripts here: there is none.")
    for script in scripts:
        print(script, flush=True)
        status = subprocess.run([sys.executable, str(script)]).returncode
        if status:
            raise typer.Exit(status)


def _console() -> Console:
    """Return where to print: what is printed has no markup, and names may look like it."""
    plain = partial(Console, highlight=False, markup=False, emoji=False)
    return plain() if plain().is_terminal else plain(width=_WIDTH)


def _files(folder: Path, nodes: int) -> list[str]:
    """Return the nodes' own files."""
    files = sites.files(folder.absolute())
    if len(files) != nodes:
        raise ValueError(f"nodes must be {len(files)}, one per file in {folder}, got {nodes}.")
    return files


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"option must be key=value, got {text!r}.")
    return name, value


@contextmanager
def _errors_in_a_sentence() -> Iterator[None]:
    """Say what is wrong on stderr, without a traceback, and exit with status 2."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        print(f"flwr-perdl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Show rounds (or parts of a run), error and time left; yield what takes a `Progress`."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("error {task.fields[error]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("rounds", total=None, error="-")

        def update(progress: Progress) -> None:
            error = "-" if progress.error is None else f"{progress.error:.3g}"
            bar.update(task, completed=progress.done, total=progress.total, error=error)

        yield update


def _show(console: Console, results: dict[str, Any], folder: Path) -> None:
    """Print a run's tables and notes, and where its page is."""
    odd = odd_clients(results)
    for entry in [*results["tables"], *([] if odd is None else [odd])]:
        table = Table(title=entry["title"], box=box.SIMPLE_HEAD, title_justify="left")
        for column in entry["columns"]:
            table.add_column(column, justify="right" if table.columns else "left")
        for row in entry["rows"]:
            table.add_row(*row)
        console.print(table)
    for note in results["notes"]:
        console.print(note)
    console.print(
        f"{results['rounds']} rounds; per client {results['floats_up']:,.0f} floats up, "
        f"{results['floats_down']:,.0f} down; {results['seconds']:.1f} s in all."
    )
    console.print(f"Report: {(folder / 'report.html').resolve()}", soft_wrap=True)
