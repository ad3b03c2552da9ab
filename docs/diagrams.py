"""Draw docs/images/diagrams/, in one style: ``python docs/diagrams.py``.

A diagram is light or dark as the system says, or the site's page, into which
`docs/source_links.py` puts it: its text can be selected. README's picture has a file for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from math import cos, pi, sin
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent / "images" / "diagrams"
#: README's picture: the schematics in a row.
OVERVIEW = "images/overview-{}.svg"
FONT = "DejaVu Sans, Verdana, system-ui, sans-serif"
#: Text, less important text, lines, boxes, and the colors of models: blue is ours.
NAMES = ("ink", "muted", "line", "fill", "ours", "two", "three", "four", "gray", "page")
COLORS = {
    "light": "#1a1a1a #5a5a5a #8593a3 #f3f6f9 #0065a3 #c85200 #1b7837 #b03a9e #9aa7b5 #ffffff",
    "dark": "#e8e8e8 #b3bac3 #74808d #262b33 #58b0f2 #f08c3c #58b86c #d97cc9 #6b7784 #1e2129",
}
#: Pixels: a diagram of two or three parties, and between lines of text.
WIDTH, LINE = 520, 19


def palette(theme: str) -> str:
    """Return a theme's colors as CSS."""
    return "".join(f"--{n}:{c};" for n, c in zip(NAMES, COLORS[theme].split(), strict=True))


def svg(width: float, height: float, parts: Iterable[str], theme: str = "") -> str:
    """Return a picture of a theme, or of both."""
    light, dark = palette(theme or "light"), palette("dark")
    style = f".diagram{{{light}}}"
    if not theme:
        style += f"@media(prefers-color-scheme:dark){{.diagram{{{dark}}}}}"
        style += f"[data-md-color-scheme=default] .diagram{{{light}}}"
        style += f"[data-md-color-scheme=slate] .diagram{{{dark}}}"
    style += f".diagram text{{font:14px {FONT};fill:var(--ink)}}.diagram .m{{fill:var(--muted)}}"
    style += ".diagram .b{font-weight:700}.diagram .s{stroke-width:1.5}"
    style += ".diagram .over{stroke:var(--page);stroke-width:8;paint-order:stroke}"
    style += "".join(f".diagram .f-{n}{{fill:var(--{n})}}" for n in NAMES)
    style += "".join(f".diagram .s-{n}{{stroke:var(--{n})}}" for n in NAMES)
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    start = f'<svg class="diagram" xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([start, f"<style>{style}</style>", *parts, "</svg>\n"])


def text(words: str, x: float, y: float, look: str = "", anchor: str = "middle") -> str:
    """Return a line of text."""
    cls = f' class="{look}"' if look else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{cls}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, look: str = "s f-fill s-line") -> str:
    """Return a rounded box."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="5" class="{look}"/>'


def line(
    x: float, y: float, u: float, v: float, look: str = "s s-line", dashed: bool = False
) -> str:
    """Return a line."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x:g}" y1="{y:g}" x2="{u:g}" y2="{v:g}" class="{look}"{dash}/>'


def arrow(x: float, u: float, y: float, look: str = "ours") -> Iterator[str]:
    """Yield a horizontal arrow with its head."""
    back = 9 if u > x else -9
    yield line(x, y, u - back / 2, y, f"s s-{look}")
    yield f'<path d="M{u:g} {y:g}l{-back} -5v10z" class="f-{look}"/>'


def model(x: float, y: float, body: str, head: str = "") -> Iterator[str]:
    """Yield a model about a point: a body, and a head on it."""
    yield f'<rect x="{x - 13:g}" y="{y - 3:g}" width="26" height="15" rx="2" class="f-{body}"/>'
    if head:
        yield f'<rect x="{x - 7:g}" y="{y - 13:g}" width="14" height="8" rx="2" class="f-{head}"/>'


# The four schematics ------------------------------------------------------------------------------

CLIENTS = (28, 76, 124, 172)
OWN = ("ours", "two", "three", "four")


