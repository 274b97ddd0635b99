from fractions import Fraction

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from gramcert.training.images import Images, Labelled, load_images

EPS = torch.finfo(torch.float64).eps


@pytest.fixture
def coloured():
    """Nine training and four test images of 3×2×5 bytes."""
    bytes_ = torch.randint(0, 256, (13, 3, 2, 5), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    labels = torch.arange(13) % 4
    return Images(Labelled(bytes_[:9], labels[:9]), Labelled(bytes_[9:], labels[9:]), ("a", "b", "c", "d"))


def test_digits_are_those_of_scikit_learn(digits):
    data = load_digits()
    values = torch.cat([digits.train.values(torch.float64), digits.test.values(torch.float64)])
    assert torch.equal(values[:, 0] * 16, torch.from_numpy(data.images))
    assert torch.equal(torch.cat([digits.train.labels, digits.test.labels]), torch.from_numpy(data.target))
    assert (len(digits.train), len(digits.test)) == (1400, 397)
    assert digits.shape == (1, 8, 8)
    assert digits.classes == tuple("0123456789")


def test_values_are_the_nearest_floats():
    for white in (16, 255):
        images = torch.arange(white + 1, dtype=torch.uint8).reshape(-1, 1, 1, 1)
        values = Labelled(images, torch.zeros(white + 1, dtype=torch.int64), white).values().flatten()
        assert values.dtype == torch.float32
        for byte, value in enumerate(values):
            error = abs(Fraction(float(value)) - Fraction(byte, white))
            neighbours = torch.nextafter(value.expand(2), torch.tensor([-1.0, 2.0]))
            assert all(error <= abs(Fraction(float(near)) - Fraction(byte, white)) for near in neighbours)
        assert values[0] == 0
        assert values[-1] == 1


def test_parts_keep_images_and_labels_together(coloured):
    chosen = coloured.train[torch.tensor([8, 0, 3])]
    assert torch.equal(chosen.images, coloured.train.images[[8, 0, 3]])
    assert torch.equal(chosen.labels, coloured.train.labels[[8, 0, 3]])
    parts = list(coloured.train.batches(4))
    assert [len(part) for part in parts] == [4, 4, 1]
    assert torch.equal(torch.cat([part.images for part in parts]), coloured.train.images)
    assert torch.equal(torch.cat([part.labels for part in parts]), coloured.train.labels)


def test_channel_means(coloured, digits):
    expected = coloured.train.images.numpy().astype(np.float64).mean((0, 2, 3)) / 255
    np.testing.assert_allclose(coloured.channel_means(), expected, rtol=50 * EPS)
    np.testing.assert_allclose(digits.channel_means(), [digits.train.images.numpy().mean() / 16], rtol=50 * EPS)


def test_channel_means_do_not_overflow():
    white = Labelled(torch.full((1, 1, 1, 1), 255, dtype=torch.uint8).expand(2**12, 1, 64, 64), torch.zeros(2**12))
    assert Images(white, white, ("a", "b")).channel_means() == [1.0]


def test_limits_and_holdout(coloured):
    everything = coloured.limited(None, 0)
    assert torch.equal(everything.train.images, coloured.train.images)
    assert torch.equal(everything.test.images, coloured.test.images)
    few = coloured.limited(5, 0)
    assert torch.equal(few.train.images, coloured.train.images[:5])
    assert torch.equal(few.test.images, coloured.test.images)
    held = coloured.limited(5, 3)
    assert torch.equal(held.train.images, coloured.train.images[:5])
    assert torch.equal(held.train.labels, coloured.train.labels[:5])
    assert torch.equal(held.test.images, coloured.train.images[6:])
    assert torch.equal(held.test.labels, coloured.train.labels[6:])
    assert held.classes == coloured.classes


@pytest.mark.parametrize(
    ("images", "holdout", "message"),
    [
        (10, 0, r"Configuration\(images=10\): expected at most the 9 training images"),
        (7, 3, r"Configuration\(images=7\): expected at most the 6 training images"),
        (None, 9, r"Configuration\(holdout=9\): expected less than the 9 training images"),
        (None, -1, r"Configuration\(holdout=-1\): expected less than"),
        (0, 0, r"Configuration\(images=0\): expected at most"),
    ],
)
def test_limits_that_cannot_be(coloured, images, holdout, message):
    with pytest.raises(ValueError, match=message):
        coloured.limited(images, holdout)


def test_names_and_paths_that_are_missing(tmp_path):
    with pytest.raises(ValueError, match=r"dataset='mnist'\): expected one of digits, cifar10, cifar100, folder"):
        load_images("mnist", tmp_path)
    for name in ("cifar10", "cifar100", "folder"):
        with pytest.raises(ValueError, match=rf"{name}: the path of its images is needed \(--data, or GRAMCERT_DATA"):
            load_images(name, None)
        with pytest.raises(ValueError, match="nowhere: expected the folder"):
            load_images(name, tmp_path / "nowhere")
