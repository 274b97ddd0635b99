import os
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from gramcert.training.folder import read_folder
from gramcert.training.images import load_images
from gramcert.training.randomness import generator

RANDOM = np.random.default_rng(0)


def pixels(*shape):
    return RANDOM.integers(0, 256, shape, dtype=np.uint8)


def save(path, array, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return path


@pytest.fixture
def folder(tmp_path):
    """Two classes of coloured images of 4×5, and their arrays by path."""
    arrays = {}
    for part, count in (("train", 3), ("test", 1)):
        for name in ("dog", "cat"):
            for index in range(count):
                path = save(tmp_path / part / name / f"{index}.png", array := pixels(4, 5, 3))
                arrays[path.relative_to(tmp_path).as_posix()] = array
    return tmp_path, arrays


def in_order(part):
    """Images and labels as the files are sorted: mixed in one way, always the same."""
    images, labels = part
    places = torch.randperm(len(labels), generator=generator(0, "folder")).argsort()
    return images[places], labels[places]


def test_the_first_images_are_of_several_classes(tmp_path):
    for part in ("train", "test"):
        for name in ("ant", "bee", "cat"):
            for index in range(30):
                save(tmp_path / part / name / f"{index}.png", pixels(2, 2))
    train, test, _ = read_folder(tmp_path)
    for _, labels in (train, test):
        assert set(labels[:12].tolist()) == set(labels[-12:].tolist()) == {0, 1, 2}


def test_coloured_images_come_back_with_classes_in_alphabetical_order(folder):
    path, arrays = folder
    *parts, classes = read_folder(path)
    (train, train_labels), (test, test_labels) = map(in_order, parts)
    assert classes == ("cat", "dog")
    assert train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert test_labels.tolist() == [0, 1]
    names = [f"train/{name}/{index}.png" for name in classes for index in range(3)]
    for image, name in zip(train, names, strict=True):
        assert torch.equal(image, torch.from_numpy(arrays[name]).permute(2, 0, 1))
    for image, name in zip(test, ["test/cat/0.png", "test/dog/0.png"], strict=True):
        assert torch.equal(image, torch.from_numpy(arrays[name]).permute(2, 0, 1))
    images = load_images("folder", path)
    assert torch.equal(images.train.images, parts[0][0])
    assert images.shape == (3, 4, 5)
    assert images.train.values().max() <= 1


def test_grey_images_have_one_channel(tmp_path):
    arrays = [pixels(3, 7) for _ in range(4)]
    for array, name in zip(arrays, ["train/a/x.png", "train/b/x.PNG", "test/a/x.bmp", "test/b/x.png"], strict=True):
        save(tmp_path / name, array)
    (train, _), (test, _) = map(in_order, read_folder(tmp_path)[:2])
    assert torch.equal(train, torch.from_numpy(np.stack(arrays[:2]))[:, None])
    assert torch.equal(test, torch.from_numpy(np.stack(arrays[2:]))[:, None])


def test_other_files_and_classes_without_test_images(folder):
    path, _ = folder
    (path / "train" / "README.txt").write_text("not a class")
    (path / "train" / "cat" / "notes.txt").write_text("not an image")
    (path / "test" / "dog" / "0.png").unlink()
    (path / "test" / "dog").rmdir()
    (train, _), (_, labels), classes = read_folder(path)
    assert len(train) == 6
    assert labels.tolist() == [0]
    assert classes == ("cat", "dog")


def test_transparency_and_palettes_are_colours(folder):
    path, arrays = folder
    array = arrays["train/cat/0.png"]
    alpha = np.full((4, 5, 1), 255, dtype=np.uint8)
    save(path / "train/cat/0.png", np.concatenate([array, alpha], 2))
    few = np.array([[10, 20, 30], [200, 100, 0]], dtype=np.uint8)[RANDOM.integers(0, 2, (4, 5))]
    Image.fromarray(few).quantize(2).save(path / "train/cat/1.png")
    train, _ = in_order(read_folder(path)[0])
    assert torch.equal(train[0], torch.from_numpy(array).permute(2, 0, 1))
    assert torch.equal(train[1], torch.from_numpy(few).permute(2, 0, 1))


@pytest.mark.parametrize("missing", ["train", "test", ""])
def test_missing_folders(folder, missing):
    path, _ = folder
    if missing:
        (path / missing).rename(path / "elsewhere")
    else:
        path = path / "nowhere"
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: expected the folders train/CLASS and test/CLASS"):
        read_folder(path)


def test_one_class_is_not_enough(tmp_path):
    save(tmp_path / "train/a/x.png", pixels(2, 2))
    save(tmp_path / "test/a/x.png", pixels(2, 2))
    with pytest.raises(ValueError, match="train: expected at least two folders, one for each class, got 1"):
        read_folder(tmp_path)


def test_unknown_class_in_the_test_images(folder):
    path, _ = folder
    save(path / "test/bird/x.png", pixels(4, 5, 3))
    with pytest.raises(ValueError, match="test: class 'bird' is not among the training images"):
        read_folder(path)


def test_class_without_training_images(folder):
    path, _ = folder
    (path / "train" / ".ipynb_checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"train/\.ipynb_checkpoints: no images \(\.bmp, .*\)"):
        read_folder(path)


def test_no_test_images(folder):
    path, _ = folder
    for name in ("cat", "dog"):
        (path / "test" / name / "0.png").unlink()
    with pytest.raises(ValueError, match="test: no images"):
        read_folder(path)


@pytest.mark.parametrize("shape", [(5, 4, 3), (4, 5), (1, 1, 3)])
@pytest.mark.parametrize("name", ["train/dog/2.png", "test/cat/0.png"])
def test_images_of_other_sizes_or_without_colours(folder, name, shape):
    path, _ = folder
    save(path / name, pixels(*shape))
    with pytest.raises(ValueError, match=rf"{name}: expected the size of the others, \(3, 4, 5\), got \("):
        read_folder(path)


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(width, height):
    """A small PNG file that says it is large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an image",
        RANDOM.bytes(1000),
        b"\x89PNG\r\n\x1a\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        bomb(3000, 3000),
        bomb(10_000, 10_000),
        bomb(2**31 - 1, 2**31 - 1),
    ],
    ids=["empty", "text", "random", "no header", "svg", "large", "warning", "bomb"],
)
def test_what_is_not_an_image(folder, content):
    path, _ = folder
    (path / "train/dog/1.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"train/dog/1\.png: cannot be read as an image"):
        read_folder(path)


def test_images_cut_short_are_refused_unless_all_pixels_are_there(folder):
    path, arrays = folder
    file = path / "train/dog/1.png"
    content = file.read_bytes()
    for length in range(0, len(content) - 30, 3):  # after the pixels, PNG files have two sums and an end
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"train/dog/1\.png: cannot be read as an image"):
            read_folder(path)
    for length in range(len(content) - 30, len(content)):
        file.write_bytes(content[:length])
        try:
            (train, _), _, _ = read_folder(path)
        except ValueError:
            continue
        assert torch.equal(train[4], torch.from_numpy(arrays["train/dog/1.png"]).permute(2, 0, 1))


def test_a_folder_in_place_of_an_image(folder):
    path, _ = folder
    (path / "train/dog/3.png").mkdir()
    with pytest.raises(ValueError, match=r"train/dog/3\.png: cannot be read as an image"):
        read_folder(path)


def test_sixteen_bits_are_refused_because_they_would_be_clipped(folder):
    path, _ = folder
    save(path / "train/dog/1.png", np.array([[0, 256, 40_000, 65_535]], dtype=np.uint16))
    with pytest.raises(ValueError, match=r"train/dog/1\.png: .*expected 8 bits per channel, got Pillow's mode I"):
        read_folder(path)


def test_only_the_formats_that_are_named_are_decoded(folder, monkeypatch):
    """Pillow gives PostScript to another program, whatever the file is called."""
    path, _ = folder
    file = path / "train" / "cat" / "evil.png"
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n%%EndComments\nshowpage\n")
    ran = []
    monkeypatch.setattr("subprocess.Popen", lambda *arguments, **options: ran.append(arguments))
    with pytest.raises(ValueError, match=r"evil\.png: cannot be read as an image \(cannot identify"):
        read_folder(path)
    assert not ran
    file.unlink()
    save(file, pixels(4, 5, 3), format="TIFF")
    with pytest.raises(ValueError, match=r"evil\.png: cannot be read as an image \(cannot identify"):
        read_folder(path)


def test_pipes_are_no_images(folder):
    path, _ = folder
    os.mkfifo(path / "train" / "cat" / "z.png")
    with pytest.raises(ValueError, match=r"z\.png: cannot be read as an image \(expected a file\)"):
        read_folder(path)
