"""The clients: they train for FedAvg; then the body is frozen, and they send sums of features."""

from typing import Any

from flwr.app import ArrayRecord, Context

from flwr_perdl.clients import RidgeClient, client_app
from flwr_perdl.pytorch import features, load
from perdl_one_exchange.task import Net, load_data
from perdl_one_exchange.task import test as test_fn
from perdl_one_exchange.task import train as train_fn


class Client(RidgeClient):
    """A client of FederatedRidge, with the body that it has evaluated last, and of FedAvg."""

    def __init__(self, context: Context) -> None:
        self.net, self.config, self.loaders = Net(), context.run_config, load_data(context)
        if "net" in context.state:
            load(self.net, context.state["net"])
        samples, held_out = (features(self.net.body, loader) for loader in self.loaders)
        super().__init__(*samples, context, held_out=held_out)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        """Train the model that came on the client's own data; FederatedRidge sends none."""
        if "perdl.protocol" in config:
            return super().fit(parameters, config)
        net = load(self.net, parameters)
        train_fn(net, self.loaders[0], self.config["local-epochs"], config["lr"])
        return [one.numpy() for one in net.state_dict().values()], len(self.y), {}

    def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> tuple[float, int, dict]:
        """Evaluate the model that came, which the client keeps; then fine-tune it."""
        net = load(self.net, parameters)
        self.context.state["net"] = ArrayRecord(net.state_dict())
        loss, accuracy = test_fn(net, self.loaders[1])
        train_fn(net, self.loaders[0], self.config["tuning-epochs"], self.config["learning-rate"])
        _, tuned = test_fn(net, self.loaders[1])
        return loss, len(self.y), {"eval_acc": accuracy, "tuned_acc": tuned}


app = client_app(Client)
