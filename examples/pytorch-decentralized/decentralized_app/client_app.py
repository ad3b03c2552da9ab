"""The nodes: train and evaluate handlers, as for FedAvg."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from decentralized_app.task import Net, load_data
from decentralized_app.task import test as test_fn
from decentralized_app.task import train as train_fn
from flwr_perdl.clients import client_app

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model that came on the node's own images."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    node = context.node_config
    loader, _ = load_data(int(node["partition-id"]), int(node["num-partitions"]))
    epochs, lr = context.run_config["local-epochs"], msg.content["config"]["lr"]
    loss = train_fn(net, loader, epochs, lr)

    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    arrays = ArrayRecord(net.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model that came on images of all digits."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    node = context.node_config
    _, loader = load_data(int(node["partition-id"]), int(node["num-partitions"]))
    loss, accuracy = test_fn(net, loader)

    examples = len(loader.dataset)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": examples})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


app = client_app(app)
