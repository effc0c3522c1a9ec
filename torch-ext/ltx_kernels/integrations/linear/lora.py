"""LoRA adapters of peft on linear layers: their low-rank products, beside the product of the layer itself.

peft puts a layer of its own in the place of a linear layer, which becomes its ``base_layer``. The fused forwards look
through it: without an active adapter the linear layer is the one that it was before, with the same bits. With active
adapters, layers that read one input still run as one product, and their adapters read the input together. In fp8 the
input stays in bfloat16 for the adapters, and is quantised once for the fp8 product.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ..._once import once_differentiable
from ..._torch_private import keeps_results
from ..engine.autocast import autocast_dtype
from ..engine.guards import class_of, hooked, is_idle, plain_linear
from .frozen import Layers, Rows

LORA_CLASS = "peft.tuners.lora.layer.Linear"
IDENTITY = "torch.nn.modules.linear.Identity"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOADERS = ("load_lora_weights", "load_lora_adapter")  # functions of diffusers


class LoraLayer(Protocol):
    """What is read of peft's layer."""

    _modules: dict[str, nn.Module]
    active_adapters: Sequence[str]
    disable_adapters: bool
    merged_adapters: Sequence[str]
    lora_variant: Mapping[str, object]
    scaling: Mapping[str, float]

    def unmerge(self) -> None: ...


class LowRank(NamedTuple):
    """What an adapter adds to a linear layer: ``scale * F.linear(F.linear(x, down), up, bias)``."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    bias: Tensor | None
    scale: float


def is_lora(module: nn.Module) -> bool:
    return class_of(module) == LORA_CLASS


def shared_weights(roots: Iterable[nn.Module]) -> set[int]:
    """The ids of parameters that several modules hold, or that adapters of other kinds than LoRA may read.

    Their data stays, whatever `stock_weights` is.
    """
    modules = {id(module): module for root in roots for module in root.modules()}
    held = Counter(id(parameter) for module in modules.values() for parameter in module._parameters.values())
    for module in modules.values():
        base = module._modules.get("base_layer")
        if base is not None and not is_lora(module):
            held.update(map(id, base._parameters.values()))
    return {parameter for parameter, count in held.items() if count > 1}


def has_adapters(root: nn.Module) -> bool:
    """Whether a model holds layers of peft, of whatever kind."""
    return any("base_layer" in module._modules for module in root.modules())


def loads_adapters() -> bool:
    """Whether diffusers loads adapters now. It reads names and shapes of a `state_dict` then, and saves none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _LOADERS and frame.f_globals.get("__name__", "").startswith("diffusers.loaders."):
            return True
        frame = frame.f_back
    return False


def base_of(module: nn.Module) -> nn.Module:
    """The linear layer itself, of one that may have adapters around it."""
    base = module._modules.get("base_layer")
    return module if base is None or not is_lora(module) else base


def adapters_state(module: nn.Module) -> Hashable:
    """What `adapters_of` finds out about a layer beside its modules and their parameters.

    Disabled adapters that are merged leave the weight here. peft has them leave it in the layer's forward. Under a
    checkpoint the second run of a block would then find another state than the first.
    """
    layer = cast(LoraLayer, module)
    if layer.disable_adapters and layer.merged_adapters:
        layer.unmerge()
    scaling = layer.scaling
    return (
        layer.disable_adapters,
        tuple(layer.merged_adapters),
        tuple(layer.active_adapters),
        tuple(layer.lora_variant),
        tuple(scaling),
        tuple(scaling.values()),
    )


def adapters_of(module: nn.Module, device: torch.device) -> tuple[str, list[LowRank]]:
    """(why peft's layer has to be called as it is, what its active adapters add); both are empty if none is active.

    The adapters may be trained: their parameters are read at every call, and nothing that is made of them is kept.
    """
    layer, found = cast(LoraLayer, module), []
    if layer.disable_adapters:
        return ("disabled adapters that are merged" if layer.merged_adapters else ""), []
    if layer.merged_adapters:
        return "", []
    downs, ups, dropouts = (layer._modules[name]._modules for name in ("lora_A", "lora_B", "lora_dropout"))
    for name in layer.active_adapters:
        down, up, dropout = downs.get(name), ups.get(name), dropouts.get(name)
        if down is None or up is None or dropout is None:
            continue
        if name in layer.lora_variant:
            return f"{type(layer.lora_variant[name]).__name__} of peft", []
        if not is_idle(dropout) and (class_of(dropout) != IDENTITY or hooked(dropout)):
            return "a dropout of adapters that is active or has a hook", []
        scale = layer.scaling[name]
        if type(scale) not in (float, int):
            return f"a scaling that is a {type(scale).__name__}", []
        weight = down._parameters.get("weight")  # None where it is pruned or parametrized
        dtype = None if weight is None else weight.dtype
        if dtype not in _DTYPES or not all(plain_linear(part, dtype, trained=True) for part in (down, up)):
            return "adapters that are quantised, hooked or of two dtypes", []
        low_rank = LowRank(down.weight, up.weight, up.bias, scale)  # type: ignore[arg-type]
        if low_rank.up.device != device:
            return f"adapters on {low_rank.up.device}", []
        found.append(low_rank)
    return "", found


