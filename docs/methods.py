"""Write docs/methods.md, the table of all methods: ``python docs/methods.py``.

What stands under "write" is evaluated here, and what its class declares makes the last two columns.
"""

from __future__ import annotations

import re
import tomllib
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import normalize

from flwr_perdl import network, strategies
from flwr_perdl.protocol.strategy import ProtocolStrategy

PAGE = Path(__file__).resolve().with_suffix(".md")
#: What each method computes, by its name; and the papers.
MATHS = tomllib.loads(PAGE.with_suffix(".toml").read_text())
BIBLIOGRAPHY = PAGE.with_name("papers.bib").read_text()
_ACCENTS = {"'": "\u0301", "`": "\u0300", "v": "\u030c", "c": "\u0327"}


class Paper(NamedTuple):
    """What a row shows of a paper, its link, and its BibTeX."""

    shown: str
    link: str
    bibtex: str


def papers() -> dict[str, Paper]:
    """Return the papers of docs/papers.bib by key."""
    found = {}
    for bibtex, key in re.findall(
        r"^(@\w+\{(.+?),\n.*?^\})", BIBLIOGRAPHY, re.MULTILINE | re.DOTALL
    ):
        field = dict(re.findall(r"^  (\w+) = \{(.*)\},$", bibtex, re.MULTILINE))
        names = [plain(one.partition(",")[0]) for one in field["author"].split(" and ")]
        who = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
        shown = ", ".join([*filter(None, [field.get("shorttitle")]), who, field["year"]])
        found[key] = Paper(shown, field["url"], bibtex)
    return found


def plain(latex: str) -> str:
    """Return a name without LaTeX's accents."""
    accent = r"\{\\(.)\{?(\w)\}?\}"
    return re.sub(accent, lambda one: normalize("NFC", one[2] + _ACCENTS[one[1]]), latex)


PAPERS = papers()

ANY, ATOMS, LINEAR, RIDGE = "any model", "dictionaries", "linear models", "ridge regression"
PERSONAL, CLUSTERS, NEIGHBORS = (
    "keep-a-part-private.md",
    "clustered-learning.md",
    "decentralized-learning.md",
)
ONE_EXCHANGE = "one-exchange.md"
SPARSE, FEW_POINTS = "model-diffusion.md", "clustered-learning.md#linear-models-few-points-each"


class Method(NamedTuple):
    """A row: a name, its guide, what to write, its papers, and which clients it takes."""

    name: str
    guide: str
    write: str
    papers: tuple[str, ...]
    clients: str


