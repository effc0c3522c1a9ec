"""The private names of torch: one file names them, torch has each, and each does what the package expects of it."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SOURCES = Path(__file__).resolve().parents[1] / "torch-ext" / "ltx_kernels"
HOME = SOURCES / "_torch_private.py"
TREES = {str(path.relative_to(SOURCES)): ast.parse(path.read_text()) for path in SOURCES.rglob("*.py")}

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("no_grad")]


@pytest.fixture
def private(ltx: ModuleType) -> ModuleType:
    return importlib.import_module(f"{ltx.__name__}._torch_private")


# ---- What the sources say


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(tree: ast.AST) -> dict[str, str]:
    """What names of a file stand for in torch, such as F for torch.nn.functional."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({(alias.asname or alias.name): alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({(alias.asname or alias.name): f"{node.module}.{alias.name}" for alias in node.names})
    return {name: path for name, path in found.items() if path.split(".")[0] == "torch"}


def path_of(node: ast.AST, names: dict[str, str]) -> str:
    """The dotted path in torch of an expression such as F.linear; empty if it is another expression."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        home = path_of(node.value, names)
        return f"{home}.{node.attr}" if home else ""
    return ""


def private_paths(tree: ast.AST) -> Iterator[str]:
    """The private paths of torch that a file names, the longest form of each alone."""
    names = imported(tree)
    yield from (path for path in names.values() if any(map(is_private, path.split("."))))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        path = path_of(node, names) if isinstance(node, ast.Attribute) and id(node) not in inner else ""
        if any(map(is_private, path.split("."))):
            yield path
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch."):
            parts = node.value.split(".")
            if all(map(str.isidentifier, parts)) and any(map(is_private, parts)):
                yield node.value


@functools.cache
def of_objects() -> frozenset[str]:
    """The private attributes of torch's modules, tensors, storages and ops, and of forward-mode autograd."""
    tensor = torch.zeros(1)
    op = torch.ops.aten.add.Tensor
    packet, forward_ad = torch.ops.aten.add, torch.autograd.forward_ad
    objects = (nn.Module(), tensor, nn.Parameter(tensor), tensor.untyped_storage(), op, packet, forward_ad)
    found = {name for one in objects for name in dir(one) if is_private(name)}
    return frozenset({*found, "_dynamo_marked_constant"})


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """The private attributes of torch's objects that a file names, but for those that it has on `self`."""
    known = of_objects()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in known:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.Constant) and node.value in known:
            yield str(node.value)


def definitions() -> dict[str, list[str]]:
    """The names that the one file defines, with the private paths of torch in each definition."""
    tree, found = TREES[HOME.name], {}
    names = imported(tree)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch."):
            for alias in node.names:
                found[alias.asname or alias.name] = [f"{node.module}.{alias.name}"]
        elif isinstance(node, (ast.FunctionDef, ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node)
            paths = [path_of(part, names) for part in ast.walk(node) if isinstance(part, ast.Attribute)]
            named = [path for path in paths if path and any(map(is_private, path.split(".")))]
            found[getattr(target, "id", getattr(target, "name", ""))] = sorted(set(named))
    return {name: paths for name, paths in found.items() if not is_private(name) and name != "ATTRIBUTES"}


@functools.cache
def used(file: str) -> frozenset[str]:
    """What a file imports from the one file, and the attributes that it reads."""
    nodes = (node for node in ast.walk(TREES[file]) if isinstance(node, ast.ImportFrom) and node.module == HOME.stem)
    return frozenset({*(alias.name for node in nodes for alias in node.names), *private_attributes(TREES[file])})


def users(name: str) -> list[str]:
    """The other files that need a name of the one file, or an attribute."""
    return sorted(file for file in TREES if file != HOME.name and name in used(file))


def test_no_other_file_uses_a_private_name(private: ModuleType) -> None:
    found = {}
    for file, tree in TREES.items():
        names = {path for path in private_paths(tree) if path.split(".")[-1] not in private.ATTRIBUTES}
        attributes = {name for name in private_attributes(tree) if name not in private.ATTRIBUTES}
        if file != HOME.name and names | attributes:
            found[file] = sorted(names | attributes)
    assert found == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C._f()", ["torch._C._f"]),
        ("from torch.utils._device import DeviceContext", ["torch.utils._device.DeviceContext"]),
        ("from torch.nn.modules import module as m\nm._global_x", ["torch.nn.modules.module._global_x"]),
        ("import torch.nn.functional as F\nF._verify(F.linear)", ["torch.nn.functional._verify"]),
        ("importlib.import_module('torch.distributed._x')", ["torch.distributed._x"]),
        ("x.untyped_storage()._cdata", ["_cdata"]),
        ("vars(module).get('_compiled_call_impl')", ["_compiled_call_impl"]),
        ("import torch\nself._forward(torch.nn.Linear)", []),
    ],
)  # fmt: skip
def test_private_names_are_found(source: str, expected: list[str]) -> None:
    tree = ast.parse(source)
    assert [*private_paths(tree), *private_attributes(tree)] == expected


