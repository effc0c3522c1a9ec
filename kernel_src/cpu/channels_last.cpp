// CPU ops on video tensors in channels-last memory: channel_norm, pixel_shuffle, unpatchify. The formulas are in
// ltx/channels_last.h.
//
// A voxel is a row of channels: it is widened to fp32, goes through the steps, each rounded to the tensors' dtype, and
// is narrowed again. The units of parallel work are voxels.

#ifndef LTX_ISA

#include "ltx/channels_last.h"

#include <algorithm>
#include <cstring>

#define LTX_ISA_FILE "cpu/channels_last.cpp"
#include "cpu/each_isa.h"

namespace ltx {

void channel_norm(const ChannelNormParams& params, const Context& context) {
  LTX_DISPATCH(channel_norm, params, context);
}
void pixel_shuffle(const PixelShuffleParams& params, const Context& context) {
  LTX_DISPATCH(pixel_shuffle, params, context);
}
void unpatchify(const UnpatchifyParams& params, const Context& context) { LTX_DISPATCH(unpatchify, params, context); }

}  // namespace ltx

#else  // once per instruction set

#include "cpu/pixel_rows.h"

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

struct StepwiseSquares {
  const float* row;
  DType dtype;
  LTX_INLINE F operator()(int64_t c) const {
    const F x = load(row + c);
    return round_to(dtype, x * x);
  }
};

inline float rounded(DType dtype, float x) {
  float lanes[kLanes];
  store(lanes, round_to(dtype, splat(x)));
  return lanes[0];
}

void normalise(float* row, const ChannelNormParams& p) {
  const int64_t count = p.channels;
  const float channels = static_cast<float>(count);
  if (p.norm == ChannelNorm::kRms) {
    const float rstd = rms_rstd(row, count, p.eps);
    each(row, count, p.dtype, [&](int64_t, F x) { return x * rstd; });
  } else if (p.norm == ChannelNorm::kRmsStepwise) {
    const float mean = rounded(p.dtype, sum_row(count, StepwiseSquares{row, p.dtype}) / channels);
    const float rms = rounded(p.dtype, std::sqrt(rounded(p.dtype, mean + p.eps)));
    each(row, count, p.dtype, [&](int64_t, F x) { return x / rms; });
  } else {
    const float length = std::max(std::sqrt(sum_row(count, SquareTerm{row})), p.eps), root = std::sqrt(channels);
    each(row, count, p.dtype, [&](int64_t, F x) { return round_to(p.dtype, x / length) * root; });
  }
}

// The vectors of one batch element, widened.
struct Vectors {
  const float *bias, *noise_scale, *weight, *factor, *shift;
};

Vectors vectors(const ChannelNormParams& p, Scratch& scratch, int64_t batch) {
  const int64_t count = p.channels;
  const auto vector = [&](const void* data, int64_t element = 0) {
    return widened(scratch.take(), data, p.dtype, element, count);
  };
  Vectors v = {vector(p.bias), vector(p.noise_scale), vector(p.weight), nullptr, nullptr};
  if (p.scale == nullptr) return v;
  float *factor = scratch.take(), *shift = scratch.take();
  widened(factor, p.scale, p.dtype, batch * p.scale_stride, count);
  widened(shift, p.shift, p.dtype, batch * p.shift_stride, count);
  add(factor, vector(p.scale_table), count, p.dtype);
  add(shift, vector(p.shift_table), count, p.dtype);
  each(factor, count, p.dtype, [](int64_t, F x) { return x + 1.f; });
  v.factor = factor;
  v.shift = shift;
  return v;
}
constexpr int kVectors = 7;

// Writes a finished voxel to its place and to its copies in the padding.
void write_voxel(const float* row, const ChannelNormParams& p, int64_t batch, int64_t voxel) {
  const int64_t frame_size = p.height * p.width, frame = voxel / frame_size;
  const int64_t y = voxel % frame_size / p.width, x = voxel % p.width, edge = p.reflect ? 1 : 0;
  const int64_t row_out = p.width + 2 * edge, frame_out = (p.height + 2 * edge) * row_out;
  const int64_t first = frame == 0 ? 0 : frame + p.front;
  const int64_t last = frame + p.front + (frame + 1 == p.frames ? p.back : 0);
  const auto each_place = [&](int64_t place, int64_t size, const auto& write) {
    write(place + edge);
    if (p.reflect && place == 1) write(int64_t{0});
    if (p.reflect && place + 2 == size) write(size + 1);
  };
  for (int64_t f = first; f <= last; ++f) {
    each_place(y, p.height, [&](int64_t line) {
      each_place(x, p.width, [&](int64_t column) {
        const int64_t place = f * frame_out + line * row_out + column;
        narrow(at(p.out, p.dtype, batch * p.out_stride + place * p.channels), row, p.dtype, p.channels);
      });
    });
  }
}

