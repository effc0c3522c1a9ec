// CPU ops on images and videos in channels-last memory that span pixels: group_norm and upsample_nearest. The formulas
// are in ltx/group_norm.h.
//
// The units of parallel work are chunks of pixels, then groups, then pixels; a chunk's length depends on the image
// alone, so the number of threads changes no bit. A sum of fp32 numbers is over the differences from the first pixel of
// a run of pixels, for each channel by itself. Everything after that is merged in double, by Chan's formula, in a fixed
// order.

#ifndef LTX_ISA

#include "ltx/group_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#define LTX_ISA_FILE "cpu/group_norm.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void group_norm(const GroupNormParams& params, const Context& context) { LTX_DISPATCH(group_norm, params, context); }
void upsample_nearest(const UpsampleParams& params, const Context& context) {
  LTX_DISPATCH(upsample_nearest, params, context);
}

}  // namespace ltx

#else  // once per instruction set

#include "cpu/pixel_rows.h"

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

// Reads h, the sum of a pixel's operands, as an fp32 row. `biases` of one batch element are kept widened.
class Hidden {
 public:
  Hidden(const HiddenParams& params, DType dtype, int64_t channels)
      : p_(params), dtype_(dtype), channels_(channels), scratch_(3, padded(channels)) {
    other_ = scratch_.take();
    bias_row_ = scratch_.take();
    residual_bias_row_ = scratch_.take();
  }

  void read(float* row, int64_t batch, int64_t pixel) {
    if (batch != batch_) {
      bias_ = widened(bias_row_, p_.bias, dtype_, batch * p_.bias_stride, channels_);
      residual_bias_ =
          widened(residual_bias_row_, p_.residual_bias, dtype_, batch * p_.residual_bias_stride, channels_);
      batch_ = batch;
    }
    widened(row, p_.input, dtype_, batch * p_.input_stride + pixel * channels_, channels_);
    add(row, bias_, channels_, dtype_);
    if (p_.residual == nullptr) return add(row, residual_bias_, channels_, dtype_);
    widened(other_, p_.residual, dtype_, batch * p_.residual_stride + pixel * channels_, channels_);
    add(other_, residual_bias_, channels_, dtype_);
    add(row, other_, channels_, dtype_);
  }

 private:
  const HiddenParams& p_;
  DType dtype_;
  int64_t channels_, batch_ = -1;
  Scratch scratch_;
  float *other_, *bias_row_, *residual_bias_row_;
  const float *bias_ = nullptr, *residual_bias_ = nullptr;
};

// ---- Group norm

// Count, mean and sum of squared deviations of a set of numbers.
struct Moments {
  double count = 0.0, mean = 0.0, squares = 0.0;

  void merge(double n, double other_mean, double other_squares) {
    const double delta = other_mean - mean, total = count + n;
    mean += delta * (n / total);
    squares += other_squares + delta * delta * (count * n / total);
    count = total;
  }
};

constexpr int64_t kRunPixels = 32;  // their rows stay in the cache between the two passes over them

// The channels that a moment covers: those of a group, or a part of a large group.
struct Part {
  int64_t first, channels;
};
Part part_of(const GroupNormParams& p, int64_t part) {
  const int64_t group_channels = p.channels / p.groups, in_group = part % p.parts_of_group();
  const int64_t before = in_group * GroupNormParams::kMaxPartChannels;
  return {part / p.parts_of_group() * group_channels + before,
          std::min(group_channels - before, GroupNormParams::kMaxPartChannels)};
}

// Sums of the differences of a run's pixels from a shift, and of their squares, for each channel. `run`: rows of
// pixels.
void sum_differences(const float* run, int64_t pixels, int64_t stride, const float* shift, float* sum, float* squares) {
  std::fill(sum, sum + stride, 0.f);
  std::fill(squares, squares + stride, 0.f);
  for (int64_t pixel = 0; pixel < pixels; ++pixel) {
    for (int64_t c = 0; c < stride; c += kLanes) {
      const F d = load(run + pixel * stride + c) - load(shift + c);
      store(sum + c, load(sum + c) + d);
      store(squares + c, load(squares + c) + d * d);
    }
  }
}

// Units: chunks of all batch elements. Writes the moments, and h where it is a result.
void statistics_units(const GroupNormParams& p, int64_t begin, int64_t end) {
  const int64_t chunk = chunk_pixels(p.pixels), chunks = chunk_count(p.pixels), count = p.channels;
  const int64_t stride = padded(count);
  Scratch scratch(kRunPixels + 3, stride);
  float *shift = scratch.take(), *sum = scratch.take(), *squares = scratch.take(), *rows = scratch.take();
  Hidden hidden(p.hidden, p.dtype, count);
  std::vector<Moments> moments(p.parts());
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t batch = unit / chunks, first = unit % chunks * chunk, last = std::min(first + chunk, p.pixels);
    std::fill(moments.begin(), moments.end(), Moments{});
    for (int64_t run = first; run < last; run += kRunPixels) {
      const int64_t pixels = std::min(kRunPixels, last - run);
      for (int64_t i = 0; i < pixels; ++i) {
        float* const row = rows + i * stride;
        hidden.read(row, batch, run + i);
        if (p.residual_out != nullptr) {
          narrow(at(p.residual_out, p.dtype, batch * p.residual_out_stride + (run + i) * count), row, p.dtype, count);
        }
      }
      // The shift is the mean, but for its rounding. It begins at the first pixel, as the mean may be large.
      std::copy(rows, rows + stride, shift);
      sum_differences(rows, pixels, stride, shift, sum, squares);
      const float n = static_cast<float>(pixels);
      for (int64_t c = 0; c < stride; c += kLanes) store(shift + c, load(shift + c) + load(sum + c) / n);
      sum_differences(rows, pixels, stride, shift, sum, squares);
      for (int64_t i = 0; i < p.parts(); ++i) {
        const Part part = part_of(p, i);
        for (int64_t c = part.first; c < part.first + part.channels; ++c) {
          const double mean = static_cast<double>(sum[c]) / n;
          moments[i].merge(n, shift[c] + mean, squares[c] - sum[c] * mean);
        }
      }
    }
    for (int64_t i = 0; i < p.parts(); ++i) {
      float* const to = p.moments + 2 * ((batch * p.parts() + i) * chunks + unit % chunks);
      to[0] = static_cast<float>(moments[i].mean);
      to[1] = static_cast<float>(moments[i].squares);
    }
  }
}

