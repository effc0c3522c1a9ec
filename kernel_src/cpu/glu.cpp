// CPU gated linear units and GELU: out = activation(gate) * up, or activation(gate + bias) without up.
//
//   silu       x * sigmoid(x)
//   gelu tanh  x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3); equal to x / 2 * (1 + tanh(u))
//   gelu       x * Phi(x), Phi the normal distribution function; equal to x / 2 * (1 + erf(x / sqrt(2)))
//   sigmoid    of a gate for each column or for several, times up and a scale
//   clamped    g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), u = clamp(up, -limit, limit)
//
// The forms on the left keep a relative accuracy where the result is small, which 1 + tanh and 1 + erf lose.
// Elementwise: rows are cut into column blocks, which are the units of parallel work.

#ifndef LTX_ISA

#include <algorithm>
#include <type_traits>

#define LTX_ISA_FILE "cpu/glu.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void glu(const GluParams& params, const Context& context) { LTX_DISPATCH(glu, params, context); }

}  // namespace ltx

#else  // once per instruction set

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

// Columns handled at once: the copies of strided operands and of the bias stay in the L1 cache.
constexpr int64_t kBlockColumns = 1024;
constexpr int64_t kStep = kWide * kLanes;

LTX_INLINE Wide gelu_tanh(const Wide& x) {
  const Wide square = x * x;
  return times_sigmoid(x, x * (square * 0.07135481282553f + 1.5957691216057308f));
}

// max(x, 0), but NaN for -inf, as torch has it.
LTX_INLINE Wide positive_part(const Wide& x) { return select(x < 0.f, x - x, x); }

// gelu(x) = max(x, 0) - |x| * Phi(-|x|), with Phi(-a) = 1 / (2 (1 + d(a))^16) and d a minimax polynomial: no
// exponential, one division. Relative error of Phi: 2^-27 near 0, 2^-23 to a = 4, 2^-16 to 7, and growing beyond, where
// |x| * Phi is below 1e-11. (1 + d)^2 = 1 + d (2 + d) keeps d's own accuracy where it is small.
LTX_INLINE Wide gelu(const Wide& x) {
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
  return positive_part(x) - a / (root * (root + root));
}

// The same where the result is rounded to bfloat16 (2^-9) and torch's own gelu is at its fastest: Phi(-a) = 1 / p(a)^32
// to 2^-18 of its value on [0, 6], growing beyond. Three quarters of the time.
LTX_INLINE Wide gelu_coarse(const Wide& x) {
  const Wide a = bounded_magnitude(x, 15.f);
  const Wide a2 = a * a;
  const Wide upper = (a * 2.5451038648628417e-05f - 9.540649530474783e-05f) +
                     a2 * (a2 * 6.970012907877559e-09f - 7.853768918924944e-07f);
  const Wide p = (a * 0.02548143035910894f + 1.0218971103326264f) +
                 a2 * ((a * 0.0014380095626604797f + 0.010473305110423521f) + a2 * upper);
  const Wide p2 = p * p, p4 = p2 * p2, p8 = p4 * p4, p16 = p8 * p8;
  return positive_part(x) - a / (p16 * p16);
}

template <Activation kActivation, bool kCoarse>
LTX_INLINE Wide activate(const Wide& x) {
  if (kActivation == Activation::kSilu) return times_sigmoid(x, x);
  if (kActivation == Activation::kGeluTanh) return gelu_tanh(x);
  return kCoarse ? gelu_coarse(x) : gelu(x);
}

LTX_INLINE Wide constant(float value) {
  Wide x;
  LTX_EACH_PART x.part[p] = splat(value);
  return x;
}

// min(x, limit), where NaN stays.
LTX_INLINE Wide at_most(const Wide& x, float limit) { return select(x * -1.f < -limit, constant(limit), x); }

LTX_INLINE Wide clamp(const Wide& x, float limit) { return select(x < -limit, constant(-limit), at_most(x, limit)); }

