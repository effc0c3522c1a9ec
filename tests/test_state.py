"""Whatever changes between two calls of an optimized model is followed: generated from the modules as they are.

For one block of each kind of engine path, every attribute, dictionary, parameter, class attribute and function that the
module tree holds is exchanged between two calls, one at a time and in the ways in which it can be done. Each time the
stock model with the same change decides what is right.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

pytest.importorskip("diffusers")
from families import families, random_

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

Undo = Callable[[], None]
CLOSE = 1e-4 if torch.cuda.is_available() else 2e-5


class Path(NamedTuple):
    """A model of one engine path.

    make: The stock model.
    block: The path of the block whose parts are changed.
    run: One call, to all tensors that it returns.
    close: How far results may be from stock's.
    """

    make: Callable[[str], nn.Module]
    block: str
    run: Callable[[nn.Module], list[Tensor]]
    close: float = CLOSE


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for item in value or () for t in _flat(item)]


def _of_family(name: str, block: str) -> Path:
    family = families()[name]

    def make(device: str) -> nn.Module:
        torch.manual_seed(0)
        return random_(family.make()).to(device)

    @functools.cache
    def inputs(device: str) -> dict[str, Any]:
        move = torch.utils._pytree.tree_map_only
        return move(Tensor, lambda tensor: tensor.to(device), family.inputs(2))

    def run(model: nn.Module) -> list[Tensor]:
        return _flat(model(**inputs(str(next(model.parameters()).device)), return_dict=False))

    return Path(make, block, run, CLOSE * family.magnifies)


def _language_model(make: Callable[[str], nn.Module], block: str = "model.layers.0") -> Path:
    from helpers.language_models import make_ids

    def run(model: Any) -> list[Tensor]:
        ids = make_ids(str(model.device))
        prompt = model(ids, use_cache=True)
        token = model(ids[:, :1], past_key_values=prompt.past_key_values, use_cache=True)
        return [prompt.logits, token.logits]

    return Path(make, block, run)


def _one_layer(family: str) -> Path:
    from helpers.language_models import make_model

    return _language_model(lambda device: make_model(device, family=family, num_hidden_layers=1))


def _t5() -> Path:
    import transformers
    from helpers.language_models import make_ids
    from helpers.language_models import random_ as random_text

    def make(device: str) -> nn.Module:
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 99}
        torch.manual_seed(0)
        model = transformers.T5EncoderModel(transformers.T5Config(**sizes, feed_forward_proj="gated-gelu"))
        return random_text(model).to(device).eval().requires_grad_(False)

    return Path(make, "encoder.block.0", lambda model: [model(make_ids(str(model.device))).last_hidden_state])


def _autoencoder() -> Path:
    from diffusers import AutoencoderKLLTXVideo
    from test_vae import CONFIGS

    def make(device: str) -> nn.Module:
        torch.manual_seed(0)
        model = AutoencoderKLLTXVideo(**CONFIGS["ltx 0.9.0"][1])
        return random_(model).to(device).decoder

    def run(model: nn.Module) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        latents = torch.randn(1, 8, 2, 2, 2, generator=generator).to(next(model.parameters()).device)
        return _flat(model(latents))

    return Path(make, "", run)


def _residual_block() -> Path:
    from test_unet import stock_resnet

    def make(device: str) -> nn.Module:
        torch.manual_seed(0)
        return stock_resnet().to(device)

    def run(model: nn.Module) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        image, temb = torch.randn(2, 32, 5, 6, generator=generator), torch.randn(2, 16, generator=generator)
        device = next(model.parameters()).device
        return _flat(model(image.to(device), temb.to(device)))

    return Path(make, "", run)


PATHS: dict[str, Callable[[], Path]] = {
    "self and cross": lambda: _of_family("ltx", "transformer_blocks.0"),
    "two streams": lambda: _of_family("flux", "transformer_blocks.0"),
    "single stream": lambda: _of_family("flux", "single_transformer_blocks.0"),
    "language model": lambda: _one_layer("Llama"),
    "text encoder": _t5,
    "autoencoder": _autoencoder,
    "residual block": _residual_block,
}
LONG = {"two streams": pytest.mark.extended, "autoencoder": pytest.mark.slow}  # the others take seconds


class Change(NamedTuple):
    """One change.

    name: Of what and how.
    apply: Makes it in a model, and returns what takes it back; or None where there is nothing to change.
    shared: It is made in a class or a file, for all models at once.
    """

    name: str
    apply: Callable[[nn.Module], Undo | None]
    shared: bool = False


def _doubled(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result * 2 if result.is_floating_point() else result
    return type(result)([_doubled(result[0]), *result[1:]]) if isinstance(result, (tuple, list)) and result else result


def _twice(function: Any) -> Any:
    @functools.wraps(function, updated=())
    def changed(*args: Any, **kwargs: Any) -> Any:
        return _doubled(function(*args, **kwargs))

    return changed


def _other(value: Any) -> Any:
    """Another value of the same kind; None where there is no such value."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 1
    if isinstance(value, tuple) and value and all(type(number) is int for number in value):
        return tuple(2 * number + 1 for number in value)
    if isinstance(value, str):
        return {"tanh": "none", "none": "tanh", "eager": "sdpa", "sdpa": "eager"}.get(value)
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).apply(
            lambda part: [p.mul_(1.5) for p in part._parameters.values() if p is not None]
        )
    return None


