"""`gramcert certify` of a trained network against an earlier checkout, in fresh processes, alternating.

    python benchmarks/certify_speed.py --before CHECKOUT --model runs/nano --data cifar-10-python.tar.gz

With --without-forms neither side tries quadratic forms, which do not reach the nano network. An earlier version finds
that out after minutes, with 10 GB; where that is too much, this compares the rest.

CHECKOUT is a clone of this repository at the commit to compare with (issue 18 asks for feaf35c); the times are those of
the whole command, from starting Python to the printed result. What both certify has to be the same: the largest part of
a radius that was lost is printed, and more than a few units in the last place are an error.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]

# Of a radius, relative: both sides round in another order, and bound it a little differently.
MAY_DIFFER = 1e-7


WITHOUT_FORMS = """
import math, runpy, sys
from gramcert.certification import network
from gramcert.networks.bound import Forms
network.bound_by_forms, network.proof_operations = lambda *_, **__: Forms(), lambda _: math.inf
sys.argv[0] = "gramcert"
runpy.run_module("gramcert", run_name="__main__")
"""


def certified(checkout, arguments):
    """Seconds, and what `certify --json` says."""
    program = ["-c", WITHOUT_FORMS] if arguments.without_forms else ["-m", "gramcert"]
    command = [sys.executable, *program, "certify", str(arguments.model), "--data", str(arguments.data), "--json"]
    command += [] if arguments.images is None else ["--images", str(arguments.images)]
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return time.perf_counter() - start, json.loads(done.stdout)


def most_lost(before, now):
    """The largest part of a radius of the one that the other does not have."""
    return max(1 - b / a for a, b in zip(before["radii"], now["radii"], strict=True) if a)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--without-forms", action="store_true")
    arguments = parser.parse_args()
    times = []
    for _ in range(arguments.rounds):
        (earlier, before), (later, now) = certified(arguments.before, arguments), certified(HERE, arguments)
        times.append((earlier, later))
        lost = most_lost(before, now)
        print(f"before {earlier:.1f} s, now {later:.1f} s: {earlier / later:.1f}×", flush=True)
    earlier, later = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"{now['images']} images, before {earlier:.1f} s, now {later:.1f} s, {earlier / later:.1f}× faster (asked: 3)\n"
        f"clean {now['clean']:.4f}, certified {now['certified']}, of the radii at most {max(0.0, lost):.1g} is lost"
    )
    if now["clean"] != before["clean"] or now["certified"] != before["certified"] or lost > MAY_DIFFER:
        sys.exit(f"not the same: before clean {before['clean']}, certified {before['certified']}")


if __name__ == "__main__":
    main()
