"""What a SuperNode runs, beside its own table."""

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner


def make_client(context: Context) -> DictionaryClient:
    """Return the site's client; where its table lies is in the SuperNode's node config."""
    samples = np.loadtxt(str(context.node_config["table"]), delimiter=",")
    return DictionaryClient(samples, OrthogonalLearner(n_atoms=6), context)


app = client_app(make_client)