LTX_INLINE Wide sigmoid(const Wide& x) {
  Wide one;
  LTX_EACH_PART one.part[p] = x.part[p] != x.part[p] ? x.part[p] : splat(1.f);
  return times_sigmoid(one, x);
}

// A column block: contiguous storage of the input's dtype; the bias is an arranged fp32 row. Absent operands are null.
// The width is a multiple of kStep.
struct Block {
  int64_t width;
  const void *gate, *up;
  const float* bias;
  void* out;
  bool eager;
  DType bias_sum;  // the dtype that eager code adds the bias in
  float scale, alpha, limit;
};

template <class T>
LTX_INLINE Wide rounded(Wide x, bool eager) {
  if (eager) {
    LTX_EACH_PART x.part[p] = round_to<T>(x.part[p]);
  }
  return x;
}

// scale * sigmoid(gate) * up, or the clamped form. Eager code rounds each step.
template <class T, Activation kActivation>
void run_combining_block(const Block& block) {
  const T *gate = static_cast<const T*>(block.gate), *up = static_cast<const T*>(block.up);
  T* out = static_cast<T*>(block.out);
  const bool eager = block.eager;
  float limits[kLanes];
  store(limits, round_to<T>(splat(block.limit)));
  const float limit = eager ? limits[0] : block.limit;
  for (int64_t c = 0; c < block.width; c += kStep) {
    Wide g = load_wide(gate + c), u = load_wide(up + c);
    if (kActivation == Activation::kSigmoid) {
      const Wide weight = rounded<T>(sigmoid(g), eager) * block.scale;
      store_wide(out + c, rounded<T>(weight, eager) * u);
      continue;
    }
    g = at_most(g, limit);
    u = rounded<T>(clamp(u, limit) + 1.f, eager);
    if (eager) {
      g = rounded<T>(g * rounded<T>(sigmoid(rounded<T>(g * block.alpha, true)), true), true);
    } else {
      g = times_sigmoid(g, g * block.alpha);
    }
    store_wide(out + c, g * u);
  }
}

template <class T, Activation kActivation, bool kCoarse>
void run_block(const Block& block) {
  const T* gate = static_cast<const T*>(block.gate);
  const T* up = static_cast<const T*>(block.up);
  T* out = static_cast<T*>(block.out);
  const bool eager = block.eager;
  const int64_t width = block.width;
  for (int64_t c = 0; c < width; c += kStep) {
    Wide x = load_wide(gate + c);
    if (const float* bias = varying(block.bias)) {
      x = x + load_wide(bias + c);
      if (eager) {
        LTX_EACH_PART x.part[p] = round_to<T>(round_to(block.bias_sum, x.part[p]));
      }
    }
    x = activate<kActivation, kCoarse>(x);
    if (const T* row = varying(up)) {
      if (eager) x = round_to<T>(x);
      x = x * load_wide(row + c);
    }
    store_wide(out + c, x);
  }
}

template <class T>
void run_block(const Block& block, Activation activation) {
  // Eager rounding is there to give eager code's bits, so it takes the accurate gelu.
  constexpr bool kCoarse = std::is_same<T, BFloat>::value;
  switch (activation) {
    case Activation::kGelu:
      return block.eager ? run_block<T, Activation::kGelu, false>(block)
                         : run_block<T, Activation::kGelu, kCoarse>(block);
    case Activation::kGeluTanh:
      return run_block<T, Activation::kGeluTanh, false>(block);
    case Activation::kSilu:
      return run_block<T, Activation::kSilu, false>(block);
    case Activation::kSigmoid:
      return run_combining_block<T, Activation::kSigmoid>(block);
    case Activation::kClampedSilu:
      return run_combining_block<T, Activation::kClampedSilu>(block);
  }
}

void run_block(const Block& block, DType dtype, Activation activation) {
  if (dtype == DType::kFloat32) return run_block<float>(block, activation);
  return dtype == DType::kFloat16 ? run_block<Half>(block, activation) : run_block<BFloat>(block, activation);
}

