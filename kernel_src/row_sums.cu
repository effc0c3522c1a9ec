// Sums over rows. The gradients of what rows share follow from them: of a norm's weight and bias, scale, shift and
// gate.
//
//   products = sum(grad * n)     sums = sum(grad)      ltx/row_sums.h has n
//
// Two kernels, without atomics: part_sums adds up the rows of a part, and whole_sums the parts of a group. The shape
// alone decides on the order of the additions.
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

constexpr int kColumns = kRowSumsColumns;  // of a row, that a thread owns
constexpr int kThreads = kRowSumsThreads;  // of a block where several rows share it
constexpr int kMostThreads = kRowSumsMostColumns / kColumns;

// kColumns columns of a row. T: the dtype of rows of one tile that are one dimension of whole packs.
template <typename T>
struct Columns {
  Elements<T, kColumns> packs;

  __device__ __forceinline__ void load(const Rows&, const RowView& view, bool, int64_t row, int64_t column) {
    packs.load(static_cast<const T*>(view.data) + row * view.stride[0], column);
  }
  __device__ __forceinline__ void get(float (&x)[kColumns]) const { packs.get(x); }
};

// The same of any rows, zero past their end.
template <>
struct Columns<void> {
  float values[kColumns];

  __device__ __forceinline__ void load(const Rows& rows, const RowView& view, bool packed, int64_t row,
                                       int64_t column) {
    int64_t start = 0;
    walk_row(rows, row, [&](int d, int64_t i) { start += i * view.stride[d]; });
    load_floats(view.data, view.dtype, start, column, view.column_stride, rows.width, packed, values);
  }
  __device__ __forceinline__ void get(float (&x)[kColumns]) const {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) x[i] = values[i];
  }
};

// Block (x, y) adds up part x, counted through all groups, of tile y of the columns. `team` neighbouring threads own a
// row. Where n is a norm, they read the row's other tiles too. Rows of 16-bit numbers are loaded a row ahead.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    part_sums_kernel(const __grid_constant__ RowSumsParams p, bool grad_packed, bool input_packed, int team,
                     int64_t part_rows, int64_t parts) {
  constexpr bool kTiled = std::is_void_v<T>, kAhead = !kTiled && !std::is_same_v<T, float>;
  __shared__ float shared[kColumns][kThreads];
  __shared__ float warp_sums[2][kMostThreads / 32];
  const int lane = threadIdx.x % team, first = threadIdx.x / team, teams = blockDim.x / team;
  const int width = static_cast<int>(p.rows.width), tile = team * kColumns,
            column = blockIdx.y * tile + lane * kColumns;
  const int64_t group_rows = p.rows.count / p.groups;
  const int64_t group = blockIdx.x / parts, offset = (blockIdx.x - group * parts) * part_rows;
  const int64_t begin = group * group_rows + offset, end = begin + min(part_rows, group_rows - offset);
  const float inverse_width = 1.f / static_cast<float>(width);

  int turn = 0;  // Two sums in a row use different places, so that one barrier a sum is enough.
  const auto team_sum = [&](float sum) {
    sum = lane_sum(sum, min(team, 32));
    if (team <= 32) return sum;
    const int warps = team / 32, other = threadIdx.x % 32;
    float* const places = warp_sums[turn ^= 1];
    if (other == 0) places[threadIdx.x / 32] = sum;
    __syncthreads();
    return lane_sum(other < warps ? places[first * warps + other] : 0.f, 32);
  };

  Columns<T> grads = {}, inputs = {};
  const auto load = [&](int64_t row) {
    if (column >= width || row >= end) return;
    grads.load(p.rows, p.grad, grad_packed, row, column);
    inputs.load(p.rows, p.input, input_packed, row, column);
  };
  float products[kColumns] = {}, sums[kColumns] = {};
  if (kAhead) load(begin + first);
  for (int64_t start = begin; start < end; start += teams) {  // as often in all threads
    const int64_t row = start + first;
    float grad[kColumns], x[kColumns];
    const auto take = [&] {
      if (!kAhead) load(row);
      grads.get(grad);
      inputs.get(x);
      if (kAhead) load(row + teams);
    };
    if (!kTiled) take();
    const auto row_sum = [&](const auto& term) {
      if (!kTiled) return team_sum(column < width ? term(x, width - column) : 0.f);
      float sum = 0.f;
#pragma unroll 1
      for (int at = row < end ? lane * kColumns : width; at < width; at += tile) {
        Columns<T> columns;
        float y[kColumns];
        columns.load(p.rows, p.input, input_packed, row, at);
        columns.get(y);
        sum += term(y, width - at);
      }
      return team_sum(sum);
    };
    float mean = 0.f, rstd = 1.f;
    if (p.statistic == Statistic::kLayer) {
      mean = __fmul_rn(row_sum([](const auto& y, int) { return tree_sum(y); }), inverse_width);
    }
    if (p.statistic != Statistic::kNone) {
      const float squares = row_sum([&](const auto& y, int count) { return pack_squares<true>(y, mean, count); });
      rstd = reciprocal_root(squares, inverse_width, p.eps);
    }
    if (kTiled) take();
    if (row >= end) continue;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      products[i] = fmaf(grad[i], (x[i] - mean) * rstd, products[i]);
      sums[i] += grad[i];
    }
  }

  const auto finish = [&](float (&x)[kColumns], int64_t row) {
    if (teams > 1) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) shared[i][threadIdx.x] = x[i];
      for (int left = teams; left > 1; left = (left + 1) / 2) {
        __syncthreads();
        const int half = (left + 1) / 2;
        if (first + half >= left) continue;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) shared[i][threadIdx.x] += shared[i][threadIdx.x + half * team];
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) x[i] = shared[i][threadIdx.x];
    }
    if (first > 0 || column >= width) return;
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      const float part[4] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
      store_pack(p.workspace + row * width, column + i, 1, width, width % 4 == 0, to_pack<float, 4>(part));
    }
  };
  finish(products, blockIdx.x);
  __syncthreads();
  finish(sums, p.groups * parts + blockIdx.x);
}

