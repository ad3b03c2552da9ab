"""NumPyClients of the protocols, and the way to a Message-API ClientApp."""

from flwr_perdl.clients.app import client_app
from flwr_perdl.clients.dictionary import DictionaryClient

__all__ = ["DictionaryClient", "client_app"]
