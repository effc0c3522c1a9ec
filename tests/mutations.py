"""Plants defects in copies of the sources, and writes down which test fails for each.

python tests/mutations.py                         # on the CPU backend; minutes, for each defect is built
python tests/mutations.py --backend tools         # in what is not compiled, with the variant in build/; minutes
python tests/mutations.py --backend cuda          # needs nvcc and a GPU
python tests/mutations.py --backend cuda --build-only /tmp/mutants    # and, where the GPU is:
python tests/mutations.py --backend cuda --built /tmp/mutants

A defect that no test notices is an error.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "benchmarks")]

from helpers.files import path_of  # noqa: E402
from helpers.mutation import Mutation  # noqa: E402
from helpers.tool_defects import TOOL_DEFECTS  # noqa: E402

PYTHON = "torch-ext/ltx_kernels/"
CUDA_ROPE, CUDA_ATTENTION, CUDA_GENERAL = (
    "kernel_src/rope.cu",
    "kernel_src/attention.cu",
    "kernel_src/ltx/row/general.cuh",
)
ROW_KERNEL, ROW_VECTORS = "kernel_src/ltx/row/kernel.cuh", "kernel_src/ltx/row/vectors.cuh"
ROW_OPERANDS, CUDA_REDUCE = "kernel_src/ltx/row/operands.cuh", "kernel_src/ltx/reduce.cuh"
CPU_NORM, CPU_ROPE, CPU_PARALLEL = "kernel_src/cpu/norm.cpp", "kernel_src/cpu/rope.cpp", "kernel_src/cpu/parallel.h"
CPU_QUANT = "kernel_src/cpu/quant.cpp"
CPU_ATTENTION, ATTENTION_TESTS = "kernel_src/cpu/attention.cpp", ("sanitize",)
CUDA_HOPPER, CUDA_INTEGERS = "kernel_src/attention_hopper.cu", "kernel_src/ltx/attention_integers.cuh"
CPU_ROW_SUMS, ROW_SUMS_TESTS = "kernel_src/cpu/row_sums.cpp", ("row_sums",)
CPU_NORM_BACKWARD, CPU_ROPE_BACKWARD = "kernel_src/cpu/norm_backward.cpp", "kernel_src/cpu/rope_backward.cpp"
CPU_NORM_GRADIENT = "kernel_src/cpu/norm_gradient.h"
CPU_GLU_BACKWARD, BACKWARD_TESTS = "kernel_src/cpu/glu_backward.cpp", ("backward",)
CUDA_LINEAR = "torch-ext/linear.cpp"
CUDA_GLU, CUDA_NORM_QUANT, CUDA_FP8 = "kernel_src/glu.cu", "kernel_src/norm_quant.cu", "kernel_src/ltx/fp8.cuh"
CPU_GROUP_NORM = "kernel_src/cpu/group_norm.cpp"
GROUP_NORM_BINDING = "torch-ext/group_norm.cpp"
BOTH = ("cpu", "cuda")  # what stands in the bindings or in Python

MUTATIONS = [
    Mutation(
        "int32 row offset",
        CPU_PARALLEL,
        "int64_t offset = column * view.column_stride;\n"
        "    for (int d = 0; d < rows_.ndim; ++d) offset += index_[d] * view.stride[d];",
        "int32_t offset = static_cast<int32_t>(column * view.column_stride);\n"
        "    for (int d = 0; d < rows_.ndim; ++d) offset += static_cast<int32_t>(index_[d] * view.stride[d]);",
    ),
    Mutation(
        "int32 row offset, rotary",
        CPU_ROPE,
        "return batch * stride.batch + token * stride.sequence + head * stride.head;",
        "return static_cast<int32_t>(batch * stride.batch + token * stride.sequence + head * stride.head);",
    ),
    Mutation(
        "eps ignored",
        "torch-ext/op_inputs.h",
        'p.eps = check_eps(a.eps, a.norms_branch ? "eps2" : "eps");',
        "p.eps = check_eps(a.eps) * 0 + 1e-6f;",
        backends=BOTH,
    ),
    Mutation(
        "eps hard-coded in q/k norm and rotary",
        "torch-ext/rope.cpp",
        "r.eps = check_eps(",
        "r.eps = 0 * check_eps(",
        backends=BOTH,
    ),
    Mutation(
        "weight multiplied before the cast",
        CPU_NORM,
        "rstd_about(row, 0.f, eps), weight_in_fp32 ? DType::kFloat32 : dtype, row.width);",
        "rstd_about(row, 0.f, eps), DType::kFloat32, row.width);",
    ),
    Mutation(
        "shift and scale swapped",
        "torch-ext/norm.cpp",
        'a.scale = arg("scale", scale);\n  a.shift = arg("shift", shift);\n  a.out_gate',
        'a.scale = arg("scale", shift);\n  a.shift = arg("shift", scale);\n  a.out_gate',
        backends=BOTH,
    ),
    Mutation(
        "gate from the wrong half",
        "torch-ext/op_inputs.h",
        "RowView& second = a.gate_first ? up : gate;",
        "RowView& second = a.gate_first ? gate : up;",
        backends=BOTH,
    ),
    Mutation(
        "last column unwritten",
        "kernel_src/cpu/simd.h",
        "__builtin_expect(count >= kLanes, 1) ? store(p, x) : store_tail(p, x, count);",
        "__builtin_expect(count >= kLanes, 1) ? store(p, x) : store_tail(p, x, count > 1 ? count - 1 : count);",
    ),
    Mutation(
        "one element past the row read",
        "kernel_src/cpu/simd.h",
        "return __builtin_expect(count >= kLanes, 1) ? load(p) : load_tail(p, count);",
        "return __builtin_expect(count >= kLanes, 1) ? load(p) : load_tail(p, count + 1);",
    ),
    Mutation(
        "geometry chosen by row count",
        CPU_NORM,
        "write_row<T, kKept>(row, mean, 1.f / std::sqrt(variance + eps));",
        "write_row<T, kKept>(row, mean, (count > 4 ? 1.0000002f : 1.f) / std::sqrt(variance + eps));",
    ),
    Mutation(
        "`out` ignored",
        PYTHON + "_call.py",
        "            into(*given)\n            count_writes(",
        "            functional(*arguments)\n            count_writes(",
        backends=BOTH,
    ),
    Mutation(
        "rope pairs half-rotated",
        CPU_ROPE,
        "store_upto(out + half + c, turned(second, first, half + c), half - c);",
        "store_upto(out + half + c, second, half - c);",
    ),
    Mutation(
        "rope pairs half-rotated, interleaved",
        CPU_ROPE,
        "turn.sin[2 * p + 1] = pairs.sin[p];",
        "turn.sin[2 * p + 1] = 0.f;",
    ),
    Mutation(
        "variance as E[x^2] - mean^2",
        CPU_NORM,
        "variance = sum_row(row.width, HiddenTerm<T, kKept, true>{row, mean}) / width;",
        "variance = sum_row(row.width, HiddenTerm<T, kKept, true>{row, 0.f}) / width - mean * mean;",
    ),
    Mutation(
        "rope exponent over half the dimension",
        "torch-ext/rope.cpp",
        "2.0 * j / dim",
        "4.0 * j / dim",
    ),
    Mutation(
        "a table of one batch read as one of each",
        "torch-ext/tensor_checks.h",
        "if (e.per_batch) return d == 0 && e.a->size[0] != 1 ? e.a->stride[0] : 0;",
        "if (e.per_batch) return d == 0 ? e.a->stride[0] : 0;",
    ),
    Mutation(
        "fp32 weight read as the input's dtype",
        "torch-ext/tensor_checks.h",
        "view.dtype = float_dtype(a);",
        "view.dtype = float_dtype(input_);",
    ),
    Mutation(
        "a scale for each token read as one for each batch",
        "torch-ext/tensor_checks.h",
        "const bool per_batch = a.dim == 2 && input_.dim >= 3;",
        "const bool per_batch = a.dim >= 2 && input_.dim >= 3;",
    ),
    Mutation(
        "an output with the input's strides",
        "torch-ext/norm.cpp",
        "weight_offset, statistic, rounding);\n  Tensor out = empty_like_rows(a.input);",
        "weight_offset, statistic, rounding);\n  Tensor out = torch::stable::empty_like(input);",
    ),
    Mutation(
        "an unsupported dtype falls through",
        "torch-ext/tensor_checks.h",
        "  fail(a.name, expected, dtype_text(a.dtype));",
        "  return DType::kFloat32;",
    ),
    Mutation(
        "outputs that overlap themselves taken",
        "torch-ext/tensor_checks.h",
        "if (!has_own_memory(out)) {",
        "if (false) {",
    ),
    Mutation(
        "keys past the last one attended to",
        CPU_ATTENTION,
        "std::fill(row + keys, row + padded, -kInfinity);",
        "std::fill(row + keys, row + padded, 0.f);",
        tests=ATTENTION_TESTS,
    ),
    Mutation(
        "norm of query and key over one head",
        CPU_ATTENTION,
        "rstd[token] = rms_rstd(row, width, p.eps);",
        "rstd[token] = rms_rstd(row, p.head_dim, p.eps);",
        tests=ATTENTION_TESTS,
    ),
    Mutation(
        "the mask of the first batch for all",
        "torch-ext/attention.cpp",
        "stride_batch = mask.size[0] == 1 ? 0 : mask.stride[0];",
        "stride_batch = 0;",
        tests=ATTENTION_TESTS,
    ),
    Mutation(
        "32-bit row offset (CUDA)",
        ROW_OPERANDS,
        "return view.data + static_cast<uint64_t>(view.outer) * blockIdx.y + static_cast<uint64_t>(view.inner) * row;",
        "return view.data + (view.outer * blockIdx.y + view.inner * row);",
        backends=("cuda",),
    ),
    Mutation(
        "32-bit row offset, rotary (CUDA)",
        CUDA_ROPE,
        "return batch * s.batch + token * s.sequence + head * s.head;",
        "return static_cast<int32_t>(batch * s.batch + token * s.sequence + head * s.head);",
        backends=("cuda",),
    ),
    Mutation(
        "32-bit row offset, rotary's main line (CUDA)",
        CUDA_ROPE,
        "return static_cast<uint64_t>(s.batch) * batch + static_cast<uint64_t>(s.sequence) * token +\n"
        "         static_cast<uint64_t>(s.head) * head;",
        "return s.batch * batch + s.sequence * token + s.head * head;",
        backends=("cuda",),
    ),
    Mutation(
        "weight multiplied before the cast (CUDA)",
        ROW_VECTORS,
        "const bool round_before_weight = S == Statistic::kRms && weight_offset == 0.f && !load.weighs_unrounded();",
        "const bool round_before_weight = false;",
        backends=("cuda",),
    ),
    Mutation(
        "last column unwritten (CUDA)",
        CUDA_GENERAL,
        "width, packed & (load.second ? kOut2 : kOut),",
        "width - 1, packed & (load.second ? kOut2 : kOut),",
        backends=("cuda",),
    ),
    Mutation(
        "one element past the row read (CUDA)",
        ROW_VECTORS,
        "p.rows.width, packed & kInput),",
        "p.rows.width + 1, packed & kInput),",
        backends=("cuda",),
    ),
    Mutation(
        "geometry chosen by row count (CUDA)",
        ROW_KERNEL,
        "const Geometry g = geometry(p.rows.width,",
        "const Geometry g = geometry(p.rows.count < 4 ? 2 * p.rows.width : p.rows.width,",
        backends=("cuda",),
    ),
    Mutation(
        "variance as E[x^2] - mean^2 (CUDA)",
        CUDA_REDUCE,
        "__fsub_rn(h[i], mean) : h[i];\n    if (i < count) sum[i % 2] = fmaf(x, x, sum[i % 2]);",
        "__fsub_rn(h[i], 0.f) : h[i];\n"
        "    if (i < count) sum[i % 2] = fmaf(x, x, sum[i % 2]) - (kCentred ? mean * mean : 0.f);",
        backends=("cuda",),
    ),
    Mutation(
        "rope pairs half-rotated (CUDA)",
        CUDA_ROPE,
        "b[i] = turn_one(b[i], a0, turn.cos_b[i], turn.sin_b[i], eager, dtype);",
        "b[i] = turn_one(b[i], 0.f, turn.cos_b[i], turn.sin_b[i], eager, dtype);",
        backends=("cuda",),
    ),
    Mutation(
        "last column unwritten, activations (CUDA)",
        CUDA_GLU,
        "column, p.out.column_stride, width, false, to_pack<T, kWidth>(x));",
        "column, p.out.column_stride, width - 1, false, to_pack<T, kWidth>(x));",
        backends=("cuda",),
    ),
    Mutation(
        "the first row's second half for all (CUDA)",
        CUDA_GLU,
        "reinterpret_cast<const P*>(p.up + first_row * p.up_stride)[pack];",
        "reinterpret_cast<const P*>(p.up)[pack];",
        tests=("glu",),
        backends=("cuda",),
    ),
    Mutation(
        "a NaN left out of a row's largest magnitude (CUDA)",
        CUDA_FP8,
        "max.NaN.f32",
        "max.f32",
        tests=("quant",),
        backends=("cuda",),
    ),
    Mutation(
        "pairs of quantised values swapped (CUDA)",
        CUDA_FP8,
        "word[i / 4] = low | high << 16;",
        "word[i / 4] = high | low << 16;",
        tests=("quant",),
        backends=("cuda",),
    ),
    Mutation(
        "a missing device guard (CUDA)",
        "torch-ext/tensor_checks.h",
        "!= input.device_index) guard_.emplace(input.device_index);",
        '< 0) throw std::runtime_error("no device");',
        tests=("processes", "sass"),
        backends=("cuda",),
    ),
    Mutation(
        "scales of rows and of channels swapped (CUDA)",
        CUDA_LINEAR,
        "set(kAScalePointer, a.weight_scales.data) && set(kBScalePointer, a.scales.data)",
        "set(kAScalePointer, a.scales.data) && set(kBScalePointer, a.weight_scales.data)",
        tests=("linear",),
        backends=("cuda",),
    ),
    Mutation(
        "a bias left out of a product (CUDA)",
        CUDA_LINEAR,
        'a.bias = arg("bias", bias);',
        "",
        tests=("linear",),
        backends=("cuda",),
    ),
    Mutation(
        "the scales of the first product of its shape for all (CUDA)",
        CUDA_LINEAR,
        "usable_ = usable_ && set_pointers(a) &&",
        "usable_ = usable_ &&",
        tests=("linear",),
        backends=("cuda",),
    ),
    Mutation(
        "products on the default stream (CUDA)",
        CUDA_LINEAR,
        "&algorithm_, nullptr, 0, stream)",
        "&algorithm_, nullptr, 0, nullptr)",
        tests=("linear",),
        backends=("cuda",),
    ),
    Mutation(
        "forward-mode tangents dropped",
        PYTHON + "_checks.py",
        "if forward_ad._current_level >= 0:",
        "if False:",
        tests=("tensor_kinds",),
    ),
    Mutation(
        "packs of a head's row a warp apart (CUDA)",
        ROW_KERNEL,
        "constexpr int kStep = (kShort ? kThreads : 32) * kWidth;",
        "constexpr int kStep = 32 * kWidth;",
        tests=("quant",),
        backends=("cuda",),
    ),
    Mutation(
        "modulated rows of later batches written over the first's (CUDA)",
        CUDA_NORM_QUANT,
        "p.scales + static_cast<int64_t>(blockIdx.y) * p.rows + row);",
        "p.scales + row);",
        tests=("quant",),
        backends=("cuda",),
    ),
    Mutation(
        "one pack of the scale for all of a thread's (CUDA)",
        CUDA_NORM_QUANT,
        "data[((k * 2 + vector) * kFours + i) * 32];",
        "data[(vector * kFours + i) * 32];",
        tests=("quant",),
        backends=("cuda",),
    ),
    Mutation(
        "no kernel of its own for a modulation with tables (CUDA)",
        CUDA_NORM_QUANT,
        "if (S == Statistic::kRms && modulated && launch_held<T>(p, context)) return;",
        "",
        tests=("quant::test_modulated_rows_of_known_lengths",),
        backends=("cuda",),
    ),
    Mutation(
        "a scale that is not positive left to torch's attention",
        PYTHON + "attention.py",
        "-math.inf < scale <= 0:",
        "False:",
        tests=("plain_attention",),
        backends=BOTH,
    ),
    Mutation(
        "sums of the keys before not rescaled (CUDA)",
        CUDA_ATTENTION,
        "if constexpr (!kOnlyChunk) {",
        "if constexpr (false) {",
        tests=("attention",),
        backends=("cuda",),
    ),
    Mutation(
        "keys that count left out as padding (CUDA)",
        CUDA_ATTENTION,
        "constexpr float kZeroWeight = -127.f;",
        "constexpr float kZeroWeight = -3.f;",
        tests=("attention",),
        backends=("cuda",),
    ),
    Mutation(
        "keys past the last one attended to (CUDA)",
        CUDA_ATTENTION,
        "shared.mask[row] = row < keys ? mask_of(p, sample, first + row) : -INFINITY;",
        "shared.mask[row] = row < keys ? mask_of(p, sample, first + row) : 0.f;",
        tests=("attention",),
        backends=("cuda",),
    ),
    Mutation(
        "keys past the last one attended to, on Hopper (CUDA)",
        CUDA_HOPPER,
        "scores[i] = key < from[i / 2 % 2] ? scores[i] : none;",
        "scores[i] = key < from[i / 2 % 2] ? scores[i] : Score(0);",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "causal attention to all keys (CUDA)",
        CUDA_HOPPER,
        "{min(left, row + 1), min(left, row + 9)}",
        "{min(left, row + 1), left}",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "causal tiles to the last key (CUDA)",
        CUDA_HOPPER,
        "S::kCausal ? min(keys.length, row + 1) : keys.length",
        "keys.length",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "the head of the keys that has the number of the query's (CUDA)",
        CUDA_HOPPER,
        "const int key_head = at.head / a.group;",
        "const int key_head = at.head;",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "tiles of keys of the head that has the number of the query's (CUDA)",
        CUDA_HOPPER,
        "key_at.head /= a.group;",
        "",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "rows that leave the range of fp32 not computed once more (CUDA)",
        CUDA_HOPPER,
        "__ballot_sync(0xffffffffu, fails && row < p.queries && keys.count != 0)",
        "__ballot_sync(0xffffffffu, false)",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "rows computed once more without their maximum (CUDA)",
        CUDA_HOPPER,
        "maximum = warp_max(maximum);\n  if (maximum == -INFINITY)",
        "maximum = 0.f;\n  if (maximum == -INFINITY)",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "a row's sum without the half of its keys (CUDA)",
        CUDA_HOPPER,
        "return x + __shfl_xor_sync(0xffffffffu, x, 2);",
        "return x;",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "logits in units of ln in place of log2 (CUDA)",
        CUDA_HOPPER,
        "a.scale = p.scale * kLog2E;",
        "a.scale = p.scale;",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "every piece of split keys has the first ones (CUDA)",
        CUDA_HOPPER,
        "keys.keep(at.piece * S::kPieceTiles, S::kPieceTiles);",
        "keys.keep(0, S::kPieceTiles);",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "the last piece of split keys left out (CUDA)",
        CUDA_HOPPER,
        "for (int i = 0; i < pieces; ++i) {",
        "for (int i = 0; i + 1 < pieces; ++i) {",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "pieces of split keys added up as if their sums were equal (CUDA)",
        CUDA_HOPPER,
        "const float weight = exp2_fast(lse[i * p.queries] - maximum) * inverse;",
        "const float weight = inverse;",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "a row of split keys that fails in one piece not computed once more (CUDA)",
        CUDA_HOPPER,
        "if (__any_sync(0xffffffffu, fails)) {",
        "if (false) {",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "keys split where few heads attend alone (CUDA)",
        CUDA_HOPPER,
        "const bool splits = p.queries",
        "const bool splits = p.batch * p.heads < 50 && p.queries",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "strides of zero in tensor maps (CUDA)",
        "torch-ext/attention.cpp",
        "Operand(arg, !lies_in_packs(arg, 1))",
        "Operand(arg, !lies_in_packs(arg, 0))",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "a kernel without derivatives where a gradient is needed (CUDA)",
        PYTHON + "attention.py",
        "and not (is_grad_enabled() and requires_grad(query, key, value))",
        "and not requires_grad()",
        tests=("plain_attention",),
        backends=("cuda",),
    ),
    Mutation(
        "the mean left in the keys of the attention in 8 bits (CUDA)",
        CUDA_INTEGERS,
        "x[i * 8 + j] -= mean[j];",
        "x[i * 8 + j] -= 0.f * mean[j];",
        tests=("attention_int8",),
        backends=("cuda",),
    ),
    Mutation(
        "a rotation of half of the columns in the attention in 8 bits (CUDA)",
        CUDA_INTEGERS,
        "for (int lanes = 1; lanes < kLanes; lanes *= 2) {",
        "for (int lanes = 2; lanes < kLanes; lanes *= 2) {",
        tests=("attention_int8",),
        backends=("cuda",),
    ),
    Mutation(
        "the scale of other keys of the tile in the attention in 8 bits (CUDA)",
        CUDA_HOPPER,
        "threadIdx.x % kKeyScales;",
        "0;",
        tests=("attention_int8",),
        backends=("cuda",),
    ),
    Mutation(
        "keys that do not count in the attention in 8 bits (CUDA)",
        CUDA_HOPPER,
        "if (left < S::kKeys) leave_out_keys(scores, {left, left}, 0xff800000u);",
        "",
        tests=("attention_int8",),
        backends=("cuda",),
    ),
    Mutation(
        "integers of what is not finite in the attention in 8 bits (CUDA)",
        CUDA_INTEGERS,
        "if (!(most < INFINITY)) return {NAN, 0.f};",
        "",
        tests=("attention_int8",),
        backends=("cuda",),
    ),
    # The Python functions: each is built in seconds.
    Mutation(
        "a gradient that is needed not followed",
        PYTHON + "_call.py",
        "if is_grad_enabled() and requires_grad(*arguments[:tensors]):",
        "if False:",
        tests=("compile",),
    ),
    Mutation(
        "inputs that need a gradient not asked where outputs are given",
        PYTHON + "_call.py",
        "requires_grad(*given[: results + tensors])",
        "requires_grad(*given[:results])",
        tests=("compile",),
    ),
    Mutation(
        "two given outputs exchanged",
        PYTHON + "_call.py",
        "(*outs, *arguments)",
        "(*reversed(outs), *arguments)",
        tests=("inputs", "norm"),
    ),
    Mutation(
        "wrong types not looked for",
        PYTHON + "_call.py",
        "            check_types(arguments)\n            if outs",
        "            if outs",
        tests=("wrong_types",),
    ),
    Mutation(
        "a mode without a hash",
        PYTHON + "_checks.py",
        "except (KeyError, TypeError):",
        "except KeyError:",
        tests=("wrong_types",),
    ),
    Mutation(
        "eps=None as zero",
        PYTHON + "norm.py",
        "return _norm(out, input, weight, None, FLOAT32_EPS if eps is None else eps,",
        "return _norm(out, input, weight, None, 0.0 if eps is None else eps,",
        tests=("norm",),
    ),
    Mutation(
        "a fake with scales of the input's dtype",
        PYTHON + "_fakes.py",
        "input.new_empty((*shape[:-1], 1), dtype=torch.float32)",
        "input.new_empty((*shape[:-1], 1))",
        tests=("quant",),
    ),
    Mutation(
        "a fake of the rotary ops that is always contiguous",
        PYTHON + "_fakes.py",
        "rotary(operands, tables, **arguments)\n    return [torch.empty_like(operand.tensor) for operand in operands]",
        "rotary(operands, tables, **arguments)\n"
        "    return [operand.tensor.new_empty(operand.tensor.shape) for operand in operands]",
        tests=("compile",),
    ),
    # Bindings
    Mutation(
        "overlaps looked for between dense tensors alone",
        "torch-ext/tensor_checks.h",
        "if (!same && !SharedBytes(out, other).any(out_begin - other_begin)) return;",
        "if (!same && !(extent(out) == out.numel() && extent(other) == other.numel())) return;",
        tests=("inputs",),
    ),
    Mutation(
        "the first row of modulation for every number of an index",
        "torch-ext/tensor_checks.h",
        "view.index_stride = a.stride[a.dim - 2];",
        "view.index_stride = 0;",
        tests=("adaln",),
    ),
    Mutation(
        "the first row of modulation for every number of an index, row kernel",
        ROW_VECTORS,
        "kKnown && !(kKnown & kIndexed) ? 0 : row",
        "kKnown ? 0 : row",
        tests=("adaln::test_rows_by_index_as_models_pass_them",),
        backends=("cuda",),
    ),
    Mutation(
        "the first row of modulation for every number of an index, general kernel",
        CUDA_GENERAL,
        "start.choose(p);",
        "",
        tests=("adaln::test_rows_by_index",),
        backends=("cuda",),
    ),
    Mutation(
        "overlap of an output with the residual not checked",
        "torch-ext/norm.cpp",
        "check_overlap(*out, a.residual, true);",
        "",
        tests=("inputs",),
    ),
    Mutation(
        "overlap of an output with the shift not checked",
        "torch-ext/norm.cpp",
        "&a.shift,",
        "",
        tests=("inputs",),
    ),
    Mutation(
        "overlap of an output with the table of the shift not checked",
        "torch-ext/norm.cpp",
        "&a.shift_table,",
        "",
        tests=("inputs",),
    ),
    Mutation(
        "overlap of an output with the positions not checked",
        "torch-ext/rope.cpp",
        "check_overlap(o.output, a.positions, false);",
        "(void)o;",
        tests=("inputs",),
    ),
    Mutation(
        "None taken for a tensor",
        "torch-ext/tensor_checks.h",
        'if (!tensor.defined()) fail(name, "a tensor", "None");',
        "",
        tests=("errors",),
    ),
    Mutation(
        "the elements of an output and an operand taken for each other's size",
        "torch-ext/tensor_checks.h",
        "width_a_(element_size(a)), width_b_(element_size(b))",
        "width_a_(element_size(b)), width_b_(element_size(a))",
        tests=("inputs::test_overlaps_of_two_elements",),
    ),
    Mutation(
        "a table of as many heads as tokens read the other way round",
        "torch-ext/rope.cpp",
        "table.size[2] == rows || table.size[1] != rows;",
        "table.size[1] != rows;",
        tests=("rope::test_a_table_of_as_many_heads_as_tokens",),
    ),
    # fp8 and activations on the CPU
    Mutation(
        "fp8 rounded half up",
        CPU_QUANT,
        "finite + 0x7ffffu + ((finite >> 20) & 1u)",
        "finite + 0x80000u",
        tests=("quant",),
    ),
    Mutation(
        "fp8 values past the largest wrap",
        CPU_QUANT,
        "const U finite = (U)(magnitude < largest ? magnitude : largest);",
        "const U finite = (U)magnitude;",
        tests=("quant",),
    ),
    Mutation(
        "a NaN left out of a row's scale",
        CPU_QUANT,
        "amax = std::max(amax, static_cast<int32_t>(most[i]));",
        "amax = most[i] > 0x7f800000 ? amax : std::max(amax, static_cast<int32_t>(most[i]));",
        tests=("quant",),
    ),
    Mutation(
        "the scale of the first row of a block for all of them",
        CPU_QUANT,
        "output.values + row * own_.width, output.scales + row);",
        "output.values + row * own_.width, output.scales + first);",
        tests=("quant",),
    ),
    # Gradients.
    Mutation(
        "a backward of SiLU without its second term",
        CPU_GLU_BACKWARD,
        "s.value + x * s.value * s.complement * rate}",
        "s.value}",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of a clamped gate that is not zero",
        CPU_GLU_BACKWARD,
        "gate.part[p] <= most.part[p] ? to_gate.part[p] : F{};",
        "to_gate.part[p];",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of a head's gate from one column",
        CPU_GLU_BACKWARD,
        "grad_gate[0] = sum_row(width, SumTerm{grad_gate});",
        "grad_gate[0] *= static_cast<float>(width);",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of a norm without the mean of gradient times input",
        CPU_NORM_GRADIENT,
        "(load(t + c) - load(h + c) * slope) * rstd",
        "load(t + c) * rstd",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of a norm without eps",
        CPU_NORM_GRADIENT,
        "rms_rstd(h, width, eps)",
        "rms_rstd(h, width, 0.f)",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of LayerNorm without the mean of the gradient",
        CPU_NORM_BACKWARD,
        "        centre(h, width);\n        centre(t, width);",
        "        centre(h, width);",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of a modulation by scale in place of 1 + scale",
        CPU_NORM_BACKWARD,
        "scale(p.scale.value, p.scale.table, 1.f, scratch)",
        "scale(p.scale.value, p.scale.table, 0.f, scratch)",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of a pair without its second modulation",
        CPU_NORM_BACKWARD,
        "combine(factor2, {&weight, &scale2});",
        "combine(factor2, {&weight});",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward that leaves out the gradient of the residual stream",
        CPU_NORM_BACKWARD,
        "store(t + c, load(t + c) + load(more + c));",
        "store(t + c, load(t + c));",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of a gated residual without the gate",
        CPU_NORM_BACKWARD,
        "combine(to_branch, {&gate, &branch_weight});",
        "combine(to_branch, {&branch_weight});",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of a norm without its weight's offset",
        CPU_NORM_BACKWARD,
        "const float offset = p.weight_offset;",
        "const float offset = 0.f;",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "sums over rows of a LayerNorm with its mean",
        CPU_ROW_SUMS,
        "if (p.statistic == Statistic::kLayer) centre(x, width);",
        "",
        tests=ROW_SUMS_TESTS,
    ),
    Mutation(
        "sums over rows without the last part of a group",
        CPU_ROW_SUMS,
        "for (int64_t i = 1; i < parts; ++i) {",
        "for (int64_t i = 1; i + 1 < parts; ++i) {",
        tests=ROW_SUMS_TESTS,
    ),
    Mutation(
        "sums over rows that run into the next group",
        CPU_ROW_SUMS,
        "count = std::min(part_rows, group_rows - offset);",
        "count = std::min(part_rows, p.rows.count - offset);",
        tests=ROW_SUMS_TESTS,
    ),
    Mutation(
        "a backward of a rotation that rotates forward",
        CPU_ROPE_BACKWARD,
        "    grad[a] = x * cos[table_a] + y * sin[table_b];\n    grad[b] = y * cos[table_b] - x * sin[table_a];",
        "    grad[a] = x * cos[table_a] - y * sin[table_b];\n    grad[b] = y * cos[table_b] + x * sin[table_a];",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of a rotation by the sines of the other member",
        CPU_ROPE_BACKWARD,
        "    grad[a] = x * cos[table_a] + y * sin[table_b];\n    grad[b] = y * cos[table_b] - x * sin[table_a];",
        "    grad[a] = x * cos[table_a] + y * sin[table_a];\n    grad[b] = y * cos[table_b] - x * sin[table_b];",
        tests=BACKWARD_TESTS,
    ),
    Mutation(
        "a backward of q/k norms without their weights",
        CPU_ROPE_BACKWARD,
        "if (o.weight != nullptr) multiply(t, weight, width);",
        "",
        tests=BACKWARD_TESTS,
    ),
    # Group norms and upsampling
    Mutation(
        "group norm: sums of squares about zero",
        CPU_GROUP_NORM,
        "std::copy(rows, rows + stride, shift);\n"
        "      sum_differences(rows, pixels, stride, shift, sum, squares);\n"
        "      const float n = static_cast<float>(pixels);\n"
        "      for (int64_t c = 0; c < stride; c += kLanes) store(shift + c, load(shift + c) + load(sum + c) / n);",
        "std::fill(shift, shift + stride, 0.f);\n      const float n = static_cast<float>(pixels);",
        tests=("group_norm",),
    ),
    Mutation(
        "group norm: sums of squares about the first pixel of a run",
        CPU_GROUP_NORM,
        "store(shift + c, load(shift + c) + load(sum + c) / n);",
        "(void)n;",
        tests=("group_norm::test_outliers",),
    ),
    Mutation(
        "group norm: the last chunk counted as a whole one",
        CPU_GROUP_NORM,
        "const int64_t pixels = std::min(chunk, p.pixels - c * chunk);",
        "const int64_t pixels = chunk;",
        tests=("group_norm",),
    ),
    Mutation(
        "group norm: the first part of a large group for all of it",
        CPU_GROUP_NORM,
        "return {part / p.parts_of_group() * group_channels + before,",
        "return {part / p.parts_of_group() * group_channels,",
        tests=("group_norm",),
    ),
    Mutation(
        "group norm: SiLU of a number that is not rounded",
        CPU_GROUP_NORM,
        "each(row, count, p.dtype, [&](int64_t c, F x) { return x * load(factor + c) + load(shift + c); });",
        "each(row, count, p.silu ? DType::kFloat32 : p.dtype,\n"
        "         [&](int64_t c, F x) { return x * load(factor + c) + load(shift + c); });",
        tests=("group_norm",),
    ),
    Mutation(
        "group norm: the residual's bias left out",
        GROUP_NORM_BINDING,
        "p.residual_bias = residual_bias->data;",
        "",
        tests=("group_norm",),
    ),
    Mutation(
        "group norm: the first image's bias for all",
        GROUP_NORM_BINDING,
        "return a.dim == 1 || a.size[0] == 1 ? 0 : a.stride[0];",
        "return a.size[0] < 0 ? 1 : 0;",
        tests=("group_norm",),
    ),
    Mutation(
        "upsampling: rows repeated as often as columns should be",
        GROUP_NORM_BINDING,
        "p.scale[i] = scale[i];",
        "p.scale[i] = scale[1 - i];",
        tests=("group_norm::test_upsample_nearest",),
    ),
    *TOOL_DEFECTS,
]


def copy_sources(directory: Path) -> None:
    """Only what differs, so that a build there begins where the last one ended."""
    files = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        source, copy = REPOSITORY / name, directory / name
        if source.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.is_symlink():
                copy.symlink_to(source.readlink())
        elif source.is_file() and not (copy.is_file() and copy.read_bytes() == source.read_bytes()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)  # with its mode


def give_history(directory: Path) -> None:
    """The commits to the copy, for the tests that read them; without any they would be left out, and notice nothing."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    shutil.rmtree(directory / ".git", ignore_errors=True)  # it may belong to another checkout
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        clone = ["git", "clone", "--quiet", "--shared", "--no-checkout", str(REPOSITORY), folder]
        subprocess.run(clone, check=True)
        (Path(folder) / ".git").rename(directory / ".git")
    subprocess.run(["git", "reset", "--quiet", "--mixed", head.stdout.strip()], cwd=directory, check=True)


