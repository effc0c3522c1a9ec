// Sums over rows. The gradients of what rows share follow from them: of a norm's weight and bias, scale, shift and
// gate.
//
//   products = sum(grad * n)     sums = sum(grad)      ltx/row_sums.h has n
//
// Three kernels, without atomics: row_moments gives mean and rstd of each row where n is a norm, part_sums adds up the
// rows of a part, and whole_sums the parts of a group. The shape alone decides on the order of the additions.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "ltx/launch.cuh"
#include "ltx/reduce.cuh"
#include "ltx/row_sums.h"
#include "ltx/rows.cuh"
#include "ltx/vec.cuh"

namespace ltx {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;  // that a thread reads at once

// Columns of a row as fp32, zero past its end. T: the dtype of rows that are one dimension of whole packs; void: any.
template <typename T>
__device__ __forceinline__ void read(const Rows& rows, const RowView& view, int64_t row, int64_t column,
                                     float (&x)[kColumns]) {
  if constexpr (!std::is_void_v<T>) {
    load_floats_as<T>(view.data, row * view.stride[0], column, 1, rows.width, true, x);
  } else {
    int64_t start = 0;
    walk_row(rows, row, [&](int d, int64_t i) { start += i * view.stride[d]; });
    load_floats(view.data, view.dtype, start, column, view.column_stride, rows.width, false, x);
  }
}

// `lanes` neighbouring threads own a row, so that a warp has 32 / lanes rows.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    row_moments_kernel(const __grid_constant__ RowSumsParams p, float2* moments, int lanes) {
  const int lane = threadIdx.x % lanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  const int64_t own = min(row, p.rows.count - 1);  // the lanes past the last row take part in the sums
  const float inverse_width = 1.f / static_cast<float>(p.rows.width);
  constexpr int kReads = std::is_void_v<T> ? 1 : 4;  // that begin before the first is used
  float mean = 0.f;
  const auto add_up = [&](const auto& term) {
    float sum = 0.f;
    for (int64_t begin = lane * kColumns; begin < p.rows.width; begin += kReads * lanes * kColumns) {
      float x[kReads][kColumns];
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int64_t column = begin + i * lanes * kColumns;
        if (column < p.rows.width) read<T>(p.rows, p.input, own, column, x[i]);
      }
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        const int64_t count = p.rows.width - (begin + i * lanes * kColumns);
        if (count > 0) sum += term(x[i], count);
      }
    }
    return lane_sum(sum, lanes);
  };
  if (p.statistic == Statistic::kLayer) {
    mean = __fmul_rn(add_up([](const auto& x, int64_t) { return tree_sum(x); }), inverse_width);
  }
  const float squares = add_up([&](const auto& x, int64_t count) { return pack_squares<true>(x, mean, count); });
  if (lane == 0 && row < p.rows.count) moments[row] = {mean, reciprocal_root(squares, inverse_width, p.eps)};
}

// Block (x, y) adds up part x, counted through all groups, of the columns from y * lanes * kColumns on.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    part_sums_kernel(const __grid_constant__ RowSumsParams p, const float2* moments, int lanes, int64_t part_rows,
                     int64_t parts) {
  __shared__ float shared[2 * kColumns][kThreads];
  const int lane = threadIdx.x % lanes, first = threadIdx.x / lanes, step = kThreads / lanes;
  const int64_t width = p.rows.width, column = (static_cast<int64_t>(blockIdx.y) * lanes + lane) * kColumns;
  const int64_t group_rows = p.rows.count / p.groups;
  const int64_t group = blockIdx.x / parts, offset = (blockIdx.x - group * parts) * part_rows;
  const int64_t begin = group * group_rows + offset, end = begin + min(part_rows, group_rows - offset);
  float sums[2 * kColumns] = {};  // of products, then of the gradient
  if (column < width) {
#pragma unroll 4
    for (int64_t row = begin + first; row < end; row += step) {
      float grad[kColumns], x[kColumns];
      read<T>(p.rows, p.grad, row, column, grad);
      read<T>(p.rows, p.input, row, column, x);
      const float2 moment = moments == nullptr ? float2{0.f, 1.f} : moments[row];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        sums[i] = fmaf(grad[i], (x[i] - moment.x) * moment.y, sums[i]);
        sums[kColumns + i] += grad[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) shared[i][threadIdx.x] = sums[i];
  for (int half = step / 2; half > 0; half /= 2) {
    __syncthreads();
    if (first >= half) continue;
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) shared[i][threadIdx.x] += shared[i][threadIdx.x + half * lanes];
  }
  if (first > 0) return;
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) {
    const int64_t at = column + i % kColumns, row = i / kColumns * p.groups * parts + blockIdx.x;
    if (at < width) p.workspace[row * width + at] = shared[i][threadIdx.x];
  }
}