def _set(holder: Any, name: str, value: Any, by: str) -> Undo:
    missing, old = object(), vars(holder).get(name)
    if name not in vars(holder):
        old = missing

    def put(value: Any) -> None:
        if value is missing:
            vars(holder).pop(name, None)
        elif by == "setattr":
            setattr(holder, name, value)
        else:
            vars(holder)[name] = value

    put(value)
    return lambda: put(old)


def _of_attribute(path: str, name: str, by: str, holder: Callable[[nn.Module], Any]) -> Change:
    def apply(root: nn.Module) -> Undo | None:
        place = holder(root.get_submodule(path))
        value = _other(vars(place).get(name))
        try:
            return None if value is None else _set(place, name, value, by)
        except Exception:  # a configuration checks its values
            return None

    return Change(f"{path}.{name} by {by}", apply)


def _itself(module: nn.Module) -> Any:
    return module


def _of_objects(path: str, module: nn.Module) -> Iterator[Change]:
    """Attributes of a processor or a configuration, also those that only its class has, and the object itself."""
    for name, value in vars(module).items():
        if name not in ("processor", "config") or isinstance(value, nn.Module):
            continue

        def holder(module: nn.Module, name: str = name) -> Any:
            return vars(module)[name]

        for attribute in vars(value):
            yield _of_attribute(f"{path}", attribute, "setattr", holder)
        if name == "processor":

            def exchange(root: nn.Module, path: str = path) -> Undo:
                module = root.get_submodule(path)
                stock = type(vars(module)["processor"])
                call = {"__call__": _twice(stock.__call__)}
                return _set(module, "processor", type("Changed", (stock,), call)(), "__dict__")

            yield Change(f"{path}.{name} exchanged", exchange)


def _of_tensors(path: str, module: nn.Module) -> Iterator[Change]:
    for kind in ("_parameters", "_buffers"):
        for name, tensor in vars(module)[kind].items():
            if tensor is None or not tensor.is_floating_point():
                continue

            def exchange(root: nn.Module, kind: str = kind, name: str = name) -> Undo:
                place = vars(root.get_submodule(path))[kind]
                old = place[name]
                new = old.detach() * 2
                place[name] = nn.Parameter(new, requires_grad=False) if kind == "_parameters" else new
                return lambda: place.__setitem__(name, old)

            def data(root: nn.Module, change: Callable[[Tensor], Tensor], kind: str = kind, name: str = name) -> Undo:
                tensor = vars(root.get_submodule(path))[kind][name]
                old = tensor.data
                tensor.data = change(old)
                return lambda: setattr(tensor, "data", old)

            def in_place(root: nn.Module, kind: str = kind, name: str = name) -> Undo:
                tensor = vars(root.get_submodule(path))[kind][name]
                tensor.mul_(2)
                return lambda: tensor.mul_(0.5)

            yield Change(f"{path}.{name} exchanged", exchange)
            yield Change(f"{path}.{name}.data doubled", functools.partial(data, change=lambda t: t * 2))
            yield Change(f"{path}.{name}.mul_", in_place)
            if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
                yield Change(f"{path}.{name}.data transposed", functools.partial(data, change=lambda t: t.t()))


