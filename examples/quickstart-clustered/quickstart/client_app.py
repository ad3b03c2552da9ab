"""quickstart: a Flower / NumPy app."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    weights = msg.content["arrays"].to_numpy_ndarrays()
    X, y, _, _ = load_data(context.node_config)
    epochs, rate = context.run_config["local-epochs"], context.run_config["learning-rate"]
    weights = train_fn(weights, X, y, epochs, rate)

    metrics = MetricRecord({"num-examples": len(X)})
    content = RecordDict({"arrays": ArrayRecord(weights), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the model on local data."""
    weights = msg.content["arrays"].to_numpy_ndarrays()
    _, _, X, y = load_data(context.node_config)
    loss, accuracy = test_fn(weights, X, y)

    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(X)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
