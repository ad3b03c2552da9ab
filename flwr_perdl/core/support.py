"""What an algorithm supports is declared; options are checked against it, by one function.

An algorithm has two declarations: ``unsupported``, the reason for each thing that it does not
support, and ``needs``, what an option demands of others. docs/which-algorithm.md shows both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Reasons of several algorithms: against robust rules where the server gets sums, secure sums
#: without privacy, and reuse of replies.
JUDGED = "a robust rule judges single replies, of which the server gets a sum only"
SECURE = "only privacy bounds what a client sends, as a secure sum needs"
OLD = "a reply is a step from a model that has changed since"


class Needs(NamedTuple):
    """What an option must be, or must not be, where one of some others is given.

    Attributes
    ----------
    given : tuple of str
        The others, which are given unless they are None or False.
    option : str
        The option's name.
    values : tuple
        What it must be one of.
    why : str
        The reason, after "since".
    never : bool
        Whether it must be none of the ``values`` instead.
    """

    given: tuple[str, ...]
    option: str
    values: tuple[Any, ...]
    why: str
    never: bool = False

    def says(self, given: str) -> str:
        """Return the rule and its reason."""
        values = " or ".join(map(repr, self.values))
        must = "must not be" if self.never else "must be"
        return f"{self.option} {must} {values} with {given}, since {self.why}"


def check_support(
    owner: str,
    options: Mapping[str, Any],
    unsupported: Mapping[str, str] | None = None,
    needs: Sequence[Needs] = (),
) -> None:
    """Raise an error that names the option, the rule and the value if one breaks a declaration.

    Raises
    ------
    TypeError
        If an option is one that the owner does not support.
    ValueError
        If an option is not what another one needs.
    """
    for name, why in ({} if unsupported is None else unsupported).items():
        if name in options:
            raise TypeError(f"{owner} has no option {name!r}, since {why}, got {options[name]!r}.")
    for need in needs:
        for name in need.given:
            value = options[need.option]
            if options[name] not in (None, False) and (value in need.values) == need.never:
                raise ValueError(f"{need.says(name)}, got {value!r}.")
