// The general kernel of the norm family: any strides and alignments, mixed dtypes, eager rounding, and rows that are
// longer than the registers hold. norm.cu has the formula.
#include "ltx/row/kernel.cuh"

namespace ltx {
namespace {

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
  // See multiplies_last.
  const bool last = S == Statistic::kRms && quantised && !p.residual.data && !p.scale.value.data && !p.shift.value.data;
  // A pack of an output, from h.
  const auto finish = [&](auto second) {
    constexpr bool kSecond = decltype(second)::value;
    normalise<S>(mean, kMore && last ? 1.f : rstd, h);
    if (load.eager()) {
      finish_eager<T, S, kSecond>(load, p.weight_offset, h);
    } else {
      float factor[kWidth], addend[kWidth];
      get_factors<S, kMore ? Fusion::kGatedPair : Fusion::kGated, kSecond>(load, p.weight_offset, factor, addend);
      apply_factors<true>(factor, addend, h);
    }
  };
  if constexpr (kMore) {
    const bool two = p.out2.data != nullptr || p.quantised2.values != nullptr;
    QuantScale scale{}, scale2{};
    if (quantised) {
      __shared__ ReduceScratch<1> magnitudes[2];
      float most[1] = {0.f}, most2[1] = {0.f};
      each_pack([&](int64_t column) {
        load.column = column;
        load.get_h(h);
        float kept[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) kept[i] = h[i];
        finish(std::false_type());
        // Columns past the row's end are nothing.
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (column + i < width) most[0] = larger_magnitude(most[0], h[i]);
          h[i] = kept[i];
        }
        if (!two) return;
        finish(std::true_type());
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (column + i < width) most2[0] = larger_magnitude(most2[0], h[i]);
        }
      });
      block_magnitudes<false>(most, threads, magnitudes[0]);
      block_magnitudes<false>(most2, threads, magnitudes[1]);
      scale = row_scale(p.quantised.static_scale, last ? most[0] * rstd : most[0]);
      scale2 = row_scale(p.quantised.static_scale, most2[0]);
    }
    if (!active) return;
    const bool unfolded = last && fold(rstd, scale);
    const auto write = [&](int64_t column, const RowView& view, int64_t offset, Operand bit, const QuantOutput& output,
                           const QuantScale& by) {
      if (!quantised) {
        return store_pack(static_cast<T*>(view.data) + offset, column, view.column_stride, width, packed & bit,
                          to_pack<T, kWidth>(h));
      }
      if (column == 0) output.scales[row] = by.scale;
      const E4m3Pack<kWidth> pack(h, by.inverse);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (column + i < width) output.values[row * width + column + i] = pack.byte(i);
      }
    };
    each_pack([&](int64_t column) {
      load.column = column;
      load.get_h(h);
      if (p.residual_out.data != nullptr) {
        store_pack(static_cast<T*>(p.residual_out.data) + start.residual_out, column, p.residual_out.column_stride,
                   width, packed & kResidualOut, to_pack<T, kWidth>(h));
      }
      if (!normalises) return;
      float kept[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) kept[i] = h[i];
      finish(std::false_type());
      if (unfolded) normalise<Statistic::kRms>(0.f, rstd, h);
      write(column, p.out, start.out, kOut, p.quantised, scale);
      if (!two) return;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) h[i] = kept[i];
      finish(std::true_type());
      write(column, p.out2, start.out2, kOut2, p.quantised2, scale2);
    });
  } else if (active) {
    each_pack([&](int64_t column) {
      load.column = column;
      load.get_h(h);
      if (p.residual_out.data != nullptr) {
        store_pack(static_cast<T*>(p.residual_out.data) + start.residual_out, column, p.residual_out.column_stride,
                   width, packed & kResidualOut, to_pack<T, kWidth>(h));
      }
      if (normalises) {
        finish(std::false_type());
        store_pack(static_cast<T*>(p.out.data) + start.out, column, p.out.column_stride, width, packed & kOut,
                   to_pack<T, kWidth>(h));
      }
    });
  }
}

}  // namespace

// Blocks of a cluster. Clusters came with compute capability 9.0; a newer GPU may still run code that was compiled for
// an older one.
int most_blocks(int device) {
  return once_a_device(device, [device] {
    const int major = device_attribute<cudaDevAttrComputeCapabilityMajor>(device);
    cudaFuncAttributes code{};
    if (major < 9 || cudaFuncGetAttributes(&code, norm_kernel_general<float, Statistic::kRms, false>) != cudaSuccess ||
        code.ptxVersion < 90) {
      return 1;
    }
    return major <= 10 ? kMaxBlocks : kPortableBlocks;
  });
}

void launch_general(const NormParams& p, const Geometry& g, dim3 block, uint32_t packed, const Context& context) {
  const unsigned grid = grid_size(ceil_div(p.rows.count, block.y) * g.blocks);
  const float inverse_width = 1.f / static_cast<float>(p.rows.width);
  const bool more = p.norms_branch || p.out2.data || p.quantised.values;
  const auto run = [&](auto kernel) {
    launch_clusters(kernel, grid, block, g.blocks, static_cast<cudaStream_t>(context.stream), p,
                    forced().norm == Kernel::kElements ? 0 : packed, g.packs, static_cast<uint32_t>(g.blocks),
                    inverse_width);
  };
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.statistic == Statistic::kLayer) {
      return more ? run(norm_kernel_general<T, Statistic::kLayer, true>)
                  : run(norm_kernel_general<T, Statistic::kLayer, false>);
    }
    more ? run(norm_kernel_general<T, Statistic::kRms, true>) : run(norm_kernel_general<T, Statistic::kRms, false>);
  });
}

}  // namespace ltx
