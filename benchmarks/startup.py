"""Time of `import gramcert` against `import torch`, in fresh processes, alternating: python benchmarks/startup.py."""

import statistics
import subprocess
import sys
import time


def seconds(module: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - start


def main(rounds: int = 9) -> None:
    for module in ("torch", "gramcert"):
        seconds(module)
    times = [(seconds("torch"), seconds("gramcert")) for _ in range(rounds)]
    torch, gramcert = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"import torch {torch:.2f} s, import gramcert {gramcert:.2f} s: {gramcert / torch:.2f}× (asked: 1.15×)")


if __name__ == "__main__":
    main()
