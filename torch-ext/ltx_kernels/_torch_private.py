"""The private names of torch that this package uses, each with what it is for; no other file names one.

A new version of torch may change any of them. tests/test_torch_private.py asks each for what is expected of it, and
tells which files need it. Names that every call uses are bound when the package is imported. A name that a single op or
folder needs is looked up when it is called, so that a torch without it breaks that op or folder alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import torch
import torch.multiprocessing
from torch import Tensor
from torch._ops import OpOverload as OpOverload  # an op as torch.ops has it: it has no name among torch's functions
from torch.autograd import forward_ad as forward_ad  # its `_current_level` says whether forward-mode autograd is on
from torch.nn.modules import module as _module
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree  # takes nested arguments apart and puts them together again  # noqa: F401
from torch.utils._device import DeviceContext as DeviceContext  # the mode of a default device
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # sees the ops below autograd  # noqa: F401

# ---- Modes of the process, which guards ask for at every call

function_modes: Callable[[], int] = torch._C._len_torch_function_stack  # how many watch or replace torch's functions
function_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at  # the mode at a depth
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # how many watch or replace torch's ops
func_interpreter: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # None outside of torch.func
in_func_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active  # torch.compile can trace it
is_func_wrapper: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # it has no address then
without_function_modes = torch._C.DisableTorchFunction  # a context in which function modes see nothing
without_subclasses = torch._C.DisableTorchFunctionSubclass  # a context in which subclasses of Tensor see nothing
# A context in which torch does not track which tensors are views. Inference runs it, so that views cost less time.
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView
own_attention: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention  # F's, unless somebody replaced it
sdp_priority_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order  # of torch's kernels of attention

# Settings of torch by which it chooses kernels of attention and convolutions.
kernel_settings: tuple[Callable[[], bool], ...] = tuple(
    getattr(torch._C, f"_get_{name}")
    for name in (
        *("flash_sdp_enabled", "mem_efficient_sdp_enabled", "cudnn_sdp_enabled", "math_sdp_enabled"),
        *("overrideable_sdp_enabled", "fa3_sdp_enabled"),
        *("cudnn_enabled", "mkldnn_enabled", "deterministic_algorithms"),
    )
    if hasattr(torch._C, f"_get_{name}")  # older versions of torch have fewer
)


# ---- Gradients

backward_number: Callable[[], int] = torch._C._current_graph_task_id  # of the backward that runs in this thread, or -1


def saved_tensors_hooks() -> Any:
    """The functions that take what autograd saves, as a checkpoint's do; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """A context in which autograd itself keeps what it saves."""
    home, taken = torch._C._autograd, []
    while (hooks := saved_tensors_hooks()) is not None:
        home._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(taken):
            home._push_saved_tensors_default_hooks(*hooks)


def checkpoint_of(pack: Any) -> tuple[Any, bool] | None:
    """What a function of `saved_tensors_hooks` belongs to: (a checkpoint's object for one call, its second run).

    None for hooks other than torch.utils.checkpoint's.
    """
    pack = getattr(pack, "_torchdynamo_orig_callable", pack)
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint" or not getattr(pack, "__closure__", None):
        return None
    held = dict(zip(pack.__code__.co_freevars, (cell.cell_contents for cell in pack.__closure__)))
    if "frame" in held:
        return held["frame"], False
    again = held.get("target_frame_ref")
    return None if again is None else (again(), True)


def has_global_hooks() -> bool:
    """Whether a hook is registered for the forwards or the backwards of all modules."""
    forward = _module._global_forward_hooks or _module._global_forward_pre_hooks
    return bool(forward or _module._global_backward_hooks or _module._global_backward_pre_hooks)


def keeps_results() -> bool:
    """Whether a selective activation checkpoint is on. It keeps results of ops, which must not be written to."""
    return dispatch_modes() > 0 and any(
        type(mode).__module__ == "torch.utils.checkpoint"
        for mode in _python_dispatch._get_current_dispatch_mode_stack()
    )


# ---- Ops and tensors

has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key  # (op, device in capitals)


def storage_number(tensor: Tensor) -> int:
    """A number for the memory that a tensor and its views share, while one of them or a `storage_reference` lives."""
    return tensor.untyped_storage()._cdata


def storage_reference(tensor: Tensor) -> Any:
    """What keeps the `storage_number` of a tensor's memory from being given to other memory, but not the memory."""
    return torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors there are in a memory, and one more for its Python object."""
    return torch._C._storage_Use_Count(storage._cdata)


def op_of(overload: OpOverload) -> Callable[..., Any]:
    """What an op calls in C++, without the look-ups before it."""
    function: Callable[..., Any] = overload._op
    return function


def scaled_mm(input: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """A product of fp8 matrices [M, K] and [K, N] with scales."""
    return torch._scaled_mm(input, weight, **options)


def addmm_gelu(bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """``gelu(bias + rows @ weight, approximate="tanh")`` in one product, on a GPU."""
    return torch._addmm_activation(bias, rows, weight, use_gelu=True)


def flash_attention(*arguments: Any, **options: Any) -> Tensor:
    """torch's flash attention, which has a window and takes fewer key heads than query heads."""
    output: Tensor = torch.ops.aten._flash_attention_forward(*arguments, **options)[0]
    return output


def symmetric_memory() -> Any:
    """The module that maps the memory of other GPUs."""
    return importlib.import_module("torch.distributed._symmetric_memory")


# ---- Attributes of torch's objects, which all files read where they need them

# On a function: torch.compile calls it while it traces, and takes the result for a constant.
MARKED_CONSTANT = "_dynamo_marked_constant"
COMPILED_CALL = "_compiled_call_impl"  # on a module: what `Module.compile` has made; None if nothing
REPLICATE = "_replicate_for_data_parallel"  # of a module: the method by which torch.nn.DataParallel copies it

ATTRIBUTES = {
    "_parameters": "of a module, by name. Attribute access by nn.Module's __getattr__ takes ten times as long",
    "_buffers": "of a module, by name",
    "_modules": "of a module: its submodules, by name",
    "_forward_hooks": "of a module, by number",
    "_forward_pre_hooks": "of a module, by number",
    "_non_persistent_buffers_set": "of a module: the names of buffers that state_dict leaves out",
    "_version": "of a tensor: how often it was written to",
    "_base": "of a view: the tensor that it is of, which it keeps; None for other tensors",
    "_backward_hooks": "of a module or a tensor, by number; None for a tensor that never had any",
    "_backward_pre_hooks": "of a module, by number",
    "_post_accumulate_grad_hooks": "of a tensor, by number; None for a tensor that never had any",
    "_schema": "of an op: its arguments and results",
    "_current_level": "of torch.autograd.forward_ad: below zero while forward-mode autograd is off",
}
