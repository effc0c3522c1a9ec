"""Models of diffusers, recognised by the names of their classes: nothing of diffusers is imported.

LTX-Video, block by block: norm and modulation in one pass over strided views of table and timestep, which are never
added up in memory; one GEMM for query, key and value; norm and rotation of query and key in one launch; gated residual;
residual, norm and modulation in one launch; GELU in the epilogue of its GEMM. The rotary table is computed once per
shape and kept at half its width, since each angle serves a pair. Attention stays with diffusers where this package has
none that is faster, or something else was asked of diffusers.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._linear import linear_gelu, linear_gelu_op, make_adjacent, packed_linear, packed_linear_op
from .._ops import add_op_namespace_prefix
from .._variant import constant_when_compiled
from ..adaln import adaln_rmsnorm, gated_residual, gated_residual_adaln_rmsnorm
from ..attention import attention, qk_norm_cross_attention, runs_kernel
from ..glu import gelu
from ..norm import layernorm, rmsnorm
from ..quant import adaln_rmsnorm_quant, gated_residual_adaln_rmsnorm_quant, gated_residual_quant, gelu_quant
from ..rope import qk_norm_rope
from ._fp8 import Rows, apply_rows, in_fp8, takes_rows
from ._sites import (
    Entry,
    Plan,
    Site,
    children,
    class_of,
    hooked,
    plain_linear,
    stock_forward,
    why_not_input,
    why_not_norm_call,
    why_not_norm_weight,
)

RMSNORM = "diffusers.models.normalization.RMSNorm"
TORCH_RMSNORM = "torch.nn.modules.normalization.RMSNorm"
TORCH_LAYERNORM = "torch.nn.modules.normalization.LayerNorm"
GELU = "diffusers.models.activations.GELU"
FEED_FORWARD = "diffusers.models.attention.FeedForward"
LTX_BLOCK = "diffusers.models.transformers.transformer_ltx.LTXVideoTransformerBlock"
LTX_ATTENTION = "diffusers.models.transformers.transformer_ltx.LTXAttention"
LTX_PROCESSOR = "diffusers.models.transformers.transformer_ltx.LTXVideoAttnProcessor"
LTX_ROPE = "diffusers.models.transformers.transformer_ltx.LTXVideoRotaryPosEmbed"

# A module whose class is known by its name, and with it its attributes.
Known = Any

# Elements of a head's keys up to which qk_norm_cross_attention is the faster way: 256 keys of 64 columns, 128 of 128.
# (h200-tuning.json, 2 x 8064 queries of 32 heads: 128 keys of 64 columns 73 us with masked keys and 93 without, where
# two norms and cuDNN's attention take 157; 256 keys 104 and 181 of 213; 128 keys of 128 columns, no mask, 163 of 181.)
MOST_KEYS = 16384

# Shapes whose rotary table is kept: a multi-scale pipeline goes back and forth between two.
ROPE_TABLES = 4


# ---- Norms and activations


def rms_norm_forward(self: Known, hidden_states: Tensor) -> Tensor:
    reason = why_not_norm_call(self, hidden_states)
    if reason:
        return stock_forward(self, reason, hidden_states)
    self._ltx_kernels.count_call()
    # torch.nn.RMSNorm rounds once, and a norm without weight has nothing to round between.
    return rmsnorm(hidden_states, self.weight, self.eps)


def torch_rms_norm_forward(self: Known, x: Tensor) -> Tensor:
    return rms_norm_forward(self, x)


def layer_norm_forward(self: Known, input: Tensor) -> Tensor:
    # Besides, at the first call of an op in a graph, inductor of torch 2.11 writes down all that leads to it. Of
    # LTX-Video's last norm, after 28 blocks, that never ends.
    compiles = "torch.compile fuses it with what follows" if torch.compiler.is_compiling() else ""
    reason = why_not_norm_call(self, input) or compiles
    if reason:
        return stock_forward(self, reason, input)
    self._ltx_kernels.count_call()
    return layernorm(input, self.weight, self.bias, self.eps)


def why_not_diffusers_rms_norm(module: Known) -> str:
    return "diffusers' RMSNorm with a weight may change the dtype" if module.weight is not None else ""


def why_not_torch_norm(module: Known) -> str:
    dimensions = len(module.normalized_shape)
    return f"it normalises {dimensions} dimensions" if dimensions != 1 else ""


def gelu_forward(self: Known, hidden_states: Tensor) -> Tensor:
    (linear,) = children(self, "proj")
    reason = why_not_input(hidden_states)
    if reason:
        return stock_forward(self, reason, hidden_states)
    self._ltx_kernels.count_call()
    if self.approximate == "tanh" and linear.bias is not None and plain_linear(linear, hidden_states.dtype):
        function = linear_gelu_op if torch.compiler.is_compiling() else linear_gelu
        return function(hidden_states, linear.weight, linear.bias)
    return gelu(linear(hidden_states), approximate=self.approximate)


# ---- LTX-Video


def _compact_table(table: Tensor) -> Tensor:
    """A stock rotary table without the second of each two equal columns."""
    return table[..., ::2].contiguous()


# Opaque to torch.compile, which would compute the table anew for every second block that reads it: 0.2 ms of a step of
# 49 frames on an H200 (benchmarks/results/h200-ltx.json at 73b16a4).
@torch.library.custom_op(add_op_namespace_prefix("compact_table"), mutates_args=(), schema="(Tensor table) -> Tensor")
def _compact_table_op(table: Tensor) -> Tensor:
    return _compact_table(table)


@_compact_table_op.register_fake
def _(table: Tensor) -> Tensor:
    return table.new_empty(*table.shape[:-1], table.shape[-1] // 2)


def _stock_table(table: Tensor, width: int) -> Tensor:
    """A rotary table as the stock modules take it: each angle at both places of its pair."""
    return table if table.shape[-1] == width else table.repeat_interleave(2, -1)


def ltx_rope_forward(
    self: Known,
    hidden_states: Tensor,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    rope_interpolation_scale: tuple[Tensor, float, float] | None = None,
    video_coords: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The stock table, each angle once: [B, S, D / 2], with B = 1 where the samples of a batch share it."""
    site = self._ltx_kernels
    site.count_call()

    def table() -> tuple[Tensor, Tensor]:
        one = hidden_states[:1] if video_coords is None else hidden_states
        stock = site.stock(self, one, num_frames, height, width, rope_interpolation_scale, video_coords)
        compact = _compact_table_op if torch.compiler.is_compiling() else _compact_table
        return compact(stock[0]), compact(stock[1])

    if torch.compiler.is_compiling():
        return table()
    scales = rope_interpolation_scale or ()
    if any(isinstance(scale, Tensor) for scale in scales) or (video_coords is not None and video_coords.is_inference()):
        return table()  # what these hold may change without a sign
    coordinates = None
    if video_coords is not None:  # pipelines hand the same tensor to every step
        coordinates = id(video_coords), video_coords._version
    model = self.dim, self.theta, self.patch_size, self.patch_size_t
    base = self.base_num_frames, self.base_height, self.base_width
    key = model, base, num_frames, height, width, scales, hidden_states.device, coordinates
    tables = site.cache
    capturing = hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()
    if key in tables:
        found, of = tables[key]
        if of is None or of() is video_coords:
            if capturing:
                _captured.append(found)
            return found
    made = table()
    if not capturing:  # memory that is allocated during a capture belongs to the graph
        while len(tables) >= ROPE_TABLES:
            del tables[next(iter(tables))]
        tables[key] = made, None if video_coords is None else weakref.ref(video_coords)
    return made


