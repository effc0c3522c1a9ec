"""`optimize(precision="fp8")` on diffusers' LTX-Video: what it computes and leaves alone, memory, and the way back."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.dispatch import PackageOps
from torch import Tensor, nn

pytest.importorskip("diffusers")
from test_integration import (
    ATTENTION,
    BLOCK,
    LAYERS,
    assert_close,
    distance,
    exactly,
    make_inputs,
    make_model,
    offload_groups,
    offload_model,
    offload_sequentially,
    patched,
)

pytestmark = pytest.mark.usefixtures("no_grad", "fp8_device")

LINEARS = 7  # of a block, by default
SKIPPED = ("attn2.to_k", "attn2.to_v", "attn2.to_out.0")


@pytest.fixture
def model(device: str) -> nn.Module:
    return make_model(device, torch.bfloat16)


@pytest.fixture
def inputs(device: str) -> dict[str, Any]:
    return make_inputs(device, torch.bfloat16)


def with_quantised_weights(ltx: ModuleType, model: nn.Module) -> nn.Module:
    """The stock model with the weights that fp8 stands for, its activations in bf16."""
    other = copy.deepcopy(model)
    for block in other.transformer_blocks:
        for name, linear in block.named_modules():
            if isinstance(linear, nn.Linear) and name not in SKIPPED:
                values, scales = ltx.quantize_weight(linear.weight)
                linear.weight.copy_(values.float() * scales[:, None])
    return other


def test_forward(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    stock, exact = model(**inputs)[0], exactly(model, inputs)
    weights_alone = distance(with_quantised_weights(ltx, model)(**inputs)[0], exact)
    report = ltx.optimize(model, precision="fp8")
    ours = model(**inputs)[0]
    assert report.fallbacks == {} and report.left_alone == {}
    calls = {site.name: site.calls for site in report.sites}
    assert calls[BLOCK] == LAYERS and calls[ATTENTION] == 2 * LAYERS and calls["torch.Linear"] == LINEARS * LAYERS
    # Rounding to e4m3 is 2^-4 of a value at most: the activations add about as much as the weights, not more.
    assert distance(stock, exact) < distance(ours, exact) < 2.5 * weights_alone
    report.restore()
    assert torch.equal(model(**inputs)[0], stock) and patched(model) == []
    assert list(model.named_buffers()) == []


def test_only_fused_ops_quantise_what_they_make(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """A block quantises in the ops that it runs anyway; rows of their own are quantised for the attention's output."""
    ltx.optimize(model, precision="fp8")
    with PackageOps(ltx) as ops:
        model(**inputs)
    # adaln_rmsnorm_quant and quantize_rows; gated_residual_quant and gated_residual_adaln_rmsnorm_quant; gelu_quant.
    assert sorted(ops.quantising()) == sorted(
        (["norm_quant"] * 2 + ["residual_norm_quant"] * 2 + ["gelu_quant"]) * LAYERS
    )


