"""What runs at the server."""

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_perdl.strategies import PerMA, ServerSettings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Learn the shared atoms; print what they explain at each site."""
    config = context.run_config
    rounds = int(config["num-server-rounds"])
    folder = str(config["checkpoint"]) or None
    settings = ServerSettings(evaluate_every=rounds, resume=folder is not None)
    strategy = PerMA(
        int(config["n-global"]),
        seed=1,
        num_clients=int(config["num-sites"]),  # the run begins with so many
        min_clients=1,  # and goes on with fewer
        checkpoint_dir=folder,
        server=settings,
    )
    result = strategy.start(grid, num_rounds=rounds)
    last = strategy.history[-1]
    for site, measured in last.metrics.items():
        name, energy = strategy.client_names.get(site, site), measured["energy"]
        shared, both = (1 - measured[key] / energy for key in ("mse_global", "mse_full"))
        print(f"site {name}: shared atoms explain {shared:.0%}, with private atoms {both:.0%}")
    for who, why in last.dropped.items():
        print(f"{who} is left out: {why}")
    if config["out"]:
        (atoms,) = result.arrays.to_numpy_ndarrays()
        np.savetxt(str(config["out"]), atoms, "%.6g", ",")
