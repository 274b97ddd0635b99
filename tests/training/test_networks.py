import pytest
import torch
from torch import nn

from gramcert import lipschitz_bound
from gramcert.nn import NormalizedLinear, SLLConv2d, SLLLinear
from gramcert.training.configuration import CONFIGURATIONS, named
from gramcert.training.networks import build

SHAPES = {"digits": (1, 8, 8), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}
CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100}


def parameters(name):
    configuration = named(name)
    with torch.device("meta"):
        network = build(configuration, SHAPES[configuration.dataset], CLASSES[configuration.dataset])
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(("name", "count"), [("cifar10-S", 41_385_862), ("cifar10-M", 78_803_870)])
def test_published_numbers_of_parameters(name, count):
    assert parameters(name) == count


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_number_of_parameters_by_hand(name):
    """A residual block has its weight, a bias and q per inner channel; the head a weight and a bias."""
    c = named(name)
    (width,), (blocks,), (inner,) = c.widths, c.blocks, c.inner
    places = (SHAPES[c.dataset][1] // c.unshuffle // c.pool) ** 2
    features, classes = width * places, CLASSES[c.dataset]
    convolutions = blocks * inner * (width * c.kernel**2 + 2)
    dense = c.dense_blocks * c.dense_inner * (features + 2)
    assert parameters(name) == convolutions + dense + (features + 1) * classes


def test_stages_follow_each_other():
    changes = {"unshuffle": "2", "widths": "6,30", "blocks": "1,2", "inner": "3,4", "pool": "1"}
    network = build(named("digits").with_fields(changes), (1, 8, 8), 10)
    convolutions = [tuple(layer.weight.shape) for layer in network if isinstance(layer, SLLConv2d)]
    assert convolutions == [(3, 6, 3, 3), (4, 30, 3, 3), (4, 30, 3, 3)]
    x = torch.rand(2, 1, 8, 8)
    sizes = []
    for layer in network:
        x = layer(x)
        sizes.append(tuple(x.shape[1:]))
    spatial = [size for size in sizes if len(size) == 3]
    assert list(dict.fromkeys(spatial)) == [(1, 8, 8), (4, 4, 4), (6, 4, 4), (24, 2, 2), (30, 2, 2)]
    assert sizes[-1] == (10,)


@pytest.mark.parametrize(
    "changes",
    [{}, {"rescaling": "aol", "iterations": "1"}, {"rescaling": "sn", "iterations": "none"}, {"form": "spatial"}],
)
@pytest.mark.parametrize("start", ["gaussian", "orthogonal"])
def test_everything_before_the_head_is_1_lipschitz(changes, start):
    small = {"widths": "4", "blocks": "2", "inner": "3", "dense_inner": "8", "start": start}
    network = build(named("digits").with_fields(small | changes), (1, 8, 8), 10)
    assert isinstance(network[-1], NormalizedLinear)
    assert 0.5 <= lipschitz_bound(network[:-1], 8) <= 1 + 1e-5


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = build(named("digits"), (1, 8, 8), 10).state_dict()
    torch.rand(3)
    again = build(named("digits"), (1, 8, 8), 10).state_dict()
    other = build(named("digits").with_fields({"seed": "1"}), (1, 8, 8), 10).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if name.endswith(("weight", "original"))]
    assert len(drawn) == 6
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_the_generator_of_the_caller_is_left_alone():
    before = torch.get_rng_state()
    build(named("digits"), (1, 8, 8), 10)
    assert torch.equal(torch.get_rng_state(), before)


def test_means_are_subtracted_first():
    network = build(named("nano"), (3, 32, 32), 10, [0.25, 0.5, 0.75])
    x = torch.rand(1, 3, 32, 32)
    assert torch.equal(network[0](x), x - torch.tensor([0.25, 0.5, 0.75])[:, None, None])
    without = build(named("nano"), (3, 32, 32), 10)
    assert torch.equal(without[0](x), x)


def test_orthogonal_start():
    network = build(named("digits").with_fields({"start": "orthogonal"}), (1, 8, 8), 10)
    for layer in network:
        if isinstance(layer, SLLConv2d):
            assert layer.weight.count_nonzero() == layer.weight[:, :, 1, 1].numel()
        if isinstance(layer, (SLLConv2d, SLLLinear)):
            matrix = layer.weight.detach().double()
            matrix = matrix[:, :, 1, 1] if matrix.dim() == 4 else matrix
            values = torch.linalg.svdvals(matrix)
            bound = 100 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(values, torch.ones_like(values), rtol=bound, atol=0)


def test_activation():
    for name, kind in (("relu", nn.ReLU), ("leaky_relu", nn.LeakyReLU)):
        network = build(named("digits").with_fields({"activation": name}), (1, 8, 8), 10)
        blocks = [layer for layer in network if isinstance(layer, (SLLConv2d, SLLLinear))]
        assert len(blocks) == 5
        assert all(type(block.activation) is kind for block in blocks)


@pytest.mark.parametrize(
    ("changes", "shape", "classes", "message"),
    [
        ({"unshuffle": "3"}, (1, 8, 8), 10, r"network digits: 8×8 places cannot be unshuffled by 3"),
        ({"unshuffle": "16"}, (1, 8, 8), 10, "8×8 places cannot be unshuffled by 16"),
        ({}, (17, 8, 8), 10, "stage 0 has 17 channels, but a width of 16"),
        ({"widths": "16,32", "blocks": "1,1", "inner": "1,1"}, (1, 8, 8), 10, "stage 1 has 64 channels, but a width"),
        ({"pool": "3"}, (1, 8, 8), 10, "8×8 places cannot be pooled by 3"),
        ({}, (1, 9, 8), 10, "9×8 places cannot be pooled by 2"),
        ({}, (0, 8, 8), 10, r"images of shape \(0, 8, 8\) in 10 classes"),
        ({}, (1, -8, -8), 10, r"images of shape \(1, -8, -8\) in 10 classes"),
        ({}, (1, 8, 8), 1, r"images of shape \(1, 8, 8\) in 1 classes"),
        ({"widths": str(2**40)}, (1, 8, 8), 10, "expected sizes up to 2147483647"),
    ],
)
def test_what_does_not_fit(changes, shape, classes, message):
    with pytest.raises(ValueError, match=message):
        build(named("digits").with_fields(changes), shape, classes)
