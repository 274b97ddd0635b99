"""What every method does first with its kernel."""

from torch import Tensor

from gramcert.arguments import checked_kernel, require_finite


def checked_finite_kernel(call: str, kernel: Tensor) -> Tensor:
    """The kernel without its autograd history, refused if it is no kernel or not finite."""
    kernel = checked_kernel(call, kernel)
    require_finite(call, "kernel", kernel)
    return kernel.detach()
