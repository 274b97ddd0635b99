"""Time to load the package against that of torch, in fresh processes, alternating: python benchmarks/startup.py."""

import statistics
import subprocess
import sys
import time

TORCH, GRAMCERT = "import torch", "from gramcert import certify"


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main(rounds: int = 9) -> None:
    for code in (TORCH, GRAMCERT):
        seconds(code)
    times = [(seconds(TORCH), seconds(GRAMCERT)) for _ in range(rounds)]
    torch, gramcert = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"{TORCH} {torch:.2f} s, {GRAMCERT} {gramcert:.2f} s: {gramcert / torch:.2f}× (asked: 1.15×)")


if __name__ == "__main__":
    main()
