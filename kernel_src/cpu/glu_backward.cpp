// CPU gradients of gated and plain activations; ltx/params.h (GluBackwardParams) has the formula.
//
// Rows are cut into column blocks, which are the units of parallel work; a gate that serves a whole head makes the head
// one block, because its gradient is a sum. Operands of a block are brought to fp32 rows first.

#ifndef LTX_ISA

#include <algorithm>

#define LTX_ISA_FILE "cpu/glu_backward.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void glu_backward(const GluBackwardParams& params, const Context& context) {
  LTX_DISPATCH(glu_backward, params, context);
}

}  // namespace ltx

#else  // once per instruction set

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

constexpr int64_t kBlockColumns = 1024;
constexpr int64_t kStep = kWide * kLanes;

// sigmoid(x) and 1 - sigmoid(x), each to its own relative precision.
struct Sigmoids {
  Wide value, complement;
};
LTX_INLINE Sigmoids sigmoids(const Wide& x) {
  const Wide magnitude = keep_bits(x, 0x7fffffffu);
  const Wide power = select(magnitude < 110.f, scaled_exp_minus(magnitude), 0.f) * kUnscale;
  Wide larger;
  LTX_EACH_PART larger.part[p] = x.part[p] != x.part[p] ? x.part[p] : 1.f / (1.f + power.part[p]);
  const Wide smaller = power * larger;
  const WideMask negative = x < 0.f;
  return {select(negative, smaller, larger), select(negative, larger, smaller)};
}

// An activation and its derivative.
struct Slope {
  Wide value, derivative;
};

// x * sigmoid(t); `rate` is the derivative of t.
LTX_INLINE Slope times_sigmoid_slope(const Wide& x, const Wide& t, const Wide& rate) {
  const Sigmoids s = sigmoids(t);
  return {x * s.value, s.value + x * s.value * s.complement * rate};
}

LTX_INLINE Wide constant(float value) {
  Wide x;
  LTX_EACH_PART x.part[p] = splat(value);
  return x;
}

// Phi(x) + x phi(x). Phi(-a) = 1 / (2 (1 + d(a))^16) with the polynomial d of cpu/glu.cpp.
LTX_INLINE Slope gelu_slope(const Wide& x) {
  const Wide a = bounded_magnitude(x, 15.f);
  const Wide a2 = a * a;
  const Wide a4 = a2 * a2;
  const Wide upper = (a * 2.6547578156801223e-09f - 5.3532930569042866e-08f) * a2 +
                     (a * 6.001945910784919e-07f - 3.085452489632695e-06f);
  const Wide middle = (a * 1.2575492744031059e-05f + 4.269191984117418e-05f) * a2 +
                      (a * 3.560958074370912e-05f + 0.0032845781485881806f);
  const Wide q = (upper * a4 + middle) * a2 + (a * 0.021137563502597607f + 0.04986780111172055f);
  Wide d = a * q;
  d = d * (d + 2.f);
  d = d * (d + 2.f);
  d = d * (d + 2.f);
  const Wide root = d + 1.f;  // (1 + d)^8
  const Wide tail = constant(1.f) / (root * (root + root));
  const Wide cdf = select(x < 0.f, tail, constant(1.f) - tail);
  const Wide density = scaled_exp_minus(a2 * 0.5f) * kUnscale * 0.3989422804014327f;
  return {x * cdf, cdf + x * density};
}

template <Activation kActivation>
LTX_INLINE Slope slope(const Wide& x, float alpha) {
  if (kActivation == Activation::kSilu) return times_sigmoid_slope(x, x, constant(1.f));
  if (kActivation == Activation::kClampedSilu) return times_sigmoid_slope(x, x * alpha, constant(alpha));
  if (kActivation == Activation::kGelu) return gelu_slope(x);
  // Where the bound of the square counts, the sigmoid is 0 or 1.
  const Wide square = bounded_magnitude(x * x, 1e4f);
  return times_sigmoid_slope(x, x * (square * 0.07135481282553f + 1.5957691216057308f),
                             square * 0.21406443847659f + 1.5957691216057308f);
}

// Columns of a row as fp32; what is absent is null. The width is a multiple of kStep.
struct Block {
  int64_t width;
  const float *grad, *gate, *up, *bias;
  float *grad_gate, *grad_up;
  float scale, alpha, limit;
};

