"""Linear layers of a model: several that read one input as one product, and weights in fp8.

An fp8 weight lies beside the stock one, as buffers that are not saved; it is quantised once, per output channel. The
layer's ``forward`` quantises its input row by row, so that whatever calls it works; a fused block hands over rows that
an op has quantised already.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Callable, Union, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._linear import adjacent, linear_cat, linear_gelu, linear_gelu_op, make_adjacent, packed_linear_op, stacked
from .._ops import add_op_namespace_prefix
from ..quant import multiply, quantize_rows, quantize_weight
from ._guards import ATTRIBUTE, hooked, is_ordinary, plain_linear, recall, remember, why_not_input
from ._lora import LowRank, adapters_of, add_adapters, base_of, is_lora, merged
from ._sites import Entry, Site, site_of, stock_forward

LINEAR_CLASS = "torch.nn.modules.linear.Linear"
VALUES, SCALES = "ltx_fp8_values", "ltx_fp8_scales"
STATE = "_ltx_fp8_of"  # the version of the weight that was quantised, or FREED
FREED = "freed"
MERGED = "_ltx_fp8_merged"  # the adapters that were in the weight when it was quantised
PACKED = "_ltx_kernels_packed"  # set on a module by `pack`, for `unpack`

Rows = tuple[Tensor, Tensor]  # values and scales, as the ops of quant.py return them
Input = Union[Tensor, Rows]


# ---- Weights in fp8


def why_not_fp8(linear: nn.Linear) -> str:
    """Why the weight of a linear layer cannot be quantised; empty if it can."""
    if not is_ordinary(linear.weight) or linear.weight.device.type == "meta":
        return f"its weight is no ordinary parameter ({type(linear.weight).__name__} on {linear.weight.device})"
    if linear.in_features % 16 or linear.out_features % 16:
        return f"fp8 GEMMs need multiples of 16, not {linear.in_features} x {linear.out_features}"
    return ""


def quantise_weights(linears: Sequence[nn.Linear]) -> None:
    """Gives layers that share an input their fp8 weights, one behind the other."""
    quantised = [quantize_weight(linear.weight) for linear in linears]
    values, scales = (torch.cat(parts) for parts in zip(*quantised))
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.register_buffer(VALUES, values[start:end], persistent=False)
        linear.register_buffer(SCALES, scales[start:end], persistent=False)
        linear.__dict__[STATE] = linear.weight._version
        start = end


def quantise_again(linear: nn.Linear) -> None:
    """Takes the fp8 weight of a layer from its stock weight as it is now, and leaves it in its place."""
    for name, tensor in zip((VALUES, SCALES), quantize_weight(linear.weight)):
        cast(Tensor, linear._buffers[name]).copy_(tensor)
    linear.__dict__[STATE] = linear.weight._version


def drop_weights(linear: nn.Module) -> None:
    """What `restore` does beside giving the layer its forward back."""
    for name in (VALUES, SCALES):
        linear._buffers.pop(name, None)
        linear._non_persistent_buffers_set.discard(name)
    linear.__dict__.pop(STATE, None)
    linear.__dict__.pop(MERGED, None)
    for reference in site_of(linear).roots:
        unfollow(reference())


def freed(linear: nn.Module) -> bool:
    return linear.__dict__.get(STATE) == FREED


def free_weight(linear: nn.Linear) -> int:
    """Gives the memory of the stock weight back; the bytes."""
    size = linear.weight.nbytes
    linear.weight.data = torch.empty(0, dtype=linear.weight.dtype, device=linear.weight.device)
    linear.__dict__[STATE] = FREED
    linear.register_state_dict_pre_hook(_refuse_to_save)
    return size


def summary(linears: Sequence[nn.Linear], freed_bytes: int | None) -> str:
    """What to tell about the memory."""
    added = sum(cast(Tensor, linear._buffers[name]).nbytes for linear in linears for name in (VALUES, SCALES))
    text = f"fp8: {len(linears)} linear layers, {added / 2**20:.1f} MiB of weights"
    if freed_bytes is None:
        return f"{text} beside the stock ones"
    return f"{text} in place of {freed_bytes / 2**20:.1f} MiB, which are freed: there is no restore"


def _refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise RuntimeError(
        f"{prefix}weight was freed by optimize(..., free_weights=True) and cannot be saved: load the model again"
    )


def _changed(linear: nn.Linear) -> bool:
    """Whether the stock weight was written to after it was quantised (through .data it can be, unseen)."""
    version = linear.weight._version
    if version < linear.__dict__[STATE]:  # a copy, which counts anew
        linear.__dict__[STATE] = version
    return version > linear.__dict__[STATE]


def _why_not_fp8_input(input: Tensor) -> str:
    if input.dtype != torch.bfloat16:
        return f"fp8 takes bfloat16 activations, not {input.dtype}"
    return why_not_input(input)


def _why_not_fp8_weight(linear: nn.Linear, input: Tensor) -> str:
    values = linear._buffers.get(VALUES)
    if values is None or values.dtype != torch.float8_e4m3fn or values.device != input.device:
        return "the fp8 weight was converted or is on another device"
    if not torch.compiler.is_compiling() and not freed(linear) and _changed(linear):
        return "the weight has changed since it was quantised: call optimize again"
    return ""


def linear_forward(self: nn.Linear, input: Tensor) -> Tensor:
    reason = _why_not_fp8_input(input) or _why_not_fp8_weight(self, input)
    if reason and not freed(self):
        return stock_forward(self, reason, input)
    if reason:
        raise RuntimeError(
            f"fp8 cannot run this call ({reason}), and the stock weight was freed by optimize(..., free_weights=True): "
            "load the model again to run it without fp8"
        )
    site: Site = self.__dict__[ATTRIBUTE]
    site.count_call()
    return _multiply(self, quantize_rows(input))


def _multiply(linear: nn.Linear, rows: Rows) -> Tensor:
    values, scales = cast(Tensor, linear._buffers[VALUES]), cast(Tensor, linear._buffers[SCALES])
    return multiply(*rows, values, scales, linear._parameters["bias"])


def why_not_restored(linear: nn.Module) -> str:
    return (
        "its stock weight was freed by optimize(..., free_weights=True): load the model again" if freed(linear) else ""
    )


LINEAR = Entry(
    (LINEAR_CLASS,),
    linear_forward,
    ("quantize_rows", "scaled_linear"),
    ("input",),
    why_not=lambda module: why_not_fp8(cast(nn.Linear, module)),
    why_not_restored=why_not_restored,
    release=drop_weights,
)


def in_fp8(linear: nn.Module) -> bool:
    """Whether a linear layer, or the one below its adapters, has fp8 weights."""
    site = base_of(linear).__dict__.get(ATTRIBUTE)
    return site is not None and site.entry is LINEAR


# ---- Adapters that are merged into the stock weights

_CHANGING = (
    "fuse_lora",
    "unfuse_lora",
    "unload_lora",
)  # methods of diffusers' models that write to weights through .data


def follow(root: nn.Module) -> None:
    """Has the fp8 weights below a model follow when diffusers merges adapters into the stock weights, and back."""
    for module in root.modules():
        if is_lora(module) and in_fp8(module):
            base_of(module).__dict__[MERGED] = merged(module)
    for name in _CHANGING:
        if hasattr(type(root), name):
            root.__dict__[name] = types.MethodType(_FOLLOWING[name], root)


def unfollow(root: nn.Module | None) -> None:
    for name in _CHANGING if root is not None else ():
        root.__dict__.pop(name, None)


def _follow_layers(root: nn.Module) -> None:
    for module in root.modules():
        if is_lora(module) and in_fp8(module):
            _follow_layer(module)


def _follow_layer(layer: nn.Module) -> None:
    """Quantises a weight again where adapters were merged into it, or taken out, since it was quantised."""
    linear = cast(nn.Linear, base_of(layer))
    now = merged(layer)
    if now == linear.__dict__.get(MERGED, ()):
        return
    if torch.compiler.is_compiling():
        raise RuntimeError("adapters were merged into weights in fp8, or taken out: call optimize again")
    quantise_again(linear)
    linear.__dict__[MERGED] = now
    site_of(linear).remark("weights quantised again, since adapters were merged or taken out")


def _following(name: str) -> Callable[..., Any]:
    def method(self: nn.Module, *args: Any, **options: Any) -> Any:
        linears = [module for module in self.modules() if type(module) is nn.Linear and in_fp8(module)]
        if name != "unload_lora" and any(map(freed, linears)):
            raise RuntimeError(
                f"{name}: expected stock weights, got weights that were freed by optimize(..., free_weights=True); "
                "adapters run beside the fp8 weights without it"
            )
        _follow_layers(self)
        result = getattr(type(self), name)(self, *args, **options)
        _follow_layers(self)
        if name == "unload_lora":
            for linear in linears:
                linear.__dict__.pop(MERGED, None)
        return result

    return method


_FOLLOWING = {name: _following(name) for name in _CHANGING}


# ---- Several layers, one input


def _in_one_storage(tensors: Sequence[Tensor]) -> bool:
    return tensors[0].untyped_storage().data_ptr() == tensors[-1].untyped_storage().data_ptr()


class Linears:
    """Linear layers that read one input, in the form that their state allows.

    It is made for one state of the layers and of the input's dtype and device: `remember` keeps it for as long as that
    holds. Which adapters of peft are active is asked at every call.

    scaled: Their products are of fp8 weights, and one product where these are adjacent.
    fp8: They take quantised rows: they are `scaled`, and no adapter is active.
    packed: One product makes all their outputs, which are views of one new tensor.
    direct: nn.Linear and nothing else, so that their weights can be used without calling them.
    """

    __slots__ = ("_given", "direct", "modules", "packed", "scaled", "sizes")

    def __init__(self, modules: Sequence[nn.Linear], input: Tensor, pack: bool = True) -> None:
        bases = cast("list[nn.Linear]", list(map(base_of, modules)))
        self.scaled = not _why_not_fp8_input(input) and all(
            in_fp8(base) and not hooked(base) and not hooked(given) and not _why_not_fp8_weight(base, input)
            for base, given in zip(bases, modules)
        )
        self.modules = tuple(bases if self.scaled else modules)
        # With adapters, the layers as they are called.
        self._given = tuple(modules) if self.scaled and any(map(is_lora, modules)) else ()
        self.direct = not self.scaled and all(plain_linear(linear, input.dtype) for linear in modules)
        self.packed = False
        if len(self.modules) == 1 or not pack or not (self.scaled or self.direct):
            self.sizes: list[int] = []
            return
        biases = self._biases()
        if biases is not None:
            self.sizes = [linear.out_features for linear in self.modules]
            if torch.compiler.is_compiling():  # the ops ask for adjacency where they run
                self.packed = True
            elif self.scaled:
                values, scales = self._quantised()
                self.packed = adjacent(values) and adjacent(scales) and (not biases or adjacent(biases))
            else:
                self.packed = adjacent(self._weights()) and (not biases or adjacent(biases))

    @property
    def fp8(self) -> bool:
        return self.scaled and not (self._given and self._adapters())

    def _weights(self) -> list[Tensor]:
        return [linear._parameters["weight"] for linear in self.modules]  # type: ignore[misc]

    def _quantised(self) -> tuple[list[Tensor], list[Tensor]]:
        buffers = [linear._buffers for linear in self.modules]
        return [b[VALUES] for b in buffers], [b[SCALES] for b in buffers]  # type: ignore[misc]

    def _biases(self) -> list[Tensor] | None:
        """None where some of the layers have a bias and some have none."""
        biases: list[Tensor] = [b for b in (linear._parameters["bias"] for linear in self.modules) if b is not None]
        return biases if len(biases) in (0, len(self.modules)) else None

    def _adapters(self) -> str | list[list[LowRank]]:
        """What the active adapters of each layer add, empty if none is active; or why peft has to compute them."""
        found: list[list[LowRank]] = []
        for given, linear in zip(self._given, self.modules):
            reason, adapters = "", list[LowRank]()
            if given is not linear:
                _follow_layer(given)
                reason, adapters = adapters_of(given, cast(Tensor, linear._buffers[VALUES]).device)
            if reason:
                return reason
            found.append(adapters)
        return found if any(found) else []

    def _with_adapters(self, input: Input) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """(all outputs side by side where they are views of one tensor, the output of each layer)."""
        adapters, site = self._adapters(), site_of(self.modules[0])
        x = dequantised(input) if adapters and isinstance(input, tuple) else input
        if isinstance(adapters, str):
            site.remark(f"adapters called by themselves: {adapters}", len(self._given))
            return None, tuple(linear(x) for linear in self._given)
        whole = self._together(input) if self.packed else None
        outputs = self._apart(input) if whole is None else whole.split(self.sizes, -1)
        if not adapters:
            return whole, outputs
        site.remark("adapters beside fp8", sum(map(bool, adapters)))
        in_place = may_overwrite()
        outputs = tuple(
            add_adapters(output, cast(Tensor, x), added, in_place) for output, added in zip(outputs, adapters)
        )
        return whole if in_place else None, outputs

    def together(self, input: Input) -> Tensor:
        """All outputs side by side, of layers that are `packed`."""
        if not self._given:
            return self._together(input)
        whole, outputs = self._with_adapters(input)
        return torch.cat(outputs, -1) if whole is None else whole

    def __call__(self, input: Input) -> tuple[Tensor, ...]:
        """The output of each layer."""
        if self._given:
            return self._with_adapters(input)[1]
        return self._together(input).split(self.sizes, -1) if self.packed else self._apart(input)

    def _together(self, input: Input) -> Tensor:
        biases = self._biases() or []
        if torch.compiler.is_compiling():
            if self.scaled:
                return packed_scaled_linear_op(*self._rows(input), *self._quantised(), biases)
            return packed_linear_op(cast(Tensor, input), self._weights(), biases)
        weights, scales = self._quantised() if self.scaled else (self._weights(), [])
        # The addresses are those that this was made for, or `remember` would have made it anew; that an offload has
        # brought neighbours back to the same addresses as tensors of their own is left to ask.
        if not all(_in_one_storage(tensors) for tensors in (weights, scales, biases) if tensors):
            return torch.cat(self._apart(input), -1)
        bias = stacked(biases) if biases else None
        if self.scaled:
            return multiply(*self._rows(input), stacked(weights), stacked(scales), bias)
        return F.linear(cast(Tensor, input), stacked(weights), bias)

    def _apart(self, input: Input) -> tuple[Tensor, ...]:
        if self.scaled:
            rows = self._rows(input)
            return tuple(_multiply(linear, rows) for linear in self.modules)
        if self.direct:
            return tuple(
                F.linear(input, linear._parameters["weight"], linear._parameters["bias"])  # type: ignore[arg-type]
                for linear in self.modules
            )
        return tuple(linear(input) for linear in self.modules)

    def _rows(self, input: Input) -> Rows:
        for linear in self.modules:
            linear.__dict__[ATTRIBUTE].count_call()
        return input if isinstance(input, tuple) else quantize_rows(input)


def may_overwrite() -> bool:
    """Whether fresh tensors may be overwritten: torch.compile and autograd want new ones."""
    return not torch.compiler.is_compiling() and not torch.is_grad_enabled()


def linears_of(module: nn.Module, names: Sequence[str], input: Tensor) -> Linears:
    """Linear layers among a block's own children that read one input; the block's guards have just been asked."""
    key = "linears", *names, input.dtype, input.device
    found: Linears | None = recall(module, key)
    return remember(module, key, _linears, names, input) if found is None else found


def _linears(module: nn.Module, names: Sequence[str], input: Tensor) -> Linears:
    return Linears([cast(nn.Linear, module._modules[name]) for name in names], input)


def all_readers(*groups: Linears | None) -> Linears | None:
    """Groups that read one input, as ``into`` of a Stream's norm: rows are quantised only where all take them."""
    return groups[0] if all(group is not None and group.fp8 for group in groups) else None


