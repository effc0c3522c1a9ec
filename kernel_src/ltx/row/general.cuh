// The general kernel of the norm family: any strides and alignments, mixed dtypes, eager rounding, and rows that are
// longer than the registers hold. norm.cu has the formula.
#pragma once

#include "ltx/row/kernel.cuh"

namespace ltx {

// Walks the row once for each sum and once for the output, from cache after the first pass: for rows longer than the
// registers hold, strides, misaligned views, mixed dtypes and eager rounding. block and grid: as norm_kernel's, but x
// of the grid counts all rows. Without an output (gated_residual) only h is computed, whatever S. kMore: for a branch
// with a norm of its own, two outputs and quantised ones, which no cluster shares.
template <typename T, Statistic S, bool kMore>
__global__ void __launch_bounds__(kMaxThreads, 1)
    norm_kernel_general(const __grid_constant__ NormParams p, uint32_t packed, int packs, uint32_t blocks,
                        float inverse_width) {
  constexpr int kWidth = kPackWidth<T>;
  __shared__ ReduceScratch<1> scratch[2];
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
  start.choose(p);
  GeneralLoader<T, kMore> load{p, start, packed};
  const bool quantised = kMore && p.quantised.values != nullptr;
  const bool normalises = p.out.data != nullptr || quantised;
  if (blocks > 1 && normalises) enter_cluster();
  float mean = 0.f, rstd = 0.f, h[kWidth];
  float part_sum = 0.f;
  const auto count = [&](int64_t b) {
    const int64_t turns = width / stride, rest = width - turns * stride;
    return static_cast<float>(turns * block_width + min(max(rest - b * block_width, int64_t{0}), block_width));
  };
  if constexpr (kMore) {
    if (p.norms_branch) {
      __shared__ ReduceScratch<1> branch_scratch;
      float sum = 0.f;
      each_pack([&](int64_t column) {
        load.column = column;
        load.get_input(h);
        sum += pack_squares<false>(h, 0.f, width - column);
      });
      load.branch_rstd = reciprocal_root(block_reduce(sum, threads, branch_scratch), inverse_width, p.branch_eps);
    }
  }
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
    block_reduce(sums, threads, scratch[pass]);
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
  const bool two = kMore && (p.out2.data != nullptr || p.quantised2.values != nullptr);
  // See multiplies_last.
  const bool last =
      S == Statistic::kRms && quantised && !two && !p.residual.data && !p.scale.value.data && !p.shift.value.data;
  // A pack of the output that load.second names, from h.
  const auto finish = [&] {
    normalise<S>(mean, last ? 1.f : rstd, h);
    if (load.eager()) {
      finish_eager<T, S>(load, p.weight_offset, h);
    } else {
      float factor[kWidth], addend[kWidth];
      get_factors<S, Fusion::kGated>(load, p.weight_offset, factor, addend);
      apply_factors<true>(factor, addend, h);
    }
  };
  // First the largest magnitudes of quantised rows, then what is written. One body serves both turns and both outputs:
  // four copies of it left a stack frame on sm_75.
  QuantScale scale{}, scale2{};
  bool unfolded = false;
  float most[1] = {0.f}, most2[1] = {0.f};
#pragma unroll 1
  for (int turn = quantised ? 0 : 1; turn < 2; ++turn) {
    const bool writes = turn == 1;
    if (writes) stop_unless_named(start.named);
    if (writes && !active) return;
    each_pack([&](int64_t column) {
      load.column = column;
      load.get_h(h);
      if (writes && p.residual_out.data != nullptr) {
        store_pack(static_cast<T*>(p.residual_out.data) + start.residual_out, column, p.residual_out.column_stride,
                   width, packed & kResidualOut, to_pack<T, kWidth>(h));
      }
      if (!normalises) return;
      // The outputs may lie in the memory that h came from: it is read once for both.
      float kept[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) kept[i] = h[i];
#pragma unroll 1
      for (int output = 0; output < (two ? 2 : 1); ++output) {
        load.second = output == 1;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) h[i] = kept[i];
        finish();
        if (!writes) {
          float largest = 0.f;  // columns past the row's end are nothing
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            if (column + i < width) largest = larger_magnitude(largest, h[i]);
          }
          if (load.second) {
            most2[0] = larger_magnitude(most2[0], largest);
          } else {
            most[0] = larger_magnitude(most[0], largest);
          }
        } else if (!quantised) {
          const RowView& out = load.second ? p.out2 : p.out;
          store_pack(static_cast<T*>(out.data) + (load.second ? start.out2 : start.out), column, out.column_stride,
                     width, packed & (load.second ? kOut2 : kOut), to_pack<T, kWidth>(h));
        } else {
          if (unfolded) normalise<Statistic::kRms>(0.f, rstd, h);
          const QuantOutput& out = load.second ? p.quantised2 : p.quantised;
          const QuantScale by = load.second ? scale2 : scale;
          if (column == 0) out.scales[row] = by.scale;
          const E4m3Pack<kWidth> pack(h, by.inverse);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            if (column + i < width) out.values[row * width + column + i] = pack.byte(i);
          }
        }
      }
    });
    if constexpr (kMore) {
      if (writes) return;
      __shared__ ReduceScratch<1> magnitudes[2];
      block_magnitudes<false>(most, threads, magnitudes[0]);
      block_magnitudes<false>(most2, threads, magnitudes[1]);
      scale = row_scale(p.quantised.static_scale, last ? most[0] * rstd : most[0]);
      scale2 = row_scale(p.quantised.static_scale, most2[0]);
      unfolded = last && fold(rstd, scale);
    }
  }
}

template <bool kMore>
void launch_general_kernel(const NormParams& p, const Geometry& g, dim3 block, uint32_t packed,
                           const Context& context) {
  const unsigned grid = grid_size(ceil_div(p.rows.count, block.y) * g.blocks);
  const float inverse_width = 1.f / static_cast<float>(p.rows.width);
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = p.statistic == Statistic::kLayer ? norm_kernel_general<T, Statistic::kLayer, kMore>
                                                         : norm_kernel_general<T, Statistic::kRms, kMore>;
    launch_clusters(kernel, grid, block, g.blocks, static_cast<cudaStream_t>(context.stream), p,
                    forced().norm == Kernel::kElements ? 0 : packed, g.packs, static_cast<uint32_t>(g.blocks),
                    inverse_width);
  });
}

}  // namespace ltx
