"""quickstart: a Flower / NumPy app."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import get_weights

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy, and print the clients' accuracy after the last round."""
    num_rounds = context.run_config["num-server-rounds"]
    arrays = ArrayRecord(get_weights())

    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)

    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=num_rounds)
    accuracy = result.evaluate_metrics_clientapp[num_rounds]["eval_acc"]
    print(f"{type(strategy).__name__}: accuracy {accuracy:.3f}")
