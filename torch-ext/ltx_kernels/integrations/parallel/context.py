"""Context parallelism of diffusers: every rank holds some of the tokens, and attention exchanges what it needs.

`attend` computes attention over the tokens of all ranks. Ulysses gives every rank all tokens of some heads: one
all-to-all carries query, key and value, and one brings the output back. Where GPUs reach each other's memory, copies
take the place of both (`_peers`). Ring gathers the keys and values of all ranks: one all-gather, under the attention to
the rank's own keys where this package's kernel runs. With both, the ring is among the ranks that hold the same heads.

`follow` prepares a model: a family may bring a `Parallel` plan, which `enable_parallelism` then applies instead of
diffusers' own, and calls that cannot give a right result raise before anything is changed.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import importlib
import inspect
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Protocol, Union

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ...attention import attention
from ..engine.guards import ATTRIBUTE, RELEASE, class_of
from . import peer_memory

ENABLE = "enable_parallelism"

# Bytes of a rank's values that are sent before query and key. An exchange more costs time: the 33 MB of LTX-Video 2B on
# two H200 are worth it, and fewer have not been timed.
LEAST_AHEAD = 24 << 20

# (query, key, value, mask [B, T] of the keys or None, where to write or None) -> [B, S, heads, D]
Compute = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]
Splits = Mapping[str, Mapping["str | int", "tuple[int, int]"]]


class Config(Protocol):
    """What diffusers' ContextParallelConfig holds."""

    ulysses_degree: int
    ring_degree: int
    ulysses_anything: bool
    ring_anything: bool
    _ulysses_mesh: Any
    _ring_mesh: Any
    _flattened_mesh: Any
    _device: torch.device


def context_of(parallel: Any) -> Config | None:
    """The part of a parallel configuration that splits tokens; None where there is none."""
    if parallel is None:
        return None
    config = getattr(parallel, "context_parallel_config", parallel)
    return config if hasattr(config, "ulysses_degree") else None


def all_gather(output: Tensor, input: Tensor, **options: Any) -> Any:
    """torch's collective on one tensor, by the name that it has: torch 2.13 warns of the older one."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(output, input, **options)


# ---- Attention over the tokens of all ranks


@dataclass(frozen=True)
class Ranks:
    """The ranks of one dimension of the mesh. even: Every rank holds as many tokens as the others."""

    group: Any
    size: int
    rank: int
    even: bool

    def lengths(self, x: Tensor) -> list[int]:
        """The number of tokens of each rank, where this one holds x [B, S, ...]. Uneven ones cost a collective."""
        if self.even:
            return [x.shape[1]] * self.size
        device = "cpu" if "cpu" in str(dist.get_backend(self.group)) else x.device
        all_lengths = torch.empty(self.size, dtype=torch.int64, device=device)
        all_gather(all_lengths, torch.tensor([x.shape[1]], device=device), group=self.group)
        return all_lengths.tolist()

    def exchange(
        self, send: Tensor, sent: Sequence[int], received: Sequence[int], later: bool = False
    ) -> tuple[Tensor, Any]:
        """All-to-all of the rows of a contiguous tensor; one length for each rank.

        With `later` the rows are there once the work that is returned too has been waited for.
        """
        result = send.new_empty(sum(received), *send.shape[1:])
        rows = None if self.even else (list(received), list(sent))
        output_rows, input_rows = rows or (None, None)
        work = dist.all_to_all_single(result, send, output_rows, input_rows, group=self.group, async_op=later)
        return result, work

    def gather(self, x: Tensor) -> tuple[Tensor, Any]:
        """x [S, ...] of all ranks, [size S, ...], once the work that is returned too has been waited for."""
        result = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        # torch.compile takes collectives that end before they return.
        return result, all_gather(result, x, group=self.group, async_op=not torch.compiler.is_compiling())


@dataclass(frozen=True)
class Sent:
    """Tensors on their way to the ranks that hold their heads.

    rows: [all S, B, tensors, heads / ranks, D], which are there once `work` has been waited for.
    """

    rows: Tensor
    work: Any

    def wait(self) -> tuple[Tensor, ...]:
        """Each tensor, [B, all S, heads / ranks, D]."""
        _wait(self.work)
        return self.rows.transpose(0, 1).unbind(2)


Ahead = Union[Sent, peer_memory.Transfer]


def _ranks(config: Config, name: str) -> Ranks | None:
    size = getattr(config, f"{name}_degree")
    if size == 1:
        return None
    group = getattr(config, f"_{name}_mesh").get_group()
    return Ranks(group, size, dist.get_rank(group), not getattr(config, f"{name}_anything"))


def send_ahead(config: Config | None, value: Tensor) -> Ahead | None:
    """Begins to exchange the values [B, S, heads, D] of a self-attention, while query and key are not ready yet.

    None where query, key and value had better travel together. All ranks decide alike, since their shapes are the same.
    """
    transfer = _transfer(config, value)
    if transfer is not None:
        return transfer
    ulysses = _even_ulysses(config, value)
    if ulysses is None or value.nbytes < LEAST_AHEAD:
        return None
    return _to_heads(ulysses, [value.shape[1]] * ulysses.size, value, later=True)


def _even_ulysses(config: Config | None, x: Tensor) -> Ranks | None:
    """The ranks of Ulysses where x [B, S, heads, D] divides evenly, and its exchange may be in parts and in place."""
    if config is None or config.ring_degree > 1 or config.ulysses_anything:
        return None
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    ulysses = _ranks(config, "ulysses")
    return None if ulysses is None or x.shape[2] % ulysses.size else ulysses


def _transfer(config: Config | None, value: Tensor) -> peer_memory.Transfer | None:
    """A self-attention's exchange by copies, with the values [B, S, heads, D] on their way; None for collectives."""
    ulysses = _even_ulysses(config, value)
    peers = None if ulysses is None else peer_memory.peers_of(ulysses.group, value)
    if peers is None:
        return None
    transfer = peer_memory.Transfer(peers, value)
    transfer.put(2, value)
    return transfer


