"""The server: a learning rate that falls from round to round, and a model per kind of client."""

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid, ServerApp

from digits_app.task import Net, load_data, test
from flwr_perdl.strategies import ClusteredFedAvg

N_CLIENTS = 16
app = ServerApp()


class FallingRate(ClusteredFedAvg):
    """Each round's learning rate is nine tenths of the last one's."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the round's learning rate."""
        now = ConfigRecord({**config, "lr": config["lr"] * 0.9 ** (server_round - 1)})
        return super().configure_train(server_round, arrays, now, grid)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy; print accuracies, and load the models into the network."""
    torch.manual_seed(0)
    net = Net()
    strategy = FallingRate(4, num_clients=N_CLIENTS, seed=1)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
    )
    for report in strategy.history:
        if report.step == "evaluate":
            by_cluster = [
                np.mean([own["eval_acc"] for own in report.metrics.values() if own["cluster"] == j])
                for j in range(strategy.k)
            ]
            print(f"round {report.round}: accuracy by cluster {np.round(by_cluster, 2)}")
    for j, arrays in enumerate(strategy.result.models):
        net.load_state_dict(arrays.to_torch_state_dict())
        members = [client for client, own in strategy.result.members.items() if own == j]
        _, accuracy = test(net, load_data(members[0], N_CLIENTS)[1])
        print(f"accuracy {accuracy:.2f} at client {members[0]}: model {j} of clients {members}")