# Tables that a CUDA graph reads: they stay where they are, whatever happens to the module.
_captured: list[tuple[Tensor, Tensor]] = []


def _why_not_attention_call(
    self: Known,
    hidden_states: Tensor | Rows,
    encoder_hidden_states: Tensor | None,
    attention_mask: Tensor | None,
    image_rotary_emb: tuple[Tensor, Tensor] | None,
    kwargs: Mapping[str, Any],
) -> str:
    if isinstance(hidden_states, tuple):
        return ""  # asked before
    if kwargs:
        return f"arguments {', '.join(kwargs)}"
    if (encoder_hidden_states is None) == (image_rotary_emb is None):
        return "self-attention without rotary table, or cross-attention with one"
    if attention_mask is not None and (
        attention_mask.dim() != 3
        or attention_mask.shape[1] != 1
        or encoder_hidden_states is None
        or attention_mask.shape[2] != encoder_hidden_states.shape[1]
    ):
        return "a mask of another shape than [B, 1, text]"
    if type(self.processor) is not self._ltx_kernels.settings["processor"]:
        return f"the processor is {class_of(self.processor)}"
    for name in ("norm_q", "norm_k"):
        norm = self._modules[name]
        if hooked(norm):
            return f"{name} has a hook"
        reason = why_not_norm_weight(norm, hidden_states)
        if reason:
            return f"{name}: {reason}"
    return why_not_input(hidden_states)


