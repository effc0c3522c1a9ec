// Ops on images and videos in channels-last memory that span pixels: group_norm, group_norm_residual and
// upsample_nearest. The formulas are in ltx/group_norm.h.
//
// A group norm is three launches. `statistics_kernel` reads the operands of h once, stores h where it is a result, and
// leaves the mean and the squared deviations of each group in each chunk of pixels. `factors_kernel` merges the chunks
// and makes two factors of each channel of them. `apply_kernel` reads h and writes silu(a h + b). So group_norm moves 3
// times the bytes of its input, and group_norm_residual 5 times. upsample_nearest reads once and writes once.
//
// No sum runs over numbers that are large beside their differences: a thread adds up differences from the mean of its
// first pixels, one sum for each of its channels, and means are merged by their differences. All orders depend on the
// shape and the dtype alone.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "ltx/channels_last.cuh"
#include "ltx/force.cuh"
#include "ltx/group_norm.h"
#include "ltx/launch.cuh"
#include "ltx/reduce.cuh"

namespace ltx {
namespace {

constexpr int kThreads = 128;
// Blocks of a multiprocessor, which limits the registers: 64 are enough on Hopper, but for the statistics of fp16, and
// where packs are read element by element.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int kAlignedBlocks = 8;
#else
constexpr int kAlignedBlocks = 7;
#endif
template <bool kAligned>
constexpr int kBlocks = kAligned ? kAlignedBlocks : 4;
template <typename T, bool kAligned>
constexpr int kStatisticsBlocks = std::is_same_v<T, __half> && kAligned ? 7 : kBlocks<kAligned>;
constexpr int kFactorThreads = 256;
constexpr uint32_t kShiftPixels = 4;  // of first_mean
static_assert(GroupNormParams::kMaxPartChannels <= kThreads);

// A pack in one access, or element by element where memory is not aligned (kAligned: false).
template <typename T, int kWidth, bool kAligned>
__device__ __forceinline__ Pack<T, kWidth> read(const void* data, int64_t element) {
  if constexpr (kAligned) return load<T, kWidth>(data, element);
  return load_pack<T, kWidth>(static_cast<const T*>(data) + element, 0, 1, kWidth, false);
}

template <typename T, int kWidth, bool kAligned>
__device__ __forceinline__ void write(void* data, int64_t element, const Pack<T, kWidth>& pack) {
  if constexpr (kAligned) {
    store(static_cast<T*>(data), element, pack);
  } else {
    store_pack<T, kWidth>(static_cast<T*>(data) + element, 0, 1, kWidth, false, pack);
  }
}

// The operands of h that a thread reads: the pack of some channels, of any pixel of a batch element.
template <typename T, int kWidth, bool kAligned, bool kResidual>
struct Hidden {
  using P = Pack<T, kWidth>;
  struct Packs {
    P input, residual;
  };

  const T *input, *residual;
  P bias, residual_bias;
  bool biased, residual_biased;

  __device__ __forceinline__ Hidden(const HiddenParams& p, int64_t batch, int64_t channel)
      : input(static_cast<const T*>(p.input) + batch * p.input_stride + channel),
        residual(static_cast<const T*>(p.residual) + batch * p.residual_stride + channel),
        biased(p.bias != nullptr),
        residual_biased(p.residual_bias != nullptr) {
    if (biased) bias = read<T, kWidth, kAligned>(p.bias, batch * p.bias_stride + channel);
    if (residual_biased) {
      residual_bias = read<T, kWidth, kAligned>(p.residual_bias, batch * p.residual_bias_stride + channel);
    }
  }

  __device__ __forceinline__ void move(int64_t elements) {
    input += elements;
    if constexpr (kResidual) residual += elements;
  }

  __device__ __forceinline__ Packs packs(int64_t offset) const {
    Packs packs;
    packs.input = read<T, kWidth, kAligned>(input, offset);
    if constexpr (kResidual) packs.residual = read<T, kWidth, kAligned>(residual, offset);
    return packs;
  }

