# %% [markdown]
# # Fused kernels in a language model
#
# Which chains of ops are worth a kernel, what a whole layer gains, and where kernels lose. Layers have the sizes of
# LLaMA 3 8B, inputs have 64 to 8192 tokens. `torch.compile` stands beside everything, and a copy of the same bytes or
# the matrix products alone say what cannot be undercut. Each result is compared with float64 before it is timed.

# %% tags=["parameters"]
SHORT = None  # None: few and small sizes on a machine without a GPU; True: everywhere

# %%
import sys
from pathlib import Path

import torch

ROOT = next(path for path in (Path.cwd(), *Path.cwd().parents) if (path / "tools" / "build.py").exists())
sys.path.insert(0, str(ROOT / "examples"))
import kernels_demo as demo

bench = demo.prepare(SHORT)
ltx = bench.ltx
measured = {}


def run(name):
    """One of the races of examples/kernels_demo.py, with its picture."""
    chosen = demo.RACES[name]
    measured[chosen.title] = chosen.run(bench)
    demo.plot(bench, measured[chosen.title], chosen.title, chosen.label)
    return demo.verdict(measured[chosen.title], chosen.label)


bench.name

# %% [markdown]
# ## SiLU and multiplication
#
# The MLP computes `silu(gate) * up`. Plain torch writes `silu(gate)` to memory and reads it again; one kernel does
# not.

# %%
run("swiglu")

# %% [markdown]
# ## A norm alone, and a norm with the residual addition before it
#
# A norm alone has an op in torch, `F.rms_norm`. What models run is mostly their own code for it, several ops long:
# that is the grey line, and a speed-up over it says little about the kernel.

# %%
run("rmsnorm")

# %% [markdown]
# With the addition, torch has no single op. The sum is read by the norm and goes on as the residual stream, so both
# are results. The residual is added **once**: a baseline that adds it again to the normalised result computes
# something else, and takes longer, which flatters the kernel.

# %%
run("rmsnorm_residual")

# %% [markdown]
# ## A norm before a linear layer
#
# The dashed line is now the matrix product alone. The norm is a small part of the whole, and it becomes smaller with
# more tokens. A faster norm cannot win more than the distance to the dashed line. On a GPU with fp8 tensor cores
# there is another way to win: the norm writes 8-bit rows with their scales, and the product itself becomes faster.

# %%
run("norm_linear")

# %% [markdown]
# ## Patching LLaMA's MLP by hand
#
# Gate and up are one product with the weights side by side; SiLU and multiplication are one kernel. The module keeps
# its parameters, and `del mlp.forward` brings the class's own forward back.

# %%
mlp, x = demo.llama_mlp(bench), bench.random(4, bench.hidden)
stock = mlp(x)
demo.patch_mlp(ltx, mlp)
torch.testing.assert_close(mlp(x), stock, rtol=3e-2 if bench.device == "cuda" else 1e-4, atol=3e-3)
del mlp.forward
assert torch.equal(mlp(x), stock)

run("mlp")

# %% [markdown]
# ## A whole layer, by one call
#
# `optimize` recognises the decoder layer by its class and replaces its forward: both norms, the residual additions,
# query, key and value in one product, rotary embedding, attention, MLP. A call that it cannot take runs the stock
# forward and is counted; the race stops if that happens. `torch.compile` of the optimized layer is a line of its own:
# the two do not exclude each other.

# %%
run("layer")

# %% [markdown]
# ## Bytes that are not moved
#
# What the ops of each chain read and write, counted while they run. Matrix products move their weights in either
# case, so the whole layer saves less than its chains.

# %%
tokens = 2048 if bench.device == "cuda" else 32


def ways(make):
    entry = make(bench, tokens)
    return {name: lambda way=way: way(*entry.tensors) for name, way in entry.ways.items()}


chains = ("swiglu", "rmsnorm", "rmsnorm_residual", "mlp", "layer")
_ = demo.plot_bytes(
    {demo.RACES[name].title: ways(demo.RACES[name].make) for name in chains},
    f"Bytes that the ops move, {tokens} tokens",
)

# %% [markdown]
# ## Where kernels lose
#
# The fastest of the other ways over this package, for every chain and size. Below 1 another way is faster. Few tokens
# are launches and the host's time; many tokens of an element-wise chain are the memory's speed, where `torch.compile`
# is as fast.

# %%
_ = demo.plot_ahead(bench, measured)
