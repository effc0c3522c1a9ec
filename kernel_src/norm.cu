// The norm family, one row kernel: rmsnorm, rmsnorm_residual, layernorm, adaln_rmsnorm, adaln_layernorm, adaln_zero,
// gated_residual, gated_residual_adaln_rmsnorm, gated_residual_adaln_layernorm.
//
//   h   = residual + input * gate
//   n   = h * rstd * (weight_offset + weight)            rstd = 1 / sqrt(mean(h^2) + eps)
//       = (h - mean) * rstd * weight + bias              rstd = 1 / sqrt(mean((h - mean)^2) + eps)
//   out = (n * (1 + scale) + shift) * out_gate           residual_out = h
//
// ltx/params.h (NormParams) says which operands may be absent and how modulation tables enter. Every input is read once
// and every output written once; the row stays in registers between the statistic and the output.
//
// A row belongs to `threads` neighbouring threads; thread t owns the 16-byte packs t, t + threads, t + 2 * threads, ...
// `geometry` picks the number from the row's length and dtype alone (never from the number of rows), so a row's bits
// depend on nothing else. Two kernels share that ownership, the order of the sums and the arithmetic:
//   norm_kernel          the row stays in registers; every access is a whole aligned pack. The main line.
//   norm_kernel_general  walks the row once a sum and once for the output, from cache after the first pass: rows too
//   long
//                        for registers, strides, misaligned views, unusual dtype mixes, eager rounding.
// Keeping everything unusual out of the first keeps its registers, its binary and its compile time small.
#include <array>

#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

// What surrounds the norm: nothing but weights; a modulation after it; a residual before it (and perhaps both).
enum class Fusion { kPlain, kModulate, kResidual };

// Operands that move in whole 16-byte packs, as bits.
enum Packed : uint32_t {
  kInput = 1u << 0,
  kResidualIn = 1u << 1,
  kWeight = 1u << 2,
  kBias = 1u << 3,
  kGate = 1u << 4,
  kGateTable = 1u << 5,
  kScale = 1u << 6,
  kScaleTable = 1u << 7,
  kShift = 1u << 8,
  kShiftTable = 1u << 9,
  kOutGate = 1u << 10,
  kOutGateTable = 1u << 11,
  kOut = 1u << 12,
  kResidualOut = 1u << 13,
};

// Where the row begins in each operand that has rows, in elements.
struct RowStarts {
  int64_t input = 0, residual = 0, gate = 0, scale = 0, shift = 0, out_gate = 0, out = 0, residual_out = 0;

  template <Fusion F>
  __device__ __forceinline__ void add(const NormParams& p, int d, int64_t index) {
    input += index * p.input.stride[d];
    out += index * p.out.stride[d];
    if constexpr (F != Fusion::kPlain) {
      scale += index * p.scale.value.stride[d];
      shift += index * p.shift.value.stride[d];
      out_gate += index * p.out_gate.value.stride[d];
    }
    if constexpr (F == Fusion::kResidual) {
      residual += index * p.residual.stride[d];
      gate += index * p.gate.value.stride[d];
      residual_out += index * p.residual_out.stride[d];
    }
  }
};

__device__ __forceinline__ DType dtype_of(const Modulator& m) {
  return m.table.data ? promote(m.value.dtype, m.table.dtype) : m.value.dtype;
}

// How a pack of a weight or a modulator becomes fp32. Packs: aligned, contiguous, of the row's dtype or fp32.
template <typename T>
struct PackLoader {
  static constexpr bool kEagerPossible = false;
  uint32_t packed;

  template <int kWidth>
  __device__ __forceinline__ void operator()(const RowView& view, Packed, int64_t start, int64_t column, int64_t width,
                                             float (&x)[kWidth]) const {
    if (view.dtype == DTypeOf<T>::value) {
      load_floats_as<T, kWidth>(view.data, start, column, 1, width, true, x);
    } else {
      load_floats_as<float, kWidth>(view.data, start, column, 1, width, true, x);
    }
  }
  __device__ __forceinline__ bool is_packed(Packed) const { return true; }
};

