"""A trial for try_kernel.py: a residual addition and the RMSNorm after it. Copy the file, and put your kernel in."""

from collections.abc import Callable

import torch.nn.functional as F
from kernels import get_kernel
from torch import Tensor

# Of your own project: get_local_kernel(Path("my-kernels/build")).
kernels = get_kernel("org/ltx-kernels", version=1)

SIZES = (64, 1024, 8192)
SMALL = (1, 7, 130)
LABEL = "tokens"


def inputs(random: Callable[..., Tensor], tokens: int) -> tuple[Tensor, ...]:
    """Input, residual, weight."""
    return random(tokens, 2048), random(tokens, 2048), random(2048)


def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Every result of the kernel, in plain torch."""
    summed = x + residual
    return F.rms_norm(summed, weight.shape, weight, 1e-6), summed


def kernel(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.rmsnorm_residual(x, residual, weight, 1e-6)