  __device__ __forceinline__ P sum(const Packs& packs) const {
    P h = packs.input;
    if (biased) h = rounded<Add>(h, bias);
    if constexpr (kResidual) {
      P other = packs.residual;
      if (residual_biased) other = rounded<Add>(other, residual_bias);
      h = rounded<Add>(h, other);
    } else if (residual_biased) {
      h = rounded<Add>(h, residual_bias);
    }
    return h;
  }
};

// ---- Group norm

// How the blocks share an image: a slice of its channels each, which are whole parts of groups. A slice is `columns`
// packs; the threads of a block hold as many of its pixels at a time as fit.
struct Slices {
  uint32_t columns = 1, parts = 1, count = 1;  // packs and parts of a slice; slices of an image
};

Slices slices_of(const GroupNormParams& p, int width) {
  const int64_t group = p.channels / p.groups;
  if (p.parts_of_group() > 1) {
    return {static_cast<uint32_t>(GroupNormParams::kMaxPartChannels / width), 1, static_cast<uint32_t>(p.parts())};
  }
  // Packs that hold whole groups, and as many of them as make a memory access of 128 bytes, or 32 elements one by one.
  const int64_t unit = group / std::gcd<int64_t>(group, width), units = p.channels / width / unit;
  int64_t count = std::max<int64_t>((width == 1 ? 32 : 8) / unit, 1);
  while (units % count != 0) --count;
  const int64_t columns = unit * count;
  return {static_cast<uint32_t>(columns), static_cast<uint32_t>(columns * width / group),
          static_cast<uint32_t>(units / count)};
}

struct GroupNormArgs {
  GroupNormParams p;
  HiddenParams hidden;  // what a kernel reads
  Slices slices;
  FastDivide slice_count, pieces;  // pieces: ranges of an image's pixels, a block each
  uint32_t rows;                   // pixels that a block holds at a time
  uint32_t pixels, channels, group_channels, parts_of_group;
  uint32_t chunk, chunks;  // pixels of a chunk, and chunks of an image
  uint32_t iterations;     // of apply_kernel
  float inverse_count;     // of the numbers in a group
};

// What a thread works on.
struct Place {
  uint32_t slice, piece, batch;      // piece: a range of pixels
  uint32_t first_channel, channels;  // of the slice
  uint32_t row, channel;             // of the thread: its first pixel in the piece, and its first channel
  bool active;
};

template <int kWidth>
__device__ __forceinline__ Place place_of(const GroupNormArgs& a, uint32_t block) {
  Place t;
  t.batch = a.pieces.divide(a.slice_count.divide(block, t.slice), t.piece);
  t.channels = a.slices.columns * kWidth;
  t.first_channel = t.slice * t.channels;
  if (a.parts_of_group > 1) {
    const uint32_t group = t.slice / a.parts_of_group, first = t.slice % a.parts_of_group * t.channels;
    t.first_channel = group * a.group_channels + first;
    t.channels = min(t.channels, a.group_channels - first);
  }
  t.row = threadIdx.x / a.slices.columns;
  t.channel = t.first_channel + threadIdx.x % a.slices.columns * kWidth;
  t.active = t.row < a.rows && t.channel < t.first_channel + t.channels;
  return t;
}

// The mean and the sum of squared deviations of `count` sets of numbers together, by Chan's formula: set i has size(i)
// numbers, their mean and squared deviations are get(i), and `inverse` is one over the number of all. The threads for
// which reduce(x) sums x share the sets: a thread has the sets first, first + step, ...
template <typename Get, typename Size, typename Reduce>
__device__ __forceinline__ float2 merged(uint32_t count, uint32_t first, uint32_t step, float inverse, const Get& get,
                                         const Size& size, const Reduce& reduce) {
  const float reference = get(0).x;
  float shifted = 0.f;
  for (uint32_t i = first; i < count; i += step) shifted = fmaf(size(i), __fsub_rn(get(i).x, reference), shifted);
  const float mean = fmaf(reduce(shifted, 0), inverse, reference);
  float squares = 0.f;
  for (uint32_t i = first; i < count; i += step) {
    const float2 set = get(i);
    const float deviation = __fsub_rn(set.x, mean);
    squares += fmaf(__fmul_rn(size(i), deviation), deviation, set.y);
  }
  return {mean, reduce(squares, 1)};
}

// The mean of some pixels, `step` elements apart, rounded to T. A shift need not be the exact mean of all numbers, but
// one pixel alone could be far from all others.
template <typename T, int kWidth, bool kAligned, bool kResidual>
__device__ __forceinline__ Pack<T, kWidth> first_mean(const Hidden<T, kWidth, kAligned, kResidual>& hidden,
                                                      uint32_t pixels, int64_t step) {
  float sum[kWidth] = {};
#pragma unroll 1
  for (uint32_t i = 0; i < pixels; ++i) {
    float x[kWidth];
    unpack(hidden.sum(hidden.packs(i * step)), x);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) sum[c] += x[c];
  }
  const float inverse = 1.f / static_cast<float>(pixels);
#pragma unroll
  for (int c = 0; c < kWidth; ++c) sum[c] = __fmul_rn(sum[c], inverse);
  return to_pack<T, kWidth>(sum);
}

// grid: x = slices, then chunks, then batch.
template <typename T, int kWidth, bool kAligned, bool kResidual>
__global__ void __launch_bounds__(kThreads, kStatisticsBlocks<T, kAligned>)
    statistics_kernel(const __grid_constant__ GroupNormArgs a) {
  using H = Hidden<T, kWidth, kAligned, kResidual>;
  using P = typename H::P;
  __shared__ float2 moments[kThreads * kWidth];  // of a row's channels in the slice, row by row
  __shared__ Place place;                        // thread 0's, so that no register holds it in the loop
  float sum[kWidth] = {}, squares[kWidth] = {};
  P shift = filled<T, kWidth>(0.f);
  {
    const Place t = place_of<kWidth>(a, blockIdx.x);
    if (threadIdx.x == 0) place = t;
    const uint32_t begin = t.piece * a.chunk, end = min(begin + a.chunk, a.pixels);
    uint32_t pixel = begin + t.row;
    if (t.active && pixel < end) {
      const int64_t first = static_cast<int64_t>(pixel) * a.channels;
      const uint32_t step = a.rows * a.channels;
      H hidden(a.hidden, t.batch, t.channel);
      hidden.move(first);
      T* residual_out = static_cast<T*>(a.p.residual_out) + t.batch * a.p.residual_out_stride + t.channel + first;
      const bool keeps = a.p.residual_out != nullptr;
      constexpr int kAhead = kResidual ? 1 : 2;  // pixels that are on their way while others are added up
      typename H::Packs next[kAhead];
      const auto request = [&](uint32_t from) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (from + k * a.rows < end) next[k] = hidden.packs(k * step);
        }
        hidden.move(kAhead * step);
      };
      shift = first_mean(hidden, min((end - pixel + a.rows - 1) / a.rows, kShiftPixels), step);
      request(pixel);
#pragma unroll 1
      for (; pixel < end; pixel += kAhead * a.rows) {
        P h[kAhead];
#pragma unroll
        for (int k = 0; k < kAhead; ++k) h[k] = hidden.sum(next[k]);
        request(pixel + kAhead * a.rows);
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (pixel + k * a.rows >= end) continue;
          if (keeps) write<T, kWidth, kAligned>(residual_out, k * step, h[k]);
          float x[kWidth], from[kWidth];
          unpack(h[k], x);
          unpack(shift, from);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            const float d = __fsub_rn(x[i], from[i]);
            sum[i] += d;
            squares[i] = fmaf(d, d, squares[i]);
          }
        }
        residual_out += kAhead * step;
      }
    }
  }
  __syncthreads();
  const Place& t = place;
  const uint32_t length = min(a.chunk, a.pixels - t.piece * a.chunk), row_channels = a.slices.columns * kWidth;
  // Pixels of the chunk that the threads of a row have.
  const auto count = [&](uint32_t row) { return static_cast<float>((length - row + a.rows - 1) / a.rows); };
  {
    const float inverse = 1.f / count(threadIdx.x / a.slices.columns);
    float from[kWidth];
    unpack(shift, from);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float mean = __fmul_rn(sum[i], inverse);
      moments[threadIdx.x * kWidth + i] = {__fadd_rn(from[i], mean), fmaf(-sum[i], mean, squares[i])};
    }
  }
  __syncthreads();
  // The rows of a channel. The result takes the place of the first row's.
  const auto same = [](float x, int) { return x; };
  for (uint32_t channel = threadIdx.x; channel < t.channels; channel += kThreads) {
    const auto row = [&](uint32_t r) { return moments[r * row_channels + channel]; };
    moments[channel] = merged(min(a.rows, length), 0, 1, 1.f / static_cast<float>(length), row, count, same);
  }
  __syncthreads();
  // The channels of a part of a group: a warp has a part.
  const uint32_t lane = threadIdx.x % 32, part_channels = t.channels / a.slices.parts;
  for (uint32_t part = threadIdx.x / 32; part < a.slices.parts; part += kThreads / 32) {
    const auto channel = [&](uint32_t c) { return moments[part * part_channels + c]; };
    const auto all = [&](uint32_t) { return static_cast<float>(length); };
    const auto reduce = [](float x, int) { return lane_sum(x, 32); };
    const float inverse = 1.f / (static_cast<float>(length) * static_cast<float>(part_channels));
    const float2 moment = merged(part_channels, lane, 32, inverse, channel, all, reduce);
    if (lane == 0) {
      const int64_t first = static_cast<int64_t>(t.batch) * a.slices.count + t.slice;
      reinterpret_cast<float2*>(a.p.moments)[(first * a.slices.parts + part) * a.chunks + t.piece] = moment;
    }
  }
}

