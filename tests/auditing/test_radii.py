"""Certificates of radii: what ``certify`` wrote holds, and whatever was changed is refused, never with a traceback."""

import copy
import io
import math
import warnings
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

import gramcert
from gramcert.auditing.radii import _seal
from gramcert.auditing.strict_json import canonical, parse
from gramcert.files import BadFile, read_npz

SHAPE, CLASSES, STEPS = (4,), 3, 120


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.LeakyReLU(), nn.Linear(5, CLASSES)).eval()


@pytest.fixture(scope="module")
def module():
    return network()


@pytest.fixture(scope="module")
def model(module):
    """The same, read by torch.export once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module, (torch.zeros(1, *SHAPE),))


@pytest.fixture(scope="module")
def batch(module):
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return x, module(x).argmax(1)


@pytest.fixture(scope="module")
def written(module, batch, tmp_path_factory):
    """The certificate, and what was found."""
    path = tmp_path_factory.mktemp("radii") / "radii.npz"
    found = gramcert.certify(module, [batch, batch], [0.05], largest=True, search_steps=STEPS, certificate=path)
    return path, found


@pytest.fixture(scope="module")
def content(written):
    """Its text and its arrays."""
    arrays = read_npz(written[0])
    return parse(bytes(arrays.pop("text").numpy().tobytes()).decode()), arrays


def sealed(path, text, arrays):
    """A certificate with a seal that fits."""
    text = {name: value for name, value in text.items() if name != "seal"}
    return unsealed(path, text | {"seal": _seal(text, arrays)}, arrays)


def unsealed(path, text, arrays):
    content = np.frombuffer(canonical(text).encode(), dtype=np.uint8)
    np.savez(path, text=content, **{name: value.numpy() for name, value in arrays.items()})
    return path


def assert_refused(path, model, *words):
    """For a reason in words; nothing is certified."""
    found = gramcert.verify(path, model)
    assert not found.holds
    assert found.inputs == 0
    assert found.upper == math.inf
    assert all(len(problem) <= 320 for problem in found.problems)
    assert any(word in problem for problem in found.problems for word in words), found.problems
    return found


def test_a_certificate_holds(module, model, written, content):
    path, found = written
    seen = []
    verified = gramcert.verify(path, module, report=lambda *done: seen.append(done))
    assert verified.holds, verified.problems
    assert verified.inputs == 10
    assert verified.input_shape == SHAPE
    assert len(verified.checks) == len(content[0]["claims"]) == 3
    assert ("inputs", 10, 10) in seen
    assert gramcert.verify(str(path), model).holds
    # What it claims is what was found, up to what another machine may round otherwise.
    radii = content[1]["radii"]
    assert bool((radii <= found.radii).all())
    is_minorant = torch.tensor([name == "minorant" for name in found.by])
    assert bool(is_minorant.any())
    torch.testing.assert_close(radii[is_minorant], found.radii[is_minorant], rtol=1e-8, atol=0)


def test_written_anew_it_still_holds(model, content, tmp_path):
    """So that the refusals below are for what was changed."""
    assert gramcert.verify(sealed(tmp_path / "same.npz", *content), model).holds
    (tmp_path / "same.npz").rename(tmp_path / "SAME.NPZ")
    assert gramcert.verify(tmp_path / "SAME.NPZ", model).holds
    text, arrays = content
    other = text | {"unverified": {"model": "anything"}}
    assert gramcert.verify(sealed(tmp_path / "other.npz", other, arrays), model).holds
    lower = arrays | {"radii": arrays["radii"] / 2}
    assert gramcert.verify(sealed(tmp_path / "lower.npz", text, lower), model).holds


@pytest.mark.parametrize("factor", [1 + 1e-6, 2.0, math.inf])
def test_an_enlarged_radius_is_refused(model, content, tmp_path, factor):
    text, arrays = content
    radii = arrays["radii"].clone()
    radii[2] *= factor
    changed = arrays | {"radii": radii}
    assert_refused(sealed(tmp_path / "x.npz", text, changed), model, "input 2: its radius was not proved")
    assert_refused(unsealed(tmp_path / "y.npz", text, changed), model, "seal")


def test_many_wrong_radii_are_counted(model, content, tmp_path):
    text, arrays = content
    found = assert_refused(
        sealed(tmp_path / "x.npz", text, arrays | {"radii": arrays["radii"] * 2}), model, "and 7 more"
    )
    assert len(found.problems) == 4


def test_another_class_is_refused(model, content, tmp_path):
    text, arrays = content
    for classes, words in (
        ((arrays["classes"] + 1) % CLASSES, "its radius was not proved"),
        (arrays["classes"] + CLASSES, f"classes: expected numbers from 0 to {CLASSES - 1}"),
        (arrays["classes"] - CLASSES, f"classes: expected numbers from 0 to {CLASSES - 1}"),
    ):
        assert_refused(sealed(tmp_path / "x.npz", text, arrays | {"classes": classes}), model, words)


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: x.flip(0), lambda x: x * 1e30, lambda x: x * 0])
def test_moved_inputs_are_refused(model, content, tmp_path, change):
    text, arrays = content
    inputs = change(arrays["inputs"])
    assert_refused(sealed(tmp_path / "x.npz", text, arrays | {"inputs": inputs}), model, "its radius was not proved")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e30, 1e-40])
def test_changed_multipliers_are_refused(model, content, tmp_path, number):
    """Numbers that cannot be used prove nothing, and others less."""
    text, arrays = content
    proofs = [name for name in arrays if name.startswith("proof/")]
    assert len(proofs) == 5
    for name in proofs:
        if "slopes" in name and number in (0.0, -1.0, 1e-40):
            continue  # which are as good as any
        changed = arrays | {name: torch.full_like(arrays[name], number)}
        assert_refused(sealed(tmp_path / "x.npz", text, changed), model, "its radius was not proved")


def test_other_weights_are_refused(module, written):
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[2].bias[0] += 1e-6
    assert_refused(written[0], other, "2: its weights are not those of the certificate")
    assert_refused(written[0], network(1), "weights are not those of the certificate")
    assert_refused(written[0], nn.Sequential(nn.Linear(4, 3)), "graph: the model is another one")
    assert_refused(written[0], nn.Sequential(nn.Linear(7, 3)), "model: ")
    assert_refused(written[0], nn.Sequential(nn.Linear(4, 1)), "model: ")


def test_lowered_norms_are_refused(model, content, tmp_path):
    text, arrays = content
    for number in range(len(text["claims"])):
        changed = copy.deepcopy(text)
        changed["claims"][number]["upper"] *= 0.9
        assert_refused(sealed(tmp_path / "x.npz", changed, arrays), model, "was not proved")
    changed = text | {"claims": text["claims"][1:]}
    assert_refused(sealed(tmp_path / "x.npz", changed, arrays), model, "claims: expected one for each step")
    changed = text | {"claims": text["claims"][::-1]}
    assert_refused(sealed(tmp_path / "x.npz", changed, arrays), model, "claims: one is about another map")


@pytest.mark.parametrize("upper", [math.nextafter(0.0, 1.0), 0.0, 1e300, -1.0, 1, "1", None, [1.0], True])
def test_claims_of_any_type_are_refused(model, content, tmp_path, upper):
    """A norm that is too large proves less than was claimed."""
    changed = copy.deepcopy(content[0])
    changed["claims"][1]["upper"] = upper
    words = "was not proved", "claims: expected numbers that are not negative"
    assert_refused(sealed(tmp_path / "x.npz", changed, content[1]), model, *words)


@pytest.mark.parametrize("norms", [[1.0], [1.0, 2.0], [1, 2], ["a", "b"], {}, {"a": 1.0}, "ab", [None, None], [[], []]])
def test_norms_of_another_sort_are_refused(model, content, tmp_path, norms):
    changed = copy.deepcopy(content[0])
    changed["claims"][0]["norms"] = norms
    words = "claims: expected numbers that are not negative", "two norms are for residual layers only"
    assert_refused(sealed(tmp_path / "x.npz", changed, content[1]), model, *words)


def test_missing_and_unknown_arrays(model, content, tmp_path):
    text, arrays = content
    for name in arrays:
        rest = {key: value for key, value in arrays.items() if key != name}
        assert_refused(sealed(tmp_path / "x.npz", text, rest), model, f"{name}: missing", "proof: ")
    for name in ("proof/extras/99", "proof/other/1", "proof/slopes/99"):
        more = arrays | {name: torch.zeros(10, CLASSES - 1)}
        assert_refused(sealed(tmp_path / "x.npz", text, more), model, "proof: ")


SHAPES = [
    lambda x: x[:-1],
    lambda x: x[:0],
    lambda x: x[None],
    lambda x: x[..., None],
    lambda x: x.flatten()[0],
    lambda x: x.double() if x.dtype == torch.int64 else x.long(),
    lambda x: x > 0,
]


@pytest.mark.parametrize("change", range(len(SHAPES)))
def test_arrays_of_other_shapes_and_types(model, content, tmp_path, change):
    text, arrays = content
    for name in arrays:
        changed = arrays | {name: SHAPES[change](arrays[name]).clone()}
        words = "inputs: expected", "expected numbers of another type", "proof: "
        assert_refused(sealed(tmp_path / "x.npz", text, changed), model, *words)


def test_numbers_that_are_none(model, content, tmp_path):
    text, arrays = content
    for name, number in (("inputs", math.nan), ("inputs", math.inf), ("radii", math.nan), ("radii", -1.0)):
        changed = arrays | {name: torch.full_like(arrays[name], number)}
        assert_refused(sealed(tmp_path / "x.npz", text, changed), model, "inputs, radii: expected finite numbers")


@pytest.mark.parametrize(
    "value", [None, 1, 2.5, "x", [], {}, [1], [None], [[]], [{}], True, [0], [-4], [4, 4], [10**40]]
)
def test_texts_of_any_type_are_refused(model, content, tmp_path, value):
    """Field by field."""
    text, arrays = content
    for name in ("format", "input_shape", "graph", "claims"):
        found = gramcert.verify(sealed(tmp_path / "x.npz", text | {name: value}, arrays), model)
        assert not found.holds
        assert found.problems[0]
    for place in (0, 1, len(text["graph"]) - 1):
        for name in text["graph"][place]:
            changed = copy.deepcopy(text)
            changed["graph"][place][name] = value
            if changed != text:
                assert not gramcert.verify(sealed(tmp_path / "x.npz", changed, arrays), model).holds
    assert_refused(unsealed(tmp_path / "x.npz", text | {"seal": value}, arrays), model, "seal")


def test_fields_of_the_text(model, content, tmp_path):
    text, arrays = content
    for name in text:
        rest = {key: value for key, value in text.items() if key != name}
        if name != "seal":
            assert_refused(
                sealed(tmp_path / "x.npz", rest, arrays), model, "expected the fields", "expected the format"
            )
    assert_refused(unsealed(tmp_path / "x.npz", text | {"more": 1}, arrays), model, "expected the fields")
    for raw in (b"", b"{", b"\xff\xfe", b"[]", b'{"format": NaN}', b"[" * 100_000, b"1" * 10_000, b'{"a":1,"a":2}'):
        np.savez(tmp_path / "x.npz", text=np.frombuffer(raw, dtype=np.uint8).copy(), radii=np.ones(1))
        assert_refused(tmp_path / "x.npz", model, "expected a certificate of radii", "expected the format")


# Files


def zipped(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return path


def npy(header, body=b""):
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


def test_files_that_are_no_archives(model, written, tmp_path):
    raw = written[0].read_bytes()
    path = tmp_path / "x.npz"
    for content in (b"", b"PK", b"junk" * 99, raw[:10], raw[: len(raw) // 2], raw[:-1], raw[5:]):
        path.write_bytes(content)
        assert_refused(path, model, "expected a certificate of radii")
    with pytest.raises(ValueError, match="no such file"):
        gramcert.verify(tmp_path / "absent.npz", model)
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ValueError, match="not a regular file"):
        gramcert.verify(tmp_path / "folder.npz", model)


def test_single_bytes_that_were_changed(model, written, tmp_path):
    """Wherever they are: a problem, or what does not matter to anybody."""
    raw, path, draw = written[0].read_bytes(), tmp_path / "x.npz", torch.Generator().manual_seed(0)
    refused = 0
    for place in torch.randint(0, len(raw), (40,), generator=draw).tolist():
        changed = bytearray(raw)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        refused += not gramcert.verify(path, model).holds
    assert refused >= 20


def test_python_objects_are_refused_and_not_made(model, written, tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("something was executed",))

    path = tmp_path / "x.npz"
    np.savez(path, text=np.array([Trap()], dtype=object))
    assert_refused(path, model, "expected real numbers")
    with pytest.raises(BadFile, match="expected real numbers"):
        read_npz(path)
    for kind in ("U3", "S3", "M8[s]", "c16", [("a", "<f8")]):
        np.savez(path, text=np.zeros(2, dtype=kind))
        assert_refused(path, model, "expected real numbers")


def test_archives_that_promise_too_much(model, tmp_path):
    """Nothing is unpacked of a size that is refused by what the archive says, or by what the array says."""
    path = tmp_path / "x.npz"
    large = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999,), }", b"\0" * 64)
    assert_refused(zipped(path, {"text.npy": large}), model, "in the size of their array")
    np.savez_compressed(path, text=np.zeros(2**20, dtype=np.uint8))
    with pytest.raises(BadFile, match="expected arrays of at most 1000 bytes in all"):
        read_npz(path, most_bytes=1000)
    raw = bytearray(path.read_bytes())
    for kind, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        place = raw.index(kind) + offset
        raw[place : place + 4] = (0xFFFFFFF0).to_bytes(4, "little")
    path.write_bytes(raw)
    assert_refused(path, model, "in the size of their array", "expected a certificate of radii")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{}",
        "1",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-2, -4)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (0,)}",
        "{'descr': '<f16', 'fortran_order': False, 'shape': (4,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (8,)}",
        "{'descr': '<f8', 'fortran_order': 5, 'shape': (8,)}",
        "{'descr': [], 'fortran_order': False, 'shape': (8,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}",
        "__import__('os').abort()",
    ],
)
def test_headers_of_arrays(model, tmp_path, header):
    path = zipped(tmp_path / "x.npz", {"text.npy": npy(header, b"\0" * 64)})
    assert_refused(path, model, "expected a certificate of radii")


def test_compressed_archives_hold(model, content, written, tmp_path):
    with np.load(written[0]) as archive:
        np.savez_compressed(tmp_path / "x.npz", **archive)
    assert gramcert.verify(tmp_path / "x.npz", model).holds
    assert (tmp_path / "x.npz").stat().st_size < written[0].stat().st_size


def test_arrays_in_other_orders_of_bytes_and_axes(tmp_path):
    """Read as the numbers that they are."""
    array = np.arange(12, dtype=np.float64).reshape(3, 4)
    np.savez(tmp_path / "x.npz", a=array.astype(">f8"), b=np.asfortranarray(array), c=array.astype(">i4"))
    found = read_npz(tmp_path / "x.npz")
    assert all(torch.equal(value.double(), torch.from_numpy(array)) for value in found.values())
    assert io.BytesIO((tmp_path / "x.npz").read_bytes()).read(2) == b"PK"


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (((1,",
        "(" * 9000,
        "'''",
        "{1: 2, 'a': 3}",
        "{[]: 1}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1L,)}",
    ],
    ids=range(7),
)
def test_headers_that_are_no_header(model, tmp_path, header):
    """NumPy reads them as Python, which raises whatever it likes."""
    path = zipped(tmp_path / "x.npz", {"text.npy": npy(header, b"\0" * 8)})
    assert_refused(path, model, "expected a certificate of radii")


def test_other_compressions_are_refused(model, tmp_path):
    path = zipped(tmp_path / "x.npz", {"text.npy": npy("{}")}, zipfile.ZIP_LZMA)
    assert_refused(path, model, "expected arrays as NumPy compresses them")


@pytest.mark.parametrize("norms", [1, 1.5, True, "12", [1.0], [1.0, None]])
def test_norms_of_another_type_are_refused(model, content, tmp_path, norms):
    changed = copy.deepcopy(content[0])
    changed["claims"][0]["norms"] = norms
    assert_refused(sealed(tmp_path / "x.npz", changed, content[1]), model, "claims: ")
