"""Values that are made of tensors once, and kept as long as these tensors are what they were."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Callable, TypeVar

import torch
from torch import Tensor, nn

from ..._checks import requires_grad
from ..._torch_private import dispatch_modes, func_interpreter, storage_number, storage_reference
from .autocast import autocast_state
from .guards import is_capturing
from .recording import others_take_functions, refuse
from .sites import Site

Made = TypeVar("Made")

KEPT = 4  # values that a site keeps of one kind: a multi-scale pipeline goes back and forth between two shapes

# Values that a user's own CUDA graphs read. They stay for good, because nothing tells when such a graph is gone. The
# graphs of this package hold theirs (`read_by`).
_captured: list[Any] = []
_capture = threading.local()


@contextlib.contextmanager
def read_by(graph: list[Any]) -> Iterator[None]:
    """The values that are kept and read while this context captures a graph go into a list that lives as long as it."""
    _capture.values = graph
    try:
        yield
    finally:
        del _capture.values


def kept(
    site: Site,
    key: Hashable,
    sources: Sequence[Tensor],
    make: Callable[[], Made],
    views: Sequence[Tensor] = (),
) -> Made:
    """What ``make`` returns. An earlier result is returned for the same key and the same, unchanged tensors.

    Nothing is kept under torch.compile and torch.jit.trace, in torch.func and in modes that watch or replace ops, nor
    of tensors that a gradient goes through. Nothing is kept of inference tensors either, because they have no version
    that tells of a write. While a CUDA graph is captured, only values made of parameters are reused: a program may
    write new data to other tensors before it replays the graph.

    key: All that the result depends on beside tensors.
    sources: The tensors that the value is made of, such as coordinates, angles or a mask. A weak reference to each, its
        place and its version decide whether they are the same.
    views: Further ones that are new views of the same memory at each call. The kept value holds them, so that nothing
        else gets that memory; address, shape, strides, dtype and version decide.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return make()
    if any(tensor.is_inference() for tensor in (*sources, *views)):
        return make()
    if torch.is_grad_enabled() and requires_grad(*sources, *views):
        return make()
    capturing = is_capturing()
    if capturing and not all(isinstance(tensor, nn.Parameter) for tensor in (*sources, *views)):
        return make()
    refuse("a value is kept for the tensors that it is made of")
    if dispatch_modes() or func_interpreter() is not None:  # what is made may be a fake tensor, or one of torch.func
        return make()
    values = site.cache
    places = [(view.data_ptr(), view.shape, view.stride(), view.dtype, view._version) for view in views]
    of_sources = [(id(source), storage_number(source), source.data_ptr(), source._version) for source in sources]
    place = key, autocast_state(), *places, *of_sources
    found = values.get(place)
    if found is not None and all(reference() is source for reference, source in zip(found[1], sources)):
        if capturing:
            getattr(_capture, "values", _captured).append(found[0])
        value: Made = found[0]
        return value
    with torch.inference_mode(False):  # autograd cannot save what inference mode has made
        made = make()
    if not capturing:  # memory that is allocated during a capture belongs to the graph
        for oldest in list(values)[: 1 - KEPT]:  # made at once: another thread may put a value into the dict meanwhile
            values.pop(oldest, None)
        gone = functools.partial(_drop, weakref.ref(site), place)
        memories = tuple(map(storage_reference, sources))  # other data may get an address again, but not a number
        values[place] = made, tuple(weakref.ref(source, gone) for source in sources), (*views, *memories)
    return made


def may_read(tensor: Tensor) -> bool:
    """Whether the host may ask for a tensor's contents, to keep the answer for all blocks that get it.

    A compiled, traced or captured graph serves other contents too. An inference tensor may change without a sign, so
    that every block would have to ask. Other functions or devices may rely on all of the tensor.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return not (tensor.is_inference() or others_take_functions() or is_capturing())


def _drop(site: weakref.ref[Site], place: Hashable, source: Any) -> None:
    """A value's memory is free as soon as a tensor that it was made of is gone."""
    owner = site()
    if owner is not None:
        owner.cache.pop(place, None)