def _of_modules(path: str, module: nn.Module) -> Iterator[Change]:
    for name, child in module._modules.items():
        if child is None or not any(True for _ in child.parameters()):
            continue

        def exchange(root: nn.Module, name: str = name) -> Undo:
            place = root.get_submodule(path)._modules
            old = place[name]
            # A stock copy, as somebody would put in: what was replaced in the child stays with the child.
            new = copy.deepcopy(root.get_submodule(f"{path}.{name}".strip(".")))
            for part in new.modules():
                for key, value in list(vars(part).items()):
                    if key.startswith("_ltx_kernels") or isinstance(value, types.MethodType):
                        del vars(part)[key]
            place[name] = new.apply(lambda part: [p.mul_(1.5) for p in part._parameters.values() if p is not None])
            return lambda: place.__setitem__(name, old)

        yield Change(f"{path}.{name} exchanged", exchange)


def _of_hooks(path: str) -> Iterator[Change]:
    def hook(root: nn.Module) -> Undo:
        return root.get_submodule(path).register_forward_hook(lambda module, args, output: _doubled(output)).remove

    def dictionary(root: nn.Module) -> Undo:
        module = root.get_submodule(path)
        old, module._forward_hooks = module._forward_hooks, OrderedDict()
        handle = module.register_forward_hook(lambda module, args, output: _doubled(output))

        def undo() -> None:
            handle.remove()
            module._forward_hooks = old

        return undo

    def forward(root: nn.Module) -> Undo:
        module = root.get_submodule(path)
        return _set(module, "forward", _twice(module.forward), "__dict__")

    def cls(root: nn.Module) -> Undo:
        module = root.get_submodule(path)
        old = type(module)
        module.__class__ = type("Changed", (old,), {"forward": _twice(old.forward), "__module__": __name__})
        return lambda: setattr(module, "__class__", old)

    yield Change(f"{path or 'block'} hook", hook)
    yield Change(f"{path or 'block'} hooks in a new dictionary", dictionary)
    yield Change(f"{path or 'block'}.forward of the instance", forward)
    if path:
        yield Change(f"{path}.__class__", cls)


def _of_methods(path: str, module: nn.Module, code: ModuleType) -> Iterator[Change]:
    """The methods that a forward calls, on the one module and in a subclass that the module is made one of."""
    for name in code.Code(type(module)).attributes:
        if hasattr(nn.Module, name) or not isinstance(getattr(type(module), name), types.FunctionType):
            continue

        def instance(root: nn.Module, name: str = name) -> Undo:
            module = root.get_submodule(path)
            return _set(module, name, _twice(getattr(module, name)), "__dict__")

        def cls(root: nn.Module, name: str = name) -> Undo:
            module = root.get_submodule(path)
            old, method = type(module), _twice(getattr(type(module), name))
            static = isinstance(inspect.getattr_static(old, name), staticmethod)
            attributes = {name: staticmethod(method) if static else method, "__module__": __name__}
            module.__class__ = type("Changed", (old,), attributes)
            return lambda: setattr(module, "__class__", old)

        yield Change(f"{path or 'block'}.{name} of the instance", instance)
        yield Change(f"{path or 'block'}.{name} of another class", cls)


def _of_code(block: nn.Module, code: ModuleType) -> Iterator[Change]:
    """The functions that classes and their files hold, as the stock code looks them up."""
    objects = [value for part in block.modules() for name, value in vars(part).items() if name == "processor"]
    seen: set[tuple[int, str]] = set()
    for cls in dict.fromkeys(map(type, [*block.modules(), *objects])):
        found = code.Code(cls)
        for place, name in [*zip(found.classes, found.attributes), *zip(found.places, found.names)]:
            value = getattr(place, name, None) if isinstance(place, type) else place[name]
            if (id(place), name) in seen or not isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
                continue
            seen.add((id(place), name))
            if isinstance(place, type) and name not in vars(place):
                continue  # of nn.Module: changed for everything in the process

            def exchange(root: nn.Module, place: Any = place, name: str = name, value: Any = value) -> Undo:
                if isinstance(place, type):
                    own = vars(place)[name]
                    setattr(
                        place, name, staticmethod(_twice(value)) if isinstance(own, staticmethod) else _twice(value)
                    )
                    return lambda: setattr(place, name, own)
                place[name] = _twice(value)
                return lambda: place.__setitem__(name, value)

            where = place.__name__ if isinstance(place, type) else place["__name__"]
            yield Change(f"{where}.{name}", exchange, shared=True)


