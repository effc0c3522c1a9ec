// How the norm kernels share a row among threads. Everything here depends on the op and on the row's length and dtype
// alone, never on the number of rows, so a row's bits depend on nothing else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "ltx/force.cuh"
#include "ltx/launch.cuh"
#include "ltx/params.h"

namespace ltx {

// What surrounds the norm.
enum class Fusion {
  kPlain,
  kModulate,
  kAdd,
  kGated,
  kBranch,
  kPair,
  kGatedPair,
  // Gradients (norm_backward.cu): of one output, of two, and of a branch that is normalised on its own.
  kBackward,
  kBackwardPair,
  kBackwardBranch,
};

struct FusionTraits {
  bool norms_branch;     // the input is normalised on its own before anything else
  bool reads_residual;   // h = residual + input
  bool gates;            // h = residual + input * gate
  bool modulates;        // the norm is followed by a scale and a shift
  bool modulates_twice;  // and by another pair of them, which gives a second output
};

constexpr FusionTraits traits(Fusion f) {
  switch (f) {
    case Fusion::kPlain:
      return {false, false, false, false, false};
    case Fusion::kModulate:
      return {false, false, false, true, false};
    case Fusion::kAdd:
      return {false, true, false, false, false};
    case Fusion::kGated:
      return {false, true, true, true, false};
    case Fusion::kBranch:
      return {true, true, true, true, false};
    case Fusion::kPair:
      return {false, false, false, true, true};
    case Fusion::kGatedPair:
      return {false, true, true, true, true};
    case Fusion::kBackward:
      return {false, false, true, true, false};
    case Fusion::kBackwardPair:
      return {false, false, true, true, true};
    case Fusion::kBackwardBranch:
      return {true, false, true, true, false};
  }
  return {};
}

// A result is rounded to the rows' dtype, or quantised to fp8 with a scale for each row.
enum class Output { kRounded, kQuantised };

// What few ops have: norm_kernel_general does without it for the others.
constexpr bool has_more(Fusion f, Output o) {
  return o == Output::kQuantised || traits(f).norms_branch || traits(f).modulates_twice;
}

constexpr int kMaxThreads = 512;       // of a block
constexpr int kShortRowThreads = 128;  // of a block whose rows have a warp at most

// Blocks of a cluster, and 16-byte packs of a row for each, where a block does not hold the row. More blocks wait less
// for memory when the launch has few rows (H200, bf16: rmsnorm 8x65536 6.3 us with 8 blocks of 256 threads, 6.5 with 4
// of 512; 1x262144 6.7 with 16, which is more than every GPU has, and 7.7 with 8).
constexpr int kMaxBlocks = 16, kPortableBlocks = 8, kClusterPacks = 1024;

// Packs that a thread owns: one in rows of up to `one` packs, two up to `two`, else four. Two packs are half the
// instructions a thread and let twice as many threads wait for memory, at the price of more sums.
//
// A quantised row writes half as much and so has time for fewer instructions: it takes fewer threads, each with more
// packs between the sums. `quantised_two`, where it is not 0, stands in place of `two`; longer rows without a residual
// have three packs where these make whole warps and four do not (H200, bf16, drafts of adaln_layernorm_quant, of a
// copy's time: 1x32760x1536 1.16 with two packs, 1.02 with three; 4x4608x3072 1.05 with four, 1.15 with six:
// h200-tuning.json).
struct Rung {
  Statistic statistic;
  Fusion fusion;
  int one, two;
  int quantised_two = 0;
};

// H200, bf16, of a copy's time with two packs and with four, rows prefetched (h200-tuning.json):
//   rmsnorm 16384x4096 0.99, 1.00; 8192x8192 1.00, 0.98
//   layernorm 8192x3072 1.01, 1.02; 16384x4096 1.00, 0.99
//   adaln_layernorm 1x4608x3072 1.04, 1.04; 1x8190x5120 1.03, 1.02
//   adaln_zero 1x8190x5120 1.02, 1.03; adaln_rmsnorm 1x8190x5120 1.00, 1.01
//   adaln_rmsnorm 1x15447x5376 with a modulation of each token 1.01, 1.27
//   gated_residual_adaln_layernorm 1x8190x5120 1.01, 1.02
//   gated_residual_adaln_rmsnorm 1x4608x6144 with fp32 vectors 1.15, 1.35
//   gated_residual 2x8064x4096 96.9 us with one pack, 97.6 with two: there is no sum to share
// clang-format off: a row a line
constexpr Rung kLadder[] = {
    {Statistic::kRms, Fusion::kPlain, 32, 512, 64},
    {Statistic::kRms, Fusion::kModulate, 32, 704, 64},
    {Statistic::kRms, Fusion::kAdd, 32, 256, 1024},
    {Statistic::kRms, Fusion::kGated, 32, 768, 1024},
    {Statistic::kRms, Fusion::kBranch, 32, 640},
    {Statistic::kRms, Fusion::kPair, 32, 640},
    {Statistic::kRms, Fusion::kGatedPair, 32, 640},
    {Statistic::kLayer, Fusion::kPlain, 32, 384, 64},
    {Statistic::kLayer, Fusion::kModulate, 32, 384, 64},
    {Statistic::kLayer, Fusion::kAdd, 32, 384},
    {Statistic::kLayer, Fusion::kGated, 32, 640},
    {Statistic::kLayer, Fusion::kPair, 32, 384},
    {Statistic::kLayer, Fusion::kGatedPair, 32, 640},
    {Statistic::kNone, Fusion::kGated, kMaxThreads, 640},
    {Statistic::kNone, Fusion::kBranch, 32, 640},
    {Statistic::kRms, Fusion::kBackward, 32, 640},
    {Statistic::kLayer, Fusion::kBackward, 32, 640},
    {Statistic::kNone, Fusion::kBackward, kMaxThreads, 640},
    {Statistic::kRms, Fusion::kBackwardPair, 32, 640},
    {Statistic::kLayer, Fusion::kBackwardPair, 32, 640},
    {Statistic::kRms, Fusion::kBackwardBranch, 32, 768},
};
// clang-format on

constexpr int packs_a_thread(Statistic s, Fusion f, Output o, int64_t packs) {
  for (const Rung& rung : kLadder) {
    if (rung.statistic != s || rung.fusion != f) continue;
    const bool quantised = o == Output::kQuantised && rung.quantised_two != 0;
    if (packs <= rung.one) return 1;
    if (packs <= (quantised ? rung.quantised_two : rung.two)) return 2;
    return quantised && !traits(f).reads_residual && packs > 96 && packs % 96 == 0 && packs % 128 != 0 ? 3 : 4;
  }
  return 4;
}

// `blocks` a row, `threads` a block, `packs` a thread. `fits`: the registers hold the row.
struct Geometry {
  int threads;
  int packs;
  int blocks = 1;
  bool fits = true;
};

inline Geometry share(int64_t packs, int a_thread) {
  const int64_t threads = ceil_div(packs, a_thread);
  // With one pack a thread, several rows share a warp.
  const bool part = a_thread == 1 && threads < 32;
  return {part ? next_power_of_two(threads) : static_cast<int>(ceil_div(threads, 32) * 32), a_thread};
}

// `most_blocks`: how many blocks of a cluster may share a row.
inline Geometry geometry(int64_t width, int pack_width, Statistic s, Fusion f, Output o, int most_blocks) {
  const int64_t packs = ceil_div(width, pack_width);
  if (const int a_thread = forced().norm_packs) {
    if (packs > a_thread * kMaxThreads) fail_forced("rows that fit", "norm_packs=" + std::to_string(a_thread));
    return share(packs, a_thread);
  }
  if (packs <= 4 * kMaxThreads) return share(packs, packs_a_thread(s, f, o, packs));
  const int blocks = std::min(next_power_of_two(ceil_div(packs, kClusterPacks)), most_blocks);
  Geometry g = share(std::min<int64_t>(ceil_div(packs, blocks), 4 * kMaxThreads), 4);
  g.blocks = blocks;
  g.fits = packs <= static_cast<int64_t>(4) * g.threads * blocks;
  return g;
}

}  // namespace ltx
