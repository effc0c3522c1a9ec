"""Parity with the modules whose code the functions replace: diffusers (LTX-Video, FLUX, Wan), transformers, torch.nn.

Modules are built from their own classes with small random configurations. rounding="eager" must give a module's bits
but for flips (helpers.assert_close_to_eager); whole blocks must come as close to the block in fp64 as the stock one.
"""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from helpers import Case, Make, assert_close_to_eager, check, norm_case
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("no_grad")

HALF = [torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)


def library(name: str):
    """A module of diffusers or transformers, or a skip that says what is missing."""
    top = name.partition(".")[0]
    pytest.importorskip(top, reason=f"{top} is not installed")
    return importlib.import_module(name)


def random_(module: nn.Module, device: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Random parameters everywhere, so that a forgotten weight or a swapped pair shows."""
    make = Make("cpu", torch.float32, seed)
    for name, parameter in module.named_parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
        ones = parameter.dim() == 1 and name.endswith("weight")
        parameter.copy_(make(*parameter.shape, std=0.2 if parameter.dim() == 1 else fan_in**-0.5, mean=float(ones)))
    return module.to(device=device, dtype=dtype).eval()


def assert_like_module(ltx, case: Case, *stock: Tensor, **tolerance) -> None:
    """With eager rounding the module's bits but for flips, in fp32 rounding the fp64 truth."""
    check(ltx, case)
    outputs = case.replace(rounding="eager").run(ltx)
    for output, want, terms in zip(outputs, stock, case.terms(ltx), strict=True):
        assert_close_to_eager(output, want, terms, **tolerance)


def relative_error(value: Tensor, truth: Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm()).item()


def assert_as_good_as_stock(ours: Tensor, stock: Tensor, truth: Tensor) -> None:
    assert ours.dtype == stock.dtype
    assert relative_error(ours, truth) <= 1.1 * relative_error(stock, truth) + 2.0**-22
    # And truth has the scale of the block's output, not of a residual that hides the rest.
    assert relative_error(torch.zeros_like(ours), truth) == 1.0


# ---- torch.nn


@every_dtype
@pytest.mark.parametrize("eps", [1e-6, 1e-5, None])
def test_torch_rms_norm(ltx, device, dtype, eps):
    """torch.nn.RMSNorm rounds once."""
    make = Make(device, dtype)
    for width in (64, 250, 2048):
        module = random_(nn.RMSNorm(width, eps=eps), device, dtype)
        x = make(16, width)
        case = Case("rmsnorm", {"input": x, "weight": module.weight, "eps": eps})
        (output,) = check(ltx, case)
        assert_close_to_eager(output, module(x), case.terms(ltx)[0])


@every_dtype
@pytest.mark.parametrize("affine", [True, False])
def test_torch_layer_norm(ltx, device, dtype, affine):
    make = Make(device, dtype)
    for width in (64, 250, 2048):
        module = random_(nn.LayerNorm(width, eps=1e-6, elementwise_affine=affine), device, dtype)
        x = make(16, width)
        case = Case("layernorm", {"input": x, "weight": module.weight, "bias": module.bias, "eps": 1e-6})
        assert_like_module(ltx, case, module(x))


# ---- diffusers: LTX-Video


def ltx_modules():
    return library("diffusers.models.transformers.transformer_ltx")


LTX_SIZES = {"dim": 256, "num_attention_heads": 4, "attention_head_dim": 64, "cross_attention_dim": 96}


def ltx_inputs(device: str, dtype: torch.dtype, tokens_of_temb: int = 1, per_sample_coords: bool = False):
    """(hidden, text, temb, (cos, sin), mask) of a 2 x 3 x 4 latent video, batch 2."""
    make = Make(device, dtype)
    rope = ltx_modules().LTXVideoRotaryPosEmbed(dim=256, base_num_frames=20, base_height=2048, base_width=2048)
    hidden, text = make(2, 24, 256), make(2, 7, 96)
    temb = make(2, 24 if tokens_of_temb > 1 else 1, 6 * 256, std=0.5)
    coords = make(2, 3, 24, dtype=torch.float32).abs() * 50 if per_sample_coords else None
    tables = rope(hidden, 2, 3, 4, (1 / 25 * 8, 32, 32), coords)
    mask = torch.zeros(2, 1, 7, device=device, dtype=dtype)
    mask[1, :, 4:] = -10000.0
    return hidden, text, temb, tables, mask


@every_dtype
@pytest.mark.parametrize("tokens", [1, 24])
def test_ltx_norm_and_modulate(ltx, device, dtype, tokens):
    normalization = library("diffusers.models.normalization")
    hidden, _, temb, _, _ = ltx_inputs(device, dtype, tokens)
    table = Make(device, dtype, seed=5)(6, 256, std=256**-0.5)
    norm = normalization.RMSNorm(256, eps=1e-6, elementwise_affine=False)
    ada = table[None, None] + temb.reshape(2, temb.shape[1], 6, -1)
    shift, scale, gate = ada.unbind(2)[:3]
    views = temb.view(2, temb.shape[1], 6, 256).unbind(2)
    case = Case(
        "adaln_rmsnorm",
        {
            "input": hidden,
            "weight": None,
            "scale": views[1],
            "shift": views[0],
            "scale_table": table[1],
            "shift_table": table[0],
        },
    )
    assert_like_module(ltx, case, norm(hidden) * (1 + scale) + shift)
    attention = Make(device, dtype, seed=6)(2, 24, 256)
    gated = Case("gated_residual", {"input": attention, "residual": hidden, "gate": views[2], "gate_table": table[2]})
    assert_like_module(ltx, gated, hidden + attention * gate)


@every_dtype
@pytest.mark.parametrize("per_sample_coords", [False, True])
def test_ltx_query_key_norm_and_rope(ltx, device, dtype, per_sample_coords):
    """norm_q, norm_k over all channels, then apply_rotary_emb with fp32 [B, S, heads * D] tables, then the heads."""
    module = ltx_modules()
    hidden, _, _, (cos, sin), _ = ltx_inputs(device, dtype, per_sample_coords=per_sample_coords)
    assert cos.shape == (2, 24, 256)
    key = Make(device, dtype, seed=7)(2, 24, 256)
    norm_q, norm_k = (random_(nn.RMSNorm(256, eps=1e-5), device, dtype, seed) for seed in (1, 2))
    rotated = module.apply_rotary_emb(hidden, (cos, sin))
    assert_like_module(ltx, Case("apply_rotary", {"input": hidden, "cos": cos, "sin": sin}), rotated)
    stock = [
        module.apply_rotary_emb(norm(x), (cos, sin)).unflatten(2, (4, -1))
        for norm, x in ((norm_q, hidden), (norm_k, key))
    ]
    case = Case(
        "qk_norm_rope",
        {
            "query": hidden.unflatten(2, (4, -1)),
            "key": key.unflatten(2, (4, -1)),
            "query_weight": norm_q.weight,
            "key_weight": norm_k.weight,
            "cos": cos,
            "sin": sin,
            "eps": 1e-5,
            "across_heads": True,
        },
    )
    assert_like_module(ltx, case, *stock)
    # The values of a pair are duplicated, so half of the table is enough; and the first batch where all are alike.
    half = case.replace(cos=cos[..., ::2], sin=sin[..., ::2])
    assert_like_module(ltx, half, *stock)
    if not per_sample_coords:
        assert_like_module(ltx, case.replace(cos=cos[0], sin=sin[0]), *stock)


def ltx_attention(ltx, attn, hidden, text, tables, mask, rounding):
    """LTXVideoAttnProcessor with the package's q/k norm and rope."""
    q, k, v = attn.to_q(hidden), attn.to_k(text), attn.to_v(text)
    q, k, v = (t.unflatten(2, (attn.heads, -1)) for t in (q, k, v))
    eps, weights = attn.norm_q.eps, (attn.norm_q.weight, attn.norm_k.weight)
    if tables is None:
        q = ltx.rmsnorm(q.flatten(2), weights[0], eps).unflatten(2, (attn.heads, -1))
        k = ltx.rmsnorm(k.flatten(2), weights[1], eps).unflatten(2, (attn.heads, -1))
    else:
        q, k = ltx.qk_norm_rope(q, k, *weights, *tables, eps, across_heads=True, rounding=rounding, out=(q, k))
    mask = None if mask is None else mask[:, None].expand(-1, attn.heads, q.shape[1], -1)
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask)
    return attn.to_out[0](out.transpose(1, 2).flatten(2))


