"""Tensors that are not plain strided ones: each kind works, or raises one error that says what is not supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers import Make, assert_same_bits, every_case, every_op
from torch import Tensor

every_call = pytest.mark.parametrize("name", list(every_op(Make("cpu", torch.float32))))
# The quantising ops have no derivatives.
every_differentiable_call = pytest.mark.parametrize("name", list(every_case(Make("cpu", torch.float32))))


class Named(torch.Tensor):
    """A subclass that adds nothing."""


@every_call
def test_subclass(ltx: Any, device: str, name: str) -> None:
    """Works, and gives the subclass, as torch's own functions do."""
    case = every_op(Make(device, torch.float32))[name]
    outputs = case.map(lambda tensor: tensor.as_subclass(Named)).run(ltx)
    for output, want in zip(outputs, case.run(ltx), strict=True):
        assert type(output) is Named
        assert_same_bits(output.as_subclass(torch.Tensor), want)


@pytest.mark.host
@every_call
def test_parameters_and_inference_tensors(ltx: Any, device: str, name: str) -> None:
    case = every_op(Make(device, torch.float32))[name]
    expected = case.run(ltx)
    floats = case.map(lambda t: torch.nn.Parameter(t) if t.is_floating_point() else t)
    with torch.no_grad():
        for output, want in zip(floats.run(ltx), expected, strict=True):
            assert_same_bits(output, want)
    with torch.inference_mode():
        inference = case.map(lambda t: t.clone())
    for output, want in zip(inference.run(ltx), expected, strict=True):
        assert_same_bits(output, want)


@every_call
def test_lazily_negated_and_zero_tensors(ltx: Any, device: str, name: str) -> None:
    """Views whose numbers are not those in memory: torch resolves them."""
    case = every_op(Make(device, torch.float32))[name]
    first = next(iter(case.tensors))
    negated = case.replace(**{first: torch._neg_view(case.kwargs[first])})
    expected = case.replace(**{first: -case.kwargs[first]}).run(ltx)
    for output, want in zip(negated.run(ltx), expected, strict=True):
        assert_same_bits(output, want)
    zero = case.replace(**{first: torch._efficientzerotensor(case.kwargs[first].shape, device=device)})
    expected = case.replace(**{first: torch.zeros_like(case.kwargs[first])}).run(ltx)
    for output, want in zip(zero.run(ltx), expected, strict=True):
        assert_same_bits(output, want)


UNSUPPORTED = {
    "sparse": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.flatten(0, -2).to_sparse_csr() if t.dim() > 1 else t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
}
REFUSED = r"Could not run '.*(Sparse|Nested|Quantized)|expected 4 dimensions|NestedTensorImpl doesn't support sizes"


@pytest.mark.host
@every_call
@pytest.mark.parametrize("kind", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore")
def test_layouts_that_are_not_strided(ltx: Any, device: str, name: str, kind: str) -> None:
    """torch's dispatcher refuses them, naming the op and the layout, in whatever argument they come; or their shape is
    no shape of the argument."""
    if kind == "quantized" and device != "cpu":
        pytest.skip("quantised tensors are the CPU's")
    case = every_op(Make(device, torch.float32))[name]
    for operand, tensor in case.tensors.items():
        if operand not in case.kwargs or not tensor.is_floating_point():
            continue
        bad = case.replace(**{operand: UNSUPPORTED[kind](tensor)})
        with pytest.raises((NotImplementedError, RuntimeError), match=REFUSED):
            bad.run(ltx)


@pytest.fixture
def mesh(device: str):
    """A device mesh of two ranks of which this is one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=0, world_size=2, store=fake.FakeStore())
    try:
        yield init_device_mesh(device, (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.host
@every_call
def test_dtensor(ltx: Any, device: str, mesh: Any, name: str) -> None:
    """No sharding strategy is registered: torch says so, for sharded and for replicated tensors."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    case = every_op(Make(device, torch.float32))[name]
    distributed = case.map(lambda t: distribute_tensor(t, mesh, [Replicate()]))
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy registered"):
        distributed.run(ltx)
    first = next(iter(case.tensors))
    if len(case.tensors) > 1:
        mixed = case.replace(**{first: distribute_tensor(case.kwargs[first], mesh, [Replicate()])})
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            mixed.run(ltx)


# ---- Transformations


def first_only(case: Any, module: Any) -> Any:
    """The call as a function of its first tensor."""
    first = next(iter(case.tensors))
    return lambda x: case.replace(**{first: x}).run(module), case.kwargs[first]


@pytest.mark.host
@every_differentiable_call
def test_forward_mode_differentiation(ltx: Any, device: str, name: str) -> None:
    """Tangents are those of the reference; dropping them would be a derivative of zero, unseen."""
    case = every_op(Make(device, torch.float32))[name]
    function, x = first_only(case, ltx)
    truth, _ = first_only(case, ltx.reference)
    tangent = Make(device, torch.float32, seed=1)(*x.shape)
    outputs, tangents = torch.func.jvp(function, (x,), (tangent,))
    expected, expected_tangents = torch.func.jvp(truth, (x,), (tangent,))
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(tangents, expected_tangents)
    assert bool(tangents[0].any())
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(dual[0]).tangent, expected_tangents[0])


@pytest.mark.host
@every_differentiable_call
def test_function_transforms(ltx: Any, device: str, name: str) -> None:
    case = every_op(Make(device, torch.float32))[name]
    function, x = first_only(case, ltx)
    truth, _ = first_only(case, ltx.reference)

    def total(call: Any) -> Any:
        return lambda t: sum((output**3).sum() for output in call(t))

    torch.testing.assert_close(torch.func.grad(total(function))(x), torch.func.grad(total(truth))(x))
    torch.testing.assert_close(torch.func.functionalize(function)(x), function(x))


@every_call
@pytest.mark.filterwarnings("ignore")
def test_vmap(ltx: Any, device: str, name: str) -> None:
    """Runs row by row: torch's fallback, which warns that it is slow."""
    case = every_op(Make(device, torch.float32))[name]
    function, x = first_only(case, ltx)
    batch = torch.stack((x, 2 * x, -x))
    outputs: tuple[Tensor, ...] = torch.vmap(function)(batch)
    for i, one in enumerate(batch):
        for output, want in zip(outputs, function(one), strict=True):
            assert_same_bits(output[i].contiguous(), want.contiguous())
