"""One workload an op family, at LTX-Video's sizes, in the form of `kernels benchmark`:

    pip install "kernels[benchmark]"
    python tools/build.py && kernels benchmark .

Each workload is compared with the package's plain-torch reference and timed beside it. The workloads of `Compiled` have
that reference under torch.compile, which is compiled before anything is timed. The runner times with a host
clock, what is in the L2 cache included, and the reference once: benchmarks/ops.py is what this project quotes.
"""

from __future__ import annotations

from typing import Any

import torch
from kernels.benchmark import Benchmark
from torch import Tensor

BATCH, HEADS, WIDTH = 2, 32, 64
HIDDEN = HEADS * WIDTH
DTYPE = torch.float16  # the runner compares within 0.01, which bf16 does not resolve


class Workloads:
    """What the benchmarks below share; no Benchmark itself, since the runner takes every one for a set of workloads."""

    seed = 42
    kernel: Any
    device: str
    out: Tensor

    @property
    def tokens(self) -> int:
        return 2688 if self.device == "cuda" else 128  # 49 frames of 512x768

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * std).to(DTYPE)

    def prepare(self, function: str, *arguments: Any, **options: Any) -> None:
        """Outputs that come as a tuple are compared by their first tensor."""
        self.op, self.reference = getattr(self.kernel, function), getattr(self.kernel.reference, function)
        self.arguments, self.options = arguments, options

    def run(self) -> None:
        result = self.op(*self.arguments, **self.options)
        self.out = result if isinstance(result, Tensor) else result[0]

    def verify(self) -> Tensor:
        result = self.reference(*self.arguments, **self.options)
        return result if isinstance(result, Tensor) else result[0]


class Norm(Workloads, Benchmark):
    def setup(self) -> None:
        self.x, self.residual = (self.random(BATCH, self.tokens, HIDDEN) for _ in range(2))
        self.weight, self.bias = self.random(HIDDEN, std=0.5), self.random(HIDDEN, std=0.5)

    def setup_rmsnorm(self) -> None:
        self.setup()
        self.prepare("rmsnorm", self.x, self.weight)

    def setup_rmsnorm_residual(self) -> None:
        self.setup()
        self.prepare("rmsnorm_residual", self.x, self.residual, self.weight)

    def setup_layernorm(self) -> None:
        self.setup()
        self.prepare("layernorm", self.x, self.weight, self.bias)

    benchmark_rmsnorm = benchmark_rmsnorm_residual = benchmark_layernorm = Workloads.run
    verify_rmsnorm = verify_rmsnorm_residual = verify_layernorm = Workloads.verify


class Modulation(Workloads, Benchmark):
    def setup(self) -> None:
        self.x, self.residual = (self.random(BATCH, self.tokens, HIDDEN) for _ in range(2))
        self.scale, self.shift, self.gate = (self.random(BATCH, HIDDEN, std=0.1) for _ in range(3))

    def setup_adaln_rmsnorm(self) -> None:
        self.setup()
        self.prepare("adaln_rmsnorm", self.x, None, self.scale, self.shift)

    def setup_gated_residual_adaln_rmsnorm(self) -> None:
        self.setup()
        modulation = (self.gate, None, self.scale, self.shift)
        self.prepare("gated_residual_adaln_rmsnorm", self.x, self.residual, *modulation)

    benchmark_adaln_rmsnorm = benchmark_gated_residual_adaln_rmsnorm = Workloads.run
    verify_adaln_rmsnorm = verify_gated_residual_adaln_rmsnorm = Workloads.verify


class Rotary(Workloads, Benchmark):
    def setup(self) -> None:
        self.query, self.key = (self.random(BATCH, self.tokens, HEADS, WIDTH) for _ in range(2))
        angle = torch.randn(1, self.tokens, HIDDEN // 2, device=self.device).repeat_interleave(2, -1)
        self.table = angle.cos(), angle.sin()

    def setup_apply_rotary_qk(self) -> None:
        self.setup()
        self.prepare("apply_rotary_qk", self.query, self.key, *self.table)

    def setup_qk_norm_rope(self) -> None:
        self.setup()
        weights = self.random(HIDDEN, std=0.5), self.random(HIDDEN, std=0.5)
        self.prepare("qk_norm_rope", self.query, self.key, *weights, *self.table, across_heads=True)

    benchmark_apply_rotary_qk = benchmark_qk_norm_rope = Workloads.run
    verify_apply_rotary_qk = verify_qk_norm_rope = Workloads.verify


class Activation(Workloads, Benchmark):
    def setup_gelu(self) -> None:
        self.prepare("gelu", self.random(BATCH, self.tokens, 4 * HIDDEN), approximate="tanh")

    def setup_swiglu(self) -> None:
        self.prepare("swiglu", self.random(BATCH, self.tokens, 8 * HIDDEN))

    benchmark_gelu = benchmark_swiglu = Workloads.run
    verify_gelu = verify_swiglu = Workloads.verify


class Compiled(Modulation):
    """The speedup here is over torch.compile. The sizes are one per op, so that every graph is static."""

    def prepare(self, function: str, *arguments: Any, **options: Any) -> None:
        super().prepare(function, *arguments, **options)
        self.reference = torch.compile(self.reference)
        for _ in range(2):  # compiles at the first call
            self.verify()
