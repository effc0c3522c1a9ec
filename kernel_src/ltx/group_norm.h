// Launch parameters of the ops on images and videos in channels-last memory that span pixels: group_norm and
// upsample_nearest. A pixel is one row of `channels` elements; the frames of a video only add pixels.
//
// As in ltx/params.h, the bindings have checked everything, and strides are in elements. Every tensor has the dtype
// `dtype`, and each step rounds to it, as the chain of separate ops in stock models does. Statistics are fp32.
//
// Both ops read a hidden state that is a sum of up to four operands, of which all but the input may be absent:
//   h = r(input + bias)
//   h = r(h + r(residual + residual_bias))      without a residual: r(h + residual_bias)
#pragma once

#include <algorithm>
#include <cstdint>

#include "ltx/params.h"

namespace ltx {

// The operands of h. Within a batch element input and residual are dense; the strides are those of the batch.
struct HiddenParams {
  const void *input = nullptr, *residual = nullptr;
  int64_t input_stride = 0, residual_stride = 0;
  const void *bias = nullptr, *residual_bias = nullptr;  // [batch, channels], or [channels] with a stride of zero
  int64_t bias_stride = 0, residual_bias_stride = 0;
};

// Statistics are taken of chunks of pixels and then merged. The length of a chunk depends on the number of pixels
// alone: an image has the same bits in any batch, on any GPU, and with any number of CPU threads.
constexpr int64_t kMinChunkPixels = 256, kMaxChunks = 1024;
inline int64_t chunk_pixels(int64_t pixels) {
  return std::max(kMinChunkPixels, (pixels + kMaxChunks - 1) / kMaxChunks);
}
inline int64_t chunk_count(int64_t pixels) { return (pixels + chunk_pixels(pixels) - 1) / chunk_pixels(pixels); }

//   y            = r(a h + b), with a = rstd * weight and b = bias_norm - a * mean
//   out          = r(silu(y)) where `silu`, else y
//   residual_out = h where it is given; it may be input's or residual's memory
// The mean and rstd of a group are taken over its channels and all pixels.
struct GroupNormParams {
  DType dtype = DType::kFloat32;
  bool silu = false;
  float eps = 0.f;
  int64_t batch = 0, pixels = 0, channels = 0, groups = 1;
  HiddenParams hidden;
  void *out = nullptr, *residual_out = nullptr;  // dense within a batch element
  int64_t out_stride = 0, residual_out_stride = 0;
  const void *weight = nullptr, *bias_norm = nullptr;  // [channels]
  // Scratch memory of a launch, fp32.
  float* moments = nullptr;  // [batch, parts, chunks, 2]: mean and squared deviations of a part in a chunk
  float* factors = nullptr;  // [batch, 2, channels]: a and b; it begins at a multiple of 16 bytes

  // A group of many channels has several parts.
  static constexpr int64_t kMaxPartChannels = 128;
  int64_t parts_of_group() const { return (channels / groups + kMaxPartChannels - 1) / kMaxPartChannels; }
  int64_t parts() const { return groups * parts_of_group(); }
  int64_t moment_count() const { return batch * parts() * chunk_count(pixels) * 2; }
  int64_t factor_count() const { return batch * 2 * channels; }
};

// out[b, y * scale[0] + j, x * scale[1] + k, c] = h[b, y, x, c], 0 <= j < scale[0], 0 <= k < scale[1]
struct UpsampleParams {
  DType dtype = DType::kFloat32;
  int64_t batch = 0, lines = 0, width = 0, channels = 0;  // lines: rows of pixels of a batch element, in all frames
  int64_t scale[2] = {1, 1};
  HiddenParams hidden;
  void* out = nullptr;  // dense
};

void group_norm(const GroupNormParams& params, const Context& context);
void upsample_nearest(const UpsampleParams& params, const Context& context);

}  // namespace ltx
