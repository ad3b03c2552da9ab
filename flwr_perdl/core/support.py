"""What an algorithm supports is declared; options are checked against it, by one function.

An algorithm has two declarations: ``unsupported``, the reason for each thing that it does not
support, and ``needs``, what an option demands of others. docs/which-algorithm.md shows both.
"""

from __future__ import annotations

from collections.abc import Mapping
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

    def __str__(self) -> str:
        """Return the rule and its reason."""
        rule = f"must {'not ' * self.never}be {' or '.join(map(repr, self.values))}"
        return f"{self.option} {rule} with {' or '.join(self.given)}, since {self.why}"


def check_support(algorithm: Any, options: Mapping[str, Any]) -> None:
    """Raise an error that names the option, the rule and the value if one breaks a declaration.

    Parameters
    ----------
    algorithm : object
        What has the two declarations.
    options : mapping of str to object
        The options that are given, by name, each checked on its own before.

    Raises
    ------
    TypeError
        If an option is one that the algorithm does not support.
    ValueError
        If an option is not what another one needs.
    """
    for name in [name for name in options if name in algorithm.unsupported]:
        reason, name_of = algorithm.unsupported[name], type(algorithm).__name__
        raise TypeError(f"{name_of} has no option {name!r}, since {reason}, got {options[name]!r}.")
    for need in algorithm.needs:
        given = any(options.get(name) not in (None, False) for name in need.given)
        if given and (options[need.option] in need.values) == need.never:
            raise ValueError(f"{need}, got {options[need.option]!r}.")
