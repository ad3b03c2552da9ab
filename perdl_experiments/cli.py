"""The command line, ``flwr-perdl``: a shell over the functions of this package."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text

from flwr_perdl import __version__
from perdl_experiments.diagnose import diagnose_app, picture
from perdl_experiments.diagnose import report as diagnosis_report
from perdl_experiments.fetch import HUB, PAPERS, SCIKIT_LEARN, check_target, save
from perdl_experiments.fetch import fetch as fetch_images
from perdl_experiments.render import brief
from perdl_experiments.report import odd_clients, read_results, write_report
from perdl_experiments.runner import (
    Progress,
    check_extras,
    export_models,
    resumable,
    run_experiment,
)
from perdl_experiments.studies import COMMON, EXPERIMENTS, TOPICS, find
from perdl_experiments.terminal import Rows, console, plain_logs, printable_lines
from perdl_experiments.words import data_size, plural

#: Seconds that everything has to end after a signal.
_GRACE = 30.0
_SILENCE = 10.0  # seconds between two lines of progress where there is no terminal
_LINES = 12  # of a table that a run prints

app = typer.Typer(
    help="Personalized, clustered and decentralized federated learning: experiments and tools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Named = Annotated[str, typer.Argument(help="Name of the experiment; see `flwr-perdl list`.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the results.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the run in --out, once this one has finished.")
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option", "-o", help="key=value; may be repeated. See `flwr-perdl options EXPERIMENT`."
    ),
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Rounds = Annotated[int | None, typer.Option(help="Communication rounds.")]
Seed = Annotated[int, typer.Option(help="Random seed of the run.")]
Data = Annotated[Path | None, typer.Option(help="Your own data; see docs/cli.md.")]


class Ended(KeyboardInterrupt):
    """A signal that ends the program, such as SIGTERM; all that it has started ends with it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text
    with suppress(AttributeError):  # Windows has no SIGHUP
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, _end)
    try:
        status = app(prog_name="flwr-perdl", standalone_mode=False)
    except click.UsageError as error:
        path = "flwr-perdl" if error.ctx is None else error.ctx.command_path
        said = re.sub(r"( Did you mean [^?]*\?)\1", r"\1", error.format_message())  # said twice
        _tell(f"{said} See `{path} --help`.")
        status = error.exit_code
    except click.Abort:  # of an interrupt outside of what a command does
        status = 128 + signal.SIGINT
    sys.exit(status)


def _end(number: int, _: object) -> None:
    """Raise what ends the program; what does not let itself be ended has `_GRACE` seconds.

    Flower's simulation engine is of this kind: it waits for its server, and the server for clients
    that are gone. Ray's own processes end with this one.
    """
    timer = threading.Timer(_GRACE, os._exit, [128 + number])
    timer.daemon = True
    timer.start()
    raise Ended(number)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"flwr-perdl {__version__}, flwr {version('flwr')}")
        raise typer.Exit()


