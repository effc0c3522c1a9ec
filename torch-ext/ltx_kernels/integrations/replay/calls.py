"""Recorded calls of blocks: the second call of a signature is recorded, and later ones run the recording alone.

What a block's forward launches follows from three things: the state of its modules, the modes of the process, and the
signature of its arguments. To find this out takes Python as long as to launch. So a call in which all three are the
same as in an earlier one runs the torch functions of that call, which recorder.py has written down as a function.

A call is not recorded where something else decides: the contents or the address of a tensor, a cache that looks
tensors up by their identity, or a module of another library. Code of this package that decides by one of these says so
(engine/recording.py).

A call with gradients is recorded with its backward (gradients.py). The signature then also says which arguments and
parameters need a gradient. Under a checkpoint the call that is recorded runs for the recording alone, and both runs of
a call go the same way (checkpoints.py).

`replayed` is the entry point, and `Replays` holds the recorded calls of a block.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Callable, cast

import torch
from torch import Tensor, nn

from ..._torch_private import (
    COMPILED_CALL,
    dispatch_modes,
    forward_ad,
    func_interpreter,
    function_modes,
    has_global_hooks,
    saved_tensors_hooks,
    without_saved_tensors_hooks,
)
from ..._variant import COMPILED_DEVICE
from ..engine.code import patched
from ..engine.guards import ATTRIBUTE, class_of, has_torch_backend, hooked, is_capturing
from ..engine.recording import Live, thread
from ..engine.signature import PLAIN, attention_is_replaced, signature
from ..engine.state import HELD, SIGNATURES, Held, Snapshot, held, is_watched
from ..linear.fp8 import in_fp8
from ..linear.fp8_weights import holds_fp8
from ..linear.lora import adapters_state, is_lora
from ..linear.merged_adapters import is_behind
from . import gradients
from .check import compare
from .checkpoints import run_of
from .gradient_recorder import GradientRecorder, exchanged
from .gradients import GradientRecording, Way
from .recorder import Recorder, Recording

# LTX_KERNELS_RECORD: "1" records calls and replays them, "0" does neither, and "check" runs each replay beside the
# ordinary call and compares the bits of both.
CHECK = "check"
RECORD = os.environ.get("LTX_KERNELS_RECORD", "1")
if RECORD not in ("0", "1", CHECK):
    raise ValueError(f"LTX_KERNELS_RECORD: expected 0, 1 or check, got {RECORD!r}")

# After so many changes of a block's state without a replay between them, the block counts as one that changes at every
# call, as under an offload, and is not recorded.
CHANGES = 8
REFUSED = 100  # so many calls later, a block that may not be recorded is examined again
LIBRARIES = ("torch", "diffusers")
ACTIVATIONS = "transformers.activations"  # of transformers' other modules, replaced ones and `Entry.plain` are recorded

Call = Callable[..., Any]
_NOT_FOLLOWED = "calls with gradients that are not recorded: "

_OTHERS = ("fallbacks", "traces")  # counters of calls that ran a stock forward, or were traced


def replayed(
    module: nn.Module, compute: Call, args: Sequence[Any], kwargs: Mapping[str, Any], live: Live | None = None
) -> Any:
    """``compute(module, *args, **kwargs)``; the second call of a signature is recorded, and later ones are replayed."""
    if torch.compiler.is_compiling() or RECORD == "0" or not _is_ordinary():
        return compute(module, *args, **kwargs)
    followed, way = torch.is_grad_enabled(), None
    if followed:
        reason, hooks = gradients.why_not(), saved_tensors_hooks()
        if not reason and hooks is not None:
            run = run_of(hooks)
            if run is None:
                reason = "hooks, and no checkpoint's, take what is saved for the backward"
            elif run.again:
                return _again(module, compute, args, kwargs, run.next_way(module))
            else:
                way = run.next_way(module)
        if reason:
            module.__dict__[ATTRIBUTE].remark(_NOT_FOLLOWED + reason)
            return compute(module, *args, **kwargs)
    handed: dict[str, Any] = {}
    of_live: Hashable = None
    if live is not None:
        handed = {name: kwargs[name] for name in live.names if type(kwargs.get(name)) not in PLAIN}
        if handed and followed:
            module.__dict__[ATTRIBUTE].remark(_NOT_FOLLOWED + "an argument may be another one at every call")
            return compute(module, *args, **kwargs)
        if handed:
            of_live = live.signature(module, args, kwargs)
            if of_live is None:
                return compute(module, *args, **kwargs)
    fixed = {name: value for name, value in kwargs.items() if name not in handed} if handed else kwargs
    tensors: list[Tensor] = []
    try:
        key: Hashable = *handed, of_live, *_key(args, fixed, tensors)
    except (TypeError, RuntimeError):  # an argument that no recording can depend on
        return compute(module, *args, **kwargs)
    place = held(module)
    replays: Replays | None = place.replays
    if replays is not None and replays.refused:
        replays.refused -= 1
        if not replays.refused:
            place.replays = None
        return compute(module, *args, **kwargs)
    if replays is None or not replays.holds(module):
        # The call comes first: it puts a `Held` on modules, which the snapshot of `Replays` has to contain.
        result = compute(module, *args, **kwargs)
        place.replays = replays = Replays(module, 0 if replays is None else replays.changes + 1)
        replays.calls[key, replays.state.gradients()] = ""
        return result
    key = key, replays.state.gradients()
    found = replays.calls.get(key)
    if found is None:  # the first call
        if len(replays.calls) >= SIGNATURES:
            replays.calls.clear()
        replays.calls[key] = ""
    elif found == "" and not followed:  # the second call
        replays.calls[key] = "a call has failed"  # unless it does not
        result, replays.calls[key] = replays.record(module, compute, args, kwargs, tensors, handed)
        return result
    elif found == "":  # the graph of its arguments may lead to the block's own weights
        found = replays.calls[key] = replays.traced(module, compute, args, kwargs, tensors)
    if isinstance(found, Recording):
        if not replays.answers_as(found, module):
            replays.calls.pop(key, None)  # another thread may have taken it
        elif RECORD == CHECK:
            trained = [tensor for tensor in replays.state.tensors if followed and tensor.requires_grad]

            def again(given: Sequence[Tensor], state: Replays = replays) -> tuple[Any, Recording | str]:
                if not followed:
                    return state.record(module, compute, args, kwargs, given, handed)
                mine, options = exchanged((tuple(args), dict(kwargs)), tensors, given)
                return state.record(module, compute, mine, options, given, handed)

            if not followed:
                return compare(module, found, again, tensors, handed, trained)
            with _apart(tensors):
                compare(module, found, again, tensors, handed, trained)
        else:
            begun: list[bool] = []
            if isinstance(found, GradientRecording) and found.is_hooked():
                module.__dict__[ATTRIBUTE].remark(_NOT_FOLLOWED + "a parameter has a hook for its gradient")
                return compute(module, *args, **kwargs)
            try:
                if isinstance(found, GradientRecording):
                    result = found.run(tensors, way)
                else:
                    result = found.run((*tensors, *handed.values(), begun) if handed else tensors)
            # For example, an offload has put weights that lay side by side into separate storages.
            except Exception as error:
                replays.calls[key] = f"a replay failed: {error}"
                if begun:  # the keys and values of a token are in their cache, and must not get there twice
                    raise
                module.__dict__[ATTRIBUTE].remark(f"a recorded call failed, and ran ordinarily: {error}")
            else:
                if way is not None:
                    way.recording, way.valid = cast(GradientRecording, found), (replays, replays.active, key)
                found.count()
                replays.changes = 0
                return result
    return compute(module, *args, **kwargs)


def _key(args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[Tensor]) -> tuple[Hashable, ...]:
    """The signature of a call without live arguments, as of `signature`."""
    key = *kwargs, *signature((*args, *kwargs.values()), tensors)
    return (*key, *[tensor.requires_grad for tensor in tensors]) if torch.is_grad_enabled() else key


def _again(module: nn.Module, compute: Call, args: Sequence[Any], kwargs: Mapping[str, Any], way: Way) -> Any:
    """The second run of a call under a checkpoint. It goes the way of the first, or the checkpoint raises its error."""
    found = way.recording
    if found is None:
        return compute(module, *args, **kwargs)
    replays, active, (key, followed) = way.valid
    tensors: list[Tensor] = []
    if key != (None, *_key(args, kwargs, tensors)):
        return compute(module, *args, **kwargs)
    if not replays.holds(module):  # weights may have gone and come back to another place, as under FSDP
        for _ in range(2):  # the first call after a change also makes what the modules keep
            replays = Replays(module, 0)
            now = replays.reason or replays.traced(module, compute, args, kwargs, tensors)
        if isinstance(now, str) or not now.equals(found):
            return compute(module, *args, **kwargs)
        way.recording = found = now
    if replays.active != active or replays.state.gradients() != followed or not replays.answers_as(found, module):
        return compute(module, *args, **kwargs)
    found.count()  # the checkpoint ends the run as soon as it has what it needs
    return found.run(tensors, way, True)


@contextmanager
def _apart(tensors: Sequence[Tensor]) -> Iterator[None]:
    """What runs in this context is seen neither by a checkpoint nor by the generators of random numbers."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    with without_saved_tensors_hooks(), torch.random.fork_rng(devices):
        yield


