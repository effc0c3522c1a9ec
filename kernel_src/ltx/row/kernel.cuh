// The row kernel of the norm family, and its launch: the row stays in registers and every access is a whole aligned
// pack. Other calls go to norm_kernel_general (general.cuh). Both kernels share the ownership of packs, the order of
// the sums and the arithmetic, and so give the same bits.
//
// A row belongs to the threads of a part of a warp, of a block, or (very long rows, compute capability 9.0 on) of the
// blocks of a cluster. A thread owns `packs` 16-byte packs; the packs of a warp's lanes lie side by side
// (geometry.cuh).
//
// Instructions limit it before bandwidth does. On an H200 a multiprocessor can issue 1900 instructions in the time that
// memory takes for a row of 2048 bf16: 800 instructions cost 3 % over a copy, 1300 cost 20 %. Four things save
// instructions. The vectors are multiplied out into one factor and one addend, so that an element costs one FMA. Two
// rows share the packs of their vectors. Offsets are known at compile time. So are the vectors that models' blocks
// pass.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"
#include "ltx/reduce.cuh"
#include "ltx/row/geometry.cuh"
#include "ltx/row/operands.cuh"
#include "ltx/row/output.cuh"
#include "ltx/row/vectors.cuh"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {

// Rows that a thread works on at once, where the vectors are known: they share its packs of these. Worth it up to 128
// threads, for a LayerNorm or more than two vectors (H200, bf16, of a copy's time with one row and with two: layernorm
// 5376x2048 1.04, 1.02; adaln_zero 2x8064x2048 1.02, 0.99; but adaln_rmsnorm 2x8064x2048 0.99, 1.02). Blocks of longer
// rows do better with one row, the registers for more blocks and a prefetch (adaln_zero 2x8064x4096 1.01, 1.04;
// layernorm 8192x3072 1.02, 1.05; adaln_layernorm 1x8190x5120 1.02, 1.06: h200-tuning.json).
constexpr int kTwoRowsThreads = 128;
constexpr int rows_at_once(Statistic s, Fusion f, int packs, int threads, uint32_t known) {
  if (known == 0 || traits(f).reads_residual || traits(f).modulates_twice) return 1;
  if (packs > 2 || threads > kTwoRowsThreads) return 1;
  return s == Statistic::kLayer || count_vectors(known) > 2 ? 2 : 1;
}

// In place of a row's threads: any number of whole warps, with whole packs for all of them.
constexpr int kWholeWarps = -1;
// Whether a quantised row has whole packs for all of its threads.
constexpr bool has_whole_rows(Output o, int threads) { return o == Output::kQuantised && threads != 0; }
// Whether a thread unpacks its row again after the sum. The row's packs and both vectors then take as many registers as
// its numbers and one vector would.
constexpr bool keeps_packs(Statistic s, Fusion f, Output o, int packs, int threads, uint32_t known, bool wide) {
  return s == Statistic::kRms && f == Fusion::kModulate && has_whole_rows(o, threads) && packs > 2 &&
         count_vectors(known) == 2 && !wide;
}
// Whether loads of rows bypass the first-level cache, which then has room for the vectors of other rows. An rms norm of
// a residual stream is slower with it (H200, rmsnorm_residual_quant 16384x4096, of a copy's time: 1.04 with it, 1.00
// without: h200-quant-rows.json).
constexpr bool passes_cache(Statistic s, Fusion f, Output o, int threads) {
  return has_whole_rows(o, threads) && !(s == Statistic::kRms && traits(f).reads_residual);
}

// The vectors that are loaded before the first use of any, one register a 32-bit word: all where the registers allow,
// else the gate, which is needed first, and for rms norms the four main ones (layernorm 8192x8192: 1.44 x a copy with
// them, 1.07 without). The blocks of a cluster wait too long for anything late (layernorm 8x65536 7.2 us, 9.0 without).
// fp32 vectors beside 16-bit rows take twice the registers. Two outputs and the norm of a branch hold more, so that the
// tables come late. `threads`: as norm_kernel's kThreads.
constexpr uint32_t loaded_ahead(Statistic s, Fusion f, Output o, int packs, int threads, bool clusters, uint32_t known,
                                bool wide) {
  if (wide) return 0;
  if (has_whole_rows(o, threads) && packs > 2 && count_vectors(known) > 2) return known & (kScale | kShift);
  if (clusters || threads != 0) return known;
  constexpr uint32_t kMain = kWeight | kBias | kScale | kShift;
  if (traits(f).modulates_twice || traits(f).norms_branch) {
    constexpr uint32_t kFirst = kGate | kBranchWeight;
    return (packs > 2 ? kFirst : kFirst | kMain | kScale2 | kShift2) & (known ? known : kFirst | kMain);
  }
  if (o == Output::kQuantised && packs > 2) return kGate;
  if (packs <= 2) return known ? known : kMain | kGate;
  return s == Statistic::kLayer ? kGate : kMain | kGate;
}