// The factors of a group's channels, from its statistics in all chunks. grid: x = groups, then batch.
template <typename T>
__global__ void __launch_bounds__(kFactorThreads) factors_kernel(const __grid_constant__ GroupNormArgs a) {
  __shared__ ReduceScratch<1> scratch[2];
  const GroupNormParams& p = a.p;
  const uint32_t groups = a.channels / a.group_channels, group = blockIdx.x % groups, batch = blockIdx.x / groups;
  const float2* const moments =
      reinterpret_cast<const float2*>(p.moments) + static_cast<int64_t>(blockIdx.x) * a.parts_of_group * a.chunks;
  const uint32_t part_channels = a.parts_of_group > 1 ? GroupNormParams::kMaxPartChannels : a.group_channels;
  const auto moment = [&](uint32_t i) { return moments[i]; };
  const auto size = [&](uint32_t i) {
    const uint32_t pixels = min(a.chunk, a.pixels - i % a.chunks * a.chunk);
    const uint32_t channels = min(part_channels, a.group_channels - i / a.chunks * part_channels);
    return static_cast<float>(pixels) * static_cast<float>(channels);
  };
  const auto reduce = [&](float x, int which) { return block_reduce(x, kFactorThreads, scratch[which]); };
  const float2 all =
      merged(a.parts_of_group * a.chunks, threadIdx.x, kFactorThreads, a.inverse_count, moment, size, reduce);
  const float mean = all.x, rstd = reciprocal_root(all.y, a.inverse_count, p.eps);
  float* const factors = p.factors + static_cast<int64_t>(batch) * 2 * a.channels + group * a.group_channels;
  for (uint32_t i = threadIdx.x; i < a.group_channels; i += kFactorThreads) {
    const uint32_t channel = group * a.group_channels + i;
    const float weight = p.weight ? to_float(static_cast<const T*>(p.weight)[channel]) : 1.f;
    const float bias = p.bias_norm ? to_float(static_cast<const T*>(p.bias_norm)[channel]) : 0.f;
    const float factor = __fmul_rn(rstd, weight);
    factors[i] = factor;
    factors[a.channels + i] = fmaf(-factor, mean, bias);
  }
}

