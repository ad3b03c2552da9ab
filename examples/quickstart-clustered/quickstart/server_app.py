"""The server, as in Flower's PyTorch template."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy, and print the clients' accuracy after the last round."""
    num_rounds = context.run_config["num-server-rounds"]
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())

    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)

    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=num_rounds,
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
    )
    accuracy = result.evaluate_metrics_clientapp[num_rounds]["eval_acc"]
    print(f"{type(strategy).__name__}: accuracy {accuracy:.2f}")
