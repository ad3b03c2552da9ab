"""The clients: five, with four atoms in common. They send no update in the clear."""

import numpy as np
from flwr.app import Context

from flwr_perdl.clients import DictionaryClient, client_app
from flwr_perdl.dictionary import OrthogonalLearner

basis = np.linalg.qr(np.random.default_rng(0).standard_normal((12, 12)))[0]
shared, others = basis[:4], basis[4:]


def make_client(context: Context) -> DictionaryClient:
    """Return one node's client; put your own data here."""
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    own = np.linalg.qr(rng.standard_normal((8, 8)))[0] @ others
    used = rng.choice([-1, 0, 1], (200, 12), p=[0.1, 0.8, 0.1])
    samples = (used * rng.uniform(1, 2, (200, 12))) @ np.vstack([shared, own])
    return DictionaryClient(samples, OrthogonalLearner(n_atoms=12), context)


app = client_app(make_client, secure=True)
