"""Coverage-guided fuzzing: ``make fuzz SECONDS=600`` lets each target run for so long.

``python tests/fuzz/fuzz.py TARGET -max_total_time=600 -rss_limit_mb=1024 FOLDER``; a crash is left
as a file that the same command, given the file, repeats. atheris is no dependency: `make fuzz`
installs it in an environment of its own.
"""

import logging
import sys
import warnings
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))

with atheris.instrument_imports(
    include=["flwr_perdl", "perdl_experiments", "numpy.lib", "zipfile", "json"]
):
    import targets

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    name, *options = sys.argv[1:]
    folder = Path(options[-1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(targets.seeds(name)):
        (folder / f"seed-{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *options], targets.TARGETS[name])
    atheris.Fuzz()
