"""A package index of this checkout, from which Flower installs what an app needs."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.examples.readme import ROOT

OURS = "flwr-perdl"
WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_index(folder: Path) -> None:
    """Write the wheel of this checkout and, of what is installed here, wheels of metadata alone.

    So the resolver works as on the real index, no file is copied, and a file that is not of this
    checkout is the one of this environment.
    """
    (folder / OURS).mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*command, folder / OURS, ROOT], check=True)
    here = {canonicalize_name(one.name): one for one in distributions()}
    for name, one in here.items():
        if name == OURS:
            continue
        extras = one.metadata.get_all("Provides-Extra") or []
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {one.version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        for line in one.requires or ():
            wanted = Requirement(line)
            holds = wanted.marker is None or any(
                wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            )
            if holds and canonicalize_name(wanted.name) in here:
                lines.append(f"Requires-Dist: {line}")
        stem = f"{name.replace('-', '_')}-{one.version}"
        files = {"METADATA": "\n".join([*lines, ""]), "WHEEL": WHEEL}
        files["RECORD"] = "".join(f"{stem}.dist-info/{file},,\n" for file in [*files, "RECORD"])
        (folder / name).mkdir()
        with zipfile.ZipFile(folder / name / f"{stem}-py3-none-any.whl", "w") as wheel:
            for file, text in files.items():
                wheel.writestr(f"{stem}.dist-info/{file}", text)


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, of which the listings are pages of an index."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder, and give its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