// Whether an instance for `threads` a row takes rows as one dimension.
constexpr bool is_flat(Fusion f, int threads) { return threads != 0 && !traits(f).modulates; }

// A block asks the L2 cache for a later row, so that DRAM reads whole rows in order and a block that starts finds its
// row near. This many bytes lie between the two rows, for each multiprocessor. H200, bf16, of a copy's time with none,
// 12, 24, 48 and 96 KiB: layernorm 8192x8192 1.05, 1.02, 1.02, 1.03, 1.2; rmsnorm_residual 8192x8192 1.04, 1.01, 1.00,
// 1.02, 1.2; rmsnorm 16384x4096 1.01, 0.99, 0.99, 1.00, 1.2; gated_residual_adaln_layernorm 2x8064x4096 1.05, 1.02,
// 1.01, 1.02, 1.2 (h200-tuning.json).
constexpr int64_t kAheadBytes = 24 << 10;

// Bounds the registers, as the threads that a multiprocessor shall hold: a few registers more are a row less at once.
// Not on Blackwell, whose code takes more.
constexpr int register_threads(Statistic s, Fusion f, Output o, int packs, int threads, bool clusters, uint32_t known,
                               bool wide) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return 512;
#else
  if (has_whole_rows(o, threads)) {
    const int vectors = count_vectors(known);
    if (wide) return 384;
    if (packs == 2) return vectors <= 3 ? 1024 : s == Statistic::kRms ? 512 : 768;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    return 640;  // more would spill
#else
    // H200, adaln_rmsnorm_quant 2x8064x2048, of a copy's time with 640, 768, 896 and 960: 1.04, 1.02, 1.02, 1.23;
    // 2x2688x2048 1.12, 1.08, 1.05, 1.21.
    if (keeps_packs(s, f, o, packs, threads, known, wide)) return threads == kWholeWarps ? 768 : 896;
    return vectors <= 2 || packs == 3 ? 768 : 640;
#endif
  }
  if (o == Output::kQuantised || traits(f).norms_branch || traits(f).modulates_twice) return packs > 2 ? 512 : 640;
  if (packs == 4) return threads ? 768 : f == Fusion::kPlain && !clusters ? 1024 : 512;
  return threads > 32 && s == Statistic::kRms ? 1024 : 640;
#endif
}

// A quantised rms norm without a modulation multiplies with rstd last, so that the sum and the largest magnitude take
// one barrier.
constexpr bool multiplies_last(Statistic s, Fusion f, Output o) {
  return s == Statistic::kRms && f == Fusion::kPlain && o == Output::kQuantised;
}

// Whether instances for known vectors add an offset to the weight: of a branch, and of a quantised rms norm, which
// saves Gemma the instance for any vectors.
constexpr bool known_with_offset(Statistic s, Fusion f, Output o) {
  return traits(f).norms_branch || (s == Statistic::kRms && o == Output::kQuantised && !traits(f).modulates);
}

// block: x = the threads of a row, y = groups of kRows rows. grid: x = groups of the inner dimension, y = the outer
// dimension. kClusters: the row belongs to p.blocks blocks. kThreads: how many threads own a row, where each owns
// kPacks whole packs; kWholeWarps: any number of warps do; 0: any number of threads do, and packs may lie past the
// row's end.
template <typename T, typename M, Statistic S, Fusion F, Output O, int kPacks, int kRows, uint32_t kKnown,
          bool kClusters = false, int kThreads = 0>
__global__ void __launch_bounds__(register_threads(S, F, O, kPacks, kThreads, kClusters, kKnown, sizeof(M) > sizeof(T)),
                                  1) norm_kernel(const __grid_constant__ CompactParams p) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr FusionTraits kTraits = traits(F);
  constexpr bool kNorm = S != Statistic::kNone, kGated = kTraits.gates;
  constexpr bool kAdds = S == Statistic::kLayer || traits(F).modulates;
  constexpr uint32_t kAhead = loaded_ahead(S, F, O, kPacks, kThreads, kClusters, kKnown, sizeof(M) > sizeof(T)) &
                              (std::is_same_v<M, Fp32Parameters> ? ~kParameters : ~0u);
  using P = Pack<T, kWidth>;
  __shared__ ReduceScratch<kRows> scratch[2];
  __shared__ float2 parts[kClusters ? 16 : 1];
  constexpr bool kShort = kThreads > 0 && kThreads < 32 && kPacks > 1;  // several rows share a warp
  constexpr bool kQuantised = O == Output::kQuantised, kWhole = kPacks > 1 && !kShort;
  constexpr int kOutputs = kTraits.modulates_twice ? 2 : 1;
  constexpr bool kFlat = is_flat(F, kThreads), kByIndex = (kKnown & kIndexed) != 0;
  constexpr bool kOwnBlock = kThreads > 32 || kThreads == kWholeWarps;  // a row has the block to itself
  const int threads = kThreads > 0 ? kThreads : static_cast<int>(blockDim.x);
  const uint32_t block_rows = kOwnBlock ? 1 : kThreads ? kShortRowThreads / kThreads : blockDim.y;
  if constexpr (kClusters) enter_cluster();
  // Rows past the last read row 0 and write nothing: every thread must reach every shuffle and barrier.
  const uint32_t blocks = kClusters ? p.blocks : 1, block = blockIdx.x / blocks;
  const uint32_t first_row = block * block_rows * kRows + threadIdx.y;
  bool active[kRows], inside[kPacks];
  uint32_t row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    row[r] = first_row + r * block_rows;
    active[r] = (kOwnBlock && kRows == 1) || row[r] < p.rows;
    if (!active[r]) row[r] = 0;
  }
  // Warp w owns the packs from 32 * kPacks * w on, its lanes those 32 apart: offsets that are known here.
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int part = static_cast<int>(blockIdx.x - block * blocks), block_width = threads * kPacks * kWidth;
  const int first = part * block_width + (kWhole ? warp * 32 * kPacks + lane : static_cast<int>(threadIdx.x)) * kWidth;
  constexpr int kStep = (kShort ? kThreads : 32) * kWidth;
