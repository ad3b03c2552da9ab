"""The nodes: train and evaluate handlers, as for FedAvg."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app
from perdl_decentralized.task import load_data
from perdl_decentralized.task import test as test_fn
from perdl_decentralized.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the node's model on its own data."""
    data, _ = load_data(context)
    steps, rate = context.run_config["local-steps"], context.run_config["learning-rate"]
    model = train_fn(msg.content["arrays"].to_numpy_ndarrays(), data, steps, rate)

    metrics = MetricRecord({"num-examples": len(data[1])})
    content = RecordDict({"arrays": ArrayRecord(model), "metrics": metrics})
    return Message(content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the node's model. To keep it, save it here."""
    _, data = load_data(context)
    loss, accuracy = test_fn(msg.content["arrays"].to_numpy_ndarrays(), data)

    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[1])}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


app = client_app(app)
