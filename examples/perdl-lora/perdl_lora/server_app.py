"""The server: it compares what the sites may share of adapters and head, and with whom."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_perdl.pytorch import trainable
from flwr_perdl.strategies import ClusteredFedAvg, Ditto, PersonalizedFedAvg, ServerSettings
from perdl_lora.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train by every strategy, or by one; print the accuracy, a mean over the sites."""
    config = context.run_config
    rounds, nodes = config["num-server-rounds"], config["num-nodes"]
    torch.manual_seed(0)
    net = Net()
    state, names = net.state_dict(), trainable(net)
    arrays = ArrayRecord({name: state[name] for name in names})
    travels, all_ = (sum(state[name].numel() for name in some) for some in (names, state))
    print(f"adapters and head: {travels} of {all_} numbers")

    options = {"num_clients": nodes, "seed": 1, "server": ServerSettings(evaluate_every=rounds)}
    strategies = {
        "local training": Ditto(pull=0.0, **options),  # models that nothing pulls to the shared one
        "FedAvg": FedAvg(min_available_nodes=nodes),
        "PersonalizedFedAvg": PersonalizedFedAvg(["head.*"], **options),
        "FedSA-LoRA": PersonalizedFedAvg(["head.*", "*lora_b*"], **options),
        "ClusteredFedAvg": ClusteredFedAvg(2, **options),
    }
    for name, strategy in strategies.items():
        if config["strategy"] in ("all", name):
            result = strategy.start(
                grid=grid,
                initial_arrays=arrays,
                num_rounds=rounds,
                train_config=ConfigRecord({"lr": config["learning-rate"]}),
            )
            accuracy = result.evaluate_metrics_clientapp[rounds]["eval_acc"]
            print(f"{name}: accuracy {accuracy:.2f}")