# ---- What torch has


def resolve(path: str) -> Any:
    """What a path stands for; AttributeError where torch lacks it."""
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise AttributeError(path)


@pytest.mark.parametrize("name", definitions())
def test_torch_has_it(name: str) -> None:
    """Whoever reads the failure knows which files break. The package itself may then not even be importable."""
    rooms = users(name)
    assert rooms, f"nothing uses {name}"
    for path in definitions()[name]:
        try:
            resolve(path)
        except AttributeError:
            pytest.fail(f"torch {torch.__version__} has no {path}; what breaks: {', '.join(rooms)}", pytrace=False)


def test_a_name_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_scaled_mm")
    with pytest.raises(pytest.fail.Exception, match=r"has no torch\._scaled_mm; what breaks: quant\.py$"):
        test_torch_has_it("scaled_mm")


# ---- What is expected of each


class Modes(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _function_modes(home: Any) -> None:
    before = home.function_modes()
    with Modes() as mode:
        assert home.function_modes() == before + 1 and home.function_mode_at(before) is mode
        torch.ones(1).neg()
        seen = mode.calls
        with home.without_function_modes():
            torch.ones(1).neg()
        assert 0 < seen == mode.calls


def _subclasses(home: Any) -> None:
    seen = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    watched = torch.ones(1).as_subclass(Watched)
    with home.without_subclasses():
        assert type(watched.neg()) is Tensor and not seen
    assert type(watched.neg()) is Watched and seen


def _dispatch_modes(home: Any) -> None:
    before = home.dispatch_modes()
    with Dispatch():
        assert home.dispatch_modes() == before + 1


def _device_context(home: Any) -> None:
    before = home.function_modes()
    with torch.device("meta"):
        assert type(home.function_mode_at(before)) is home.DeviceContext


def _func(home: Any) -> None:
    seen = []

    def asked(x: Tensor) -> Tensor:
        seen.append((home.func_interpreter() is None, home.in_func_transform(), home.is_func_wrapper(x)))
        return x

    torch.func.vmap(asked)(torch.ones(2))
    asked(torch.ones(2))
    assert seen == [(False, True, True), (True, False, False)]


def _below_autograd(home: Any) -> None:
    base = torch.ones(4)
    with home.below_autograd():
        view = base[1:]
    assert view._base is None and view.data_ptr() == base[1:].data_ptr() and base[1:]._base is base


def _dispatch_mode(home: Any) -> None:
    seen = []

    class Mode(home.DispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    with torch.enable_grad():
        x = torch.ones(2, 2, requires_grad=True)
        with Mode():
            (gradient,) = torch.autograd.grad(x.t().exp().sum(), x)
    computed = [name for name in seen if name != "aten::detach"]
    assert computed[:3] == ["aten::t", "aten::exp", "aten::sum"] and computed[-2:] == ["aten::mul.Tensor", "aten::t"]
    assert torch.equal(gradient, x.exp())


def _own_attention(home: Any) -> None:
    assert home.own_attention is F.scaled_dot_product_attention


def _settings(home: Any) -> None:
    before = [setting() for setting in home.kernel_settings]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert [setting() for setting in home.kernel_settings] != before
    order = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    with torch.nn.attention.sdpa_kernel(order, set_priority=True):
        assert home.sdp_priority_order()[:2] == [int(backend.value) for backend in order]
    assert len(home.kernel_settings) >= 7 and [setting() for setting in home.kernel_settings] == before


def _global_hooks(home: Any) -> None:
    assert not home.has_global_hooks()
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert home.has_global_hooks()
        handle.remove()
    assert not home.has_global_hooks()


def _ops(home: Any) -> None:
    assert home.has_kernel("aten::add.Tensor", "CPU") and not home.has_kernel("aten::add.Tensor", "FPGA")
    add = torch.ops.aten.add.Tensor
    assert isinstance(add, home.OpOverload) and home.op_of(add)(torch.ones(1), torch.ones(1)).item() == 2
    arguments = [argument.name for argument in add._schema.arguments]
    assert arguments == ["self", "other", "alpha"] and len(add._schema.returns) == 1


def _storage(home: Any) -> None:
    one, other = torch.ones(4), torch.ones(4)
    assert home.storage_number(one) == home.storage_number(one[1:]) != home.storage_number(other)


def _storage_reference(home: Any) -> None:
    """The memory is free, and its number is not given to another storage."""
    one = torch.ones(4)
    number, reference = home.storage_number(one), home.storage_reference(one)
    assert home.storage_uses(one.untyped_storage()) == 2 and not reference.expired()
    del one
    others = [torch.ones(4) for _ in range(100)]
    assert reference.expired() and number not in map(home.storage_number, others)


def _pytree(home: Any) -> None:
    leaves, spec = home.pytree.tree_flatten(((1, {"a": torch.ones(1)}), {}))
    assert len(leaves) == 2 and home.pytree.tree_unflatten(leaves, spec)[0][0] == 1
    doubled = home.pytree.tree_map_only(Tensor, lambda x: 2 * x, (3, torch.ones(1)))
    assert doubled[0] == 3 and doubled[1].item() == 2
    assert spec == home.pytree.tree_flatten(((2, {"a": 3}), {}))[1]


def _products(home: Any) -> None:
    x, weight = torch.randn(2, 16, 16)
    bias = torch.randn(16)
    expected = F.gelu(F.linear(x, weight, bias), approximate="tanh")
    if not torch.cuda.is_available():  # the CPU's epilogue is the erf form
        expected = F.gelu(F.linear(x, weight, bias))
        torch.testing.assert_close(home.addmm_gelu(bias, x, weight.t()), expected)
    else:
        result = home.addmm_gelu(bias.cuda(), x.cuda(), weight.t().cuda())
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-2, atol=1e-2)
    device = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9) else "cpu"
    values, ones = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn), torch.ones(16, 1, device=device)
    product = home.scaled_mm(values, values.t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16)
    assert product.dtype == torch.bfloat16 and torch.all(product == 16)


