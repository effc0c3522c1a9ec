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
// A row belongs to the threads of a part of a warp, of a block, or (very long rows, compute capability 9.0 on) of the
// blocks of a cluster. A thread owns `packs` 16-byte packs, those of a warp's lanes lying side by side. `geometry`
// picks the numbers from the op and the row's length and dtype alone (never from the number of rows), so a row's bits
// depend on nothing else. Two kernels share that ownership, the order of the sums and the arithmetic:
//   norm_kernel          the row stays in registers and every access is a whole aligned pack. The main line.
//   norm_kernel_general  walks the row once a sum and once for the output, from cache after the first pass, for rows
//                        longer than the registers hold, strides, misaligned views, dtype mixes and eager rounding.
// Keeping everything unusual out of the first keeps its registers, its binary and its compile time small.
//
// The main line is short of instructions before it is short of bandwidth: on an H200 a row of 2048 bf16 leaves a
// multiprocessor 1900 issue slots, and 800 taken cost 3 % over a copy, 1300 20 %. Hence everything that is added to or
// multiplied with the normalised row is multiplied out first (one FMA an element), rows share the packs of their
// vectors, offsets are known at compile time, and so are the vectors that a model's block passes.
#include <algorithm>
#include <array>
#include <type_traits>

#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

// What surrounds the norm: nothing but weights; a modulation after it; a residual before it; a gated residual before it
// and perhaps a modulation after it.
enum class Fusion { kPlain, kModulate, kAdd, kGated };

constexpr bool has_residual(Fusion f) { return f == Fusion::kAdd || f == Fusion::kGated; }
constexpr bool has_modulation(Fusion f) { return f == Fusion::kModulate || f == Fusion::kGated; }

// Operands that move in whole 16-byte packs, as bits. First those with a value for every element, then the vectors.
enum Packed : uint32_t {
  kInput = 1u << 0,
  kResidualIn = 1u << 1,
  kOut = 1u << 2,
  kResidualOut = 1u << 3,
  kWeight = 1u << 4,
  kBias = 1u << 5,
  kGate = 1u << 6,
  kGateTable = 1u << 7,
  kScale = 1u << 8,
  kScaleTable = 1u << 9,
  kShift = 1u << 10,
  kShiftTable = 1u << 11,
  kOutGate = 1u << 12,
  kOutGateTable = 1u << 13,
  kVarying = 1u << 14,  // no operand: some vector changes from row to row of the inner dimension
};

constexpr int kVectors = 10;
// Those of the vectors in `present` that come before `bit`.
constexpr uint32_t vectors_before(uint32_t present, Packed bit) { return present & (bit - kWeight); }
constexpr int count_bits(uint32_t bits) { return bits ? 1 + count_bits(bits & (bits - 1)) : 0; }

// The arithmetic, shared by both kernels: `load` says which operands there are (has) and gives a pack of each as fp32
// (get). It is spelled out in intrinsics: left to contract as it likes, the compiler would give the kernels different
// bits.

template <Packed kValue, Packed kTable, typename Loader>
__device__ __forceinline__ DType modulator_dtype(const Loader& load) {
  const DType dtype = load.template dtype<kValue>();
  return load.template has<kTable>() ? promote(dtype, load.template dtype<kTable>()) : dtype;
}

// value + table.
template <Packed kValue, Packed kTable, typename Loader, int kWidth>
__device__ __forceinline__ void get_modulator(const Loader& load, float (&x)[kWidth]) {
  load.template get<kValue>(x);
  if (load.template has<kTable>()) {
    float table[kWidth];
    load.template get<kTable>(table);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x[i] = __fadd_rn(table[i], x[i]);
      if (load.eager()) x[i] = round_to(modulator_dtype<kValue, kTable>(load), x[i]);
    }
  }
}

template <typename Loader, int kWidth>
__device__ __forceinline__ void get_gate(const Loader& load, float (&gate)[kWidth]) {
  if (load.template has<kGate>()) {
    get_modulator<kGate, kGateTable>(load, gate);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) gate[i] = 1.f;
  }
}

// h = residual + input * gate; h comes in as the input.
template <typename T, typename Loader, int kWidth>
__device__ __forceinline__ void add_residual(const Loader& load, const float (&residual)[kWidth], float (&h)[kWidth]) {
  if (load.template has<kGate>()) {
    float gate[kWidth];
    get_modulator<kGate, kGateTable>(load, gate);
    if (load.eager()) {
      const DType dtype = promote(DTypeOf<T>::value, modulator_dtype<kGate, kGateTable>(load));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        h[i] = round_to<T>(__fadd_rn(residual[i], round_to(dtype, __fmul_rn(h[i], gate[i]))));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) h[i] = fmaf(h[i], gate[i], residual[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      h[i] = __fadd_rn(residual[i], h[i]);
      if (load.eager()) h[i] = round_to<T>(h[i]);
    }
  }
}

// Weight, bias and modulation multiplied out, so that they cost a row one FMA an element: out = n * factor + addend.
// Where the vectors are known at compile time, nothing is multiplied with one or added to zero.
template <Statistic S, Fusion F, typename Loader, int kWidth>
__device__ __forceinline__ void get_factors(const Loader& load, float weight_offset, float (&factor)[kWidth],
                                            float (&addend)[kWidth]) {
  bool scaled = load.template has<kWeight>();
  if (scaled) {
    load.template get<kWeight>(factor);
    if (S == Statistic::kRms && weight_offset != 0.f) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) factor[i] = __fadd_rn(weight_offset, factor[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) factor[i] = 1.f;
  }
  bool adds = S == Statistic::kLayer && load.template has<kBias>();
  if (adds) {
    load.template get<kBias>(addend);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) addend[i] = -0.f;  // x + -0 is x, for every x
  }
  if constexpr (has_modulation(F)) {
    float m[kWidth];
    const auto multiply = [&] {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        factor[i] = Loader::knows() && !scaled ? m[i] : __fmul_rn(factor[i], m[i]);
        if (adds) addend[i] = __fmul_rn(addend[i], m[i]);
      }
      scaled = true;
    };
    if (load.template has<kScale>()) {
      get_modulator<kScale, kScaleTable>(load, m);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) m[i] = __fadd_rn(1.f, m[i]);
      multiply();
    }
    if (load.template has<kShift>()) {
      get_modulator<kShift, kShiftTable>(load, m);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) addend[i] = Loader::knows() && !adds ? m[i] : __fadd_rn(addend[i], m[i]);
      adds = true;
    }
    if (load.template has<kOutGate>()) {
      get_modulator<kOutGate, kOutGateTable>(load, m);
      multiply();
    }
  }
}

