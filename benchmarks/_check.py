"""Compare the benchmarks' ratios with the stored ones: ``make bench-check``.

Every benchmark is run with ``--ratios``. A ratio that is less than 80 % of the stored one is
measured twice more. Where the best is less, too, the commit that stored it is measured here as
often, since processors differ in what they are good at: a ratio fails if it is less than 80 % of
that commit's. Names on the command line choose benchmarks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from _measure import RESULTS

#: Share of a stored ratio below which it counts as a regression.
LEAST = 0.8
TIMES = 3


def measured(name: str, root: Path, enough: dict[str, float]) -> dict[str, float]:
    """Return the best of a benchmark's ratios, measured again until all are ``enough``.

    Parameters
    ----------
    name : str
        The benchmark.
    root : Path
        The repository, or another commit of it.
    enough : dict of str to float
        Ratios, of which `LEAST` will do.
    """
    best: dict[str, float] = {}
    script, paths = root / "benchmarks" / f"{name}.py", {**os.environ, "PYTHONPATH": str(root)}
    for _ in range(TIMES):
        with TemporaryDirectory() as folder:
            command = [sys.executable, script, "--ratios", "--out", folder]
            subprocess.run(command, check=True, env=paths)
            found = json.loads(Path(folder, f"{name}.json").read_text())["ratios"]
        best = {key: max(ratio, best.get(key, 0.0)) for key, ratio in found.items()}
        if not worse(best, enough):
            break
    return best


def worse(now: dict[str, float], before: dict[str, float]) -> list[str]:
    """Return which ratios are missing, or less than `LEAST` of those before."""
    return [key for key, ratio in before.items() if now.get(key, 0.0) < LEAST * ratio]


def measured_before(name: str, enough: dict[str, float]) -> dict[str, float]:
    """Return the ratios, on this machine, of the commit that stored them; none if it is lost."""
    asked = ["git", "log", "-1", "--format=%H", "--", str(RESULTS / f"{name}.json")]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    with TemporaryDirectory() as folder:
        root = Path(folder, "before")
        added = ["git", "worktree", "add", "--quiet", "--detach", str(root), commit]
        if not commit or subprocess.run(added, check=False).returncode:
            return {}
        try:
            found = measured(name, root, enough)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(root)], check=True)
    return {key: ratio for key, ratio in found.items() if key in enough}


def compare(name: str) -> bool:
    """Print a benchmark's ratios beside the stored ones; whether all are as good as those."""
    stored: dict[str, float] = json.loads((RESULTS / f"{name}.json").read_text())["ratios"]
    now = measured(name, RESULTS.parent.parent, stored)
    low = worse(now, stored)
    here = measured_before(name, {key: stored[key] for key in low}) if low else {}
    bad = [key for key in low if key not in here or worse(now, {key: here[key]})]
    for key, ratio in stored.items():
        then = f" ({here[key]:.3g} on this machine)" if key in here else ""
        verdict = "REGRESSED" if key in bad else "ok"
        found = f"{ratio:.3g} stored{then}, {now.get(key, 0):.3g} now"
        print(f"{name}: {key}: {found}: {verdict}", flush=True)
    return not bad


if __name__ == "__main__":
    stored = sorted(
        path for path in RESULTS.glob("*.json") if json.loads(path.read_text()).get("ratios")
    )
    kept = [compare(name) for name in sys.argv[1:] or [path.stem for path in stored]]
    sys.exit(0 if all(kept) else 1)