def _takes_rows(
    attention: Known, linears: tuple[Known, ...], hidden_states: Tensor, context: tuple[Any, Any, Any]
) -> bool:
    """Whether an attention can be handed quantised rows of what would have been like `hidden_states`; `context` is the
    rest of its arguments."""
    site = attention.__dict__.get("_ltx_kernels")
    return (
        site is not None
        and takes_rows(linears, hidden_states)
        and not hooked(attention)
        and not _why_not_attention_call(attention, hidden_states, *context, {})
    )


def _packed_outputs(site: Site, linears: tuple[Known, ...], input: Tensor) -> tuple[Tensor, ...] | None:
    """The outputs of linear layers as parts of one; None where they have to run one by one."""
    if len(linears) == 1 or site.rounding != "fp32" or not all(plain_linear(linear, input.dtype) for linear in linears):
        return None
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(weights)):
        return None
    output = (packed_linear_op if torch.compiler.is_compiling() else packed_linear)(input, weights, biases)
    return None if output is None else output.split([weight.shape[0] for weight in weights], -1)


def _project(site: Site, linears: tuple[Known, ...], input: Tensor | Rows) -> tuple[tuple[Tensor, ...], bool]:
    """(the output of each linear layer, whether they are views of one new tensor)."""
    if isinstance(input, tuple):
        outputs, packed = apply_rows(linears, input)
    else:
        parts = _packed_outputs(site, linears, input)
        packed = parts is not None
        outputs = tuple(linear(input) for linear in linears) if parts is None else parts
    if torch.compiler.is_compiling():
        return outputs, False
    if len(linears) > 1 and not packed and site.rounding == "fp32":
        site.unpacked += 1
    return outputs, packed


_capability = functools.cache(torch.cuda.get_device_capability)


@constant_when_compiled
def _has_tensor_cores(device: torch.device) -> bool:
    return _capability(device) >= (8, 0)


def _op_pays(query: Tensor, keys: int, head_dim: int) -> bool:
    """Whether qk_norm_cross_attention is the faster way: where it has tensor cores."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and head_dim in (64, 128)
        and head_dim * keys <= MOST_KEYS
        and _has_tensor_cores(query.device)
    )


def _may_attend(self: Known) -> bool:
    """Whether an attention may go through an op of this package: nothing was asked of diffusers' dispatch."""
    processor, site = self.processor, self._ltx_kernels
    backends = site.settings["backends"]
    return (
        site.rounding == "fp32"
        and processor._attention_backend is None
        and processor._parallel_config is None
        and backends is not None
        and backends.get_active_backend()[0].value == "native"
    )


