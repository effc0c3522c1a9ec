# %% [markdown]
# # What a kernel is, and when one of your own is worth it
#
# A *kernel* is a function that many threads of a GPU run at once. Every op of PyTorch launches at least one. A kernel
# reads its inputs from the GPU's memory, computes, and writes its result back. For an activation function the
# computing takes almost no time: the kernel is as fast as the memory.
#
# This notebook takes one activation function, computes it in several ways, checks that all are right, and measures
# them. It ends with the sizes at which a kernel of your own is no use.

# %% tags=["parameters"]
SHORT = None  # None: few and small sizes on a machine without a GPU; True: everywhere

# %%
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib import pyplot

ROOT = next(path for path in (Path.cwd(), *Path.cwd().parents) if (path / "tools" / "build.py").exists())
sys.path.insert(0, str(ROOT / "examples"))
import kernels_demo as demo

bench = demo.prepare(SHORT)
bench.name

# %% [markdown]
# ## One function, nine kernels or one
#
# GELU in its tanh form is $\frac{x}{2}\left(1 + \tanh\left(\sqrt{2/\pi}\,(x + 0.044715\,x^3)\right)\right)$. Written
# out in PyTorch, each multiplication, addition and tanh is an op: it reads its inputs from memory and writes a result
# that the next op reads again. One kernel for the whole formula reads `x` once and writes the result once. Counted op
# by op:

# %%
x = bench.random(1024, 256)
_ = demo.plot_bytes(
    {
        "GELU of 1024x256": {
            demo.PLAIN: lambda: demo.gelu_written_out(x),
            demo.NATIVE: lambda: F.gelu(x, approximate="tanh"),
            demo.OURS: lambda: bench.ltx.gelu(x, approximate="tanh"),
        }
    },
    "Bytes that the ops move",
)

# %% [markdown]
# ## A kernel from the Hub
#
# The `kernels` library fetches compiled kernels from the Hugging Face Hub, the build that fits this system's torch
# and GPU. `kernels-community/activation` has `gelu_fast`. Without a network, or on a system that it has no build for,
# the notebook goes on with this package's own build, which offers the same function.

# %%
hub, why = demo.fetch_community()
print("fetched" if hub else f"going on with this package's build: {why}")

# %% [markdown]
# ## Is it right?
#
# There are two GELUs. The exact one has the error function in it, the tanh form comes close to it. `gelu_fast` is the
# tanh form, whatever its name says. A comparison of `gelu_fast` with `F.gelu(x)`, the exact one, finds this
# difference and no fault:

# %%
line = torch.linspace(-4, 4, 400, dtype=torch.float64)
figure, axes = pyplot.subplots(figsize=(6, 2.6), layout="constrained")
axes.plot(line, F.gelu(line, approximate="tanh") - F.gelu(line))
axes.set_title("tanh form less exact GELU, in float64", fontsize=10)
axes.grid(alpha=0.3)

# %% [markdown]
# A kernel is right if its error against float64 is no larger than plain torch's error in the same dtype. Every race
# below checks that before it measures, and stops where it does not hold.
#
# ## The race
#
# Seven sizes, from a thousand elements up. The dashed line is a copy that reads and writes as many bytes: what the
# memory of this GPU does at that size, measured, not what the data sheet says. `torch.compile` gets the formula as it
# is written out above, and makes one kernel of it.

# %%
records = demo.race(
    bench, lambda bench, size: demo.gelu(bench, size, hub), bench.sizes(demo.ELEMENTS, demo.SHORT_ELEMENTS)
)
_ = demo.plot(bench, records, "GELU (tanh form)", "elements")

# %%
_ = demo.plot_errors(bench, records, "GELU: error against float64", "elements")

# %% [markdown]
# ## What to read from it
#
# Large inputs: every way that is one kernel takes the time of the copy. None can be faster, so they are equally fast,
# and the formula written out takes several times as long, because it moves several times the bytes.
#
# Small inputs: the time stops falling with the size. Launching a kernel takes microseconds, however little it does.
# One kernel after another is what costs there, and a call through more layers of Python can lose to a plain op. The
# rings in the right panel mark the sizes at which another way is faster than this package:

# %%
demo.verdict(records, "elements")

# %% [markdown]
# ## What follows
#
# - An activation alone is not where a kernel of your own pays: `F.gelu` and `torch.compile` are at the limit as well.
# - A kernel pays where several ops stand in a row and no single op of torch covers them: a residual addition, a norm
#   and a modulation, for example. `advanced.ipynb` measures such chains.
# - `write_your_own.ipynb` writes one, in Triton, in CUDA, and with `torch.compile`.