#pragma unroll
  for (int k = 0; k < kPacks; ++k) inside[k] = kThreads || first + k * kStep < p.width;

  // Brings later rows into the L2 cache.
  const auto prefetch_later = [&] {
    const uint32_t later = first_row + p.ahead + (kRows > 1 ? threadIdx.x : 0);
    if (threadIdx.x < kRows && p.ahead != 0 && later < p.rows) {
      const uint32_t bytes = p.width * static_cast<uint32_t>(sizeof(T));
      prefetch(row_of<kFlat>(p.input, later), bytes);
      if constexpr (traits(F).reads_residual) prefetch(row_of<kFlat>(p.second, later), bytes);
      if constexpr (kByIndex) prefetch_number(row_of<kFlat>(p.index, later));
    }
  };
  constexpr bool kLate = has_whole_rows(O, kThreads), kPasses = passes_cache(S, F, O, kThreads);
  // Before the row itself, and not for two rows, which have no register for it.
  if constexpr (kPacks > 1 && kRows == 1 && !kClusters && !kLate) prefetch_later();
  P input[kRows][kPacks], residual[kRows][kPacks];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const T* const x = reinterpret_cast<const T*>(row_of<kFlat>(p.input, row[r])) + first;
    const T* const y =
        traits(F).reads_residual ? reinterpret_cast<const T*>(row_of<kFlat>(p.second, row[r])) + first : nullptr;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      input[r][k] = residual[r][k] = P{};
      if (!inside[k]) continue;
      input[r][k] = load_row_pack<kPasses>(reinterpret_cast<const P*>(x + k * kStep));
      if constexpr (traits(F).reads_residual) {
        residual[r][k] = load_row_pack<kPasses>(reinterpret_cast<const P*>(y + k * kStep));
      }
    }
  }
  uint32_t vector_row = row[0];
  bool named = true;
  if constexpr (kByIndex) {  // after the row's loads, which would wait for the index
    static_assert(kRows == 1);
    vector_row = read_index(row_of<kFlat>(p.index, row[0]), p.index_type, p.index_rows, named);
  }
  Vectors<T, M, S, F, kKnown, kPacks, kAhead, kFlat> vectors(p, vector_row, first, kStep);
  vectors.load_ahead(inside);
  // All multiprocessors come to the vectors of a later batch at once, and would wait for them.
  if constexpr (kLate && kWhole) prefetch_later();
  if constexpr (kLate && kTraits.modulates) {
    if (first_row < 8 && blockIdx.y == 0) vectors.prefetch_batches();
  }

  float h[kRows][kPacks][kWidth];
  float branch_rstd[kRows];
  if constexpr (kTraits.norms_branch) {
    __shared__ ReduceScratch<kRows> branch_scratch;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      branch_rstd[r] = 0.f;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        unpack(input[r][k], h[r][k]);
        branch_rstd[r] += pack_squares<false>(h[r][k], 0.f, kWidth);
      }
    }
    block_reduce(branch_rstd, threads, branch_scratch);
