# %% [markdown]
# # Write your own kernel: Triton, CUDA, torch.compile
#
# One function in three ways: a squared ReLU as the gate of a linear unit, `relu(gate)**2 * up`. It is element-wise:
# each result depends on one element of each input. All three ways end at the speed of the memory. The last section
# shows, with stored measurements of one H200, the work on which they differ.

# %% tags=["parameters"]
SHORT = None  # None: few and small sizes on a machine without a GPU; True: everywhere

# %%
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from kernels import get_local_kernel
from matplotlib import pyplot

ROOT = next(path for path in (Path.cwd(), *Path.cwd().parents) if (path / "tools" / "build.py").exists())
sys.path.insert(0, str(ROOT / "examples"))
import kernels_demo as demo

bench = demo.prepare(SHORT)
bench.name

# %% [markdown]
# ## What it has to be: plain torch
#
# Write the function in plain torch first. It is what the kernel is compared with, and what `torch.compile` gets.


# %%
def relu_squared_gate(gate, up):
    return torch.relu(gate) ** 2 * up


WAYS = {demo.PLAIN: relu_squared_gate}

# %% [markdown]
# ## Triton
#
# A Triton kernel is Python that describes what a block of threads does with a block of elements. The mask keeps the
# last block within the tensor. Products are computed in float32 and rounded once, at the store.

# %%
HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def relu_squared_gate_kernel(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = index < count
        gate = tl.load(gate_ptr + index, mask=inside).to(tl.float32)
        up = tl.load(up_ptr + index, mask=inside).to(tl.float32)
        positive = tl.where(gate < 0, 0.0, gate)
        tl.store(out_ptr + index, positive * positive * up, mask=inside)

    def triton_way(gate, up):
        out = torch.empty_like(gate)
        relu_squared_gate_kernel[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), BLOCK=1024)
        return out


if HAS_TRITON and (bench.device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"):
    WAYS["Triton"] = triton_way
else:
    print("SKIPPED: Triton needs a GPU. TRITON_INTERPRET=1 and an installed triton run it on a CPU, slowly.")

# %% [markdown]
# ## CUDA, through this package's build
#
# `examples/own_kernel` is a whole kernel package in six short files: `build.toml`, the CUDA kernel, the same for a
# CPU, the header that declares both, the binding with its checks, and the Python function with its docstring. Packages
# on the Hub have this layout. `tools/build.py` builds it for this machine in seconds:

# %%
build = [sys.executable, str(ROOT / "tools/build.py"), "--project", str(ROOT / "examples/own_kernel"), "--this-machine"]
subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
own = get_local_kernel(ROOT / "examples/own_kernel/build", backend="cpu" if bench.device == "cpu" else None)
WAYS["CUDA" if bench.device == "cuda" else "C++"] = own.relu_squared_gate

# %% [markdown]
# The kernel itself: a thread owns 16 bytes of each tensor, or one element where an address does not allow that.

# %%
demo.Source(
    ROOT / "examples/own_kernel/kernel_src/relu_squared_gate.cu", "template <typename T, int kWidth>\n__global__"
)

# %% [markdown]
# Before it is timed, it is tried on what breaks kernels: a size that no block divides, a view that begins at an odd
# address, NaN and infinity, an empty tensor, `torch.compile` around it.

# %%
for count in (0, 1, 7, 1023, 4097):
    gate, up = bench.random(count + 1)[1:], bench.random(count + 1)[1:]
    expected = (torch.relu(gate.float()) ** 2 * up.float()).to(gate.dtype)
    for name, way in WAYS.items():
        if name != demo.PLAIN and (name != "Triton" or count):
            torch.testing.assert_close(way(gate, up), expected)

special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 2.0], device=bench.device)
torch.testing.assert_close(own.relu_squared_gate(special, special), relu_squared_gate(special, special), equal_nan=True)

compiled = torch.compile(lambda gate, up: own.relu_squared_gate(gate + 1, up), fullgraph=True)
torch.testing.assert_close(compiled(gate, up), own.relu_squared_gate(gate + 1, up))

# %% [markdown]
# ## torch.compile
#
# It needs nothing but the function in plain torch, and writes a Triton kernel of its own (on a CPU, C++).
#
# ## They end at the same speed


# %%
def entry(bench, size):
    exact = lambda gate, up: torch.relu(gate) ** 2 * up  # noqa: E731
    return demo.Entry((bench.random(size), bench.random(size)), WAYS, exact=exact)


mine = next(name for name in WAYS if name in ("CUDA", "C++"))
records = demo.race(bench, entry, bench.sizes(demo.ELEMENTS, demo.SHORT_ELEMENTS))
_ = demo.plot(bench, records, "relu(gate)² * up", "elements", ours=mine)

# %%
demo.verdict(records, "elements", ours=mine)

# %% [markdown]
# On large inputs each way that is one kernel moves the same bytes once. There is nothing left to win, and the
# shortest source is the best: `torch.compile`, or Triton where the compiler does not see the chain as one.
#
# ## Where they differ
#
# These are stored measurements of one H200 (`benchmarks/results/h200-ops.json`): torch.compile's time over this
# package's, for every case of a family. Element-wise work stands at 1. Norms are near it. The norm of query and key
# with the rotation after it is not: a row has to be reduced, kept, rotated in pairs and written, and the compiler's
# kernels take clearly longer than one kernel that does all of it. There a kernel pays.

# %%
sys.path.insert(0, str(ROOT / "benchmarks"))
import plots

stored = json.loads((ROOT / "benchmarks/results/h200-ops.json").read_text())
ratios = {}
for record in stored["records"]:
    name = plots.family(record["op"])
    if record["us"].get("compile") and name not in plots.PRODUCTS:
        ratios.setdefault(name, []).append(record["us"]["compile"] / record["us"]["ours"])
figure, axes = pyplot.subplots(figsize=(7, 3.4), layout="constrained")
axes.boxplot(list(ratios.values()), orientation="horizontal", tick_labels=list(ratios), showfliers=False)
axes.axvline(1, color="black", linewidth=0.8)
axes.invert_yaxis()
axes.set_xlabel("torch.compile's time over this package's")
_ = axes.set_title(
    f"{stored['meta']['device']}, torch {stored['meta']['torch']}, commit {stored['meta']['commit'][:7]}"
)

# %% [markdown]
# ## From here
#
# `docs/adding-an-op.md` lists the steps from a kernel to an op of this package: schema, checks, a fake for
# `torch.compile`, tests against float64, strides, wrong arguments, and a case of `benchmarks/ops.py` beside a copy
# and its peers.