// Anything: any dtype, any strides.
template <typename T>
struct AnyLoader {
  static constexpr bool kEagerPossible = true;
  uint32_t packed;

  template <int kWidth>
  __device__ __forceinline__ void operator()(const RowView& view, Packed bit, int64_t start, int64_t column,
                                             int64_t width, float (&x)[kWidth]) const {
    load_floats<kWidth>(view.data, view.dtype, start, column, view.column_stride, width, packed & bit, x);
  }
  __device__ __forceinline__ bool is_packed(Packed bit) const { return packed & bit; }
};

// value + table for one pack of columns.
template <typename Loader, int kWidth>
__device__ __forceinline__ void load_modulator(const Loader& load, const Modulator& m, Packed value_bit,
                                               Packed table_bit, int64_t start, int64_t column, int64_t width,
                                               bool eager, float (&x)[kWidth]) {
  load(m.value, value_bit, start, column, width, x);
  if (m.table.data) {
    float table[kWidth];
    load(m.table, table_bit, 0, column, width, table);
    const DType dtype = dtype_of(m);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x[i] = __fadd_rn(table[i], x[i]);
      if (eager) x[i] = round_to(dtype, x[i]);
    }
  }
}

// One pack of h = residual + input * gate.
template <typename T, typename Loader, int kWidth>
__device__ __forceinline__ void load_h(const NormParams& p, const Loader& load, const RowStarts& start, int64_t column,
                                       float (&h)[kWidth]) {
  const int64_t width = p.rows.width;
  const bool eager = Loader::kEagerPossible && p.rounding == Rounding::kEager;
  const auto input = load_pack<T, kWidth>(static_cast<const T*>(p.input.data) + start.input, column,
                                          p.input.column_stride, width, load.is_packed(kInput));
  unpack(input, h);
  if (!p.residual.data) return;
  const auto residual = load_pack<T, kWidth>(static_cast<const T*>(p.residual.data) + start.residual, column,
                                             p.residual.column_stride, width, load.is_packed(kResidualIn));
  if (p.gate.value.data) {
    float gate[kWidth];
    load_modulator(load, p.gate, kGate, kGateTable, start.gate, column, width, eager, gate);
    const DType dtype = promote(DTypeOf<T>::value, dtype_of(p.gate));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      h[i] = __fmul_rn(h[i], gate[i]);
      if (eager) h[i] = round_to(dtype, h[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    h[i] = __fadd_rn(to_float(residual.v[i]), h[i]);
    if (eager) h[i] = round_to<T>(h[i]);
  }
}

// One pack of the output, from h and the row's statistic; writes residual_out too.
template <typename T, Statistic S, Fusion F, typename Loader, int kWidth>
__device__ __forceinline__ void store_outputs(const NormParams& p, const Loader& load, const RowStarts& start,
                                              int64_t column, const float (&h)[kWidth], float mean, float rstd) {
  const int64_t width = p.rows.width;
  const bool eager = Loader::kEagerPossible && p.rounding == Rounding::kEager;
  if constexpr (F == Fusion::kResidual) {
    if (p.residual_out.data) {
      store_pack(static_cast<T*>(p.residual_out.data) + start.residual_out, column, p.residual_out.column_stride, width,
                 load.is_packed(kResidualOut), to_pack<T, kWidth>(h));
    }
  }
  if constexpr (S != Statistic::kNone) {
    float n[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = __fmul_rn(S == Statistic::kLayer ? __fsub_rn(h[i], mean) : h[i], rstd);
    DType dtype = DTypeOf<T>::value;  // of n, in an eager chain
    // Llama's and diffusers' RMSNorm round before the weight; LayerNorm and Gemma's (1 + weight) after it.
    const bool round_before_weight = S == Statistic::kRms && p.weight_offset == 0.f;
    if (eager && round_before_weight) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) n[i] = round_to<T>(n[i]);
    }
    if (p.weight.data) {
      float weight[kWidth];
      load(p.weight, kWeight, 0, column, width, weight);
      if (round_before_weight) dtype = promote(dtype, p.weight.dtype);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        n[i] = __fmul_rn(n[i], S == Statistic::kRms ? __fadd_rn(p.weight_offset, weight[i]) : weight[i]);
        if (eager && round_before_weight) n[i] = round_to(dtype, n[i]);
      }
    }
    if constexpr (S == Statistic::kLayer) {
      if (p.bias.data) {
        float bias[kWidth];
        load(p.bias, kBias, 0, column, width, bias);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) n[i] = __fadd_rn(n[i], bias[i]);
      }
    }
    if (eager && !round_before_weight) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) n[i] = round_to<T>(n[i]);
    }
    if constexpr (F != Fusion::kPlain) {
      float m[kWidth];
      if (p.scale.value.data) {
        load_modulator(load, p.scale, kScale, kScaleTable, start.scale, column, width, eager, m);
        const DType scale_dtype = dtype_of(p.scale);
        dtype = promote(dtype, scale_dtype);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          float factor = __fadd_rn(1.f, m[i]);
          if (eager) factor = round_to(scale_dtype, factor);
          n[i] = __fmul_rn(n[i], factor);
          if (eager) n[i] = round_to(dtype, n[i]);
        }
      }
      if (p.shift.value.data) {
        load_modulator(load, p.shift, kShift, kShiftTable, start.shift, column, width, eager, m);
        dtype = promote(dtype, dtype_of(p.shift));
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          n[i] = __fadd_rn(n[i], m[i]);
          if (eager) n[i] = round_to(dtype, n[i]);
        }
      }
      if (p.out_gate.value.data) {
        load_modulator(load, p.out_gate, kOutGate, kOutGateTable, start.out_gate, column, width, eager, m);
        dtype = promote(dtype, dtype_of(p.out_gate));
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          n[i] = __fmul_rn(n[i], m[i]);
          if (eager) n[i] = round_to(dtype, n[i]);
        }
      }
    }
    store_pack(static_cast<T*>(p.out.data) + start.out, column, p.out.column_stride, width, load.is_packed(kOut),
               to_pack<T, kWidth>(n));
  }
}

