import builtins
import io
import json
import os
import pickle
import re
import struct
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from gramcert.training import cifar
from gramcert.training.cifar import read_cifar
from gramcert.training.images import load_images

REAL = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "cifar10"

FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
TRAIN = {"cifar10": [f"data_batch_{i}" for i in range(1, 6)], "cifar100": ["train"]}
TEST = {"cifar10": "test_batch", "cifar100": "test"}
META = {"cifar10": "batches.meta", "cifar100": "meta"}
CLASSES = {"cifar10": 10, "cifar100": 100}


class Python2Pickler(pickle._Pickler):
    """Text as Python 2 wrote it, which is neither bytes nor text in Python 3."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_text(self, text):
        raw = text.encode() if isinstance(text, str) else text
        if len(raw) < 256:
            self.write(pickle.SHORT_BINSTRING + bytes([len(raw)]) + raw)
        else:
            self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(text)

    dispatch[str] = dispatch[bytes] = save_text


def as_python_2(value):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    content = file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert b"_codecs" not in content
    return content


def with_text_keys(value):
    return pickle.dumps({key.decode(): content for key, content in value.items()}, protocol=2)


WRITERS = {
    "Python 2": as_python_2,
    "text keys": with_text_keys,
    **{f"protocol {n}": lambda value, n=n: pickle.dumps(value, protocol=n) for n in range(5)},
}


def fields(dataset, images, labels, name):
    """What the real files hold, in their order."""
    result = {b"batch_label": name, b"data": images, b"filenames": [b"a.png"] * len(images)}
    if dataset == "cifar10":
        return result | {b"labels": labels}
    return result | {b"fine_labels": labels, b"coarse_labels": [label // 5 for label in labels]}


def files(dataset, dump=as_python_2):
    """The files of a small archive, its training and test images, labels, and class names."""
    random = np.random.default_rng(0)
    count, contents, images, labels = CLASSES[dataset], {}, [], []
    for place, name in enumerate([*TRAIN[dataset], TEST[dataset]]):
        images.append(random.integers(0, 256, (2 + place % 2, 3072), dtype=np.uint8))
        labels.append(random.integers(0, count, len(images[-1])).tolist())
        contents[name] = dump(fields(dataset, images[-1], labels[-1], b"batch"))
    names = [f"class {i}".encode() for i in range(count)]
    key = b"label_names" if dataset == "cifar10" else b"fine_label_names"
    contents[META[dataset]] = dump({b"num_vis": 3072, key: names})
    train = np.concatenate(images[:-1]), [label for batch in labels[:-1] for label in batch]
    return contents, train, (images[-1], labels[-1]), tuple(name.decode() for name in names)


def write_folder(path, contents):
    path.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (path / name).write_bytes(content)
    return path


def write_archive(path, contents, mode="w:gz", more=()):
    """A tar file of the contents by path inside, and of further members."""
    with tarfile.open(path, mode) as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in more:
            tar.addfile(member)
    return path


def inside(dataset, contents):
    return {f"{FOLDERS[dataset]}/{name}": content for name, content in contents.items()}


def require_same(found, train, test, names):
    for (images, labels), (expected, expected_labels) in zip(found[:2], (train, test), strict=True):
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (3, 32, 32)
        assert images.flatten(1).numpy().tobytes() == expected.tobytes()
        assert labels.tolist() == expected_labels
    assert found[2] == names


@pytest.mark.parametrize("dataset", FOLDERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_reading_gives_the_same_bytes_however_they_were_pickled(tmp_path, dataset, writer):
    contents, *expected = files(dataset, WRITERS[writer])
    require_same(read_cifar(write_folder(tmp_path / "x", contents), dataset), *expected)


@pytest.mark.parametrize("dataset", FOLDERS)
def test_folders_and_archives(tmp_path, dataset):
    contents, *expected = files(dataset)
    members = inside(dataset, contents)
    short = FOLDERS[dataset].removesuffix("-batches-py").removesuffix("-python")
    (tmp_path / "packed").mkdir()
    paths = [
        write_folder(tmp_path / "parent" / FOLDERS[dataset], contents),
        tmp_path / "parent",
        write_archive(tmp_path / "any name", members),
        write_archive(tmp_path / "plain.tar", members, "w"),
        write_archive(tmp_path / "packed" / f"{short}-python.tar.gz", members),
        tmp_path / "packed",
    ]
    for path in paths:
        require_same(read_cifar(path, dataset), *expected)
    images = load_images(dataset, tmp_path / "parent")
    assert images.shape == (3, 32, 32)
    assert images.classes == expected[-1]
    assert images.train.white == 255


def test_both_archives_in_one_folder(tmp_path):
    for dataset, name in (("cifar10", "cifar-10-python.tar.gz"), ("cifar100", "cifar-100-python.tar.gz")):
        write_archive(tmp_path / name, inside(dataset, files(dataset)[0]))
    for dataset in FOLDERS:
        require_same(read_cifar(tmp_path, dataset), *files(dataset)[1:])


def test_channels_come_one_after_the_other(tmp_path):
    """Red is the first 1024 bytes of a row, each channel row by row."""
    row = np.zeros((1, 3072), dtype=np.uint8)
    row[0, 1024 + 32 * 5 + 7] = 9
    contents = files("cifar10")[0] | {"test_batch": as_python_2({b"data": row, b"labels": [3]})}
    _, (test, _), _ = read_cifar(write_folder(tmp_path / "x", contents), "cifar10")
    assert test.nonzero().tolist() == [[0, 1, 5, 7]]


class Calls:
    """Pickled, a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