def test_projections_are_one_gemm(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Of a model that was not optimized before; and what takes them apart is noticed."""
    report = ltx.optimize(model, precision="fp8")
    want = model(**inputs)[0]
    assert "one by one" not in str(report)
    bias = model.transformer_blocks[0].attn1.to_k.bias
    bias.data = bias.data.clone()
    assert_close(model(**inputs)[0], want)
    assert "projections of diffusers.LTXAttention one by one, 1 x" in str(report)


def test_skip(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    exact = exactly(model, inputs)
    errors = {}
    for skip, linears in (((), 10 * LAYERS), (None, LINEARS * LAYERS), (("*.attn*",), 2 * LAYERS), (("*",), 0)):
        report = ltx.optimize(model, precision="fp8", skip=skip)
        assert report.replaced.get("torch.Linear", 0) == linears
        errors[skip] = distance(model(**inputs)[0], exact)
        assert report.fallbacks == {}
    assert errors[()] > errors[None] > errors[("*",)]


def test_a_block_that_cannot_end_does_not_begin(ltx: ModuleType, model: nn.Module) -> None:
    report = ltx.optimize(model, precision="fp8", stock_weights="free")
    with pytest.raises(RuntimeError, match="with: expected stock weights to restore at its end"), report:
        raise AssertionError("the block has begun")


def test_what_cannot_be_quantised_is_left_alone(ltx: ModuleType, device: str) -> None:
    model = make_model(device, torch.bfloat16)
    inputs = make_inputs(device, torch.bfloat16)

    class Other(nn.Linear):
        pass

    model.transformer_blocks[0].attn1.to_k.__class__ = Other
    down = model.transformer_blocks[1].ff.net[2]
    model.transformer_blocks[1].ff.net[2] = nn.Linear(down.in_features, 64, bias=False, device=device).bfloat16()
    model.transformer_blocks[1].ff.net[2].weight = down.weight
    with pytest.raises(RuntimeError, match=r"transformer_blocks.0.attn1.to_k: it is .*Other, not torch.nn"):
        ltx.optimize(model, precision="fp8", strict=True)
    assert patched(model) == []
    report = ltx.optimize(model, precision="fp8")
    assert list(report.left_alone) == ["transformer_blocks.0.attn1.to_k"]
    assert distance(model(**inputs)[0], exactly(copy.deepcopy(model), inputs)) < 0.1


def test_float32_runs_stock(ltx: ModuleType, device: str) -> None:
    model, inputs = make_model(device), make_inputs(device)
    stock = model(**inputs)[0]
    report = ltx.optimize(model, precision="fp8")
    assert_close(model(**inputs)[0], stock)
    ((reason, count),) = report.fallbacks["torch.Linear"].items()
    assert "bfloat16" in reason and count == LINEARS * LAYERS


def test_changed_weights_are_noticed(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    report = ltx.optimize(model, precision="fp8", stock_weights="beside")
    before = model(**inputs)[0]
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    assert not any("fp8" in name for name in state)
    model.load_state_dict(state)
    ours = model(**inputs)[0]
    assert "call optimize again" in next(iter(report.fallbacks["torch.Linear"]))
    assert distance(ours, before) > 0.01
    ltx.optimize(model, precision="fp8")
    assert distance(model(**inputs)[0], ours) < 0.1


@pytest.mark.parametrize("stock_weights", ["beside", "cpu"])
@pytest.mark.parametrize("how", ["load_state_dict", "functional_call", "parameters"])
def test_exchanged_weights_are_noticed(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], how: str, stock_weights: str
) -> None:
    """Other parameters in the place of those that were quantised: their products, in bf16, and the reason."""
    other = {name: value.clone() * 1.5 for name, value in model.state_dict().items()}
    expected = copy.deepcopy(model)
    expected.load_state_dict(other)
    want = expected(**inputs)[0]
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    model(**inputs)
    if how == "functional_call":
        ours = torch.func.functional_call(model, other, (), inputs)[0]
    elif how == "load_state_dict" and stock_weights == "cpu":
        with pytest.raises(RuntimeError, match="expected no stock weights of layers in fp8"):
            model.load_state_dict(other, assign=True)
        return
    else:
        if how == "load_state_dict":
            model.load_state_dict(other, assign=True)
        else:
            for name, value in other.items():
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, nn.Parameter(value, False))
        ours = model(**inputs)[0]
    assert distance(ours, want) < 0.01
    (reason,) = report.fallbacks["torch.Linear"]
    assert "the weight has changed" in reason or "another parameter" in reason


def test_weights_exchanged_below_a_hook_that_offloads_nothing(
    ltx: ModuleType, device: str, model: nn.Module, inputs: dict[str, Any]
) -> None:
    """An offload puts the same weight into new parameters; a hook that only moves inputs does not."""
    accelerate = pytest.importorskip("accelerate")
    linear = model.transformer_blocks[0].ff.net[2]
    accelerate.hooks.add_hook_to_module(
        linear, accelerate.hooks.AlignDevicesHook(execution_device=device, offload=False)
    )
    other = nn.Parameter(linear.weight * 3, requires_grad=False)
    report = ltx.optimize(model, precision="fp8", stock_weights="beside")
    model(**inputs)
    assert "torch.Linear" not in report.fallbacks
    linear.weight = other
    ours = model(**inputs)[0]
    assert report.fallbacks["torch.Linear"] == {
        "the weight has changed or was trained since it was quantised: call optimize again": 1
    }
    ltx.restore(model)
    assert distance(ours, model(**inputs)[0]) < 0.05


@pytest.mark.parametrize("stock_weights", ["beside", "cpu"])
def test_half_after_optimize(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], stock_weights: str) -> None:
    """The stock model in float16, and back."""
    halves = {name: x.half() if x.is_floating_point() else x for name, x in inputs.items() if isinstance(x, Tensor)}
    halves = {**inputs, **halves}
    want = copy.deepcopy(model).half()(**halves)[0]
    ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    model.half()
    assert distance(model(**halves)[0], want) < 0.01
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float16}
    ltx.restore(model)
    assert torch.equal(model(**halves)[0], want)


@pytest.mark.parametrize("stock_weights", ["beside", "cpu"])
@pytest.mark.parametrize("how", ["parametrized", "removed"])
def test_restore_of_layers_without_a_weight_of_that_name(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], how: str, stock_weights: str
) -> None:
    """People prune or parametrize a linear layer after `optimize`, which renames its parameter."""
    want = model(**inputs)[0]
    ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    linear = model.transformer_blocks[0].ff.net[2]
    if how == "parametrized":
        torch.nn.utils.parametrize.register_parametrization(linear, "weight", nn.Identity(), unsafe=True)
    else:  # as pruning does
        linear.register_parameter("weight_orig", linear._parameters.pop("weight"))
    ltx.restore(model)
    if how == "removed":
        linear.weight = linear._parameters.pop("weight_orig")
    assert patched(model) == []
    assert torch.equal(model(**inputs)[0], want)


@pytest.fixture
def other(model: nn.Module) -> dict[str, Tensor]:
    """Other weights of the model's layers in blocks: as of an EMA, or of a merge by hand."""
    return {
        name: torch.roll(value, 1, 0) * 1.5 if "transformer_blocks" in name and value.dim() == 2 else value.clone()
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("stock_weights", ["cpu", "free"])
@pytest.mark.parametrize("precision", [{"precision": "fp8"}, {"memory": "low"}])
def test_parameters_that_are_given_other_data(
    ltx: ModuleType,
    model: nn.Module,
    inputs: dict[str, Any],
    other: dict[str, Tensor],
    precision: dict[str, str],
    stock_weights: str,
) -> None:
    """Scripts set `parameter.data` to other weights, which are quantised at the next call, and given back."""
    stock = copy.deepcopy(model)
    stock.load_state_dict(other)
    report = ltx.optimize(model, **precision, stock_weights=stock_weights)
    model(**inputs)
    for name, parameter in model.named_parameters():
        parameter.data = other[name].clone()
    if stock_weights == "cpu":
        assert all(torch.equal(value.cpu(), other[name].cpu()) for name, value in model.state_dict().items())
    for _ in range(2):
        ours = model(**inputs)[0]
        assert distance(ours, stock(**inputs)[0]) < 0.1
    assert "quantised again, since their parameters were given" in str(report) and report.fallbacks == {}
    assert model.transformer_blocks[0].attn1.to_q.weight.dtype == torch.float8_e4m3fn
    ltx.optimize(stock, **precision)
    assert torch.equal(ours, stock(**inputs)[0])
    if stock_weights == "cpu":
        ltx.restore(model)
        assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


def test_other_data_beside(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], other: dict[str, Tensor]) -> None:
    """The same with the stock weights beside: these run, until `optimize` is called again. Moves change nothing."""
    stock = copy.deepcopy(model)
    stock.load_state_dict(other)
    report = ltx.optimize(model, precision="fp8", stock_weights="beside")
    want = model(**inputs)[0]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert distance(model(**inputs)[0], want) < 0.01 and report.fallbacks == {}
    for name, parameter in model.named_parameters():
        parameter.data = other[name].clone()
    assert distance(model(**inputs)[0], stock(**inputs)[0]) < 0.02
    (reason,) = report.fallbacks["torch.Linear"]
    assert "the weight has changed" in reason


@pytest.mark.parametrize("calls", [0, 2])
def test_other_data_at_an_earlier_address(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], other: dict[str, Tensor], calls: int
) -> None:
    """An allocator gives an address again, to other weights, whether or not a call saw the weight elsewhere."""
    stock = copy.deepcopy(model)
    stock.load_state_dict(other)
    report = ltx.optimize(model, precision="fp8", stock_weights="beside")
    memories = {name: parameter.data for name, parameter in model.named_parameters()}
    for _ in range(3):
        want = model(**inputs)[0]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    for _ in range(calls):
        assert distance(model(**inputs)[0], want) < 0.01
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_dlpack(memories[name].copy_(other[name]))  # a storage of its own, at this address
        assert parameter.data_ptr() == memories[name].data_ptr()
    assert report.fallbacks == {}
    assert distance(model(**inputs)[0], stock(**inputs)[0]) < 0.02
    (reason,) = report.fallbacks["torch.Linear"]
    assert "the weight has changed" in reason