// Sum over a pack of x or (x - mean)^2 or x^2; columns past the row's end count for nothing.
template <bool kSquare, int kWidth>
__device__ __forceinline__ float pack_sum(const float (&h)[kWidth], float mean, int64_t column, int64_t width) {
  float terms[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float centred = __fsub_rn(h[i], mean);
    terms[i] = column + i < width ? (kSquare ? __fmul_rn(centred, centred) : h[i]) : 0.f;
  }
  return tree_sum(terms);
}

// The row of a thread between its load and its use. The input keeps its dtype (half the registers of fp32); a sum with
// the residual is kept in fp32, since the norm works on the unrounded h.
template <typename T, Fusion F>
struct HeldPack {
  static constexpr int kWidth = kPackWidth<T>;
  Pack<T, kWidth> raw;

  __device__ __forceinline__ void load(const NormParams& p, const PackLoader<T>&, const RowStarts& start,
                                       int64_t column) {
    raw = *reinterpret_cast<const Pack<T, kWidth>*>(static_cast<const T*>(p.input.data) + start.input + column);
  }
  __device__ __forceinline__ void get(float (&h)[kWidth]) const { unpack(raw, h); }
};

template <typename T>
struct HeldPack<T, Fusion::kResidual> {
  static constexpr int kWidth = kPackWidth<T>;
  float sum[kWidth];

  __device__ __forceinline__ void load(const NormParams& p, const PackLoader<T>& loader, const RowStarts& start,
                                       int64_t column) {
    load_h<T>(p, loader, start, column, sum);
  }
  __device__ __forceinline__ void get(float (&h)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) h[i] = sum[i];
  }
};

constexpr int kMaxThreads = 512;  // of a row in registers: leaves 128 registers a thread

