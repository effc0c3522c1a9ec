// Gated and plain activations, one elementwise kernel: geglu, swiglu, gelu (with or without bias), swiglu_clamped,
// gate_heads.
//
//   out = activation(gate) * up            gate and up: halves of one packed row, or two tensors
//   out = activation(input + bias)         gelu
//   out = g * sigmoid(alpha * g) * (u + 1) swiglu_clamped: g = min(gate, limit), u = clamp(up, -limit, limit)
//   out = up * scale * sigmoid(gate)       gate_heads: a gate for each column, or for all columns of a head
//
// A thread owns a pack of 16 bytes. Contiguous tensors come as one long row (the bindings flatten them); packed gate
// and up as rows, also those that have the two in turn. glu_kernel takes these; glu_kernel_general any strides,
// alignment and rounding.
#include <algorithm>
#include <array>

#include "ltx/activation.cuh"
#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

// Small blocks of one pack a thread and few instructions: the blocks, not the threads, keep memory busy (H200, bf16, of
// a copy's time, gelu 16128x8192: 1.00, with 512 threads 1.03, with two packs 1.01, with four 1.04; streaming loads and
// stores lose up to 2 %).
constexpr int kThreads = 128;

struct PackedParams {
  const char *gate, *up, *bias;  // gelu: no up
  char* out;
  uint64_t gate_stride, up_stride, out_stride;  // of rows, in bytes
  uint32_t packs;                               // of a row
  uint32_t rows;
  DType bias_dtype;
  float scale, alpha, limit;
  uint32_t head_packs;   // kHeads: packs that share a gate
  uint64_t head_stride;  // from one gate to the next, in bytes
};

// kHeads: a gate for several packs. kInTurn: gate and up in turn, g0 u0 g1 u1 ...
enum class Form { kPlain, kBias, kGated, kHeads, kInTurn };

// min(x, limit), where NaN stays.
__device__ __forceinline__ float at_most(float x, float limit) { return x > limit ? limit : x; }
__device__ __forceinline__ float clamp(float x, float limit) { return x < -limit ? -limit : at_most(x, limit); }

// What becomes of a gate and its up.
template <typename T, Activation A, typename Params>
__device__ __forceinline__ float combine(const Params& p, float gate, float up) {
  if constexpr (A == Activation::kSigmoid) {
    return __fmul_rn(__fmul_rn(p.scale, sigmoid<T>(gate)), up);
  } else if constexpr (A == Activation::kClampedSilu) {
    const float y = times_sigmoid<T, true>(at_most(gate, p.limit), p.alpha * kExponentUnit<T>);
    return __fmul_rn(y, __fadd_rn(clamp(up, p.limit), 1.f));
  } else {
    return __fmul_rn(activate<T, A>(gate), up);
  }
}

// The same with the roundings of an eager chain, which computes activations in fp32.
template <typename T, Activation A>
__device__ __forceinline__ float combine_eager(const GluParams& p, float gate, float up) {
  if constexpr (A == Activation::kSigmoid) {
    return __fmul_rn(round_to<T>(__fmul_rn(p.scale, round_to<T>(sigmoid<float>(gate)))), up);
  } else if constexpr (A == Activation::kClampedSilu) {
    const float limit = round_to<T>(p.limit), g = at_most(gate, limit), u = clamp(up, limit);
    const float weight = round_to<T>(sigmoid<float>(round_to<T>(__fmul_rn(g, p.alpha))));
    return __fmul_rn(round_to<T>(__fadd_rn(u, 1.f)), round_to<T>(__fmul_rn(g, weight)));
  } else {
    return __fmul_rn(round_to<T>(activate<float, A>(gate)), up);
  }
}

// Two packs of gates and ups in turn become the gates and the ups.
template <int kWidth>
__device__ __forceinline__ void part_in_turn(float (&x)[kWidth], float (&y)[kWidth]) {
  float gates[kWidth], ups[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const int j = 2 * i;
    gates[i] = j < kWidth ? x[j % kWidth] : y[j % kWidth];
    ups[i] = j < kWidth ? x[j % kWidth + 1] : y[j % kWidth + 1];
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    x[i] = gates[i];
    y[i] = ups[i];
  }
}

