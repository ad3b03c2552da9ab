from __future__ import annotations

import subprocess
import sys

import psutil

from perdl_experiments import deployment

CHILD = "import time; time.sleep(60)"
PARENT = (
    "import subprocess, sys, time\n"
    f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True)\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)"
)


def test_processes_with_sessions_of_their_own_end_with_the_deployment(tmp_path):
    parts = deployment.Deployment(tmp_path, 1)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True
    )
    parts._processes.append(parent)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parts.stop()
    assert parent.poll() is not None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    parent.stdout.close()