def _op_attends(self: Known, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether a cross-attention goes through qk_norm_cross_attention, and not through diffusers' dispatch."""
    return (
        mask is not None
        and mask.is_floating_point()
        and _may_attend(self)
        and _op_pays(query, key.shape[1], query.shape[-1] // self.heads)
    )


def ltx_attention_forward(
    self: Known,
    hidden_states: Tensor | Rows,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    """The stock forward; a block that has quantised the input already, and asked `_takes_rows`, hands over the rows."""
    site = self._ltx_kernels
    reason = _why_not_attention_call(
        self, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, kwargs
    )
    if reason:
        if image_rotary_emb is not None:
            cos, sin = image_rotary_emb
            image_rotary_emb = _stock_table(cos, self.inner_dim), _stock_table(sin, self.inner_dim)
        return stock_forward(
            self, reason, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb, **kwargs
        )
    heads = self.heads
    to_q, to_k, to_v, norm_q, norm_k, to_out = children(self, "to_q", "to_k", "to_v", "norm_q", "norm_k", "to_out")
    attends = False
    if image_rotary_emb is not None:
        (query, key, value), packed = _project(site, (to_q, to_k, to_v), hidden_states)
        query, key = query.unflatten(-1, (heads, -1)), key.unflatten(-1, (heads, -1))
        cos, sin = image_rotary_emb
        if heads == 2:  # half of both heads' width would be taken for the whole of one
            cos, sin = _stock_table(cos, self.inner_dim), _stock_table(sin, self.inner_dim)
        query, key = qk_norm_rope(
            query,
            key,
            norm_q.weight,
            norm_k.weight,
            cos,
            sin,
            norm_q.eps,
            across_heads=True,
            rounding=site.rounding,
            out=(query, key) if packed and not torch.is_grad_enabled() else None,
        )
        value = value.unflatten(-1, (heads, -1))
        attends = _may_attend(self) and runs_kernel(query, key, value)
        site.count_call("qk_norm_rope", *(("attention",) if attends else ()))
    else:
        assert encoder_hidden_states is not None  # or it would have neither
        ((query,), _) = _project(site, (to_q,), hidden_states)
        (key, value), _ = _project(site, (to_k, to_v), encoder_hidden_states)
        attends = _op_attends(self, query, key, attention_mask)
        site.count_call("qk_norm_cross_attention" if attends else "rmsnorm")
        if not attends:
            query, key = rmsnorm(query, norm_q.weight, norm_q.eps), rmsnorm(key, norm_k.weight, norm_k.eps)
        query, key, value = (x.unflatten(-1, (heads, -1)) for x in (query, key, value))
    if attends and attention_mask is None:  # self-attention
        output = attention(query, key, value)
    elif attends:
        assert attention_mask is not None
        mask = attention_mask.squeeze(1)
        output = qk_norm_cross_attention(query, key, value, norm_q.weight, norm_k.weight, norm_q.eps, mask=mask)
    else:
        processor = self.processor
        output = site.settings["dispatch"](
            query,
            key,
            value,
            attn_mask=None if attention_mask is None else attention_mask.unsqueeze(1).expand(-1, heads, -1, -1),
            dropout_p=0.0,
            is_causal=False,
            backend=processor._attention_backend,
            parallel_config=processor._parallel_config,
        )
    projection, dropout = children(to_out, "0", "1")
    output = projection(output.flatten(2, 3).to(query.dtype))
    return dropout(output) if self.training or hooked(dropout) else output


def why_not_ltx_attention(module: Known) -> str:
    if class_of(module.processor) != LTX_PROCESSOR:
        return f"its processor is {class_of(module.processor)}"
    if any(class_of(norm) != TORCH_RMSNORM for norm in (module.norm_q, module.norm_k)):
        return "norm_q or norm_k is not torch.nn.RMSNorm"
    if module.norm_q.eps != module.norm_k.eps or module.norm_q.weight is None or module.norm_k.weight is None:
        return "norm_q and norm_k differ in eps, or have no weight"
    return ""


def attention_settings(module: Known) -> Mapping[str, Any]:
    # From where the processor takes it: another copy of diffusers, or a patched function, is followed.
    processor = type(module.processor)
    dispatch = sys.modules[processor.__module__].dispatch_attention_fn
    home = sys.modules[dispatch.__module__]
    patched = getattr(home, "dispatch_attention_fn", None) is not dispatch
    backends = None if patched else getattr(home, "_AttentionBackendRegistry", None)
    return {"dispatch": dispatch, "backends": backends, "processor": processor}


def pack_attention(attention: Known) -> str:
    """Moves the weights of query, key and value into one storage, as views; or why not."""
    linears = [attention.to_k, attention.to_v]
    if attention.to_q.in_features == attention.to_k.in_features:
        linears.insert(0, attention.to_q)  # a cross-attention finds the last two adjacent as well
    parameters = [p for linear in linears for p in linear.parameters(recurse=False)]
    if not all(type(linear) is nn.Linear and not hooked(linear) for linear in linears):
        return "to_q, to_k or to_v is no plain nn.Linear"
    first = parameters[0]
    for p in parameters:
        if type(p) is not nn.Parameter or p.is_inference() or (p.device, p.dtype) != (first.device, first.dtype):
            return "to_q, to_k or to_v has other than ordinary parameters of one device and dtype"
        if p.device.type not in ("cuda", "cpu"):
            return f"to_q, to_k or to_v is on {p.device}"
    weights = [linear.weight for linear in linears if not in_fp8(linear)]  # those in fp8 are adjacent as they are made
    if weights:
        make_adjacent(weights)
    if all(linear.bias is not None for linear in linears):
        make_adjacent([linear.bias for linear in linears])
    return ""


def _why_not_block_call(self: Known, hidden_states: Tensor, temb: Tensor) -> str:
    reason = why_not_input(hidden_states)
    if reason:
        return reason
    table = self.scale_shift_table
    if type(table) is not nn.Parameter or table.device != hidden_states.device:
        return f"scale_shift_table is on {table.device}, or no ordinary parameter"
    if not table.dtype == temb.dtype == hidden_states.dtype:
        return f"dtypes {hidden_states.dtype}, timestep {temb.dtype}, table {table.dtype}"
    if temb.dim() != 3 or temb.shape[-1] != table.numel():
        return f"a timestep embedding of shape {list(temb.shape)}"
    if torch.is_grad_enabled() and (table.requires_grad or temb.requires_grad):
        return "a gradient is needed"
    if any(hooked(norm) for norm in children(self, "norm1", "norm2")):
        return "norm1 or norm2 has a hook"
    return ""


def ltx_block_forward(
    self: Known,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    encoder_attention_mask: Tensor | None = None,
) -> Tensor:
    site = self._ltx_kernels
    reason = _why_not_block_call(self, hidden_states, temb)
    if reason:
        return stock_forward(
            self, reason, hidden_states, encoder_hidden_states, temb, image_rotary_emb, encoder_attention_mask
        )
    site.count_call()
    rounding = site.rounding
    shift1_table, scale1_table, gate1_table, shift2_table, scale2_table, gate2_table = self.scale_shift_table.unbind(0)
    shift1, scale1, gate1, shift2, scale2, gate2 = temb.unflatten(-1, (6, -1)).unbind(2)
    norm1, attn1, norm2, attn2, ff = children(self, "norm1", "attn1", "norm2", "attn2", "ff")
    rope, text = (None, None, image_rotary_emb), (encoder_hidden_states, encoder_attention_mask, None)

    branch: Tensor | Rows
    modulation1 = {"scale_table": scale1_table, "shift_table": shift1_table}
    if _takes_rows(attn1, children(attn1, "to_q", "to_k", "to_v"), hidden_states, rope):
        branch = adaln_rmsnorm_quant(hidden_states, None, scale1, shift1, norm1.eps, **modulation1)
    else:
        branch = adaln_rmsnorm(hidden_states, None, scale1, shift1, norm1.eps, **modulation1, rounding=rounding)
    # By name, as the stock block does: hooks may look for them.
    attended = attn1(hidden_states=branch, encoder_hidden_states=None, image_rotary_emb=image_rotary_emb)

    if _takes_rows(attn2, children(attn2, "to_q"), hidden_states, text):
        values, scales, hidden_states = gated_residual_quant(attended, hidden_states, gate1, gate_table=gate1_table)
        branch = values, scales
    else:
        hidden_states = gated_residual(attended, hidden_states, gate1, gate_table=gate1_table, rounding=rounding)
        branch = hidden_states
    attended = attn2(
        hidden_states=branch,
        encoder_hidden_states=encoder_hidden_states,
        attention_mask=encoder_attention_mask,
        image_rotary_emb=None,
    )

    modulation2 = {"scale_table": scale2_table, "shift_table": shift2_table}
    after = None, None, scale2, shift2, norm2.eps
    if _ff_takes_rows(ff, hidden_states):
        values, scales, hidden_states = gated_residual_adaln_rmsnorm_quant(
            attended, hidden_states, *after, **modulation2
        )
        output = _ff_of_rows(ff, (values, scales))
    else:
        branch, hidden_states = gated_residual_adaln_rmsnorm(
            attended, hidden_states, *after, **modulation2, rounding=rounding
        )
        output = ff(branch)
    return gated_residual(output, hidden_states, gate2, gate_table=gate2_table, rounding=rounding)


def _ff_takes_rows(ff: Known, hidden_states: Tensor) -> bool:
    """Whether a feed-forward is Linear, GELU, Linear and nothing else, the first of them in fp8."""
    if class_of(ff) != FEED_FORWARD or len(ff.net) != 3:
        return False
    activation, dropout, _ = ff.net
    return (
        class_of(activation) == GELU
        and takes_rows((activation.proj,), hidden_states)
        and not ff.training
        and not any(map(hooked, (ff, activation, dropout)))
    )


def _ff_of_rows(ff: Known, rows: Rows) -> Tensor:
    activation, _, down = ff.net
    (hidden,), _ = apply_rows((activation.proj,), rows)
    if takes_rows((down,), hidden):
        (output,), _ = apply_rows((down,), gelu_quant(hidden, approximate=activation.approximate))
        return output
    return down(gelu(hidden, approximate=activation.approximate))


def keep_table_readers_together(plan: Plan) -> None:
    """Leaves the rotary table of a transformer as it is, unless all that read it know the compact form."""
    for name, (_, entry) in list(plan.modules.items()):
        if entry.forward is not ltx_rope_forward:
            continue
        model = name[: -len("rope")]
        readers = [other for other in plan.left_alone if other.startswith(model) and other.endswith("attn1")]
        if readers:
            del plan.modules[name]
            plan.left_alone[name] = f"{readers[0]}, which reads its table, is left alone"
        elif not any(other.startswith(model) and other.endswith("attn1") for other in plan.modules):
            del plan.modules[name]
            plan.left_alone[name] = "what reads its table is not in the part that was given"


def why_not_ltx_block(module: Known) -> str:
    for norm in (module.norm1, module.norm2):
        if class_of(norm) != RMSNORM:
            return f"norm1 or norm2 is {class_of(norm)}"
        if norm.weight is not None:
            return "norm1 or norm2 has a weight"
    if module.scale_shift_table.shape[0] != 6:
        return f"scale_shift_table has {module.scale_shift_table.shape[0]} rows, expected 6"
    return ""


ENTRIES: Mapping[str, Entry] = {
    RMSNORM: Entry(
        rms_norm_forward, ("rmsnorm",), ("hidden_states",), level="norms", why_not=why_not_diffusers_rms_norm
    ),
    TORCH_RMSNORM: Entry(torch_rms_norm_forward, ("rmsnorm",), ("x",), level="norms", why_not=why_not_torch_norm),
    TORCH_LAYERNORM: Entry(layer_norm_forward, ("layernorm",), ("input",), level="norms", why_not=why_not_torch_norm),
    # The epilogue does not round before the GELU, so "eager" leaves it to torch.
    GELU: Entry(gelu_forward, ("gelu",), ("hidden_states",), frozenset({"proj"}), roundings=("fp32",)),
    LTX_BLOCK: Entry(
        ltx_block_forward,
        ("adaln_rmsnorm", "gated_residual", "gated_residual_adaln_rmsnorm"),
        ("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "encoder_attention_mask"),
        frozenset({"norm1", "attn1", "norm2", "attn2", "ff"}),
        why_not=why_not_ltx_block,
        fp8=(
            ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
            ("attn1.to_out.0",),
            ("attn2.to_q",),
            ("attn2.to_k", "attn2.to_v"),
            ("attn2.to_out.0",),
            ("ff.net.0.proj",),
            ("ff.net.2",),
        ),
        fp8_skip=("*.attn2.to_k", "*.attn2.to_v", "*.attn2.to_out.0"),
    ),
    LTX_ATTENTION: Entry(
        ltx_attention_forward,
        ("qk_norm_rope", "attention", "qk_norm_cross_attention", "rmsnorm"),
        ("hidden_states", "encoder_hidden_states", "attention_mask", "image_rotary_emb", "kwargs"),
        frozenset({"norm_q", "norm_k", "to_q", "to_k", "to_v", "to_out"}),
        why_not=why_not_ltx_attention,
        settings=attention_settings,
        together_with=LTX_ROPE,
    ),
    LTX_ROPE: Entry(
        ltx_rope_forward,
        (),
        ("hidden_states", "num_frames", "height", "width", "rope_interpolation_scale", "video_coords"),
    ),
}
