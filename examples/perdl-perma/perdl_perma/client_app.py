"""What runs at each site."""

from pathlib import Path

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient, Member, client_app
from flwr_perdl.dictionary import LassoLearner
from perdl_perma.tables import planted, read


def load_data(context: Context) -> np.ndarray:
    """Return this site's samples, one per row. To read them from elsewhere, change this."""
    path, folder = context.node_config.get("data"), context.run_config["data"]
    site = Member(context).partition
    if not path and folder:  # a simulation: each site has a file of the folder
        files = sorted(Path(str(folder)).glob("*.csv"))
        sites = context.node_config.get("num-partitions")
        if len(files) != sites:
            raise ValueError(
                f"data must have a CSV file per site, got {len(files)} in {folder}, {sites} sites."
            )
        path = files[site]
    return read(Path(str(path))) if path else planted(site)


def make_client(context: Context) -> DictionaryClient:
    """Return the site's client; called for every message."""
    samples = load_data(context)
    learner = LassoLearner(int(context.run_config["n-atoms"]))
    energy = {"energy": float(np.mean(samples**2))}
    return DictionaryClient(samples, learner, context, extra_metrics=lambda *atoms: energy)


app = client_app(make_client)