def _flash_attention(home: Any) -> None:
    """Its arguments: the op runs on a GPU alone, and its fake everywhere."""
    query, key = torch.empty(1, 3, 4, 64, device="meta").half(), torch.empty(1, 3, 2, 64, device="meta").half()
    sides = {"window_size_left": 7, "window_size_right": 0}
    output = home.flash_attention(query, key, key, None, None, 3, 3, 0.0, True, False, scale=None, **sides)
    assert output.shape == query.shape and output.dtype == query.dtype


def _symmetric_memory(home: Any) -> None:
    memory = home.symmetric_memory()
    assert callable(memory.empty) and callable(memory.rendezvous)


def _constants(home: Any) -> None:
    module = nn.Linear(1, 1)
    assert module.__dict__.get(home.COMPILED_CALL) is None
    module.compile(backend="eager")
    assert module.__dict__[home.COMPILED_CALL] is not None
    function = types.FunctionType((lambda: torch.rand(1).item()).__code__, globals())
    vars(function)[home.MARKED_CONSTANT] = True
    assert torch.compile(lambda x: x + function(), backend="eager", fullgraph=True)(torch.zeros(1)).item() < 1


def _replicate(home: Any) -> None:
    """It takes the module's own attributes over, and is asked of the module."""
    module = nn.Linear(1, 1)
    module.__dict__["forward"] = len
    replica = getattr(module, home.REPLICATE)()
    assert type(replica) is nn.Linear and replica.__dict__["forward"] is len and not replica._parameters
    assert f".{home.REPLICATE}()" in inspect.getsource(importlib.import_module("torch.nn.parallel.replicate"))


