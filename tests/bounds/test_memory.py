"""Large layers stay within 2 GiB. Each runs in a process of its own, whose peak the kernel reports."""

import subprocess
import sys

import pytest

PEAK = """
import re, torch
from gramcert import {function}
kernel = torch.randn({channels}, {channels}, 3, 3, requires_grad=True)
{function}(kernel, {arguments}).backward()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 2**20)
"""


def peak_gibibytes(**options):
    code = PEAK.format(**options)
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from Linux's /proc")


@pytest.mark.parametrize(
    ("function", "channels", "arguments"),
    [
        pytest.param("norm2_circ", 512, "32, 1", marks=pytest.mark.slow),
        ("norm2_toep", 512, "2"),
        ("norm2_toep", 64, "5"),
        ("norm2_toep", 16, "6"),
    ],
)
def test_peak(function, channels, arguments):
    assert peak_gibibytes(function=function, channels=channels, arguments=arguments) < 2


@pytest.mark.slow
def test_peak_of_the_largest():
    """512×512×3×3 at n = 224: 25,312 blocks of 2 MiB, 53 GB together."""
    assert peak_gibibytes(function="norm2_circ", channels=512, arguments="224, 1") < 2
