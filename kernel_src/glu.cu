// Gated and plain activations, one elementwise kernel: geglu, swiglu, gelu (with or without bias).
//
//   out = activation(gate) * up            gate and up: halves of one packed row, or two tensors
//   out = activation(input + bias)         gelu
//
// A thread owns kPacks packs of 16 bytes. Contiguous tensors come as one long row (the bindings flatten them); packed
// gate and up as rows. glu_kernel takes these; glu_kernel_general any strides, alignment and rounding.
#include <array>

#include "ltx/activation.cuh"
#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

constexpr int kThreads = 256;
// Packs a thread of plain activations, where there are enough of them to fill the GPU several times over, else one, as
// for gated activations (H200, bf16: gelu 16128x8192 132 us with four, 135 with one, 8x8192 4.8 us with four, 4.4 with
// one; swiglu 16128x8192 187.5 us with two, 186.0 with one; streaming loads and stores lose 8 % and more).
constexpr int kManyPacks = 4, kFillsOf = 4;

struct PackedParams {
  const char *gate, *up, *bias;  // gelu: no up
  char* out;
  int64_t gate_stride, up_stride, out_stride;  // of rows, in bytes
  int64_t packs;                               // of a row
  uint32_t chunks;                             // blocks of a row
  DType bias_dtype;
};

template <typename T, Activation A, bool kGated, int kPacks>
__global__ void __launch_bounds__(kThreads) glu_kernel(const __grid_constant__ PackedParams p) {
  constexpr int kWidth = kPackWidth<T>;
  using P = Pack<T, kWidth>;
  const uint32_t row = blockIdx.x / p.chunks, chunk = blockIdx.x - row * p.chunks;
  const int64_t first = static_cast<int64_t>(chunk) * (kThreads * kPacks) + threadIdx.x;
  const auto* gate = reinterpret_cast<const P*>(p.gate + row * p.gate_stride) + first;
  const auto* up = reinterpret_cast<const P*>(p.up + row * p.up_stride) + first;
  auto* out = reinterpret_cast<P*>(p.out + row * p.out_stride) + first;
  const int64_t left = p.packs - first;
  P gates[kPacks], ups[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (k * kThreads < left) {
      gates[k] = gate[k * kThreads];
      if constexpr (kGated) ups[k] = up[k * kThreads];
    }
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (k * kThreads >= left) break;
    float x[kWidth];
    unpack(gates[k], x);
    if (!kGated && p.bias) {
      float bias[kWidth];
      load_floats<kWidth>(p.bias, p.bias_dtype, 0, (first + k * kThreads) * kWidth, 1, 0, true, bias);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = __fadd_rn(x[i], bias[i]);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = activate<T, A>(x[i]);
    if constexpr (kGated) {
      float y[kWidth];
      unpack(ups[k], y);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = __fmul_rn(x[i], y[i]);
    }
    out[k * kThreads] = to_pack<T, kWidth>(x);
  }
}

template <typename T, Activation A>
__global__ void __launch_bounds__(kThreads)
    glu_kernel_general(const __grid_constant__ GluParams p, int64_t packs_per_row) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t packs = p.rows.count * packs_per_row;
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pack >= packs) return;
  const int64_t row =
      packs <= 0xffffffffll ? static_cast<uint32_t>(pack) / static_cast<uint32_t>(packs_per_row) : pack / packs_per_row;
  const int64_t column = (pack - row * packs_per_row) * kWidth, width = p.rows.width;
  int64_t gate = 0, up = 0, out = 0;
  walk_row(p.rows, row, [&](int d, int64_t i) {
    gate += i * p.gate.stride[d];
    up += i * p.up.stride[d];
    out += i * p.out.stride[d];
  });
  const bool eager = p.rounding == Rounding::kEager;
  float x[kWidth], y[kWidth];
  unpack(load_pack<T, kWidth>(static_cast<const T*>(p.gate.data) + gate, column, p.gate.column_stride, width, false),
         x);
  if (p.up.data) {
    unpack(load_pack<T, kWidth>(static_cast<const T*>(p.up.data) + up, column, p.up.column_stride, width, false), y);
  }
  if (p.bias.data) {
    float bias[kWidth];
    load_floats<kWidth>(p.bias.data, p.bias.dtype, 0, column, p.bias.column_stride, width, false, bias);
    const DType dtype = promote(DTypeOf<T>::value, p.bias.dtype);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x[i] = __fadd_rn(x[i], bias[i]);
      if (eager) x[i] = round_to<T>(round_to(dtype, x[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    // An eager chain computes the activation in fp32 and rounds it.
    x[i] = eager ? round_to<T>(activate<float, A>(x[i])) : activate<T, A>(x[i]);
    if (p.up.data) x[i] = __fmul_rn(x[i], y[i]);
  }
  store_pack(static_cast<T*>(p.out.data) + out, column, p.out.column_stride, width, false, to_pack<T, kWidth>(x));
}

// Whether glu_kernel takes the call: whole packs, rows that are one dimension, and not so short that most of a block
// would idle.
template <typename T>
bool is_main_line(const GluParams& p) {
  const auto packed = [&](const RowView& v) {
    return !v.data || is_packed(v.data, v.dtype, kPackWidth<T>, p.rows.width, v.column_stride, v.stride, p.rows.ndim);
  };
  return p.rounding == Rounding::kFp32 && p.rows.ndim <= 1 && packed(p.gate) && packed(p.up) && packed(p.bias) &&
         packed(p.out) && (p.rows.count == 1 || p.rows.width / kPackWidth<T> >= kThreads / 4);
}

template <typename T, Activation A>
void launch(const GluParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int64_t packs_per_row = ceil_div(p.rows.width, kPackWidth<T>);
  if (takes_packed("glu", forced().glu, is_main_line<T>(p))) {
    const auto row_stride = [&](const RowView& v) {
      return p.rows.ndim == 1 ? v.stride[0] * static_cast<int64_t>(sizeof(T)) : 0;
    };
    const int64_t blocks = p.rows.count * ceil_div(packs_per_row, kThreads * kManyPacks);
    const bool many = !p.up.data && blocks >= kFillsOf * multiprocessors(context.device);
    const int a_thread = many ? kManyPacks : 1;
    const int64_t chunks = ceil_div(packs_per_row, kThreads * a_thread);
    const unsigned grid = grid_size(p.rows.count * chunks);
    const PackedParams q{static_cast<const char*>(p.gate.data),
                         static_cast<const char*>(p.up.data),
                         static_cast<const char*>(p.bias.data),
                         static_cast<char*>(p.out.data),
                         row_stride(p.gate),
                         row_stride(p.up),
                         row_stride(p.out),
                         packs_per_row,
                         static_cast<uint32_t>(chunks),
                         p.bias.dtype};
    if (p.up.data) {
      glu_kernel<T, A, true, 1><<<grid, kThreads, 0, stream>>>(q);
    } else if (many) {
      glu_kernel<T, A, false, kManyPacks><<<grid, kThreads, 0, stream>>>(q);
    } else {
      glu_kernel<T, A, false, 1><<<grid, kThreads, 0, stream>>>(q);
    }
  } else {
    const unsigned grid = grid_size(ceil_div(p.rows.count * packs_per_row, kThreads));
    glu_kernel_general<T, A><<<grid, kThreads, 0, stream>>>(p, packs_per_row);
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