def ltx_block(ltx, block, hidden, text, temb, tables, mask, rounding):
    """LTXVideoTransformerBlock.forward with the package's functions."""
    table = block.scale_shift_table
    mod = temb.view(temb.shape[0], temb.shape[1], 6, -1).unbind(2)
    options = {"rounding": rounding}
    norm = ltx.adaln_rmsnorm(
        hidden, None, mod[1], mod[0], block.norm1.eps, scale_table=table[1], shift_table=table[0], **options
    )
    attention = ltx_attention(ltx, block.attn1, norm, norm, tables, None, rounding)
    hidden = ltx.gated_residual(attention, hidden, mod[2], gate_table=table[2], **options)
    attention = ltx_attention(ltx, block.attn2, hidden, text, None, mask, rounding)
    norm, hidden = ltx.gated_residual_adaln_rmsnorm(
        attention,
        hidden,
        scale=mod[4],
        shift=mod[3],
        eps=block.norm2.eps,
        scale_table=table[4],
        shift_table=table[3],
        **options,
    )
    activation, _, out = block.ff.net
    ff = out(ltx.gelu(activation.proj(norm), approximate="tanh"))
    return ltx.gated_residual(ff, hidden, mod[5], gate_table=table[5], **options)


@every_dtype
@pytest.mark.parametrize("tokens", [1, 24])
@pytest.mark.parametrize("rounding", ["fp32", "eager"])
def test_ltx_block(ltx, device, dtype, tokens, rounding):
    block = random_(ltx_modules().LTXVideoTransformerBlock(**LTX_SIZES), device, dtype)
    inputs = ltx_inputs(device, dtype, tokens)
    stock = block(*inputs)
    wide = copy.deepcopy(block).double()
    hidden, text, temb, tables, mask = inputs
    truth = wide(hidden.double(), text.double(), temb.double(), tables, mask.double())
    ours = ltx_block(ltx, block, *inputs, rounding)
    assert_as_good_as_stock(ours, stock, truth)
    if rounding == "eager" and dtype != torch.float32:
        # A flip spreads through attention and the linear layers; most elements still have the stock model's bits.
        assert (ours == stock).double().mean().item() > 0.5


