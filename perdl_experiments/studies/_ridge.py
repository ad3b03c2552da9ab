"""`FederatedRidge` on rows in this process: what studies compare with methods of many rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flwr.app import Context
from numpy.typing import NDArray

from flwr_perdl.clients import RidgeClient, client_app
from flwr_perdl.protocol.records import PARTITION_ID
from flwr_perdl.regression import RidgeModel
from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import FederatedRidge


def one_exchange(
    rows: Sequence[tuple[NDArray[Any], NDArray[Any]]], level: str, **options: Any
) -> tuple[FederatedRidge, list[RidgeModel]]:
    """Return the strategy after its run, and every client's own model.

    Parameters
    ----------
    rows : sequence of tuple of ndarray
        Features, and what is predicted, of each client.
    level : str
        What is learned.
    **options
        Others of `FederatedRidge`.
    """

    def make_client(context: Context) -> RidgeClient:
        return RidgeClient(*rows[int(context.node_config[PARTITION_ID])], context)

    options |= {"num_clients": len(rows), "min_clients": 1, "fraction_evaluate": 0.0}
    strategy = FederatedRidge(level, **options)
    strategy.start(InProcessGrid(client_app(make_client), len(rows)), verbose="quiet")
    return strategy, [RidgeModel.of(strategy.result.model_of(i)) for i in range(len(rows))]
