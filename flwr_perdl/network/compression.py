"""Compression of vectors, for smaller messages.

================================================  ==============================================
literature                                        here
================================================  ==============================================
top-k: the k entries of largest size              `TopK`, ``k = round(share n)``
random quantization to s levels: ``Q(v)_i =       `RandomQuantization`, ``s = 2^(bits-1) - 1``;
|v|/s sign(v_i) floor(s |v_i| / |v| + u_i)``      ``|v|`` is the largest entry of a block
``E |v - Q(v)|^2 <= (1 - delta) |v|^2``           ``contraction``
================================================  ==============================================

Sources. Top-k as a contraction: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS
2018. Quantization: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD", NeurIPS 2017.

Deviations: values travel as float32. Quantization takes the largest entry of a block of 64 for the
paper's Euclidean norm of all, as in LEAD, which is what makes four bits a contraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flwr_perdl.core.arrays import Array
from flwr_perdl.core.checks import check_count, check_kind, check_real

#: What is sent of a vector: float32 values, and bytes.
Encoded = tuple[NDArray[np.float32], NDArray[np.uint8]]

#: Entries that share a scale in `RandomQuantization`.
SCALE_BLOCK = 64
#: A byte of this value says that a gap goes on.
_MORE = 255


@dataclass(frozen=True)
class TopK:
    """Send the entries of largest absolute value: values in float32 and positions.

    A position is sent as the number of entries since the last one, one byte per started 255.

    Parameters
    ----------
    share : float
        Share of the entries, above 0 and at most 1; of n entries ``round(share * n)`` are sent.

    Raises
    ------
    ValueError
        If ``share`` is not in this range; in `encode`, if it rounds to no entry.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import TopK
    >>> compression, rng = TopK(0.4), np.random.default_rng(0)
    >>> sent = compression.encode(np.array([1.0, -5.0, 0.0, 2.0, 3.0]), rng)
    >>> compression.decode(sent, 5)
    array([ 0., -5.,  0.,  0.,  3.])
    """

    share: float
    #: Whether the mean of what is sent is the vector.
    unbiased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the share."""
        check_real("share", self.share, 0, 1, open_low=True)

    @property
    def contraction(self) -> float:
        """The papers' delta: the least share of the squared norm that is sent."""
        return float(self.share)

    def encode(self, vector: Array, rng: np.random.Generator) -> Encoded:
        """Return the largest values, and the gaps between their positions as bytes.

        Their sizes depend on the vector's length alone.
        """
        n, k = len(vector), round(self.share * len(vector))
        if not k:
            raise ValueError(f"compression must keep at least one of {n} values, got {self!r}.")
        at = np.sort(np.argpartition(np.abs(vector), n - k)[n - k :])
        runs, rest = np.divmod(np.diff(at, prepend=-1) - 1, _MORE)
        gaps = np.full(k + (n - k) // _MORE, _MORE, dtype=np.uint8)
        gaps[np.cumsum(runs + 1) - 1] = rest
        return vector[at].astype(np.float32), gaps

    def decode(self, sent: Encoded, n: int) -> Array:
        """Return the values at their positions, and zeros; a ValueError if they are none."""
        values, gaps = sent
        ends = np.flatnonzero(gaps != _MORE)
        at = np.cumsum(gaps, dtype=np.intp)[ends] + np.arange(len(ends))
        if len(at) != len(values) or at[-1] >= n:
            raise ValueError(f"positions must be {len(values)} below {n}, got {at}.")
        vector = np.zeros(n)
        vector[at] = values
        return vector


@dataclass(frozen=True)
class RandomQuantization:
    """Send every entry as a small integer, rounded at random: unbiased.

    Blocks of 64 entries share a scale, their largest absolute value, in float32.

    Parameters
    ----------
    bits : int
        Bits per entry, 4 to 8. The error of an entry is at most its block's scale over
        ``2**(bits - 1) - 1``.
    seed : int, default 0
        Seed of the rounding, different for every node and round.

    Raises
    ------
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_perdl.network import RandomQuantization
    >>> compression, rng = RandomQuantization(4), np.random.default_rng(0)
    >>> scales, codes = compression.encode(np.array([7.0, -5.0, 0.0, 2.0]), rng)
    >>> scales, codes.nbytes, compression.decode((scales, codes), 4)
    (array([7.], dtype=float32), 2, array([ 7., -5.,  0.,  2.]))
    """

    bits: int
    seed: int = 0
    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_count("bits", self.bits, 4, 8)
        check_count("seed", self.seed)

    @property
    def levels(self) -> int:
        """Levels of each sign."""
        return (1 << (self.bits - 1)) - 1

    @property
    def contraction(self) -> float:
        """The least share of the squared norm that is sent, on average."""
        return 1 - SCALE_BLOCK / (4 * self.levels**2)

    def encode(self, vector: Array, rng: np.random.Generator) -> Encoded:
        """Return the scales, and the levels in so many bits each."""
        scales = np.maximum.reduceat(np.abs(vector), np.arange(0, len(vector), SCALE_BLOCK))
        scales = scales.astype(np.float32)
        units = _each(np.where(scales > 0, scales, 1), len(vector)) / self.levels
        levels = np.floor(vector / units + rng.random(len(vector)))
        codes = (np.clip(levels, -self.levels, self.levels) + self.levels).astype(np.uint8)
        bits = np.unpackbits(codes[:, None], axis=1, count=self.bits, bitorder="little")
        return scales, np.packbits(bits)

    def decode(self, sent: Encoded, n: int) -> Array:
        """Return the entries, multiples of their block's scale over the levels."""
        scales, codes = sent
        if len(codes) != -(-n * self.bits // 8):
            raise ValueError(f"codes must be of {n} entries, got {len(codes)} bytes.")
        bits = np.unpackbits(codes, count=n * self.bits).reshape(n, self.bits)
        levels = np.packbits(bits, axis=1, bitorder="little")[:, 0].astype(float) - self.levels
        return levels * (_each(scales, n) / self.levels)


def _each(scales: Array, n: int) -> Array:
    """Return the scale of each of n entries."""
    return np.repeat(scales.astype(float), SCALE_BLOCK)[:n]


Compression = TopK | RandomQuantization


def consensus_step(compression: Compression) -> float:
    """Return the consensus step ``2 delta / (1 + delta)``, delta the contraction.

    It is one for all networks, as a node knows its neighbors only. The papers' bounds are smaller
    by orders of magnitude; this was measured: gradient tracking, 16 nodes, quadratics of 600
    parameters (top-k, 3,000 rounds) and softmax regression on digits (four bits besides, 300
    rounds). Shares from 0.01 to 0.1 and four bits converge on the ring, the exponential and the
    complete graph. At twice this step shares of 0.05 and 0.1 diverge on the exponential graph, at
    1.4 times it 0.05 does on the complete one.
    """
    delta = compression.contraction
    return 2 * delta / (1 + delta)


def check_compression(method: str | None, compression: Compression) -> None:
    """Raise a TypeError or ValueError unless the compression suits the method."""
    check_kind("compression", compression, (TopK, RandomQuantization), "TopK or RandomQuantization")
    if method == "exact_diffusion" and not compression.unbiased:
        raise ValueError(
            f"compression must be unbiased with method 'exact_diffusion', got {compression!r}: "
            "use 'gradient_tracking'."
        )
    if method == "push_sum":
        raise ValueError(f"compression must be None with method 'push_sum', got {compression!r}.")