def test_restore_after_other_data(ltx: ModuleType, model: nn.Module, other: dict[str, Tensor]) -> None:
    """Nothing was called between the write and `restore`, which keeps what was written."""
    ltx.optimize(model, precision="fp8")
    for name, parameter in model.named_parameters():
        parameter.data = other[name].clone()
    ltx.restore(model)
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stock_weights", ["cpu", "free"])
@pytest.mark.parametrize("how", ["copy_", "set_module_tensor_to_device"])
def test_values_written_into_fp8(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], other: dict[str, Tensor], how: str, stock_weights: str
) -> None:
    """Scripts copy weights into the parameters. There they are cast to fp8, and nobody knows scales for them."""
    report = ltx.optimize(model, precision="fp8", stock_weights=stock_weights)
    model(**inputs)
    for name, parameter in list(model.named_parameters()):
        if how == "copy_":
            parameter.copy_(other[name])
        else:
            accelerate = pytest.importorskip("accelerate")
            accelerate.utils.set_module_tensor_to_device(model, name, other[name].device, value=other[name])
    do = (
        "load them into a new model" if stock_weights == "free" else "restore the model, write them, and optimize again"
    )
    with pytest.raises(RuntimeError, match=f"^weight: expected values that were quantised, got others, .*: {do}$"):
        model(**inputs)
    with pytest.raises(RuntimeError, match=r"^save_weights: .* which has changed since"):
        report.save_weights("unused")


