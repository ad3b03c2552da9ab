"""Parts of strategies: private arrays, transport, sums that are secure or have noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flwr_perdl.protocol.part import Part

if TYPE_CHECKING:
    from flwr_perdl.network.compression import TopK
    from flwr_perdl.privacy.noise import Noise

__all__ = ["Part", "given"]


def given(
    private: str | Sequence[str] = (),
    transport: str | None = None,
    privacy: Noise | None = None,
    *,
    share: str | Sequence[str] = (),
    compression: TopK | None = None,
    secure: bool | Mapping[str, float] = False,
) -> list[Part]:
    """Return the parts that a strategy's options ask for.

    Parameters
    ----------
    private, share : str or sequence of str, default ()
        Private or shared arrays, as in `PersonalizedFedAvg`.
    transport : "float16", optional
        How floats travel.
    privacy : Noise, optional
        A guarantee of differential privacy; requests say what is summed (`Request.summed`).
    compression : TopK, optional
        How much of a change travels.
    secure : bool or mapping, default False
        Whether sums are secure; options of SecAgg+.

    Returns
    -------
    list of Part

    Raises
    ------
    ValueError, TypeError
        If an option breaks its rule.

    Examples
    --------
    FedAvg as a strategy of one's own, with private arrays and half floats:

    >>> import numpy as np
    >>> from flwr.app import Array, ArrayRecord
    >>> from flwr.client import NumPyClient
    >>> from flwr_perdl.clients import client_app
    >>> from flwr_perdl.parts import given
    >>> from flwr_perdl.simulations import InProcessGrid
    >>> from flwr_perdl.strategies import Combine, ProtocolStrategy, Request
    >>> class Mean(ProtocolStrategy):
    ...     def __init__(self, private=(), transport=None, **options):
    ...         super().__init__(*given(private, transport), **options)
    ...     def protocol(self, initial, state):
    ...         model = initial
    ...         while True:
    ...             replies = yield Request("train", model, combine=Combine(start=model))
    ...             model = replies.combined
    >>> class Adds(NumPyClient):
    ...     def fit(self, parameters, config):
    ...         return [array + 1 for array in parameters], 1, {}
    >>> start = ArrayRecord({"body": Array(np.zeros(2)), "head": Array(np.zeros(1))})
    >>> strategy = Mean(private=["head"], transport="float16", fraction_evaluate=0.0)
    >>> grid = InProcessGrid(client_app(lambda context: Adds()), 2)
    >>> strategy.start(grid, start, num_rounds=2).arrays.to_numpy_ndarrays()
    [array([2., 2.]), array([0.])]
    """
    from flwr_perdl.parts.private import Patterns, Private  # each is loaded when it is needed

    patterns = Patterns.of("private", private, share)
    parts: list[Part] = [] if patterns is None else [Private(patterns)]
    if transport is not None or compression is not None:
        from flwr_perdl.parts.transport import Transport

        share_sent = None if compression is None else compression.share
        parts.append(Transport(transport is not None, share_sent))
    if privacy is not None or secure is not False:
        from flwr_perdl.privacy.noised_server import Sums

        parts.append(Sums(privacy, secure))
    return parts


def all_private() -> Part:
    """Return the part by which clients receive a model once, and train it alone.

    Returns
    -------
    Part
    """
    from flwr_perdl.parts.private import Patterns, Private

    return Private(Patterns("private", ()), alone=True)
