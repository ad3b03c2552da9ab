"""Parts of strategies: private arrays, transport, sums that are secure or have noise.

What a part is, `flwr_perdl.protocol.part.Part` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr_perdl.protocol.part import Part


def sums_with(privacy: Any, secure: bool | Mapping[str, float] = False) -> list[Part]:
    """Return the part by which the server gets sums alone, if there is to be one.

    Parameters
    ----------
    privacy : Noise or None
        A guarantee of differential privacy.
    secure : bool or mapping, default False
        Whether sums are secure; options of SecAgg+.

    Returns
    -------
    list of Part
    """
    if privacy is None and secure is False:
        return []
    from flwr_perdl.privacy.noised_server import Sums

    return [Sums(privacy, secure)]


def all_private() -> Part:
    """Return the part by which clients receive a model once, and train it alone.

    Returns
    -------
    Part
    """
    from flwr_perdl.parts.private import Patterns, Private

    return Private(Patterns("private", ()), alone=True)


def model_parts(
    private: str | Sequence[str], share: str | Sequence[str], transport: Any, compression: Any
) -> list[Part]:
    """Return the parts that options of a strategy for any model ask for.

    Parameters
    ----------
    private, share : str or sequence of str
        Private or shared arrays.
    transport : {"float16"} or None
        How floats travel.
    compression : TopK or None
        How much of a change travels.

    Returns
    -------
    list of Part
    """
    from flwr_perdl.parts.private import Patterns, Private
    from flwr_perdl.parts.transport import Transport

    patterns = Patterns.of("private", private, share)
    parts: list[Part] = [] if patterns is None else [Private(patterns)]
    if transport is not None or compression is not None:
        parts.append(Transport(transport is not None, compression and compression.share))
    return parts