def served(models: Sequence[tuple[str, str]], clients: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a server with its models above its clients with theirs."""
    yield from (line(100, 52, x, 104) for x in CLIENTS)
    yield box(52, 6, 96, 46)
    for i, one in enumerate(models):
        yield from model(100 + 40 * (i - (len(models) - 1) / 2), 31, *one)
    for x, one in zip(CLIENTS, clients, strict=True):
        yield box(x - 20, 104, 40, 44)
        yield from model(x, 128, *one)


def one_model() -> Iterator[str]:
    """Yield FedAvg's."""
    return served([("gray", "gray")], 4 * [("gray", "gray")])


def private_heads() -> Iterator[str]:
    """Yield a shared body with private heads."""
    return served([("ours", "")], [("ours", head) for head in ("gray", *OWN[1:])])


def groups() -> Iterator[str]:
    """Yield a model per group."""
    ours, other = ("ours", "ours"), ("two", "two")
    return served([ours, other], [ours, other, other, ours])


def neighbors(n: int = 6) -> Iterator[str]:
    """Yield nodes that talk to their neighbors."""
    places = [(100 + 66 * cos(2 * pi * i / n), 77 - 52 * sin(2 * pi * i / n)) for i in range(n)]
    for i, step in ((i, step) for i in range(n) for step in (1, 3) if step == 1 or i == 1):
        yield line(*places[i], *places[(i + step) % n])
    for x, y in places:
        yield box(x - 20, y - 22, 40, 44)
        yield from model(x, y + 2, "ours", "ours")


class Schematic(NamedTuple):
    """A drawing with its class and what it shows."""

    draw: Callable[[], Iterator[str]]
    name: str
    says: str


SCHEMATICS = {
    "one-model": Schematic(one_model, "FedAvg", "one model for all"),
    "private-heads": Schematic(private_heads, "PersonalizedFedAvg", "shared body, private heads"),
    "groups": Schematic(groups, "ClusteredFedAvg", "a model per group"),
    "neighbors": Schematic(neighbors, "DiffusionAveraging", "neighbors only"),
}


def schematic(one: Schematic) -> Iterator[str]:
    """Yield a schematic with its words, 200 by 200 pixels."""
    yield from one.draw()
    yield text(one.name, 100, 172, "b" if one.draw is one_model else "b f-ours")
    yield text(one.says, 100, 192, "m")


def overview(theme: str) -> str:
    """Return README's picture."""
    parts = [
        f'<g transform="translate({216 * i} 0)">{"".join(schematic(one))}</g>'
        for i, one in enumerate(SCHEMATICS.values())
    ]
    return svg(848, 200, parts, theme)


def words() -> str:
    """Return what README's picture says."""
    return "; ".join(f"{one.name}: {one.says}" for one in SCHEMATICS.values()) + "."


# Flows of messages --------------------------------------------------------------------------------


class Note(NamedTuple):
    """What a party does, in lines."""

    party: int
    lines: tuple[str, ...]


class Send(NamedTuple):
    """A message from a party to another."""

    sender: int
    receiver: int
    words: str
    look: str = "ours"


class Part(NamedTuple):
    """The title of what follows."""

    words: str


def flow(
    parties: Sequence[str], steps: Sequence[Note | Send | Part], kept: Sequence[str] = ()
) -> str:
    """Return parties, their lines, and what happens between them from top to bottom."""
    wide = WIDTH / len(parties)
    at = [wide * (i + 0.5) for i in range(len(parties))]
    parts, y = [], 58.0
    for step in steps:
        match step:
            case Part(said):
                parts += [line(0, y, WIDTH, y, "s s-line", dashed=True)] if y > 60 else []
                parts.append(text(said, 0, y + 20, "b over", "start"))
                y += 34
            case Note(party, lines):
                high = LINE * len(lines) + 12
                parts.append(box(at[party] - wide / 2 + 6, y, wide - 12, high))
                for i, words in enumerate(lines):
                    parts.append(text(words, at[party], y + 20 + LINE * i))
                y += high + 12
            case Send(sender, receiver, said, look):
                middle = (at[sender] + at[receiver]) / 2
                parts.append(text(said, middle, y + 12, "" if look == "ours" else "m"))
                parts += arrow(at[sender], at[receiver], y + 22, look)
                y += 38
    lines = [line(x, 34, x, y, "s s-line") for x in at]
    heads = [box(x - wide / 2 + 6, 4, wide - 12, 32, "s f-fill s-ink") for x in at]
    heads += [text(name, x, 25, "b") for name, x in zip(parties, at, strict=True)]
    below = [text(said, 0, y + 24 + LINE * i, "m", "start") for i, said in enumerate(kept)]
    covered = [part for part in parts if part.startswith("<rect")]
    said = [part for part in parts if not part.startswith("<rect")]
    return svg(WIDTH, y + 10 + LINE * len(kept), [*lines, *covered, *heads, *said, *below])


def perma() -> str:
    """Return PerMA's messages."""
    return flow(
        ["client i", "server"],
        [
            Part("Once"),
            Note(0, ("learns a dictionary Dᵢ from Xᵢ",)),
            Send(0, 1, "Dᵢ"),
            Note(1, ("matches the atoms that", "clients have in common")),
            Part("Every round"),
            Send(1, 0, "shared atoms D"),
            Note(0, ("codes Xᵢ by D and Lᵢ, updates", "its private atoms Lᵢ")),
            Send(0, 1, "sums over samples, for D only"),
            Note(1, ("adds the sums, solves for D",)),
        ],
        (
            "Samples Xᵢ and codes are never sent,",
            "private atoms Lᵢ not once their number is chosen.",
        ),
    )


def clustered() -> str:
    """Return ClusteredFedAvg's messages."""
    return flow(
        ["client i", "server"],
        [
            Part("Once: the one-shot start"),
            Send(1, 0, "initial model"),
            Note(0, ("trains it",)),
            Send(0, 1, "its model"),
            Note(1, ("groups similar models;", "their means are w₁ … wₖ")),
            Part("Every round"),
            Send(1, 0, "w₁ … wₖ, later that of its group"),
            Note(0, ("takes the model with the", "lowest loss, and trains it")),
            Send(0, 1, "number of the group, model, loss"),
            Note(1, ("averages within each group",)),
        ],
        ("No client says which group it belongs to: its losses do.",),
    )


def relay() -> str:
    """Return the messages between neighbors."""
    return flow(
        ["node k", "server", "neighbor l"],
        [
            Note(0, ("trains its model",)),
            Send(0, 1, "model of k"),
            Note(1, ("only delivers: it", "computes nothing")),
            Send(1, 2, "model of k"),
            Send(2, 1, "model of l"),
            Send(1, 0, "model of l"),
            Note(0, ("averages its own", "and neighbors'")),
        ],
        ("With sealed=True, only the neighbor can read a message.",),
    )


def one_exchange() -> str:
    """Return the messages of FederatedRidge."""
    return flow(
        ["client i", "server"],
        [
            Part("Exchange 1: the same units everywhere"),
            Send(0, 1, "sums and squares of columns"),
            Send(1, 0, "means and deviations"),
            Part("Exchange 2"),
            Note(0, ("features Z of its samples",)),
            Send(0, 1, "ZᵀZ and ZᵀY"),
            Note(1, ("adds them up; solves for", "the model and the penalty")),
            Send(1, 0, "shared model"),
            Note(0, ("solves its own deviation",)),
        ],
        ("The deviation stays at the client.", "With secure=True the server sees totals only."),
    )


def wrapped() -> str:
    """Return what client_app does around an app."""
    parts = [
        box(96, 8, 328, 232, "s f-fill s-ours"),
        text("client_app(app)", 260, 30, "b f-ours"),
        box(138, 118, 244, 66, "s f-fill s-ink"),
        text("your app, unchanged", 260, 142, "b"),
        text("@app.train()   @app.evaluate()", 260, 166),
        text("adds the client's private arrays;", 260, 62),
        text("runs the algorithm's step, which calls:", 260, 84),
        *(line(260, 94, 260, 108), '<path d="M260 117l-5 -9h10z" class="f-line"/>'),
        text("keeps private arrays; rejects what the", 260, 208),
        text("client's own guarantees exclude", 260, 228),
        *arrow(8, 92, 76),
        text("request", 48, 66),
        *arrow(428, 512, 214),
        text("reply", 470, 204),
        text("from the", 48, 96, "m"),
        text("strategy", 48, 114, "m"),
        text("shared", 470, 234, "m"),
        text("arrays only", 470, 252, "m"),
    ]
    return svg(WIDTH, 260, parts)


def who_sees_what() -> str:
    """Return what a curious server reads under each option."""
    rows = (
        ("defaults", "update 1 … n", "each client's update"),
        ("secure=True", "masked updates", "their sum"),
        ("privacy=Noise(…)", "masked, with noise", "their noised sum"),
        ("sealed=True", "encrypted models", "nothing"),
    )
    parts = [
        text(*one) for one in (("option", 0, 18, "m", "start"), ("clients send", 244, 18, "m"))
    ]
    parts.append(text("the server reads", WIDTH, 18, "m", "end"))
    for i, (option, sent, read) in enumerate(rows):
        y = 34 + 46 * i
        parts += [line(0, y, WIDTH, y), text(option, 0, y + 29, "b", "start")]
        parts += [text(sent, 244, y + 20), *arrow(164, 326, y + 31)]
        parts.append(text(read, WIDTH, y + 29, "b f-ours" if i else "b f-two", "end"))
    return svg(WIDTH, 34 + 46 * len(rows), parts)


DIAGRAMS = {
    "perma": perma,
    "clustered": clustered,
    "relay": relay,
    "one-exchange": one_exchange,
    "client-app": wrapped,
    "who-sees-what": who_sees_what,
}


def drawn() -> dict[Path, str]:
    """Return all pictures by file."""
    found = {FOLDER / f"{name}.svg": draw() for name, draw in DIAGRAMS.items()}
    for name, one in SCHEMATICS.items():
        found[FOLDER / f"{name}.svg"] = svg(200, 200, schematic(one))
    for theme in COLORS:
        found[FOLDER.parents[1] / OVERVIEW.format(theme)] = overview(theme)
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, picture in drawn().items():
        file.write_text(picture)
