"""The clients: train and evaluate handlers, as for FedAvg; only what is trained travels."""

from functools import lru_cache

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_perdl.clients import client_app
from flwr_perdl.pytorch import load, trainable
from perdl_lora.reports import load_data
from perdl_lora.task import Net
from perdl_lora.task import test as test_fn
from perdl_lora.task import train as train_fn

app = ClientApp()
make_net = lru_cache(Net)  # the frozen base is read once per process


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the adapters and the head that came on the client's own data."""
    net = load(make_net(), msg.content["arrays"], strict=False)
    loader, _ = load_data(context)
    epochs, lr = context.run_config["local-epochs"], msg.content["config"]["lr"]
    loss = train_fn(net, loader, epochs, lr)

    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    state = net.state_dict()
    arrays = ArrayRecord({name: state[name] for name in trainable(net)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the adapters and the head that came on the client's own data."""
    net = load(make_net(), msg.content["arrays"], strict=False)
    _, loader = load_data(context)
    loss, accuracy = test_fn(net, loader)

    examples = len(loader.dataset)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": examples})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


app = client_app(app)