# Good as a batch and as the list of names.
ALL_FIELDS = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [3], b"label_names": [b"a"] * 10}


class Refers(pickle.Pickler):
    def persistent_id(self, value):
        return "elsewhere" if value is Refers else None


def refers(protocol):
    file = io.BytesIO()
    Refers(file, protocol).dump(ALL_FIELDS | {b"more": Refers})
    return file.getvalue()


CANARY = "gramcert-canary"
COMMAND = f"touch {CANARY}"
OPEN = f"open({CANARY!r}, 'w').close()"

HOSTILE = {
    "os.system": pickle.dumps(Calls(os.system, COMMAND), 2),
    "os.system, protocol 0": pickle.dumps(Calls(os.system, COMMAND), 0),
    "os.system, protocol 4": pickle.dumps(Calls(os.system, COMMAND), 4),
    "os.system, by the name of its module": f"cos\nsystem\n(S'{COMMAND}'\ntR.".encode(),
    "os.system, as an instance": f"(S'{COMMAND}'\nios\nsystem\n.".encode(),
    "os.system, as an object": f"(cos\nsystem\nS'{COMMAND}'\no.".encode(),
    "subprocess.Popen, by __new__": b"\x80\x02csubprocess\nPopen\nX\x02\x00\x00\x00ls\x85\x81.",
    "eval": pickle.dumps(Calls(eval, OPEN), 2),
    "exec": pickle.dumps(Calls(exec, OPEN), 3),
    "getattr": pickle.dumps(Calls(getattr, "", "join"), 2),
    "import": pickle.dumps(Calls(builtins.__import__, "antigravity"), 2),
    "beside good fields": pickle.dumps(ALL_FIELDS | {b"more": Calls(eval, OPEN)}, 2),
    "after good fields": pickle.dumps([ALL_FIELDS, Calls(eval, OPEN)], 2)[:-1] + b"0.",
    "a name with dots": b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.tofile.\x93.",
    "a name inside of a known class": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.",
    "np.load": b"\x80\x02cnumpy\nload\nX\x01\x00\x00\x00x\x85R.",
    "an extension": b"\x80\x02\x82\x01.",
    "state for a known function": b"\x80\x02c_codecs\nencode\n}X\x08\x00\x00\x00__code__Nsb.",
    "state for a known class": b"\x80\x02cnumpy\nndarray\n}X\x01\x00\x00\x00xNsb.",
    "bytes(10**12)": pickle.dumps(Calls(bytes, 10**12), 2),
    "bytes(10**12), protocol 4": pickle.dumps(Calls(bytes, 10**12), 4),
    "bytearray(10**12)": pickle.dumps(Calls(bytearray, 10**12), 2),
    "10**12 bytes announced": b"\x80\x04\x8e" + struct.pack("<Q", 10**12) + b"x.",
    "a frame of 10**12 bytes": b"\x80\x04\x95" + struct.pack("<Q", 10**12) + b"N.",
    "2**31 bytes of text": b"\x80\x02T" + struct.pack("<i", 2**31 - 1) + b"x.",
    "text in another encoding": b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x03\x00\x00\x00rot\x86R.",
    "a persistent name": refers(0),
    "a persistent object": refers(2),
    "place 2**24 of the memo": b"\x80\x02Nr" + struct.pack("<I", 2**24) + b".",
    "place 10**30 of the memo": b"Np" + str(10**30).encode() + b"\n.",
    "a million tuples in each other as a key": b"\x80\x02})" + b"\x85" * 10**6 + b"K\x01s.",
    "a list inside of itself": b"\x80\x02]q\x00h\x00a.",
    "an unknown protocol": b"\x80\xff.",
    "nothing on the stack": b"\x80\x02.",
    "empty": b"",
    "text": b"CIFAR-10 python version",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "None": pickle.dumps(None),
    "a list": pickle.dumps([1, 2, 3], 2),
}


