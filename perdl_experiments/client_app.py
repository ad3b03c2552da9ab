"""The Flower app's ClientApp: the client of whichever experiment the run config names."""

from __future__ import annotations

from typing import Any

from flwr.app import Context

from flwr_perdl.clients import client_app
from perdl_experiments._run_config import read_run_config
from perdl_experiments.studies import configure, find


def make_client(context: Context) -> Any:
    """Return the experiment's client of this node; simulations say how many nodes there are."""
    name, options = read_run_config(context.run_config)
    clients = int(context.node_config.get("num-partitions", 0))
    experiment = find(name)
    if experiment.federated is None:
        raise ValueError(f"{name} must run in process: it has no Flower clients.")
    config = configure(experiment, options={**options, "clients": clients})
    return experiment.federated.client(context, config)


app = client_app(make_client)
