import colorsys

import pytest
import torch
import torch.nn.functional as F

from gramcert.training.augmentation import Augmentation, draw
from gramcert.training.configuration import named

EVERYTHING = named("cifar10-S").augmentation
EPS = torch.finfo(torch.float64).eps


@pytest.fixture
def images():
    """Random ones, and in front black, white, grey, pure colours and ties between channels."""
    special = torch.tensor([[0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.5], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0.7, 0.7, 0.2]])
    drawn = torch.rand(11, 3, 6, 5, generator=torch.Generator().manual_seed(0))
    flat = torch.cat([special, special.flip(1)]).double()
    return torch.cat([flat[:, :, None, None].expand(-1, 3, 6, 5), drawn.double()])


@pytest.fixture
def numbers(images):
    result = draw(len(images), torch.Generator().manual_seed(1)).double()
    result[0] = 0
    result[1] = 1 - torch.finfo(torch.float32).eps / 2  # the largest that is drawn
    return result


def test_nothing_is_done_by_default(images, numbers):
    assert torch.equal(Augmentation()(images, numbers), images)


def test_numbers_come_from_the_generator_and_each_image_has_its_own():
    first, again, other = (draw(5, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert ((first >= 0) & (first < 1)).all()
    assert len(first.unique()) == first.numel() == 5 * 7


@pytest.mark.parametrize("border", [1, 4])
def test_crops_are_windows_of_the_reflected_image(images, numbers, border):
    found = Augmentation(crop=border)(images, numbers)
    padded = F.pad(images, (border,) * 4, mode="reflect")
    for image, whole, row in zip(found, padded, numbers.tolist(), strict=True):
        top, left = (int(share * (2 * border + 1)) for share in row[:2])
        assert torch.equal(image, whole[:, top : top + 6, left : left + 5])


def test_every_window_is_as_likely():
    places = torch.arange(6.0 * 5).reshape(1, 1, 6, 5).expand(2000, -1, -1, -1)
    corners = Augmentation(crop=1)(places, draw(2000, torch.Generator().manual_seed(0)))[:, 0, 2, 2]
    values, counts = corners.unique(return_counts=True)
    assert values.tolist() == [6, 7, 8, 11, 12, 13, 16, 17, 18]
    # Of 2000/9 each, the deviation is 14.
    assert (counts - 2000 / 9).abs().max() < 5 * 14


def test_flips(images, numbers):
    found = Augmentation(flip=True)(images, numbers)
    is_mirrored = numbers[:, 2] < 0.5
    assert is_mirrored.any()
    assert not is_mirrored.all()
    for image, result, mirrored in zip(images, found, is_mirrored, strict=True):
        rows = [[row[::-1] if mirrored else row for row in channel] for channel in image.tolist()]
        assert result.tolist() == rows


def per_pixel(image, change):
    """The image with each (red, green, blue) changed by a function of three floats."""
    _, height, width = image.shape
    result = torch.empty_like(image)
    for row in range(height):
        for column in range(width):
            result[:, row, column] = torch.tensor(change(*image[:, row, column].tolist()), dtype=image.dtype)
    return result


def grey(red, green, blue):
    return 0.299 * red + 0.587 * green + 0.114 * blue


def within(value):
    return min(1.0, max(0.0, value))


def test_brightness(images, numbers):
    found = Augmentation(brightness=(0.5, 2.0))(images, numbers)
    for image, result, row in zip(images, found, numbers.tolist(), strict=True):
        factor = 0.5 + 1.5 * row[3]
        expected = per_pixel(image, lambda *colour, f=factor: [within(f * value) for value in colour])
        torch.testing.assert_close(result, expected, rtol=10 * EPS, atol=10 * EPS)


def test_contrast(images, numbers):
    found = Augmentation(contrast=(0.5, 2.0))(images, numbers)
    for image, result, row in zip(images, found, numbers.tolist(), strict=True):
        factor = 0.5 + 1.5 * row[4]
        mean = sum(grey(*image[:, i, j].tolist()) for i in range(6) for j in range(5)) / 30
        expected = per_pixel(image, lambda *colour, f=factor, m=mean: [within(m + f * (value - m)) for value in colour])
        torch.testing.assert_close(result, expected, rtol=100 * EPS, atol=100 * EPS)


def test_saturation(images, numbers):
    found = Augmentation(saturation=(0.0, 2.0))(images, numbers)
    for image, result, row in zip(images, found, numbers.tolist(), strict=True):
        factor = 2 * row[5]
        expected = per_pixel(
            image, lambda *colour, f=factor: [within((1 - f) * grey(*colour) + f * value) for value in colour]
        )
        torch.testing.assert_close(result, expected, rtol=100 * EPS, atol=100 * EPS)


@pytest.mark.parametrize("largest", [0.02, 0.5])
def test_hue(images, numbers, largest):
    found = Augmentation(hue=largest)(images, numbers)
    for image, result, row in zip(images, found, numbers.tolist(), strict=True):
        turn = largest * (2 * row[6] - 1)

        def turned(*colour, turn=turn):
            hue, saturation, value = colorsys.rgb_to_hsv(*colour)
            return colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)

        torch.testing.assert_close(result, per_pixel(image, turned), rtol=100 * EPS, atol=100 * EPS)


def test_a_third_of_the_circle_exchanges_the_channels(images):
    numbers = torch.zeros(len(images), 7, dtype=torch.float64)
    numbers[:, 6] = 5 / 6  # of (-0.5, 0.5), a third
    found = Augmentation(hue=0.5)(images, numbers)
    torch.testing.assert_close(found, images.roll(1, dims=1), rtol=100 * EPS, atol=100 * EPS)


def test_the_order_is_the_order_of_the_fields(images, numbers):
    """Each step alone, one after the other."""
    names = ("crop", "flip", "brightness", "contrast", "saturation", "hue")
    expected = images
    for name in names:
        expected = Augmentation(**{name: getattr(EVERYTHING, name)})(expected, numbers)
    assert torch.equal(EVERYTHING(images, numbers), expected)
    assert not torch.equal(expected, images)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_part_of_the_batch_is_changed_as_in_the_whole(images, numbers, dtype):
    images, numbers = images.to(dtype), numbers.to(dtype)
    whole = EVERYTHING(images, numbers)
    for part in (slice(0, 1), slice(3, 7), slice(7, None)):
        assert torch.equal(EVERYTHING(images[part], numbers[part]), whole[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_stay_between_0_and_1(dtype):
    wild = Augmentation(1, True, (0.0, 9.0), (0.0, 9.0), (0.0, 9.0), 0.5)
    images = torch.rand(500, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=dtype)
    images[:100] = images[:100].round()
    images[100:200] *= torch.finfo(dtype).eps
    found = wild(images, draw(500, torch.Generator().manual_seed(1)).to(dtype))
    assert found.dtype == dtype
    assert found.min() >= 0
    assert found.max() <= 1
    assert found.std() > 0.1


def test_grey_images_have_no_colours(images, numbers):
    grey_images = images[:, :1]
    moved = Augmentation(crop=EVERYTHING.crop, flip=True)(grey_images, numbers)
    assert torch.equal(EVERYTHING(grey_images, numbers), moved)


def test_the_images_that_came_in_are_left_alone(images, numbers):
    before = images.clone()
    EVERYTHING(images, numbers)
    assert torch.equal(images, before)