// All of it, rounding wherever the chain of torch ops would: `dtype` is that of its intermediate result.
template <typename T, Statistic S, typename Loader, int kWidth>
__device__ __forceinline__ void finish_eager(const Loader& load, float weight_offset, float (&n)[kWidth]) {
  DType dtype = DTypeOf<T>::value;
  float m[kWidth];
  // Llama's and diffusers' RMSNorm round before the weight; LayerNorm and Gemma's (1 + weight) after it.
  const bool round_before_weight = S == Statistic::kRms && weight_offset == 0.f;
  if (round_before_weight) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = round_to<T>(n[i]);
  }
  if (load.template has<kWeight>()) {
    load.template get<kWeight>(m);
    if (round_before_weight) dtype = promote(dtype, load.template dtype<kWeight>());
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      n[i] = __fmul_rn(n[i], S == Statistic::kRms ? __fadd_rn(weight_offset, m[i]) : m[i]);
      if (round_before_weight) n[i] = round_to(dtype, n[i]);
    }
  }
  if (S == Statistic::kLayer && load.template has<kBias>()) {
    load.template get<kBias>(m);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = __fadd_rn(n[i], m[i]);
  }
  if (!round_before_weight) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = round_to<T>(n[i]);
  }
  if (load.template has<kScale>()) {
    get_modulator<kScale, kScaleTable>(load, m);
    const DType scale_dtype = modulator_dtype<kScale, kScaleTable>(load);
    dtype = promote(dtype, scale_dtype);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      n[i] = round_to(dtype, __fmul_rn(n[i], round_to(scale_dtype, __fadd_rn(1.f, m[i]))));
    }
  }
  if (load.template has<kShift>()) {
    get_modulator<kShift, kShiftTable>(load, m);
    dtype = promote(dtype, modulator_dtype<kShift, kShiftTable>(load));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = round_to(dtype, __fadd_rn(n[i], m[i]));
  }
  if (load.template has<kOutGate>()) {
    get_modulator<kOutGate, kOutGateTable>(load, m);
    dtype = promote(dtype, modulator_dtype<kOutGate, kOutGateTable>(load));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) n[i] = round_to(dtype, __fmul_rn(n[i], m[i]));
  }
}

// (h - mean) * rstd.
template <Statistic S, int kWidth>
__device__ __forceinline__ void normalise(float mean, float rstd, float (&h)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) h[i] = __fmul_rn(S == Statistic::kLayer ? __fsub_rn(h[i], mean) : h[i], rstd);
}

template <bool kAdds, int kWidth>
__device__ __forceinline__ void apply_factors(const float (&factor)[kWidth], const float (&addend)[kWidth],
                                              float (&n)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) n[i] = kAdds ? fmaf(n[i], factor[i], addend[i]) : __fmul_rn(n[i], factor[i]);
}

// Sum of (h - mean)^2, or of h^2, over the pack's first `count` elements, as two chains: columns past the row's end
// count for nothing (they are zero, but mean need not be).
template <bool kCentred, int kWidth>
__device__ __forceinline__ float pack_squares(const float (&h)[kWidth], float mean, int64_t count) {
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float x = kCentred ? __fsub_rn(h[i], mean) : h[i];
    if (i < count) sum[i % 2] = fmaf(x, x, sum[i % 2]);
  }
  return sum[0] + sum[1];
}

// ---- The main line. Its parameters are NormParams with at most two dimensions of rows, one of them the grid's, and
// byte strides of 32 bits: finding a row costs a few instructions, and a row of 2048 has time for about 900 in all.

struct PackedView {
  char* data;
  uint32_t inner, outer;  // strides in bytes
};

// In the order in which rows need it: a block waits for the lines of constant memory that hold it, and the first 48
// bytes share one (H200, bf16, of a copy's time with the first vector behind the outputs and beside the input:
// layernorm 4096x4096 1.08, 1.05; adaln_rmsnorm 512x2048 1.09, 1.08; rmsnorm_residual 1024x2048 1.01, 1.00:
// h200-tuning.json).
struct PackedParams {
  uint32_t rows;  // of the inner dimension
  int32_t width;
  float inverse_width, eps;
  PackedView input, second;  // the residual or, without one, the first of the vectors that there are
  PackedView out, residual_out;
  float weight_offset;
  uint32_t blocks;            // that share a row
  uint32_t present;           // Packed bits
  uint32_t ahead;             // rows from one to that which its block asks the L2 cache for; 0: none
  PackedView more[kVectors];  // the other vectors, without gaps
};

// kFlat: the rows are one dimension.
template <bool kFlat>
__device__ __forceinline__ char* row_of(const PackedView& view, uint32_t row) {
  if constexpr (kFlat) return view.data + static_cast<uint64_t>(view.inner) * row;
  return view.data + static_cast<uint64_t>(view.outer) * blockIdx.y + static_cast<uint64_t>(view.inner) * row;
}

// kPacks packs, a step apart, of the vectors of a row, all of dtype M; `k` is the pack at hand. kKnown: the vectors
// that there are, where this is known at compile time: then they are those of every row. kAhead: see loaded_ahead.
template <typename T, typename M, Statistic S, Fusion F, uint32_t kKnown, int kPacks, uint32_t kAhead,
          bool kFlat = false>
struct Vectors {
  static constexpr int kWidth = kPackWidth<T>;
  using Held = Elements<M, kWidth>;
  const PackedParams& p;
  uint32_t row;
  int column, step;
  int k = 0;
  Held held[kPacks][kVectors];