def test_writes_that_change_nothing(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """DistributedDataParallel writes every parameter again, with what the first process has."""
    report = ltx.optimize(model, precision="fp8", stock_weights="free")
    want = model(**inputs)[0]
    for parameter in model.parameters():
        parameter.copy_(parameter.clone())
    for part in model, copy.deepcopy(model):
        assert torch.equal(part(**inputs)[0], want)
    assert report.fallbacks == {}


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_optimized_under_inference_mode(
    ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], precision: str
) -> None:
    """The parameters stay ordinary ones, and what is made can be written to later."""
    outside = copy.deepcopy(model)
    ltx.optimize(outside, precision=precision)
    with torch.inference_mode():
        ltx.optimize(model, precision=precision)
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model(**inputs)[0], outside(**inputs)[0])
    model.requires_grad_(True)


@pytest.mark.parametrize("stock_weights", ["beside", "cpu"])
def test_made_under_inference_mode(
    ltx: ModuleType, device: str, model: nn.Module, inputs: dict[str, Any], stock_weights: str
) -> None:
    """The result has the bits of the same model with ordinary parameters."""
    ltx.optimize(model, precision="fp8")
    want = model(**inputs)[0]
    with torch.inference_mode():
        made = make_model(device, torch.bfloat16)
    report = ltx.optimize(made, precision="fp8", stock_weights=stock_weights)
    for _ in range(3):
        assert torch.equal(made(**inputs)[0], want)
    assert report.fallbacks == {}