def one_by_one(output: Tensor, input: Tensor, adapters: Sequence[LowRank]) -> Tensor:
    """A linear layer's output [..., out] and what adapters add to it, of its input [..., in], in peft's own order."""
    dtype = output.dtype
    for down, up, bias, scale in adapters:
        output = output + F.linear(F.linear(input.to(down.dtype), down), up, bias) * scale
    return output.to(dtype)


# ---- Fewer passes over the outputs. A layer's output is far larger than the low-rank products of its input, so that
# peft's order costs reading and writing it three times.


def fit_autograd(adapters: Sequence[Sequence[LowRank]], input: Tensor) -> bool:
    """Whether `adapted` computes adapters in the dtype in which peft does."""
    dtypes = {input.dtype}
    if autocast_dtype(input) == input.dtype:
        dtypes.add(torch.float32)  # autocast casts them
    return all(up.dtype in dtypes and bias is None for added in adapters for _, up, bias, _ in added)


def adapted(
    rows: Tensor, quantised: Rows | None, layers: Layers, sizes: Sequence[int], adapters: Sequence[Sequence[LowRank]]
) -> Tensor:
    """The outputs of frozen layers, and what their adapters add, for autograd: [M, out].

    The rows are read once for all adapters, and a layer's output once for each of its own. So are, in the backward, the
    gradients of rows and outputs. Adapters of layers side by side, as of query, key and value, share their products.

    rows, quantised: The input [M, in], and the same quantised for layers in fp8.
    sizes: The number of rows of each layer's weight.
    """
    runs, ups = _runs(sizes, adapters)
    downs = [adapter.down for added in adapters for adapter in added]
    down = (downs[0] if len(downs) == 1 else torch.cat(downs)).to(rows.dtype)
    output: Tensor = _Adapted.apply(runs, quantised, rows, *layers, down, *[up.to(rows.dtype) for up in ups])
    return output


