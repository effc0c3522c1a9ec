"""Linear layers that read one input: one product or several, in their own precision or in fp8, with LoRA adapters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Callable, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._checks import requires_grad
from ..._linear import adjacent, linear_gelu, linear_gelu_op, packed_linear_op
from ..._torch_private import without_function_modes
from ...quant import multiply
from ..engine.guards import hooked, plain_linear
from ..engine.recording import refuse
from ..engine.sites import Site, site_of
from ..engine.state import recall, remember
from .fp8 import in_fp8, why_not_fp8_input, why_not_fp8_weight
from .fp8_weights import quantised_weight
from .frozen import Layers, Rows, rows_of
from .lora import (
    LowRank,
    adapted,
    adapters_of,
    adapters_state,
    base_of,
    fit_autograd,
    fit_in_place,
    is_lora,
    low_ranks,
    one_by_one,
    widened,
    widening_pays,
)
from .merged_adapters import follow_layer
from .packing import packed_scaled_linear_op
from .products import (
    Input,
    count_products,
    dequantised,
    lie_apart,
    like_of,
    may_overwrite,
    product_with_adapters,
    write_products,
)

Made = TypeVar("Made")


class _Stack(NamedTuple):
    """Adjacent tensors as one along their first dimension, without holding the memory that they lie in."""

    first: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Stack:
        first = tensors[0]
        return cls(first, (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:]), first.stride())

    def tensor(self) -> Tensor:
        """RuntimeError where an offload has brought the tensors back to the same addresses, each in its own storage."""
        return self.first.as_strided(self.shape, self.strides)


class Linears:
    """Linear layers that read one input, computed in the fastest way that their state allows.

    An object belongs to one state of the layers and one dtype and device of the input. `remember` keeps it as long as
    that state holds. The active adapters of peft may change meanwhile; every call looks at them.

    site: The replaced module that they belong to, where what happens to adapters is counted.
    scaled: Their products are of fp8 weights, and one product where these are adjacent.
    fp8: They read quantised rows: they are `scaled`, no adapter is active, and gradients are off, which such rows lack.
    plain: nn.Linear and nothing else but adapters, so that their weights can be used without calling them.
    direct: They are `plain`, and no adapter is active.
    packed: One product computes all their outputs, which are views of one new tensor.
    sizes: The number of columns of each output, of layers that are packed unless peft computes their adapters.
    even: They are packed, and all outputs have the same number of columns.
    weights, scales, biases: The tensors of scaled or plain layers: one of each for every layer, but no scales of
        plain layers. A layer without a bias has None.
    """

    __slots__ = (
        *("_alone", "_compiling", "_followed", "_given", "_known", "_packed", "_stacks", "biases", "modules"),
        *("plain", "scaled", "scales", "site", "sizes", "weights"),
    )

    def __init__(
        self, modules: Sequence[nn.Linear], input: Tensor, site: Site, pack: bool = True, parts: int = 1
    ) -> None:
        """parts: The number of outputs of equal width that one layer makes side by side."""
        bases = cast("list[nn.Linear]", list(map(base_of, modules)))
        hooks = any(map(hooked, modules))
        self.site = site
        self._followed = torch.is_grad_enabled()
        self.scaled = not (hooks or why_not_fp8_input(input)) and all(
            in_fp8(base) and not hooked(base) and not why_not_fp8_weight(base, input) for base in bases
        )
        self.plain = not (hooks or self.scaled) and all(plain_linear(base, input.dtype) for base in bases)
        known = self.scaled or self.plain
        self.modules = tuple(bases if known else modules)
        # With adapters, the layers as they are called.
        self._given = tuple(modules) if known and any(map(is_lora, modules)) else ()
        self._known: tuple[list[Hashable], str | list[list[LowRank]]] | None = None  # of a state of the adapters
        self._compiling = torch.compiler.is_compiling()
        self._packed = False
        self.sizes: list[int] = []
        self.weights: list[Tensor] = []
        self.scales: list[Tensor] = []
        self.biases: list[Tensor | None] = []
        self._alone: tuple[Tensor, Tensor | None] | None = None  # weight and bias of a plain layer by itself
        if not known:
            return
        self.biases = [linear._parameters["bias"] for linear in self.modules]
        if self.scaled:
            quantised = map(quantised_weight, self.modules)
            self.weights, self.scales = map(list, zip(*quantised))
        else:
            self.weights = [cast(Tensor, linear._parameters["weight"]) for linear in self.modules]
        if self.plain and len(self.modules) == parts == 1 and not self._given:
            self._alone = self.weights[0], self.biases[0]
        biases = self._given_biases()
        if parts == 1 and (len(self.modules) == 1 or not pack or len(biases) not in (0, len(self.modules))):
            return
        if self._followed and len(biases) > 1 and requires_grad(*biases):  # a view of several has no gradient for each
            return
        self.sizes = [len(weight) // parts for weight in self.weights for _ in range(parts)]
        groups = [group for group in (self.weights, self.scales, biases) if group]
        if self._compiling:  # the ops ask for adjacency where they run, and have no gradient
            self._packed = not (self._followed and input.requires_grad)
        elif all(map(adjacent, groups)):
            self._packed = True
            self._stacks = [_Stack.of(group) for group in groups]

    @property
    def fp8(self) -> bool:
        return self.scaled and not self._followed and not self._adapters()

    @property
    def direct(self) -> bool:
        return self.plain and not self._adapters()

    @property
    def packed(self) -> bool:
        return self._packed and not (self._given and isinstance(self._adapters(), str))

    @property
    def even(self) -> bool:
        return len(set(self.sizes)) == 1 and self.packed

    def _given_biases(self) -> list[Tensor]:
        return [bias for bias in self.biases if bias is not None]

    def stacked(self) -> list[Tensor] | None:
        """Weight, scale of fp8 layers, and bias where they have one, of `packed` layers as one; None if they lie apart.

        The addresses are those that this was made for, or `remember` would have made it anew.
        """
        try:
            return [stack.tensor() for stack in self._stacks]
        except RuntimeError:
            return None

    def _adapters(self) -> str | list[list[LowRank]]:
        """What the active adapters of each layer add, empty if none is active; or why peft has to compute them."""
        if not self._given:
            return []
        adapted = [given for given in self._given if is_lora(given)]
        state = [] if self._compiling else list(map(adapters_state, adapted))
        if self.scaled:
            for given in adapted:
                follow_layer(given)
        if self._compiling:
            return self._find_adapters()
        if self._known is None or self._known[0] != state:
            with without_function_modes():  # a recording sees every question to a tensor
                self._known = state, self._find_adapters()
        return self._known[1]

    def _find_adapters(self) -> str | list[list[LowRank]]:
        found: list[list[LowRank]] = []
        for given, weight in zip(self._given, self.weights):
            reason, adapters = adapters_of(given, weight.device) if is_lora(given) else ("", [])
            if reason:
                return reason
            found.append(adapters)
        return found if any(found) else []

    def _with_adapters(self, input: Input) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """(all outputs side by side where they are views of one tensor, the output of each layer)."""
        adapters = self._adapters()
        if isinstance(adapters, str):
            refuse("peft computes adapters")
            self._remark(f"adapters called by themselves: {adapters}", len(self._given))
            tensor = dequantised(input) if isinstance(input, tuple) else input
            return None, tuple(linear(tensor) for linear in self._given)
        if not adapters:
            whole = self._together(input) if self._packed else None
            return whole, self._apart(input) if whole is None else whole.split_with_sizes(self.sizes, -1)
        self._count_adapters(adapters)
        tensor = dequantised(input) if isinstance(input, tuple) else input
        if self._fit_in_place(adapters):
            return self._in_place(input, tensor, adapters)
        by_autograd = self._followed and not self._compiling and self.site.rounding == "fp32"
        if by_autograd and fit_autograd(adapters, tensor):
            return self._by_autograd(tensor, adapters)
        whole = self._together(input) if self._packed else None
        outputs = self._apart(input) if whole is None else whole.split_with_sizes(self.sizes, -1)
        return None, tuple(one_by_one(output, tensor, added) for output, added in zip(outputs, adapters))

    def _fit_in_place(self, adapters: list[list[LowRank]]) -> bool:
        dtype = torch.bfloat16 if self.scaled else self.weights[0].dtype
        return may_overwrite() and self.site.rounding == "fp32" and fit_in_place(adapters, dtype)

    def _in_place(
        self, input: Input, tensor: Tensor, adapters: list[list[LowRank]]
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """`_with_adapters` in few passes over the outputs."""
        rows, leading = tensor.reshape(-1, tensor.shape[-1]), tensor.shape[:-1]
        quantised: Rows | None = None
        if self.scaled:
            values, scales = self._rows(input)
            quantised = values.view(rows.shape), scales.view(-1, 1)
        ranks = low_ranks(rows, adapters)
        stacked = self.stacked() if self._packed else None
        if stacked is not None:
            whole = product_with_adapters(
                rows, quantised, self._side_by_side(stacked), self.sizes, adapters, ranks
            ).view(*leading, sum(self.sizes))
            return whole, whole.split_with_sizes(self.sizes, -1)
        outputs = []
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            layers = Layers(weight, self.scales[i] if self.scaled else None, bias)
            output = product_with_adapters(
                rows, quantised, layers, [len(weight)], adapters[i : i + 1], ranks[i : i + 1]
            )
            outputs.append(output.view(*leading, len(weight)))
        return None, tuple(outputs)

    def _by_autograd(self, input: Tensor, adapters: list[list[LowRank]]) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """`_with_adapters` with gradients."""
        rows, leading = input.reshape(-1, input.shape[-1]), input.shape[:-1]
        quantised = self._rows(rows) if self.scaled else None
        stacked = self.stacked() if self._packed else None
        if stacked is not None:
            layers = self._side_by_side(stacked)
            sizes = [len(weight) for weight in self.weights]
            whole = adapted(rows, quantised, layers, sizes, adapters).view(*leading, sum(self.sizes))
            return whole, whole.split_with_sizes(self.sizes, -1)
        outputs = []
        for i, added in enumerate(adapters):
            layers = Layers(self.weights[i], self.scales[i] if self.scaled else None, self.biases[i])
            if added:
                output = adapted(rows, quantised, layers, [len(layers.weight)], [added])
            else:
                output = layers.product(rows, quantised)
            outputs.append(output.view(*leading, len(layers.weight)))
        return None, tuple(outputs)

    def _side_by_side(self, stacked: Sequence[Tensor]) -> Layers:
        """The tensors of `stacked`, by what they are."""
        return Layers(stacked[0], stacked[1] if self.scaled else None, stacked[-1] if self._given_biases() else None)

    def widened(self, input: Tensor) -> tuple[Tensor, Tensor] | None:
        """(input, weight) of one plain layer with its adapters beside them, for one product; None: call the layer."""
        adapters = self._adapters()
        if not adapters:
            return input, self.weights[0]
        if isinstance(adapters, str) or not self._fit_in_place(adapters):
            return None
        rows = input.reshape(-1, input.shape[-1])
        if not widening_pays(rows, self.weights[0], adapters, 2):
            return None
        self._count_adapters(adapters)
        wide, weight = widened(rows, self.weights[0], adapters, low_ranks(rows, adapters))
        return wide.view(*input.shape[:-1], wide.shape[1]), weight

    def _count_adapters(self, adapters: list[list[LowRank]]) -> None:
        self._remark("adapters beside fp8" if self.scaled else "adapters beside", sum(1 for found in adapters if found))

    def _remark(self, text: str, count: int) -> None:
        site = site_of(self.modules[0]) if self.scaled else self.site
        site.remark(text, count)

    def together(self, input: Input) -> Tensor:
        """All outputs side by side, of layers that are `packed`."""
        if not self._given:
            return self._together(input)
        whole, outputs = self._with_adapters(input)
        return torch.cat(outputs, -1) if whole is None else whole

    def writes(self, input: Input) -> bool:
        """Whether `write` supports this input, of layers that are `packed`, without active adapters."""
        return isinstance(input, Tensor) if self.direct else self.fp8

    def write(self, input: Input, stacked: Sequence[Tensor], output: Tensor) -> None:
        """Writes what `together` returns into rows [B, S, N] of a tensor, by a product for each sample.

        stacked: The tensors of that method.
        """
        if not self.scaled:
            write_products(cast(Tensor, input), *stacked, output=output)
            return
        weight, weight_scales, *bias = stacked
        values, scales = self._rows(input)
        for i in range(len(output)):
            multiply(values[i], scales[i], weight, weight_scales, bias[0] if bias else None, out=output[i])

    def __call__(self, input: Input) -> tuple[Tensor, ...]:
        """The output of each layer."""
        if self._alone is not None:
            return (self._one(cast(Tensor, input), *self._alone),)
        if self._given:
            return self._with_adapters(input)[1]
        return self._together(input).split_with_sizes(self.sizes, -1) if self._packed else self._apart(input)

    def _one(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None or not lie_apart(input) or self.site.rounding != "fp32" or not may_overwrite():
            return F.linear(input, weight, bias)
        output = input.new_empty(*input.shape[:-1], len(weight))
        write_products(input, weight, bias, output=output)
        return output

    def add_to(self, total: Tensor, input: Input) -> Tensor:
        """A contiguous tensor plus one layer's output, in the tensor's place, by one product where it can."""
        if self._adapters():
            return total.add_(self(input)[0])
        if self.scaled:
            rows = self._rows(input)
            return multiply(*rows, self.weights[0], self.scales[0], self.biases[0], addend=total, out=total)
        if self.plain and self.biases[0] is None:
            tokens = cast(Tensor, input)
            total.view(-1, total.shape[-1]).addmm_(tokens.reshape(-1, tokens.shape[-1]), self.weights[0].t())
            return total
        return total.add_(self(input)[0])

    def _together(self, input: Input) -> Tensor:
        if self._compiling:
            if self.scaled:
                return packed_scaled_linear_op(*self._rows(input), self.weights, self.scales, self._given_biases())
            return packed_linear_op(cast(Tensor, input), self.weights, self._given_biases())
        stacked = self.stacked()
        if stacked is None:
            return torch.cat(self._apart(input), -1)
        return self._side_by_side(stacked).product(*self._both(input))

    def _apart(self, input: Input) -> tuple[Tensor, ...]:
        if self.scaled:
            both = self._both(input)
            groups = zip(self.weights, self.scales, self.biases)
            return tuple([Layers(*tensors).product(*both) for tensors in groups])
        if self.plain:
            return tuple([F.linear(input, *tensors) for tensors in zip(self.weights, self.biases)])  # type: ignore[arg-type]
        return tuple(linear(input) for linear in self.modules)

    def _rows(self, input: Input) -> Rows:
        rows = input if isinstance(input, tuple) else rows_of(input)
        count_products(self.modules, rows)
        return rows

    def _both(self, input: Input) -> tuple[Tensor, Rows | None]:
        """An input as the layers read it: a tensor, and its rows in fp8 for layers in fp8."""
        if not self.scaled:
            return cast(Tensor, input), None
        rows = self._rows(input)
        return rows[0] if isinstance(input, tuple) else input, rows


def kept_layers(kind: str, module: nn.Module, input: Input, make: Callable[..., Made], *arguments: Any) -> Made:
    """``make(module, *arguments, input)`` for an input's dtype and device, kept as long as the module's state holds.

    A block hands over quantised rows after it has asked for the layers that read them (`Entry.readers`). What was made
    for that question is then taken without another look at the module.
    """
    if isinstance(input, tuple):
        found: Made | None = recall(module, (kind, torch.bfloat16, input[1].device))
        if found is not None:
            return found
        input = like_of(input)
    return remember(module, (kind, input.dtype, input.device), make, *arguments, input)


def linears_of(module: nn.Module, names: Sequence[str], input: Tensor) -> Linears:
    """Linear layers among a block's own children that read one input; the block's guards have just been asked."""
    key = "linears", *names, input.dtype, input.device
    found: Linears | None = recall(module, key)
    return remember(module, key, _linears, names, input) if found is None else found


def _linears(module: nn.Module, names: Sequence[str], input: Tensor) -> Linears:
    return Linears([cast(nn.Linear, module._modules[name]) for name in names], input, site_of(module))


def linear_gelu_of(linears: Linears, input: Tensor, approximate: str) -> Tensor | None:
    """One layer and GELU in one product; None where no product has it, or the layer has to be called."""
    bias = linears.biases[0] if linears.plain else None
    if bias is None or approximate != "tanh":
        return None
    if torch.is_grad_enabled() and requires_grad(input, linears.weights[0], bias):  # the product has no gradient
        return None
    operands = linears.widened(input)
    if operands is None:
        return None
    function = linear_gelu_op if torch.compiler.is_compiling() else linear_gelu
    return function(*operands, bias)


def joined(
    first: Linears, input: Input, rows: slice, second: Linears, context: Tensor, rows2: slice, length: int
) -> Tensor:
    """The packed outputs of two groups of layers for two streams of tokens, as rows of one new tensor [B, length, N].

    Products write to their rows of it; where one cannot, both are made and concatenated.
    """
    groups = (first, input, rows), (second, context, rows2)
    stacked = [linears.stacked() if linears.writes(tokens) else None for linears, tokens, _ in groups]
    if None not in stacked:
        output = context.new_empty(context.shape[0], length, sum(first.sizes))
        for (linears, tokens, part), tensors in zip(groups, stacked):
            linears.write(tokens, cast("list[Tensor]", tensors), output[:, part])
        return output
    parts = first.together(input), second.together(context)
    return torch.cat(parts if rows.start == 0 else parts[::-1], 1)
