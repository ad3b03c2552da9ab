"""Section 5.2's split as a `Partitioner` of Flower Datasets (the extra ``datasets``)."""

from __future__ import annotations

from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from flwr_perdl.core.checks import check_count, check_real
from flwr_perdl.random import DATA, spawn
from flwr_perdl.simulations.partition import Partition, imbalanced_partition


class MajorityLabelPartitioner(Partitioner):
    """Label skew: each client's samples mostly have one label, 90 % by default.

    The samples of a dataset in its own order (``FederatedDataset(shuffle=False)``) go to the same
    clients as in ``flwr-perdl run images`` with as many clients, samples per client and this seed.

    Parameters
    ----------
    num_partitions : int
        Number of clients; client i's main label is the (i mod number of labels)-th.
    size : int, default 500
        Samples per client; fewer if there are not enough.
    share : float, default 0.9
        Share of a client's main label.
    partition_by : str, default "label"
        The column of labels.
    seed : int, default 0
        Seed of the split.

    Examples
    --------
    >>> from flwr_datasets import FederatedDataset
    >>> from flwr_perdl.simulations.partitioner import MajorityLabelPartitioner
    >>> partitioner = MajorityLabelPartitioner(10)
    >>> mnist = FederatedDataset(dataset="ylecun/mnist", partitioners={"train": partitioner})
    >>> own = mnist.load_partition(0)  # doctest: +SKIP
    """

    def __init__(
        self,
        num_partitions: int,
        *,
        size: int = 500,
        share: float = 0.9,
        partition_by: str = "label",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self._n_clients = check_count("num_partitions", num_partitions, 1)
        self._size = check_count("size", size, 1)
        self._share = check_real("share", share, 0, 1, open_low=True)
        self._seed = check_count("seed", seed, 0)
        self._column = partition_by
        self._partition: Partition | None = None

    @property
    def num_partitions(self) -> int:
        """Number of clients."""
        return self._n_clients

    @property
    def labels(self) -> list[int]:
        """Each client's own label."""
        return self._split().labels

    def load_partition(self, partition_id: int) -> Dataset:
        """Return a client's samples."""
        clients = self._split().clients
        if not 0 <= partition_id < len(clients):
            raise ValueError(f"partition_id must be in 0…{len(clients) - 1}, got {partition_id}.")
        return self.dataset.select(clients[partition_id].tolist())

    def load_test(self) -> Dataset:
        """Return up to 1,000 samples of all labels that no client has."""
        return self.dataset.select(self._split().test.tolist())

    def _split(self) -> Partition:
        if self._partition is None:
            y = self.dataset.with_format("numpy")[self._column][:]
            rng = spawn(self._seed, DATA)
            self._partition = imbalanced_partition(
                y, self._n_clients, self._size, rng, share=self._share
            )
        return self._partition