template <typename T, Statistic S, Fusion F, int kPacks>
__global__ void __launch_bounds__(kMaxThreads) norm_kernel(const __grid_constant__ NormParams p, int threads) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ float scratch[2][32];
  const PackLoader<T> loader{};
  const int width = static_cast<int>(p.rows.width);
  const int first = static_cast<int>(threadIdx.x) % threads * kWidth, step = threads * kWidth;
  const int slot = static_cast<int>(threadIdx.x) / threads, slots = static_cast<int>(blockDim.x) / threads;
  // Slots past the last row read row 0 and write nothing: every thread must reach every shuffle and barrier.
  const int64_t row = static_cast<int64_t>(blockIdx.x) * slots + slot;
  const bool active = row < p.rows.count;
  RowStarts start;
  walk_row(p.rows, active ? row : 0, [&](int d, int64_t index) { start.template add<F>(p, d, index); });

  HeldPack<T, F> held[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (first + k * step < width) held[k].load(p, loader, start, first + k * step);
  }
  float mean = 0.f, rstd = 0.f, h[kWidth];
  if constexpr (S == Statistic::kLayer) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (first + k * step < width) {
        held[k].get(h);
        sum += pack_sum<false>(h, 0.f, first + k * step, width);
      }
    }
    mean = row_sum(sum, threads, scratch[0]) / static_cast<float>(width);
  }
  if constexpr (S != Statistic::kNone) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (first + k * step < width) {
        held[k].get(h);
        sum += pack_sum<true>(h, mean, first + k * step, width);
      }
    }
    sum = row_sum(sum, threads, scratch[1]);
    rstd = rsqrtf(sum / static_cast<float>(width) + p.eps);
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    if (active && first + k * step < width) {
      held[k].get(h);
      store_outputs<T, S, F>(p, loader, start, first + k * step, h, mean, rstd);
    }
  }
}

template <typename T, Statistic S>
__global__ void __launch_bounds__(kMaxThreads)
    norm_kernel_general(const __grid_constant__ NormParams p, uint32_t packed, int threads) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr Fusion kAll = Fusion::kResidual;  // everything is looked up at run time
  __shared__ float scratch[2][32];
  const AnyLoader<T> loader{packed};
  const int64_t width = p.rows.width;
  const int64_t first = static_cast<int64_t>(threadIdx.x % threads) * kWidth;
  const int64_t step = static_cast<int64_t>(threads) * kWidth;
  const int slot = static_cast<int>(threadIdx.x) / threads, slots = static_cast<int>(blockDim.x) / threads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * slots + slot;
  const bool active = row < p.rows.count;
  RowStarts start;
  walk_row(p.rows, active ? row : 0, [&](int d, int64_t index) { start.template add<kAll>(p, d, index); });
  float mean = 0.f, rstd = 0.f, h[kWidth];
  // Outputs may lie in the inputs' memory: nothing is written before the last pass.
#pragma unroll 1
  for (int pass = S == Statistic::kLayer ? 0 : 1; S != Statistic::kNone && pass < 2; ++pass) {
    float sum = 0.f;
    for (int64_t column = first; column < width; column += step) {
      load_h<T>(p, loader, start, column, h);
      sum += pass == 0 ? pack_sum<false>(h, 0.f, column, width) : pack_sum<true>(h, mean, column, width);
    }
    sum = row_sum(sum, threads, scratch[pass]);
    if (pass == 0) {
      mean = sum / static_cast<float>(width);
    } else {
      rstd = rsqrtf(sum / static_cast<float>(width) + p.eps);
    }
  }
  if (!active) return;
  for (int64_t column = first; column < width; column += step) {
    load_h<T>(p, loader, start, column, h);
    store_outputs<T, S, kAll>(p, loader, start, column, h, mean, rstd);
  }
}

// How a row is shared out: `threads` a row, `packs` a thread (0: more than the registers hold).
struct Geometry {
  int threads;
  int packs;
};

Geometry geometry(int64_t width, int pack_width) {
  const int64_t packs = ceil_div(width, pack_width);
  if (packs <= 32) return {next_power_of_two(packs), 1};  // several rows a warp
  if (packs <= 64) return {32, 2};
  if (packs <= 128) return {32, 4};
  // Four 16-byte loads in flight a thread, whole warps.
  if (packs <= 4 * kMaxThreads) return {static_cast<int>(ceil_div(packs, 128)) * 32, 4};
  return {kMaxThreads, packs <= 8 * kMaxThreads ? 8 : 0};
}

