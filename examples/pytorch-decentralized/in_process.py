"""Run the app in this process."""

import tomllib
from pathlib import Path

from flwr.app import Context, RecordDict

from decentralized_app import client_app, server_app
from flwr_perdl.simulations import InProcessGrid

project = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())
run_config = project["tool"]["flwr"]["app"]["config"]
grid = InProcessGrid(client_app.app, run_config["num-nodes"], run_config=run_config)
server_app.app(grid, Context(1, 0, {}, RecordDict(), run_config))
