"""The server: one model per group of clients."""

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_perdl.export import save
from flwr_perdl.strategies import ClusteredFedAvg, ServerSettings
from perdl_clustered.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn the models; print each one's clients and accuracy."""
    config = context.run_config
    rounds = config["num-server-rounds"]
    torch.manual_seed(0)
    settings = ServerSettings(evaluate_every=rounds)
    strategy = ClusteredFedAvg(
        config["num-clusters"], num_clients=config["num-nodes"], seed=1, server=settings
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
    )
    measured = strategy.history[-1].metrics
    for j in range(len(strategy.result.models)):
        members = [client for client in measured if strategy.result.members[client] == j]
        accuracy = np.mean([measured[client]["eval_acc"] for client in members])
        print(f"model {j}: accuracy {accuracy:.2f}, clients {members}")
    if config["out"]:
        save(config["out"], strategy.result)