template <Activation kActivation>
void run_block(const Block& block) {
  for (int64_t c = 0; c < block.width; c += kStep) {
    const Wide grad = load_wide(block.grad + c);
    Wide gate = load_wide(block.gate + c);
    if (const float* bias = varying(block.bias)) gate = gate + load_wide(bias + c);
    const Wide up = block.up == nullptr ? constant(1.f) : load_wide(block.up + c);
    Wide to_gate, to_up;
    if (kActivation == Activation::kSigmoid) {
      const Sigmoids s = sigmoids(gate);
      to_up = grad * (s.value * block.scale);
      to_gate = to_up * up * s.complement;
    } else if (kActivation == Activation::kClampedSilu) {
      // torch.clamp has the gradient 1 at its bounds and, for NaN, 0.
      const Wide most = constant(block.limit), least = constant(-block.limit);
      const Slope s = slope<kActivation>(select(gate * -1.f < -block.limit, most, gate), block.alpha);
      const Wide u = select(up < -block.limit, least, select(up * -1.f < -block.limit, most, up)) + 1.f;
      to_gate = grad * u * s.derivative;
      to_up = grad * s.value;
      LTX_EACH_PART {
        to_gate.part[p] = gate.part[p] <= most.part[p] ? to_gate.part[p] : F{};
        to_up.part[p] = up.part[p] >= least.part[p] ? to_up.part[p] : F{};
        to_up.part[p] = up.part[p] <= most.part[p] ? to_up.part[p] : F{};
      }
    } else {
      const Slope s = slope<kActivation>(gate, 1.f);
      to_gate = grad * up * s.derivative;
      to_up = grad * s.value;
    }
    store_wide(block.grad_gate + c, to_gate);
    if (block.grad_up != nullptr) store_wide(block.grad_up + c, to_up);
  }
}

void run_block(const Block& block, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return run_block<Activation::kGelu>(block);
    case Activation::kGeluTanh:
      return run_block<Activation::kGeluTanh>(block);
    case Activation::kSilu:
      return run_block<Activation::kSilu>(block);
    case Activation::kSigmoid:
      return run_block<Activation::kSigmoid>(block);
    case Activation::kClampedSilu:
      return run_block<Activation::kClampedSilu>(block);
  }
}

// An fp32 row written in any dtype and stride. `row` is overwritten.
void write(const RowView& view, char* to, float* row, int64_t width) {
  if (view.column_stride == 1) return narrow(to, row, view.dtype, width);
  narrow(row, row, view.dtype, width);
  scatter(to, view.dtype, view.column_stride, width, row);
}

struct SumTerm {
  const float* row;
  LTX_INLINE F operator()(int64_t c) const { return load(row + c); }
};

// Units are column blocks of rows.
void glu_backward_units(const GluBackwardParams& p, int64_t blocks, int64_t begin, int64_t end) {
  const bool sums = p.gate_repeat > 1;
  const int64_t unit_width = blocks == 1 ? p.rows.width : kBlockColumns;
  Scratch scratch(6, round_up(round_up(unit_width, kStep), kSumLanes));
  float *grad = scratch.take(), *gate = scratch.take(), *up = scratch.take(), *bias = scratch.take();
  float *grad_gate = scratch.take(), *grad_up = scratch.take();
  const bool gated = p.up.data != nullptr;
  RowIndex index(p.rows, begin / blocks);
  int64_t number = begin % blocks;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t column = number * unit_width;
    const int64_t width = std::min(unit_width, p.rows.width - column);
    expand(grad, index.pointer(p.grad, column), p.dtype, p.grad.column_stride, width);
    expand(gate, index.pointer(p.gate, sums ? 0 : column), p.dtype, sums ? 0 : p.gate.column_stride, width);
    if (gated) expand(up, index.pointer(p.up, column), p.dtype, p.up.column_stride, width);
    if (p.bias.data != nullptr) {
      expand(bias, index.pointer(p.bias, column), p.bias.dtype, p.bias.column_stride, width);
    }
    run_block({round_up(width, kStep), grad, gate, gated ? up : nullptr, p.bias.data == nullptr ? nullptr : bias,
               grad_gate, gated ? grad_up : nullptr, p.scale, p.alpha, p.limit},
              p.activation);
    if (sums) {
      std::fill(grad_gate + width, grad_gate + round_up(width, kSumLanes), 0.f);
      grad_gate[0] = sum_row(width, SumTerm{grad_gate});
    }
    write(p.grad_gate, index.pointer(p.grad_gate, sums ? 0 : column), grad_gate, sums ? 1 : width);
    if (gated) write(p.grad_up, index.pointer(p.grad_up, column), grad_up, width);
    if (++number == blocks) {
      number = 0;
      index.next();
    }
  }
}

void glu_backward(const GluBackwardParams& params, const Context& context) {
  const bool sums = params.gate_repeat > 1;
  const int64_t blocks = sums ? 1 : (params.rows.width + kBlockColumns - 1) / kBlockColumns;
  struct Job {
    const GluBackwardParams& params;
    int64_t blocks;
    void operator()(int64_t begin, int64_t end) const { glu_backward_units(params, blocks, begin, end); }
  };
  const int64_t width = sums ? params.rows.width : std::min(kBlockColumns, params.rows.width);
  for_ranges(context, params.rows.count * blocks, width, Job{params, blocks});
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