// Rows that a thread works on at once, where they share a bias and there are enough of them (H200, bf16, gelu erf with
// bias: 16128x8192 1.008 x a copy, 1.027 with one; 7x8192 4.4 us, 4.7 with two: h200-tuning.json).
constexpr int kBiasRows = 2, kEnoughBlocks = 64;  // the latter of one row, a multiprocessor

// grid: x = blocks of a row, y and z = groups of kRows rows.
template <typename T, Activation A, Form F, int kRows = 1>
__global__ void __launch_bounds__(kThreads) glu_kernel(const __grid_constant__ PackedParams p) {
  constexpr int kWidth = kPackWidth<T>;
  using P = Pack<T, kWidth>;
  const uint32_t pack = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t first_row = (blockIdx.z * kMaxGridY + blockIdx.y) * kRows;
  if (pack >= p.packs || first_row >= p.rows) return;
  constexpr bool kGated = F == Form::kGated || F == Form::kHeads;
  P gate[kRows], up;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (F != Form::kHeads && first_row + r < p.rows) {
      const P* row = reinterpret_cast<const P*>(p.gate + (first_row + r) * p.gate_stride);
      gate[r] = row[F == Form::kInTurn ? 2 * pack : pack];
      if (F == Form::kInTurn) up = row[2 * pack + 1];
    }
  }
  if constexpr (kGated) up = reinterpret_cast<const P*>(p.up + first_row * p.up_stride)[pack];
  float head_gate = 0.f;
  if constexpr (F == Form::kHeads) {
    const char* row = p.gate + first_row * p.gate_stride;
    head_gate = to_float(*reinterpret_cast<const T*>(row + pack / p.head_packs * p.head_stride));
  }
  float bias[kWidth];
  if constexpr (F == Form::kBias) {
    load_floats<kWidth>(p.bias, p.bias_dtype, 0, static_cast<int64_t>(pack) * kWidth, 1, 0, true, bias);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float x[kWidth];
    if constexpr (F == Form::kHeads) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = head_gate;
    } else {
      unpack(gate[r], x);
    }
    if constexpr (kGated || F == Form::kInTurn) {
      float y[kWidth];
      unpack(up, y);
      if constexpr (F == Form::kInTurn) part_in_turn(x, y);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = combine<T, A>(p, x[i], y[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = activate<T, A>(F == Form::kBias ? __fadd_rn(x[i], bias[i]) : x[i]);
    }
    if (first_row + r < p.rows) {
      reinterpret_cast<P*>(p.out + (first_row + r) * p.out_stride)[pack] = to_pack<T, kWidth>(x);
    }
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
  const T* gates = static_cast<const T*>(p.gate.data) + gate;
  if (p.gate_repeat == 1) {
    unpack(load_pack<T, kWidth>(gates, column, p.gate.column_stride, width, false), x);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x[i] = column + i < width ? to_float(gates[(column + i) / p.gate_repeat * p.gate.column_stride]) : 0.f;
    }
  }
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
    if (p.up.data) {
      x[i] = eager ? combine_eager<T, A>(p, x[i], y[i]) : combine<T, A>(p, x[i], y[i]);
    } else {
      x[i] = eager ? round_to<T>(activate<float, A>(x[i])) : activate<T, A>(x[i]);
    }
  }
  store_pack(static_cast<T*>(p.out.data) + out, column, p.out.column_stride, width, false, to_pack<T, kWidth>(x));
}

// Whether gate and up of swiglu_clamped lie in turn, element by element.
template <typename T>
bool is_in_turn(const GluParams& p) {
  return p.activation == Activation::kClampedSilu && p.up.data == static_cast<const T*>(p.gate.data) + 1 &&
         p.gate.column_stride == 2 && p.up.column_stride == 2 && p.rows.ndim <= 1 && p.gate.stride[0] == p.up.stride[0];
}

