"""A setting of the process that spares NumPy's loops memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

#: Prints the page faults of forty temporary arrays of two megabytes, before and after.
FAULTS = """
import resource
import numpy as np
from flwr_perdl._threads import one_blas_thread

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
