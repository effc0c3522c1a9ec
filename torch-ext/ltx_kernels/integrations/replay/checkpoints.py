"""What calls have chosen in the first run of a checkpoint, for its second run in the backward.

`torch.utils.checkpoint` with use_reentrant=False runs a function twice, and gives the tensors that the second run saves
to the nodes of the first one, by their order. Both runs of a call have to be the same recorded call, or ordinary. The
choice of the first run therefore stays with the checkpoint, and a recording that is made between the two is left alone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import nn

from ..._torch_private import checkpoint_of
from .gradients import Way

_Ways = dict[int, list[Way]]  # of the calls of each module, by its id


class Run:
    """One run of a checkpoint.

    again: It is the second one.
    """

    __slots__ = ("_calls", "_ways", "again")

    def __init__(self, ways: _Ways, again: bool) -> None:
        self._ways, self.again = ways, again
        self._calls: Counter[int] = Counter()

    def next_way(self, module: nn.Module) -> Way:
        """The way of a module's next call: a new one in the first run, and the same one in the second."""
        ways = self._ways.setdefault(id(module), [])
        if not self.again:
            ways.append(Way())
            return ways[-1]
        number = self._calls[id(module)]
        self._calls[id(module)] += 1
        return ways[number] if number < len(ways) else Way()


_ways: weakref.WeakKeyDictionary[Any, _Ways] = weakref.WeakKeyDictionary()  # by torch's object for a checkpoint's call
_runs: weakref.WeakKeyDictionary[Any, Run] = weakref.WeakKeyDictionary()  # by the function that takes what is saved


def run_of(hooks: Any) -> Run | None:
    """The run that hooks for saved tensors belong to; None where they are no checkpoint's."""
    pack = hooks[0]
    run = _runs.get(pack)
    if run is None:
        found = checkpoint_of(pack)
        if found is None:
            return None
        call, again = found
        run = _runs[pack] = Run(_ways.setdefault(call, {}), again)
    return run
