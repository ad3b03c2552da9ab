"""What runs at each site."""

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import LassoLearner


def make_client(context: Context) -> DictionaryClient:
    """Return a site's client, with the rows of the table that are the site's."""
    table = np.loadtxt(str(context.run_config["table"]), delimiter=",", skiprows=1)
    site = context.node_config["partition-id"]
    samples = table[table[:, 0] == site, 1:]
    return DictionaryClient(samples, LassoLearner(n_atoms=6), context)


app = client_app(make_client)