  __device__ __forceinline__ Vectors(const PackedParams& params, uint32_t row_index, int first_column, int column_step)
      : p(params), row(row_index), column(first_column), step(column_step) {}

  template <Packed kBit>
  __device__ __forceinline__ bool has() const {
    constexpr bool kPossible = kBit == kWeight                             ? S != Statistic::kNone
                               : kBit == kBias                             ? S == Statistic::kLayer
                               : kBit == kGate || kBit == kGateTable       ? F == Fusion::kGated
                               : kBit == kOutGate || kBit == kOutGateTable ? F == Fusion::kModulate
                                                                           : has_modulation(F) && S != Statistic::kNone;
    return kKnown ? kKnown & kBit : kPossible && (p.present & kBit);
  }
  template <Packed kBit>
  __device__ __forceinline__ const M* start() const {
    constexpr int kKnownPlace = count_bits(vectors_before(kKnown, kBit));
    const int place = (kKnown ? kKnownPlace : __popc(vectors_before(p.present, kBit))) + has_residual(F);
    const PackedView& view = place == 0 ? p.second : p.more[place - 1];
    return reinterpret_cast<const M*>(row_of<kFlat>(view, kKnown ? 0 : row)) + column;
  }
  template <Packed kBit>
  __device__ __forceinline__ void load_ahead(const bool (&inside)[kPacks]) {
    if constexpr (kAhead & kBit) {
      if (!has<kBit>()) return;
      const M* const data = start<kBit>();
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (inside[i]) held[i][count_bits(vectors_before(kAhead, kBit))].load(data, i * step);
      }
    }
  }
  __device__ __forceinline__ void load_ahead(const bool (&inside)[kPacks]) {
    load_ahead<kGate>(inside);
    load_ahead<kGateTable>(inside);
    load_ahead<kWeight>(inside);
    load_ahead<kBias>(inside);
    load_ahead<kScale>(inside);
    load_ahead<kScaleTable>(inside);
    load_ahead<kShift>(inside);
    load_ahead<kShiftTable>(inside);
    load_ahead<kOutGate>(inside);
    load_ahead<kOutGateTable>(inside);
  }
  template <Packed kBit>
  __device__ __forceinline__ void get(float (&x)[kWidth]) const {
    if constexpr (kAhead & kBit) {
      held[k][count_bits(vectors_before(kAhead, kBit))].get(x);
    } else {
      Held now;
      now.load(start<kBit>(), k * step);
      now.get(x);
    }
  }
  __device__ __forceinline__ constexpr bool eager() const { return false; }
  static __device__ __forceinline__ constexpr bool knows() { return kKnown != 0; }
  template <Packed kBit>
  __device__ __forceinline__ DType dtype() const {
    return DTypeOf<M>::value;
  }
};

constexpr int kMaxThreads = 512;       // of a block
constexpr int kShortRowThreads = 128;  // of a block whose rows have a warp at most
// Blocks of a cluster, and 16-byte packs of a row for each, where a block does not hold the row. More blocks wait less,
// and one launch may be all that there is (H200, bf16: rmsnorm 8x65536 6.3 us with 8 blocks of 256 threads, 6.5 with 4
// of 512; 1x262144 6.7 with 16, which is more than every GPU has, and 7.7 with 8).
constexpr int kMaxBlocks = 16, kPortableBlocks = 8, kClusterPacks = 1024;

// Rows that a thread works on at once, where the vectors are known: they share its packs of these. Worth it up to 128
// threads, for a LayerNorm or more than two vectors (H200, bf16, of a copy's time with one row and with two: layernorm
// 5376x2048 1.04, 1.02; adaln_zero 2x8064x2048 1.02, 0.99; but adaln_rmsnorm 2x8064x2048 0.99, 1.02). Blocks of longer
// rows do better with one row, the registers for more blocks and a prefetch (adaln_zero 2x8064x4096 1.01, 1.04;
// layernorm 8192x3072 1.02, 1.05; adaln_layernorm 1x8190x5120 1.02, 1.06: h200-tuning.json).
constexpr int kTwoRowsThreads = 128;
constexpr int rows_at_once(Statistic s, Fusion f, int packs, int threads, uint32_t known) {
  if (known == 0 || has_residual(f) || packs > 2 || threads > kTwoRowsThreads) return 1;
  return s == Statistic::kLayer || count_bits(known) > 2 ? 2 : 1;
}

// The vectors that are loaded before the first use of any, one register a 32-bit word: all where the registers allow,
// else the gate, which is needed first, and for rms norms the four main ones (layernorm 8192x8192: 1.44 x a copy with
// them, 1.07 without). The blocks of a cluster wait too long for anything late (layernorm 8x65536 7.2 us, 9.0 without).
// fp32 vectors beside 16-bit rows take twice the registers. threads: those of a row where they are known.
constexpr uint32_t loaded_ahead(Statistic s, int packs, int threads, bool clusters, uint32_t known, bool wide) {
  if (wide) return 0;
  if (clusters || threads != 0) return known;
  constexpr uint32_t kMain = kWeight | kBias | kScale | kShift;
  if (packs <= 2) return known ? known : kMain | kGate;
  return s == Statistic::kLayer ? kGate : kMain | kGate;
}

// Whether an instance for `threads` a row takes rows as one dimension.
constexpr bool is_flat(Fusion f, int threads) { return threads != 0 && !has_modulation(f); }

// What lies between a row and that which its block asks the L2 cache for, for each multiprocessor: DRAM then reads
// whole rows in order, and a block that starts finds its row near. H200, bf16, of a copy's time with none, 12, 24, 48
// and 96 KiB: layernorm 8192x8192 1.05, 1.02, 1.02, 1.03, 1.2; rmsnorm_residual 8192x8192 1.04, 1.01, 1.00, 1.02, 1.2;
// rmsnorm 16384x4096 1.01, 0.99, 0.99, 1.00, 1.2; gated_residual_adaln_layernorm
// 2x8064x4096 1.05, 1.02, 1.01, 1.02, 1.2 (h200-tuning.json).
constexpr int64_t kAheadBytes = 24 << 10;