#pragma unroll
    for (int r = 0; r < kRows; ++r) branch_rstd[r] = reciprocal_root(branch_rstd[r], p.inverse_width, p.branch_eps);
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    float gate[kWidth];
    vectors.k = k;
    if constexpr (kGated) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) gate[i] = 0.f;  // past the row's end h must be zero
      if (inside[k]) {
        get_gate(vectors, gate);
        if constexpr (kTraits.norms_branch) weigh_gate(vectors, p.weight_offset, gate);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      unpack(input[r][k], h[r][k]);
      if constexpr (traits(F).reads_residual) {
        float x[kWidth];
        unpack(residual[r][k], x);
        if constexpr (kTraits.norms_branch) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) h[r][k][i] = __fmul_rn(h[r][k][i], branch_rstd[r]);
        }
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
      block_reduce<kOwnBlock>(mean, threads, scratch[0]);
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
    const float weight_offset = kKnown && !known_with_offset(S, F, O) ? 0.f : p.weight_offset;
    if constexpr (multiplies_last(S, F, O)) {
      float most[kRows];
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (!inside[k]) continue;
        float factor[kWidth], addend[kWidth];
        vectors.k = k;
        get_factors<S, F>(vectors, weight_offset, factor, addend);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) h[r][k][i] = __fmul_rn(h[r][k][i], factor[i]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) most[r] = magnitude(h[r]);
      block_reduce_both<kWhole>(rstd, most, threads, scratch);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        rstd[r] = reciprocal_root(rstd[r], p.inverse_width, p.eps);
        QuantScale by = row_scale(p.static_scale, most[r] * rstd[r]);
        if (fold(rstd[r], by)) {
#pragma unroll
          for (int k = 0; k < kPacks; ++k) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) h[r][k][i] = __fmul_rn(h[r][k][i], rstd[r]);
          }
        }
        if (!active[r]) continue;
        float* const scales = p.scales + (kFlat ? 0 : static_cast<int64_t>(blockIdx.y) * p.rows);
        store_quantised(h[r], inside, by, row_of<kFlat>(p.out, row[r]) + first, kStep, scales + row[r]);
      }
      return;
    }
    block_reduce<kOwnBlock>(rstd, threads, scratch[1]);
    if constexpr (keeps_packs(S, F, O, kPacks, kThreads, kKnown, sizeof(M) > sizeof(T))) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
#pragma unroll
        for (auto& word : input[0][k].word) asm volatile("" : "+r"(word));  // or the numbers would be kept
        unpack(input[0][k], h[0][k]);
      }
    }
    if constexpr (kClusters && S == Statistic::kLayer) {
      const float2 moments = cluster_moments(part_sum, rstd[0], p.inverse_width, blocks, count, parts);
      mean[0] = moments.x;
      rstd[0] = moments.y;
    } else if constexpr (kClusters) {
      rstd[0] = cluster_sum(rstd[0], blocks, parts);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) rstd[r] = reciprocal_root(rstd[r], p.inverse_width, p.eps);
    if constexpr (!kQuantised && kOutputs == 1) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (!inside[k]) continue;
        float factor[kWidth], addend[kWidth];
        vectors.k = k;
        get_factors<S, F>(vectors, weight_offset, factor, addend);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          normalise<S>(mean[r], rstd[r], h[r][k]);
          apply_factors<kAdds>(factor, addend, h[r][k]);
          if (active[r])
            *reinterpret_cast<P*>(reinterpret_cast<T*>(row_of<kFlat>(p.out, row[r])) + first + k * kStep) =
                to_pack<T, kWidth>(h[r][k]);
        }
      }
    } else {
      // A quantised row is stored when all of it is known.
      float y[kOutputs][kRows][kPacks][kWidth];
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const auto set = [&](auto second) {
          constexpr bool kSecond = decltype(second)::value;
          float factor[kWidth], addend[kWidth];
          get_factors<S, F, kSecond>(vectors, weight_offset, factor, addend);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            float (&result)[kWidth] = y[kSecond][r][k];
#pragma unroll
            for (int i = 0; i < kWidth; ++i) result[i] = h[r][k][i];
            apply_factors<kAdds>(factor, addend, result);
            if (!kQuantised && active[r])
              *reinterpret_cast<P*>(reinterpret_cast<T*>(row_of<kFlat>(kSecond ? p.out2 : p.out, row[r])) + first +
                                    k * kStep) = to_pack<T, kWidth>(result);
          }
        };
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          normalise<S>(mean[r], rstd[r], h[r][k]);
#pragma unroll
          for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) y[o][r][k][i] = 0.f;
          }
        }
        if (!inside[k]) continue;
        vectors.k = k;
        set(std::false_type());
        if constexpr (kOutputs == 2) set(std::true_type());
      }
      if constexpr (kQuantised) {
        __shared__ ReduceScratch<kRows> magnitudes[kOutputs];
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
          float most[kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r) most[r] = magnitude(y[o][r]);
          block_magnitudes<kWhole, kOwnBlock>(most, threads, magnitudes[o]);
          const CompactView& values = o == 0 ? p.out : p.out2;
          float* const scales =
              (o == 0 ? p.scales : p.scales2) + (kFlat ? 0 : static_cast<int64_t>(blockIdx.y) * p.rows);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            if (!active[r]) continue;
            store_quantised(y[o][r], inside, row_scale(p.static_scale, most[r]), row_of<kFlat>(values, row[r]) + first,
                            kStep, scales + row[r]);
          }
        }
      }
    }
  }
  if constexpr (kByIndex) stop_unless_named(named);
}

// Files of their own for fewer instances each, rounded and quantised: a branch that is normalised before it is added,
// and two modulations of one norm.
void norm_branch(const NormParams& p, const Context& context);
void norm_pair(const NormParams& p, const Context& context);