def over_two(linears: Linears, first: Tensor, second: Tensor) -> Tensor:
    """One layer on two inputs side by side, [..., K1] and [..., K2]."""
    if linears.direct:
        (linear,) = linears.modules
        return linear_cat((first, second), cast(Tensor, linear._parameters["weight"]), linear._parameters["bias"])
    (output,) = linears(torch.cat((first, second), -1))
    return output


def linear_gelu_of(linears: Linears, input: Tensor, approximate: str) -> Tensor | None:
    """One layer and GELU in one product; None where no product has it, or the layer has to be called."""
    (linear,) = linears.modules
    bias = linear._parameters["bias"] if linears.direct else None
    if bias is None or approximate != "tanh":
        return None
    function = linear_gelu_op if torch.compiler.is_compiling() else linear_gelu
    return function(input, cast(Tensor, linear._parameters["weight"]), bias)


def dequantised(rows: Rows) -> Tensor:
    """The tensor that quantised rows stand for."""
    values, scales = rows
    return (values.float() * scales).to(torch.bfloat16)


def joined(
    first: Linears, input: Input, rows: slice, second: Linears, context: Tensor, rows2: slice, length: int
) -> Tensor:
    """The packed outputs of two groups of layers for two streams of tokens, as rows of one new tensor [B, length, N].

    Products write to their rows of it; where one cannot, both are made and concatenated.
    """
    whole = all(_in_one_storage(group._weights()) for group in (first, second))
    if first.direct and second.direct and whole and isinstance(input, Tensor):
        width = sum(first.sizes)
        output = input.new_empty(input.shape[0], length, width)
        for linears, tokens, part in ((first, input, rows), (second, context, rows2)):
            weights, biases = linears._weights(), linears._biases()
            weight = stacked(weights).t()
            for sample in range(len(output)):
                target = output[sample, part]
                if biases:
                    torch.addmm(stacked(biases), tokens[sample], weight, out=target)
                else:
                    torch.mm(tokens[sample], weight, out=target)
        return output
    parts = first.together(input), second.together(context)
    return torch.cat(parts if rows.start == 0 else parts[::-1], 1)


