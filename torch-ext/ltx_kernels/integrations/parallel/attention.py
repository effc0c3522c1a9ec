"""Attention over the tokens of all ranks, which exchange queries, keys and values: Ulysses, ring attention, or both.

`attend` is the entry point. Ulysses gives every rank all tokens of some heads: one all-to-all carries query, key and
value, and one brings the output back. Where GPUs reach each other's memory, copies replace both (`peer_memory.py`).
Ring gathers the keys and values of all ranks: one all-gather, which overlaps with the attention to the rank's own keys
where this package's kernel runs. With both, the ring is among the ranks that hold the same heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention import attention
from . import peer_memory
from .ranks import Config, Ranks, ranks_of, wait_for

# Bytes of a rank's values that are sent before query and key. An exchange more costs time: the 33 MB of LTX-Video 2B on
# two H200 are worth it, and fewer have not been timed.
LEAST_AHEAD = 24 << 20

# (query, key, value, mask [B, T] of the keys or None, where to write or None) -> [B, S, heads, D]
Compute = Callable[[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"], Tensor]


@dataclass(frozen=True)
class Sent:
    """Tensors on their way to the ranks that hold their heads.

    rows: [all S, B, tensors, heads / ranks, D], which are there once `work` has been waited for.
    """

    rows: Tensor
    work: Any

    def wait(self) -> tuple[Tensor, ...]:
        """Each tensor, [B, all S, heads / ranks, D]."""
        wait_for(self.work)
        return self.rows.transpose(0, 1).unbind(2)


Ahead = Union[Sent, peer_memory.Transfer]


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
    ulysses = ranks_of(config, "ulysses")
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

    Every rank has to call it with the same config, flags and dtypes. Lengths may differ where the config allows it.

    mask: [B, T] of this rank's keys, or [B, sum of all T] of those of all ranks, in the order of the ranks.
    ahead: The values, where `send_ahead` sends them already.
    out: Where the result may be written; the result is another tensor otherwise.
    cross: The keys are not those of the queries' tokens, so that their number may differ.
    compute: Attention on this rank.
    overlaps: Whether this package's kernel supports such tensors and can attend before all keys have come.
    in_place: `compute` may be told where to write.
    """
    ulysses, ring = ranks_of(config, "ulysses"), ranks_of(config, "ring")
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
    wait_for(work)
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
    wait_for(work)
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