def changes(block: nn.Module, code: ModuleType) -> Iterator[Change]:
    known = set(vars(nn.Module()))
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            if name not in known and _other(value) is not None and not isinstance(value, nn.Module):
                yield _of_attribute(path, name, "setattr", _itself)
                yield _of_attribute(path, name, "__dict__", _itself)
        yield from _of_objects(path, module)
        yield from _of_tensors(path, module)
        yield from _of_modules(path, module)
        yield from _of_hooks(path)
        yield from _of_methods(path, module, code)
        yield Change(f"{path or 'block'}.train()", lambda root, path=path: _trained(root.get_submodule(path)))
    yield from _of_code(block, code)


def _trained(module: nn.Module) -> Undo | None:
    if not hasattr(module, "p"):
        return None
    old, module.training, module.p = (module.training, module.p), True, 1.0  # drops everything

    def undo() -> None:
        module.training, module.p = old

    return undo


def _call(run: Callable[[nn.Module], list[Tensor]], model: nn.Module) -> list[Tensor] | str:
    try:
        return run(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _off(got: list[Tensor], want: list[Tensor]) -> float:
    if [x.shape for x in got] != [x.shape for x in want]:
        return float("inf")
    pairs = [(x.double().nan_to_num(9, 9, 9), y.double().nan_to_num(9, 9, 9)) for x, y in zip(got, want)]
    return max(float((x - y).norm() / y.norm().clamp(min=1e-30)) for x, y in pairs)


def wrong(
    ltx: ModuleType, device: str, path: Path, only: Callable[[Change], bool] = lambda change: True, **options: Any
) -> Any:
    """(number of changes that changed the stock model's result, descriptions of those that were not followed)."""
    code = importlib.import_module(f"{ltx.__name__}.integrations.engine.code")
    stock = path.make(device)
    model = copy.deepcopy(stock)
    ltx.optimize(model, **options)
    expected = path.run(stock)
    for _ in range(3):
        assert _off(path.run(model), expected) < path.close
    failures, counted = [], 0
    for change in filter(only, list(changes(stock.get_submodule(path.block), code))):
        blocks = [one.get_submodule(path.block) for one in (stock, model)]
        undos = [change.apply(block) for block in (blocks[:1] if change.shared else blocks)]
        try:
            want, got = _call(path.run, stock), [_call(path.run, model) for _ in range(3)]
        finally:
            for undo in undos:
                if undo is not None:
                    undo()
        if isinstance(want, list):
            counted += _off(want, expected) > max(100 * CLOSE, 2 * path.close)
            off = [result if isinstance(result, str) else _off(result, want) for result in got]
            if any(isinstance(result, str) or result > path.close for result in off):
                failures.append(f"{change.name}: {off}")
        again = [_call(path.run, model) for _ in range(3)]
        if any(isinstance(result, str) or _off(result, expected) > path.close for result in again):
            failures.append(f"{change.name}: not taken back")
            break
    return counted, failures


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, [])) for name in PATHS])
def test_every_change_is_followed(ltx: ModuleType, device: str, name: str) -> None:
    if device == "cuda" and name == "text encoder":
        pytest.skip("a position out of range, which a change can make, ends a process's use of its GPU")
    counted, failures = wrong(ltx, device, PATHS[name]())
    print(f"{counted} changes made another result")
    assert counted > 20
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("make", "methods"),
    [
        (lambda: _of_family("qwenimage", "transformer_blocks.0"), ("_modulate", "gelu")),
        (lambda: _of_family("ltx", ""), ("_prepare_video_coords", "gelu")),
        (lambda: _of_family("basic_transformer", "down_blocks.1.attentions.0"), ("gelu",)),
        (lambda: _one_layer("Gemma3"), ("_norm",)),
        (lambda: _one_layer("GptOss"), ("_apply_gate",)),
    ],
    ids=["modulation", "tables and activation", "transformer of a UNet", "norm", "gate of experts"],
)
def test_changed_methods_are_followed(
    ltx: ModuleType, device: str, make: Callable[[], Path], methods: tuple[str, ...]
) -> None:
    found: set[str] = set()

    def only(change: Change) -> bool:
        is_method = change.name.endswith((" of another class", " of the instance")) and ".forward " not in change.name
        found.update(name for name in methods if is_method and f".{name} " in change.name)
        return is_method

    counted, failures = wrong(ltx, device, make(), only)
    assert counted >= 2 * len(methods) and found == set(methods)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("how", [" of the instance", " of another class"])
