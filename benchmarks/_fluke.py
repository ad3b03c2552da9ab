"""What a user of fluke writes for FedPer, FedRep and Ditto; `beside_fluke.py` runs it.

``python _fluke.py INPUT.npz RUNS.json``, in fluke's environment, prints a line of JSON per run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.ditto import Ditto
from fluke.algorithms.fedper import FedPer
from fluke.algorithms.fedrep import FedRep
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.nets import EncoderHeadNet

given = np.load(sys.argv[1])
METHODS = {"fedper": FedPer, "fedrep": FedRep, "ditto": Ditto}


def layer(name: str) -> torch.nn.Linear:
    """Return a layer with the first weights."""
    weight, bias = (torch.tensor(given[f"{name}.{part}"]).float() for part in ("weight", "bias"))
    linear = torch.nn.Linear(*weight.shape)
    linear.weight.data, linear.bias.data = weight.T.contiguous(), bias
    return linear


class Body(torch.nn.Sequential):
    """The hidden layer."""

    def __init__(self) -> None:
        super().__init__(layer("body"), torch.nn.ReLU())


class Net(EncoderHeadNet):  # type: ignore[misc]
    """The network."""

    def __init__(self) -> None:
        super().__init__(Body(), layer("head"))


def loaders(part: str, **options: Any) -> list[FastDataLoader]:
    """Return the images of all clients."""
    found = []
    for i in range(int(given["clients"])):
        X, y = (torch.tensor(given[f"{part}-{what}-{i}"]) for what in "Xy")
        found.append(FastDataLoader(X.float(), y.long(), num_labels=10, **options))
    return found


def train(method: str, step: float, lam: float, rounds: int, batch: int, seed: int) -> list[Any]:
    """Return each client's accuracy on the images to choose by, and on its test images."""
    FlukeENV().set_seed(seed)
    FlukeENV().set_eval_cfg(server=False)
    evaluator = ClassificationEval(1, 10)
    FlukeENV().set_evaluator(evaluator)
    own = loaders("train", batch_size=batch, shuffle=True)
    test = loaders("test", batch_size=1000)
    options = DDict(
        model="__main__.Net" if method == "ditto" else "__main__.Body",
        client=DDict(
            model="__main__.Net",
            batch_size=batch,
            local_epochs=1,
            tau=1,
            lam=lam,
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=step),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1),
        ),
        server=DDict(weighted=True),
    )
    splitter = DataSplitter(DummyDataContainer(own, test, None, num_classes=10))
    algorithm = METHODS[method](len(own), splitter, options)
    algorithm.run(rounds, 1.0)
    pairs = zip(loaders("choose", batch_size=1000), test, algorithm.clients, strict=True)
    return [
        [client.evaluate(evaluator, part)["accuracy"] for part in parts] for *parts, client in pairs
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for run in json.loads(sys.argv[2]):
        start = time.process_time()
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            table = train(**run)
        print(json.dumps([time.process_time() - start, table]), flush=True)