// norm_general.cu: how many blocks of a cluster may share a row, and the launch of everything that norm_kernel does not
// take. `packed`: the operands that can be read in whole packs. norm_general_more.cu has the kernels for a branch with
// a norm of its own, two outputs, and quantised ones.
int most_blocks(int device);
void launch_general(const NormParams& p, const Geometry& g, dim3 block, uint32_t packed, const Context& context);
void launch_general_more(const NormParams& p, const Geometry& g, dim3 block, uint32_t packed, const Context& context);

template <uint32_t kVectors>
using Known = std::integral_constant<uint32_t, kVectors>;
template <int kPacks>
using Length = std::integral_constant<int, kPacks>;

// Whether rounded rows of `packs` packs have an instance for their length. H200, bf16, of a copy's time with and
// without:
//   heads of 64 and 128 elements: rmsnorm 4096x128 5.1 us, 5.4; rmsnorm_residual 262144x64 1.01, 1.02. Not for a
//   LayerNorm, whose code then loads its vectors too late: 131072x128 1.05, 1.02
//   2048 to 5120 columns where a thread has one row at once: adaln_rmsnorm 1x512x2048 6.6 us, 6.7; adaln_zero
//   1x8190x5120 1.03, 1.06; layernorm 8192x3072 1.02, 1.03; but two rows at once, layernorm 2048 1.04, 1.01
constexpr bool knows_length(Statistic s, Fusion f, Output o, int packs, uint32_t known) {
  if (known == 0 || s == Statistic::kNone || o == Output::kQuantised) return false;
  if (packs <= 32) return s == Statistic::kRms && !traits(f).modulates;
  const int a_thread = packs_a_thread(s, f, o, packs);
  if (rows_at_once(s, f, a_thread, packs / a_thread, known) > 1) return false;
  if (f == Fusion::kModulate) return count_vectors(known) <= (s == Statistic::kRms ? 3 : 2);
  return f == Fusion::kPlain && (s == Statistic::kLayer || packs == 256);
}

// Quantised rows have their own instances if whole packs of whole warps fill them. These do not check for a row's end.
constexpr bool has_whole_warps(Statistic s, Fusion f, Output o, int packs, uint32_t known) {
  if (known == 0 || o != Output::kQuantised || traits(f).norms_branch || traits(f).modulates_twice) return false;
  if (s == Statistic::kLayer && f == Fusion::kAdd) return false;
  return traits(f).reads_residual ? packs == 2 : packs > 2;
}

// Those with two vectors have instances for models' lengths, too. The instructions that an unknown length takes would
// make them slower (H200, adaln_layernorm_quant 2x8064x2048, of a copy's time, known and unknown: 1.07, 1.14).
constexpr bool knows_whole_length(Fusion f, uint32_t known, bool wide) {
  if (wide) return false;
  return f == Fusion::kModulate ? known == (kScale | kShift) : f == Fusion::kPlain && known == (kWeight | kBias);
}

// These sets have no other instances of their own: the models that pass them have rows of whole warps.
constexpr bool only_whole_warps(Statistic s, Fusion f, Output o, uint32_t known, bool wide) {
  const bool has_any = has_whole_warps(s, f, o, 2, known) || has_whole_warps(s, f, o, 4, known);
  return has_any && (wide || (known & (kScaleTable | kNoVectors)) != 0);
}

// Clusters share long rows of the plain norms alone.
constexpr bool has_clusters(Fusion f, Output o) { return f == Fusion::kPlain && o == Output::kRounded; }
// Only models in bfloat16 have fp8 layers: quantised rows of float16 have instances for any vectors alone.
template <typename T>
constexpr bool has_known_sets(Output o) {
  return o == Output::kRounded || std::is_same_v<T, __nv_bfloat16>;
}
// fp32 rows, and fp32 vectors beside 16-bit rows: no model passes them to a branch's norm or to two modulations.
template <typename T>
constexpr bool takes_fp32(Fusion f, Output o) {
  return has_known_sets<T>(o) && !traits(f).norms_branch && !traits(f).modulates_twice;
}
// fp32 parameters beside a modulation of the rows' dtype for each token, as Wan 2.2 has it at 5B.
template <typename T>
constexpr bool takes_fp32_parameters(Statistic s, Fusion f) {
  return std::is_same_v<T, __nv_bfloat16> && s != Statistic::kRms && (f == Fusion::kModulate || f == Fusion::kGated);
}
// fp32 rows without takes_fp32, such as quantised ones, have no norm_kernel and go to the general kernel.
template <typename T>
constexpr bool has_norm_kernel(Fusion f, Output o) {
  return sizeof(T) < 4 || takes_fp32<T>(f, o);
}