// out = silu(a h + b). grid: x = slices, then pieces of rows * iterations pixels, then batch. The pixels that the
// statistics read last come first, because they may still be in the L2 cache.
template <typename T, int kWidth, bool kAligned, bool kResidual>
__global__ void __launch_bounds__(kThreads, kBlocks<kAligned>) apply_kernel(const __grid_constant__ GroupNormArgs a) {
  using H = Hidden<T, kWidth, kAligned, kResidual>;
  using P = typename H::P;
  const Place t = place_of<kWidth>(a, gridDim.x - 1 - blockIdx.x);
  if (!t.active) return;
  const uint32_t begin = t.piece * a.rows * a.iterations, end = min(begin + a.rows * a.iterations, a.pixels);
  const int64_t first = static_cast<int64_t>(begin + t.row) * a.channels,
                step = static_cast<int64_t>(a.rows) * a.channels;
  H hidden(a.hidden, t.batch, t.channel);
  hidden.move(first);
  T* out = static_cast<T*>(a.p.out) + t.batch * a.p.out_stride + t.channel + first;
  float factor[kWidth], shift[kWidth];
  const float* const factors = a.p.factors + static_cast<int64_t>(t.batch) * 2 * a.channels + t.channel;
#pragma unroll
  for (int i = 0; i < kWidth; i += kWidth < 4 ? kWidth : 4) {
    constexpr int kStep = kWidth < 4 ? kWidth : 4;
    float x[kStep];
    unpack(load<float, kStep>(factors, i), x);
#pragma unroll
    for (int j = 0; j < kStep; ++j) factor[i + j] = x[j];
    unpack(load<float, kStep>(factors + a.channels, i), x);
#pragma unroll
    for (int j = 0; j < kStep; ++j) shift[i + j] = x[j];
  }
  constexpr int kAhead = kResidual ? 1 : 2;  // as in statistics_kernel
  typename H::Packs next[kAhead];
  const auto request = [&](uint32_t from) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (from + k * a.rows < end) next[k] = hidden.packs(k * step);
    }
    hidden.move(kAhead * step);
  };
  request(begin + t.row);