// Units: groups of all batch elements.
void factors_units(const GroupNormParams& p, int64_t begin, int64_t end) {
  const int64_t chunk = chunk_pixels(p.pixels), chunks = chunk_count(p.pixels), group_channels = p.channels / p.groups;
  Scratch scratch(2, padded(group_channels));
  float *weight_row = scratch.take(), *bias_row = scratch.take();
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t batch = unit / p.groups, group = unit % p.groups, first = group * group_channels;
    Moments all;
    for (int64_t i = group * p.parts_of_group(); i < (group + 1) * p.parts_of_group(); ++i) {
      for (int64_t c = 0; c < chunks; ++c) {
        const float* const from = p.moments + 2 * ((batch * p.parts() + i) * chunks + c);
        const int64_t pixels = std::min(chunk, p.pixels - c * chunk);
        all.merge(static_cast<double>(pixels * part_of(p, i).channels), from[0], from[1]);
      }
    }
    const double rstd = 1.0 / std::sqrt(all.squares / all.count + p.eps);
    const float* const weight = widened(weight_row, p.weight, p.dtype, first, group_channels);
    const float* const bias = widened(bias_row, p.bias_norm, p.dtype, first, group_channels);
    float* const factors = p.factors + batch * 2 * p.channels + first;
    for (int64_t c = 0; c < group_channels; ++c) {
      factors[c] = static_cast<float>(weight == nullptr ? rstd : rstd * weight[c]);
      factors[p.channels + c] = static_cast<float>((bias == nullptr ? 0.0 : bias[c]) - factors[c] * all.mean);
    }
  }
}

// Units: pixels of all batch elements.
void apply_units(const GroupNormParams& p, int64_t begin, int64_t end) {
  const int64_t count = p.channels;
  Scratch scratch(3, padded(count));
  float *row = scratch.take(), *factor = scratch.take(), *shift = scratch.take();
  const HiddenParams kept{p.residual_out, nullptr, p.residual_out_stride};
  Hidden hidden(p.residual_out != nullptr ? kept : p.hidden, p.dtype, count);
  int64_t held_batch = -1;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t batch = unit / p.pixels, pixel = unit % p.pixels;
    if (batch != held_batch) {
      widened(factor, p.factors, DType::kFloat32, batch * 2 * count, count);
      widened(shift, p.factors, DType::kFloat32, (batch * 2 + 1) * count, count);
      held_batch = batch;
    }
    hidden.read(row, batch, pixel);
    each(row, count, p.dtype, [&](int64_t c, F x) { return x * load(factor + c) + load(shift + c); });
    if (p.silu) silu(row, count, p.dtype);
    narrow(at(p.out, p.dtype, batch * p.out_stride + pixel * count), row, p.dtype, count);
  }
}

void group_norm(const GroupNormParams& params, const Context& context) {
  struct Job {
    const GroupNormParams& params;
    void (*run)(const GroupNormParams&, int64_t, int64_t);
    void operator()(int64_t begin, int64_t end) const { run(params, begin, end); }
  };
  const int64_t pixels = params.pixels, channels = params.channels, chunks = chunk_count(pixels);
  for_ranges(context, params.batch * chunks, std::min(chunk_pixels(pixels), pixels) * channels,
             Job{params, statistics_units});
  for_ranges(context, params.batch * params.groups, chunks * params.parts_of_group(), Job{params, factors_units});
  for_ranges(context, params.batch * pixels, channels, Job{params, apply_units});
}

// ---- Upsampling

void upsample_units(const UpsampleParams& p, int64_t begin, int64_t end) {
  const int64_t count = p.channels, line = p.width * p.scale[1] * count;  // elements of a line of the result
  Scratch scratch(1, padded(count));
  float* const row = scratch.take();
  Hidden hidden(p.hidden, p.dtype, count);
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t pixels = p.lines * p.width, x = unit % p.width, y = unit / p.width;
    hidden.read(row, unit / pixels, unit % pixels);
    for (int64_t j = 0; j < p.scale[0]; ++j) {
      for (int64_t k = 0; k < p.scale[1]; ++k) {
        const int64_t place = (y * p.scale[0] + j) * line + (x * p.scale[1] + k) * count;
        narrow(at(p.out, p.dtype, place), row, p.dtype, count);
      }
    }
  }
}

void upsample_nearest(const UpsampleParams& params, const Context& context) {
  struct Job {
    const UpsampleParams& params;
    void operator()(int64_t begin, int64_t end) const { upsample_units(params, begin, end); }
  };
  for_ranges(context, params.batch * params.lines * params.width, params.channels * params.scale[0] * params.scale[1],
             Job{params});
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