@every_dtype
def test_ltx_norm_out(ltx, device, dtype):
    """LayerNorm without affine, then modulate by the last table."""
    make = Make(device, dtype)
    hidden, embedded, table = make(2, 24, 256), make(2, 1, 256), make(2, 256)
    norm = nn.LayerNorm(256, eps=1e-6, elementwise_affine=False)
    values = table[None, None] + embedded[:, :, None]
    stock = norm(hidden) * (1 + values[:, :, 1]) + values[:, :, 0]
    modulation = {"scale": embedded, "shift": embedded, "scale_table": table[1], "shift_table": table[0]}
    case = Case("adaln_layernorm", {"input": hidden, "weight": None, **modulation, "eps": 1e-6})
    assert_like_module(ltx, case, stock)


# ---- diffusers: FLUX, Wan and others


@every_dtype
@pytest.mark.parametrize("sequence_dim", [1, 2])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_diffusers_apply_rotary_emb(ltx, device, dtype, sequence_dim, layout):
    """FLUX, HunyuanVideo, CogVideoX: use_real_unbind_dim -1 is interleaved, -2 (Stable Audio, Cosmos) is half."""
    embeddings = library("diffusers.models.embeddings")
    x = Make(device, dtype)(*((2, 12, 3, 32) if sequence_dim == 1 else (2, 3, 12, 32)))
    tables = embeddings.get_1d_rotary_pos_embed(
        32, torch.arange(12, device=device), use_real=True, repeat_interleave_real=layout == "interleaved"
    )
    unbind = -1 if layout == "interleaved" else -2
    stock = embeddings.apply_rotary_emb(x, tables, use_real_unbind_dim=unbind, sequence_dim=sequence_dim)
    case = Case(
        "apply_rotary",
        {"input": x, "cos": tables[0], "sin": tables[1], "sequence_dim": sequence_dim, "layout": layout},
    )
    assert_like_module(ltx, case, stock)


