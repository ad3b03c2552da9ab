"""The API reference: a page for every public name, made from its docstring while MkDocs builds.

`mkdocs.yml` names this file twice: as a hook that writes the pages and links names to them, and as
an extension of Griffe that turns docstrings into Markdown. Of the library only the experiments are
imported, for their options.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from html import unescape
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "reference"
#: The methods of docs/methods.md, and what their formulas have in common.
methods = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "methods.py")))
#: What strategies support.
figures = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "figures.py")))
NOTATION = (
    "`$F_i$` is the loss of client `$i$`, `$p_i$` its share of all samples, `$T_i$` its app's own "
    "training; between neighbors, `$a_{kl}$` is the weight of `$l$` at `$k$`."
)
#: Titles below them.
DEVIATIONS, PARTIES = "Deviations from the papers", "What each party receives"
PAPERS_NOTATION = "Notation of the papers"

#: Packages and their titles, in the order of the navigation: what most users need comes first.
PACKAGES = {
    "flwr_perdl.estimators": "Estimators",
    "flwr_perdl.strategies": "Strategies",
    "flwr_perdl.clients": "Clients",
    "flwr_perdl.simulations": "Simulations",
    "flwr_perdl.export": "Export",
    "flwr_perdl.pytorch": "PyTorch",
    "flwr_perdl.network": "Networks",
    "flwr_perdl.dictionary": "Dictionary learning",
    "flwr_perdl.regression": "Regression",
    "flwr_perdl.privacy": "Privacy",
    "flwr_perdl.parts": "Parts of strategies",
    "flwr_perdl.core.checks": "Argument checks",
    "flwr_perdl.core.files": "Files",
    "flwr_perdl.random": "Random numbers",
    "flwr_perdl.protocol.records": "Records",
    "flwr_perdl.core.threads": "Threads",
    "perdl_experiments": "Experiments",
    "perdl_experiments.estimator_plots": "Plots",
}

#: The order of pages: strategies as in the table of methods, all other names by the alphabet.
ORDER = (
    *("Diagnosis", "PerMA", "PersonalizedFedAvg", "Ditto", "ClusteredFedAvg", "FedX", "FedMD"),
    *("OneShotClustering", "FederatedRidge", "DiffusionAveraging", "NeighborRelay"),
)

#: What a class's page starts with, below its constructor.
FIRST = ("fit", "start", "run")

#: Methods that a user neither calls nor writes, here or with the class's name: not on pages.
INTERNAL = (
    *("get_metadata_routing", "open", "settings", "take_names", "summary", "begin_run"),
    *("configure_train", "configure_evaluate", "aggregate_train", "aggregate_evaluate"),  # Flower
    *("create_message", "get_node_ids", "pull_messages", "push_messages", "send_and_receive"),
    *("set_run", "get_properties", "check_evaluation"),
    *("after_protocol", "needs", "unsupported", "warns", "half", "only", "models_for"),
    *("needed", "private_names", "take_step", "trained_by"),
    *("whole", "ModelStrategy.shared", "exchanges", "reports_of"),
    *("Combine.begun", "Combine.changes", "Combine.check", "Combine.expected"),
    *("Combine.magnitudes", "Request.max_bytes", "Request.models", "Replies.sharing"),
    *("Averaging.start", "Averaging.adapt", "Averaging.message", "Averaging.combine"),
    *("Averaging.observe", "Momentum.begin", "Momentum.step", "Adam.begin", "Adam.step"),
    *("SecureMean.begin", "SecureMean.config", "SecureMean.gather"),
    *("RidgeClient.moments", "RidgeClient.sums", "RidgeClient.errors", "RidgeClient.solve"),
    "RidgeClient.average",
    *("answer", "choose", "cluster", "exchange", "first_dictionary", "initialize", "measure"),
    *("own_atoms", "may_send", "DictionaryClient.update", "LearnerClient.global_atoms"),
    *("LearnerClient.result", "ServerSettings.of", "level", "steps", "weights"),
    *("adapts", "sent_options"),
    *("most_clusters", "Objective.at", "per_atom", "own_forms", "own_weights", "modulus"),
    *("awake", "broken", "delays", "links", "passable", "turn", "check_linked", "adapted"),
    *("neighbor_terms", "argmax", "decode", "encode", "levels"),
)

#: The page of every name that stands for one object only.
_page_of: dict[str, str] = {}


class Docstrings(griffe.Extension):
    """Read what the docstrings say as Markdown, and attributes' ``#:`` comments as docstrings."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that Griffe has just read."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Take the comment above an attribute, or above the block of constants that it is in."""
        if attr.docstring or not isinstance(attr.filepath, Path) or not attr.lineno:
            return
        lines = attr.filepath.read_text().splitlines()[: attr.lineno - 1]
        while attr.parent.is_module and lines and re.match(r"\w+ = ", lines[-1]):
            lines.pop()
        comment: list[str] = []
        while lines and lines[-1].strip().startswith("#:"):
            comment.insert(0, lines.pop().strip().removeprefix("#:").strip())
        if comment:
            text = to_markdown("\n".join(comment))
            attr.docstring = griffe.Docstring(text, parent=attr, parser="numpy")


