"""``python -m flwr_perdl.simulations`` is ``flwr-perdl``."""

from flwr_perdl.simulations.cli import main

if __name__ == "__main__":
    main()