#pragma unroll 1
  for (uint32_t pixel = begin + t.row; pixel < end; pixel += kAhead * a.rows) {
    P h[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) h[k] = hidden.sum(next[k]);
    request(pixel + kAhead * a.rows);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (pixel + k * a.rows >= end) continue;
      float x[kWidth];
      unpack(h[k], x);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = fmaf(factor[i], x[i], shift[i]);
      P y = to_pack<T, kWidth>(x);
      if (a.p.silu) {
        unpack(y, x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) x[i] = silu<T>(x[i]);
        y = to_pack<T, kWidth>(x);
      }
      write<T, kWidth, kAligned>(out, k * step, y);
    }
    out += kAhead * step;
  }
}

bool is_aligned(const HiddenParams& h, DType dtype) {
  return is_aligned(h.input, h.input_stride, dtype) && is_aligned(h.residual, h.residual_stride, dtype) &&
         is_aligned(h.bias, h.bias_stride, dtype) && is_aligned(h.residual_bias, h.residual_bias_stride, dtype);
}

// Calls run<kResidual>() for operands with or without a residual.
template <typename Run>
void with_residual(const HiddenParams& hidden, const Run& run) {
  hidden.residual ? run(std::true_type{}) : run(std::false_type{});
}

template <typename T, int kWidth, bool kAligned>
void launch_group_norm(const GroupNormParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  GroupNormArgs a{};
  a.p = p;
  a.hidden = p.hidden;
  a.slices = slices_of(p, kWidth);
  a.slice_count = FastDivide(a.slices.count);
  a.pieces = FastDivide(chunk_count(p.pixels));
  // The elements of as many pixels are a 32-bit number.
  a.rows = static_cast<uint32_t>(std::min<int64_t>(kThreads / a.slices.columns, 1 + (int64_t{1} << 30) / p.channels));
  a.pixels = thread_count("group_norm", p.pixels);
  a.channels = static_cast<uint32_t>(p.channels);
  a.group_channels = static_cast<uint32_t>(p.channels / p.groups);
  a.parts_of_group = static_cast<uint32_t>(p.parts_of_group());
  a.chunk = static_cast<uint32_t>(chunk_pixels(p.pixels));
  a.chunks = static_cast<uint32_t>(chunk_count(p.pixels));
  a.inverse_count = static_cast<float>(1.0 / (static_cast<double>(p.pixels) * a.group_channels));
  const int64_t images = p.batch * a.slices.count;  // slices of all images
  with_residual(a.hidden, [&](auto residual) {
    statistics_kernel<T, kWidth, kAligned, residual.value><<<grid_size(images * a.chunks), kThreads, 0, stream>>>(a);
  });
  check_launch("group_norm statistics");
  factors_kernel<T><<<grid_size(p.batch * p.groups), kFactorThreads, 0, stream>>>(a);
  check_launch("group_norm factors");
  if (p.residual_out) a.hidden = HiddenParams{p.residual_out, nullptr, p.residual_out_stride};
  // Several pixels a thread, so that the factors are loaded once; fewer where blocks would not fill the GPU.
  a.iterations = static_cast<uint32_t>(
      std::clamp<int64_t>(images * ceil_div(a.pixels, a.rows) / (8 * multiprocessors(context.device)), 1, 8));
  a.pieces = FastDivide(ceil_div(a.pixels, a.rows * a.iterations));
  with_residual(a.hidden, [&](auto residual) {
    apply_kernel<T, kWidth, kAligned, residual.value><<<grid_size(images * a.pieces.divisor), kThreads, 0, stream>>>(a);
  });
  check_launch("group_norm");
}