// Bounds the registers, as the threads that a multiprocessor shall hold: a few registers more are a row less at once.
// Not on Blackwell, whose code takes more.
constexpr int register_threads(Statistic s, Fusion f, int packs, int threads, bool clusters) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 512;
#else
  if (packs == 4) return threads ? 768 : f == Fusion::kPlain && !clusters ? 1024 : 512;
  return threads > 32 && s == Statistic::kRms ? 1024 : 640;
#endif
}

// block: x = the threads of a row, y = groups of kRows rows. grid: x = groups of the inner dimension, y = the outer
// one. kClusters: the row belongs to p.blocks blocks. kThreads: those of a row, where all own kPacks packs.
template <typename T, typename M, Statistic S, Fusion F, int kPacks, int kRows, uint32_t kKnown, bool kClusters = false,
          int kThreads = 0>
__global__ void __launch_bounds__(register_threads(S, F, kPacks, kThreads, kClusters), 1)
    norm_kernel(const __grid_constant__ PackedParams p) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr bool kNorm = S != Statistic::kNone, kGated = F == Fusion::kGated;
  constexpr bool kAdds = S == Statistic::kLayer || has_modulation(F);
  constexpr uint32_t kAhead = loaded_ahead(S, kPacks, kThreads, kClusters, kKnown, sizeof(M) > sizeof(T));
  using P = Pack<T, kWidth>;
  __shared__ Scratch<kRows> scratch[2];
  __shared__ float2 parts[kClusters ? 16 : 1];
  constexpr bool kFlat = is_flat(F, kThreads);
  const int threads = kThreads ? kThreads : static_cast<int>(blockDim.x);
  const uint32_t block_rows = kThreads > 32 ? 1 : kThreads ? kShortRowThreads / kThreads : blockDim.y;
  if constexpr (kClusters) enter_cluster();
  // Rows past the last read row 0 and write nothing: every thread must reach every shuffle and barrier.
  const uint32_t blocks = kClusters ? p.blocks : 1, block = blockIdx.x / blocks;
  const uint32_t first_row = block * block_rows * kRows + threadIdx.y;
  bool active[kRows], inside[kPacks];
  uint32_t row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    row[r] = first_row + r * block_rows;
    active[r] = (kThreads > 32 && kRows == 1) || row[r] < p.rows;
    if (!active[r]) row[r] = 0;
  }
  // Warp w owns the packs from 32 * kPacks * w on, its lanes those 32 apart: offsets that are known here.
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int part = static_cast<int>(blockIdx.x - block * blocks), block_width = threads * kPacks * kWidth;
  const int first =
      part * block_width + (kPacks == 1 ? static_cast<int>(threadIdx.x) : warp * 32 * kPacks + lane) * kWidth;
  constexpr int kStep = 32 * kWidth;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) inside[k] = kThreads || first + k * kStep < p.width;

  // Before the row itself, and not for two rows, which have no register for it.
  if constexpr (kPacks > 1 && kRows == 1 && !kClusters) {
    const uint32_t later = first_row + p.ahead;
    if (threadIdx.x == 0 && p.ahead != 0 && later < p.rows) {
      const uint32_t bytes = p.width * static_cast<uint32_t>(sizeof(T));
      prefetch(row_of<kFlat>(p.input, later), bytes);
      if constexpr (has_residual(F)) prefetch(row_of<kFlat>(p.second, later), bytes);
    }
  }
  P input[kRows][kPacks], residual[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const T* const x = reinterpret_cast<const T*>(row_of<kFlat>(p.input, row[r])) + first;
    const T* const y = has_residual(F) ? reinterpret_cast<const T*>(row_of<kFlat>(p.second, row[r])) + first : nullptr;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      input[r][k] = residual[r][k] = P{};
      if (!inside[k]) continue;
      input[r][k] = *reinterpret_cast<const P*>(x + k * kStep);
      if constexpr (has_residual(F)) residual[r][k] = *reinterpret_cast<const P*>(y + k * kStep);
    }
  }
  Vectors<T, M, S, F, kKnown, kPacks, kAhead, kFlat> vectors(p, row[0], first, kStep);
  vectors.load_ahead(inside);

  float h[kRows][kPacks][kWidth];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float gate[kWidth];
    vectors.k = k;
    if constexpr (kGated) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) gate[i] = 0.f;  // past the row's end h must be zero
      if (inside[k]) get_gate(vectors, gate);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      unpack(input[r][k], h[r][k]);
      if constexpr (has_residual(F)) {
        float x[kWidth];
        unpack(residual[r][k], x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i)
          h[r][k][i] = kGated ? fmaf(h[r][k][i], gate[i], x[i]) : __fadd_rn(x[i], h[r][k][i]);
        if (active[r] && inside[k]) {
          *reinterpret_cast<P*>(reinterpret_cast<T*>(row_of<kFlat>(p.residual_out, row[r])) + first + k * kStep) =
              to_pack<T, kWidth>(h[r][k]);
        }
      }
    }
  }
  if constexpr (kNorm) {
    float mean[kRows] = {}, rstd[kRows];
    // Of a cluster's block: its part's sum, and how many elements a part has.
    float part_sum = 0.f;
    const auto count = [&](int b) { return static_cast<float>(min(max(p.width - b * block_width, 0), block_width)); };
    if constexpr (S == Statistic::kLayer) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kPacks; ++k) mean[r] += tree_sum(h[r][k]);
      }
      const float inverse_count = kClusters ? 1.f / fmaxf(count(part), 1.f) : p.inverse_width;
      row_sums(mean, threads, scratch[0]);
      part_sum = mean[0];
