// Gated and plain activations, one elementwise kernel: geglu, swiglu, gelu (with or without bias).
//
//   out = activation(gate) * up            gate and up: halves of one packed row, or two tensors
//   out = activation(input + bias)         gelu
//
//   gelu(x)      = x / 2 * (1 + erf(x / sqrt(2)))
//   gelu_tanh(x) = x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)     the same as x / 2 * (1 + tanh(u))
//   silu(x)      = x * sigmoid(x)
//
// A thread owns kPacks packs of 16 bytes; the bindings flatten contiguous tensors into one long row (GluParams).
#include <array>

#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

// x * sigmoid(z), z being x or a polynomial of x. Rows of fp32 take expf and an IEEE division. 16-bit rows take the
// special function unit: ex2.approx is off by less than 2^-16 for |z| < 100 and rcp.approx by 2^-23, far below half an
// ulp of fp16, and a memory-bound kernel has no time for more. The sixteenths keep the reciprocal of 1 + exp(88)
// normal.
template <typename T>
__device__ __forceinline__ float times_sigmoid(float x, float z) {
  if constexpr (sizeof(T) == 4) {
    return x / (1.f + expf(-z));
  } else {
    float power, reciprocal;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(z * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(fmaf(power, 0.0625f, 0.0625f)));
    return x * 0.0625f * reciprocal;
  }
}

template <typename T, Activation A>
__device__ __forceinline__ float activate(float x) {
  if constexpr (A == Activation::kSilu) return times_sigmoid<T>(x, x);
  if constexpr (A == Activation::kGelu) return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
  // 2u = 2 sqrt(2 / pi) (x + 0.044715 x^3)
  return times_sigmoid<T>(x, x * fmaf(x * x, 0.071354816272600289f, 1.5957691216057308f));
}

template <typename T, Activation A, bool kPacked>
__global__ void __launch_bounds__(256)
    glu_kernel(const __grid_constant__ GluParams p, int64_t packs_per_row, bool bias_packed) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr int kPacks = 2;
  const int64_t packs = p.rows.count * packs_per_row;
  const bool eager = p.rounding == Rounding::kEager;
  Pack<T, kWidth> gate[kPacks], up[kPacks];
  int64_t column[kPacks], out[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int64_t pack = (static_cast<int64_t>(blockIdx.x) * kPacks + k) * blockDim.x + threadIdx.x;
    column[k] = -1;
    if (pack >= packs) continue;
    // One long row divides nothing; otherwise 32 bits do where they suffice.
    int64_t row = 0, index = pack;
    if (p.rows.count > 1) {
      row = packs <= 0xffffffffll ? static_cast<uint32_t>(pack) / static_cast<uint32_t>(packs_per_row)
                                  : pack / packs_per_row;
      index = pack - row * packs_per_row;
    }
    column[k] = index * kWidth;
    int64_t gate_start = 0, up_start = 0, out_start = 0;
    walk_row(p.rows, row, [&](int d, int64_t i) {
      gate_start += i * p.gate.stride[d];
      up_start += i * p.up.stride[d];
      out_start += i * p.out.stride[d];
    });
    out[k] = out_start;
    gate[k] = load_pack<T, kWidth>(static_cast<const T*>(p.gate.data) + gate_start, column[k], p.gate.column_stride,
                                   p.rows.width, kPacked);
    if (p.up.data) {
      up[k] = load_pack<T, kWidth>(static_cast<const T*>(p.up.data) + up_start, column[k], p.up.column_stride,
                                   p.rows.width, kPacked);
    }
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (column[k] < 0) continue;
    float x[kWidth];
    unpack(gate[k], x);
    if (p.bias.data) {
      float bias[kWidth];
      load_floats<kWidth>(p.bias.data, p.bias.dtype, 0, column[k], p.bias.column_stride, p.rows.width, bias_packed,
                          bias);
      const DType dtype = promote(DTypeOf<T>::value, p.bias.dtype);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        x[i] = __fadd_rn(x[i], bias[i]);
        if (eager) x[i] = round_to<T>(round_to(dtype, x[i]));
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = activate<T, A>(x[i]);
    if (p.up.data) {
      float y[kWidth];
      unpack(up[k], y);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (eager) x[i] = round_to<T>(x[i]);
        x[i] = __fmul_rn(x[i], y[i]);
      }
    }
    store_pack(static_cast<T*>(p.out.data) + out[k], column[k], p.out.column_stride, p.rows.width, kPacked,
               to_pack<T, kWidth>(x));
  }
}

template <typename T, Activation A>
void launch(const GluParams& p, const Context& context) {
  constexpr int kThreads = 256, kPacks = 2;
  const auto packed = [&](const RowView& v) {
    return is_packed(v.data, v.dtype, kPackWidth<T>, p.rows.width, v.column_stride, v.stride, p.rows.ndim);
  };
  const int64_t packs_per_row = ceil_div(p.rows.width, kPackWidth<T>);
  const unsigned grid = grid_size(ceil_div(p.rows.count * packs_per_row, kThreads * kPacks));
  const auto stream = static_cast<cudaStream_t>(context.stream);
  if (packed(p.gate) && packed(p.out) && (!p.up.data || packed(p.up))) {
    glu_kernel<T, A, true><<<grid, kThreads, 0, stream>>>(p, packs_per_row, packed(p.bias));
  } else {
    glu_kernel<T, A, false><<<grid, kThreads, 0, stream>>>(p, packs_per_row, packed(p.bias));
  }
  check_launch("glu");
}

}  // namespace

void glu(const GluParams& p, const Context& context) {
  if (needs_split(p.rows)) {
    const auto views = [](GluParams& q) { return std::array<RowView*, 3>{&q.gate, &q.up, &q.out}; };
    return for_each_slice(p, views, [&](const GluParams& q) { glu(q, context); });
  }
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.activation == Activation::kSilu) return launch<T, Activation::kSilu>(p, context);
    if (p.activation == Activation::kGeluTanh) return launch<T, Activation::kGeluTanh>(p, context);
    return launch<T, Activation::kGelu>(p, context);
  });
}

}  // namespace ltx