// Columns of a row in which each gate stands for `repeat` of them.
void repeat_gates(void* target, const char* gates, DType dtype, int64_t stride, int64_t repeat, int64_t column,
                  int64_t width) {
  const int64_t size = static_cast<int64_t>(size_of(dtype));
  char* at = static_cast<char*>(target);
  for (int64_t c = 0; c < width; ++c) {
    std::copy_n(gates + (column + c) / repeat * stride * size, size, at + c * size);
  }
}

// Units are column blocks of rows.
void glu_units(const GluParams& p, int64_t blocks, int64_t begin, int64_t end) {
  Scratch scratch(5, kBlockColumns);
  float *bias_row = scratch.take(), *gate_copy = scratch.take(), *up_copy = scratch.take(), *out_copy = scratch.take();
  float* gate_row = scratch.take();
  const int64_t size = static_cast<int64_t>(size_of(p.dtype));
  const char* last_bias = nullptr;
  int64_t last_width = 0;
  Block block = {};
  block.eager = p.rounding == Rounding::kEager;
  block.bias_sum = promote(p.dtype, p.bias.dtype);
  block.scale = p.scale;
  block.alpha = p.alpha;
  block.limit = p.limit;
  const bool repeated = p.gate_repeat > 1;
  const int64_t gate_stride = repeated ? 1 : p.gate.column_stride;

  RowIndex index(p.rows, begin / blocks);
  int64_t number = begin % blocks;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t column = number * kBlockColumns;
    const int64_t width = std::min(kBlockColumns, p.rows.width - column);
    char* gate = index.pointer(p.gate, repeated ? 0 : column);
    if (repeated) {
      repeat_gates(gate_row, gate, p.dtype, p.gate.column_stride, p.gate_repeat, column, width);
      gate = reinterpret_cast<char*>(gate_row);
    }
    char* up = index.pointer(p.up, column);
    char* out = index.pointer(p.out, column);
    const char* bias = index.pointer(p.bias, column);
    if (bias != nullptr && (bias != last_bias || width != last_width)) {
      expand(bias_row, bias, p.bias.dtype, p.bias.column_stride, width);
      if (p.dtype == DType::kBFloat16) arrange_bfloat(bias_row, round_up(width, kStep));
      last_bias = bias;
      last_width = width;
    }
    // Whole steps of contiguous columns where they lie; the rest, or all columns of a strided operand, through copies.
    const bool in_place = gate_stride == 1 && p.out.column_stride == 1 && (up == nullptr || p.up.column_stride == 1);
    const int64_t whole = in_place ? width / kStep * kStep : 0;
    block.width = whole;
    block.gate = gate;
    block.up = up;
    block.out = out;
    block.bias = bias == nullptr ? nullptr : bias_row;
    run_block(block, p.dtype, p.activation);
    if (const int64_t rest = width - whole) {
      gather(gate_copy, gate + whole * size, p.dtype, gate_stride, rest);
      if (up != nullptr) gather(up_copy, up + whole * size, p.dtype, p.up.column_stride, rest);
      block.width = round_up(rest, kStep);
      block.gate = gate_copy;
      block.up = up == nullptr ? nullptr : up_copy;
      block.out = out_copy;
      block.bias = bias == nullptr ? nullptr : bias_row + whole;
      run_block(block, p.dtype, p.activation);
      scatter(out + whole * size, p.dtype, p.out.column_stride, rest, out_copy);
    }
    if (++number == blocks) {
      number = 0;
      index.next();
    }
  }
}

void glu(const GluParams& params, const Context& context) {
  const int64_t blocks = (params.rows.width + kBlockColumns - 1) / kBlockColumns;
  struct Job {
    const GluParams& params;
    int64_t blocks;
    void operator()(int64_t begin, int64_t end) const { glu_units(params, blocks, begin, end); }
  };
  for_ranges(context, params.rows.count * blocks, std::min(kBlockColumns, params.rows.width), Job{params, blocks});
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
