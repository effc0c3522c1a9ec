# /// script
# requires-python = ">=3.10"
# dependencies = ["kernels>=0.17", "numpy", "torch>=2.11"]
# ///
"""The card's example, complete: `uv run examples/readme_example.py`; LOCAL_KERNELS names a build instead of the Hub."""

import torch
from kernels import get_kernel

device = "cuda" if torch.cuda.is_available() else "cpu"
# An untrusted publisher's code runs only where it is named. A CUDA torch without a GPU takes a CPU build when told to.
ltx = get_kernel(
    "org/ltx-kernels",
    version=1,
    backend="cpu" if device == "cpu" else None,
    trust_remote_code=["org/ltx-kernels"],
)

x = torch.randn(2, 256, 2048, device=device)
scale, shift = torch.randn(2, 2, 2048, device=device).unbind(1)

y = ltx.adaln_rmsnorm(x, None, scale, shift)
expected = torch.nn.functional.rms_norm(x, (2048,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
print(f"adaln_rmsnorm on {device}: largest difference from plain torch {(y - expected).abs().max().item():.1e}")
torch.testing.assert_close(y, expected)