// The sets of vectors that models' blocks pass, which have an instance of their own: asking for each vector costs a row
// of 2048 about 150 instructions. The last one is 0, for any others.
constexpr std::array<uint32_t, 4> known_sets(Statistic s, Fusion f, Output o, int row_bytes, int vector_bytes) {
  constexpr uint32_t kModulation = kScale | kShift, kTables = kScaleTable | kShiftTable, kAffine = kWeight | kBias;
  constexpr uint32_t kBoth = kModulation | kScale2 | kShift2, kBothTables = kTables | kScaleTable2 | kShiftTable2;
  const bool quantised_layer = o == Output::kQuantised && s == Statistic::kLayer;
  if (vector_bytes > row_bytes) {  // Wan's modulations are fp32
    if (!quantised_layer || row_bytes == 4) return {};
    if (f == Fusion::kModulate) return {kModulation};
    if (f == Fusion::kGated) return {kGate | kModulation, kGate | kAffine};
    return {};
  }
  switch (f) {
    case Fusion::kPlain:
    case Fusion::kAdd:
      if (quantised_layer) return {kAffine, kNoVectors};
      return {s == Statistic::kLayer ? kAffine : kWeight};
    case Fusion::kModulate:
      if (o == Output::kQuantised && s == Statistic::kRms) return {kModulation, kWeight | kScale};
      if (o == Output::kQuantised) return {kModulation, kModulation | kTables};
      return {kModulation, kModulation | kTables, kModulation | kOutGate};
    case Fusion::kGated:
      if (s == Statistic::kNone) return {kGate};
      if (quantised_layer) {
        return {kGate | kModulation, kGate | kGateTable | kModulation | kTables, kGate | kAffine};
      }
      return {kGate | kModulation, kGate | kGateTable | kModulation | kTables};
    case Fusion::kBranch:
      if (s == Statistic::kNone) return {kBranchWeight, kBranchWeight | kGate};
      return {kBranchWeight | kWeight, kBranchWeight | kWeight | kGate | kScale, kGate | kScale};
    case Fusion::kPair:
      return {kBoth, kBoth | kBothTables};
    case Fusion::kGatedPair:
      return {kBoth | kBothTables, kGate | kBoth};
  }
  return {};
}

// The instances that read their modulation by index: the vectors, a thread's packs, and kThreads. Only models in
// bfloat16 have them: Qwen-Image-Edit, with LayerNorms of 3072 columns, Z-Image, with RMS norms of 3840, and Bria
// FIBO 2, with RMS norms of 3584. Other calls with an index go to the general kernel.
struct Indexed {
  uint32_t known = 0;
  int packs = 1, threads = 0;
};
template <typename T>
constexpr std::array<Indexed, 2> indexed(Statistic s, Fusion f, Output o) {
  if (!std::is_same_v<T, __nv_bfloat16>) return {};
  const bool layer = s == Statistic::kLayer, quantised = o == Output::kQuantised;
  const int row_packs = layer || f == Fusion::kGated ? 384 : 480, packs = packs_a_thread(s, f, o, row_packs);
  const int threads = row_packs / packs;
  constexpr uint32_t kWeighed = kWeight | kScale;
  switch (f) {
    case Fusion::kModulate:
      if (layer) return {{{kScale | kShift, packs, threads}}};
      if (!quantised) return {{{kWeighed, packs, 0}}};
      return {{{kWeighed, packs, threads}, {kWeighed, packs_a_thread(s, f, o, 448), 0}}};
    case Fusion::kGated:
      if (s == Statistic::kRms) return {};
      return {{{layer ? kGate | kScale | kShift : uint32_t{kGate}, packs, quantised ? threads : 0}}};
    case Fusion::kBranch:
      return {{{s == Statistic::kRms ? kBranchWeight | kWeight | kGate | kScale : kBranchWeight | kGate, packs, 0}}};
    default:
      return {};
  }
}

// Which of these takes the call; -1: none.
template <typename T, Statistic S, Fusion F, Output O>
int instance_by_index(const CompactParams& p, const Geometry& g) {
  const std::array<Indexed, 2> instances = indexed<T>(S, F, O);
  if (p.weight_offset != 0.f && !known_with_offset(S, F, O)) return -1;
  for (int i = 0; i < 2; ++i) {
    const Indexed& one = instances[i];
    if (one.known == 0 || (p.present & ~kElementOperands) != (one.known | kIndexed) || g.packs != one.packs) continue;
    if (one.threads == 0 || p.width == one.threads * one.packs * kPackWidth<T>) return i;
  }
  return -1;
}

template <typename T, Statistic S, Fusion F, Output O, int kInstance>
void launch_by_index(const CompactParams& p, dim3 block, unsigned outer, cudaStream_t stream) {
  constexpr Indexed kOne = indexed<T>(S, F, O)[kInstance];
  if constexpr (kOne.known != 0) {
    const dim3 grid(grid_size(ceil_div(static_cast<int64_t>(p.rows), block.y)), outer);
    norm_kernel<T, T, S, F, O, kOne.packs, 1, kOne.known | kIndexed, false, kOne.threads>
        <<<grid, block, 0, stream>>>(p);
  }
}

