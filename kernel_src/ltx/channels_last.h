// Launch parameters of the ops on video tensors in channels-last memory: [batch, frames, height, width, channels], the
// layout that torch calls channels_last_3d. A voxel is one row of `channels` elements.
//
// As in ltx/params.h, the bindings have checked everything, and strides are in elements. Every tensor has the dtype
// `dtype`. Each step rounds to that dtype, as the stock decoders do with their chain of separate ops; only a sum over
// the channels, a square root and an activation are computed in fp32 between two roundings.
#pragma once

#include <cstdint>

#include "ltx/params.h"

namespace ltx {

// How a voxel is normalised; r(x) rounds to the dtype, and C is the number of channels.
//   kNone         y = h
//   kRms          y = r(h / sqrt(mean(h^2) + eps))                            diffusers' RMSNorm
//   kRmsStepwise  y = r(h / r(sqrt(r(r(mean(r(h^2))) + eps))))                LTX-2's PerChannelRMSNorm
//   kL2           y = r(r(h / max(sqrt(sum(h^2)), eps)) * sqrt(C))            Wan's RMS_norm
enum class ChannelNorm : int32_t { kNone = 0, kRms = 1, kRmsStepwise = 2, kL2 = 3 };

// h   = r(input + bias), then r(h + r(noise * noise_scale)), then r(h + residual)
// y   = normalised h, as above, then r(y * weight)
// y   = r(r(y * r(1 + scale)) + shift)      scale: r(scale + scale_table), shift likewise
// out = r(silu(y))                          each step left out when its operand is absent
// residual_out = h                          when present; it may be the memory of input or residual
//
// out has `front` copies of the first output frame before the frames and `back` copies of the last one after them,
// and with `reflect` one more row and column at each edge of a frame, mirrored about the edge (row -1 is row 1).
struct ChannelNormParams {
  DType dtype = DType::kFloat32;
  ChannelNorm norm = ChannelNorm::kNone;
  bool silu = false;
  float eps = 0.f;
  int64_t batch = 0, frames = 0, height = 0, width = 0, channels = 0;
  int64_t front = 0, back = 0;
  bool reflect = false;
  // Within a batch element these are dense; the strides are those of the batch.
  const void *input = nullptr, *residual = nullptr;
  void *out = nullptr, *residual_out = nullptr;
  int64_t input_stride = 0, residual_stride = 0, out_stride = 0, residual_out_stride = 0;
  // [channels]
  const void *bias = nullptr, *noise_scale = nullptr, *weight = nullptr, *scale_table = nullptr, *shift_table = nullptr;
  const void* noise = nullptr;                    // [height, width]
  const void *scale = nullptr, *shift = nullptr;  // [batch, channels]
  int64_t scale_stride = 0, shift_stride = 0;     // zero: the same for every batch element
};

// Moves channels into time and space. With n = t * h * w of `upscale`:
//   out[b, c, f * t + i - skip, y * h + j, x * w + k] = r(r(input[m] + bias[m]) + residual[m mod residual_channels])
// where m = ((c * t + i) * h + j) * w + k is the channel of the voxel (b, f, y, x); frames before the first are
// dropped.
struct PixelShuffleParams {
  DType dtype = DType::kFloat32;
  int64_t batch = 0, frames = 0, height = 0, width = 0;  // of the input
  int64_t channels = 0, residual_channels = 0;           // of the output, and of the residual
  int64_t upscale[3] = {1, 1, 1};
  int64_t skip = 0;
  const void *input = nullptr, *bias = nullptr, *residual = nullptr;  // input is dense
  int64_t residual_stride[4] = {};                                    // of batch, frame, row, column
  void* out = nullptr;                                                // dense
};

// Turns channels into patches of an image, in the memory order of images: out is a contiguous
// [batch, channels, frames, height * patch, width * patch], and
//   out[b, c, f, y * patch + j, x * patch + k] = r(input[m] + bias[m]), m = (c * patch + k) * patch + j,
// then limited to [-1, 1] where `clamp`.
struct UnpatchifyParams {
  DType dtype = DType::kFloat32;
  bool clamp = false;
  int64_t batch = 0, frames = 0, height = 0, width = 0;  // of the input, which is dense
  int64_t channels = 0, patch = 1;                       // of the output
  const void *input = nullptr, *bias = nullptr;
  void* out = nullptr;
};

void channel_norm(const ChannelNormParams& params, const Context& context);
void pixel_shuffle(const PixelShuffleParams& params, const Context& context);
void unpatchify(const UnpatchifyParams& params, const Context& context);

}  // namespace ltx
