"""What users read is in the words of their field: pages, docstrings, messages and help texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: What is not written, and what is. Names in code, such as `error_alone` and `cameras`, are stable.
WORDS = {
    r"kinds? of (clients|nodes|sites)|(two|four|k|several|unknown) kinds(?! of)": "groups",
    r"(clients?|nodes?|sites?|trains?|trained|learns?|learned) alone": "local training",
    r"liars?|(clients|nodes|neighbors|who|that) (may )?lie": "malicious (Byzantine) clients",
    r"promises?|promised": "guarantee",
    r"lengths? of (a|the|its) steps?|step length": "learning rate",
    r"floats (up|down|per)": "communication, in MB",
    r"trained further|trains? further": "fine-tuned",
    r"own names (of|for) (the )?class|names the classes": "label permutation",
    r"(clients|nodes|sites) differ": "heterogeneous clients, non-IID data",
    r"few classes": "label skew",
    r"(?<!matching )(?<!component )pursuit": "orthogonal matching pursuit (OMP)",
    r"P[0-3]": "the paper's short name",
}
NO_ZERO = r"(?<![\w.)\]\\/*%\"'-])\.\d"
#: Another sense (types of non-IID data, a question), an option's value, a parameter's name.
ALLOWED = r"""kinds of heterogeneity|(do my|how your) clients differ|["']pursuit["']|liars :"""


def texts() -> Iterator[tuple[str, str]]:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        yield str(page.relative_to(ROOT)), re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text())
    for study in (ROOT / "perdl_experiments" / "studies").glob("*.toml"):
        yield str(study.relative_to(ROOT)), re.sub(r"\{[^{}]*\}", "", study.read_text())
    for file in [*(ROOT / "flwr_perdl").rglob("*.py"), *(ROOT / "perdl_experiments").rglob("*.py")]:
        values = [getattr(node, "value", "") for node in ast.walk(ast.parse(file.read_text()))]
        said = [value for value in values if isinstance(value, str) and " " in value]
        yield str(file.relative_to(ROOT)), "\n".join(one.partition("Examples\n")[0] for one in said)


def test_all_text_is_in_the_words_of_its_readers() -> None:
    wrong = []
    for place, text in texts():
        prose = re.sub(r"\s+", " ", re.sub(rf"``[^`]*``|`[^`]*`|{ALLOWED}|\]\([^)]*\)", "", text))
        for word, right in WORDS.items():
            if re.search(rf"(?i)\b({word})\b", prose):
                wrong.append(f"{place}: instead of {word} write {right}")
        wrong += [
            f"{place}: write 0 before {odd}" for odd in re.findall(f".{{20}}{NO_ZERO}", prose)
        ]
    assert not wrong, "\n".join(wrong)