def read_with(path, name, content, dataset="cifar10"):
    """One file of a good archive replaced."""
    return read_cifar(write_folder(path / "x", files(dataset)[0] | {name: content}), dataset)


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "batches.meta"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_pickles_are_refused_and_execute_nothing(tmp_path, monkeypatch, name, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{name}: ") as error:
        read_with(tmp_path, name, HOSTILE[kind])
    assert len(str(error.value)) < 300
    assert not (tmp_path / CANARY).exists()
    assert {path.name for path in tmp_path.iterdir()} == {"x"}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("os.system", "it asks for (posix|nt).system, which no image archive needs"),
        ("eval", "it asks for __builtin__.eval"),
        ("beside good fields", "it asks for __builtin__.eval"),
        ("a name inside of a known class", "it asks for numpy.ndarray.__init__"),
        ("np.load", "it asks for numpy.load"),
        ("a persistent name", "it refers to something outside of the file"),
        ("a persistent object", "it refers to something outside of the file"),
        ("place 2**24 of the memo", "place 16777216 of its memo"),
        ("a million tuples in each other as a key", "1000000 tuples"),
        ("text in another encoding", "text in the encoding 'rot'"),
    ],
)
def test_the_refusal_says_why(kind, reason):
    with pytest.raises(ValueError, match=rf"x: refused, not a batch of images \({reason}"):
        cifar._unpickled("x", HOSTILE[kind])


def test_the_canary_would_sing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("os.system", "os.system, as an object", "eval", "exec"):
        pickle.loads(HOSTILE[kind], encoding="utf-8")
        (tmp_path / CANARY).unlink()


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if "10**12" in kind or "memo" in kind or "2**31" in kind])
def test_hostile_pickles_take_no_memory(kind):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="x: refused, not a batch of images"):
            cifar._unpickled("x", HOSTILE[kind])
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_known_names_keep_their_meaning_after_a_hostile_file(tmp_path):
    for content in HOSTILE.values():
        with pytest.raises(ValueError, match="data_batch_1: "):
            read_with(tmp_path, "data_batch_1", content)
    contents, *expected = files("cifar10", WRITERS["protocol 2"])
    require_same(read_cifar(write_folder(tmp_path / "x", contents), "cifar10"), *expected)


@pytest.mark.parametrize("writer", ["Python 2", "protocol 0", "protocol 4"])
def test_files_cut_short(tmp_path, writer):
    content = WRITERS[writer](fields("cifar10", np.zeros((1, 3072), np.uint8), [1], b"batch"))
    read_with(tmp_path, "data_batch_2", content)
    for length in [*range(0, len(content), 397), len(content) - 1]:
        with pytest.raises(ValueError, match="data_batch_2: refused"):
            read_with(tmp_path, "data_batch_2", content[:length])


def test_random_and_damaged_bytes_are_read_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    layout = cifar._LAYOUTS["cifar10"]
    good = as_python_2(fields("cifar10", np.zeros((1, 3072), np.uint8), [1], b"batch"))
    head = len(good) - 3072  # damage where the structure is: the pixels are in the middle
    refusals = []
    for trial in range(600):
        if trial % 3 == 0:
            content = random.bytes(100)
        else:
            content = bytearray(good)
            for place in random.integers(0, head, random.integers(1, 4)):
                content[place if place < good.index(bytes(3072)) else place + 3072] = random.integers(256)
        try:
            images, labels = cifar._batch("data_batch_1", bytes(content), layout)
            assert images.shape == (len(labels), 3, 32, 32)
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) > 300
    assert all(text.startswith("data_batch_1: ") for text in refusals)
    assert not list(tmp_path.iterdir())


