"""`optimize` on every model family: a tiny model of each, compared with the stock model.

A family adds one module to tests/families; the tests here run over all of them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import random
import re
import types
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

diffusers = pytest.importorskip("diffusers")
from families import LACKING, Family, families, randn, random_  # noqa: E402
from families.left import LEFT, LEFT_BLOCKS, OF_UNETS, WELL_KNOWN  # noqa: E402
from helpers.build import load_build  # noqa: E402
from helpers.diffusers_models import BLOCK_NAMES, models_of_diffusers  # noqa: E402
from helpers.dispatch import PackageOps  # noqa: E402
from helpers.engine_paths import (  # noqa: E402
    block_descriptions,
    few_with_every_part,
    of_each_path,
    one_of_each_path,
    parts_of,
    path_of,
    paths_of,
)
from helpers.versions import pinned, recorded, states, unfit  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

EVERY_FAMILY = families()
UNFIT = {name: unfit(load_build(), family.blocks) for name, family in EVERY_FAMILY.items()}
# Under another diffusers than the pinned one: why a family is not tested.
LEFT_OUT = {name: f"this diffusers has no {cls}" for name, cls in LACKING.items()}
LEFT_OUT |= {name: reason for name, reason in UNFIT.items() if reason}


class Families(dict[str, Family]):
    """The families that are tested, by name. A test that asks for one that is left out is skipped."""

    def __missing__(self, name: str) -> Family:
        for left_out in (name, name.partition("-")[0]):
            if left_out in LEFT_OUT:
                pytest.skip(f"NOT RUN: {LEFT_OUT[left_out]}")
        raise KeyError(name)


FAMILIES = Families((name, family) for name, family in EVERY_FAMILY.items() if not UNFIT[name])
of_the_pinned_diffusers = pytest.mark.skipif(not pinned(), reason="NOT RUN: the lists are those of another diffusers")
# Of float32: the order of sums, which on a GPU is that of other products as well.
CLOSE = 1e-5 if torch.cuda.is_available() else 1e-6
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
DESCRIPTIONS = block_descriptions(load_build(), "diffusers")
BLOCKS = {name: family.blocks for name, family in FAMILIES.items()}
FIRST = one_of_each_path(DESCRIPTIONS, BLOCKS)
FEW = few_with_every_part(DESCRIPTIONS, BLOCKS, FIRST)
every_path = of_each_path("family", FAMILIES, FIRST)
every_changed_family = of_each_path("family", FAMILIES, FIRST, pytest.mark.repeated)
every_compiled_path = of_each_path("family", FAMILIES, FEW)


def make(family: Family, device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return random_(family.make()).to(device=device, dtype=dtype)


def cast(inputs: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs as a pipeline hands them over; positions and times stay in float32."""
    exact = ("timestep", "img_ids", "txt_ids", "guidance", "image_rotary_emb")

    def convert(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(convert(name, item) for item in value)
        if isinstance(value, dict):
            return {key: convert(key, item) for key, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() and name not in exact else None)

    return {name: convert(name, value) for name, value in inputs.items()}


def flat(value: Any) -> tuple[Tensor, ...]:
    """All tensors in nested tuples and lists, in which a model may have None instead of one."""
    return (value,) if isinstance(value, Tensor) else tuple(t for item in value or () for t in flat(item))


def run(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """All tensors that a forward returns."""
    return flat(model(**inputs, return_dict=False))


def distance(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    assert [x.shape for x in got] == [x.shape for x in want]
    pairs = [(a.double(), b.double()) for a, b in zip(got, want)]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def assert_ran(report: Any, family: Family, dtype: torch.dtype = torch.float32) -> None:
    """Every module of the family's blocks ran the ops, and nothing else is in the report."""
    assert_left_alone(report, family)
    calls = {site.name: site.calls for site in report.sites}
    assert {name: report.replaced.get(name) for name in family.blocks} == family.blocks
    assert all(calls[name] > 0 for name in family.blocks), calls
    reasons = {reason for name in family.blocks for reason in report.fallbacks.get(name, {})}
    assert reasons == {*family.stock_calls, *(() if dtype == torch.bfloat16 else family.stock_but_in_bfloat16)}


def assert_left_alone(report: Any, family: Family) -> None:
    """`optimize` left alone what the family says, and nothing else: the reasons tell what a description misses."""
    unexpected = {name: reason for name, reason in report.left_alone.items() if reason not in family.left_alone}
    assert unexpected == {}, f"mend the description, or list the reasons in left_alone: {set(unexpected.values())}"
    assert set(report.left_alone.values()) == set(family.left_alone)


if LEFT_OUT:

    @pytest.mark.parametrize("name", LEFT_OUT)
    def test_family_of_another_diffusers(name: str) -> None:
        pytest.skip(f"NOT RUN: {LEFT_OUT[name]}")


def test_known_classes_under_this_version(ltx: ModuleType) -> None:
    """All run under the pinned versions and under newer ones; for others docs/serving.md says which do not."""
    short_name = ltx.integrations.engine.sites.short_name
    found: dict[str, list[str]] = {"absent": [], "stock": []}
    for name, state in states(ltx).items():
        if state != "optimized":
            found[state].append(short_name(name))
    assert found == (recorded() or {"absent": [], "stock": []})
    assert not (pinned() and LEFT_OUT)


@of_the_pinned_diffusers
def test_every_transformer_of_diffusers(ltx: ModuleType) -> None:
    """Each is in a family, or in the list of what is left at norm level with a reason; none is in both."""
    blocks = {name for name, entry in ltx.integrations.diffusers.ENTRIES.items() if entry.level == "block"}
    found = models_of_diffusers("transformers", "controlnets")
    models = {cls.__name__: {part for part in parts if part.endswith(BLOCK_NAMES)} for cls, parts in found.items()}
    assert len(models) > 70
    in_families = {name for name, of in models.items() if of & blocks}
    assert not in_families & set(OF_UNETS) and set(OF_UNETS) <= set(models)
    assert sorted(set(models) - in_families - set(LEFT) - set(OF_UNETS)) == [], (
        "in no family, and not in tests/families/left.py"
    )
    assert sorted(in_families & set(LEFT)) == [], "in a family: take it out of tests/families/left.py"
    unknown = {block.rpartition(".")[2] for name in in_families for block in models[name] - blocks}
    assert sorted(unknown ^ set(LEFT_BLOCKS)) == [], "blocks that are neither known nor in tests/families/left.py"
    assert all(LEFT.values()) and all(LEFT_BLOCKS.values())
    assert sorted(set(WELL_KNOWN) - set(LEFT)) == [], "has a family: take it out of WELL_KNOWN"


def test_no_layer_norm_across_heads() -> None:
    """No op computes it without a rotation."""
    (block,) = DESCRIPTIONS["diffusers.CogVideoXBlock"]
    attention = block.attentions["attn1"]
    with pytest.raises(ValueError, match="across_heads: expected an RMS norm of query and key"):
        dataclasses.replace(attention, across_heads=True)


@of_the_pinned_diffusers
def test_every_known_block_has_a_tiny_model(ltx: ModuleType) -> None:
    """A class that no module of tests/families makes would be in the tables of models without a test."""
    entries = ltx.integrations.diffusers.ENTRIES
    # Autoencoders, which are alone in their models, have tests of their own.
    known = {name for name, entry in entries.items() if entry.level == "block" and not entry.alone}
    name_of = ltx.integrations.engine.guards.class_of
    made: set[str] = set()
    for family in FAMILIES.values():
        for module in family.make().modules():
            made |= {name_of(module), f"{name_of(module)} + {name_of(vars(module).get('processor'))}"}
    assert sorted(known - made) == []


def test_every_path_has_a_family_that_is_not_slow() -> None:
    """Whatever differs in the description of a block is another path."""
    paths = {name: paths_of(DESCRIPTIONS, family.blocks) for name, family in FAMILIES.items()}
    assert all(paths.values())
    assert set().union(*paths.values()) == set().union(*(paths[name] for name in FIRST))
    assert {"flux", "ltx", "sd3"} <= FIRST and len(FIRST) < len(FAMILIES) / 2
    (block,) = DESCRIPTIONS["diffusers.LTXVideoTransformerBlock"]
    attention, _ = block.attentions.values()
    gated = {**block.attentions, "attn1": dataclasses.replace(attention, gate="to_gate")}
    changes = {"streams": ("a", "b"), "ops": ("rmsnorm",), "attentions": gated, "linears": (("a",),)}
    changed = {path_of(dataclasses.replace(block, **{name: value})) for name, value in changes.items()}
    assert len(changed) == len(changes) and path_of(block) not in changed


def test_few_families_have_every_part_of_every_path() -> None:
    """Whatever differs in the description of a block is another part."""
    parts = {name: set().union(*map(parts_of, paths_of(DESCRIPTIONS, blocks))) for name, blocks in BLOCKS.items()}
    assert set().union(*parts.values()) == set().union(*(parts[name] for name in FEW))
    assert FEW <= FIRST and len(FEW) < len(FIRST) / 2
    (block,) = DESCRIPTIONS["diffusers.LTXVideoTransformerBlock"]
    streams, ops, attentions, feed_forwards, linears = path_of(block)
    kind, own_ops, *others = attentions[0]
    changed = [
        (9, ops, attentions, feed_forwards, linears),
        (streams, (*ops, "new_op"), attentions, feed_forwards, linears),
        (streams, ops, ((kind, (*own_ops, "new_op"), *others),), feed_forwards, linears),
        (streams, ops, ((kind, own_ops, *others, "new_field"),), feed_forwards, linears),
        (streams, ops, (("NewAttention", own_ops, *others),), feed_forwards, linears),
        (streams, ops, attentions, 9, linears),
    ]
    assert all(parts_of(path) - set().union(*parts.values()) for path in changed)


@every_family
@pytest.mark.parametrize("batch", [1, 3])
def test_float32(ltx: ModuleType, device: str, family: Family, batch: int) -> None:
    model, inputs = make(family, device), cast(family.inputs(batch), device, torch.float32)
    stock = run(model, inputs)
    report = ltx.optimize(model)
    assert distance(run(model, inputs), stock) < CLOSE * family.magnifies
    assert_ran(report, family)
    names = [name for name, module in model.named_modules() if "forward" in module.__dict__]
    assert names
    report.restore()
    again = run(model, inputs)
    assert distance(again, stock) < CLOSE * family.magnifies
    assert not [key for module in model.modules() for key in vars(module) if key == "forward" or "ltx" in key]
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in model.parameters())  # packed no more


@every_family
@pytest.mark.parametrize("rounding", ["fp32", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half(ltx: ModuleType, device: str, family: Family, dtype: torch.dtype, rounding: str) -> None:
    """Not further from the model in float32 than stock, and stock's own bits after restore."""
    model, inputs = make(family, device, dtype), cast(family.inputs(2), device, dtype)
    stock = run(model, inputs)
    exact = run(copy.deepcopy(model).float(), cast(inputs, device, torch.float32))
    report = ltx.optimize(model, rounding=rounding)
    ours = run(model, inputs)
    assert all(a.dtype == b.dtype for a, b in zip(ours, stock))
    assert distance(ours, exact) <= 1.3 * distance(stock, exact)  # one small model: FLUX.2's ratio is 0.8 to 1.2
    if rounding == "fp32":
        assert_ran(report, family, dtype)
    report.restore()
    assert all(torch.equal(a, b) for a, b in zip(run(model, inputs), stock))


@pytest.mark.host
def test_what_stays_stock_with_eager_rounding_is_told(ltx: ModuleType, device: str) -> None:
    """Strict or not: the modules in such a block are replaced one by one."""
    family = FAMILIES["flux"]
    notes = {
        rounding: ltx.optimize(make(family, device, torch.float32), rounding=rounding, strict=True).notes
        for rounding in ("fp32", "eager")
    }
    assert notes["fp32"] == []
    assert 'stock with rounding "eager": 2 diffusers.FluxSingleTransformerBlock' in notes["eager"]


@every_family
def test_parameters_kept_in_float32(ltx: ModuleType, device: str, family: Family) -> None:
    """Beside 16-bit ones, as `from_pretrained` loads models with `_keep_in_fp32_modules`: whole blocks run ops."""
    model = make(family, device)
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    names = {name for name in tensors if kept & set(name.split("."))}
    if not names:
        pytest.skip("diffusers keeps nothing of the model in float32")
    for name in tensors.keys() - names:
        if tensors[name].is_floating_point():
            tensors[name].data = tensors[name].bfloat16()
    inputs = cast(family.inputs(2), device, torch.bfloat16)
    exact = run(copy.deepcopy(model).float(), cast(inputs, device, torch.float32))
    stock = distance(run(model, inputs), exact)
    report = ltx.optimize(model)
    assert distance(run(model, inputs), exact) <= 1.3 * stock
    assert_ran(report, family, torch.bfloat16)


@pytest.mark.host
def test_parameters_in_float64_run_stock(ltx: ModuleType, device: str) -> None:
    """The ops read float32 and 16-bit parameters beside any of these inputs, and no other dtype."""
    family = FAMILIES["wan-t2v"]
    model, inputs = make(family, device), cast(family.inputs(1), device, torch.float32)
    for block in model.blocks:
        block.scale_shift_table.data = block.scale_shift_table.data.double()
    stock = run(model, inputs)
    report = ltx.optimize(model)
    assert distance(run(model, inputs), stock) < CLOSE
    reason = "scale_shift_table has dtype torch.float64, the input torch.float32"
    assert report.fallbacks["diffusers.WanTransformerBlock"] == {reason: 2}


def calls_of_blocks(model: nn.Module, inputs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arguments by name of the last block of each class, by the block's path."""
    found: dict[type, tuple[str, dict[str, Any]]] = {}

    def keep(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
        found[type(module)] = path, {name: value for name, value in call.items() if name != "self"}

    blocks = [(path, module) for path, module in model.named_modules() if type(module).__name__.endswith(BLOCK_NAMES)]
    hooks = [m.register_forward_pre_hook(functools.partial(keep, path), with_kwargs=True) for path, m in blocks]
    run(model, inputs)
    for hook in hooks:
        hook.remove()
    return dict(found.values())


@every_family
def test_overflow_in_float16_is_clipped(ltx: ModuleType, device: str, family: Family) -> None:
    """In the streams that the stock blocks clip: large ones, to which a large branch is added."""
    model, inputs = make(family, device, torch.float16), cast(family.inputs(2), device, torch.float16)
    calls = calls_of_blocks(model, inputs)
    clip = {path for path in calls if "65504" in inspect.getsource(type(model.get_submodule(path)).forward)}
    if not clip:
        pytest.skip("the stock blocks clip nothing")
    stock = {}
    for path in clip:
        block = model.get_submodule(path)
        for name in {"hidden_states", "encoder_hidden_states"} & calls[path].keys():
            calls[path][name] = None if calls[path][name] is None else calls[path][name].sign() * 64000
        for name, layer in block.named_modules():
            if isinstance(layer, nn.Linear) and re.search(
                r"net\.2|linear_out|proj_out|^attn\.to_out$|^img_mlp\.out$", name
            ):
                layer.weight.mul_(1.5e4)
        stock[path] = flat(block(**calls[path]))
        assert all(bool((value.abs() >= 65504).any()) for value in stock[path])
    ltx.optimize(model)
    for path in clip:
        ours = flat(model.get_submodule(path)(**calls[path]))
        pairs = [pair for pair in zip(ours, stock[path], strict=True) if bool(pair[1].isfinite().all())]
        assert distance(*map(tuple, zip(*pairs))) < 0.01, path


@pytest.mark.parametrize("name", ["flux", "hunyuan_video"])
@pytest.mark.parametrize("batch", [1, 2])
def test_streams_that_are_parts_of_a_larger_tensor(ltx: ModuleType, device: str, name: str, batch: int) -> None:
    """A single block joins two streams, which may be neighbours in a tensor, with or without more rows after them."""
    family = FAMILIES[name]
    model, inputs = make(family, device), cast(family.inputs(batch), device, torch.float32)
    ((path, call),) = ((path, call) for path, call in calls_of_blocks(model, inputs).items() if "single" in path)
    block = model.get_submodule(path)
    names = ("encoder_hidden_states", "hidden_states") if name == "flux" else ("hidden_states", "encoder_hidden_states")
    rows = sum(call[name].shape[1] for name in names)
    cases = []
    for spare in (0, 2):
        whole = randn(batch, rows + spare, 32).to(device)[:, :rows]
        given = {**call, **dict(zip(names, whole.split([call[name].shape[1] for name in names], 1)))}
        cases.append((given, flat(block(**given))))
    ltx.optimize(model)
    for given, stock in cases * 3:
        assert distance(flat(block(**given)), stock) < CLOSE


@pytest.mark.host
@every_family
def test_every_norm_has_its_eps(ltx: ModuleType, device: str, family: Family) -> None:
    """Norms that share a launch may have other numbers than one another, but for those of query and key."""
    model, inputs = make(family, device), cast(family.inputs(2), device, torch.float32)
    of_heads: dict[str, float] = {}
    for number, (path, module) in enumerate(model.named_modules(), 1):
        if isinstance(getattr(module, "eps", None), float):
            pair = re.sub(r"(norm_)(added_)?[qk]$|[qk](_rms_norm\w*)$", r"\1\2\3", path)
            module.eps = of_heads.setdefault(pair, 0.1 + 0.001 * number)
    stock = run(model, inputs)
    report = ltx.optimize(model)
    assert distance(run(model, inputs), stock) < CLOSE * family.magnifies
    assert_ran(report, family)


@every_path
def test_one_sample_beside_two(ltx: ModuleType, device: str, family: Family) -> None:
    """Stock blocks broadcast one prompt to several latents, or one latent to several times, where torch does."""
    model = make(family, device)
    stock, inputs = copy.deepcopy(model), cast(family.inputs(2), device, torch.float32)
    ltx.optimize(model)
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != 2:
            continue
        given = {**inputs, name: value[:1]}
        try:
            want = run(stock, given)
        except Exception:  # the stock model takes no such argument
            continue
        assert distance(run(model, given), want) < CLOSE * family.magnifies, name


@pytest.mark.host
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["chroma", "cogvideox-5b"])
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_traced_after_calls(ltx: ModuleType, device: str, name: str, calls: int) -> None:
    """A trace computes from the mask or the tables that it is given, and not from what calls kept of earlier ones."""
    family = FAMILIES[name]
    model = make(family, device)
    inputs = cast({**family.inputs(2), **(family.masked(2) if family.masked else {})}, device, torch.float32)
    key = "image_rotary_emb" if "image_rotary_emb" in inputs else "attention_mask"
    given = inputs.pop(key)
    tensors = flat(given)

    class Called(nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return model(**inputs, **{key: tensors if isinstance(given, tuple) else tensors[0]}, return_dict=False)[0]

    stock = Called()(*(tensor.flip(0) for tensor in tensors))
    ltx.optimize(model)
    for _ in range(calls):
        Called()(*tensors)
    traced = torch.jit.trace(Called(), tensors, check_trace=name != "chroma")
    assert distance((traced(*(tensor.flip(0) for tensor in tensors)),), (stock,)) < CLOSE


@every_family
def test_masks(ltx: ModuleType, device: str, family: Family) -> None:
    if family.masked is None:
        pytest.skip("the family has no masks")
    model = make(family, device)
    inputs = cast({**family.inputs(2), **family.masked(2)}, device, torch.float32)
    stock = run(model, inputs)
    plain = run(model, cast(family.inputs(2), device, torch.float32))
    assert distance(plain, stock) > 1e-4  # the mask matters
    ltx.optimize(model)
    assert distance(run(model, inputs), stock) < CLOSE * family.magnifies


@every_family
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_own_attention(
    ltx: ModuleType, device: str, family: Family, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention by this package's op, as where it has a kernel that pays."""
    if masked and family.masked is None:
        pytest.skip("the family has no masks")
    more = family.masked(2) if masked and family.masked is not None else {}
    model, inputs = make(family, device), cast({**family.inputs(2), **more}, device, torch.float32)
    stock = run(model, inputs)
    monkeypatch.setattr(ltx.integrations.attention.choice, "runs_kernel", lambda *_: True)
    monkeypatch.setattr(ltx.integrations.attention.choice, "_kernel_pays", lambda *_: True)
    report = ltx.optimize(model)
    assert distance(run(model, inputs), stock) < CLOSE * family.magnifies
    if not masked and any("Attention" in name for name in family.blocks):
        assert any("attention" in site.chosen for site in report.sites)


@pytest.mark.parametrize(
    ("shape", "keys", "masked", "pays"),
    [
        ((1, 6144, 32, 64), 1024, False, True),
        ((1, 6144, 32, 64), 126, True, True),
        ((1, 6144, 32, 128), 1024, True, True),
        ((1, 6144, 32, 128), 1024, False, False),
        ((1, 6144, 32, 128), 128, True, False),
        ((2, 192, 32, 128), 8192, False, True),
        ((2, 193, 32, 128), 8192, False, False),
        ((8, 64, 32, 64), 8192, False, False),
        ((8, 64, 32, 64), 8192, True, True),
    ],
)
def test_cross_attentions_that_the_kernel_is_faster_at(
    ltx: ModuleType, shape: tuple[int, ...], keys: int, masked: bool, pays: bool
) -> None:
    query = torch.empty(shape, device="meta")
    assert ltx.integrations.attention.choice._kernel_pays(query, keys, masked) is pays


@pytest.mark.host
@pytest.mark.parametrize(
    ("name", "lengths", "rows"),
    [
        ("hunyuan_video-padded", None, 8 + 3),
        ("hunyuan_video-15_text", None, 8 + 8),
        ("ernie_image", [5, 5], 12 + 5),
        ("ernie_image", [3, 3], 12 + 3),
    ],
)
def test_padding_is_trimmed(
    ltx: ModuleType,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    lengths: list[int] | None,
    rows: int,
) -> None:
    """Padding of the text is left out instead of masked, and a mask is read once for all the blocks."""
    family = FAMILIES[name]
    given = family.inputs(2) if lengths is None else {**family.inputs(2), "text_lens": torch.tensor(lengths)}
    model, inputs = make(family, device), cast(given, device, torch.float32)
    unchanged = run(model, inputs)
    report = ltx.optimize(model)
    seen: list[tuple[int, bool]] = []
    stock = torch.nn.functional.scaled_dot_product_attention

    def record(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        seen.append((key.shape[2], attn_mask is None))
        return stock(query, key, value, attn_mask=attn_mask, **options)

    choice, reads = ltx.integrations.attention.choice, list[Any]()

    def kept(site: Any, key: Any, sources: Any, make: Any) -> Any:
        def read() -> Any:
            if key[0] == "valid lengths":
                reads.append(key)
            return make()

        return stock_kept(site, key, sources, read)

    stock_kept = choice.kept
    monkeypatch.setattr(choice, "kept", kept)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    assert distance(run(model, inputs), unchanged) < CLOSE
    blocks = sum(
        count for block, count in family.blocks.items() if block.endswith(BLOCK_NAMES)
    )  # with an attention each
    assert seen[-blocks:] == [(rows, True)] * blocks
    assert len(reads) == 1
    report.restore()


@pytest.mark.host
@pytest.mark.parametrize(
    ("case", "segments", "expected"),
    [
        ("", [[1] * 11], [(11, True)]),
        ("", [[1] * 11] * 2, [(11, True)]),
        ("padded", [[-1] * 2 + [1] * 9] * 2, [(2, True), (9, True)]),
        ("lengths", [[-1] * 2 + [1] * 9, [1] * 11], [(11, False)]),
        ("three", [[1] * 2 + [2] * 4 + [1] * 5], [(11, False)]),
    ],
)
def test_segments_attend_without_their_mask(
    ltx: ModuleType, device: str, monkeypatch: pytest.MonkeyPatch, case: str, segments: list[list[int]], expected: Any
) -> None:
    """Where padding of one length comes first, each of the two segments attends by itself; the mask is read once."""
    family = FAMILIES["ideogram4"]
    model = make(family, device)
    given = {**family.inputs(len(segments)), "segment_ids": torch.tensor(segments)}
    inputs = cast(given, device, torch.float32)
    stock = run(model, inputs)
    ltx.optimize(model)
    seen: list[tuple[int, bool]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def record(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        seen.append((key.shape[2], attn_mask is None))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    assert distance(run(model, inputs), stock) < CLOSE
    assert seen == expected * 2


@pytest.mark.host
def test_segments_of_no_samples(ltx: ModuleType, device: str) -> None:
    model = make(FAMILIES["ideogram4"], device)
    inputs = cast(FAMILIES["ideogram4"].inputs(0), device, torch.float32)
    (stock,) = run(model, inputs)
    ltx.optimize(model)
    assert run(model, inputs)[0].shape == stock.shape


def test_a_modulation_for_each_token_of_ernie_image(ltx: ModuleType, device: str) -> None:
    """A block reads a row that the model wrote out for all tokens once, and other rows as they are, also in replays."""
    family = FAMILIES["ernie_image"]
    model, inputs = make(family, device), cast(family.inputs(2), device, torch.float32)
    calls = calls_of_blocks(model, inputs)
    (path,) = calls
    block, call = model.get_submodule(path), calls[path]
    others = {**call, "temb": [value * torch.rand_like(value) for value in call["temb"]]}
    stock = [flat(block(**given)) for given in (call, others)]
    assert distance(*stock) > 0.01
    report = ltx.optimize(model)
    seen: list[int] = []
    stream = ltx.integrations.blocks.stream.Stream
    norm = stream.norm

    def noted(self: Any, module: nn.Module, shift: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(shift.value.stride(1))
        return norm(self, module, shift, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "norm", noted)
        assert distance(flat(block(**call)), stock[0]) < CLOSE
        assert distance(flat(block(**others)), stock[1]) < CLOSE
    assert seen == [0, 0, 2 * 32, 2 * 32]
    for number in (0, 0, 1, 1, 0):
        assert distance(flat(block(**(call, others)[number])), stock[number]) < CLOSE
    assert report.fallbacks == {}


def basic_block(device: str, **options: Any) -> nn.Module:
    from diffusers.models.attention import BasicTransformerBlock

    return random_(nn.ModuleList([BasicTransformerBlock(32, 2, 16, cross_attention_dim=24, **options)])).to(device)


@pytest.mark.host
def test_an_ip_adapter_in_a_unet_leaves_the_block_fused(ltx: ModuleType, device: str) -> None:
    """Its processor keeps the cross-attention stock, and the text becomes a tuple of text and images."""
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    model = basic_block(device)
    model[0].attn2.set_processor(IPAdapterAttnProcessor2_0(32, 24, num_tokens=(3,), scale=0.5))
    random_(model).to(device)
    tokens, text, image = (randn(2, *shape).to(device) for shape in ((6, 32), (5, 24), (1, 3, 24)))

    def output() -> tuple[Tensor, ...]:
        return (model[0](tokens, encoder_hidden_states=(text, [image])),)

    stock = output()
    report = ltx.optimize(model)
    for _ in range(3):
        assert distance(output(), stock) < CLOSE
    processor = "diffusers.models.attention_processor.IPAdapterAttnProcessor2_0"
    assert report.left_alone == {"0.attn2": f"its processor is {processor}"}
    assert report.replaced["diffusers.BasicTransformerBlock"] == 1 and report.fallbacks == {}


@pytest.mark.host
@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({"norm_type": "layer_norm_i2vgen"}, {}, "norm_type is layer_norm_i2vgen"),
        ({"only_cross_attention": True}, {}, "cross-attention alone"),
        ({}, {"_chunk_size": 2, "_chunk_dim": 1}, "feed-forwards in chunks"),
    ],
)
def test_other_forms_of_a_unets_block_run_stock(
    ltx: ModuleType, device: str, options: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    model = basic_block(device, **options)
    model[0].norm3 = nn.LayerNorm(32).to(device)  # the stock forward calls one in each of these
    tokens, text = randn(2, 6, 32).to(device), randn(2, 5, 24).to(device)
    for name, value in change.items():
        setattr(model[0], name, value)
    stock = (model[0](tokens, encoder_hidden_states=text),)
    report = ltx.optimize(model)
    assert distance((model[0](tokens, encoder_hidden_states=text),), stock) < CLOSE
    assert report.fallbacks["diffusers.BasicTransformerBlock"] == {reason: 1}


@pytest.mark.parametrize("padded", [False, True])
def test_prefix_cache_of_qwen_image21(ltx: ModuleType, device: str, padded: bool) -> None:
    """The first step keeps keys and values of the prompt, and later ones read them and compute the image alone."""
    family = FAMILIES["qwenimage21"]
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    model = make(family, device)
    more = family.masked(2) if padded and family.masked is not None else {}
    inputs = cast({**family.inputs(2), **more}, device, torch.float32)

    def steps() -> tuple[Tensor, ...]:
        cache, outputs = QwenImage21KVCache(2), []
        for step, mode in enumerate(("extract", "cached", "cached", "cached")):
            given = {**inputs, "timestep": inputs["timestep"] * (1 - 0.1 * step)}
            outputs += run(model, {**given, "kv_cache": cache, "kv_cache_mode": mode})
        kept = [tensor for layer in cache.layer_caches for tensor in (layer.k, layer.v)]
        return (*outputs, *kept)

    stock = steps()
    report = ltx.optimize(model)
    for _ in range(2):
        assert distance(steps(), stock) < CLOSE
    assert report.fallbacks == {}
    assert "recorded calls: " not in str(report)  # a replay would keep the keys of another cache


def test_kept_keys_of_flux2_klein(ltx: ModuleType, device: str) -> None:
    """The first step keeps keys and values of the reference images, and later ones read them."""
    from diffusers.models.transformers import transformer_flux2 as flux2

    if not hasattr(flux2, "Flux2KVAttnProcessor"):
        pytest.skip("NOT RUN: this diffusers has no pipeline that keeps keys of reference images")
    family, references = FAMILIES["flux2-klein"], 2
    model = make(family, device)
    for block in model.transformer_blocks:
        block.attn.set_processor(flux2.Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(flux2.Flux2KVParallelSelfAttnProcessor())
    inputs = cast(family.inputs(2), device, torch.float32)
    later = {name: inputs[name][..., references:, :] for name in ("hidden_states", "img_ids")}

    def steps() -> tuple[Tensor, ...]:
        with torch.no_grad():
            first, cache = model(**inputs, kv_cache_mode="extract", num_ref_tokens=references, return_dict=False)
        outputs = [first]
        for step in range(1, 4):
            given = {**inputs, **later, "timestep": inputs["timestep"] * (1 - 0.1 * step)}
            outputs += run(model, {**given, "kv_cache": cache, "kv_cache_mode": "cached"})
        layers = (*cache.double_block_caches, *cache.single_block_caches)
        return (*outputs, *(tensor for layer in layers for tensor in layer.get()))

    stock, without = steps(), run(model, inputs)
    report = ltx.optimize(model)
    for _ in range(2):
        assert distance(steps(), stock) < CLOSE
    assert "recorded calls: " not in str(report)  # a replay would keep the keys of another cache
    assert distance(run(model, inputs), without) < CLOSE
    assert report.fallbacks == {}
    model.transformer_blocks[1].attn.processor._parallel_config = object()  # which the stock processor does not read
    assert distance(steps(), stock) < CLOSE
    assert report.fallbacks == {"diffusers.Flux2Attention": {"ranks exchange tokens": 4}}


@pytest.mark.host
def test_heads_that_do_not_fit_run_stock(ltx: ModuleType, device: str) -> None:
    """Keys of fewer heads run ops; columns that make no heads give the stock module's error, not an op's."""
    model, inputs = make(FAMILIES["lumina2"], device), cast(FAMILIES["lumina2"].inputs(1), device, torch.float32)
    attention = model.layers[1].attn
    assert attention.to_k.out_features < attention.to_q.out_features
    attention.heads = 5
    with pytest.raises(Exception) as stock:
        run(model, inputs)
    report = ltx.optimize(model)
    with pytest.raises(type(stock.value), match=re.escape(str(stock.value))):
        run(model, inputs)
    reason = "its query, key and value of 64, 32 and 32 columns make no 5 heads"
    assert report.fallbacks["diffusers.Attention"] == {reason: 1}


@pytest.mark.host
def test_a_flash_backend_gets_the_window_of_ace_step(ltx: ModuleType, device: str) -> None:
    """The stock processor hands it the window, which no mask holds then: such an attention runs stock."""
    model, inputs = make(FAMILIES["ace_step"], device), cast(FAMILIES["ace_step"].inputs(1), device, torch.float32)
    report = ltx.optimize(model)
    model.layers[1].self_attn.processor._attention_backend = "flash"
    with contextlib.suppress(Exception):  # nothing on a CPU has the backend
        run(model, inputs)
    assert report.fallbacks["diffusers.AceStepAttention"] == {"a flash backend of attention": 1}


def test_experts_of_hidream_get_their_tokens(ltx: ModuleType, device: str) -> None:
    """The tiny model of the family gives each expert all tokens; here a token has one of four."""
    family = importlib.import_module("families.hidream")
    model, inputs = random_(family.make(experts=4, chosen=1)).to(device), cast(family.inputs(2), device, torch.float32)
    rows: list[int] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[0].endswith(".experts"):
            module.register_forward_hook(lambda _, arguments, __: rows.append(len(arguments[0])))
    stock, of_stock = run(model, inputs), rows.copy()
    rows.clear()
    ltx.optimize(model)
    assert distance(run(model, inputs), stock) < CLOSE
    assert rows == of_stock and len(set(rows)) > 1


def test_blocks_of_the_controlnet_of_cosmos(ltx: ModuleType, device: str) -> None:
    """The model itself cannot run here: it resizes a mask by torchvision."""
    from diffusers.models.transformers import transformer_cosmos

    make_block = transformer_cosmos.CosmosTransformerBlock
    blocks = nn.ModuleList(make_block(2, 16, 32, before_proj=number == 0, after_proj=True) for number in range(2))
    model = random_(blocks).to(device)
    tokens, text, time = (randn(2, *shape).to(device) for shape in ((6, 32), (5, 32), (32,)))
    temb = randn(2, 3 * 32, seed=2).to(device)

    def outputs() -> tuple[Tensor, ...]:
        first, control = model[0](tokens, text, time, temb, latents=tokens + 1)
        return (control, *model[1](first, text, time, temb))

    stock = outputs()
    report = ltx.optimize(model)
    assert distance(outputs(), stock) < CLOSE
    assert report.fallbacks == report.left_alone == {}


@pytest.mark.host
@every_changed_family
def test_faults_would_show(ltx: ModuleType, device: str, family: Family) -> None:
    """No parameter of a block is left unread: each one, changed, changes the result as it changes stock's."""
    model, stock_model = make(family, device), make(family, device)
    inputs = cast(family.inputs(1), device, torch.float32)
    report = ltx.optimize(model)
    classes = {site.class_name for site in report.sites if site.name in family.blocks}
    seen: set[type] = set()
    for name, module in model.named_modules():
        if f"{type(module).__module__}.{type(module).__qualname__}" not in classes or type(module) in seen:
            continue
        seen.add(type(module))
        for parameter_name, _ in module.named_parameters():
            pair = [m.get_submodule(name).get_parameter(parameter_name) for m in (model, stock_model)]
            kept = pair[0].clone()
            for parameter in pair:
                parameter.mul_(0.5).add_(0.1)
            assert distance(run(model, inputs), run(stock_model, inputs)) < 10 * CLOSE * family.magnifies, (
                f"{name}.{parameter_name}"
            )
            for parameter in pair:
                parameter.copy_(kept)


@every_compiled_path
def test_compile(ltx: ModuleType, device: str, family: Family) -> None:
    model, inputs = make(family, device), cast(family.inputs(2), device, torch.float32)
    stock = run(model, inputs)
    report = ltx.optimize(model)
    tables: list[Tensor] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and "rope" in node.target.name():
                given = dict(zip((argument.name for argument in node.target._schema.arguments), node.args))
                tables.extend(given[name].meta["example_value"] for name in ("cos", "sin") if given.get(name))
        return graph.forward

    compiled = torch.compile(model, fullgraph=family.one_graph, backend=backend)
    assert distance(run(compiled, inputs), stock) < CLOSE * family.magnifies
    assert all(table.stride(-1) == 1 for table in tables)  # or the op would take its general kernel
    traces = {site.name: site.traces for site in report.sites}
    assert all(traces[name] > 0 for name in family.blocks), traces
    reasons = {reason for name in family.blocks for reason in report.fallbacks.get(name, {})}
    assert {reason.removesuffix(" (compiled)") for reason in reasons} == set(family.stock_but_in_bfloat16)


@every_family
def test_recorded_calls(ltx: ModuleType, device: str, family: Family) -> None:
    """The third call and later ones replay functions of the second; they give its bits. The report names them."""
    model, inputs = make(family, device, family.dtype), cast(family.inputs(2), device, family.dtype)
    report = ltx.optimize(model)
    first, second, third = (run(model, inputs) for _ in range(3))
    assert all(torch.equal(a, b) for a, b in zip((*second, *third), (*first, *first)))
    blocks = sum(count for name, count in family.blocks.items() if name.endswith(BLOCK_NAMES))
    lines = [line for line in str(report).splitlines() if "recorded" in line]
    told = [line for line in lines if any(name in line for name in family.blocks)]  # others stand in test_unet.py
    recorded = [line for line in told if line.startswith("recorded calls: ")]
    others = [line for line in told if line not in recorded]
    if family.not_recorded:
        assert others and not recorded
        assert all("not recorded, " in line and line.endswith(family.not_recorded) for line in others)
    else:
        assert sum(int(line.split()[2]) for line in recorded) == blocks - family.idle - family.given_twice
        twice = f", {family.given_twice} x: an argument is given twice"
        assert len(others) == (family.given_twice > 0) and all(line.endswith(twice) for line in others)


@every_path
def test_random_calls_are_recorded(
    ltx: ModuleType, device: str, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LTX_KERNELS_RECORD=check raises where a replay has other bits, whatever the calls before were."""
    replay = importlib.import_module(f"{ltx.__name__}.integrations.replay.calls")
    monkeypatch.setattr(replay, "RECORD", replay.CHECK)
    model, chance = make(family, device, family.dtype), random.Random(0)
    ltx.optimize(model)
    parameters = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    compared = 0

    def compare(*arguments: Any) -> Any:
        nonlocal compared
        compared += 1
        return checked(*arguments)

    checked = replay.compare
    monkeypatch.setattr(replay, "compare", compare)
    given = [cast(family.inputs(batch), device, family.dtype) for batch in (1, 2)]
    if family.masked is not None:
        given += [{**inputs, **cast(family.masked(i), device, family.dtype)} for i, inputs in enumerate(given, 1)]
    for i in range(20):
        inputs = chance.choice(given)
        change = "weight" if i in (6, 13) else chance.choice(["nothing", "values", "memory", "mode"])
        if change == "values":
            inputs = tree_map_only(Tensor, lambda x: x * 1.5 if x.is_floating_point() else x, inputs)
        if change == "memory":
            inputs = tree_map_only(Tensor, lambda x: torch.stack([x, x], -1)[..., 0], inputs)
        if change == "weight":
            weight = chance.choice(parameters)
            weight.data = weight.data * 1.1
        with torch.inference_mode() if change == "mode" else contextlib.nullcontext():
            run(model, inputs)
    assert compared or family.not_recorded


@pytest.mark.host
@every_family
def test_inference_mode(ltx: ModuleType, device: str, family: Family) -> None:
    """Tables and masks that a forward makes there have no version by which a change would show."""
    model = make(family, device)
    ltx.optimize(model)
    with torch.inference_mode():
        inputs = cast(family.inputs(2), device, torch.float32)
        ours = run(model, inputs)
        ltx.restore(model)
        assert distance(ours, run(model, inputs)) < CLOSE * family.magnifies


@pytest.mark.slow
@every_family
def test_compile_inductor(ltx: ModuleType, device: str, family: Family) -> None:
    """Against the compiled stock model, which keeps what the eager one rounds: Qwen-Image's timesteps, for one."""
    model, inputs = make(family, device, torch.bfloat16), cast(family.inputs(2), device, torch.bfloat16)
    stock = run(torch.compile(model), inputs)
    torch.compiler.reset()
    ltx.optimize(model)
    assert distance(run(torch.compile(model, fullgraph=family.one_graph), inputs), stock) < 0.02


@pytest.mark.host
@every_path
def test_hooks(ltx: ModuleType, device: str, family: Family) -> None:
    """A hook on any submodule of the blocks is called as in the stock model, whatever it stands on."""
    stock_model, model = make(family, device), make(family, device)
    inputs = cast(family.inputs(1), device, torch.float32)
    report = ltx.optimize(model)
    classes = {site.class_name for site in report.sites if site.name in family.blocks}
    blocks = [n for n, m in model.named_modules() if f"{type(m).__module__}.{type(m).__qualname__}" in classes]
    names = {name for block in blocks for name, _ in model.get_submodule(block).named_modules(prefix=block)}
    seen: dict[str, list[str]] = {"stock": [], "ours": []}
    handles = [
        m.get_submodule(name).register_forward_hook(lambda *_, where=where, name=name: seen[where].append(name))
        for where, m in (("stock", stock_model), ("ours", model))
        for name in names
    ]
    assert distance(run(model, inputs), run(stock_model, inputs)) < CLOSE * family.magnifies
    assert sorted(seen["ours"]) == sorted(seen["stock"])
    for handle in handles:
        handle.remove()
    # One at a time: nothing relies on the others' being hooked.
    for name in sorted(names):
        with_hook = [m.get_submodule(name).register_forward_hook(_scaled) for m in (model, stock_model)]
        assert distance(run(model, inputs), run(stock_model, inputs)) < CLOSE * family.magnifies, name
        for handle in with_hook:
            handle.remove()


def _scaled(module: nn.Module, arguments: Any, output: Any) -> Any:
    if output is None:  # SD3's last block has no text
        return None
    if isinstance(output, Tensor):
        return output * 1.25 if output.is_floating_point() else output  # the numbers of HiDream's experts
    return type(output)(_scaled(module, arguments, item) for item in output)


@every_path
def test_lora(ltx: ModuleType, device: str, family: Family) -> None:
    peft = pytest.importorskip("peft")
    model, inputs = make(family, device), cast(family.inputs(1), device, torch.float32)
    if not hasattr(model, "add_adapter"):
        pytest.skip(f"NOT RUN: {type(model).__name__} has no adapters in this diffusers")
    bare = run(model, inputs)
    ltx.optimize(model)
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=list(family.lora), init_lora_weights=False))
    model.requires_grad_(False)
    ours = run(model, inputs)
    ltx.restore(model)
    stock = run(model, inputs)
    assert distance(stock, bare) > 0.01
    assert distance(ours, stock) < CLOSE * family.magnifies
    ltx.optimize(model)
    assert distance(run(model, inputs), stock) < CLOSE * family.magnifies
    model.delete_adapters("default")
    assert distance(run(model, inputs), bare) < CLOSE * family.magnifies


@every_path
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload(ltx: ModuleType, device: str, family: Family, kind: str) -> None:
    if version("diffusers") < "0.42" and not torch.accelerator.is_available():
        pytest.skip("NOT RUN: group offload of diffusers before 0.42 needs an accelerator")
    inputs = cast(family.inputs(1), device, torch.float32)
    stock = run(make(family, device), inputs)
    model = make(family, "cpu")
    if not model._supports_group_offloading:
        pytest.skip(f"diffusers offers no group offload of {type(model).__name__}")
    ltx.optimize(model)
    model.enable_group_offload(
        onload_device=torch.device(device),
        offload_device=torch.device("cpu"),
        offload_type=kind,
        num_blocks_per_group=1 if kind == "block_level" else None,
    )
    for _ in range(2):
        assert distance(run(model, inputs), stock) < CLOSE * family.magnifies
    ltx.restore(model)
    assert distance(run(model, inputs), stock) < CLOSE * family.magnifies


@pytest.mark.host
@every_path
def test_first_block_cache(ltx: ModuleType, device: str, family: Family) -> None:
    if not family.first_block_cache:
        pytest.skip("diffusers does not know these blocks")
    models = make(family, device), make(family, device)
    ltx.optimize(models[0])
    steps = []
    for model in models:
        model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.5))
        outputs = []
        for step in range(3):
            inputs = cast(family.inputs(1), device, torch.float32)
            inputs["hidden_states"] = inputs["hidden_states"] * (1 + 0.01 * step)
            with model.cache_context("cond"):
                outputs.append(run(model, inputs))
        steps.append(outputs)
    for ours, stock in zip(*steps):
        assert distance(ours, stock) < CLOSE * family.magnifies


@pytest.mark.host
@every_family
def test_gradients(ltx: ModuleType, device: str, family: Family) -> None:
    model, inputs = make(family, device), cast(family.inputs(1), device, torch.float32)
    model.requires_grad_(True)

    def gradients() -> list[Tensor]:
        with torch.enable_grad():
            loss = sum(output.square().sum() for output in run(model, inputs))
        assert isinstance(loss, Tensor)
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    ltx.optimize(model)
    ours = gradients()
    ltx.restore(model)
    stock = gradients()
    assert len(ours) == len(stock)
    noise = 1e-6 * max(want.abs().max().item() for want in stock)  # the gradient of a key's bias is nothing else
    for got, want in zip(ours, stock):
        atol = 1e-4 * family.magnifies * want.abs().max().item() + noise
        torch.testing.assert_close(got, want, rtol=1e-3, atol=atol)


@every_family
def test_fp8(ltx: ModuleType, device: str, family: Family) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this GPU")
    model, inputs = make(family, device, torch.bfloat16), cast(family.inputs(2), device, torch.bfloat16)
    stock = run(model, inputs)
    report = ltx.optimize(model, precision="fp8")
    assert_left_alone(report, family)
    ours = run(model, inputs)
    assert report.replaced["torch.Linear"] == family.fp8
    assert "torch.Linear" not in report.fallbacks
    assert 1e-3 < distance(ours, stock) < 0.15
    report.restore()
    assert all(torch.equal(a, b) for a, b in zip(run(model, inputs), stock))


@pytest.mark.parametrize(
    ("name", "op", "count"),
    [
        # The activation quantises attention's columns with its own, in two single blocks; two double blocks have MLPs.
        ("flux", "gelu_quant", 2 + 2),
        ("flux-ovis", "glu_quant", 2 + 2),
        ("chroma", "gelu_quant", 2 + 2),
        ("hunyuan_video", "gelu_quant", 2 + 2),
        ("flux2", "glu_quant", 2 + 2),
        # Norm, gate, residual, norm and quantisation between the attention and the MLP of four blocks.
        ("z_image", "norm_residual_norm_quant", 4),
        # The norms of video and text before the MLP that both share.
        ("cogvideox-5b", "residual_norm_quant", 2 * 2),
    ],
)
def test_fp8_in_the_op_before(ltx: ModuleType, device: str, name: str, op: str, count: int) -> None:
    """What an fp8 layer reads is quantised where it is made."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this GPU")
    family = FAMILIES[name]
    model, inputs = make(family, device, torch.bfloat16), cast(family.inputs(1), device, torch.bfloat16)
    ltx.optimize(model, precision="fp8")
    with PackageOps(ltx) as ops:
        run(model, inputs)
    assert ops.names.count(op) == count


@pytest.mark.parametrize("name", ["flux", "hunyuan_video", "qwenimage", "sd3"])
@pytest.mark.parametrize("batch", [1, 2])
def test_fp8_products_of_two_streams(
    ltx: ModuleType, device: str, name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write to their rows of one tensor; of one sample with the bits of products that are concatenated.

    Of several samples a GPU's product of each may sum in another order than one product of them all.
    """
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this GPU")
    family = FAMILIES[name]
    model, inputs = make(family, device, torch.bfloat16), cast(family.inputs(batch), device, torch.bfloat16)
    ltx.optimize(model, precision="fp8")
    linears = ltx.integrations.linear.linears.Linears
    written, write = [], linears.write

    def counted(self: Any, *arguments: Any) -> None:
        written.append(self.scaled)
        write(self, *arguments)

    monkeypatch.setattr(linears, "write", counted)
    outputs = run(model, inputs)
    assert len(written) == 2 * sum(written) > 0  # the text's layers stay in bf16
    monkeypatch.setattr(linears, "writes", lambda self, input: False)
    written.clear()
    concatenated = run(model, inputs)
    assert not written
    if batch == 1 or device == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(outputs, concatenated, strict=True))
    else:
        assert distance(outputs, concatenated) < 0.01


@pytest.mark.parametrize("rounding", ["fp32", "eager"])
def test_rows_of_a_stream_have_a_product_for_each_sample(
    ltx: ModuleType, device: str, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bias is added in the product; with rounding="eager" it is added as in the stock forward."""
    family, home = FAMILIES["sd3-35large"], ltx.integrations.linear.linears
    model, inputs = make(family, device), cast(family.inputs(3), device, torch.float32)
    stock = run(model, inputs)
    apart, write = [], home.write_products

    def watched(input: Tensor, *arguments: Any, **options: Any) -> None:
        if not input.is_contiguous():
            apart.append(tuple(input.shape[:2]))
        write(input, *arguments, **options)

    monkeypatch.setattr(home, "write_products", watched)
    ltx.optimize(model, rounding=rounding)
    assert distance(run(model, inputs), stock) < CLOSE and not apart  # too few rows
    monkeypatch.setattr(ltx.integrations.linear.products, "ROWS_OF_A_SAMPLE", 1)
    assert distance(run(model, inputs), stock) < CLOSE
    # Output layers of three blocks. The last block has none for the text.
    assert apart == ([] if rounding == "eager" else [(3, 16), (3, 5), (3, 16), (3, 5), (3, 16)])


@pytest.mark.host
@every_path
@pytest.mark.parametrize("of", ["norm", "attention"])
def test_exchanged_submodules(ltx: ModuleType, device: str, family: Family, of: str) -> None:
    """A module that takes another's place after `optimize` is the one that runs."""
    model, stock_model = make(family, device), make(family, device)
    inputs = cast(family.inputs(1), device, torch.float32)
    ltx.optimize(model)
    run(model, inputs)
    form_of = ltx.integrations.engine.norm_forms.form_of
    fits: Any = form_of if of == "norm" else lambda module: isinstance(module, nn.Linear)
    block = next(m for m in model.modules() if "_ltx_kernels" in vars(m) and type(m).__name__.endswith(BLOCK_NAMES))
    name = next(n for n, m in model.named_modules() if m is block)
    paths = [n for n, m in block.named_modules() if n and fits(m)]
    assert paths
    for path in paths:
        kept = [m.get_submodule(f"{name}.{path}") for m in (model, stock_model)]
        for m, old in zip((model, stock_model), kept):
            m.set_submodule(f"{name}.{path}", _Halved(copy.deepcopy(old)))
        for module in model.get_submodule(f"{name}.{path}").modules():
            for attribute in ("_ltx_kernels", "_ltx_kernels_memory", "forward"):
                vars(module).pop(attribute, None)
        assert distance(run(model, inputs), run(stock_model, inputs)) < CLOSE * family.magnifies, path
        for m, old in zip((model, stock_model), kept):
            m.set_submodule(f"{name}.{path}", old)


def _with_weight_in_a_buffer(norm: nn.Module) -> None:
    weight = norm._parameters.get("weight")
    if weight is not None:
        del norm.weight
        norm.register_buffer("weight", 1.25 * weight.detach())


def _with_bias(norm: nn.Module) -> None:
    """As diffusers' RMSNorm may have one."""
    has_one = type(norm).__name__ == "RMSNorm" and type(norm).__module__.startswith("diffusers.")
    if has_one and norm.weight is not None:  # it is added after the weight
        torch.manual_seed(2)
        norm.bias = nn.Parameter(torch.randn(norm.dim, device=norm.weight.device), requires_grad=False)


@pytest.mark.host
@every_path
@pytest.mark.parametrize("change", [_with_weight_in_a_buffer, _with_bias])
@pytest.mark.parametrize("when", ["before", "after"])
def test_other_tensors_of_norms(ltx: ModuleType, device: str, family: Family, change: Any, when: str) -> None:
    """A norm has the weight that its class reads, wherever that is, and the bias."""
    model, stock_model = make(family, device), make(family, device)
    inputs = cast(family.inputs(1), device, torch.float32)
    if when == "after":
        ltx.optimize(model)
        run(model, inputs)
    form_of = ltx.integrations.engine.norm_forms.form_of
    for m in (model, stock_model):
        for module in m.modules():
            if form_of(module) is not None:
                change(module)
    if when == "before":
        ltx.optimize(model)
    assert distance(run(model, inputs), run(stock_model, inputs)) < CLOSE * family.magnifies


@pytest.mark.parametrize("change", ["fewer tokens", "a larger image"])
def test_tables_with_more_rows_than_both_streams(ltx: ModuleType, device: str, change: str) -> None:
    """As in the stock model an error, in recorded calls too: a part of the table would fit each stream."""
    family = families()["qwenimage"]
    model = make(family, device)
    ltx.optimize(model)
    given = cast(family.inputs(2), device, torch.float32)
    with torch.no_grad():
        for _ in range(3):
            model(**given)
        if change == "fewer tokens":
            given["hidden_states"] = given["hidden_states"][:, :-1]
        else:
            frames, height, width = given["img_shapes"][0][0]
            given["img_shapes"] = [[(frames, height, width + 1)]] * 2
        for _ in range(4):
            with pytest.raises(RuntimeError, match=r"image_rotary_emb: expected \d+ rows, as both streams have, got"):
                model(**given)


@every_family
def test_signatures_of_replaced_forwards(ltx: ModuleType, family: Family) -> None:
    """Callers choose by a forward's signature what they pass, and follow ``__wrapped__``, past the guards."""
    model = family.make().eval()
    stock = {name: inspect.signature(module.forward) for name, module in model.named_modules()}
    ltx.optimize(model, graphs=True)
    ours = {name: module.forward for name, module in model.named_modules() if "forward" in vars(module)}
    assert "" in ours and len(ours) > 1
    for name, forward in ours.items():
        assert inspect.signature(forward) == stock[name] and not hasattr(forward, "__wrapped__"), name


def test_denoiser_of_modular_pipelines(ltx: ModuleType, device: str) -> None:
    """The denoiser passes only the inputs that the signature of the model's forward names."""
    denoise = pytest.importorskip("diffusers.modular_pipelines.wan.denoise")
    guider = pytest.importorskip("diffusers.guiders").ClassifierFreeGuidance(guidance_scale=4.0)
    family = FAMILIES["wan-i2v"]
    model, inputs = make(family, device), cast(family.inputs(1), device, torch.float32)
    latents, text = inputs.pop("hidden_states"), inputs.pop("encoder_hidden_states")
    timestep = inputs.pop("timestep")
    config = types.SimpleNamespace(boundary_ratio=0.1)
    components = types.SimpleNamespace(transformer=model, guider=guider, config=config, num_train_timesteps=1000)

    def step() -> tuple[Tensor, ...]:
        state = types.SimpleNamespace(
            prompt_embeds=text,
            negative_prompt_embeds=0.5 * text,
            denoiser_input_fields=inputs,
            num_inference_steps=2,
            latent_model_input=latents,
            attention_kwargs=None,
            dtype=torch.float32,
        )
        denoise.Wan22LoopDenoiser()(components, state, 0, timestep)
        return flat(state.noise_pred)

    stock = step()
    ltx.optimize(model)
    assert distance(step(), stock) < CLOSE * family.magnifies


class _Halved(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * self.module(input)
