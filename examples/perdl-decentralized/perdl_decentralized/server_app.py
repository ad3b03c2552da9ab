"""The server: it sends the first model, and then delivers what neighbors send each other."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_perdl.network import Topology
from flwr_perdl.strategies import DiffusionAveraging

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Let the nodes of a ring learn; print the accuracies of their own models."""
    config = context.run_config
    rounds = config["num-server-rounds"]
    ring = Topology.ring(config["num-nodes"])
    strategy = DiffusionAveraging(ring, metrics=["eval_acc"], evaluate_every=rounds)
    first = ArrayRecord([np.zeros((64, 10)), np.zeros(10)])
    strategy.start(grid=grid, initial_arrays=first, num_rounds=rounds)
    found = strategy.averaged.curves["evaluate-eval_acc"][-1]
    print(f"accuracy {found.min():.2f} at the worst node, {found.max():.2f} at the best")
