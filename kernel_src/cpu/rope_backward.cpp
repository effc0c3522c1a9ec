// CPU gradients of apply_rotary, apply_rotary_qk and qk_norm_rope; ltx/rotary_backward.h has the formula.
//
// A row is a head, or with a norm across heads a token. It is brought to fp32 and rotated back pair by pair.

#ifndef LTX_ISA

#include <algorithm>
#include <cmath>

#include "ltx/rotary_backward.h"

#define LTX_ISA_FILE "cpu/rope_backward.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void rotary_backward(const RotaryBackwardParams& params, const Context& context) {
  LTX_DISPATCH(rotary_backward, params, context);
}

}  // namespace ltx

#else  // once per instruction set

#include "cpu/norm_gradient.h"

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

const char* at(const void* data, DType dtype, int64_t offset) {
  return static_cast<const char*>(data) + offset * static_cast<int64_t>(size_of(dtype));
}

int64_t offset_of(const HeadStrides& s, int64_t batch, int64_t sequence, int64_t head) {
  return batch * s.batch + sequence * s.sequence + head * s.head;
}

// The first rotary_dim columns of a head, rotated back in place; cos and sin are rows of a table.
void rotate_back(const RotaryParams& p, float* grad, const float* cos, const float* sin) {
  const int64_t pairs = p.rotary_dim / 2;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t a = p.interleaved ? 2 * pair : pair, b = p.interleaved ? a + 1 : a + pairs;
    const int64_t table_a = p.half_width_table ? pair : a, table_b = p.half_width_table ? pair : b;
    const float x = grad[a], y = grad[b];
    grad[a] = x * cos[table_a] + y * sin[table_b];
    grad[b] = y * cos[table_b] - x * sin[table_a];
  }
}

// Units are rows of one operand.
void rotary_backward_rows(const RotaryBackwardParams& p, int operand, int64_t begin, int64_t end) {
  const RotaryOperand& o = p.operand[operand];
  const HeadStrides& grad_stride = p.grad_stride[operand];
  const bool across = p.norm == QkNorm::kAcrossHeads;
  const int64_t heads = across ? o.heads : 1, width = heads * p.head_dim;
  const int64_t entries = p.half_width_table ? p.rotary_dim / 2 : p.rotary_dim;
  // A token's heads are expanded one after the other, each with its padding.
  Scratch scratch(6, round_up(width, kSumLanes) + kSumLanes);
  float *t = scratch.take(), *h = scratch.take(), *weight = scratch.take(), *copy = scratch.take();
  float *cos = scratch.take(), *sin = scratch.take();
  if (o.weight != nullptr) {
    expand(weight, o.weight, o.weight_dtype, o.weight_stride, width);
    for (int64_t c = 0; c < width; ++c) weight[c] += p.weight_offset;
  }
  for (int64_t row = begin; row < end; ++row) {
    const int64_t head = across ? 0 : row % o.heads, token = across ? row : row / o.heads;
    const int64_t batch = token / o.sequence, sequence = token % o.sequence;
    const auto expand_row = [&](float* target, const void* data, const HeadStrides& s) {
      expand_heads(target, at(data, p.dtype, offset_of(s, batch, sequence, head)), p.dtype, s, heads, p.head_dim);
    };
    expand_row(t, p.grad[operand], grad_stride);
    for (int64_t i = 0; i < heads; ++i) {
      if (i == 0 || o.cos_stride.head != 0 || o.sin_stride.head != 0) {
        const int64_t c = offset_of(o.cos_stride, batch, sequence, head + i);
        const int64_t s = offset_of(o.sin_stride, batch, sequence, head + i);
        expand(cos, at(o.cos, p.table_dtype, c), p.table_dtype, o.cos_stride.column, entries);
        expand(sin, at(o.sin, p.table_dtype, s), p.table_dtype, o.sin_stride.column, entries);
      }
      rotate_back(p, t + i * p.head_dim, cos, sin);
    }
    if (p.norm != QkNorm::kNone) {
      if (o.weight != nullptr) multiply(t, weight, width);
      expand_row(h, o.input, o.input_stride);
      if (p.statistic == Statistic::kLayer) {
        centre(h, width);
        centre(t, width);
      }
      apply_norm(t, h, width, o.eps);
    }
    for (int64_t i = 0; i < heads; ++i) {
      char* to = const_cast<char*>(at(o.output, p.dtype, offset_of(o.output_stride, batch, sequence, head + i)));
      narrow(copy, t + i * p.head_dim, p.dtype, p.head_dim);
      scatter(to, p.dtype, o.output_stride.column, p.head_dim, copy);
    }
  }
}

void rotary_backward(const RotaryBackwardParams& params, const Context& context) {
  struct Job {
    const RotaryBackwardParams& params;
    int operand;
    void operator()(int64_t begin, int64_t end) const { rotary_backward_rows(params, operand, begin, end); }
  };
  const bool across = params.norm == QkNorm::kAcrossHeads;
  for (int i = 0; i < params.operands; ++i) {
    const RotaryOperand& o = params.operand[i];
    const int64_t rows = params.batch * o.sequence * (across ? 1 : o.heads);
    if (rows > 0) for_ranges(context, rows, params.head_dim * (across ? o.heads : 1), Job{params, i});
  }
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