void channel_norm_units(const ChannelNormParams& p, int64_t begin, int64_t end) {
  const int64_t count = p.channels, voxels = p.frames * p.height * p.width;
  Scratch scratch(2, padded(count));
  float *row = scratch.take(), *other = scratch.take();
  std::unique_ptr<Scratch> held;
  Vectors v = {};
  int64_t held_batch = -1;
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t batch = unit / voxels, voxel = unit % voxels;
    if (batch != held_batch) {
      held = std::make_unique<Scratch>(kVectors, padded(count));
      v = vectors(p, *held, batch);
      held_batch = batch;
    }
    std::fill(row, row + padded(count), 0.f);
    widened(row, p.input, p.dtype, batch * p.input_stride + voxel * count, count);
    add(row, v.bias, count, p.dtype);
    if (p.noise != nullptr) {
      float noise[kSumLanes];
      widened(noise, p.noise, p.dtype, voxel % (p.height * p.width), 1);
      each(row, count, p.dtype,
           [&](int64_t c, F x) { return x + round_to(p.dtype, load(v.noise_scale + c) * noise[0]); });
    }
    add(row, widened(other, p.residual, p.dtype, batch * p.residual_stride + voxel * count, count), count, p.dtype);
    if (p.residual_out != nullptr) {
      narrow(at(p.residual_out, p.dtype, batch * p.residual_out_stride + voxel * count), row, p.dtype, count);
    }
    if (p.norm != ChannelNorm::kNone) normalise(row, p);
    if (v.weight != nullptr) each(row, count, p.dtype, [&](int64_t c, F x) { return x * load(v.weight + c); });
    if (v.factor != nullptr) {
      each(row, count, p.dtype,
           [&](int64_t c, F x) { return round_to(p.dtype, x * load(v.factor + c)) + load(v.shift + c); });
    }
    if (p.silu) silu(row, count, p.dtype);
    write_voxel(row, p, batch, voxel);
  }
}

void channel_norm(const ChannelNormParams& params, const Context& context) {
  struct Job {
    const ChannelNormParams& params;
    void operator()(int64_t begin, int64_t end) const { channel_norm_units(params, begin, end); }
  };
  for_ranges(context, params.batch * params.frames * params.height * params.width, params.channels, Job{params});
}

void pixel_shuffle_units(const PixelShuffleParams& p, int64_t begin, int64_t end) {
  const int64_t *up = p.upscale, parts = up[0] * up[1] * up[2], count = p.channels * parts;
  const int64_t frames = p.frames * up[0] - p.skip;
  Scratch scratch(4, padded(count));
  float *row = scratch.take(), *other = scratch.take(), *voxel_out = scratch.take();
  const float* bias = widened(scratch.take(), p.bias, p.dtype, 0, count);
  for (int64_t voxel = begin; voxel < end; ++voxel) {
    const int64_t x = voxel % p.width, y = voxel / p.width % p.height, frame = voxel / (p.width * p.height) % p.frames;
    const int64_t batch = voxel / (p.width * p.height * p.frames);
    widened(row, p.input, p.dtype, voxel * count, count);
    add(row, bias, count, p.dtype);
    if (p.residual != nullptr) {
      const int64_t* stride = p.residual_stride;
      const int64_t from = batch * stride[0] + frame * stride[1] + y * stride[2] + x * stride[3];
      widened(other, p.residual, p.dtype, from, p.residual_channels);
      for (int64_t c = p.residual_channels; c < count; ++c) other[c] = other[c - p.residual_channels];
      add(row, other, count, p.dtype);
    }
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t k = part % up[2], j = part / up[2] % up[1], i = part / (up[2] * up[1]);
      const int64_t f = frame * up[0] + i - p.skip;
      if (f < 0) continue;
      for (int64_t c = 0; c < p.channels; ++c) voxel_out[c] = row[c * parts + part];
      const int64_t place = ((batch * frames + f) * p.height * up[1] + y * up[1] + j) * p.width * up[2] + x * up[2] + k;
      narrow(at(p.out, p.dtype, place * p.channels), voxel_out, p.dtype, p.channels);
    }
  }
}

void pixel_shuffle(const PixelShuffleParams& params, const Context& context) {
  struct Job {
    const PixelShuffleParams& params;
    void operator()(int64_t begin, int64_t end) const { pixel_shuffle_units(params, begin, end); }
  };
  const int64_t* up = params.upscale;
  for_ranges(context, params.batch * params.frames * params.height * params.width,
             params.channels * up[0] * up[1] * up[2], Job{params});
}

void unpatchify_units(const UnpatchifyParams& p, int64_t begin, int64_t end) {
  const int64_t patch = p.patch, count = p.channels * patch * patch, line = p.width * patch;
  Scratch scratch(2, padded(count));
  float* row = scratch.take();
  const float* bias = widened(scratch.take(), p.bias, p.dtype, 0, count);
  float pixels[kSumLanes];
  for (int64_t voxel = begin; voxel < end; ++voxel) {
    const int64_t x = voxel % p.width, y = voxel / p.width % p.height, frame = voxel / (p.width * p.height) % p.frames;
    const int64_t batch = voxel / (p.width * p.height * p.frames);
    widened(row, p.input, p.dtype, voxel * count, count);
    add(row, bias, count, p.dtype);
    if (p.clamp) {
      for (int64_t c = 0; c < count; ++c) row[c] = row[c] < -1.f ? -1.f : row[c] > 1.f ? 1.f : row[c];
    }
    for (int64_t c = 0; c < p.channels; ++c) {
      for (int64_t j = 0; j < patch; ++j) {
        const int64_t to =
            (((batch * p.channels + c) * p.frames + frame) * p.height + y) * patch * line + j * line + x * patch;
        for (int64_t k = 0; k < patch; k += kSumLanes) {
          const int64_t width = std::min<int64_t>(patch - k, kSumLanes);
          for (int64_t i = 0; i < width; ++i) pixels[i] = row[(c * patch + k + i) * patch + j];
          narrow(at(p.out, p.dtype, to + k), pixels, p.dtype, width);
        }
      }
    }
  }
}

void unpatchify(const UnpatchifyParams& params, const Context& context) {
  struct Job {
    const UnpatchifyParams& params;
    void operator()(int64_t begin, int64_t end) const { unpatchify_units(params, begin, end); }
  };
  for_ranges(context, params.batch * params.frames * params.height * params.width,
             params.channels * params.patch * params.patch, Job{params});
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx

#endif
