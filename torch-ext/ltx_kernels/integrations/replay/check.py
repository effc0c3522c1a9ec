"""LTX_KERNELS_RECORD=check: compares the bits of a recorded call, run on copies, with those of the ordinary call."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Callable

import torch
from torch import Tensor, nn

from ..._torch_private import storage_number
from ..engine.sites import site_of
from .gradients import GradientRecording, choices, without_autocast
from .recorder import Recording, same_constant


def compare(
    module: nn.Module,
    found: Recording,
    again: Callable[[Sequence[Tensor]], tuple[Any, Recording | str]],
    tensors: Sequence[Tensor],
    live: Mapping[str, Any],
    trained: Sequence[Tensor],
) -> Any:
    """The ordinary call's result; RuntimeError where a recorded call on copies of the arguments has another one.

    Where calls have gradients, the ordinary call runs on copies too, so that no gradient goes on beyond the arguments.

    again: Runs the ordinary call on given tensors; its result, and another recording of it or the reason why there is
        none.
    trained: The parameters that need a gradient, where calls have gradients.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    given = [_copy_of(tensor, storages) for tensor in tensors]
    followed = isinstance(found, GradientRecording)
    if followed:
        storages = {}
        tensors = [_copy_of(tensor, storages) for tensor in tensors]
    mine = [_copy_of(value, storages) if type(value) is Tensor else copy.deepcopy(value) for value in live.values()]
    replayed = found.run([*given, *mine, []] if live else given)
    result, now = again(tensors)
    if followed and result is None:
        raise RuntimeError(f"LTX_KERNELS_RECORD: {_path_of(module)}: the call is no longer recorded: {now}")
    pairs = list(_pairs(replayed, result, "result"))
    for i, both in enumerate(zip(given, tensors)):
        pairs += _pairs(*both, f"argument {i}")
    for name, mine_too, theirs in zip(live, mine, live.values()):
        pairs += _pairs(mine_too, theirs, name)
    if followed:
        pairs += _gradients((replayed, given), (result, tensors), trained)
    for place, one, other in pairs:
        if not _same_bits(one, other):
            why = f"{place}, {_described(one)} replayed and {_described(other)} computed"
            raise RuntimeError(f"LTX_KERNELS_RECORD: {_path_of(module)}: {why}; {_first_difference(found, now)}")
    return result


def _gradients(
    one: tuple[Any, Sequence[Tensor]], other: tuple[Any, Sequence[Tensor]], trained: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(place, tensor, tensor) of the gradients of two calls, each a result and its arguments.

    They come from each choice of the results. A gradient that does not exist is an empty tensor.
    """
    parts = (one[0],) if isinstance(one[0], Tensor) else one[0]
    generator = torch.Generator(parts[0].device).manual_seed(0)
    drawn = [torch.randn(part.shape, dtype=part.dtype, device=part.device, generator=generator) for part in parts]
    for choice in choices(len(parts)):
        found = []
        for result, arguments in (one, other):
            results = (result,) if isinstance(result, Tensor) else result
            chosen, gradients = zip(*((part, drawn[i]) for i, part in enumerate(results) if choice[i]))
            inputs = [tensor for tensor in (*arguments, *trained) if tensor.requires_grad]
            with without_autocast():
                found.append(torch.autograd.grad(chosen, inputs, gradients, retain_graph=True, allow_unused=True))
        for i, pair in enumerate(zip(*found)):
            mine, theirs = (parts[0].new_empty(0) if gradient is None else gradient for gradient in pair)
            yield f"gradient {i}", mine, theirs


def _copy_of(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """A copy of a tensor, at the same place in a copy of its storage. Tensors of one storage share its copy."""
    number = storage_number(tensor)
    if number not in storages:
        storages[number] = tensor.untyped_storage().clone()
    copied = tensor.new_empty(0).set_(storages[number], tensor.storage_offset(), tensor.size(), tensor.stride())
    return copied.requires_grad_(torch.is_grad_enabled() and tensor.requires_grad)


def _pairs(one: Any, other: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(place, tensor, tensor) of the tensors in two results, or in two caches, of the same structure."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        yield place, one, other
    elif isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        for i, pair in enumerate(zip(one, other)):
            yield from _pairs(*pair, f"{place}[{i}]", depth)
    elif isinstance(one, dict) and isinstance(other, dict):
        for name in one.keys() & other.keys():
            yield from _pairs(one[name], other[name], f"{place}.{name}", depth)
    elif depth < 3 and type(one) is type(other) and hasattr(one, "__dict__"):
        yield from _pairs(vars(one), vars(other), place, depth + 1)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.stride()) != (other.shape, other.dtype, other.stride()):
        return False
    bits = (
        tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for tensor in (one, other)
    )
    return torch.equal(*bits)


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} with strides {list(tensor.stride())}"


def _path_of(module: nn.Module) -> str:
    """A block's class, and its place in the model that was optimized."""
    roots = site_of(module).living_roots
    names = (name for root in roots for name, part in root.named_modules() if part is module)
    return f"{type(module).__name__} {next(names, '')}".strip()


def _first_difference(then: Recording, now: Recording | str) -> str:
    """Where a recording and another one of the same call differ."""
    if isinstance(now, str):
        return f"the call is no longer recorded: {now}"
    lines = zip_longest(then.source.splitlines(), now.source.splitlines(), fillvalue="nothing")
    for number, (old, new) in enumerate(lines):
        if old != new:
            return f"line {number} of the recording is {old.strip()!r}, and would be {new.strip()!r}"
        for name in re.findall(r"\w+", old):
            one, other = then.function.__globals__.get(name), now.function.__globals__.get(name)
            same = same_constant(one, other)
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                same = one.data_ptr() == other.data_ptr() and _same_bits(one, other)
            if not same:
                return f"line {number} of the recording, {old.strip()!r}, holds another {name}"
    return "the recording would have the same lines"