#pragma unroll
      for (int r = 0; r < kRows; ++r) mean[r] *= inverse_count;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rstd[r] = 0.f;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const float sum = pack_squares<S == Statistic::kLayer>(h[r][k], mean[r], kWidth);
        rstd[r] += inside[k] ? sum : 0.f;
      }
    }
    row_sums(rstd, threads, scratch[1]);
    if constexpr (kClusters && S == Statistic::kLayer) {
      const float2 moments = cluster_moments(part_sum, rstd[0], p.inverse_width, blocks, count, parts);
      mean[0] = moments.x;
      rstd[0] = moments.y;
    } else if constexpr (kClusters) {
      rstd[0] = cluster_sum(rstd[0], blocks, parts);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) rstd[r] = reciprocal_root(rstd[r], p.inverse_width, p.eps);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (!inside[k]) continue;
      float factor[kWidth], addend[kWidth];
      vectors.k = k;
      get_factors<S, F>(vectors, kKnown ? 0.f : p.weight_offset, factor, addend);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        normalise<S>(mean[r], rstd[r], h[r][k]);
        apply_factors<kAdds>(factor, addend, h[r][k]);
        if (active[r])
          *reinterpret_cast<P*>(reinterpret_cast<T*>(row_of<kFlat>(p.out, row[r])) + first + k * kStep) =
              to_pack<T, kWidth>(h[r][k]);
      }
    }
  }
}

// ---- Everything else

// Where the row begins in each operand that has rows, in elements.
struct RowStarts {
  int64_t input = 0, residual = 0, gate = 0, scale = 0, shift = 0, out_gate = 0, out = 0, residual_out = 0;

  __device__ __forceinline__ void add(const NormParams& p, int d, int64_t index) {
    input += index * p.input.stride[d];
    residual += index * p.residual.stride[d];
    gate += index * p.gate.value.stride[d];
    scale += index * p.scale.value.stride[d];
    shift += index * p.shift.value.stride[d];
    out_gate += index * p.out_gate.value.stride[d];
    out += index * p.out.stride[d];
    residual_out += index * p.residual_out.stride[d];
  }
};

template <typename T>
struct GeneralLoader {
  const NormParams& p;
  const RowStarts& start;
  uint32_t packed;
  int64_t column = 0;

  template <Packed kBit>
  __device__ __forceinline__ const RowView& view() const {
    return kBit == kWeight       ? p.weight
           : kBit == kBias       ? p.bias
           : kBit == kGate       ? p.gate.value
           : kBit == kGateTable  ? p.gate.table
           : kBit == kScale      ? p.scale.value
           : kBit == kScaleTable ? p.scale.table
           : kBit == kShift      ? p.shift.value
           : kBit == kShiftTable ? p.shift.table
           : kBit == kOutGate    ? p.out_gate.value
                                 : p.out_gate.table;
  }
  template <Packed kBit>
  __device__ __forceinline__ bool has() const {
    return view<kBit>().data != nullptr;
  }
  template <Packed kBit, int kWidth>
  __device__ __forceinline__ void get(float (&x)[kWidth]) const {
    const int64_t row = kBit == kGate      ? start.gate
                        : kBit == kScale   ? start.scale
                        : kBit == kShift   ? start.shift
                        : kBit == kOutGate ? start.out_gate
                                           : 0;
    const RowView& v = view<kBit>();
    load_floats<kWidth>(v.data, v.dtype, row, column, v.column_stride, p.rows.width, packed & kBit, x);
  }
  __device__ __forceinline__ bool eager() const { return p.rounding == Rounding::kEager; }
  static __device__ __forceinline__ constexpr bool knows() { return false; }
  template <Packed kBit>
  __device__ __forceinline__ DType dtype() const {
    return view<kBit>().dtype;
  }

  __device__ __forceinline__ void get_h(float (&h)[kPackWidth<T>]) const {
    constexpr int kWidth = kPackWidth<T>;
    unpack(load_pack<T, kWidth>(static_cast<const T*>(p.input.data) + start.input, column, p.input.column_stride,
                                p.rows.width, packed & kInput),
           h);
    if (p.residual.data) {
      float residual[kWidth];
      unpack(load_pack<T, kWidth>(static_cast<const T*>(p.residual.data) + start.residual, column,
                                  p.residual.column_stride, p.rows.width, packed & kResidualIn),
             residual);
      add_residual<T>(*this, residual, h);
    }
  }
};

// block and grid: as norm_kernel's, but x of the grid counts all rows. Without an output (gated_residual) only h is
// computed, whatever S.
template <typename T, Statistic S>
__global__ void __launch_bounds__(kMaxThreads, 1)
    norm_kernel_general(const __grid_constant__ NormParams p, uint32_t packed, int packs, uint32_t blocks,
                        float inverse_width) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ Scratch<1> scratch[2];
  __shared__ float2 parts[16];
  const int threads = static_cast<int>(blockDim.x);
  const int64_t width = p.rows.width;
  const uint32_t block = blockIdx.x / blocks, part = blockIdx.x - block * blocks;
  // Ownership as norm_kernel's; a row that is longer than its registers goes on from the first thread.
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int own = packs == 1 ? static_cast<int>(threadIdx.x) : warp * 32 * packs + lane;
  const int64_t block_width = static_cast<int64_t>(threads) * packs * kWidth, stride = blocks * block_width;
  const int64_t first = part * block_width + own * kWidth;
  const auto each_pack = [&](const auto& body) {
#pragma unroll 1
    for (int64_t begin = first; begin < width; begin += stride) {
#pragma unroll 1
      for (int k = 0; k < packs; ++k) {
        const int64_t column = begin + k * 32 * kWidth;
        if (column < width) body(column);
      }
    }
  };
  const int64_t row = static_cast<int64_t>(block) * blockDim.y + threadIdx.y;
  const bool active = row < p.rows.count;
  RowStarts start;
  walk_row(p.rows, active ? row : 0, [&](int d, int64_t index) { start.add(p, d, index); });
  GeneralLoader<T> load{p, start, packed};
  const bool normalises = p.out.data != nullptr;
  if (blocks > 1 && normalises) enter_cluster();
  float mean = 0.f, rstd = 0.f, h[kWidth];
  float part_sum = 0.f;
  const auto count = [&](int64_t b) {
    const int64_t turns = width / stride, rest = width - turns * stride;
    return static_cast<float>(turns * block_width + min(max(rest - b * block_width, int64_t{0}), block_width));
  };
  // Outputs may lie in the inputs' memory: nothing is written before the last pass.
