"""Settings that spare NumPy's loops memory (set where asked, put back), and aligned arrays."""

from __future__ import annotations

import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from flwr_perdl.core.memory import short_buffers

#: Prints the page faults of forty temporary arrays of two megabytes, before and after.
FAULTS = """
import resource
import numpy as np
from flwr_perdl.core.threads import one_blas_thread

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(40):
        np.ones(2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fresh = faults()
with one_blas_thread():
    faults()
    print(fresh, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of the GNU C library")
def test_our_maths_does_not_fetch_the_memory_of_its_temporary_arrays_anew() -> None:
    # NumPy asks for huge pages where it can: 40 arrays of one fault each, or of 512 small pages
    told = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, check=True, text=True
    )
    fresh, kept = map(int, told.stdout.split())
    assert fresh >= 40
    assert kept <= 4


def test_short_buffers_are_put_back_also_after_an_error() -> None:
    before = np.getbufsize()
    with short_buffers():
        inside = np.getbufsize()
    with pytest.raises(RuntimeError, match="as asked"), short_buffers():
        raise RuntimeError("as asked")
    assert inside < before == np.getbufsize()


def test_short_buffers_are_this_threads_own() -> None:
    with short_buffers(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(np.getbufsize).result() > np.getbufsize()