GOOD = np.zeros((2, 3072), dtype=np.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"data": np.zeros((2, 3071), np.uint8)}, r"expected rows of 3072 bytes, got \(2, 3071\)"),
        ({b"data": np.zeros((2, 3, 32, 32), np.uint8)}, r"expected rows of 3072 bytes, got \(2, 3, 32, 32\)"),
        ({b"data": np.zeros(6144, np.uint8)}, r"expected rows of 3072 bytes, got \(6144,\)"),
        ({b"data": np.array(3, np.uint8)}, r"expected rows of 3072 bytes, got \(\)"),
        ({b"data": np.zeros((2, 3072), np.float32)}, "an array of type '?b?'?f4'?, expected bytes"),
        ({b"data": np.zeros((2, 3072), np.int8)}, "an array of type '?b?'?i1'?, expected bytes"),
        ({b"data": np.zeros((2, 3072), np.int64)}, "expected bytes"),
        ({b"data": np.zeros((2, 3072), object)}, "an array of type '?b?'?O8'?, expected bytes"),
        ({b"data": np.zeros((2, 3072), "S1")}, "expected bytes"),
        ({b"data": np.zeros((2, 3072), [("x", "u1")])}, "expected bytes"),
        ({b"data": np.asfortranarray(GOOD)}, "an array stored by columns"),
        ({b"data": GOOD.tobytes()}, "expected rows of 3072 bytes, got no array of bytes"),
        ({b"data": [[0] * 3072] * 2}, "expected rows of 3072 bytes, got no array of bytes"),
        ({b"data": None}, "expected rows of 3072 bytes, got no array of bytes"),
        ({b"labels": [0]}, "expected a list of 2 labels"),
        ({b"labels": [0, 1, 2]}, "expected a list of 2 labels"),
        ({b"labels": (0, 1)}, "expected a list of 2 labels"),
        ({b"labels": np.array([0, 1], np.uint8)}, "expected a list of 2 labels"),
        ({b"labels": [0, 10]}, "expected labels from 0 to 9"),
        ({b"labels": [0, -1]}, "expected labels from 0 to 9"),
        ({b"labels": [0, 10**30]}, "expected labels from 0 to 9"),
        ({b"labels": [0, 1.0]}, "expected labels from 0 to 9"),
        ({b"labels": [0, True]}, "expected labels from 0 to 9"),
        ({b"labels": [0, None]}, "expected labels from 0 to 9"),
    ],
)
@pytest.mark.parametrize("dump", [as_python_2, pickle.dumps], ids=["Python 2", "Python 3"])
def test_fields_that_are_no_images(tmp_path, change, message, dump):
    content = {b"data": GOOD, b"labels": [0, 1]} | change
    dumped = dump(content) if dump is as_python_2 else dump(content, protocol=4)
    with pytest.raises(ValueError, match=f"^data_batch_3: .*{message}"):
        read_with(tmp_path, "data_batch_3", dumped)


@pytest.mark.parametrize("rows", [0, 2, 3, 2**54 + 1, 2**64 + 1, -1, 1.0, True])
def test_shapes_that_the_bytes_do_not_have(tmp_path, rows):
    """2**54 + 1 rows of 3072 are 3072 in the arithmetic of 64 bits."""
    state = (1, (rows, 3072), np.dtype("u1"), False, bytes(3072))
    array = (np.ndarray, (0,), b"b")

    class Array:
        def __reduce__(self):
            return np.zeros(0, np.uint8).__reduce__()[0], array, state

    with pytest.raises(ValueError, match=r"^data_batch_1: an array of shape \(.*, 3072\) with 3072 bytes"):
        read_with(tmp_path, "data_batch_1", pickle.dumps({b"data": Array(), b"labels": [0]}, 2))


@pytest.mark.parametrize("dataset", FOLDERS)
def test_missing_fields(tmp_path, dataset):
    labels = b"labels" if dataset == "cifar10" else b"fine_labels"
    name, good = TEST[dataset], {b"data": GOOD, labels: [0, 1]}
    for key in good:
        rest = {other: value for other, value in good.items() if other != key}
        with pytest.raises(ValueError, match=f"^{name}: expected a dictionary with '{key.decode()}'"):
            read_with(tmp_path, name, as_python_2(rest), dataset)
    with pytest.raises(ValueError, match=f"^{META[dataset]}: expected a dictionary with '.*label_names'"):
        read_with(tmp_path, META[dataset], as_python_2({}), dataset)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([b"a"] * 9, "expected 10 class names"),
        (b"0123456789", "expected 10 class names"),
        ([b"a"] * 9 + [3], "expected class names as text"),
        ([b"a"] * 9 + [[b"a"]], "expected class names as text"),
    ],
)
def test_class_names_that_are_none(tmp_path, names, message):
    with pytest.raises(ValueError, match=rf"^batches\.meta: {message}"):
        read_with(tmp_path, "batches.meta", as_python_2({b"label_names": names}))


