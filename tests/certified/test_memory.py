"""How far calls make the process grow, against the limit that they were given."""

import json
import subprocess
import sys

import pytest

# What growth cannot tell from noise: pages of the allocator, code that is run for the first time.
NOISE = 2**23

MEASURE = """
import json, os, resource, sys, torch
from torch import nn
from gramcert import Convolution, spectral_norm

torch.set_num_threads(1)
kernel = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(0))

def warm_up():
    for layer in (Convolution(kernel(2, 2, 3, 3), padding=1), Convolution(kernel(2, 2, 3, 3), 2, 1, "reflect")):
        for size in (None, 5, 60):
            spectral_norm(layer, size, tol=1e-5)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def measure(case):
    warm_up()
    layer, size, options = eval(case)
    before = peak()
    norm = spectral_norm(layer, size, **options)
    assert norm.upper > 0 and (norm.tol_reached or norm.notes)
    return peak() - before

warm_up()
for case in json.loads(sys.stdin.read()):
    if not os.fork():
        print(json.dumps([case, measure(case)]), flush=True)
        os._exit(0)
    os.wait()
"""


def growth(cases):
    """Bytes by which the peak of a process grows in a call, after others of its kind: each case in a fork of one."""
    pytest.importorskip("resource", reason="the peak of a process is not known on this system")
    command = [sys.executable, "-c", MEASURE]
    result = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=False)
    found = dict(map(json.loads, result.stdout.splitlines()))
    assert set(found) == set(cases), result.stderr
    return found


CASES = {
    "many lags": ("Convolution(kernel(1, 1, 31, 31)), None, {'tol': 1e-2", 2**25),
    "lags in three dimensions": ("Convolution(kernel(1, 1, 9, 9, 9)), None, {'tol': 0.1", 2**26),
    "many cells": ("Convolution(kernel(1, 1, 63, 63)), None, {'tol': 0.1", 2**24),
    "stride beyond the kernel": ("Convolution(kernel(1, 1, 3, 3), 700), 1400, {", 2**27),
    "phases that no tap has": ("Convolution(kernel(1, 1, 3, 3), 100_000), 100_000, {", 2**24),
    "reflected pixels": ("Convolution(kernel(1, 1, 3), 1, 1, 'reflect'), 2**26, {", 10**6),
    "replicated pixels": ("Convolution(kernel(1, 2, 3, 3), 1, 1, 'replicate'), 4000, {", 10**6),
    "wrapped pixels": ("Convolution(kernel(2, 1, 3, 3), 2, 1, 'circular'), 1001, {", 2**26),
    "dilation": ("Convolution(kernel(1, 1, 3), dilation=10**5), 3 * 10**5, {", 2**25),
    "a circulant": ("Convolution(kernel(2, 2, 3, 3), 1, 1, 'circular'), 3000, {'tol': 1e-6", 2**25),
    "many groups": ("Convolution(kernel(512, 1, 3, 3), padding=1, groups=512), 40, {", 2**26),
    "groups at large sizes": ("Convolution(kernel(2048, 1, 3, 3), padding=1, groups=2048), 112, {", 2**26),
    "groups of many taps": ("Convolution(kernel(2, 1, 1500), groups=2), None, {'tol': 1e-2", 2**24),
    "many channels": ("Convolution(kernel(96, 96, 3, 3), padding=1), 20, {", 2**26),
    "equal groups": ("Convolution(kernel(8, 32, 9, 9).repeat(16, 1, 1, 1), padding=4, groups=16), 9, {", 9 * 2**23),
    "as many taps as places": ("Convolution(kernel(3, 3, 29, 29), padding=14), 29, {'tol': 1e-2", 2**28),
    "transposed": ("Convolution(kernel(4, 3, 3, 3), 2, 1, transposed=True), 200, {", 2**26),
    "a tall matrix": ("nn.Linear(6000, 512), None, {", 2**24),
    "a wide matrix": ("nn.Linear(512, 6000), None, {", 2**24),
    "a transposed matrix": ("kernel(1200, 9000).T, None, {", 2**26),
    "a matrix with large weights": ("1e30 * kernel(400, 9000), None, {", 2**24),
    "a matrix of half precision": ("kernel(400, 9000).half(), None, {", 3 * 2**23),
    "a matrix in float64": ("100 * kernel(400, 9000).double().T, None, {", 2**24),
    "a matrix that is all but beyond the memory": ("kernel(3000, 9000), None, {", 2**22),
    "a matrix": ("nn.Linear(1500, 1500), None, {", 2**27),
    "a matrix that barely fits": ("nn.Linear(3000, 2500), None, {", 142 * 10**6),
    "a matrix that does not fit": ("nn.Linear(2500, 2500), None, {", 2**26),
    "weights that do not fit": ("nn.Linear(5000, 5000), None, {", 2**24),
    "few dimensions, a band": ("Convolution(kernel(1, 1, 5), padding=2), 10_000, {'tol': 1e-9", 2**25),
    "a band": ("Convolution(kernel(3, 3, 3, 3), padding=1), 30, {'tol': 1e-7", 2**26),
}

LONG_CASES = {
    "few dimensions, a long band": ("Convolution(kernel(1, 1, 5), padding=2), 20_000, {'tol': 1e-9", 2**26),
}

LARGE_CASES = [
    "Convolution(kernel(1, 1, 31, 31)), None, {'tol': 1e-4}",
    "Convolution(kernel(1, 1, 63, 63)), None, {'tol': 1e-3}",
    "Convolution(kernel(1, 1, 3, 3), 1500), 3000, {}",
    "Convolution(kernel(1, 1, 3), dilation=10**6), 3 * 10**6, {}",
    "Convolution(kernel(1, 1, 3), padding=1, padding_mode='reflect'), 2**26, {'max_seconds': 300}",
    "Convolution(kernel(2, 2, 3, 3), padding=1, padding_mode='reflect'), 4000, {'max_seconds': 300}",
    "Convolution(kernel(256, 256, 3, 3), padding=1), None, {}",
    "nn.Linear(6000, 6000), None, {}",
    "nn.Linear(25088, 4096), None, {}",
    "nn.Linear(8192, 8192).bfloat16(), None, {}",
    "kernel(16384, 12288).T, None, {}",
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(LONG_CASES, marks=pytest.mark.slow)], ids=["usual", "long"])
def test_limits_hold(cases):
    """Pages that the system maps for its own reasons only add to what is measured: a limit is broken every time."""
    cases = {f"{case}, 'max_bytes': {limit}}}".replace("{, ", "{"): limit for case, limit in cases.values()}
    for _ in range(3):
        found = growth(list(cases))
        cases = {case: cases[case] for case, grown in found.items() if grown > 1.1 * cases[case] + NOISE}
        if not cases:
            return
    pytest.fail(f"limits and growth, three times: {[(case, limit, found[case]) for case, limit in cases.items()]}")


@pytest.mark.slow
def test_the_usual_limit_holds():
    for case, grown in growth(LARGE_CASES).items():
        assert grown <= 1.1 * 2**31 + NOISE, case