@every_dtype
def test_flux_query_key_norm_and_rope(ltx, device, dtype):
    """Text and image tokens together, per-head torch.nn.RMSNorm, tables [S, D] of FluxPosEmbed."""
    flux = library("diffusers.models.transformers.transformer_flux")
    embeddings = library("diffusers.models.embeddings")
    make = Make(device, dtype)
    image = torch.cartesian_prod(torch.arange(1), torch.arange(3), torch.arange(4))
    ids = torch.cat((torch.zeros(5, 3), image.float())).to(device)
    cos, sin = flux.FluxPosEmbed(theta=10000, axes_dim=[8, 12, 12])(ids)
    assert cos.shape == (17, 32)
    q, k = make(2, 17, 4, 32), make(2, 17, 4, 32)
    norm_q, norm_k = (random_(nn.RMSNorm(32, eps=1e-6), device, dtype, seed) for seed in (1, 2))
    stock = [embeddings.apply_rotary_emb(norm(x), (cos, sin), sequence_dim=1) for norm, x in ((norm_q, q), (norm_k, k))]
    kwargs = {"query": q, "key": k, "query_weight": norm_q.weight, "key_weight": norm_k.weight, "cos": cos, "sin": sin}
    assert_like_module(ltx, Case("qk_norm_rope", {**kwargs, "eps": 1e-6, "across_heads": False}), *stock)


@every_dtype
def test_diffusers_ada_layer_norms(ltx, device, dtype):
    """AdaLayerNormZero deals out shift, scale, gate; AdaLayerNormContinuous scale, shift."""
    normalization = library("diffusers.models.normalization")
    make = Make(device, dtype)
    x, emb = make(2, 9, 64), make(2, 64)
    zero = random_(normalization.AdaLayerNormZero(64), device, dtype)
    stock, _, shift_mlp, scale_mlp, _ = zero(x, emb=emb)
    shift, scale, gate = zero.linear(F.silu(emb)).chunk(6, 1)[:3]
    kwargs = {"input": x, "weight": None, "scale": scale, "shift": shift, "eps": 1e-6}
    assert not scale.is_contiguous()
    assert_like_module(ltx, Case("adaln_layernorm", kwargs), stock)

    # norm2 of FluxTransformerBlock, after the gated residual of attention.
    attention = make(2, 9, 64)
    hidden = x + gate.unsqueeze(1) * attention
    norm = F.layer_norm(hidden, (64,), None, None, 1e-6) * (1 + scale_mlp[:, None]) + shift_mlp[:, None]
    modulation = {"gate": gate, "scale": scale_mlp, "shift": shift_mlp, "eps": 1e-6}
    case = Case("gated_residual_adaln_layernorm", {"input": attention, "residual": x, **modulation})
    assert_like_module(ltx, case, norm, hidden)

    for norm_type in ("layer_norm", "rms_norm"):
        continuous = normalization.AdaLayerNormContinuous(
            64, 64, elementwise_affine=True, eps=1e-6, norm_type=norm_type
        )
        continuous = random_(continuous, device, dtype)
        scale, shift = continuous.linear(F.silu(emb)).chunk(2, 1)
        kwargs = {"input": x, "weight": continuous.norm.weight, "scale": scale, "shift": shift, "eps": 1e-6}
        if norm_type == "layer_norm":
            case = Case("adaln_layernorm", {**kwargs, "bias": continuous.norm.bias})
        else:
            case = Case("adaln_rmsnorm", kwargs)
        assert_like_module(ltx, case, continuous(x, emb))


