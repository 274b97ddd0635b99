"""The truth, computed by other means than the package uses."""

import itertools
import math

import torch
import torch.nn.functional as F

from gramcert import Convolution


def sigma(matrix):
    """Largest singular value by dense SVD."""
    return torch.linalg.matrix_norm(matrix, 2)


def dense_norm(layer: Convolution, input_size):
    """Norm of the layer as a dense float64 matrix."""
    layer = layer.with_kernel(layer.kernel.detach().double())
    return sigma(layer.to_dense(input_size))


def circulant_norm(kernel, input_size):
    """Norm of the circular convolution, from the convolution sum itself written as a matrix."""
    cout, cin, *taps = kernel.shape
    places = list(itertools.product(*map(range, input_size)))
    column = {place: index for index, place in enumerate(places)}
    matrix = torch.zeros(cout, len(places), cin, len(places), dtype=torch.float64)
    for place in places:
        for tap in itertools.product(*map(range, taps)):
            source = tuple((x + a) % n for x, a, n in zip(place, tap, input_size, strict=True))
            matrix[:, column[place], :, column[source]] += kernel[(slice(None), slice(None), *tap)].detach().double()
    return sigma(matrix.reshape(cout * len(places), cin * len(places)))


def literal_gram(matrix, iterations, norm):
    """Algorithm 1 line by line, on the smaller side, by autograd."""
    gram = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mH
    log = torch.zeros((), dtype=gram.real.dtype)
    for _ in range(iterations):
        size = torch.linalg.matrix_norm(gram)
        log = 2 * (log + torch.log(size))
        gram = gram / size
        gram = gram @ gram.mH
    order = gram.shape[-1]
    if norm == "trace":
        mean = gram.diagonal().real.mean()
        deviation = (gram.abs().square().sum() / order - mean**2).clamp_min(0).sqrt()
        value = mean + deviation * math.sqrt(order - 1)
    else:
        value = torch.linalg.matrix_norm(gram, {"fro": "fro", "inf": math.inf, "one": 1}[norm])
    return value ** (2.0**-iterations) * torch.exp(2.0**-iterations * log)


def correlated(kernel, iterations):
    """The loop of Algorithm 3: the kernel correlated with itself, divided by its norms, and their logarithm."""
    convolve = (F.conv1d, F.conv2d, F.conv3d)[kernel.dim() - 3]
    log = torch.zeros((), dtype=kernel.dtype)
    for _ in range(iterations):
        size = kernel.norm()
        log = 2 * (log + torch.log(size))
        kernel = kernel / size
        kernel = convolve(kernel, kernel, padding=tuple(k - 1 for k in kernel.shape[2:]))
    return kernel, log


def literal_toeplitz(kernel, iterations, norm="inf"):
    """Algorithm 3 line by line: correlate the kernel with itself by torch's convolution."""
    kernel = kernel if kernel.shape[0] <= kernel.shape[1] else kernel.transpose(0, 1)
    kernel, log = correlated(kernel, iterations)
    if norm == "inf":
        value = kernel.abs().sum(tuple(range(1, kernel.dim()))).max()
    else:
        value = (math.prod(kernel.shape[2:]) * kernel.square().sum()).sqrt()
    return value ** (2.0**-iterations) * torch.exp(2.0**-iterations * log)


def literal_circular(kernel, input_size, iterations):
    """Algorithm 2 line by line on the half spectrum, by autograd."""
    blocks = torch.fft.rfft2(kernel, s=input_size).permute(2, 3, 0, 1).flatten(0, 1)
    log = torch.zeros(blocks.shape[0], dtype=kernel.dtype)
    for _ in range(iterations):
        size = torch.linalg.matrix_norm(blocks)
        log = 2 * (log + torch.log(size))
        blocks = blocks / size[:, None, None]
        blocks = blocks.mH @ blocks
    return (torch.linalg.matrix_norm(blocks) ** (2.0**-iterations) * torch.exp(2.0**-iterations * log)).max()


def supremum(kernel, samples=64):
    """σ(E) at its largest over a fine grid: a lower bound of sup within a small factor of it."""
    axes = tuple(range(2, kernel.dim()))
    return torch.linalg.matrix_norm(
        torch.fft.fftn(kernel.double(), s=(samples,) * len(axes), dim=axes).movedim((0, 1), (-2, -1)), 2
    ).max()


def literal_rescaling(kernel, iterations):
    """1/R of Theorem 7 on the output channels of a kernel, line by line: torch's convolution loop, by autograd."""
    kernel, log = correlated(kernel, iterations)
    sums = kernel.abs().sum(tuple(range(1, kernel.dim())))
    return sums ** (2.0**-iterations) * torch.exp(2.0**-iterations * log)


def jacobian_norm(function, x):
    """Norm of the Jacobian of a function at a point, as a dense float64 matrix."""
    x = x.double()
    matrix = torch.autograd.functional.jacobian(function, x)
    return sigma(matrix.reshape(-1, x.numel()))