def pack(module: nn.Module, groups: Sequence[Sequence[str]]) -> str:
    """Moves the weights of each group of linear layers below a module into one storage, as views; or why not."""
    for names in groups:
        linears = [cast(nn.Linear, module.get_submodule(name)) for name in names]
        linears = [cast(nn.Linear, base_of(linear)) if in_fp8(linear) else linear for linear in linears]
        described = f"{', '.join(names[:-1])} or {names[-1]}"
        if not all(type(linear) is nn.Linear and not hooked(linear) for linear in linears):
            return f"{described} is no plain nn.Linear"
        parameters = [p for linear in linears for p in linear.parameters(recurse=False)]
        first = parameters[0]
        for p in parameters:
            if not is_ordinary(p) or p.is_inference() or (p.device, p.dtype) != (first.device, first.dtype):
                return f"{described} has other than ordinary parameters of one device and dtype"
            if p.device.type not in ("cuda", "cpu"):
                return f"{described} is on {p.device}"
        storages = [p.untyped_storage().nbytes() > p.nbytes for p in parameters]
        if any(storages) and not adjacent([linear.weight for linear in linears]):
            return f"{described} has parameters in a storage of somebody else's"
        module.__dict__[PACKED] = True
        # Those in fp8 are adjacent as they are made.
        weights = [cast(nn.Parameter, linear.weight) for linear in linears if not in_fp8(linear)]
        if weights:
            make_adjacent(weights)
        if all(linear.bias is not None for linear in linears):
            make_adjacent([linear.bias for linear in linears])
    return ""


