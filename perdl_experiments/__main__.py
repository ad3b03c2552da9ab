"""``python -m perdl_experiments`` is ``flwr-perdl``."""

from perdl_experiments.cli import main

if __name__ == "__main__":
    main()
