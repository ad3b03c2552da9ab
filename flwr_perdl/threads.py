"""Threads of the maths: one for BLAS, so that results are the same bits, and several for parts.

``one_blas_thread()`` is a block with one BLAS thread; ``in_threads(function, items)`` yields
results in order, computed by ``n_threads()`` threads.
"""

from flwr_perdl._parallel import in_threads, n_threads
from flwr_perdl._threads import one_blas_thread

__all__ = ["in_threads", "n_threads", "one_blas_thread"]