template <typename T, typename M, Statistic S, Fusion F, Output O>
void launch_packed(const CompactParams& p, const Geometry& g, dim3 block, unsigned outer, cudaStream_t stream) {
  const uint32_t vectors = p.present & ~kElementOperands;
  const auto grid = [&](int rows) {
    return dim3(grid_size(ceil_div(p.rows, static_cast<int64_t>(block.y) * rows) * g.blocks), outer);
  };
  const auto run = [&](auto known) {
    constexpr uint32_t kKnown = decltype(known)::value;
    // Not every geometry has an instance of its own for what is known.
    constexpr bool kOnlyWhole = only_whole_warps(S, F, O, kKnown, sizeof(M) > sizeof(T));
    constexpr bool kHasOne =
        kKnown == 0 || (S == Statistic::kNone && F == Fusion::kGated) || (!traits(F).modulates && !kOnlyWhole);
    constexpr bool kHasTwo = kKnown == 0 || !(kOnlyWhole || has_whole_warps(S, F, O, 4, kKnown));
    constexpr bool kHasThree = kKnown == 0 && has_whole_warps(S, F, O, 3, kWeight);
    constexpr bool kHasFour = kKnown == 0 || ((F != Fusion::kModulate || S == Statistic::kLayer) && !kOnlyWhole);
    constexpr bool kHasClusters = has_clusters(F, O);
    if (kKnown != 0 &&
        (vectors != (kKnown & ~kElementOperands) || (p.weight_offset != 0.f && !known_with_offset(S, F, O))))
      return false;
    if (g.blocks > 1) {
      if constexpr (kHasClusters) {
        launch_clusters(norm_kernel<T, M, S, F, O, 4, 1, kKnown, true>, grid(1), block, g.blocks, stream, p);
      }
      return kHasClusters;
    }
    // The main widths of 16-bit rows, one head's first.
    const auto run_length = [&](auto packs) {
      constexpr int kRowPacks = decltype(packs)::value, kPacks = packs_a_thread(S, F, O, kRowPacks);
      constexpr int kThreads = kRowPacks / kPacks, kRows = rows_at_once(S, F, kPacks, kThreads, kKnown);
      if constexpr (knows_length(S, F, O, kRowPacks, kKnown) && sizeof(T) == 2) {
        if (p.width != kRowPacks * kPackWidth<T> || g.packs != kPacks || (is_flat(F, kThreads) && outer > 1))
          return false;
        norm_kernel<T, M, S, F, O, kPacks, kRows, kKnown, false, kThreads><<<grid(kRows), block, 0, stream>>>(p);
        return true;
      }
      return false;
    };
    if (run_length(Length<8>()) || run_length(Length<16>()) || run_length(Length<256>()) || run_length(Length<384>()) ||
        run_length(Length<512>()) || run_length(Length<640>())) {
      return true;
    }
    // Rows of 64, 128 and 1024 columns share a block. Where geometry() has one pack a thread, two give the same bits: a
    // thread's two packs are those that two threads would add first.
    const auto run_shared = [&](auto packs, auto own) {
      constexpr int kRowPacks = decltype(packs)::value, kPacks = decltype(own)::value, kThreads = kRowPacks / kPacks;
      if constexpr (multiplies_last(S, F, O) && kKnown != 0 && sizeof(T) == 2) {
        if (p.width != kRowPacks * kPackWidth<T> || g.packs != (kThreads < 32 ? 1 : kPacks) || outer > 1) return false;
        const dim3 rows(kThreads, kShortRowThreads / kThreads);
        norm_kernel<T, M, S, F, O, kPacks, 1, kKnown, false, kThreads>
            <<<grid_size(ceil_div(p.rows, static_cast<int64_t>(rows.y))), rows, 0, stream>>>(p);
        return true;
      }
      return false;
    };
    if (run_shared(Length<8>(), Length<2>()) || run_shared(Length<16>(), Length<2>()) ||
        run_shared(Length<128>(), Length<4>())) {
      return true;
    }
    const auto run_whole = [&](auto packs, auto threads) {
      constexpr int kPacks = decltype(packs)::value, kThreads = decltype(threads)::value;
      constexpr bool kWide = sizeof(M) > sizeof(T), kLengthKnown = knows_whole_length(F, kKnown, kWide);
      if constexpr (has_whole_warps(S, F, O, kPacks, kKnown) && sizeof(T) == 2 &&
                    (kThreads == kWholeWarps || kLengthKnown)) {
        // Two rows share fp32 vectors, and the vectors of a gated rms norm with tables.
        constexpr int kRows = kWide || (S == Statistic::kRms && traits(F).gates && (kKnown & kGateTable)) ? 2 : 1;
        constexpr int kMost = register_threads(S, F, O, kPacks, kThreads, false, kKnown, kWide);
        if (g.packs != kPacks || g.threads <= 32 || g.threads > kMost) return false;
        if (kThreads != kWholeWarps && g.threads != kThreads) return false;
        if (p.width != g.threads * kPacks * kPackWidth<T>) return false;
        if (is_flat(F, kWholeWarps) && outer > 1) return false;
        norm_kernel<T, M, S, F, O, kPacks, kRows, kKnown, false, kThreads><<<grid(kRows), block, 0, stream>>>(p);
        return true;
      }
      return false;
    };
    // The lengths of models: 1536, 2048, 3072, 4096, and of LayerNorms 5120 and 6144.
    if (run_whole(Length<3>(), Length<64>()) || run_whole(Length<4>(), Length<64>()) ||
        run_whole(Length<4>(), Length<96>()) || run_whole(Length<4>(), Length<128>())) {
      return true;
    }
    if constexpr (S == Statistic::kLayer) {
      if (run_whole(Length<4>(), Length<160>()) || run_whole(Length<4>(), Length<192>())) return true;
    }
    using Any = Length<kWholeWarps>;
    if (run_whole(Length<2>(), Any()) || run_whole(Length<3>(), Any()) || run_whole(Length<4>(), Any())) return true;
    if (g.packs == 1) {
      constexpr int kRows = rows_at_once(S, F, 1, 32, kKnown);
      if constexpr (kHasOne) norm_kernel<T, M, S, F, O, 1, kRows, kKnown><<<grid(kRows), block, 0, stream>>>(p);
      return kHasOne;
    }
    if (g.packs == 2) {
      if constexpr (kHasTwo) {
        constexpr int kRows = rows_at_once(S, F, 2, kTwoRowsThreads, kKnown);
        if (g.threads <= kTwoRowsThreads) {
          norm_kernel<T, M, S, F, O, 2, kRows, kKnown><<<grid(kRows), block, 0, stream>>>(p);
        } else {
          norm_kernel<T, M, S, F, O, 2, 1, kKnown><<<grid(1), block, 0, stream>>>(p);
        }
      }
      return kHasTwo;
    }
    if (g.packs == 3) {
      if constexpr (kHasThree) norm_kernel<T, M, S, F, O, 3, 1, kKnown><<<grid(1), block, 0, stream>>>(p);
      return kHasThree;
    }
    if constexpr (kHasFour) norm_kernel<T, M, S, F, O, 4, 1, kKnown><<<grid(1), block, 0, stream>>>(p);
    return kHasFour;
  };
  constexpr std::array<uint32_t, 4> kNone = {};
  constexpr bool kHasSets = has_known_sets<T>(O) && !std::is_same_v<M, Fp32Parameters>;
  constexpr std::array<uint32_t, 4> kSets = kHasSets ? known_sets(S, F, O, sizeof(T), sizeof(M)) : kNone;
  run(Known<kSets[0]>()) || run(Known<kSets[1]>()) || run(Known<kSets[2]>()) || run(Known<kSets[3]>());
}