@every_dtype
def test_diffusers_rms_norm(ltx, device, dtype):
    normalization = library("diffusers.models.normalization")
    x = Make(device, dtype)(2, 9, 96)
    for affine in (True, False):
        module = random_(normalization.RMSNorm(96, eps=1e-6, elementwise_affine=affine), device, dtype)
        assert_like_module(ltx, Case("rmsnorm", {"input": x, "weight": module.weight, "eps": 1e-6}), module(x))


@every_dtype
def test_diffusers_feed_forward(ltx, device, dtype):
    """GEGLU is erf with the gate in the second half; SwiGLU has its gate there too; GELU has a bias."""
    activations = library("diffusers.models.activations")
    x = Make(device, dtype)(2, 9, 48)
    for module, call in (
        (activations.GEGLU(48, 80), lambda h: ltx.geglu(h, gate_first=False, approximate="none", rounding="eager")),
        (activations.SwiGLU(48, 80), lambda h: ltx.swiglu(h, gate_first=False, rounding="eager")),
        (activations.GELU(48, 80, approximate="tanh"), lambda h: ltx.gelu(h, approximate="tanh")),
        (activations.GELU(48, 80), lambda h: ltx.gelu(h)),
    ):
        module = random_(module, device, dtype)
        stock, ours = module(x), call(module.proj(x))
        wide = copy.deepcopy(module).double()
        assert_as_good_as_stock(ours, stock, wide(x.double()))
        if dtype != torch.float32:
            assert (ours == stock).double().mean().item() > 0.95


@every_dtype
def test_wan_block_sites(ltx, device, dtype):
    """Wan keeps norm and modulation in fp32 and rounds once: rounding="fp32" with fp32 modulators."""
    normalization = library("diffusers.models.normalization")
    make = Make(device, dtype)
    x, attention = make(2, 9, 64), make(2, 9, 64)
    table = make(6, 64, dtype=torch.float32, std=0.2)
    temb = make(2, 6, 64, dtype=torch.float32)
    shift, scale, gate = (table + temb).chunk(6, dim=1)[:3]
    norm = normalization.FP32LayerNorm(64, 1e-6, elementwise_affine=False)
    stock = (norm(x.float()) * (1 + scale) + shift).type_as(x)
    kwargs = {"scale": temb[:, 1], "shift": temb[:, 0], "scale_table": table[1], "shift_table": table[0]}
    case = Case("adaln_layernorm", {"input": x, "weight": None, **kwargs, "eps": 1e-6})
    assert_close_to_eager(check(ltx, case)[0], stock, case.terms(ltx)[0])
    stock = (x.float() + attention * gate).type_as(x)
    case = Case("gated_residual", {"input": attention, "residual": x, "gate": temb[:, 2], "gate_table": table[2]})
    assert_close_to_eager(check(ltx, case)[0], stock, case.terms(ltx)[0])