// Whether glu_kernel takes the call: whole packs, rows that are one dimension, and not so short that most of a block
// would idle.
template <typename T>
bool is_main_line(const GluParams& p) {
  const auto packed = [&](const RowView& v, int64_t width, int64_t column_stride) {
    return !v.data || is_packed(v.data, v.dtype, kPackWidth<T>, width, column_stride, v.stride, p.rows.ndim);
  };
  const auto whole = [&](const RowView& v) { return packed(v, p.rows.width, v.column_stride); };
  const bool in_turn = is_in_turn<T>(p);
  const bool gate = p.gate_repeat > 1 ? p.gate_repeat % kPackWidth<T> == 0
                    : in_turn         ? packed(p.gate, 2 * p.rows.width, 1)
                                      : whole(p.gate);
  return p.rounding == Rounding::kFp32 && p.rows.ndim <= 1 && gate && (in_turn || whole(p.up)) && whole(p.bias) &&
         whole(p.out) && p.rows.count <= 0x7fffffff && p.rows.width / kPackWidth<T> <= 0x7fffffff &&
         (p.rows.count == 1 || p.rows.width / kPackWidth<T> >= kThreads / 4);
}

template <typename T, Activation A>
void launch(const GluParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int64_t packs_per_row = ceil_div(p.rows.width, kPackWidth<T>);
  if (takes_packed("glu", forced().glu, is_main_line<T>(p))) {
    const auto row_stride = [&](const RowView& v) {
      return p.rows.ndim == 1 ? static_cast<uint64_t>(v.stride[0]) * sizeof(T) : 0;
    };
    const int64_t blocks = ceil_div(packs_per_row, kThreads);
    const bool several =
        p.bias.data && p.rows.count * blocks >= int64_t{kEnoughBlocks} * multiprocessors(context.device);
    const int64_t groups = ceil_div(p.rows.count, several ? kBiasRows : 1);
    const dim3 grid(grid_size(blocks), static_cast<unsigned>(std::min<int64_t>(groups, kMaxGridY)),
                    static_cast<unsigned>(ceil_div(groups, kMaxGridY)));
    const PackedParams q{static_cast<const char*>(p.gate.data),
                         static_cast<const char*>(p.up.data),
                         static_cast<const char*>(p.bias.data),
                         static_cast<char*>(p.out.data),
                         row_stride(p.gate),
                         row_stride(p.up),
                         row_stride(p.out),
                         static_cast<uint32_t>(packs_per_row),
                         static_cast<uint32_t>(p.rows.count),
                         p.bias.dtype,
                         p.scale,
                         p.alpha,
                         p.limit,
                         static_cast<uint32_t>(p.gate_repeat / kPackWidth<T>),
                         static_cast<uint64_t>(p.gate.column_stride) * sizeof(T)};
    if constexpr (A == Activation::kSigmoid || A == Activation::kClampedSilu) {
      constexpr Form kOther = A == Activation::kSigmoid ? Form::kHeads : Form::kInTurn;
      if (A == Activation::kSigmoid ? p.gate_repeat > 1 : is_in_turn<T>(p)) {
        glu_kernel<T, A, kOther><<<grid, kThreads, 0, stream>>>(q);
      } else {
        glu_kernel<T, A, Form::kGated><<<grid, kThreads, 0, stream>>>(q);
      }
    } else if (p.up.data) {
      glu_kernel<T, A, Form::kGated><<<grid, kThreads, 0, stream>>>(q);
    } else if (several) {
      glu_kernel<T, A, Form::kBias, kBiasRows><<<grid, kThreads, 0, stream>>>(q);
    } else if (p.bias.data) {
      glu_kernel<T, A, Form::kBias><<<grid, kThreads, 0, stream>>>(q);
    } else {
      glu_kernel<T, A, Form::kPlain><<<grid, kThreads, 0, stream>>>(q);
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
    if (p.activation == Activation::kSigmoid) return launch<T, Activation::kSigmoid>(p, context);
    if (p.activation == Activation::kClampedSilu) return launch<T, Activation::kClampedSilu>(p, context);
    return launch<T, Activation::kGelu>(p, context);
  });
}

}  // namespace ltx