template <typename T, Statistic S, Fusion F, Output O>
void launch(const NormParams& p, const Context& context) {
  const bool whole_blocks = has_more(F, O);  // a row is no cluster's
  const Geometry g = geometry(p.rows.width, kPackWidth<T>, S, F, O, whole_blocks ? 1 : most_blocks(context.device));
  // Short rows share a block of four warps; a row of more than one warp has a block to itself.
  const dim3 block(static_cast<unsigned>(g.threads),
                   g.threads > 32 ? 1u : static_cast<unsigned>(kShortRowThreads / g.threads));
  const auto stream = static_cast<cudaStream_t>(context.stream);
  bool fast = false;
  VectorTypes types{};
  const uint32_t packed = whole_pack_operands<T>(p, fast, types);
  const bool same = types == VectorTypes::kRows, wide = types == VectorTypes::kFp32;
  CompactParams q{};
  constexpr bool kHasKernel = has_norm_kernel<T>(F, O), kTakesParameters = takes_fp32_parameters<T>(S, F);
  fast = fast && kHasKernel && (same || (wide ? takes_fp32<T>(F, O) : kTakesParameters));
  fast = fast && g.fits && (g.blocks == 1 || has_clusters(F, O));
  fast = fast && compact_params(p, q);
  const int instance = fast && same && p.index.data ? instance_by_index<T, S, F, O>(q, g) : -1;
  fast = fast && (!p.index.data || instance >= 0);
  if (takes_packed("norm", forced().norm, fast)) {
    q.blocks = static_cast<uint32_t>(g.blocks);
    const int64_t row_bytes = p.rows.width * static_cast<int64_t>(sizeof(T)) * (p.residual.data ? 2 : 1);
    q.ahead = rows_ahead(kAheadBytes, row_bytes, context.device);
    const unsigned outer = p.rows.ndim == 2 ? static_cast<unsigned>(p.rows.size[0]) : 1;
    if (p.index.data) {
      instance == 0 ? launch_by_index<T, S, F, O, 0>(q, block, outer, stream)
                    : launch_by_index<T, S, F, O, 1>(q, block, outer, stream);
    } else if (same) {
      if constexpr (kHasKernel) launch_packed<T, T, S, F, O>(q, g, block, outer, stream);
    } else if (wide) {
      if constexpr (kHasKernel && takes_fp32<T>(F, O)) launch_packed<T, float, S, F, O>(q, g, block, outer, stream);
    } else if constexpr (kTakesParameters) {
      launch_packed<T, Fp32Parameters, S, F, O>(q, g, block, outer, stream);
    }
  } else {
    launch_general(p, g, block, packed, context);
  }
  check_launch("norm");
}

}  // namespace ltx
