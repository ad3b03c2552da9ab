"""The app's client and server in this process: python learn.py TABLE.csv OUT.npy."""

import sys

import numpy as np

from flwr_perdl.simulations import InProcessGrid
from perma_on_own_data.client_app import app
from perma_on_own_data.server_app import learn

table, out = sys.argv[1:]
np.save(out, learn(InProcessGrid(app, 5, run_config={"table": table})))