@every_dtype
def test_wan_attention(ltx, device, dtype):
    """The whole attention module: across-head norm of q and k, fp32 tables [1, S, 1, D]."""
    wan = library("diffusers.models.transformers.transformer_wan")
    attn = random_(
        wan.WanAttention(dim=96, heads=2, dim_head=48, eps=1e-6, processor=wan.WanAttnProcessor()), device, dtype
    )
    tables = wan.WanRotaryPosEmbed(48, (1, 2, 2), 64).to(device)(torch.zeros(1, 1, 2, 6, 8, device=device))
    assert tables[0].shape == (1, 24, 1, 48)
    x = Make(device, dtype)(2, 24, 96)
    stock = attn(x, None, None, tables)
    q, k, v = (linear(x).unflatten(2, (2, -1)) for linear in (attn.to_q, attn.to_k, attn.to_v))
    q, k = ltx.qk_norm_rope(q, k, attn.norm_q.weight, attn.norm_k.weight, *tables, attn.norm_q.eps, across_heads=True)
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
    ours = attn.to_out[0](out.transpose(1, 2).flatten(2))
    truth = copy.deepcopy(attn).double()(x.double(), None, None, tables)
    assert_as_good_as_stock(ours, stock, truth)


@pytest.mark.parametrize("width", [48, 128])
def test_rope_3d_is_that_of_wan(ltx, device, width):
    """Wan's split: 2 * (D // 6) channels for h and for w, the rest for t."""
    wan = library("diffusers.models.transformers.transformer_wan")
    cos, sin = wan.WanRotaryPosEmbed(width, (1, 1, 1), 64).to(device)(torch.zeros(1, 1, 2, 6, 8, device=device))
    make = Make(device, torch.float32)
    q, k = make(1, 96, 2, width), make(1, 96, 2, width)
    side = 2 * (width // 6)
    ours = ltx.rope_3d(q, k, 2, 6, 8, rope_dims=(width - 2 * side, side, side))
    for output, want in zip(ours, ltx.apply_rotary_qk(q, k, cos, sin), strict=True):
        torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)


def test_rope_3d_is_that_of_cogvideox(ltx, device):
    """CogVideoX: a quarter of the channels for t, three eighths for h and for w."""
    embeddings = library("diffusers.models.embeddings")
    cos, sin = embeddings.get_3d_rotary_pos_embed(
        64, crops_coords=((0, 0), (3, 4)), grid_size=(3, 4), temporal_size=2, grid_type="slice", max_size=(3, 4)
    )
    make = Make(device, torch.float32)
    q, k = make(1, 24, 2, 64), make(1, 24, 2, 64)
    ours = ltx.rope_3d(q, k, 2, 3, 4, rope_dims=(16, 24, 24))
    for output, x in zip(ours, (q, k), strict=True):
        stock = embeddings.apply_rotary_emb(x, (cos.to(device), sin.to(device)), sequence_dim=1)
        torch.testing.assert_close(output, stock, rtol=1e-5, atol=1e-5)


# ---- transformers


def llama_config(**changes):
    transformers = library("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "vocab_size": 100}
    return transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **changes)


@every_dtype
def test_llama_rms_norm(ltx, device, dtype):
    llama = library("transformers.models.llama.modeling_llama")
    module = random_(llama.LlamaRMSNorm(128, eps=1e-5), device, dtype)
    x = Make(device, dtype)(2, 9, 128)
    case = Case("rmsnorm", {"input": x, "weight": module.weight, "eps": module.variance_epsilon})
    assert_like_module(ltx, case, module(x))
    attention = Make(device, dtype, seed=1)(2, 9, 128)
    hidden = x + attention
    case = Case("rmsnorm_residual", {"input": attention, "residual": x, "weight": module.weight, "eps": 1e-5})
    assert_like_module(ltx, case, module(hidden), hidden)


@every_dtype
def test_gemma_and_t5_norms(ltx, device, dtype):
    gemma = library("transformers.models.gemma.modeling_gemma")
    t5 = library("transformers.models.t5.modeling_t5")
    x = Make(device, dtype)(2, 9, 128)
    module = random_(gemma.GemmaRMSNorm(128, eps=1e-6), device, dtype)
    case = Case("rmsnorm", {"input": x, "weight": module.weight, "eps": 1e-6, "weight_offset": 1.0})
    assert_like_module(ltx, case, module(x))
    if t5.T5LayerNorm.__module__.startswith("transformers"):  # apex replaces it where it is installed
        module = random_(t5.T5LayerNorm(128, eps=1e-6), device, dtype)
        assert_like_module(ltx, Case("rmsnorm", {"input": x, "weight": module.weight}), module(x))