#pragma unroll 1
  for (int pass = S == Statistic::kLayer ? 0 : 1; normalises && pass < 2; ++pass) {
    float sum = 0.f;
    each_pack([&](int64_t column) {
      load.column = column;
      load.get_h(h);
      sum += pass == 0 ? tree_sum(h) : pack_squares<S == Statistic::kLayer>(h, mean, width - load.column);
    });
    float sums[1] = {sum};
    row_sums(sums, threads, scratch[pass]);
    sum = sums[0];
    if (pass == 0) {
      part_sum = sum;
      mean = sum * (blocks > 1 ? 1.f / fmaxf(count(part), 1.f) : inverse_width);
    } else {
      if (blocks > 1 && S == Statistic::kLayer) {
        const float2 moments = cluster_moments(part_sum, sum, inverse_width, blocks, count, parts);
        mean = moments.x;
        sum = moments.y;
      } else if (blocks > 1) {
        sum = cluster_sum(sum, blocks, parts);
      }
      rstd = reciprocal_root(sum, inverse_width, p.eps);
    }
  }
  if (active) {
    each_pack([&](int64_t column) {
      load.column = column;
      load.get_h(h);
      if (p.residual_out.data) {
        store_pack(static_cast<T*>(p.residual_out.data) + start.residual_out, load.column, p.residual_out.column_stride,
                   width, packed & kResidualOut, to_pack<T, kWidth>(h));
      }
      if (normalises) {
        normalise<S>(mean, rstd, h);
        if (load.eager()) {
          finish_eager<T, S>(load, p.weight_offset, h);
        } else {
          float factor[kWidth], addend[kWidth];
          get_factors<S, Fusion::kGated>(load, p.weight_offset, factor, addend);
          apply_factors<true>(factor, addend, h);
        }
        store_pack(static_cast<T*>(p.out.data) + start.out, load.column, p.out.column_stride, width, packed & kOut,
                   to_pack<T, kWidth>(h));
      }
    });
  }
}

// ---- Launch

// How a row is shared out: `blocks` a row, `threads` a block, `packs` a thread. `fits`: the registers hold the row.
struct Geometry {
  int threads;
  int packs;
  int blocks = 1;
  bool fits = true;
};

Geometry share(int64_t packs, int a_thread) {
  const int64_t threads = ceil_div(packs, a_thread);
  // With one pack a thread, several rows share a warp.
  const bool part = a_thread == 1 && threads < 32;
  return {part ? next_power_of_two(threads) : static_cast<int>(ceil_div(threads, 32) * 32), a_thread};
}

// Packs of a row up to which a thread owns two: half the instructions a thread lets twice as many wait for memory, at
// the price of more sums. H200, bf16, of a copy's time with two packs and with four, rows prefetched:
//   rmsnorm 16384x4096 0.99, 1.00; 8192x8192 1.00, 0.98
//   layernorm 8192x3072 1.01, 1.02; 16384x4096 1.00, 0.99
//   adaln_layernorm 1x4608x3072 1.04, 1.04; 1x8190x5120 1.03, 1.02
//   adaln_zero 1x8190x5120 1.02, 1.03; adaln_rmsnorm 1x8190x5120 1.00, 1.01
//   gated_residual_adaln_layernorm 1x8190x5120 1.01, 1.02
constexpr int two_packs_up_to(Statistic s, Fusion f) {
  if (f == Fusion::kGated) return 640;
  if (s == Statistic::kLayer) return 384;
  return f == Fusion::kModulate ? 640 : f == Fusion::kPlain ? 512 : 256;
}

constexpr int packs_a_thread(Statistic s, Fusion f, int64_t packs) {
  // Without a sum, one pack is no slower than two (gated_residual 2x8064x4096 96.9 us, 97.6 with two).
  if (packs <= (s == Statistic::kNone ? kMaxThreads : 32)) return 1;
  return packs <= two_packs_up_to(s, f) ? 2 : 4;
}

// Blocks of a cluster. Clusters came with compute capability 9.0; a newer GPU may still run code that was compiled for
// an older one.
int most_blocks(int device) {
  return once_a_device(device, [device] {
    const int major = device_attribute<cudaDevAttrComputeCapabilityMajor>(device);
    cudaFuncAttributes code{};
    if (major < 9 || cudaFuncGetAttributes(&code, norm_kernel_general<float, Statistic::kRms>) != cudaSuccess ||
        code.ptxVersion < 90) {
      return 1;
    }
    return major <= 10 ? kMaxBlocks : kPortableBlocks;
  });
}

Geometry geometry(int64_t width, int pack_width, Statistic s, Fusion f, int device) {
  const int64_t packs = ceil_div(width, pack_width);
  if (const int a_thread = forced().norm_packs) {
    if (packs > a_thread * kMaxThreads) fail_forced("rows that fit", "norm_packs=" + std::to_string(a_thread));
    return share(packs, a_thread);
  }
  if (packs <= 4 * kMaxThreads) return share(packs, packs_a_thread(s, f, packs));
  const int most = most_blocks(device);
  const int blocks = std::min(next_power_of_two(ceil_div(packs, kClusterPacks)), most);
  Geometry g = share(std::min<int64_t>(ceil_div(packs, blocks), 4 * kMaxThreads), 4);
  g.blocks = blocks;
  g.fits = packs <= static_cast<int64_t>(4) * g.threads * blocks;
  return g;
}