def to_markdown(text: str) -> str:
    """Return a docstring with its roles, simple tables and guides in Markdown."""
    text = re.sub(r":\w+:`[~.]?([^`]+)`", r"`\1`", text)
    text = re.sub(r"\bdocs/([\w-]+)\.md(#[\w-]+)?", r"[\1](../../\1.md\2)", text)
    lines, out = text.splitlines(), []
    while lines:
        if not re.fullmatch(r"\s*=+(?: +=+)+\s*", lines[0]):
            out.append(lines.pop(0))
            continue
        rules = [i for i, line in enumerate(lines) if line.strip() == lines[0].strip()][:3]
        spans = [match.span() for match in re.finditer("=+", lines[0])]
        starts = [start for start, _ in spans]
        rows: list[list[str]] = []
        header = len(rules) == 3
        for line in lines[1 : rules[-1]]:
            if line.strip() == lines[0].strip():
                continue
            cells = [line[a:b].strip() for a, b in pairwise([*starts, None])]
            is_open = bool(rows) and rows[-1][0].count("``") % 2 == 1
            if (cells[0] and not is_open) or not rows:
                rows.append(cells)
            else:  # a row goes on
                rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)]
        rows = rows if header else [[""] * len(starts), *rows]
        rows.insert(1, ["---"] * len(starts))
        indent = " " * starts[0]
        out += [f"{indent}| {' | '.join(map(_cell, row))} |" for row in rows]
        lines = lines[rules[-1] + 1 :]
    return "\n".join(out)


def _cell(text: str) -> str:
    """Return a table's cell whose bars outside of code do not end it."""
    parts = re.split(r"(``.*?``|`.*?`)", text)
    return "".join(part if part.startswith("`") else part.replace("|", r"\|") for part in parts)


def public_names() -> dict[str, list[griffe.Object | griffe.Alias]]:
    """Return what each package lists in ``__all__``, or else its functions without underscore."""
    loader = griffe.GriffeLoader(
        search_paths=[ROOT],
        extensions=griffe.load_extensions(Docstrings),
        docstring_parser="numpy",
    )
    for package in ("flwr_perdl", "perdl_experiments"):
        loader.load(package)
    loader.resolve_aliases(external=False)
    found = {}
    first: dict[str, griffe.Object | griffe.Alias] = {}  # a name of two packages: the first's page
    for package in PACKAGES:
        module = loader.modules_collection[package]
        names = module.exports or [name for name in module.functions if name[0] != "_"]
        ordered = sorted(sorted(names), key=lambda name: _place(name, ORDER))
        members = [_own(loader.modules_collection[f"{package}.{name}"]) for name in ordered]
        found[package] = [first.setdefault(one.canonical_path, one) for one in members]
    return found


