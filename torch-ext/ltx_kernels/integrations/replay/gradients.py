"""Recorded calls with gradients: the ops of a call and of its backward, as two Python functions.

A replay is one autograd.Function: its forward runs the ops of the call, and saves what the ops of the backward read.
Autograd then has one node for the block, and one for each parameter that is trained. gradient_recorder.py writes the
functions down.

What the backward reads is saved as any Function saves it, weights too: autograd sees when one of them was written to
meanwhile, and raises its error. The gradient of a result that nothing reads is None: each choice of results with a
gradient has a backward of its own, so that a parameter gets None where autograd gives None.

Autocast has chosen the dtypes of the recorded ops, and is off while they run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointError

from ..._once import once_differentiable
from ..._torch_private import below_autograd, forward_ad
from .recorder import Recording, same_constant

DEVICES = ("cuda", "cpu")  # whose autocast the signature of a call has


def why_not() -> str:
    """Why calls with gradients are neither recorded nor replayed now; empty if they are."""
    return "forward-mode differentiation is on" if forward_ad._current_level >= 0 else ""


class GradientRecording(Recording):
    """A recorded call and its backward.

    inputs: For each argument, whether it gets a gradient.
    trained: The parameters that get one.
    weights: The parameters that the backward reads.
    partial: The trained parameters whose gradient is None if the loss reads only one of two results.
    own: The places of results among the tensors that the function saves.
    backwards: The functions of the backward, by the choice of results that a gradient comes from. Each takes the
        gradients, and a list of what the function has saved, which it empties.
    autocast: The devices whose autocast is on in the call.
    """

    __slots__ = ("autocast", "backwards", "inputs", "own", "partial", "trained", "weights")

    def __init__(
        self,
        recording: Recording,
        backwards: Mapping[tuple[bool, ...], Callable[..., Any]],
        inputs: Sequence[bool],
        trained: Sequence[Tensor],
        partial: Sequence[Tensor],
        weights: Sequence[Tensor],
        own: frozenset[int],
        autocast: Sequence[str],
    ) -> None:
        for name in Recording.__slots__:
            setattr(self, name, getattr(recording, name))
        self.backwards, self.inputs, self.trained, self.weights = backwards, inputs, trained, weights
        self.partial, self.own, self.autocast = partial, own, autocast

    def run(self, arguments: Sequence[Any], way: Way | None = None, again: bool = False) -> Any:
        """way, again: Of a call under a checkpoint, and whether it is the second run."""
        return _Replay.apply(self, way, again, *arguments, *self.trained)

    def is_hooked(self) -> bool:
        """Whether a parameter has a hook that would be called without a gradient, as no ordinary call does."""
        return any(tensor._backward_hooks or tensor._post_accumulate_grad_hooks for tensor in self.partial)

    def equals(self, other: GradientRecording) -> bool:
        """Whether another recording runs the same ops with the same values, of tensors that may be others."""
        if self.source != other.source:
            return False
        mine, theirs = self.function.__globals__, other.function.__globals__
        return all(same_constant(value, theirs.get(name)) for name, value in mine.items() if name.startswith("value"))

    def count(self) -> None:
        for site, calls in self.calls:
            site.add("calls", calls)
        for site, unpacked in self.unpacked:
            site.add("unpacked", unpacked)
        for site, number in self.gradients:
            site.add("gradients", number)
        for site, text, number in self.remarks:
            site.remark(text, number)


class Way:
    """What a checkpoint's first run of a call has chosen, which the second run follows.

    recording: None where the call is an ordinary one.
    valid: What the choice depends on, for `replayed`.
    saved: What the second run has saved, until the backward takes it.
    """

    __slots__ = ("recording", "saved", "valid")

    def __init__(self) -> None:
        self.recording: GradientRecording | None = None
        self.valid: Any = None
        self.saved: list[Tensor] | None = None


_NOTHING = torch.empty(0)


class _Replay(Function):
    """One call of a `GradientRecording`.

    Under a checkpoint both runs save one empty tensor. The checkpoint runs the call again when the first run's node
    asks for it, and the second run leaves what it has saved in the `Way`.
    """

    @staticmethod
    def forward(ctx: Any, recording: GradientRecording, way: Way | None, again: bool, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.recording, ctx.way, ctx.saved = recording, way, None
        for device in recording.autocast:
            torch.set_autocast_enabled(device, False)
        try:
            with below_autograd():
                result, saved = recording.function(*tensors[: len(recording.inputs)])
                if again:  # arguments and results belong to the graph of the second run
                    saved = [
                        tensor.detach() if tensor.requires_grad or place in recording.own else tensor
                        for place, tensor in enumerate(saved)
                    ]
        finally:
            for device in recording.autocast:
                torch.set_autocast_enabled(device, True)
        if way is None:
            ctx.save_for_backward(*saved, *recording.weights)
            return result
        if again:
            way.saved, ctx.saved = saved, tuple(saved)
        ctx.save_for_backward(_NOTHING)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        recording: GradientRecording = ctx.recording
        choice = tuple([gradient is not None for gradient in gradients])
        if choice not in recording.backwards:  # nothing reads a result
            return (None,) * (3 + len(recording.inputs) + len(recording.trained))
        saved = list(ctx.saved_tensors if ctx.saved is None else ctx.saved)
        if ctx.way is None:
            del saved[len(saved) - len(recording.weights) :]
        elif ctx.saved is None:
            recording, saved = ctx.way.recording, ctx.way.saved
            ctx.way.saved = None
            if saved is None:
                raise CheckpointError("a checkpoint's second run does not contain a recorded call of the first run")
        given = [gradient.contiguous() for gradient in gradients if gradient is not None]
        with without_autocast(), below_autograd():
            return cast("tuple[Tensor | None, ...]", recording.backwards[choice](*given, saved))


@contextmanager
def without_autocast() -> Iterator[None]:
    """As outside of autocast, where a backward belongs."""
    enabled = [device for device in DEVICES if torch.is_autocast_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


def choices(results: int) -> list[tuple[bool, ...]]:
    """The choices of some results: for each whether it is one of them."""
    return [choice for choice in itertools.product((False, True), repeat=results) if any(choice)]