// The operands of which every access may be a whole pack; `fast`: all of them, and nothing else stands against
// norm_kernel. `wide`: the vectors and modulators are fp32 beside 16-bit rows.
template <typename T>
uint32_t packed_operands(const NormParams& p, bool& fast, bool& wide) {
  uint32_t bits = 0;
  bool narrow = false;
  wide = false;
  fast = p.rounding == Rounding::kFp32;
  const auto set = [&](Packed bit, const RowView& view) {
    if (view.data == nullptr) return;
    const bool packed =
        is_packed(view.data, view.dtype, kPackWidth<T>, p.rows.width, view.column_stride, view.stride, p.rows.ndim);
    if (packed) bits |= bit;
    fast = fast && packed;
  };
  const auto set_vector = [&](Packed bit, const RowView& view) {
    if (view.data == nullptr) return;
    set(bit, view);
    if (view.dtype == DTypeOf<T>::value) {
      narrow = true;
    } else if (view.dtype == DType::kFloat32) {
      wide = true;
    } else {
      fast = false;
    }
  };
  set(kInput, p.input);
  set(kResidualIn, p.residual);
  set(kOut, p.out);
  set(kResidualOut, p.residual_out);
  set_vector(kWeight, p.weight);
  set_vector(kBias, p.bias);
  set_vector(kGate, p.gate.value);
  set_vector(kGateTable, p.gate.table);
  set_vector(kScale, p.scale.value);
  set_vector(kScaleTable, p.scale.table);
  set_vector(kShift, p.shift.value);
  set_vector(kShiftTable, p.shift.table);
  set_vector(kOutGate, p.out_gate.value);
  set_vector(kOutGateTable, p.out_gate.table);
  fast = fast && !(narrow && wide);
  return bits;
}

// NormParams as norm_kernel takes them. False where the rows are not at most two dimensions of 32-bit strides.
bool pack_params(const NormParams& p, PackedParams& q) {
  const Rows& rows = p.rows;
  const int64_t inner = rows.ndim == 2 ? rows.size[1] : rows.count;
  // Rows are counted in 32 bits, and the last block counts on past the last.
  if (rows.ndim > 2 || (rows.ndim == 2 && rows.size[0] > 65535) || inner > 0x7fffffff) return false;
  q.rows = static_cast<uint32_t>(inner);
  bool fits = true;
  q.present = 0;
  const auto set = [&](PackedView& packed, const RowView& view, Packed bit) {
    if (!view.data) return;
    const int64_t bytes = element_size(view.dtype);
    const int64_t inner = rows.ndim > 0 ? view.stride[rows.ndim - 1] * bytes : 0;
    const int64_t outer = rows.ndim == 2 ? view.stride[0] * bytes : 0;
    packed = {static_cast<char*>(view.data), static_cast<uint32_t>(inner), static_cast<uint32_t>(outer)};
    fits = fits && packed.inner == inner && packed.outer == outer;
    q.present |= bit;
  };
  int views = p.residual.data ? 1 : 0;                            // after the input
  const auto set_vector = [&](const RowView& view, Packed bit) {  // in the order of the bits
    if (!view.data) return;
    PackedView& packed = views == 0 ? q.second : q.more[views - 1];
    ++views;
    set(packed, view, bit);
    if (packed.inner != 0) q.present |= kVarying;
  };
  set(q.input, p.input, kInput);
  set(q.second, p.residual, kResidualIn);
  set(q.out, p.out, kOut);
  set(q.residual_out, p.residual_out, kResidualOut);
  set_vector(p.weight, kWeight);
  set_vector(p.bias, kBias);
  set_vector(p.gate.value, kGate);
  set_vector(p.gate.table, kGateTable);
  set_vector(p.scale.value, kScale);
  set_vector(p.scale.table, kScaleTable);
  set_vector(p.shift.value, kShift);
  set_vector(p.shift.table, kShiftTable);
  set_vector(p.out_gate.value, kOutGate);
  set_vector(p.out_gate.table, kOutGateTable);
  q.width = static_cast<int32_t>(rows.width);
  q.inverse_width = 1.f / static_cast<float>(rows.width);
  q.eps = p.eps;
  q.weight_offset = p.weight_offset;
  return fits;
}

template <uint32_t kVectors>
using Known = std::integral_constant<uint32_t, kVectors>;
template <int kPacks>
using Length = std::integral_constant<int, kPacks>;

// Whether rows of `packs` packs have an instance of their own (H200, bf16, of a copy's time with and without): those of
// heads of 64 and 128 elements (rmsnorm 4096x128 5.1 us, 5.4; rmsnorm_residual 262144x64 1.01, 1.02; a LayerNorm's code
// then loads its vectors too late, 131072x128 1.05, 1.02), and 2048 to 5120 one row at once (adaln_rmsnorm 1x512x2048
// 6.6 us, 6.7; layernorm 2048 two rows at once 1.04, 1.01; adaln_zero 1x8190x5120 1.03, 1.06; layernorm 8192x3072 1.02,
// 1.03).
constexpr bool knows_length(Statistic s, Fusion f, int packs, uint32_t known) {
  if (known == 0 || s == Statistic::kNone) return false;
  if (packs <= 32) return s == Statistic::kRms && !has_modulation(f);
  const int a_thread = packs_a_thread(s, f, packs);
  if (rows_at_once(s, f, a_thread, packs / a_thread, known) > 1) return false;
  if (f == Fusion::kModulate) return count_bits(known) <= (s == Statistic::kRms ? 3 : 2);
  return f == Fusion::kPlain && (s == Statistic::kLayer || packs == 256);
}