QUESTIONS = {
    "Which part of the model is shared?": (
        Method("FedPer", PERSONAL, 'PersonalizedFedAvg(["head.*"])', ("FedPer",), ANY),
        Method(
            "FedRep", PERSONAL, 'PersonalizedFedAvg(["head.*"], alternate=True)', ("FedRep",), ANY
        ),
        Method("LG-FedAvg", PERSONAL, 'PersonalizedFedAvg(["body.*"])', ("LG",), ANY),
        Method("FedBN", PERSONAL, "PersonalizedFedAvg(norm_layers(net))", ("FedBN",), ANY),
        Method("FedSA-LoRA", PERSONAL, 'PersonalizedFedAvg(["*lora_B*"])', ("FedSA",), ANY),
        Method("Ditto", PERSONAL, "Ditto(pull=0.1)", ("Ditto",), ANY),
        Method(
            "FedAvg-FT",
            "use-a-clients-model.md",
            "ClusteredFedAvg(1, fine_tune=20)",
            ("Wang",),
            ANY,
        ),
        Method(
            "Federated ridge regression (AFL)",
            ONE_EXCHANGE,
            'FederatedRidge("shared")',
            ("AFL", "Rahimi"),
            RIDGE,
        ),
        Method(
            "Head solved after training (FedBABU, LP-FT)",
            ONE_EXCHANGE,
            'FederatedRidge("personal", classes=10)',
            ("FedBABU", "LP-FT"),
            RIDGE,
        ),
        Method(
            "Random effects in one exchange",
            ONE_EXCHANGE,
            'FederatedRidge("personal")',
            (),
            RIDGE,
        ),
        Method("PerMA", "perma.md", "PerMA()", ("PerMA",), ATOMS),
    ),
    "With whom does a client learn?": (
        Method("One-shot start, then IFCA", CLUSTERS, 'ClusteredFedAvg("auto")', (), ANY),
        Method("IFCA", CLUSTERS, 'ClusteredFedAvg(4, start="given")', ("IFCA",), ANY),
        Method(
            "FedProx within clusters",
            CLUSTERS,
            "ClusteredFedAvg(4, proximal_mu=0.1)",
            ("FedProx",),
            ANY,
        ),
        Method("Groups from sums", ONE_EXCHANGE, 'FederatedRidge("groups")', (), RIDGE),
        Method("FedMD (moment descent, not distillation)", FEW_POINTS, "FedMD(4)", ("Su",), LINEAR),
        Method("FedX with clustering", FEW_POINTS, "FedX(4)", ("Su",), LINEAR),
        Method("One-shot clustering", FEW_POINTS, "OneShotClustering(4)", ("One-shot",), LINEAR),
    ),
    "Without a server?": (
        Method("ATC diffusion", NEIGHBORS, 'DiffusionAveraging(ring, method="atc")', ("ATC",), ANY),
        Method("Exact diffusion", NEIGHBORS, "DiffusionAveraging(ring)", ("Exact",), ANY),
        Method(
            "Gradient tracking",
            NEIGHBORS,
            'DiffusionAveraging(ring, method="gradient_tracking")',
            ("Tracking",),
            ANY,
        ),
        Method(
            "Push-sum (SGP)",
            NEIGHBORS,
            'DiffusionAveraging(directed, method="push_sum")',
            ("SGP",),
            ANY,
        ),
        Method(
            "CHOCO-SGD",
            NEIGHBORS,
            'DiffusionAveraging(ring, method="atc", compression=TopK(0.1))',
            ("CHOCO",),
            ANY,
        ),
        Method(
            "C-GT", NEIGHBORS, "DiffusionAveraging(ring, compression=TopK(0.1))", ("C-GT",), ANY
        ),
        Method(
            "LEAD",
            NEIGHBORS,
            'DiffusionAveraging(ring, method="exact_diffusion", compression=RandomQuantization(4))',
            ("LEAD",),
            ANY,
        ),
        Method(
            "Groups of neighbors",
            "groups-without-a-server.md",
            'DiffusionAveraging(ring, groups="auto")',
            (),
            ANY,
        ),
        Method("Diffusion over data", SPARSE, "DataDiffusion", ("Chainais",), ATOMS),
        Method("Diffusion over models", SPARSE, "ModelDiffusion", ("Chen",), ATOMS),
    ),
}

HEAD = """# All methods

This page lists every method with its paper and the code that runs it. Not sure which you need?
[Which method](which-algorithm.md).

The four bold methods are ours, built on the papers named. All others are published ideas that a
class or one of its options implements.
"""

TAIL = """
For IFCA, the initial arrays are four random models, stacked along a first axis.
"Any model" takes your PyTorch or NumPy app; layers are named by patterns of `net.state_dict()`.
`ring` and `directed` are a `Topology`; `flwr_perdl.pytorch` has `norm_layers`, and `features`, what
a trained body makes of samples, by which a head is solved. Privacy means `privacy=Noise(...)`, and
FedAvg with it is `PersonalizedFedAvg(share="*")`; with the others for any model, Flower's
`LocalDpMod` adds noise at the client. \\* not with every other option: the error
names them ([all options](which-algorithm.md#what-each-strategy-supports)).

What each method minimizes, computes and sends, its deviations from the paper, and BibTeX are on the
page of its class: [strategies](reference/flwr_perdl.strategies/index.md),
[networks](reference/flwr_perdl.network/index.md).

## Cite

Cite this software by [CITATION.cff](../CITATION.cff), and the paper whose algorithm you ran:
[papers.bib](papers.bib).

```bibtex
SOFTWARE
```

## Options

"""

