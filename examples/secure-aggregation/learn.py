"""The app in this process, and what becomes of a server that asks for updates in the clear."""

from flwr_perdl.simulations import InProcessGrid
from flwr_perdl.strategies import TooFewReplies
from secure_aggregation.client_app import app
from secure_aggregation.server_app import learn

learn(InProcessGrid(app, 5), secure=True)
try:
    learn(InProcessGrid(app, 5), secure=False)
except TooFewReplies as refused:
    print("in the clear:", refused)