def test_changed_methods_are_followed_by_torch_compile(ltx: ModuleType, device: str, how: str) -> None:
    code = importlib.import_module(f"{ltx.__name__}.integrations.engine.code")
    path = _of_family("qwenimage", "transformer_blocks.0")
    stock = path.make(device)
    model = copy.deepcopy(stock)
    ltx.optimize(model)
    blocks = [one.get_submodule(path.block) for one in (stock, model)]
    (change,) = (one for one in _of_methods("", blocks[0], code) if one.name == f"block._modulate{how}")
    before = path.run(stock)
    for block in blocks:
        change.apply(block)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert _off(path.run(compiled), path.run(stock)) < path.close < _off(before, path.run(stock))


def test_what_changes_no_method_stays_optimized(ltx: ModuleType, device: str) -> None:
    """A subclass as FSDP makes one, and another ``to``, as accelerate sets it."""
    path = _of_family("qwenimage", "transformer_blocks.0")
    model: Any = path.make(device)
    stock = path.run(model)
    report = ltx.optimize(model)
    for block in model.transformer_blocks:
        block.__class__ = type("Sharded", (type(block),), {"__module__": __name__})
    model.to = functools.wraps(model.to)(lambda *args, **options: model)
    assert _off(path.run(model), stock) < path.close and report.fallbacks == {}


def test_changed_methods_before_optimize(ltx: ModuleType, device: str) -> None:
    path = _of_family("qwenimage", "transformer_blocks.0")
    model = path.make(device)
    block: Any = model.get_submodule(path.block)
    block._modulate = _twice(block._modulate)
    stock = path.run(model)
    report = ltx.optimize(model)
    assert report.left_alone == {path.block: "its _modulate is patched already"}
    assert _off(path.run(model), stock) < path.close


@pytest.mark.extended
def test_every_change_is_followed_in_fp8(ltx: ModuleType, device: str) -> None:
    """But for writes to the codes themselves."""
    from test_families import cast, make

    family = families()["ltx"]

    def run(model: nn.Module) -> list[Tensor]:
        inputs = cast(family.inputs(2), device, torch.bfloat16)
        return _flat(model(**inputs, return_dict=False))

    def is_of_stock(change: Change) -> bool:
        return ".data " not in change.name and not change.name.endswith((" exchanged", ".mul_"))

    path = Path(lambda device: make(family, device, torch.bfloat16), "transformer_blocks.0", run, close=0.05)
    counted, failures = wrong(ltx, device, path, is_of_stock, precision="fp8")
    assert counted > 20 and not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("ltx", "transformer_blocks.0"),
        ("flux", "transformer_blocks.0"),
        ("flux", "single_transformer_blocks.0"),
        ("qwenimage", "transformer_blocks.0"),
        ("wan-t2v", "blocks.0"),
    ],
)
def test_every_change_is_followed_in_training(ltx: ModuleType, device: str, name: str, block: str) -> None:
    """Of adapters: the loss, and their gradients as one vector."""
    pytest.importorskip("peft")
    from test_families import cast, make
    from test_training import step, with_adapters

    family = families()[name]

    @torch.enable_grad()
    def run(model: nn.Module) -> list[Tensor]:
        loss, grads = step(model, cast(family.inputs(2), device, torch.float32))
        return [loss.reshape(1), torch.cat([grads[name].flatten() for name in sorted(grads)])]

    path = Path(lambda device: with_adapters(make(family, device), family), block, run, close=1e-4)
    counted, failures = wrong(ltx, device, path)
    assert counted > 20 and not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
def test_every_change_in_every_family_is_followed(ltx: ModuleType, device: str, name: str) -> None:
    """The first block of each class."""
    blocks: dict[str, str] = {}
    for path, module in families()[name].make().named_modules():
        if f"diffusers.{type(module).__name__}" in families()[name].blocks:
            blocks.setdefault(type(module).__name__, path)
    failures = [
        f"{path}: {failure}" for path in blocks.values() for failure in wrong(ltx, device, _of_family(name, path))[1]
    ]
    assert blocks and not failures, "\n".join(failures)