def _own(one: griffe.Object | griffe.Alias) -> griffe.Object | griffe.Alias:
    """Return the function of a module that has its name, such as `warm_start`, or the object."""
    return one.members[one.name] if one.is_module else one


def _shown(one: griffe.Object | griffe.Alias) -> list[str]:
    """Return the members that a class's page has, what most users call first.

    A method that overrides another and has no section of its own is described there.
    """
    classes = [one, *one.mro()]
    shown = []
    for name, member in one.all_members.items():
        homes = [base for base in classes if name in base.members]
        hidden = name[0] == "_" or not homes or not member.has_docstring
        if hidden or name in INTERNAL or f"{homes[0].name}.{name}" in INTERNAL:
            continue
        if member.is_function and len(homes) > 1 and "\n---" not in member.docstring.value:
            continue
        shown.append(name)
    return sorted(shown, key=lambda name: _place(name, FIRST))


def _place(name: str, order: tuple[str, ...]) -> int:
    """Return where a name stands in an order, which the others follow."""
    return order.index(name) if name in order else len(order)


def _page(one: griffe.Object | griffe.Alias) -> str:
    """Return the text of a name's page, from which the handler makes the rest."""
    lines = [f"::: {one.path}"]
    if one.is_class:
        shown = _shown(one)
        lines += ["    options:", "      group_by_category: false", f"      members: {shown}"]
        lines += ["      inherited_members: false"] * (not shown)  # which an empty list lets in
    if one.name in figures.learners():
        lines += _unsupported(figures.learners()[one.name])
    if methods.methods_of(one.name):
        lines += _maths(one)
    return "\n".join(lines) + "\n"


def _unsupported(strategy: Any) -> Iterator[str]:
    """Yield what a strategy does not support, and why."""
    yield "\n## What it does not support\n\n| | why |\n|---|---|"
    for name, title in figures.SUPPORT.items():
        if why := strategy.unsupported.get(name):
            yield f"| {title} | {_cell(why)} |"


def _maths(one: griffe.Object | griffe.Alias) -> Iterator[str]:
    """Yield what a class's methods compute, their deviations from the papers, who sees what."""
    modules = [one.canonical_path.rpartition(".")[0]]
    cited: dict[str, None] = {}
    ours = {each: methods.MATHS[each.name] for each in methods.methods_of(one.name)}
    yield "\n## Mathematics\n"
    if any(
        re.search(r"F_[ik]|T_[ik]", each["objective"] + each["update"]) for each in ours.values()
    ):
        yield f"{NOTATION}\n"
    for method, maths in ours.items():
        modules += [name for name in maths.get("modules", ()) if name not in modules]
        cited |= dict.fromkeys(methods.sources(method))
        papers = methods.links(methods.sources(method))
        yield f"### {method.name}\n\n`{method.write}`{f' ({papers})' if papers else ''}\n"
        yield f"Objective:\n\n`$${maths['objective']}$$`\n"
        steps = re.split(r"[,;:]? \\quad ", maths["update"])
        yield "In a round:\n\n" + "\n\n".join(f"`$${one}$$`" for one in steps) + "\n"
        yield f"**Sent.** {_inline(maths['sent'])}\n"
        if "deviation" in maths:
            yield f"**Deviation.** {_inline(maths['deviation'])}\n"
    parts = {name: _parts(one.package.modules_collection[name]) for name in modules}
    for title in (
        "Deviations from the papers",
        "What each party receives",
        "Notation of the papers",
    ):
        found = [part[title] for part in parts.values() if title in part]
        if found:
            yield f"## {title}\n"
            yield "\n\n".join(found) + "\n"
    yield "## BibTeX\n\n```bibtex"
    yield from (methods.PAPERS[key].bibtex for key in cited)
    yield "```"


def _inline(text: str) -> str:
    """Return a sentence with its formulas as code, which `on_page_content` draws."""
    return re.sub(r"(\$.+?\$)", r"`\1`", text)