constexpr int kWholeThreads = 256;

// Block (x, y): group x of the products, or x - groups of the gradient, and 32 columns from 32 * y on.
__global__ void __launch_bounds__(kWholeThreads)
    whole_sums_kernel(const __grid_constant__ RowSumsParams p, int64_t parts) {
  __shared__ float shared[kWholeThreads];
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32;
  const int64_t width = p.rows.width, column = static_cast<int64_t>(blockIdx.y) * 32 + lane;
  float sum = 0.f;
  if (column < width) {
#pragma unroll 4
    for (int64_t part = first; part < parts; part += kWholeThreads / 32) {
      sum += p.workspace[(blockIdx.x * parts + part) * width + column];
    }
  }
  shared[threadIdx.x] = sum;
  for (int half = kWholeThreads / 64; half > 0; half /= 2) {
    __syncthreads();
    if (first < half) shared[threadIdx.x] += shared[threadIdx.x + half * 32];
  }
  if (first > 0 || column >= width) return;
  const bool of_gradient = blockIdx.x >= p.groups;
  (of_gradient ? p.sums : p.products)[(blockIdx.x - (of_gradient ? p.groups : 0)) * width + column] =
      shared[threadIdx.x];
}

bool whole_packs(const RowSumsParams& p, const RowView& view) {
  return is_packed(view.data, view.dtype, kColumns, p.rows.width, view.column_stride, view.stride, p.rows.ndim);
}

template <typename T>
void launch(const RowSumsParams& p, bool grad_packed, bool input_packed, cudaStream_t stream) {
  const int64_t parts = row_sums_parts(p), tiles = ceil_div(p.rows.width, kRowSumsMostColumns);
  const int team = static_cast<int>(row_sums_team(p.rows.width));
  const int threads = team * std::max(1, kThreads / team);
  const dim3 grid(grid_size(p.groups * parts), static_cast<unsigned>(tiles));
  part_sums_kernel<T><<<grid, threads, 0, stream>>>(p, grad_packed, input_packed, team, row_sums_part(p), parts);
  const dim3 whole(grid_size(2 * p.groups), static_cast<unsigned>(ceil_div(p.rows.width, 32)));
  whole_sums_kernel<<<whole, kWholeThreads, 0, stream>>>(p, parts);
  check_launch("row_sums");
}

}  // namespace

void row_sums(const RowSumsParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  if (p.rows.width > 32ll * kMaxGridY) throw std::runtime_error("input: expected at most 2,097,120 columns");
  if (needs_split(p.rows))
    throw std::runtime_error("input: expected contiguous rows where there are more than 2^32 - 1");
  const bool one_tile = p.rows.width <= kRowSumsMostColumns, in_a_line = p.rows.ndim <= 1;
  const bool grad_packed = whole_packs(p, p.grad), input_packed = whole_packs(p, p.input);
  if (one_tile && in_a_line && grad_packed && input_packed && p.grad.dtype == p.input.dtype) {
    return dispatch(p.input.dtype, [&](auto zero) { launch<decltype(zero)>(p, true, true, stream); });
  }
  launch<void>(p, grad_packed, input_packed, stream);
}

}  // namespace ltx
