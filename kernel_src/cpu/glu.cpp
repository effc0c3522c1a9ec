// CPU gated linear units and GELU: out = activation(gate) * up, or activation(gate + bias) without up.
//
//   silu       x * sigmoid(x)
//   gelu tanh  x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3); equal to x / 2 * (1 + tanh(u))
//   gelu       x * Phi(x), Phi the normal distribution function; equal to x / 2 * (1 + erf(x / sqrt(2)))
//
// The forms on the left keep their relative accuracy where the result is small, down to denormals, which 1 + tanh and
// 1 + erf lose. Elementwise: rows are cut into column blocks, which are the units of parallel work.

#ifndef LTX_ISA

#include <algorithm>

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

// Columns handled at once: the fp32 copies of strided operands and of the bias stay in the L1 cache.
constexpr int64_t kBlockColumns = 1024;

// x * sigmoid(high + low). With e = exp(-|v|) this is x / (1 + e) for v >= 0 and x * e / (1 + e) otherwise, where the
// power of two in e is applied last, so that e itself never underflows.
LTX_INLINE F times_sigmoid(F x, F high, F low) {
  const I negative = high < 0.f;
  const F sign = select(negative, splat(1.f), splat(-1.f));
  const F magnitude = absolute(high);
  const I in_range = magnitude < 150.f;  // e^-150 times any fp32 number but inf rounds to zero
  const Exponential e =
      exponential(select(in_range, -magnitude, splat(-150.f)), select(in_range, sign * low, splat(0.f)));
  // In the denominator e counts only while it is above 2^-25: flooring its exponent changes nothing.
  const I floored = e.exponent > -126 ? e.exponent : splat_int(-126);
  const F denominator = 1.f + e.mantissa * power_of_two(floored);
  const F quotient = select(negative, x * e.mantissa, x) / denominator;
  const F scaled = scale_by_power(quotient, negative ? e.exponent : I{});
  return select(negative & ~in_range, x * 0.f, scaled);  // -inf * 0 is the NaN that torch gives
}

LTX_INLINE F silu(F x) { return times_sigmoid(x, x, splat(0.f)); }

LTX_INLINE F gelu_tanh(F x) {
  const F square = x * x;
  const F twice_u = x * (1.5957691216057308f + 0.07135481282553f * square);
  return times_sigmoid(x, twice_u, splat(0.f));
}

// Phi(-a) = exp(-a^2 / 2) * q(a), with q a rational minimax fit on [0, 15] (relative error 2^-27), beyond which the
// exponential is below the smallest denormal. All coefficients are positive, so nothing cancels.
LTX_INLINE F gelu(F x) {
  const F a = absolute(x);
  const F bounded = select(a < 15.f, a, splat(15.f));
  // The exponential turns an absolute error of its argument into a relative one, so a^2 is formed exactly: the head of
  // a has 12 bits, hence an exact square, and the rest enters the exponential as its low part.
  const F head = (F)((U)bounded & 0xfffff000u);
  const F rest = (bounded - head) * (bounded + head);
  const Exponential e = exponential(head * head * -0.5f, rest * -0.5f);
  F numerator = splat(0.004152922842224774f);
  numerator = numerator * bounded + 0.04087951974530235f;
  numerator = numerator * bounded + 0.18396502097382952f;
  numerator = numerator * bounded + 0.439278865666119f;
  numerator = numerator * bounded + 0.5000000030546273f;
  F denominator = splat(0.010409722184101928f);
  denominator = denominator * bounded + 0.10247587557022145f;
  denominator = denominator * bounded + 0.47139761793447676f;
  denominator = denominator * bounded + 1.2055327819406083f;
  denominator = denominator * bounded + 1.676442734249351f;
  denominator = denominator * bounded + 1.f;
  const I negative = x < 0.f;
  // x * Phi(x) for x < 0, x - x * Phi(-x) otherwise.
  const F tail = scale_by_power(bounded * (e.mantissa * numerator) / denominator, e.exponent);
  const F lower = select(a < 15.f, -tail, x * 0.f);  // -inf * 0 is the NaN that torch gives
  return select(negative, lower, x - tail);
}

template <Activation kActivation>
LTX_INLINE F activate(F x) {
  return kActivation == Activation::kSilu ? silu(x) : kActivation == Activation::kGelu ? gelu(x) : gelu_tanh(x);
}

// A column block: contiguous storage of the input's dtype; the bias is an fp32 row. Absent operands are null.
struct Block {
  int64_t width;
  const void *gate, *up;
  const float* bias;
  void* out;
  bool eager;
  DType bias_sum;  // the dtype that eager code adds the bias in
};

template <class T, Activation kActivation>
void run_block(const Block& block) {
  for (int64_t c = 0; c < block.width; c += kLanes) {
    const int64_t count = block.width - c;
    F x = load_upto(static_cast<const T*>(block.gate) + c, count);
    if (const float* bias = varying(block.bias)) {
      x = x + load(bias + c);
      if (block.eager) x = round_to<T>(round_to(block.bias_sum, x));
    }
    x = activate<kActivation>(x);
    if (const void* up = varying(block.up)) {
      if (block.eager) x = round_to<T>(x);
      x = x * load_upto(static_cast<const T*>(up) + c, count);
    }
    store_upto(static_cast<T*>(block.out) + c, x, count);
  }
}

template <class T>
void run_block(const Block& block, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return run_block<T, Activation::kGelu>(block);
    case Activation::kGeluTanh:
      return run_block<T, Activation::kGeluTanh>(block);
    case Activation::kSilu:
      return run_block<T, Activation::kSilu>(block);
  }
}

// Units are column blocks of rows.
void glu_units(const GluParams& p, int64_t blocks, int64_t begin, int64_t end) {
  float gate_buffer[kBlockColumns], up_buffer[kBlockColumns], out_buffer[kBlockColumns], bias_row[kBlockColumns];
  Block block = {};
  block.bias = p.bias.data == nullptr ? nullptr : bias_row;
  block.eager = p.rounding == Rounding::kEager;
  block.bias_sum = promote(p.dtype, p.bias.dtype);
  const char* last_bias = nullptr;
  int64_t last_width = 0;

  RowIndex index(p.rows, begin / blocks);
  int64_t number = begin % blocks;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t column = number * kBlockColumns;
    block.width = std::min(kBlockColumns, p.rows.width - column);
    const auto read = [&](const RowView& view, float* buffer) -> const void* {
      const void* start = index.pointer(view, column);
      if (start == nullptr || view.column_stride == 1) return start;
      gather(buffer, start, p.dtype, view.column_stride, block.width);
      return buffer;
    };
    block.gate = read(p.gate, gate_buffer);
    block.up = read(p.up, up_buffer);
    const char* bias = index.pointer(p.bias, column);
    if (bias != last_bias || block.width != last_width) {
      if (bias != nullptr) expand(bias_row, bias, p.bias.dtype, p.bias.column_stride, block.width);
      last_bias = bias;
      last_width = block.width;
    }
    void* out = index.pointer(p.out, column);
    block.out = p.out.column_stride == 1 ? out : out_buffer;
    switch (p.dtype) {
      case DType::kFloat32:
        run_block<float>(block, p.activation);
        break;
      case DType::kFloat16:
        run_block<Half>(block, p.activation);
        break;
      case DType::kBFloat16:
        run_block<BFloat>(block, p.activation);
        break;
    }
    if (block.out != out) scatter(out, p.dtype, p.out.column_stride, block.width, out_buffer);
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