def _parts(module: griffe.Module) -> dict[str, str]:
    """Return the parts of a module's docstring below its first line, by title."""
    text = module.docstring.value.partition("\n")[2]
    starts = r"(?:(?<=\s)|^)(?=(?:Deviations?\b|Not in the\s+paper|\**What each party receives))"
    parts: dict[str, list[str]] = {}
    title = PAPERS_NOTATION
    for paragraph in filter(str.strip, re.split(rf"\n\n|{starts}", text)):
        if re.match(r"Deviation|Not in the\s+paper", paragraph):
            title = DEVIATIONS
            paragraph = re.sub(r"^Deviations?[\w ]*?(, and why)?[:.]\s*", "", paragraph)
        elif re.match(r"\**What each party receives", paragraph):
            title = PARTIES
            paragraph = re.sub(r"^\**What each party receives[.:]\**\s*", "", paragraph)
        elif not paragraph.startswith(("- ", "  ")):
            title = PAPERS_NOTATION
        parts.setdefault(title, []).append(paragraph[:1].upper() + paragraph[1:])
    return {title: "\n\n".join(one) for title, one in parts.items()}


def _folder(one: griffe.Object | griffe.Alias) -> str:
    """Return the package whose page an object is on."""
    path = one.path.rpartition(".")[0]
    return path if path in PACKAGES else path.rpartition(".")[0]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference's pages, and list them in the navigation."""
    names = public_names()
    count: dict[str, int] = {}
    for package, members in names.items():
        for one in members:
            own = _folder(one) == package
            count[one.name] = count.get(one.name, 0) + own
    callables = [one for members in names.values() for one in members if not one.is_attribute]
    parameters = {parameter.name for one in callables for parameter in one.parameters}
    navigation: list[Any] = []
    overview = ["# API reference", "", "Every public name, by package.", ""]
    overview += ["| package | what it has |", "|---|---|"]
    for package, title in PACKAGES.items():
        module = names[package][0].package.modules_collection[package]
        index = f"{FOLDER}/{package}/index.md"
        pages: list[Any] = [index]
        constants = [one for one in names[package] if one.is_attribute]
        for one in names[package]:
            if _folder(one) != package:
                continue  # its page is in another package
            target = f"{FOLDER}/{package}/{one.name}.md"
            if one.is_attribute:
                target = index
            else:
                pages.append({one.name: target})
                _add(files, config, target, _page(one))
            is_name = not one.name.islower() or "_" in one.name  # and no word, nor a parameter
            if count[one.name] == 1 and is_name and one.name not in parameters:
                _page_of[one.name] = target
        _add(files, config, index, _index(package, title, module, names[package], constants))
        navigation.append({title: pages})
        overview.append(f"| [`{package}`]({package}/index.md) | {_summary(module)} |")
    _add(files, config, f"{FOLDER}/index.md", "\n".join(overview))
    _add(files, config, f"{FOLDER}/options.md", _options())
    _fill(config.nav, [f"{FOLDER}/index.md", *navigation, f"{FOLDER}/options.md"])
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Give the table of what strategies support its reasons, which a pointer shows."""
    return markdown.replace(figures.support(), figures.support(reasons=True))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Link the public names in code, outside of blocks, headings and links; let long code break."""

    def link(match: re.Match[str]) -> str:
        target = _page_of.get(match[1])
        if target is None or target == page.file.src_uri:
            return match[0]
        url = get_relative_url(target.removesuffix(".md") + ".html", page.url)
        return f'<a class="name" href="{url}">{match[0]}</a>'

    html = re.sub(r"<code>(\$\$?)(.+?)\1</code>", _formula, html)
    html = re.sub(r"(?<=object-name )([^>]*>)([\w.]+)</span>", _dotted, html)
    html = re.sub(r'(?<!">)(?<!<pre>)<code>(\w+)</code>', link, html)
    return re.sub(r"<code>([^<\n]{40,})</code>", _breakable, html)


