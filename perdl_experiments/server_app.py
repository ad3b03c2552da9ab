"""The Flower app's ServerApp: ``flwr run .`` or ``flower-simulation --app .``."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_perdl.strategies import ServerSettings, await_nodes
from perdl_experiments._run_config import read_run_config
from perdl_experiments.runner import run_experiment
from perdl_experiments.studies import find, one_federation

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config names, with all the nodes there are."""
    name, options = read_run_config(context.run_config)
    options = {**one_federation(find(name)), **options}
    wanted = ServerSettings.of({"num_clients": options.pop("clients", None)})
    run_experiment(
        name,
        engine=grid,
        clients=await_nodes(grid, wanted),
        out=str(context.run_config.get("out", "")) or None,
        resume=bool(context.run_config.get("resume", False)),
        overwrite=bool(context.run_config.get("overwrite", False)),
        options=options,
    )