#: Option, what it implements, papers; whose strategies take it is looked up.
OPTIONS = (
    ("secure", "secure sums", ("Bell",)),
    ("privacy", "differential privacy: distributed discrete Gaussian noise", ("Noise",)),
    (
        "robust",
        "malicious (Byzantine) clients: a spectral filter; between neighbors clipping or trimming",
        ("Diakonikolas", "ClippedGossip", "BRIDGE"),
    ),
    ("optimizer", "server optimizers", ("FedAvgM", "FedOpt")),
    ("sealed", "end-to-end encryption between neighbors", ()),
)
#: Methods of ours, and the papers that they are closest to.
OURS = {
    "One-shot start, then IFCA": ("One-shot", "IFCA", "Su"),
    "Groups of neighbors": ("Zhao", "PENS"),
    "Random effects in one exchange": ("Laird", "AFL"),
    "Groups from sums": ("IFCA", "AFL"),
}


def links(names: tuple[str, ...]) -> str:
    """Return papers as links."""
    return "; ".join("[{}]({})".format(*PAPERS[name][:2]) for name in names)


def written(method: Method) -> Any:
    """Return what a row says to write."""
    names = {name: getattr(room, name) for room in (strategies, network) for name in room.__all__}
    names |= {"ring": network.Topology.ring(8), "directed": network.Topology.exponential(8)}
    names |= {"norm_layers": list, "net": ["bn.weight"]}  # PyTorch need not be installed
    return eval(method.write, names)


def sources(method: Method) -> tuple[str, ...]:
    """Return the keys of a method's papers; of ours, of those that it is closest to."""
    return (*OURS.get(method.name, ()), *method.papers)


def methods_of(name: str) -> list[Method]:
    """Return the methods that a class of this name has."""
    every = [one for rows in QUESTIONS.values() for one in rows]
    return [one for one in every if re.match(rf"{name}\b", one.write)]


def supports(strategy: Any, option: str) -> str:
    """Return what a strategy declares of an option."""
    if not isinstance(strategy, ProtocolStrategy) or option in strategy.unsupported:
        return "no"
    return "yes *" if any(option in need.given for need in strategy.needs) else "yes"


def markdown(columns: str, rows: list[list[str]]) -> str:
    """Return a table; its columns' titles are separated by commas."""
    titles = columns.split(", ")
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def table(methods: tuple[Method, ...]) -> str:
    """Tabulate the methods that answer a question."""
    rows = []
    for method in methods:
        made = written(method)
        name = f"[{method.name}]({method.guide})"
        papers = links(method.papers)
        if method.name in OURS:
            name, papers = f"**{name}**", f"ours; after {links(OURS[method.name])}"
        cells = [supports(made, option) for option in ("secure", "privacy")]
        rows.append([name, f"`{method.write}`", papers, method.clients, *cells])
    return markdown("method, write, paper, clients, secure sums, privacy", rows)


def options() -> str:
    """Tabulate the options, with the strategies whose constructor takes them."""
    made = [type(written(one)) for methods in QUESTIONS.values() for one in methods]
    kinds = {one.__name__: one for one in made if issubclass(one, ProtocolStrategy)}
    rows = []
    for option, words, papers in OPTIONS:
        takers = [f"`{name}`" for name, one in kinds.items() if option in signature(one).parameters]
        said = f"{words} ({links(papers)})" if papers else words
        rows.append([f"`{option}`", said, ", ".join(takers)])
    return markdown("option, what it implements, strategies", rows)


def page() -> str:
    """Return the page."""
    parts = [f"\n## {question}\n\n{table(methods)}" for question, methods in QUESTIONS.items()]
    return HEAD + "".join(parts) + TAIL.replace("SOFTWARE", software()) + options()


def software() -> str:
    """Return BibTeX of this software, from CITATION.cff."""
    citation = PAGE.parent.with_name("CITATION.cff").read_text()
    preferred = citation.partition("preferred-citation:")[2]
    said = re.findall(r'^  (title|version|year): "?(.*?)"?$', preferred, re.MULTILINE)
    fields = {"author": "{The flwr-perdl developers}", **dict(said)}
    lines = [f"  {key} = {{{value}}}," for key, value in fields.items()]
    return "\n".join(["@software{flwr-perdl,", *lines, "}"])


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.name}: {len(page().split())} words")
