"""A new site joins after the training: it takes the saved model with the lowest loss."""

import sys
import tomllib
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, RecordDict

from flwr_perdl.clients import adapt
from flwr_perdl.export import load
from perdl_clustered.client_app import app
from perdl_clustered.task import Net, load_data
from perdl_clustered.task import test as test_fn

here = Path(__file__).parent
config = tomllib.loads((here / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
# With data="FILE.npz" and a state-dir, as in --node-config, for a site of your own.
context = Context(1, 16, {"partition-id": 16}, RecordDict(), config)
_, loader = load_data(context)


def measured(model: ArrayRecord) -> str:
    """Return what is to be printed of a model: its accuracy at this site."""
    net = Net()
    net.load_state_dict(model.to_torch_state_dict())
    _, accuracy = test_fn(net, loader)
    return f"accuracy {accuracy:.2f}"


torch.manual_seed(0)
models = load(sys.argv[1]).shared
for j, model in enumerate(models):
    print(f"cluster-{j}: {measured(model)}")
train_config = {"lr": config["learning-rate"]}
own = adapt(app, models, context, fits=5, train_config=train_config)
print(f"fine-tuned: {measured(own)}")
torch.save(own.to_torch_state_dict(), "own.pt")