def _formula(code: re.Match[str]) -> str:
    """Return a formula as MathML, which browsers draw without a script."""
    latex = unescape(code[2]).replace(r"\arg", r"\mathrm{arg}\,")  # latex2mathml has none
    if code[1] == "$":
        return convert(latex)
    below = re.sub(r"\\min_(\{.*?\}|\w)", r"\\underset{\1}{\\min}", latex)
    return f'<span class="formula" tabindex="0">{convert(below, display="block")}</span>'


def _dotted(name: re.Match[str]) -> str:
    """Return a heading's name that may break at its dots."""
    return f"{name[1]}{name[2].replace('.', '.<wbr>')}</span>"


def _breakable(code: re.Match[str]) -> str:
    """Return code that may break at its spaces, or where it names a test, at its underscores."""
    text = re.sub("(::|_)", r"\1<wbr>", code[1]) if "::" in code[1] else code[1]
    return f'<code class="long">{text}</code>'


def _index(
    package: str,
    title: str,
    module: griffe.Module,
    names: list[griffe.Object | griffe.Alias],
    constants: list[griffe.Object | griffe.Alias],
) -> str:
    """Return a package's page: its names, by the file that defines them."""

    def home(one: griffe.Object | griffe.Alias) -> str:
        return one.canonical_path.rpartition(".")[0]

    lines = [f"# {title}", "", f"`{package}`: {module.docstring.value}", ""]
    objects = [one for one in names if not one.is_attribute]
    files = {path: at for at, path in reversed(list(enumerate(map(home, objects))))}
    for path, those in groupby(sorted(objects, key=lambda one: files[home(one)]), home):
        group = list(those)
        source = module.modules_collection[path]
        summary, _, rest = source.docstring.value.partition("\n")
        if path != package:
            lines += [f"## {summary.rstrip('.')}", ""]
        lines += ["| name | |", "|---|---|"]
        for one in group:
            target = f"../{_folder(one)}/{one.name}.md"
            lines.append(f"| [`{one.name}`]({target}) | {_summary(one)} |")
        elsewhere = path.rpartition(".")[2].startswith("_") or path == package
        elsewhere |= any(methods.methods_of(one.name) for one in group)  # on their own pages
        if rest.strip() and not elsewhere:
            indented = "\n".join(f"    {line}".rstrip() for line in rest.strip().splitlines())
            lines += ["", '??? note "Notation and implementation"', "", indented]
        lines.append("")
    if constants:
        lines += ["## Constants and types", ""]
        lines += [f"::: {one.path}\n    options:\n      heading_level: 3\n" for one in constants]
    return "\n".join(lines)


def _options() -> str:
    """Return the page of the experiments: what each is, its options, its data and its metrics."""
    sys.path.insert(0, str(ROOT))
    from perdl_experiments.studies import EXPERIMENTS

    lines = ["# Options of the experiments", "", "Each is given as `-o key=value`."]
    for name, one in EXPERIMENTS.items():
        lines += ["", f"## {name}", "", f"{one.about}.", ""]
        lines += ["| option | default | |", "|---|---|---|"]
        for key, option in one.options.items():
            lines.append(f"| `{key}` | `{option.default}` | {_cell(option.help)} |")
        lines += ["", to_markdown(one.code.__doc__ or "")]
    return "\n".join(lines)


def _summary(one: griffe.Object | griffe.Alias) -> str:
    """Return the first line of a docstring, its links as text."""
    first = one.docstring.value.partition("\n")[0] if one.docstring else ""
    return _cell(re.sub(r"\[([\w-]+)\]\(\.\./[^)]*\)", r"\1", first))


def _add(files: Files, config: MkDocsConfig, uri: str, content: str) -> None:
    files.append(File.generated(config, uri, content=content))


def _fill(nav: Any, pages: list[Any]) -> None:
    """Put pages in the place of the navigation's entry ``API: reference``."""
    for entry in nav if isinstance(nav, list) else ():
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if value == FOLDER:
                entry[key] = pages
            _fill(value, pages)
