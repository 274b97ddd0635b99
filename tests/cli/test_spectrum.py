import json
import math
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import gramcert
from gramcert import Convolution, Spectrum
from gramcert.cli.kernel_file import StoredKernel
from gramcert.cli.spectrum_plot import save_spectrum_plot
from gramcert.cli.spectrum_table import Measured, spectra_table, spectrum_table

CIRCULAR = ("--padding", 1, "--padding-mode", "circular", "--input-size", 6)


def answer(run, *words):
    result = run("spectrum", *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def kernels(tmp_path):
    """A file with kernels, a matrix and a bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 2, 3, 3), "b": (2, 2, 3, 3), "c": (2, 2, 3), "matrix": (4, 3), "bias": (4,)}
    path = tmp_path / "kernels.safetensors"
    safetensors.torch.save_file({key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}, path)
    return path


def made(values, error=1e-12, omitted=0, name="made"):
    stored = StoredKernel(torch.zeros(2, 2), "made.npy", None, "float32")
    return Measured(name, stored, None, None, Spectrum(torch.tensor(values, dtype=torch.float64), error, omitted))


def printed(run, *words):
    result = run("spectrum", *words)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def picture(path):
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(2**20)) > 50
        return image.size


@pytest.mark.parametrize(
    ("words", "arguments", "size"),
    [
        (["--input-size", "5"], {}, (5, 5)),
        (["--padding", "1", "--stride", "2,1", "--input-size", "6,5"], {"padding": 1, "stride": (2, 1)}, (6, 5)),
        (
            ["--padding", "same", "--dilation", "2", "--padding-mode", "reflect", "--input-size", "6"],
            {"padding": "same", "dilation": 2, "padding_mode": "reflect"},
            (6, 6),
        ),
        (
            ["--transposed", "--stride", "2", "--output-padding", "1", "--input-size", "3"],
            {"transposed": True, "stride": 2, "output_padding": 1},
            (3, 3),
        ),
        (["--padding", "1", "--input-size", "5", "--k", "4"], {"padding": 1}, (5, 5)),
    ],
)
def test_options_are_the_layer(run, kernels, words, arguments, size):
    kernel = safetensors.torch.load_file(kernels)["a"]
    layer = Convolution(kernel, **arguments)
    (found,) = answer(run, kernels, "--key", "a", *words)["spectra"]
    expected = gramcert.singular_values(layer, size, 4 if "--k" in words else None)
    assert found["values"] == expected.values.tolist()
    assert (found["error"], found["omitted"]) == (expected.error, expected.omitted)
    assert found["kernel"]["key"] == found["name"] == "a"
    assert found["geometry"]["padding"] == [list(pair) for pair in layer.padding]
    assert found["geometry"]["stride"] == list(layer.stride)
    assert found["input_size"] == list(size)
    sums = expected.ky_fan(len(expected.values))
    assert found["ky_fan"] == {"lower": sums.lower, "upper": sums.upper}
    whole = ("smallest", "condition", "nuclear", "frobenius")
    if expected.omitted:
        assert all(found[name] is None for name in whole)
    else:
        for name in whole:
            ends = getattr(expected, name)
            assert found[name] == {"lower": ends.lower, "upper": None if math.isinf(ends.upper) else ends.upper}


def test_matrices_have_no_size(run, kernels, tmp_path):
    np.save(tmp_path / "matrix.npy", np.diag([3, 4]))
    (found,) = answer(run, tmp_path / "matrix.npy")["spectra"]
    assert found["values"] == pytest.approx([4, 3])
    assert found["nuclear"]["lower"] <= 7 <= found["nuclear"]["upper"]
    assert (found["geometry"], found["input_size"]) == (None, None)
    assert "matrix.npy: 2×2, float32 (stored as int64)" in printed(run, tmp_path / "matrix.npy")
    mixed = answer(run, kernels, "--key", "matrix", "--key", "b", "--input-size", 4, "--padding", 1)
    assert [len(found["values"]) for found in mixed["spectra"]] == [3, 32]


def test_table(run, ones):
    shown = printed(run, ones, *CIRCULAR)
    for text in (
        "largest 9.0000",
        "certified, rounding included",
        "smallest between 0 and",
        "may be 0 condition number at least",
        "may be infinite nuclear norm",
        "Frobenius norm 18.000",
        "number 36 above 1 between 15 and 16: some may be exactly 1 error",
        "ones.npy: 1×1×3×3, float64",
        "padding 1, circular",
        "input size 6×6",
    ):
        assert text in shown, text
    few = printed(run, ones, *CIRCULAR, "--k", 3)
    assert "number the 3 largest of 36" in few
    assert "they need all, without --k" in few


def test_tables_of_unusual_spectra(capsys):
    from rich.console import Console

    console = Console(width=90, no_color=True)
    console.print(spectrum_table(made([0.0, 0.0], 0.0)))
    console.print(spectrum_table(made([1.0, 1.0])))
    console.print(spectra_table([made([2.0, 0.0]), made([2.0], omitted=5), made([math.inf], math.inf)], 90))
    shown = capsys.readouterr().out
    for text in ("infinite", "between 0 and 2: some may be exactly 1", "≤ 1.0", "≥ 1.99", "1 to 6", "0 to 1"):
        assert text in shown, text


def test_several_layers_side_by_side(run, kernels, tmp_path):
    result = run("spectrum", kernels, "--key", "a", "--key", "b", *CIRCULAR)
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["kernel", "a", "b"]
    assert [len(line.split()) for line in lines[1:3]] == [9, 9]
    other = tmp_path / "later" / "kernels.safetensors"
    other.parent.mkdir()
    other.write_bytes(kernels.read_bytes())
    stages = answer(run, kernels, other, "--key", "a", *CIRCULAR)["spectra"]
    assert [stage["name"] for stage in stages] == [str(kernels), str(other)]
    renamed = other.rename(tmp_path / "other.safetensors")
    both = answer(run, kernels, renamed, "--key", "a", "--key", "b", *CIRCULAR)["spectra"]
    names = ["kernels.safetensors, a", "kernels.safetensors, b", "other.safetensors, a", "other.safetensors, b"]
    assert [one["name"] for one in both] == names
    every = answer(run, kernels, "--all", "--padding", 1, "--input-size", 6)["spectra"]
    assert [one["name"] for one in every] == ["a", "b", "c"]
    assert every[2]["input_size"] == [6]


def test_numbers_beyond_floats_are_null(run, tmp_path):
    np.save(tmp_path / "large.npy", np.full((1, 1, 2), 1.7e308))
    words = (tmp_path / "large.npy", "--padding", 1, "--input-size", 4)
    (found,) = answer(run, *words)["spectra"]
    assert found["error"] is None
    assert found["nuclear"] == {"lower": 0, "upper": None}
    assert run("spectrum", *words, "--plot", tmp_path / "plot.png").exit_code == 0
    picture(tmp_path / "plot.png")


def test_plot_is_a_picture(run, kernels, tmp_path):
    path = tmp_path / "plot.png"
    result = run("spectrum", kernels, "--key", "a", *CIRCULAR, "--plot", path, "--json")
    assert result.exit_code == 0, result.output
    assert "plot written to" in result.stderr
    json.loads(result.stdout)
    assert picture(path) == (1500, 690)
    assert run("spectrum", kernels, "--all", "--input-size", 6, "--plot", path).exit_code == 0
    assert picture(path) == (1800, 690)


@pytest.mark.parametrize(
    "spectra",
    [
        [made([0.7])],
        [made([1 + 1e-7, 1 - 1e-7])],
        [made([0.0, 0.0], 0.0)],
        [made([2.0, 1e-9, 0.0])],
        [made([3.0, 1.0, 0.0])],
        [made([1.0, 1e-9], 1e-10)],
        [made([2.0, 1.0], 0.5)],
        [made([1e300]), made([1e-300])],
        [made([2e4, 1e-7]), made([3.0], omitted=4), made([0.0], 0.0)],
        [made([2.0, 1.0], name="_a $x^$"), made([1.0, 0.5], name="\n" + 60 * "b")],
        [made([2.0 + place, 1.0], name=str(place)) for place in range(35)],
        [made(np.linspace(3, 0.5, 5000).tolist())],
    ],
)
def test_plots_of_unusual_spectra(tmp_path, spectra):
    save_spectrum_plot(spectra, tmp_path / "plot.png")
    picture(tmp_path / "plot.png")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--input-size: the singular values of a convolution depend on it (ones.npy: 1×1×3×3, float64)"),
        (["--input-size", "2"], "the output would be empty"),
        (["--input-size", "x"], "--input-size 'x': expected an integer"),
        (["--input-size", "8,8,8"], "the kernel needs 2 sizes, got 3"),
        (["--stride", "x"], "--stride 'x': expected an integer"),
        (["--input-size", "8", "--k", "0"], "--k 0: expected at least 1"),
        (["--all", "--key", "a"], "--all: expected either all tensors or --key, got both"),
        (["--key", "weight"], "it holds one tensor without a name"),
        (["--plot", "plot.doc"], "--plot plot.doc: expected a file ending in .png"),
        (["--input-size", "70", "--padding", "1"], "got 4900 by 4900; spectral_norm"),
        (["--input-size", "70", "--padding", "1"], "(gramcert norm); try --k 10"),
    ],
)
def test_bad_options(refused, ones, words, message):
    assert message in refused("spectrum", ones, *words)


def test_what_is_too_large_for_a_few_values_too(refused, ones):
    for words in (("--padding", 1), ("--padding", 1, "--padding-mode", "circular")):
        line = refused("spectrum", ones, "--input-size", 10_000, *words)
        assert line.endswith("(gramcert norm)")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--input-size", "4"], "--input-size"),
        (["--stride", "2"], "--stride"),
        (["--padding-mode", "circular"], "--padding-mode"),
        (["--transposed"], "--transposed"),
    ],
)
def test_no_option_is_ignored_for_a_matrix(refused, tmp_path, words, option):
    np.save(tmp_path / "matrix.npy", np.eye(2))
    line = refused("spectrum", tmp_path / "matrix.npy", *words)
    assert line == f"error: {option}: a matrix has no geometry, expected a kernel with 3 to 5 dimensions"


def test_all_needs_kernels(refused, tmp_path):
    np.save(tmp_path / "matrix.npy", np.eye(2))
    line = refused("spectrum", tmp_path / "matrix.npy", "--all")
    assert "no tensor with 3 to 5 dimensions; it holds a tensor (2, 2)" in line


def test_plotting_is_an_extra(refused, ones, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'gramcert[plot]'" in refused("spectrum", ones, "--plot", "plot.png")