template <typename T, typename M, Statistic S, Fusion F>
void launch_packed(const PackedParams& p, const Geometry& g, dim3 block, unsigned outer, cudaStream_t stream) {
  // What the models' blocks pass is known to an instance of its own: asking for each vector costs a row of 2048 about
  // 150 instructions.
  constexpr uint32_t kModulation = kScale | kShift, kTables = kScaleTable | kShiftTable;
  const uint32_t vectors = p.present & ~(kInput | kResidualIn | kOut | kResidualOut);
  const auto grid = [&](int rows) {
    return dim3(grid_size(ceil_div(p.rows, static_cast<int64_t>(block.y) * rows) * g.blocks), outer);
  };
  const auto run = [&](auto known) {
    constexpr uint32_t kKnown = decltype(known)::value;
    // Not every geometry has an instance of its own for what is known.
    constexpr bool kHasOne = kKnown == 0 || S == Statistic::kNone || !has_modulation(F);
    constexpr bool kHasFour = kKnown == 0 || F != Fusion::kModulate || S == Statistic::kLayer;
    constexpr bool kHasClusters = F == Fusion::kPlain;
    if (kKnown != 0 && (vectors != kKnown || p.weight_offset != 0.f)) return false;
    if (g.blocks > 1) {
      if constexpr (kHasClusters) {
        launch_clusters(norm_kernel<T, M, S, F, 4, 1, kKnown, true>, grid(1), block, g.blocks, stream, p);
      }
      return kHasClusters;
    }
    // The main widths of 16-bit rows, one head's first.
    const auto run_length = [&](auto packs) {
      constexpr int kRowPacks = decltype(packs)::value, kPacks = packs_a_thread(S, F, kRowPacks);
      constexpr int kThreads = kRowPacks / kPacks, kRows = rows_at_once(S, F, kPacks, kThreads, kKnown);
      if constexpr (knows_length(S, F, kRowPacks, kKnown) && sizeof(T) == 2) {
        if (p.width != kRowPacks * kPackWidth<T> || g.packs != kPacks || (is_flat(F, kThreads) && outer > 1))
          return false;
        norm_kernel<T, M, S, F, kPacks, kRows, kKnown, false, kThreads><<<grid(kRows), block, 0, stream>>>(p);
        return true;
      }
      return false;
    };
    if (run_length(Length<8>()) || run_length(Length<16>()) || run_length(Length<256>()) || run_length(Length<384>()) ||
        run_length(Length<512>()) || run_length(Length<640>())) {
      return true;
    }
    if (g.packs == 1) {
      constexpr int kRows = rows_at_once(S, F, 1, 32, kKnown);
      if constexpr (kHasOne) norm_kernel<T, M, S, F, 1, kRows, kKnown><<<grid(kRows), block, 0, stream>>>(p);
      return kHasOne;
    }
    if (g.packs == 2) {
      constexpr int kRows = rows_at_once(S, F, 2, kTwoRowsThreads, kKnown);
      if (g.threads <= kTwoRowsThreads) {
        norm_kernel<T, M, S, F, 2, kRows, kKnown><<<grid(kRows), block, 0, stream>>>(p);
      } else {
        norm_kernel<T, M, S, F, 2, 1, kKnown><<<grid(1), block, 0, stream>>>(p);
      }
      return true;
    }
    if constexpr (kHasFour) norm_kernel<T, M, S, F, 4, 1, kKnown><<<grid(1), block, 0, stream>>>(p);
    return kHasFour;
  };
  if constexpr (sizeof(M) == sizeof(T)) {
    if constexpr (S == Statistic::kNone) {
      if (run(Known<kGate>())) return;
    } else if constexpr (F == Fusion::kModulate) {
      if (run(Known<kModulation>()) || run(Known<kModulation | kTables>())) return;
      if (run(Known<kModulation | kOutGate>())) return;
    } else if constexpr (F == Fusion::kGated) {
      if (run(Known<kGate | kModulation>()) || run(Known<kGate | kGateTable | kModulation | kTables>())) return;
    } else {
      if (run(Known<S == Statistic::kLayer ? kWeight | kBias : kWeight>())) return;
    }
  }
  run(Known<0>());
}

template <typename T, Statistic S, Fusion F>
void launch(const NormParams& p, const Context& context) {
  const Geometry g = geometry(p.rows.width, kPackWidth<T>, S, F, context.device);
  // Short rows share a block of four warps; a row of more than one warp has a block to itself.
  const dim3 block(static_cast<unsigned>(g.threads),
                   g.threads > 32 ? 1u : static_cast<unsigned>(kShortRowThreads / g.threads));
  const auto stream = static_cast<cudaStream_t>(context.stream);
  bool fast = false, wide = false;
  const uint32_t packed = packed_operands<T>(p, fast, wide);
  PackedParams q{};
  if (takes_packed("norm", forced().norm,
                   fast && g.fits && (g.blocks == 1 || F == Fusion::kPlain) && pack_params(p, q))) {
    q.blocks = static_cast<uint32_t>(g.blocks);
    const int64_t row_bytes = p.rows.width * static_cast<int64_t>(sizeof(T)) * (p.residual.data ? 2 : 1);
    q.ahead = rows_ahead(kAheadBytes, row_bytes, context.device);
    const unsigned outer = p.rows.ndim == 2 ? static_cast<unsigned>(p.rows.size[0]) : 1;
    if (wide) {
      launch_packed<T, float, S, F>(q, g, block, outer, stream);
    } else {
      launch_packed<T, T, S, F>(q, g, block, outer, stream);
    }
  } else {
    const unsigned grid = grid_size(ceil_div(p.rows.count, block.y) * g.blocks);
    const float inverse_width = 1.f / static_cast<float>(p.rows.width);
    constexpr Statistic kGeneral = S == Statistic::kNone ? Statistic::kRms : S;
    const uint32_t as_packs = forced().norm == Kernel::kElements ? 0 : packed;
    launch_clusters(norm_kernel_general<T, kGeneral>, grid, block, g.blocks, stream, p, as_packs, g.packs,
                    static_cast<uint32_t>(g.blocks), inverse_width);
  }
  check_launch("norm");
}

template <typename T, Statistic S>
void dispatch_fusion(const NormParams& p, const Context& context) {
  const bool modulated = p.scale.value.data || p.shift.value.data || p.out_gate.value.data;
  if (p.residual.data) {
    return p.gate.value.data || modulated ? launch<T, S, Fusion::kGated>(p, context)
                                          : launch<T, S, Fusion::kAdd>(p, context);
  }
  if (modulated) return launch<T, S, Fusion::kModulate>(p, context);
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
    return launch<T, Statistic::kNone, Fusion::kGated>(p, context);
  });
}

}  // namespace ltx