def _forward_ad(home: Any) -> None:
    assert home.forward_ad._current_level < 0
    with home.forward_ad.dual_level():
        assert home.forward_ad._current_level >= 0


def _backward_number(home: Any) -> None:
    numbers = []
    x = torch.zeros(1, requires_grad=True)
    with torch.enable_grad():
        y = x * 2
    y.register_hook(lambda grad: numbers.append(home.backward_number()))
    y.backward()
    assert numbers[0] >= 0 > home.backward_number()


def _saved_tensors_hooks(home: Any) -> None:
    assert home.saved_tensors_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert home.saved_tensors_hooks() is not None
    seen = []
    with torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        function = functools.partial(_seen, seen, home)
        torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).backward()
    assert len(seen) == 2 and None not in seen


def _seen(seen: list[Any], home: Any, x: Tensor) -> Tensor:
    seen.append(home.saved_tensors_hooks())
    return x.exp()


def _without_saved_tensors_hooks(home: Any) -> None:
    seen: list[str] = []
    hooks = [torch.autograd.graph.saved_tensors_hooks(functools.partial(_noted, seen, name), abs) for name in "ab"]
    with torch.enable_grad(), hooks[0], hooks[1]:
        x = torch.zeros(1, requires_grad=True)
        with home.without_saved_tensors_hooks():
            assert home.saved_tensors_hooks() is None
            x.exp()
        assert seen == []
        x.exp()
    assert seen == ["b"] and home.saved_tensors_hooks() is None


def _noted(seen: list[str], name: str, x: Tensor) -> Tensor:
    seen.append(name)
    return x


def _checkpoint_of(home: Any) -> None:
    seen: list[Any] = []
    with torch.enable_grad():
        for inside in (False, True):
            x = torch.zeros(1, requires_grad=True)

            def compute(x: Tensor) -> Tensor:
                seen.append(home.checkpoint_of(home.saved_tensors_hooks()[0]))
                return x.exp()

            def outer(x: Tensor, compute: Any = compute, inside: bool = inside) -> Tensor:
                return torch.utils.checkpoint.checkpoint(compute, x, use_reentrant=False) if inside else compute(x)

            torch.utils.checkpoint.checkpoint(outer, x, use_reentrant=False).backward()
            (first, again), (second, true) = seen
            assert first is second and not again and true
            weakref.ref(first)
            seen.clear()
    assert home.checkpoint_of(abs) is None
    assert home.checkpoint_of(torch.autograd.graph.save_on_cpu().pack_hook) is None


def _storage_uses(home: Any) -> None:
    x = torch.ones(4, requires_grad=True)
    memory = x.untyped_storage()
    assert home.storage_uses(memory) == 2
    with torch.enable_grad():
        y = x.exp()
        memory = y.untyped_storage()
        view, graph = y[1:], y.sin()
    del y
    assert home.storage_uses(memory) >= 3
    del view, graph
    assert home.storage_uses(memory) == 1
    memory.resize_(0)
    assert memory.nbytes() == 0