@app.callback()
def common(
    shown: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Personalized, clustered and decentralized federated learning: experiments and tools."""


@app.command("list")
def list_experiments() -> None:
    """List the experiments by topic."""
    width = max(map(len, EXPERIMENTS))
    for topic, experiments in TOPICS.items():
        rows = [[one.name.ljust(width), one.about] for one in experiments]
        console().print(Rows(["experiment", "what it shows"], rows, topic))


@app.command()
def options(experiment: Named) -> None:
    """List an experiment's options: name, default and meaning."""
    with _errors_in_a_sentence():
        found = find(experiment)
    rows = [
        [name, str(option.default), option.help.replace("`", "")]
        for name, option in found.options.items()
    ]
    console().print(Rows(["option", "default", "meaning"], rows))
    flags = ", ".join(f"--{name}" for name in COMMON if name in found.options)
    console().print(f"{flags}; all others: -o key=value.")


@app.command()
def run(
    experiment: Named,
    engine: Annotated[str, typer.Option(help="in-process or ray.")] = "in-process",
    clients: Clients = None,
    rounds: Rounds = None,
    seed: Seed = 0,
    data: Data = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    keep_local: Annotated[
        bool,
        typer.Option(
            "--keep-local",
            help="Also write local-atoms.npz: private atoms, which reveal the data.",
        ),
    ] = False,
    option: Options = None,
) -> None:
    """Run an experiment; write results.json, arrays.npz, figures and report.html."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    plain_logs()
    shown, folder = console(), out or Path("runs") / experiment
    with _errors_in_a_sentence(folder), _bar(shown) as progress:
        results = run_experiment(
            experiment,
            engine=engine,
            clients=clients,
            rounds=rounds,
            seed=seed,
            data=data,
            out=folder,
            resume=resume,
            overwrite=overwrite,
            options=_pairs(option),
            progress=progress,
            keep_local=keep_local,
        )
    _show(shown, results, folder, _LINES)


@app.command(
    help="Fetch public data for --data, as an .npz file.\n\n"
    f"NAME is a file of the gallery, built from its originals ({', '.join(PAPERS)}), an image set "
    f"({', '.join([*HUB, *SCIKIT_LEARN])}), or any image data set of the Hugging Face Hub. Without "
    "NAME: list the gallery's files, with their sources."
)
def fetch(
    name: Annotated[str | None, typer.Argument(help="Which data.")] = None,
    out: Annotated[Path | None, typer.Option(help="The .npz file; NAME.npz by default.")] = None,
    image: Annotated[str | None, typer.Option(help="Column of the images on the Hub.")] = None,
    label: Annotated[str | None, typer.Option(help="Column of the labels.")] = None,
    client: Annotated[str | None, typer.Option(help="Column of the clients.")] = None,
    split: Annotated[str | None, typer.Option(help="train, test, …")] = None,
    limit: Annotated[int | None, typer.Option(help="Number of images to keep.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="With imagefolder: your folder of folders, one per label. With a file of the "
            "gallery: the folder of its originals; those that are missing are downloaded to it."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Write public data to an .npz file."""
    if name is None:
        for file, said in PAPERS.items():
            print(f"{file}.npz: {said['arrays']}\n    from {said['source']}: {said['home']}")
        return
    path = out or Path(f"{name.replace('/', '-')}.npz")
    with _errors_in_a_sentence():
        check_target(path, overwrite=overwrite)
    with _errors_in_a_sentence(), console().status(Text(f"fetching {name}")):
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
    if name in PAPERS:
        shapes = (f"{key} {value.shape}" for key, value in arrays.items())
        differs = PAPERS[name].get("differs", "")
        print(f"{path}: {', '.join(shapes)}" + (f"; {differs}." if differs else "."))
        return
    n, height, width = arrays["X"].shape
    whose = f" of {plural(arrays['client'].max() + 1, 'client')}" if "client" in arrays else ""
    labels = plural(len(set(arrays["y"].tolist())), "label")
    print(f"{path}: {plural(n, 'image')}{whose}, {height}x{width}, {labels}")


@app.command()
def diagnose(
    folder: Annotated[Path, typer.Argument(help="A Flower app's folder.")],
    initial: Annotated[
        str, typer.Option(help="The initial arrays, module:name: a model, a record, a function.")
    ],
    clients: Annotated[
        int | None, typer.Option(help="Number of clients; the app's num-supernodes, else 10.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Communication rounds of each candidate.")] = 40,
    private: Annotated[
        list[str] | None, typer.Option(help="Arrays to keep private; the last layer by default.")
    ] = None,
    metric: Annotated[str, typer.Option(help="Evaluation metric to compare by.")] = "loss",
    higher_is_better: Annotated[
        bool | None,
        typer.Option(
            "--higher-is-better/--lower-is-better",
            help="Direction of the metric; by default guessed from its name.",
            show_default=False,
        ),
    ] = None,
    train_config: Annotated[
        list[str] | None,
        typer.Option(
            help="What the server sends with each training, such as 'lr=0.05'; may be repeated."
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            help="A strategy of your own beside the others: module:function, called with "
            "(initial_arrays, num_rounds, **options); may be repeated."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the run.")] = 0,
    out: Annotated[Path, typer.Option(help="The picture; report.html goes beside it.")] = Path(
        "diagnosis.png"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace both.")] = False,
) -> None:
    """Recommend a strategy for a Flower app's clients, and plot each client's metric."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    plain_logs()
    with _errors_in_a_sentence():
        check_extras("to draw the picture")
        page = out.with_name("report.html")
        check_target(out, overwrite=overwrite, suffix=".png")
        check_target(page, overwrite=overwrite, suffix=".html")
        found = diagnose_app(
            folder,
            initial,
            clients=clients,
            rounds=rounds,
            private=private or (),
            metric=metric,
            higher_is_better=higher_is_better,
            train_config=train_config or (),
            candidates=candidate or (),
            seed=seed,
        )
    print(f"{found.table()}\n\n{found.sentence}\n\n{found.code}")
    picture(found).savefig(out, dpi=200)
    page.write_text(diagnosis_report(found, out), encoding="utf-8")
    print(f"{out}: every client's {metric} by candidate; {page}: all of the above")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    out: Annotated[Path, typer.Option(help="The folder for the files.")] = Path("models"),
) -> None:
    """Export the models of a run: a file of what clients share, one per client, and a card.

    A client's file may reveal its data: protect it as you protect the data.
    """
    with _errors_in_a_sentence():
        export_models(folder, out)
    print(
        f"{out}: {plural(len(list(out.iterdir())) - 2, 'model')}, and which is whose in README.md"
    )


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
) -> None:
    """Write report.html again from a run's files, and print its tables."""
    with _errors_in_a_sentence():
        write_report(folder)
        _show(console(), read_results(folder), folder)


def _pairs(texts: list[str] | None) -> dict[str, str]:
    """Return the options that ``key=value`` texts give."""
    pairs = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"option must be key=value, got {text!r}.")
        if name in pairs:
            raise ValueError(f"option {name} must be given once, got {text!r} too.")
        pairs[name] = value
    return pairs


@contextmanager
def _errors_in_a_sentence(folder: Path | None = None) -> Iterator[None]:
    """Say what is wrong on stderr, without a traceback, and exit with status 2.

    A signal exits with 128 and its number, as shells expect. Where a run was stopped that can be
    continued in ``folder``, the sentence says how.
    """
    try:
        yield
    except (ValueError, OSError, RuntimeError, MemoryError, ImportError) as error:
        said = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror and error.filename is not None:
            said = f"{os.fsdecode(error.filename)!r}: {error.strerror}."
        _tell(said)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Ended) else signal.SIGINT
        further = "" if folder is None else "; nothing was finished that could be continued"
        if folder is not None and resumable(folder):
            further = "; continue with --resume"
        _tell(f"stopped by {signal.Signals(number).name}{further}.")
        raise typer.Exit(128 + number) from None


def _tell(sentence: str) -> None:
    print(f"flwr-perdl: {sentence}", file=sys.stderr)


@contextmanager
def _bar(shown: Console) -> Iterator[Callable[[Progress], None]]:
    """Show what a run does, its rounds or parts, metric and time left; yield the function to call.

    The bar is there from the start. Where there is no terminal, lines go to standard error: every
    ten seconds, if there is something new, also within a part that takes long.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[metric]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    bar = Bar(*columns, console=shown, disable=not shown.is_terminal, transient=True)
    task = bar.add_task("starting", total=None, metric="")
    line, over = "", threading.Event()

    def update(progress: Progress) -> None:
        nonlocal line
        value = progress.value
        metric = "" if value is None else f"{progress.metric} {value:.3g}"
        step = f"step {progress.done} of {progress.total}" if progress.total else ""
        line = ", ".join(filter(None, [progress.doing, step, metric]))
        total = progress.total or None  # unknown
        bar.update(
            task, completed=progress.done, total=total, metric=metric, description=progress.doing
        )

    def say_lines() -> None:
        said = ""
        while not over.wait(_SILENCE):
            if line != said:
                said = line
                _tell(said)

    # Rich below 14, which Flower 1.26.1 needs, ends a bar that is not shown with an empty line.
    with nullcontext() if bar.disable else bar:
        if bar.disable:
            threading.Thread(target=say_lines, daemon=True).start()
        try:
            yield update
        finally:
            over.set()


def _show(shown: Console, results: dict[str, Any], folder: Path, lines: int | None = None) -> None:
    """Print what a run found, and last the verdict.

    With ``lines`` it prints the first table only, no longer than that, and its caption; the page
    has all of them, and the notes.
    """
    odd = odd_clients(results)
    entries = [*results["tables"][: 1 if lines else None], *([] if odd is None else [odd])]
    for entry in map(brief, entries):
        best = entry.get("best", ())
        cells = [
            [f"*{cell}" if [i, j] in best else cell for j, cell in enumerate(row)]
            for i, row in enumerate(entry["rows"])
        ]
        rows = Rows(entry["columns"], cells, entry["title"], best)
        shown.print(rows.brief(shown, lines) if lines else rows)
        legend = " *: the best." if best else ""
        shown.print(printable_lines(f"{entry['caption']}{legend}\n"))
    for note in [] if lines else results["notes"]:
        shown.print(printable_lines(note))
    sent, received = data_size(results["floats_up"]), data_size(results["floats_down"])
    whose = f" ({results['costs_of']})" if results.get("costs_of") else ""
    shown.print(
        f"{plural(results['rounds'], 'round')}; each client sent {sent} and received {received}"
        f"{whose}; "
        f"{results['seconds']:.1f} s."
    )
    shown.print(f"Report: {(folder / 'report.html').resolve().as_uri()}", soft_wrap=True)
    if results.get("finding"):
        shown.print(printable_lines(f"\n{results['finding']}"), style="bold")