def attend(
    config: Config,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    ahead: Ahead | None = None,
    out: Tensor | None = None,
    cross: bool,
    compute: Compute,
    overlaps: Callable[[Tensor, Tensor, Tensor], bool],
    in_place: bool,
) -> Tensor:
    """Attention of this rank's queries [B, S, heads, D] to the keys [B, T, heads, D] of all ranks.

    Every rank has to call it with the same config, flags and dtypes. Lengths may differ where the config says so.

    mask: [B, T] of this rank's keys, or [B, sum of all T] of those of all ranks, in the order of the ranks.
    ahead: The values, where `send_ahead` sends them already.
    out: Where the result may be written; the result is another tensor otherwise.
    cross: The keys are not those of the queries' tokens, so that their number may differ.
    compute: Attention on this rank.
    overlaps: Whether this package's kernel takes such tensors and can attend before all keys have come.
    in_place: `compute` may be told where to write.
    """
    ulysses, ring = _ranks(config, "ulysses"), _ranks(config, "ring")
    if mask is not None and mask.shape[1] == key.shape[1]:
        for ranks in filter(None, (ulysses, ring)):
            mask = _gathered_mask(ranks, mask)
    if ulysses is None:
        assert ring is not None
        return _ring(ring, query, _side_by_side(key, value), mask, compute, overlaps)
    transfer = ahead if isinstance(ahead, peer_memory.Transfer) else None
    if ahead is None and not cross:
        transfer = _transfer(config, value)
    if transfer is not None:
        out = query.new_empty(query.shape) if out is None else out
        transfer.put(0, query)
        transfer.put(1, key)
        query, key, value = transfer.wait()
        compute(query, key, value, mask, transfer.output)
        return transfer.take(out)
    assert not isinstance(ahead, peer_memory.Transfer)
    heads, tokens = query.shape[2], query.shape[1]
    padding = -heads % ulysses.size
    if padding and not config.ulysses_anything:
        raise ValueError(
            f"ulysses_degree: expected a divisor of the {heads} heads, got {ulysses.size}; ulysses_anything=True pads"
        )
    if padding:
        query, key, value = (F.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
    lengths = ulysses.lengths(query)
    if ahead is not None:
        query, key = _to_heads(ulysses, lengths, query, key).wait()
        (value,) = ahead.wait()
    elif cross or ring is not None:
        key_lengths = ulysses.lengths(key) if cross else lengths
        (query,) = _to_heads(ulysses, lengths, query).wait()
        both = _to_heads(ulysses, key_lengths, key, value)
        key, value = both.wait()
    else:
        query, key, value = _to_heads(ulysses, lengths, query, key, value).wait()
    if ring is not None:
        send = _ring(ring, query, both.rows, mask, compute, overlaps).transpose(0, 1).contiguous()
    else:
        if in_place:
            send = query.new_empty(query.shape[1], query.shape[0], *query.shape[2:])
            compute(query, key, value, mask, send.transpose(0, 1))
        else:
            send = compute(query, key, value, mask, None).transpose(0, 1).contiguous()
    received, _ = ulysses.exchange(send, lengths, [tokens] * ulysses.size)
    (output,) = peer_memory.wide(received)
    output = output.unflatten(0, (ulysses.size, tokens)).permute(2, 1, 0, 3, 4).flatten(2, 3)
    return output.view(query.dtype)[:, :, :heads]


def check_dispatch(config: Config | None, *masks: Tensor | None) -> None:
    """Raises where diffusers' own exchange would give a wrong result: every rank masks the keys of all by its own."""
    for mask in masks:
        if mask is not None and config is not None and config.ring_degree > 1:
            raise ValueError(
                f"ring_degree: expected 1 with a mask of shape {list(mask.shape)} in this call, got "
                f"{config.ring_degree}: diffusers' ring attention masks the keys of every rank alike"
            )


def _to_heads(ranks: Ranks, lengths: Sequence[int], *tensors: Tensor, later: bool = False) -> Sent:
    """Begins one all-to-all of tensors [B, S, heads, D] of this rank's tokens; it ends here but for `later`.

    The buffer that is sent is [ranks, S, B, tensors, heads / ranks, D], so that what comes needs no copy.
    """
    batch, tokens, heads, width = tensors[0].shape
    send = tensors[0].new_empty(ranks.size, tokens, batch, len(tensors), heads // ranks.size, width)
    for i, x in enumerate(tensors):
        peer_memory.copy(send[:, :, :, i], x.unflatten(2, (ranks.size, -1)).permute(2, 1, 0, 3, 4))
    return Sent(*ranks.exchange(send.flatten(0, 1), [tokens] * ranks.size, lengths, later))


def _side_by_side(key: Tensor, value: Tensor) -> Tensor:
    """[T, B, 2, heads, D] of two [B, T, heads, D]."""
    return torch.stack((key.transpose(0, 1), value.transpose(0, 1)), 2)


def _gathered_mask(ranks: Ranks, mask: Tensor) -> Tensor:
    """[B, all T] of the masks [B, T] of all ranks."""
    values = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
    gathered = _gathered(ranks, values.t(), ranks.lengths(values))
    return gathered.t().to(mask.dtype)


def _gathered(ranks: Ranks, x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The rows [T, ...] of all ranks, in their order."""
    rows, work, longest = *_gather_padded(ranks, x, lengths), max(lengths)
    _wait(work)
    return _without_padding(rows, lengths, longest)


def _gather_padded(ranks: Ranks, x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Any]:
    missing = max(lengths) - x.shape[0]
    if missing:
        x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
    return ranks.gather(x.contiguous())


def _without_padding(rows: Tensor, lengths: Sequence[int], longest: int) -> Tensor:
    if min(lengths) == longest:
        return rows
    return torch.cat([part[:length] for part, length in zip(rows.split(longest), lengths)])


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _ring(
    ranks: Ranks,
    query: Tensor,
    both: Tensor,
    mask: Tensor | None,
    compute: Compute,
    overlaps: Callable[[Tensor, Tensor, Tensor], bool],
) -> Tensor:
    """Attention of queries [B, S, heads, D] to keys and values of all ranks, of which this one holds `both`."""
    key, value = both.transpose(0, 1).unbind(2)
    lengths = ranks.lengths(key)
    rows, work = _gather_padded(ranks, both, lengths)
    mine = None
    if mask is None and overlaps(query, key, value):
        mine = attention(query, key, value, return_lse=True)
    _wait(work)
    all_keys, all_values = _without_padding(rows, lengths, max(lengths)).transpose(0, 1).unbind(2)
    if mine is None:
        return compute(query, all_keys, all_values, mask, None)
    start = sum(lengths[: ranks.rank])
    others = torch.ones(1, all_keys.shape[1], dtype=torch.bool, device=query.device)
    others[:, start : start + key.shape[1]] = False
    return merged(mine, attention(query, all_keys, all_values, mask=others, return_lse=True))


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Attention to two sets of keys, from the attention to each with its log-sum-exp [B, heads, S]."""
    share = torch.sigmoid(other[1] - one[1]).transpose(1, 2).unsqueeze(-1)
    return torch.lerp(one[0].float(), other[0].float(), share).to(one[0].dtype)


# ---- Models


@dataclass(frozen=True)
class Parallel:
    """How a model is split, where diffusers' plan gives wrong results, errors, or exchanges without need.

    model: The name of the model's class, with its module.
    split: From a model, (dimension to split, number of dimensions) of an argument, or of an output by its number, of
        the submodule at each path. A tensor with another number of dimensions stays whole, and so does an argument of
        the model that has one row where another has more.
    gather: The same of the outputs to gather, None for those that are whole already.
    local: Patterns of attentions that exchange nothing: all their keys are on every rank.
    """

    model: str
    split: Callable[[Any], Splits]
    gather: Mapping[str, Sequence[tuple[int, int] | None]]
    local: tuple[str, ...]

    def plan(self, root: nn.Module) -> dict[str, Any]:
        """The plan as diffusers takes it."""
        home = _hooks(root)
        plan: dict[str, Any] = {}
        for path, tensors in self.split(root).items():
            plan[path] = {
                name: home.ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=isinstance(name, int))
                for name, (dim, dims) in tensors.items()
            }
        for path, outputs in self.gather.items():
            plan[path] = [
                None if output is None else home.ContextParallelOutput(gather_dim=output[0], expected_dims=output[1])
                for output in outputs
            ]
        return plan

    def attentions(self, root: nn.Module) -> Iterator[nn.Module]:
        """The modules that `local` names."""
        for name, module in root.named_modules():
            if "processor" in module.__dict__ and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.local):
                yield module


def _hooks(root: nn.Module) -> Any:
    """diffusers' module of hooks for context parallelism."""
    return importlib.import_module(f"{type(root).__module__.split('.')[0]}.hooks.context_parallel")


def _hook(root: nn.Module, path: str, kind: str) -> Any:
    """The hook that a plan has put on a submodule; None if there is none."""
    if "*" in path:
        return None
    registry = root.get_submodule(path).__dict__.get("_diffusers_hook")
    return None if registry is None else registry.get_hook(f"cp_{kind}---{path}")


def _carries(root: nn.Module, plan: Mapping[str, Any]) -> bool:
    """Whether a model's hooks are those of a plan."""
    for path, part in plan.items():
        hook = _hook(root, path, "input" if isinstance(part, dict) else "output")
        expected = part if isinstance(part, (dict, list, tuple)) else [part]
        if hook is None or hook.metadata != expected:
            return False
    return True


def _split_arguments(
    hook: Any, names: tuple[str, ...], module: nn.Module, *args: Any, **kwargs: Any
) -> tuple[tuple[()], dict[str, Any]]:
    """The pre_forward of diffusers' hook, for arguments that calls may leave out, and tensors that have two forms.

    diffusers' own raises for an argument that is left out, and warns of a tensor of another form. A tensor of one row
    beside others of more rows is for all tokens, and stays whole.
    """
    given = {**dict(zip(names, args)), **kwargs}
    sizes = {
        name: given[name].shape[split.split_dim]
        for name, split in hook.metadata.items()
        if isinstance(given.get(name), Tensor) and given[name].dim() == split.expected_dims
    }
    for name, size in sizes.items():
        if size > 1 or max(sizes.values()) == 1:
            given[name] = hook._prepare_cp_input(given[name], hook.metadata[name])
    return (), given


class Followed:
    """What `follow` has done to a model, and how to undo it."""

    def __init__(self, parallel: Parallel | None) -> None:
        self.parallel = parallel
        self.applied = False  # the plan of `parallel` is in force

    def apply(self, root: Any) -> None:
        """What has to be done beside a plan that diffusers has applied."""
        assert self.parallel is not None
        self.applied = True
        hook = _hook(root, "", "input")
        names = tuple(inspect.signature(type(root).forward).parameters)[1:]
        hook.fn_ref.pre_forward = functools.partial(_split_arguments, hook, names)
        for module in self.parallel.attentions(root):
            module.processor = copy.copy(module.processor)
            module.processor._parallel_config = None  # type: ignore[union-attr]

    def __call__(self, root: Any) -> None:
        """Undoes it all; the model stays parallel, as diffusers does it."""
        root.__dict__.pop(ENABLE, None)
        if self.applied:
            assert self.parallel is not None
            self.applied = False
            _exchange_plans(root, self.parallel.plan(root), type(root)._cp_plan)
            for module in self.parallel.attentions(root):
                module.processor._parallel_config = root._parallel_config  # type: ignore[union-attr]

    def __deepcopy__(self, memo: dict[int, Any]) -> Followed:
        copied = Followed(self.parallel)
        copied.applied = self.applied
        return copied


def _exchange_plans(root: Any, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    home = _hooks(root)
    home.remove_context_parallel(root, old)
    home.apply_context_parallel(root, context_of(root._parallel_config), new)


def follow(root: Any, parallel: Parallel | None) -> None:
    """Has a model's `enable_parallelism`, in the past or in the future, fit what was replaced in it."""
    if not hasattr(root, ENABLE):
        return
    followed = root.__dict__[RELEASE] = Followed(parallel)
    root.__dict__[ENABLE] = types.MethodType(_enable, root)
    config = context_of(getattr(root, "_parallel_config", None))
    if config is None:
        return
    if parallel is not None and _carries(root, type(root)._cp_plan):
        _exchange_plans(root, type(root)._cp_plan, parallel.plan(root))
        followed.apply(root)
    _agree(root, config)


def _enable(self: Any, *, config: Any, cp_plan: Any = None, **options: Any) -> None:
    """diffusers' enable_parallelism, with the family's plan, and errors before anything is changed."""
    followed: Followed | None = self.__dict__.get(RELEASE)
    stock = type(self).enable_parallelism
    context = context_of(config)
    if followed is None or context is None or getattr(self, "_parallel_config", None) is not None:
        stock(self, config=config, cp_plan=cp_plan, **options)
        return
    reason = _obstacle(self, cp_plan)
    if reason:
        raise ValueError(f"enable_parallelism: {reason}")
    parallel = followed.parallel if cp_plan is None else None
    stock(self, config=config, cp_plan=cp_plan if parallel is None else parallel.plan(self), **options)
    if parallel is not None:
        followed.apply(self)
    _agree(self, context)


def _obstacle(root: Any, cp_plan: Any) -> str:
    """Why tokens of a model cannot be split; empty if they can."""
    for module in root.modules():
        processor = module.__dict__.get("processor")
        if processor is not None and ATTRIBUTE in module.__dict__ and not hasattr(processor, "_parallel_config"):
            return (
                "expected attention that exchanges tokens between ranks, which diffusers does not have in "
                f"{class_of(processor)} of {type(root).__name__}"
            )
    if cp_plan is None and root._cp_plan is None:
        return f"expected a cp_plan, since diffusers has none for {type(root).__name__}"
    return why_not_offloaded(root)


def why_not_offloaded(root: nn.Module) -> str:
    """Why a model whose tokens are split, or are to be, must not be as it is; empty if it may."""
    for module in root.modules():
        registry = module.__dict__.get("_diffusers_hook")
        if registry is not None and any("group_offloading" in name for name in registry.hooks):
            return f"expected a {type(root).__name__} that is not offloaded by groups, got one that is"
    return ""


def check(root: nn.Module) -> None:
    """Raises where `optimize` cannot make a model right that is parallel already."""
    if context_of(getattr(root, "_parallel_config", None)) is not None:
        reason = why_not_offloaded(root)
        if reason:
            raise ValueError(f"obj: with context parallelism, {reason}")


def _agree(root: nn.Module, config: Config) -> None:
    """Raises on every rank where ranks have replaced different modules: their calls would wait for one another."""
    replaced = [
        (name, site.class_name, site.rounding)
        for name, site in ((name, module.__dict__.get(ATTRIBUTE)) for name, module in root.named_modules())
        if site is not None
    ]
    group = config._flattened_mesh.get_group()
    mine = torch.tensor([zlib.crc32(repr(replaced).encode())], device=config._device)
    everyones = mine.new_empty(dist.get_world_size(group))
    all_gather(everyones, mine, group=group)
    if len(set(everyones.tolist())) > 1:
        raise RuntimeError(
            "context parallelism: expected the same modules to be replaced on every rank, got differences between the "
            f"ranks; this one has replaced {len(replaced)}: call optimize with the same arguments on all of them"
        )


def lines(root: nn.Module) -> list[str]:
    """What the report says of a model's parallelism."""
    config = context_of(getattr(root, "_parallel_config", None))
    if config is None:
        return []
    kinds = [f"{name} {getattr(config, f'{name}_degree')}" for name in ("ulysses", "ring")]
    mode = " x ".join(kind for kind in kinds if not kind.endswith(" 1"))
    mode += ", uneven" if config.ulysses_anything or config.ring_anything else ""
    group = config._flattened_mesh.get_group()
    followed = root.__dict__.get(RELEASE)
    plan = "this package's plan" if followed is not None and followed.applied else "diffusers' plan"
    ulysses = _ranks(config, "ulysses")
    exchange = "" if ulysses is None else peer_memory.line(ulysses.group)
    return [
        f"context parallelism of {type(root).__name__}: {mode}; rank {dist.get_rank(group)} of "
        f"{dist.get_world_size(group)}; {plan}{exchange and f'; exchange by {exchange}'}"
    ]