def test_the_other_archive(tmp_path):
    path = write_folder(tmp_path / "x", files("cifar100")[0])
    with pytest.raises(ValueError, match="x: expected the folder cifar-10-batches-py, or its archive"):
        read_cifar(path, "cifar10")
    archive = write_archive(tmp_path / "x.tar.gz", inside("cifar100", files("cifar100")[0]))
    with pytest.raises(ValueError, match=r"x\.tar\.gz: cifar-10-batches-py/batches\.meta is not in it"):
        read_cifar(archive, "cifar10")


@pytest.mark.parametrize("name", ["data_batch_4", "batches.meta"])
def test_files_that_are_missing_or_folders(tmp_path, name):
    contents = files("cifar10")[0]
    del contents[name]
    path = write_folder(tmp_path / "x", contents)
    with pytest.raises(ValueError, match=rf"x/{re.escape(name)}: expected a file"):
        read_cifar(path, "cifar10")
    os.mkfifo(path / name)  # whose end would be waited for
    with pytest.raises(ValueError, match=rf"x/{re.escape(name)}: expected a file"):
        read_cifar(path, "cifar10")
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(ValueError, match=rf"x/{re.escape(name)}: expected a file"):
        read_cifar(path, "cifar10")
    archive = write_archive(tmp_path / "x.tar.gz", inside("cifar10", contents))
    with pytest.raises(ValueError, match=rf"x\.tar\.gz: cifar-10-batches-py/{re.escape(name)} is not in it"):
        read_cifar(archive, "cifar10")


def test_files_larger_than_any_archive_has(tmp_path, monkeypatch):
    contents, *_ = files("cifar10")
    monkeypatch.setattr(cifar, "LARGEST_FILE", len(contents["data_batch_1"]) - 1)
    with pytest.raises(ValueError, match=r"data_batch_1: expected at most \d+ bytes"):
        read_cifar(write_folder(tmp_path / "x", contents), "cifar10")
    with pytest.raises(ValueError, match=r"x\.tar\.gz: .*data_batch_1: expected at most \d+ bytes"):
        read_cifar(write_archive(tmp_path / "x.tar.gz", inside("cifar10", contents)), "cifar10")


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (tarfile.SYMTYPE, "data_batch_1"),
        (tarfile.SYMTYPE, "data_batch_2"),
        (tarfile.SYMTYPE, "{outside}"),
        (tarfile.SYMTYPE, "../../../../outside"),
        (tarfile.LNKTYPE, "{outside}"),
        (tarfile.LNKTYPE, "cifar-10-batches-py/data_batch_2"),
        (tarfile.DIRTYPE, ""),
        (tarfile.FIFOTYPE, ""),
        (tarfile.CHRTYPE, ""),
    ],
)
def test_links_and_devices_in_an_archive(tmp_path, kind, target):
    contents = files("cifar10")[0]
    (tmp_path / "outside").write_bytes(contents.pop("data_batch_1"))
    member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
    member.type, member.linkname = kind, target.format(outside=tmp_path / "outside")
    archive = write_archive(tmp_path / "x.tar.gz", inside("cifar10", contents), more=[member])
    with pytest.raises(ValueError, match=r"x\.tar\.gz: .*cifar-10-batches-py/data_batch_1 is not a file"):
        read_cifar(archive, "cifar10")


