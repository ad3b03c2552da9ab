"""The clients: train and evaluate handlers, as for FedAvg."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app
from perdl_clustered.task import Net, load_data
from perdl_clustered.task import test as test_fn
from perdl_clustered.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model that came on the client's own data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader, _ = load_data(context)
    epochs, lr = context.run_config["local-epochs"], msg.content["config"]["lr"]
    loss = train_fn(net, loader, epochs, lr)

    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    arrays = ArrayRecord(net.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model that came on the client's own data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    _, loader = load_data(context)
    loss, accuracy = test_fn(net, loader)

    examples = len(loader.dataset)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": examples})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


app = client_app(app)