@every_dtype
def test_llama_rotary(ltx, device, dtype):
    """Half rotation on [B, heads, S, D], cos and sin in the model's dtype, fewer key heads."""
    llama = library("transformers.models.llama.modeling_llama")
    rotary = llama.LlamaRotaryEmbedding(llama_config()).to(device)
    make = Make(device, dtype)
    q, k = make(2, 9, 4 * 32).view(2, 9, 4, 32).transpose(1, 2), make(2, 9, 2 * 32).view(2, 9, 2, 32).transpose(1, 2)
    positions = torch.arange(9, device=device)[None] + torch.tensor([[0], [40]], device=device)
    cos, sin = rotary(q, positions)
    assert cos.dtype == dtype
    stock = llama.apply_rotary_pos_emb(q, k, cos, sin)
    case = Case("apply_rotary_qk", {"query": q, "key": k, "cos": cos, "sin": sin, "sequence_dim": 2, "layout": "half"})
    check(ltx, case)
    for output, want in zip(case.replace(rounding="eager").run(ltx), stock, strict=True):
        assert_close_to_eager(output, want)
        assert output.stride() == want.stride()


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rope_1d_is_that_of_llama(ltx, device, theta):
    llama = library("transformers.models.llama.modeling_llama")
    config = llama_config(rope_parameters={"rope_type": "default", "rope_theta": theta})
    rotary = llama.LlamaRotaryEmbedding(config).to(device)
    make = Make(device, torch.float32)
    q, k = make(2, 40, 4, 32), make(2, 40, 2, 32)
    positions = torch.stack((torch.arange(40), torch.arange(40) * 3 + 7)).to(device)
    cos, sin = rotary(q, positions)
    stock = llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for output, want in zip(ltx.rope_1d(q, k, theta, layout="half", positions=positions), stock, strict=True):
        # inverse frequencies are computed in fp32 there, correctly rounded here
        torch.testing.assert_close(output, want, rtol=3e-5, atol=3e-5)


@every_dtype
def test_llama_mlp(ltx, device, dtype):
    llama = library("transformers.models.llama.modeling_llama")
    mlp = random_(llama.LlamaMLP(llama_config()), device, dtype)
    x = Make(device, dtype)(2, 9, 128)
    ours = mlp.down_proj(ltx.swiglu(mlp.gate_proj(x), mlp.up_proj(x), rounding="eager"))
    assert_as_good_as_stock(ours, mlp(x), copy.deepcopy(mlp).double()(x.double()))
    activated = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
    if dtype != torch.float32:
        same = ltx.swiglu(mlp.gate_proj(x), mlp.up_proj(x), rounding="eager") == activated
        assert same.double().mean().item() > 0.97


@every_dtype
def test_qwen3_query_key_norm_and_rope(ltx, device, dtype):
    """Per-head norm that rounds before its weight, then half rotation: no bits of it, but no larger error either."""
    qwen = library("transformers.models.qwen3.modeling_qwen3")
    llama = library("transformers.models.llama.modeling_llama")
    make = Make(device, dtype)
    q, k = make(2, 9, 4, 32), make(2, 9, 2, 32)
    norm_q, norm_k = (random_(qwen.Qwen3RMSNorm(32, eps=1e-6), device, dtype, seed) for seed in (1, 2))
    cos, sin = llama.LlamaRotaryEmbedding(llama_config()).to(device)(q, torch.arange(9, device=device)[None])
    kwargs = {"query": q, "key": k, "query_weight": norm_q.weight, "key_weight": norm_k.weight, "cos": cos, "sin": sin}
    case = Case("qk_norm_rope", {**kwargs, "eps": 1e-6, "across_heads": False, "layout": "half"})
    outputs, truths = check(ltx, case), case.truth(ltx)
    stock = qwen.apply_rotary_pos_emb(norm_q(q), norm_k(k), cos, sin, unsqueeze_dim=2)
    for output, other, truth in zip(outputs, stock, truths, strict=True):
        assert_as_good_as_stock(output, other, truth)