def test_deepcopy(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    ltx.optimize(model, precision="fp8")
    want = model(**inputs)[0]
    copied = copy.deepcopy(model)
    ltx.restore(model)
    assert torch.equal(copied(**inputs)[0], want)
    ltx.restore(copied)
    assert patched(copied) == []


def test_freed_weights(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any], tmp_path: Any) -> None:
    def held() -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.parameters()}
        return sum(storages.values())

    ltx.optimize(model, precision="fp8", stock_weights="beside")
    want, before = model(**inputs)[0], held()
    ltx.restore(model)
    report = ltx.optimize(model, precision="fp8", stock_weights="free")
    assert torch.equal(model(**inputs)[0], want)
    fp8 = sum(p.nbytes for p in model.parameters() if p.dtype == torch.float8_e4m3fn)
    assert held() == before - fp8 < 0.75 * before and "there is no restore" in str(report)
    for call in (lambda: ltx.restore(model), lambda: ltx.optimize(model)):
        with pytest.raises(RuntimeError, match=r"transformer_blocks.0.attn1.to_q cannot be restored, and nothing was"):
            call()
    with pytest.raises(RuntimeError, match=r"transformer_blocks.0.attn1.to_q.weight is in fp8 alone"):
        model.save_pretrained(tmp_path)
    assert torch.equal(model(**inputs)[0], want)


def test_weights_that_are_stored_in_fp8(ltx: ModuleType, device: str, inputs: dict[str, Any]) -> None:
    """A checkpoint in fp8 (diffusers' layerwise casting): its values are taken as they are."""
    model = make_model(device, torch.bfloat16)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    stock = model(**inputs)[0]
    report = ltx.optimize(model, precision="fp8")
    linear = model.transformer_blocks[0].attn1.to_q
    assert torch.equal(linear.weight.float(), vars(linear)["_ltx_fp8_stock"].to(linear.weight.device).float())
    assert distance(model(**inputs)[0], stock) < 0.1
    assert report.replaced["torch.Linear"] == LINEARS * LAYERS


