"""The server: it sends the first model, and then delivers what neighbors send each other."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from decentralized_app.task import Net
from flwr_perdl.diffusion import Topology
from flwr_perdl.strategies import DiffusionAveraging

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy, and print the accuracies of the nodes' own models."""
    torch.manual_seed(0)
    ring = Topology.ring(context.run_config["num-nodes"])
    strategy = DiffusionAveraging(ring, metrics=["eval_acc"])
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
    )
    for round_, accuracy in enumerate(strategy.result.curves["evaluate-eval_acc"], start=1):
        if round_ % 10 == 0:
            worst, best = accuracy.min(), accuracy.max()
            print(f"round {round_}: accuracy {worst:.1f} at the worst node, {best:.1f} at the best")