def _keeps_results(private: Any) -> None:
    """In both runs of a selective checkpoint, and not under another mode."""
    found = []

    def block(x: torch.Tensor) -> torch.Tensor:
        found.append(private.keeps_results())
        return x @ x

    home = torch.utils.checkpoint
    contexts = functools.partial(home.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    x = torch.ones(2, 2, requires_grad=True)
    with torch.enable_grad():
        home.checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
    with private.DispatchMode():
        found.append(private.keeps_results())
    assert found == [True, True, False] and not private.keeps_results()


# By name of the file. Names of one subject share a function.
EXPECTED: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(("function_modes", "function_mode_at", "without_function_modes"), _function_modes),
    **dict.fromkeys(("func_interpreter", "in_func_transform", "is_func_wrapper"), _func),
    **dict.fromkeys(("kernel_settings", "sdp_priority_order"), _settings),
    **dict.fromkeys(("has_kernel", "op_of", "OpOverload"), _ops),
    **dict.fromkeys(("addmm_gelu", "scaled_mm"), _products),
    **dict.fromkeys(("MARKED_CONSTANT", "COMPILED_CALL"), _constants),
    "REPLICATE": _replicate,
    "without_subclasses": _subclasses,
    "dispatch_modes": _dispatch_modes,
    "DeviceContext": _device_context,
    "below_autograd": _below_autograd,
    "DispatchMode": _dispatch_mode,
    "own_attention": _own_attention,
    "has_global_hooks": _global_hooks,
    "storage_number": _storage,
    "storage_reference": _storage_reference,
    "pytree": _pytree,
    "flash_attention": _flash_attention,
    "symmetric_memory": _symmetric_memory,
    "forward_ad": _forward_ad,
    "backward_number": _backward_number,
    "saved_tensors_hooks": _saved_tensors_hooks,
    "without_saved_tensors_hooks": _without_saved_tensors_hooks,
    "keeps_results": _keeps_results,
    "checkpoint_of": _checkpoint_of,
    "storage_uses": _storage_uses,
}


@pytest.mark.parametrize("name", definitions())
def test_what_is_expected_of_it(private: ModuleType, name: str) -> None:
    try:
        EXPECTED[name](private)
    except Exception as error:
        raise AssertionError(f"{name}: what breaks: {', '.join(users(name))}") from error


ATTRIBUTES: dict[str, Callable[[], Any]] = {
    "_parameters": lambda: [*nn.Linear(1, 1)._parameters] == ["weight", "bias"],
    "_buffers": lambda: "running_mean" in nn.BatchNorm1d(1)._buffers,
    "_modules": lambda: [*nn.Sequential(nn.Identity())._modules] == ["0"],
    "_forward_hooks": lambda: _hooked("register_forward_hook")._forward_hooks,
    "_forward_pre_hooks": lambda: _hooked("register_forward_pre_hook")._forward_pre_hooks,
    "_non_persistent_buffers_set": lambda: _with_buffer()._non_persistent_buffers_set == {"b"},
    "_version": lambda: torch.zeros(1).add_(1)._version == 1,
    "_base": lambda: (x := torch.zeros(2))[:1]._base is x and x._base is None and x[:1].data._base is None,
    "_backward_pre_hooks": lambda: _hooked("register_full_backward_pre_hook")._backward_pre_hooks,
    "_backward_hooks": lambda: (
        _hooked("register_full_backward_hook")._backward_hooks
        and [torch.zeros(1)._backward_hooks, len(_with_gradient_hook()._backward_hooks)] == [None, 1]
    ),
    "_post_accumulate_grad_hooks": lambda: (
        torch.zeros(1)._post_accumulate_grad_hooks is None
        and len(_with_gradient_hook("register_post_accumulate_grad_hook")._post_accumulate_grad_hooks) == 1
    ),
    "_schema": lambda: torch.ops.aten.add.Tensor._schema.arguments[0].name == "self",
    "_current_level": lambda: torch.autograd.forward_ad._current_level == -1,
}


def _hooked(register: str) -> nn.Module:
    module = nn.Identity()
    getattr(module, register)(lambda *_: None)
    return module


def _with_gradient_hook(register: str = "register_hook") -> Any:
    tensor = torch.zeros(1, requires_grad=True)
    getattr(tensor, register)(lambda gradient: None)
    return tensor


def _with_buffer() -> nn.Module:
    module = nn.Identity()
    module.register_buffer("b", torch.zeros(1), persistent=False)
    return module


def test_every_attribute_is_what_is_expected_of_it(private: ModuleType) -> None:
    assert ATTRIBUTES.keys() == private.ATTRIBUTES.keys()
    for name, asked in ATTRIBUTES.items():
        assert users(name) and asked(), f"{name}: what breaks: {', '.join(users(name))}"
