"""python -m benchmarks.cpu_study measure FOLDER    # probe, then every run five times, interleaved; half an hour on two quiet cores
python -m benchmarks.cpu_study score FOLDER      # fit on the probe and the runs chosen for it, predict the others

Measure a quiet machine: nothing here undoes another process.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cpu_study.measure import measure
from benchmarks.cpu_study.score import score


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "score"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="cpu_epyc_2core", help="this machine in the catalogue")
    arguments = parser.parse_args(argv)
    if arguments.what == "measure":
        measure(arguments.folder, arguments.gpu)
    else:
        print(json.dumps(score(arguments.folder, arguments.gpu), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
