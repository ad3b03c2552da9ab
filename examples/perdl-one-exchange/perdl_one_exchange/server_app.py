"""The server: Flower's FedAvg for some rounds, then heads in one exchange."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_perdl.strategies import FederatedRidge
from perdl_one_exchange.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn a body, then heads; print the accuracy, a mean over the clients."""
    config = context.run_config
    rounds, nodes = config["num-server-rounds"], config["num-nodes"]
    torch.manual_seed(0)
    fedavg = FedAvg(min_available_nodes=nodes)
    result = fedavg.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
    )
    measured = result.evaluate_metrics_clientapp[rounds]
    print(f"FedAvg: accuracy {measured['eval_acc']:.2f}")
    print(f"fine-tuned: accuracy {measured['tuned_acc']:.2f}")

    strategy = FederatedRidge("personal", classes=10, features=0, num_clients=nodes)
    strategy.start(grid)
    print(f"heads in one exchange: accuracy {strategy.history[-1].aggregate['accuracy']:.2f}")
