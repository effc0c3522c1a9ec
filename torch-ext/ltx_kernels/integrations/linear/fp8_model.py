"""The last step of a whole model in fp8."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from ..engine.guards import version_of
from .fp8_weights import BESIDE, FREED, HELD, STOCK, free_weight, guard_loading, is_freed, quantised_weight
from .lora import shared_weights
from .offload import tell_offload


def finish(roots: Collection[nn.Module], groups: Sequence[Sequence[nn.Linear]], stock_weights: str) -> str:
    """The last step of `optimize`; returns the report's note about it. With FREED nothing can undo it."""
    linears = [linear for group in groups for linear in group]
    uncounted = sum(version_of(linear.weight) is None for linear in linears)
    loaded = any(map(is_freed, linears))
    shared = shared_weights(roots)
    freed = sum(free_weight(linear) for linear in linears if stock_weights == FREED and id(linear.weight) not in shared)
    for root in roots:
        guard_loading(root)
        tell_offload(root)
    size = sum(tensor.nbytes for linear in linears for tensor in quantised_weight(linear))
    text = f"fp8: {len(linears)} linear layers, {size / 2**20:.1f} MiB of weights"
    kept = sum(id(linear.weight) in shared for linear in linears)
    if kept and stock_weights != BESIDE:
        text += f" ({kept} beside the stock ones, which other modules read)"
    if uncounted:
        text += f" ({uncounted} made in inference mode, so that later writes into them are not noticed)"
    if loaded:
        return f"{text}, which were loaded: there is no restore"
    if stock_weights == FREED:
        return f"{text} in place of {freed / 2**20:.1f} MiB, which are freed: there is no restore"
    if stock_weights == HELD:
        held = sum(linear.__dict__[STOCK].nbytes for linear in linears if STOCK in linear.__dict__)
        return f"{text} in place of {held / 2**20:.1f} MiB, which are in the host's memory"
    return f"{text} beside the stock ones"
