"""Compare the benchmarks' ratios with the stored ones: ``make bench-check``.

Every benchmark is run with ``--ratios``. A ratio that is less than 80 % of the stored one is
measured twice more, and fails if its best is. Names on the command line choose benchmarks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from _measure import RESULTS

#: Share of a stored ratio below which it counts as a regression.
LEAST = 0.8
TIMES = 3


def measured(name: str) -> dict[str, float]:
    """Return a benchmark's ratios now."""
    script = Path(__file__).with_name(f"{name}.py")
    with TemporaryDirectory() as folder:
        subprocess.run([sys.executable, script, "--ratios", "--out", folder], check=True)
        found: dict[str, float] = json.loads(Path(folder, f"{name}.json").read_text())["ratios"]
    return found


def compare(name: str) -> bool:
    """Print a benchmark's ratios beside the stored ones; whether all are as good as those."""
    stored: dict[str, float] = json.loads((RESULTS / f"{name}.json").read_text())["ratios"]
    best: dict[str, float] = {}
    for _ in range(TIMES):
        for key, ratio in measured(name).items():
            best[key] = max(ratio, best.get(key, 0.0))
        if all(best.get(key, 0.0) >= LEAST * ratio for key, ratio in stored.items()):
            break
    for key, ratio in stored.items():
        now = best.get(key, 0.0)
        verdict = "ok" if now >= LEAST * ratio else "REGRESSED"
        print(f"{name}: {key}: {ratio:.3g} stored, {now:.3g} now: {verdict}", flush=True)
    return all(best.get(key, 0.0) >= LEAST * ratio for key, ratio in stored.items())


if __name__ == "__main__":
    stored = sorted(
        path for path in RESULTS.glob("*.json") if "ratios" in json.loads(path.read_text())
    )
    kept = [compare(name) for name in sys.argv[1:] or [path.stem for path in stored]]
    sys.exit(0 if all(kept) else 1)