@pytest.mark.slow
def test_every_change_in_every_language_model_is_followed(ltx: ModuleType, device: str) -> None:
    import test_language_models as models

    made = {name: functools.partial(models.make, case) for name, case in models.CASES.items()}
    paths = {name: _language_model(make) for name, make in made.items() if name != "qwen2.5-vl"}
    paths["qwen2.5-vl"] = _language_model(made["qwen2.5-vl"], "model.language_model.layers.0")
    paths["falcon"] = _language_model(models.make_falcon, "transformer.h.0")
    failures = [f"{name}: {failure}" for name, path in paths.items() for failure in wrong(ltx, device, path)[1]]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("name", "part", "attribute"),
    [
        ("gemma4", "input_layernorm", "with_scale"),
        ("gemma4", "self_attn.q_norm", "with_scale"),
        ("gemma4-moe", "", "enable_moe_block"),
    ],
)
def test_switches_of_language_models(ltx: ModuleType, device: str, name: str, part: str, attribute: str) -> None:
    """What is switched off after `optimize` is off in the calls that follow, and then on again."""
    import test_language_models as models

    path = _language_model(functools.partial(models.make, models.CASES[name]))
    stock = path.make(device)
    model = copy.deepcopy(stock)
    ltx.optimize(model)
    results = []
    for value in (True, False, True):
        for one in (stock, model):
            setattr(one.get_submodule(f"{path.block}.{part}".strip(".")), attribute, value)
        results.append(path.run(stock))
        for _ in range(4):
            assert _off(path.run(model), results[-1]) < path.close
    assert _off(results[1], results[0]) > 100 * CLOSE


@pytest.mark.slow
def test_every_change_in_every_image_autoencoder_is_followed(ltx: ModuleType, device: str) -> None:
    import test_vae_images as images

    failures = []
    for name, half in images.CASES:
        make = functools.partial(images.make_vae, name, dtype=torch.float32)
        path = Path(make, half, lambda vae, half=half: [images.RUN[half](vae)])  # type: ignore[misc]
        failures += [f"{name}, {half}: {failure}" for failure in wrong(ltx, device, path)[1]]
    assert not failures, "\n".join(failures)


# A piece of the state, and what leaves it out of a snapshot.
PIECES: dict[str, Callable[[Any, Any], None]] = {
    "attributes": lambda state, anything: setattr(state, "_attributes", anything),
    "classes": lambda state, anything: setattr(state, "_classes", anything),
    "functions": lambda state, anything: setattr(state, "_places", []),
    "methods": lambda state, anything: setattr(state, "_code_classes", []),
    "addresses": lambda state, anything: setattr(state, "_addresses", anything),
    "strides": lambda state, anything: setattr(state, "_strides", anything),
}


@pytest.mark.parametrize(
    "piece",
    ["attributes", *(pytest.param(name, marks=pytest.mark.slow) for name in PIECES if name != "attributes")],
)
def test_every_piece_of_the_state_is_needed(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    """Without one of them, the test above fails."""
    state = importlib.import_module(f"{ltx.__name__}.integrations.engine.state")
    whole = state.Snapshot.__init__

    def without(self: Any, *args: Any) -> None:
        whole(self, *args)
        PIECES[piece](self, state._Anything())

    monkeypatch.setattr(state.Snapshot, "__init__", without)
    _, failures = wrong(ltx, device, PATHS["self and cross"]())
    assert failures


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _as_tensor(norm: nn.Module) -> None:
    weight = norm.weight.detach() * 2
    del norm.weight
    norm.weight = weight


@pytest.mark.parametrize(
    "change",
    [
        lambda norm: prune.l1_unstructured(norm, "weight", 0.5),
        lambda norm: torch.nn.utils.parametrize.register_parametrization(norm, "weight", Doubled()),
        _as_tensor,
    ],
    ids=["pruned", "parametrized", "a tensor"],
)
@pytest.mark.parametrize("kind", ["torch", "diffusers", "block", "language model"])
def test_norms_whose_weight_is_no_parameter(
    ltx: ModuleType, device: str, kind: str, change: Callable[[nn.Module], None]
) -> None:
    """They run stock, by themselves and in blocks."""
    if kind == "block":
        family = families()["ltx"]
        stock, given = random_(family.make()).to(device), family.inputs(2)
        path = "transformer_blocks.0.attn1.norm_q"
    elif kind == "language model":
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        stock = random_(transformers.LlamaModel(transformers.LlamaConfig(**sizes, vocab_size=99))).to(device)
        given, path = {"input_ids": torch.arange(8)[None]}, "layers.0.input_layernorm"
    else:
        diffusers = pytest.importorskip("diffusers")
        norm = nn.LayerNorm(64) if kind == "torch" else diffusers.models.normalization.RMSNorm(64, 1e-6)
        stock, given = random_(nn.Sequential(nn.Linear(64, 64), norm)).to(device), {"input": torch.randn(3, 64)}
        path = "1"
    given = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), given)
    model = copy.deepcopy(stock)
    ltx.optimize(model, graphs=False)
    for _ in range(3):
        model(**given)
    for part in stock, model:
        change(part.get_submodule(path))
    for _ in range(3):
        found, expected = (part(**given) for part in (model, stock))
        first = [result if isinstance(result, Tensor) else result[0] for result in (found, expected)]
        assert _off(first[:1], first[1:]) < CLOSE