class _Run(NamedTuple):
    """Adapters that one product computes. They add to columns from `begin` on, each to `size` of them."""

    begin: int
    number: int
    size: int
    rank: int
    scale: float

    def continues_in(self, other: _Run) -> bool:
        return self.begin + self.number * self.size == other.begin and self[2:] == other[2:]

    def outputs(self, tensor: Tensor) -> Tensor:
        """[number, M, size], of the layers' outputs [M, N]; [M, size] of one adapter."""
        return self._apart(tensor.narrow(1, self.begin, self.number * self.size), self.size)

    def lows(self, low: Tensor) -> Tensor:
        """[number, M, rank], of the low-rank products [M, number * rank]; [M, rank] of one adapter."""
        return self._apart(low, self.rank)

    def _apart(self, tensor: Tensor, width: int) -> Tensor:
        return tensor if self.number == 1 else tensor.unflatten(1, (self.number, width)).transpose(0, 1)

    def add_product(self, total: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> Tensor:
        """``total.copy_(beta * total + scale * a @ b)``; with beta=0 its contents are not read."""
        add = total.addmm_ if self.number == 1 else total.baddbmm_
        return add(a, b, beta=beta, alpha=self.scale)


def _runs(sizes: Sequence[int], adapters: Sequence[Sequence[LowRank]]) -> tuple[list[_Run], list[Tensor]]:
    """(adapters of `adapted` in their order, the `up` of each run [number, size, rank], or [size, rank] of one)."""
    runs: list[_Run] = []
    ups: list[list[Tensor]] = []
    begun = 0
    for size, added in zip(sizes, adapters):
        for _, up, _, scale in added:
            run = _Run(begun, 1, size, up.shape[1], scale)
            if runs and runs[-1].continues_in(run):
                runs[-1] = runs[-1]._replace(number=runs[-1].number + 1)
                ups[-1].append(up)
            else:
                runs.append(run)
                ups.append([up])
        begun += size
    return runs, [each[0] if len(each) == 1 else torch.stack(each) for each in ups]


class _Adapted(Function):
    """Linear layers and their adapters, whose products write to one output."""

    @staticmethod
    def forward(
        ctx: Any,
        runs: Sequence[_Run],
        quantised: Rows | None,
        rows: Tensor,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        down: Tensor,
        *ups: Tensor,
    ) -> Tensor:
        output, low = Layers(weight, scales, bias).product(rows, quantised), F.linear(rows, down)
        if keeps_results():
            output = output.clone()
        for run, low_of_run, up in zip(runs, _of_runs(low, runs), ups):
            run.add_product(run.outputs(output), low_of_run, up.mT)
        ctx.set_materialize_grads(False)
        ctx.runs, ctx.bias_dtype = runs, None if bias is None else bias.dtype
        ctx.save_for_backward(rows, weight, scales, down, low, *ups)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """With ``low = rows @ down.T`` and ``output = rows @ weight.T + scale * low @ up.T``."""
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        rows, weight, scales, down, low, *ups = ctx.saved_tensors
        needs_rows, _, _, needs_bias, needs_down, *needs_ups = ctx.needs_input_grad[2:]
        runs: Sequence[_Run] = ctx.runs
        parts = [run.outputs(gradient) for run in runs]
        low_gradient: Tensor | None = None
        if needs_rows or needs_down:
            low_gradient = torch.empty_like(low)
            for run, low_of_run, part, up in zip(runs, _of_runs(low_gradient, runs), parts, ups):
                run.add_product(low_of_run, part, up, beta=0)
        up_gradients = [
            run.add_product(torch.empty_like(up), part.mT, low_of_run, beta=0) if needed else None
            for run, low_of_run, part, up, needed in zip(runs, _of_runs(low, runs), parts, ups, needs_ups)
        ]
        rows_gradient = down_gradient = None
        bias_gradient = gradient.sum(0, dtype=ctx.bias_dtype) if needs_bias else None
        if low_gradient is not None and needs_rows:
            rows_gradient = torch.mm(low_gradient, down)
            rows_gradient.addmm_(gradient, Layers(weight, scales, None).full_weight(gradient.dtype))
        if low_gradient is not None and needs_down:
            down_gradient = torch.mm(low_gradient.t(), rows)
        return None, None, rows_gradient, None, None, bias_gradient, down_gradient, *up_gradients


def _of_runs(low: Tensor, runs: Sequence[_Run]) -> list[Tensor]:
    """The low-rank products [M, rank] of all adapters, by run."""
    parts = low.split_with_sizes([run.number * run.rank for run in runs], -1)
    return [run.lows(part) for run, part in zip(runs, parts)]


def fit_in_place(adapters: Sequence[Sequence[LowRank]], dtype: torch.dtype) -> bool:
    """Whether adapters of linear layers have no bias and the dtype of the layers' outputs."""
    return all(up.dtype == dtype and bias is None for added in adapters for _, up, bias, _ in added)


def low_ranks(rows: Tensor, adapters: Sequence[Sequence[LowRank]]) -> list[list[Tensor]]:
    """``F.linear(rows, down)`` of each layer's adapters, [M, rank], by one product of rows [M, in]."""
    downs = [adapter.down for added in adapters for adapter in added]
    low = F.linear(rows, downs[0] if len(downs) == 1 else torch.cat(downs))
    ranks = iter(low.split_with_sizes([down.shape[0] for down in downs], -1))
    return [[next(ranks) for _ in added] for added in adapters]


def add_up(output: Tensor, ranks: Sequence[Tensor], adapters: Sequence[LowRank], beta: int = 1) -> None:
    """Writes ``beta * output`` plus a layer's adapters into output [M, out]; with beta=0 its contents are not read."""
    for rank, (_, up, _, scale) in zip(ranks, adapters):
        output.addmm_(rank, up.t(), beta=beta, alpha=scale)
        beta = 1


def widening_pays(rows: Tensor, weight: Tensor, adapters: Sequence[Sequence[LowRank]], passes: int) -> bool:
    """Whether `widened` moves fewer elements than `passes` passes over the layer's output [M, out] would.

    False for float32, because one long sum is less exact than peft's short ones.
    """
    moved, saved = (len(rows) + len(weight)) * weight.shape[1], passes * len(rows) * len(weight)
    rank = sum(adapter.up.shape[1] for added in adapters for adapter in added)
    # Where the rank is no multiple of 8, the wider product runs a slow kernel.
    return rank % 8 == 0 and moved < saved and rows.dtype != torch.float32


def widened(
    rows: Tensor, weight: Tensor, adapters: Sequence[Sequence[LowRank]], ranks: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, Tensor]:
    """(rows, weight) of one product that computes layers and adapters: [M, in + rank] and [out, in + rank].

    The low-rank products stand beside the rows, and the scaled `up` matrices beside the weight, so that
    ``F.linear(rows, weight)`` adds what the adapters add within its sums.

    weight: [out, in], the weights of all layers one below the other.
    ranks: What `low_ranks` returns.
    """
    ups = [torch.cat([adapter.up * adapter.scale for adapter in added], 1) for added in adapters]
    up = ups[0] if len(ups) == 1 else torch.block_diag(*ups)
    return torch.cat([rows, *(rank for each in ranks for rank in each)], 1), torch.cat((weight, up), 1)