@contextmanager
def _kept_buffers(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Gives the modules' buffers back what they held, such as the statistics of a batch norm, which a call changes."""
    before = [
        (part._buffers, name, buffer, buffer.clone())
        for part in parts
        if not in_fp8(part)  # nothing writes to these, and they are large
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, values in before:
            buffers[name] = buffer
            buffer.data.resize_(values.shape).copy_(values)  # not a write that `Snapshot` would see: it is as it was


class Replays:
    """The recorded calls of one block, and the state of its modules that they hold for."""

    def __init__(self, module: nn.Module, changes: int) -> None:
        self.state = Snapshot(module)
        self._asks = module.__dict__[ATTRIBUTE].entry.asks
        self._adapted = [part for part in self.state.modules if is_lora(part)]
        self._quantised = [part for part in self._adapted if holds_fp8(part)]
        replaced = (part for part in self.state.modules if ATTRIBUTE in part.__dict__)
        self._attentions = [part for part in replaced if "processor" in part.__dict__]
        self.active = self._active()
        self.changes = changes
        # By signature: a recording, or the reason why there is none. With an empty reason the next call is recorded.
        self.calls: dict[Hashable, Recording | str] = {}
        # `calls` for each choice of active adapters, so that a switch back finds its recordings again.
        self._of_adapters = {self.active: self.calls}
        plain = module.__dict__[ATTRIBUTE].entry.plain
        # Why no call is recorded.
        self.reason = next((why for why in (_does_more(part, plain) for part in self.state.modules) if why), "")
        if changes > CHANGES:
            self.reason = "its modules or weights change between calls"
        elif not self.reason and not all(map(is_watched, self.state.tensors)):
            self.reason = "it holds tensors of another kind"
        self.refused = REFUSED if self.reason else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def _active(self) -> tuple[Hashable, ...]:
        return tuple(map(adapters_state, self._adapted))

    def holds(self, module: nn.Module) -> bool:
        """Whether the block is as it was. `calls` then belongs to the adapters that are active in it."""
        if not self.state.holds(module) or any(map(is_behind, self._quantised)):
            return False
        active = self._active()
        if active != self.active:
            if len(self._of_adapters) >= SIGNATURES:
                self._of_adapters.clear()
            self.active, self.calls = active, self._of_adapters.setdefault(active, {})
        return True

    def answers_as(self, found: Recording, module: nn.Module) -> bool:
        """Whether what `Entry.asks` asks of the block has the answer that it had in a recording."""
        return self._asks is None or bool(self._asks(module) == found.answer)

    def record(
        self,
        module: nn.Module,
        compute: Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        live: Mapping[str, Any],
    ) -> tuple[Any, Recording | str]:
        """Runs a call; returns its result, and the recorded call or the reason why there is none.

        A call with gradients runs for the recording alone, and does not count. Without a recording it does not run.
        """
        followed = torch.is_grad_enabled()
        call = functools.partial(compute, module, *args, **kwargs)
        weights = self.state.tensors
        known = {id(value) for value in (*tensors, *weights, *live.values())}
        if len(known) < len(tensors) + len({id(tensor) for tensor in weights}) + len(live):
            return None if followed else call(), "an argument is given twice"
        if not all(map(has_torch_backend, self._attentions)):
            return (
                None if followed else call(),
                "a backend of attention may run kernels that no torch function tells of",
            )
        recorder: Recorder | GradientRecorder
        try:
            recorder = GradientRecorder(tensors, weights) if followed else Recorder(tensors, weights, live)
        except Exception as error:
            return None if followed else call(), f"its tensors cannot be recorded: {error}"
        try:
            thread.recorder = recorder
            answer = None if self._asks is None else self._asks(module)
            with recorder.tracing():
                result = call()
        finally:
            thread.recorder = None
        if any(counter in _OTHERS for _, counter, _ in recorder.counts):
            recorder.reason = recorder.reason or "a call ran a stock forward"
        return result, recorder.recording(result, answer)

    def traced(
        self,
        module: nn.Module,
        compute: Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
    ) -> GradientRecording | str:
        """A call with gradients that runs for its recording alone; or the reason why there is none."""
        # The graph of an argument may lead to the same parameters, where a block is used twice.
        given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        mine, options = exchanged((tuple(args), dict(kwargs)), tensors, given)
        try:
            with _apart(tensors), _kept_buffers(self.state.modules):
                found = self.record(module, compute, mine, options, given, {})[1]
        except Exception as error:
            return f"a call has failed: {error}"
        return cast("GradientRecording | str", found)


def _does_more(part: nn.Module, plain: Sequence[str]) -> str:
    """Why a module below a block may launch something that a torch function mode does not see, such as Triton.

    plain: The block's `Entry.plain`.
    """
    name, processor = type(part).__name__, part.__dict__.get("processor")
    if hooked(part):
        return f"a {name} {hooked(part)}"
    if processor is not None and patched(type(processor)):
        return f"a {name}'s processor is patched: {patched(type(processor))}"
    if part.__dict__.get(COMPILED_CALL) is not None:
        return f"a {name} is compiled"
    home, ours = type(part).__module__, ATTRIBUTE in part.__dict__
    known = home.split(".")[0] in LIBRARIES or home == ACTIVATIONS or class_of(part) in plain
    if not (known or ours or is_lora(part)) or ("processor" in part.__dict__ and not ours):
        return f"it holds a {name}, which may run other kernels"
    return ""


def lines(root: nn.Module) -> list[str]:
    """What the report says of recorded calls: how many blocks of a class have any, or why they have none."""
    blocks: Counter[str] = Counter()
    recorded: Counter[str] = Counter()
    with_gradients: Counter[str] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    for module in root.modules():
        found: Held | None = module.__dict__.get(HELD)
        replays: Replays | None = None if found is None else found.replays
        if replays is None:
            continue
        name = module.__dict__[ATTRIBUTE].name
        blocks[name] += 1
        kinds = set(map(type, replays.calls.values()))
        recorded[name] += bool(kinds & {Recording, GradientRecording})
        with_gradients[name] += GradientRecording in kinds
        why = [replays.reason] if replays.reason else [call for call in replays.calls.values() if isinstance(call, str)]
        reasons.update((name, reason) for reason in set(why) if reason)
    return [
        *(f"recorded calls: {count} of {blocks[name]} {name}" for name, count in recorded.items() if count),
        *(
            f"recorded with gradients: {count} of {blocks[name]} {name}"
            for name, count in with_gradients.items()
            if count
        ),
        *(f"not recorded, {name}, {count} x: {reason}" for (name, reason), count in reasons.items()),
    ]


def _is_ordinary() -> bool:
    """Whether no mode of the process changes what torch functions do."""
    return not (
        COMPILED_DEVICE is None
        or attention_is_replaced()
        or function_modes()
        or dispatch_modes()
        or func_interpreter() is not None
        or torch.jit.is_tracing()
        or forward_ad._current_level >= 0
        or has_global_hooks()
        or is_capturing()
    )