def _two_of(name: str, device: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """(a stock model of a family, a copy of it, inputs)."""
    family = families()[name]
    stock = random_(family.make()).to(device)
    given = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), family.inputs(2))
    return stock, copy.deepcopy(stock), given


@pytest.mark.parametrize("restored", [False, True])
def test_parameters_that_torch_exchanges(ltx: ModuleType, device: str, restored: bool) -> None:
    """With this switch `to` and `load_state_dict` exchange parameters, which only the model may hold then."""
    stock, model, given = _two_of("ltx", device)
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    ltx.optimize(model, graphs=False)
    for _ in range(3):
        model(**given, return_dict=False)
    if restored:
        ltx.restore(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64).to(torch.float32)
        model.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for _ in range(3):
        assert _off(_flat(model(**given, return_dict=False)), _flat(stock(**given, return_dict=False))) < CLOSE


def test_a_linear_layer_whose_weight_is_no_parameter(ltx: ModuleType, device: str) -> None:
    stock, model, given = _two_of("ltx", device)
    ltx.optimize(model, graphs=False)
    for part in stock, model:
        _as_tensor(part.get_submodule("transformer_blocks.0.ff.net.2"))
    assert _off(_flat(model(**given, return_dict=False)), _flat(stock(**given, return_dict=False))) < CLOSE


def test_weights_of_norms_that_are_written_to_unseen(ltx: ModuleType, device: str) -> None:
    """Through `.data`, as an average of weights is copied in: Krea 2 adds one to them before its op."""
    stock, model, given = _two_of("krea2", device)
    ltx.optimize(model, graphs=False)
    for _ in range(3):
        model(**given)
    for part in stock, model:
        for name, parameter in part.named_parameters():
            if "norm" in name:
                parameter.data.copy_(2 * parameter.data + 1)
    for _ in range(3):
        found, expected = (_flat(part(**given, return_dict=False)) for part in (model, stock))
        assert _off(found, expected) < families()["krea2"].magnifies * CLOSE


def _replica(network: nn.Module, factor: float) -> nn.Module:
    """What torch.nn.DataParallel makes of a model, on the same device and with other weights."""
    modules: list[Any] = list(network.modules())
    replicas = [module._replicate_for_data_parallel() for module in modules]
    of = dict(zip(map(id, modules), replicas))
    for module, replica in zip(modules, replicas):
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else of[id(child)]
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter.detach() * factor)
        replica._buffers.update(module._buffers)
    return replicas[0]


def test_replicas_run_with_their_own_weights(ltx: ModuleType, device: str) -> None:
    stock, model, given = _two_of("ltx", device)
    report = ltx.optimize(model)
    for _ in range(3):
        model(**given)
    found, expected = (_flat(_replica(part, 1.5)(**given, return_dict=False)) for part in (model, stock))
    assert _off(found, expected) < CLOSE and "replicas of DataParallel run the stock modules" in str(report)
    found, expected = (_flat(part(**given, return_dict=False)) for part in (model, stock))
    assert _off(found, expected) < CLOSE
    ltx.restore(model)
    assert not any("_replicate_for_data_parallel" in vars(part) for part in model.modules())


@pytest.mark.parametrize("stock_weights", ["cpu", "beside"])
def test_replicas_of_a_model_in_fp8(ltx: ModuleType, device: str, stock_weights: str) -> None:
    """A replica has the parameters alone, which hold the stock weights with "beside"."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 products need a GPU of compute capability 8.9")
    stock, model, given = _two_of("ltx", device)
    ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    if stock_weights == "cpu":
        with pytest.raises(RuntimeError, match=r"DataParallel: a replica would read fp8 values .*; use a process"):
            _replica(model, 1.0)
        return
    found, expected = (_flat(_replica(part, 1.5)(**given, return_dict=False)) for part in (model, stock))
    assert _off(found, expected) < CLOSE