@contextlib.contextmanager
def planted(directory: Path, mutation: Mutation) -> Iterator[None]:
    """The copy with the defect, which is taken out again."""
    edited = directory / mutation.file
    text = edited.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.defect}: {mutation.file} has its text {text.count(mutation.old)} times")
    edited.write_text(text.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        edited.write_text(text)


def build(directory: Path, mutation: Mutation, backend: str, output: Path, arguments: list[str]) -> None:
    command = [sys.executable, "tools/build.py", "--backend", backend, "--output", str(output), *arguments]
    with planted(directory, mutation):
        process = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise SystemExit(f"{mutation}: does not build\n{process.stdout}{process.stderr}")


def variant_of(work: Path, mutation: Mutation) -> Path:
    """The build in build/; where the defect is in a Python file of the package, a copy of it with that file."""
    if not mutation.file.startswith(PYTHON):
        return REPOSITORY / "build"
    variants = work / "variants"
    shutil.rmtree(variants, ignore_errors=True)
    for variant in (REPOSITORY / "build").glob("torch-*"):
        shutil.copytree(variant, variants / variant.name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(work / "sources" / mutation.file, variants / variant.name / mutation.file.removeprefix(PYTHON))
    return variants


def first_failure(
    built: Path, tests: tuple[str, ...], extra: list[str], turn: int = 0, sources: Path = REPOSITORY
) -> str | None:
    """The first test that fails, or the way in which the tests died."""
    from helpers.gpus import take_turns

    for name in tests:
        module, *test = name.split("::")
        pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *extra]
        process = subprocess.run(
            [*pytest, "::".join([path_of(module), *test])],
            cwd=sources,
            env={
                **os.environ,
                **take_turns(turn),
                "LOCAL_KERNELS": f"org/ltx-kernels={built}",
                "LTX_KERNELS_VARIANTS": str(built),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode != 0:
            # A test fails, or what it needs fails in a fixture. A file that does not load has no name of a test.
            said = r"^(?:FAILED|ERROR) tests/(?:project/)?([^:\n]+::.*?)(?: - |$)"
            if failed := re.search(said, process.stdout, re.MULTILINE):
                return failed[1]
            if "ERROR tests/" in process.stdout:
                print(f"{built}: does not load\n{process.stdout[-2000:]}", flush=True)
                return None
            died = re.search(r"/test_\w+\.py\", line \d+ in (test_\w+)", process.stderr)  # faulthandler's stack
            return f"test_{module}.py::{died[1] if died else '?'} (status {process.returncode})"
    return None


def read(output: Path) -> dict[str, dict[str, Any]]:
    """What was run before, by its defect."""
    records = json.loads(output.read_text())["records"] if output.exists() else []
    return {record["defect"]: record for record in records}


def write(output: Path, meta: dict[str, Any], records: list[dict[str, Any]]) -> None:
    """What was run now, beside what was run before."""
    import result_files

    known = {**read(output), **{record["defect"]: record for record in records}}
    kept = [known[m.defect] for m in MUTATIONS if m.defect in known]
    result_files.write(output, meta, kept)


def alone_in(folder: Path) -> TextIO:
    """Waits until no other call works in a folder. It is free again when the file that is returned is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["cpu", "cuda", "tools"], default="cpu")
    parser.add_argument("--only", default="", help="only defects with this in their name")
    parser.add_argument("--build-only", type=Path, metavar="DIR", help="build into DIR and run nothing")
    parser.add_argument("--built", type=Path, metavar="DIR", help="run what --build-only built")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="of --built, at a time")
    parser.add_argument("--resume", action="store_true", help="of --built, only what the output does not hold yet")
    parser.add_argument("--work", type=Path, default=Path("/tmp/ltx-mutations"), help="for the copy of the sources")
    parser.add_argument("--output", type=Path, help="JSON (default: benchmarks/results/mutations-<backend>.json)")
    parser.add_argument("--build-args", default="", help="handed to tools/build.py")
    options, extra = parser.parse_known_args()

    import torch
    from helpers.gpus import name_gpus
    from result_files import common_meta

    selected = [m for m in MUTATIONS if options.backend in m.backends and options.only in m.defect]
    if options.built is None:
        lock = alone_in(options.work)  # noqa: F841
        copy_sources(options.work / "sources")
        if options.backend == "tools":
            give_history(options.work / "sources")
        selected.sort(key=lambda mutation: mutation.file)  # each change of file compiles two
    output = options.output or REPOSITORY / f"benchmarks/results/mutations-{options.backend}.json"
    meta = common_meta()
    commit = meta.pop("commit")  # each record has that of its sources
    records: list[dict[str, Any]] = []

    def record(mutation: Mutation, commit: str, caught: str | None) -> None:
        records.append({"defect": mutation.defect, "file": mutation.file, "commit": commit, "caught_by": caught})
        write(output, meta, records)

    if options.built is not None:  # nothing to build: all at once
        if options.backend == "cuda":
            meta["device"] = torch.cuda.get_device_name()
        name_gpus()
        known = read(output) if options.resume else {}
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            running = {}
            for mutation in selected:
                directory = options.built.resolve() / mutation.slug
                if not directory.exists():
                    continue
                commit = (directory / "commit").read_text()
                if known.get(mutation.defect, {}).get("commit") != commit:
                    future = pool.submit(first_failure, directory, mutation.tests, extra, len(running))
                    running[future] = mutation, commit
            for future in concurrent.futures.as_completed(running):
                record(*running[future], future.result())
                print(f"{records[-1]['defect']}: {records[-1]['caught_by']}", flush=True)
        selected = []
    if options.backend == "tools":  # a test that fails without a defect would seem to notice all of them
        tests = tuple(sorted({name for mutation in selected for name in mutation.tests}))
        if failed := first_failure(REPOSITORY / "build", tests, extra, sources=options.work / "sources"):
            raise SystemExit(f"{failed} fails without any defect")
    for i, mutation in enumerate(selected):
        start = time.perf_counter()
        if options.backend == "tools":
            with planted(options.work / "sources", mutation):
                built = variant_of(options.work, mutation)
                caught = first_failure(built, mutation.tests, extra, sources=options.work / "sources")
            record(mutation, commit, caught)
            print(
                f"{i + 1}/{len(selected)} {mutation.defect}: {caught} ({time.perf_counter() - start:.0f} s)", flush=True
            )
            continue
        built = (options.build_only or options.work).resolve() / mutation.slug
        build(options.work / "sources", mutation, options.backend, built, options.build_args.split())
        (built / "commit").write_text(commit)
        seconds = time.perf_counter() - start
        if options.build_only is not None:
            print(f"{i + 1}/{len(selected)} {mutation.defect}: built in {seconds:.0f} s", flush=True)
            continue
        caught = first_failure(built, mutation.tests, extra)
        record(mutation, commit, caught)
        total = time.perf_counter() - start
        print(
            f"{i + 1}/{len(selected)} {mutation.defect}: {caught} ({seconds:.0f} s + {total - seconds:.0f} s)",
            flush=True,
        )
    if options.build_only is not None:
        return 0
    missed = [record["defect"] for record in records if record["caught_by"] is None]
    print(
        f"{len(records) - len(missed)} of {len(records)} caught" + (f"; missed: {', '.join(missed)}" if missed else "")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