def test_nothing_is_unpacked(tmp_path, monkeypatch):
    """Members that would land elsewhere are passed over."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    contents, *expected = files("cifar10")
    escapes = {f"../{CANARY}": b"x", str(tmp_path / CANARY): b"x", f"cifar-10-batches-py/../../{CANARY}": b"x"}
    archive = write_archive(tmp_path / "x.tar.gz", inside("cifar10", contents) | escapes)
    require_same(read_cifar(archive, "cifar10"), *expected)
    assert {path.name for path in tmp_path.rglob("*")} == {"here", "x.tar.gz"}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_damaged_archives_are_read_or_refused(tmp_path, mode):
    contents, *expected = files("cifar10")
    path = write_archive(tmp_path / "x.tar", inside("cifar10", contents), mode)
    good, random = path.read_bytes(), np.random.default_rng(0)
    refusals = []
    for trial in range(60):
        content = bytearray(good)
        for place in random.integers(0, len(content), 8):
            content[place] ^= random.integers(1, 256)
        if trial % 3 == 0:
            content = content[: random.integers(0, len(content) * 9 // 10)]
        path.write_bytes(content)
        try:
            found = read_cifar(path, "cifar10")
            assert len(found[0][0]) == len(expected[0][1])
        except ValueError as error:
            refusals.append(str(error))
    assert len(refusals) >= 20
    beginning = re.compile(rf"({re.escape(str(path))}|data_batch_\d|test_batch|batches\.meta): ")
    assert all(beginning.match(text) for text in refusals)


@pytest.mark.parametrize("content", [b"", b"not an archive", b"\x1f\x8b" + bytes(100)])
def test_what_is_no_archive(tmp_path, content):
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.tar\.gz: "):
        read_cifar(tmp_path / "x.tar.gz", "cifar10")


def test_nothing_there(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: expected the folder cifar-10-batches-py"):
            read_cifar(path, "cifar10")


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the images of ../shared/data/cifar10")
def test_real_images(tmp_path):
    """The first 10,000, undone from their packing, as five batches; their means are nearly those of all 50,000."""
    with np.load(REAL / "data_batch_1.npz") as packed:
        planes = packed["residual"].cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
        labels = packed["label"].tolist()
    planes[0] += planes[1]
    planes[2] += planes[1]
    rows = np.ascontiguousarray(planes.transpose(1, 0, 2, 3)).reshape(len(labels), 3072)
    names = json.loads((REAL / "label_names.json").read_text())
    contents = {"batches.meta": as_python_2({b"label_names": names})}
    for place, name in enumerate(TRAIN["cifar10"]):
        part = slice(2000 * place, 2000 * (place + 1))
        contents[name] = as_python_2(fields("cifar10", rows[part], labels[part], b"batch"))
    contents["test_batch"] = contents["data_batch_1"]
    images = load_images("cifar10", write_folder(tmp_path / "x", contents))
    assert images.train.images.numpy().tobytes() == rows.tobytes()
    assert images.train.labels.tolist() == labels
    assert images.classes[labels[0]] == "frog"  # as everybody knows
    assert images.channel_means() == pytest.approx([0.4914, 0.4822, 0.4465], abs=0.005)


@pytest.mark.parametrize(
    "kind",
    [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_SPARSE],
)
def test_headers_that_would_take_all_memory(tmp_path, kind):
    """Zeros are a thousandth of their size in the file."""
    member = tarfile.TarInfo("long")
    member.type, member.size = kind, 2**26
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
        tar.addfile(member, io.BytesIO(bytes(2**26)))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"x\.tar\.gz: cannot be read as an archive \((.|\n)*a header of type"):
        read_cifar(tmp_path / "x.tar.gz", "cifar10")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_archives_with_ordinary_headers_before_their_files(tmp_path):
    contents, train, test, names = files("cifar10")
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in inside("cifar10", contents).items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 0.5  # which is written into a header of its own
            tar.addfile(member, io.BytesIO(content))
    require_same(read_cifar(tmp_path / "x.tar", "cifar10"), train, test, names)


def test_archives_of_too_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "MOST_MEMBERS", 5)
    archive = write_archive(tmp_path / "x.tar.gz", inside("cifar10", files("cifar10")[0]))
    with pytest.raises(ValueError, match="expected at most 5 files"):
        read_cifar(archive, "cifar10")


def test_pickles_of_too_many_instructions(tmp_path):
    """Each makes a set of 200 bytes out of one."""
    contents = files("cifar10")[0] | {"test_batch": b"\x80\x04" + b"\x8f" * 2**21 + b"."}
    path = write_folder(tmp_path / "x", contents)
    with pytest.raises(ValueError, match=r"test_batch: refused, .*expected at most 1048576 instructions"):
        read_cifar(path, "cifar10")


def test_batches_without_images(tmp_path):
    contents = files("cifar10")[0]
    contents["test_batch"] = as_python_2(fields("cifar10", np.zeros((0, 3072), np.uint8), [], b"batch"))
    with pytest.raises(ValueError, match="test_batch: expected at least one image"):
        read_cifar(write_folder(tmp_path / "x", contents), "cifar10")
