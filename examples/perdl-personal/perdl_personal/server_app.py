"""The server: it averages the body; the heads stay at the clients."""

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from flwr_perdl.export import save
from flwr_perdl.strategies import PersonalizedFedAvg, ServerSettings
from perdl_personal.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn the body; print the accuracy of the clients' own models."""
    config = context.run_config
    rounds = config["num-server-rounds"]
    torch.manual_seed(0)
    settings = ServerSettings(evaluate_every=rounds)
    strategy = PersonalizedFedAvg(
        ["head.*"], num_clients=config["num-nodes"], seed=1, server=settings
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
    )
    found = [measured["eval_acc"] for measured in strategy.history[-1].metrics.values()]
    print(f"accuracy {np.mean(found):.2f} on average, {min(found):.2f} at the worst client")
    if config["out"]:
        save(config["out"], strategy.result)