def unpack(module: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Gives weights that `pack` has moved into one storage a storage each; they stay the parameters they are."""
    if not module.__dict__.pop(PACKED, False):
        return
    for names in groups:
        linears = [linear for linear in map(module._modules.get, names) if type(linear) is nn.Linear]
        shared: dict[int, list[Tensor]] = {}
        for parameter in (p for linear in linears for p in (linear.weight, linear.bias)):
            if parameter is not None and is_ordinary(parameter) and parameter.device.type in ("cuda", "cpu"):
                shared.setdefault(parameter.untyped_storage().data_ptr(), []).append(parameter)
        for parameters in shared.values():
            # A storage that holds more than these is somebody else's.
            if len(parameters) > 1 and parameters[0].untyped_storage().nbytes() == sum(p.nbytes for p in parameters):
                for parameter in parameters:
                    parameter.data = parameter.data.clone()


def packed_scaled_linear(
    values: Tensor, scales: Tensor, weights: Sequence[Tensor], weight_scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor | None:
    """``scaled_linear`` of several layers with one input, outputs side by side; None if their weights lie apart."""
    if adjacent(weights) and adjacent(weight_scales) and (not biases or adjacent(biases)):
        return multiply(values, scales, stacked(weights), stacked(weight_scales), stacked(biases) if biases else None)
    return None


@torch.library.custom_op(
    add_op_namespace_prefix("packed_scaled_linear"),
    mutates_args=(),
    schema="(Tensor values, Tensor scales, Tensor[] weights, Tensor[] weight_scales, Tensor[] biases) -> Tensor",
)
def packed_scaled_linear_op(
    values: Tensor, scales: Tensor, weights: Sequence[Tensor], weight_scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    packed = packed_scaled_linear(values, scales, weights, weight_scales, biases)
    if packed is not None:
        return packed
    outputs = [
        multiply(values, scales, weight, weight_scales[i], biases[i] if biases else None)
        for i, weight in enumerate(weights)
    ]
    return torch.cat(outputs, -1)


@packed_scaled_linear_op.register_fake
def _(
    values: Tensor, scales: Tensor, weights: Sequence[Tensor], weight_scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    return values.new_empty(*values.shape[:-1], sum(w.shape[0] for w in weights), dtype=torch.bfloat16)