// Block (x, y): group x of the products, or x - groups of the gradient, and 32 columns from 32 * y on.
__global__ void __launch_bounds__(kThreads) whole_sums_kernel(const __grid_constant__ RowSumsParams p, int64_t parts) {
  __shared__ float shared[kThreads];
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32;
  const int64_t width = p.rows.width, column = static_cast<int64_t>(blockIdx.y) * 32 + lane;
  float sum = 0.f;
  if (column < width) {
#pragma unroll 4
    for (int64_t part = first; part < parts; part += kThreads / 32) {
      sum += p.workspace[(blockIdx.x * parts + part) * width + column];
    }
  }
  shared[threadIdx.x] = sum;
  for (int half = kThreads / 64; half > 0; half /= 2) {
    __syncthreads();
    if (first < half) shared[threadIdx.x] += shared[threadIdx.x + half * 32];
  }
  if (first > 0 || column >= width) return;
  const bool of_gradient = blockIdx.x >= p.groups;
  (of_gradient ? p.sums : p.products)[(blockIdx.x - (of_gradient ? p.groups : 0)) * width + column] =
      shared[threadIdx.x];
}

bool whole_packs(const RowSumsParams& p, const RowView& view) {
  const int64_t width = p.rows.width;
  return p.rows.ndim <= 1 && is_packed(view.data, view.dtype, kColumns, width, view.column_stride, view.stride, 1);
}

template <typename T>
void launch(const RowSumsParams& p, cudaStream_t stream) {
  const int64_t packs = ceil_div(p.rows.width, kColumns), parts = row_sums_parts(p);
  const int lanes = static_cast<int>(std::min<int64_t>(next_power_of_two(packs), 32));
  float2* moments = nullptr;
  if (p.statistic != Statistic::kNone) {
    moments = reinterpret_cast<float2*>(p.workspace + 2 * p.groups * parts * p.rows.width);
    const dim3 grid(grid_size(ceil_div(p.rows.count, kThreads / lanes)));
    row_moments_kernel<T><<<grid, kThreads, 0, stream>>>(p, moments, lanes);
  }
  const dim3 grid(grid_size(p.groups * parts), static_cast<unsigned>(ceil_div(packs, lanes)));
  part_sums_kernel<T><<<grid, kThreads, 0, stream>>>(p, moments, lanes, row_sums_part(p), parts);
  const dim3 whole(grid_size(2 * p.groups), static_cast<unsigned>(ceil_div(p.rows.width, 32)));
  whole_sums_kernel<<<whole, kThreads, 0, stream>>>(p, parts);
  check_launch("row_sums");
}

}  // namespace

void row_sums(const RowSumsParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  if (p.rows.width > 32ll * kMaxGridY) throw std::runtime_error("input: expected at most 2,097,120 columns");
  if (needs_split(p.rows))
    throw std::runtime_error("input: expected contiguous rows where there are more than 2^32 - 1");
  if (p.grad.dtype == p.input.dtype && whole_packs(p, p.grad) && whole_packs(p, p.input)) {
    return dispatch(p.input.dtype, [&](auto zero) { launch<decltype(zero)>(p, stream); });
  }
  launch<void>(p, stream);
}

}  // namespace ltx