// The operands of which every access may be a whole pack; `fast`: all of them, and nothing else stands against
// norm_kernel.
template <typename T>
uint32_t packed_operands(const NormParams& p, bool& fast) {
  uint32_t bits = 0;
  fast = p.rounding == Rounding::kFp32;
  const auto set = [&](Packed bit, const RowView& view) {
    if (view.data == nullptr) return;
    const bool packed =
        is_packed(view.data, view.dtype, kPackWidth<T>, p.rows.width, view.column_stride, view.stride, p.rows.ndim);
    if (packed) bits |= bit;
    fast = fast && packed && (view.dtype == DTypeOf<T>::value || view.dtype == DType::kFloat32);
  };
  set(kInput, p.input);
  set(kResidualIn, p.residual);
  set(kWeight, p.weight);
  set(kBias, p.bias);
  set(kGate, p.gate.value);
  set(kGateTable, p.gate.table);
  set(kScale, p.scale.value);
  set(kScaleTable, p.scale.table);
  set(kShift, p.shift.value);
  set(kShiftTable, p.shift.table);
  set(kOutGate, p.out_gate.value);
  set(kOutGateTable, p.out_gate.table);
  set(kOut, p.out);
  set(kResidualOut, p.residual_out);
  return bits;
}

template <typename T, Statistic S, Fusion F>
void launch(const NormParams& p, const Context& context) {
  const Geometry g = geometry(p.rows.width, kPackWidth<T>);
  // Short rows share a block of four warps; a row of more than one warp has a block to itself.
  const int block = g.threads > 32 ? g.threads : 128;
  const unsigned grid = grid_size(ceil_div(p.rows.count, block / g.threads));
  const auto stream = static_cast<cudaStream_t>(context.stream);
  bool fast = false;
  const uint32_t packed = packed_operands<T>(p, fast);
  if (!fast || g.packs == 0) {
    norm_kernel_general<T, S><<<grid, block, 0, stream>>>(p, packed, g.threads);
  } else if (g.packs == 1) {
    norm_kernel<T, S, F, 1><<<grid, block, 0, stream>>>(p, g.threads);
  } else if (g.packs == 2) {
    norm_kernel<T, S, F, 2><<<grid, block, 0, stream>>>(p, g.threads);
  } else if (g.packs == 4) {
    norm_kernel<T, S, F, 4><<<grid, block, 0, stream>>>(p, g.threads);
  } else {
    norm_kernel<T, S, F, 8><<<grid, block, 0, stream>>>(p, g.threads);
  }
  check_launch("norm");
}

template <typename T, Statistic S>
void dispatch_fusion(const NormParams& p, const Context& context) {
  if (p.residual.data) return launch<T, S, Fusion::kResidual>(p, context);
  if (p.scale.value.data || p.shift.value.data || p.out_gate.value.data) {
    return launch<T, S, Fusion::kModulate>(p, context);
  }
  return launch<T, S, Fusion::kPlain>(p, context);
}

}  // namespace

void norm(const NormParams& p, const Context& context) {
  if (needs_split(p.rows)) {
    const auto views = [](NormParams& q) {
      return std::array<RowView*, 8>{&q.input,      &q.residual,    &q.out,         &q.residual_out,
                                     &q.gate.value, &q.scale.value, &q.shift.value, &q.out_gate.value};
    };
    return for_each_slice(p, views, [&](const NormParams& q) { norm(q, context); });
  }
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.statistic == Statistic::kRms) return dispatch_fusion<T, Statistic::kRms>(p, context);
    if (p.statistic == Statistic::kLayer) return dispatch_fusion<T, Statistic::kLayer>(p, context);
    return launch<T, Statistic::kNone, Fusion::kResidual>(p, context);
  });
}

}  // namespace ltx