// ---- Upsampling

struct UpsampleArgs {
  UpsampleParams p;
  FastDivide columns, pixels, width;  // packs of a pixel, pixels of a batch element and of a line
  uint32_t threads;
};

// A thread reads one pack of a pixel, and writes it to all pixels that this becomes.
template <typename T, int kWidth, bool kAligned, bool kResidual>
__global__ void __launch_bounds__(kThreads) upsample_kernel(const __grid_constant__ UpsampleArgs a) {
  const UpsampleParams& p = a.p;
  const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
  if (thread >= a.threads) return;
  uint32_t column, pixel, x;
  const uint32_t batch = a.pixels.divide(a.columns.divide(thread, column), pixel), line = a.width.divide(pixel, x);
  const Hidden<T, kWidth, kAligned, kResidual> hidden(p.hidden, batch, column * kWidth);
  const auto h = hidden.sum(hidden.packs(pixel * p.channels));
  const int64_t row = a.width.divisor * p.scale[1] * p.channels;  // elements of a line of the result
  const int64_t first = (batch * p.lines + line) * p.scale[0] * row + x * p.scale[1] * p.channels + column * kWidth;
  for (int64_t j = 0; j < p.scale[0]; ++j) {
    for (int64_t k = 0; k < p.scale[1]; ++k) write<T, kWidth, kAligned>(p.out, first + j * row + k * p.channels, h);
  }
}

template <typename T, int kWidth, bool kAligned>
void launch_upsample(const UpsampleParams& p, const Context& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  UpsampleArgs a{};
  a.p = p;
  a.columns = FastDivide(p.channels / kWidth);
  a.pixels = FastDivide(p.lines * p.width);
  a.width = FastDivide(p.width);
  a.threads = thread_count("upsample_nearest", p.batch * p.lines * p.width * (p.channels / kWidth));
  with_residual(p.hidden, [&](auto residual) {
    upsample_kernel<T, kWidth, kAligned, residual.value>
        <<<grid_size(ceil_div(a.threads, kThreads)), kThreads, 0, stream>>>(a);
  });
  check_launch("upsample_nearest");
}

// Calls launch(width, aligned) for packs of `width` elements. The width depends on the shape alone, and so does the
// order of the sums. Memory that is not aligned is accessed element by element.
template <typename T, typename Launch>
void with_packs(bool whole, bool aligned, const Launch& launch) {
  using Packs = std::integral_constant<int, kPackWidth<T>>;
  const bool packed = takes_packed("channels_last", forced().channels_last, whole && aligned);
  if (!whole) {
    launch(std::integral_constant<int, 1>{}, std::true_type{});
  } else {
    packed ? launch(Packs{}, std::true_type{}) : launch(Packs{}, std::false_type{});
  }
}

}  // namespace

void group_norm(const GroupNormParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kWidth = kPackWidth<T>;
    const bool whole = p.channels % kWidth == 0 && (p.parts_of_group() == 1 || p.channels / p.groups % kWidth == 0);
    const bool aligned = is_aligned(p.hidden, p.dtype) && is_aligned(p.out, p.out_stride, p.dtype) &&
                         is_aligned(p.residual_out, p.residual_out_stride, p.dtype);
    with_packs<T>(whole, aligned,
                  [&](auto width, auto packed) { launch_group_norm<T, width.value, packed.value>(p, context); });
  });
}

void upsample_nearest(const UpsampleParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned = is_aligned(p.hidden, p.dtype) && is_aligned(p.out, 0, p.dtype);
    with_packs<T>(p.channels % kPackWidth<T> == 0, aligned,
                  [&](auto width, auto packed) { launch_upsample<T, width.value, packed.value>(p, context); });
  });
}

}  // namespace ltx