@every_dtype
def test_phi_partial_rotary(ltx, device, dtype):
    """Only the first columns of a head turn; the table's width says how many."""
    phi = library("transformers.models.phi.modeling_phi")
    transformers = library("transformers")
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}
    config = transformers.PhiConfig(hidden_size=160, num_attention_heads=2, rope_parameters=parameters)
    q, k = Make(device, dtype)(2, 2, 9, 80), Make(device, dtype, seed=1)(2, 2, 9, 80)
    cos, sin = phi.PhiRotaryEmbedding(config).to(device)(q, torch.arange(9, device=device)[None])
    assert cos.shape[-1] == 32
    turned = phi.apply_rotary_pos_emb(q[..., :32], k[..., :32], cos, sin)
    case = Case("apply_rotary_qk", {"query": q, "key": k, "cos": cos, "sin": sin, "sequence_dim": 2, "layout": "half"})
    check(ltx, case)
    for output, part, x in zip(case.replace(rounding="eager").run(ltx), turned, (q, k), strict=True):
        assert_close_to_eager(output, torch.cat((part, x[..., 32:]), -1))


@every_dtype
def test_llama_decoder(ltx, device, dtype):
    """All layers of a small model: norms, rotary, MLP and the residual stream through the package's functions."""
    transformers = library("transformers")
    model = random_(transformers.LlamaModel(llama_config(attn_implementation="sdpa")), device, dtype)
    ids = torch.randint(0, 100, (2, 11), generator=torch.Generator().manual_seed(0)).to(device)
    stock = model(ids).last_hidden_state
    truth = copy.deepcopy(model).double()(ids).last_hidden_state

    residual = model.embed_tokens(ids)
    positions = torch.arange(11, device=device)[None]
    eps = model.norm.variance_epsilon
    cos, sin = model.rotary_emb(residual, positions)
    norms = [(layer.input_layernorm.weight, layer.post_attention_layernorm.weight) for layer in model.layers]
    following = [first for first, _ in norms[1:]] + [model.norm.weight]
    hidden = ltx.rmsnorm(residual, norms[0][0], eps, rounding="eager")
    for layer, (_, after_attention), after_mlp in zip(model.layers, norms, following, strict=True):
        attn, mlp = layer.self_attn, layer.mlp
        q, k, v = (p(hidden).unflatten(-1, (-1, 32)) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        q, k = ltx.apply_rotary_qk(q, k, cos, sin, layout="half", rounding="eager", out=(q, k))
        heads = [t.transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))]
        out = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        hidden, residual = ltx.rmsnorm_residual(attn.o_proj(out), residual, after_attention, eps, rounding="eager")
        up = ltx.swiglu(mlp.gate_proj(hidden), mlp.up_proj(hidden), rounding="eager")
        hidden, residual = ltx.rmsnorm_residual(mlp.down_proj(up), residual, after_mlp, eps, rounding="eager")
    assert_as_good_as_stock(hidden, stock, truth)


@pytest.mark.host
def test_case_that_would_miss_a_wrong_module(ltx, device):
    """The tolerance of these tests sees a swapped scale and shift, another eps and another rounding."""
    make = Make(device, torch.bfloat16)
    case = norm_case("adaln_rmsnorm", make, (2, 9, 64))
    stock = case.eager()[0]
    swapped = case.replace(scale=case.kwargs["shift"], shift=case.kwargs["scale"])
    for wrong in (swapped, case.replace(eps=0.01), case):
        with pytest.raises(AssertionError):
            output = wrong.run(ltx)[0] if wrong is case else wrong.replace(rounding="eager").run(ltx)[0]
            assert_close_to_eager(output, stock, case.terms(ltx)[0])