def test_lora(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Beside the fp8 weights where it is not fused, in them where it is."""
    peft = pytest.importorskip("peft")
    ltx.optimize(model, precision="fp8")
    bare = model(**inputs)[0]
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v", "ff.net.2"], init_lora_weights=False))
    model.requires_grad_(False)
    beside = model(**inputs)[0]
    assert distance(beside, bare) > 0.01
    ltx.restore(model)
    assert distance(beside, model(**inputs)[0]) < 0.1
    model.fuse_lora()
    fused = model(**inputs)[0]
    model.unload_lora()
    report = ltx.optimize(model, precision="fp8")
    assert report.replaced["torch.Linear"] == LINEARS * LAYERS
    assert distance(model(**inputs)[0], fused) < 0.1
    assert report.fallbacks == {}


@pytest.mark.parametrize("order", ["offload first", "optimize first"])
@pytest.mark.parametrize(
    "offload",
    [offload_model, offload_sequentially, offload_groups("block_level"), offload_groups("leaf_level")],
    ids=["model", "sequential", "group, blocks", "group, leaves"],
)
def test_offload(ltx: ModuleType, device: str, inputs: dict[str, Any], offload: Any, order: str) -> None:
    reference = make_model(device, torch.bfloat16)
    ltx.optimize(reference, precision="fp8")
    want = reference(**inputs)[0]
    model = make_model("cpu", torch.bfloat16)
    if order == "offload first":
        offload(model, device)
    ltx.optimize(model, precision="fp8")
    if order == "optimize first":
        offload(model, device)
    for _ in range(2):
        assert distance(model(**inputs)[0], want) < 0.05
    ltx.restore(model)


def test_options_that_do_not_go_together(ltx: ModuleType, model: nn.Module) -> None:
    for options, text in (
        ({"precision": "int8"}, "precision: expected"),
        ({"precision": "fp8", "level": "norms"}, "goes with level"),
        ({"precision": "fp8", "rounding": "eager"}, "goes with level"),
        ({"skip": ()}, "skip, stock_weights and weights: expected precision"),
        ({"stock_weights": "free"}, "skip, stock_weights and weights: expected precision"),
        ({"precision": "fp8", "skip": "*.ff.*"}, "skip: expected a list"),
    ):
        with pytest.raises(ValueError, match=text):
            ltx.optimize(model, **options)
    assert patched(model) == []


def test_old_gpu(ltx: ModuleType, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ltx.integrations.selection, "fp8_obstacle", lambda device: "NVIDIA A100 (8.0)")
    with pytest.raises(RuntimeError, match=r"precision: expected .* 8.9 or newer .* got NVIDIA A100 \(8.0\)"):
        ltx.optimize(model, precision="fp8")
    assert patched(model) == []


@pytest.mark.slow
def test_compile(ltx: ModuleType, model: nn.Module, inputs: dict[str, Any]) -> None:
    report = ltx.optimize(model, precision="fp8")
    want = model(**inputs)[0]
    got: Tensor = torch.compile(model, fullgraph=True)(**inputs)[0]
    assert distance(got, want) < 0.02
    assert set(report.fallbacks) == {"torch.LayerNorm"}  # which torch.compile fuses with what follows
    assert {site.name: site.traces for site in report.sites}[BLOCK] == LAYERS


def test_cuda_graph(ltx: ModuleType, cuda_graphs: str, model: nn.Module, inputs: dict[str, Any]) -> None:
    ltx.optimize(model, precision="fp8")
    want = model(**inputs)[0]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(**inputs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = model(**inputs)[0]
    graph.replay()
    assert torch.equal(got, want)


def test_products_by_torch_are_counted(
    ltx: ModuleType, device: str, model: nn.Module, inputs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package does not call cuBLASLt itself, the report says so; the CPU has no product but its own."""
    own = device == "cpu" or ltx.quant.has_own_product(torch.device("cuda", torch.cuda.current_device()))
    report = ltx.optimize(model, precision="fp8")
    model(**inputs)
    remark = "products by torch._scaled_mm, torch.Linear"
    assert (remark in str(report)) != own
    ((site,),) = ([site for site in report.sites if site.name == "torch.Linear"],)
    before = dict(site.remarks)
    rows = (torch.empty(1, device="meta"),) * 2
    monkeypatch.setattr(ltx.integrations.linear.products, "has_own_product", lambda device: False)
    ltx.integrations.linear.products.count_products([model.transformer_blocks[0].attn1.to_q], rows)
    assert dict(site.remarks) == {
        **before,
        "products by torch._scaled_mm": before.get("products by torch._scaled_mm", 0) + 1,
    }


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_a_wrapped_attention_of_a_language_model(ltx: ModuleType, device: str, precision: str) -> None:
    """A module of somebody else's around it stays as it is, and what it holds is called."""
    pytest.importorskip("transformers")
    from helpers.language_models import make_ids
    from helpers.language_models import make_model as make_language_model

    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **given: Any) -> Any:
            hidden, *others = self.inner(**given)
            return -2 * hidden, *others

    model, ids = make_language_model(device, torch.bfloat16), make_ids(device)
    model.model.layers[1].self_attn = Wrapped(model.model.layers[1].self_attn)
    with torch.no_grad():
        unwrapped = copy.deepcopy(model)
        unwrapped.model.layers[1].self_attn = unwrapped.model.layers[1].self_attn.inner
        expected = model(ids).logits
        assert distance(unwrapped(ids).logits, expected) > 0.4
        ltx.optimize(model, precision=precision)
        for _ in range(3):
            assert distance(model(ids).logits, expected) < 0.25
