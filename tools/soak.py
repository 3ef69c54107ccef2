"""Run a chapter's script many times on 2 and on 4 ranks and count the runs that fail or hang (``make soak``)."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from test_scripts import export, stand_alone, torchrun

TIMEOUT = 60  # seconds for one run


def soak(script, nproc, runs, environment):
    """Run the script ``runs`` times; return how many failed, hung, or left a process."""
    failed = hung = 0
    start = time.monotonic()
    for number in range(1, runs + 1):
        status, out, errors, left = torchrun(script, nproc, environment, timeout=TIMEOUT)
        hung += status is None
        if status or (status == 0 and left):
            failed += 1
            print(f"run {number} on {nproc} ranks: status {status}, left {left}\n{out}{errors}", flush=True)
        if number % 10 == 0 or number == runs:
            each = (time.monotonic() - start) / number
            print(f"{nproc} ranks: {number:3} runs, {failed} failed, {hung} hung, {each:.1f} s each", flush=True)
    return failed + hung


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--chapter", default="04", help="a chapter's number or name, or a notebook's path")
    parser.add_argument("--runs", type=int, default=40, help="how often, on each number of ranks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = export(args.chapter, Path(folder) / "script")
        environment = stand_alone(Path(folder))
        return sum(soak(script, nproc, args.runs, environment) for nproc in (2, 4))


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
