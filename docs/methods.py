"""Write docs/methods.md, the table of all methods: ``python docs/methods.py``.

What stands under "write" is evaluated here, and what its class declares makes the last two columns.
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from flwr_perdl import network, strategies
from flwr_perdl.protocol.strategy import ProtocolStrategy

PAGE = Path(__file__).resolve().with_suffix(".md")

#: Papers by short name: what a row shows, and its link.
PAPERS = {
    "ATC": ("Sayed, 2014", "https://doi.org/10.1561/2200000051"),
    "Bell": ("SecAgg+, Bell et al., 2020", "https://eprint.iacr.org/2020/704"),
    "AFL": ("AFL, He et al., 2025", "https://arxiv.org/abs/2405.16240"),
    "BRIDGE": ("BRIDGE, Fang et al., 2022", "https://arxiv.org/abs/1908.08098"),
    "C-GT": ("Liao et al., 2022", "https://arxiv.org/abs/2103.13748"),
    "Chainais": ("Chainais and Richard, 2014", "https://hal.science/hal-01104781"),
    "Chen": ("Chen et al., 2015", "https://arxiv.org/abs/1402.1515"),
    "CHOCO": ("Koloskova et al., 2019", "https://arxiv.org/abs/1902.00340"),
    "ClippedGossip": ("ClippedGossip, He et al., 2022", "https://arxiv.org/abs/2202.01545"),
    "Diakonikolas": ("Diakonikolas et al., 2017", "https://arxiv.org/abs/1703.00893"),
    "Ditto": ("Li et al., 2021", "https://arxiv.org/abs/2012.04221"),
    "Exact": ("Yuan et al., 2019", "https://arxiv.org/abs/1702.05122"),
    "FedAvgM": ("FedAvgM, Hsu et al., 2019", "https://arxiv.org/abs/1909.06335"),
    "FedBN": ("Li et al., 2021", "https://arxiv.org/abs/2102.07623"),
    "FedOpt": ("FedAdam and FedYogi, Reddi et al., 2021", "https://arxiv.org/abs/2003.00295"),
    "FedPer": ("Arivazhagan et al., 2019", "https://arxiv.org/abs/1912.00818"),
    "FedProx": ("Li et al., 2020", "https://arxiv.org/abs/1812.06127"),
    "FedRep": ("Collins et al., 2021", "https://arxiv.org/abs/2102.07078"),
    "FedSA": ("Guo et al., 2025", "https://arxiv.org/abs/2410.01463"),
    "IFCA": ("Ghosh et al., 2020", "https://arxiv.org/abs/2006.04088"),
    "Laird": ("Laird and Ware, 1982", "https://doi.org/10.2307/2529876"),
    "LEAD": ("Liu et al., 2021", "https://arxiv.org/abs/2007.00232"),
    "LG": ("Liang et al., 2020", "https://arxiv.org/abs/2001.01523"),
    "Noise": ("Kairouz et al., 2021", "https://arxiv.org/abs/2102.06387"),
    "One-shot": ("Ghosh et al., 2019", "https://arxiv.org/abs/1906.06629"),
    "PENS": ("PENS, Onoszko et al., 2021", "https://arxiv.org/abs/2107.08517"),
    "PerMA": (
        "Liang et al., 2023",
        "https://proceedings.neurips.cc/paper_files/paper/2023/hash/"
        "9f6f790f28a31fba89644f09faf4e0cb-Abstract-Conference.html",
    ),
    "Rahimi": ("Rahimi and Recht, 2007", "https://papers.nips.cc/paper/3182"),
    "SGP": ("Assran et al., 2019", "https://arxiv.org/abs/1811.10792"),
    "Su": ("Su et al., 2022", "https://arxiv.org/abs/2206.07279"),
    "Tracking": ("Nedić et al., 2017", "https://arxiv.org/abs/1607.03218"),
    "Wang": ("Wang et al., 2019", "https://arxiv.org/abs/1910.10252"),
    "Zhao": ("Zhao and Sayed, 2015", "https://arxiv.org/abs/1409.6111"),
}

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
            "FedAvg, fine-tuned",
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

HEAD = """# Methods

This page lists every method with its paper and the code that runs it. Not sure which you need?
[Choose](which-algorithm.md).

The four bold methods are ours, built on the papers named. All others are published ideas that a
class or one of its options implements.
"""

TAIL = """
For IFCA, the initial arrays are four random models, stacked along a first axis.
"Any model" takes your PyTorch or NumPy app; layers are named by patterns of `net.state_dict()`.
`ring` and `directed` are a `Topology`; `norm_layers` is in `flwr_perdl.pytorch`. Privacy means
`privacy=Noise(...)`, and FedAvg with it is `PersonalizedFedAvg(share="*")`; with the others for any
model, Flower's `LocalDpMod` adds noise at the client. \\* not with every other option: the error
names them ([all options](which-algorithm.md#what-each-strategy-supports)).

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
    return "; ".join("[{}]({})".format(*PAPERS[name]) for name in names)


def written(method: Method) -> Any:
    """Return what a row says to write."""
    names = {name: getattr(room, name) for room in (strategies, network) for name in room.__all__}
    names |= {"ring": network.Topology.ring(8), "directed": network.Topology.exponential(8)}
    names |= {"norm_layers": list, "net": ["bn.weight"]}  # PyTorch need not be installed
    return eval(method.write, names)


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
    return HEAD + "".join(parts) + TAIL + options()


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.name}: {len(page().split())} words")
