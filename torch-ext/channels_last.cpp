// Ops on video tensors in channels-last memory: channel_norm, pixel_shuffle and unpatchify. Checks the tensors, fills
// the params of ltx/channels_last.h and calls the backend. Inputs in another memory order are copied into this one.
#include "channels_last.h"

#include <algorithm>

#include "ltx/channels_last.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

void check_video(const Arg& a) {
  check_dim(a, kDims);
  float_dtype(a);
}

// ---- channel_norm

struct Padding {
  int64_t front = 0, back = 0;
  bool reflect = false;
};

Padding check_padding(const std::vector<int64_t>& padding) {
  const auto fits = [](int64_t size, int64_t most) { return size >= 0 && size <= most; };
  if (padding.size() != 3 || !fits(padding[0], kMaxGrowth) || !fits(padding[1], kMaxGrowth) || !fits(padding[2], 1)) {
    fail("padding", text("frames before and after, 0 to ", kMaxGrowth, ", and 0 or 1 for reflected edges"),
         shape_text(padding.data(), static_cast<int64_t>(padding.size())));
  }
  return {padding[0], padding[1], padding[2] == 1};
}

struct NormTensors {
  const Tensor& input;
  const OptionalTensor &bias, &noise, &noise_scale, &residual, &weight, &scale, &shift, &scale_table, &shift_table;
  double eps;
  int64_t norm;
  bool silu;
  const std::vector<int64_t>& padding;
};

// Runs with the given outputs, or makes those that are missing. `keep`: there is a residual_out.
std::tuple<Tensor, Tensor> run_norm(const NormTensors& t, const Tensor* given_out, const Tensor* given_residual_out,
                                    bool keep) {
  const Readable input = channels_last("input", t.input), residual = channels_last("residual", t.residual);
  const Readable bias = plain("bias", t.bias), weight = plain("weight", t.weight);
  const Readable noise = plain("noise", t.noise), noise_scale = plain("noise_scale", t.noise_scale);
  const Readable scale = rows("scale", t.scale), shift = rows("shift", t.shift);
  const Readable scale_table = plain("scale_table", t.scale_table), shift_table = plain("shift_table", t.shift_table);
  check_video(*input);
  const Padding padding = check_padding(t.padding);
  const int64_t* size = input->size;
  ChannelNormParams p;
  p.dtype = float_dtype(*input);
  p.norm = check_code("norm", t.norm, ChannelNorm::kNone, ChannelNorm::kL2);
  p.silu = t.silu;
  p.eps = check_eps(t.eps);
  p.batch = size[kBatch];
  p.channels = size[kChannels];
  p.frames = size[kFrames];
  p.height = size[kHeight];
  p.width = size[kWidth];
  p.front = padding.front;
  p.back = padding.back;
  p.reflect = padding.reflect;
  if (p.reflect && (p.height < 2 || p.width < 2)) {
    fail("input", "a height and a width of at least 2 (reflected edges)", "shape " + shape_text(*input));
  }
  check_like(*residual, *input);
  p.bias = check_vector(*bias, *input, p.channels);
  p.weight = check_vector(*weight, *input, p.channels);
  if (static_cast<bool>(*noise) != static_cast<bool>(*noise_scale)) {
    fail(*noise ? "noise_scale" : "noise", "noise and noise_scale together", "None");
  }
  if (*noise) {
    check_same_device(*noise, *input);
    check_same_dtype(*noise, *input);
    check_shape(*noise, {p.height, p.width});
    p.noise_scale = check_vector(*noise_scale, *input, p.channels);
    p.noise = noise->data;
  }
  if (static_cast<bool>(*scale) != static_cast<bool>(*shift)) {
    fail(*scale ? "shift" : "scale", "scale and shift together", "None");
  }
  const auto modulator = [&](const Arg& value, const Arg& table, int64_t& stride) -> const void* {
    if (table && !value) fail(table.name, "its modulation input to be given too", "a table alone");
    if (!value) return nullptr;
    check_same_device(value, *input);
    check_same_dtype(value, *input);
    check_shape(value, {p.batch, p.channels});
    stride = p.batch == 1 ? 0 : value.stride[0];
    return value.data;
  };
  p.scale = modulator(*scale, *scale_table, p.scale_stride);
  p.shift = modulator(*shift, *shift_table, p.shift_stride);
  p.scale_table = check_vector(*scale_table, *input, p.channels);
  p.shift_table = check_vector(*shift_table, *input, p.channels);

  const int64_t edge = p.reflect ? 2 : 0;
  const bool empty = input->numel() == 0;  // no frame to repeat, no row to mirror
  const int64_t out_size[] = {p.batch, p.channels, p.frames == 0 ? 0 : p.frames + p.front + p.back, p.height + edge,
                              p.width + edge};
  std::tuple<Tensor, Tensor> made;
  if (!given_out) {
    std::get<0>(made) = new_channels_last(out_size, *input);
    given_out = &std::get<0>(made);
  }
  const Arg out = mutable_arg("out", *given_out);
  check_channels_last_output(out, *input, out_size, false);
  Arg residual_out;
  if (keep) {
    if (!given_residual_out) {
      std::get<1>(made) = new_channels_last(size, *input);
      given_residual_out = &std::get<1>(made);
    }
    residual_out = mutable_arg("residual_out", *given_residual_out);
    check_channels_last_output(residual_out, *input, size, false);
    check_overlap(residual_out, *input, true);
    check_overlap(residual_out, *residual, true);
    check_overlap(residual_out, out, false);
  }
  for (const Readable* other :
       {&input, &residual, &bias, &weight, &noise, &noise_scale, &scale, &shift, &scale_table, &shift_table}) {
    check_overlap(out, **other, false);
  }
  if (!empty) {
    p.input = input->data;
    p.input_stride = batch_stride(*input);
    p.out = out.data;
    p.out_stride = batch_stride(out);
    if (*residual) {
      p.residual = residual->data;
      p.residual_stride = batch_stride(*residual);
    }
    if (keep) {
      p.residual_out = residual_out.data;
      p.residual_out_stride = batch_stride(residual_out);
    }
    Launch launch(*input);
    ltx::channel_norm(p, launch.context());
  }
  return made;
}

// ---- pixel_shuffle

Tensor run_shuffle(const Tensor& input_tensor, const OptionalTensor& bias_tensor, const OptionalTensor& residual_tensor,
                   const std::vector<int64_t>& upscale, int64_t skip_frames, const Tensor* given_out) {
  const Readable input = dense_channels_last("input", input_tensor), bias = plain("bias", bias_tensor);
  const Readable residual("residual", residual_tensor, true, [](const Arg& a) {
    return a.dim != kDims || a.size[kChannels] == 1 || a.stride[kChannels] == 1;
  });
  check_video(*input);
  const int64_t* size = input->size;
  const auto is_factor = [](int64_t factor) { return factor >= 1 && factor <= kMaxGrowth; };
  if (upscale.size() != 3 || !std::all_of(upscale.begin(), upscale.end(), is_factor)) {
    fail("upscale", text("three numbers from 1 to ", kMaxGrowth),
         shape_text(upscale.data(), static_cast<int64_t>(upscale.size())));
  }
  const int64_t parts = upscale[0] * upscale[1] * upscale[2];
  if (size[kChannels] % parts != 0) {
    fail("input", text("channels that are a multiple of ", parts), "shape " + shape_text(*input));
  }
  if (skip_frames < 0 || skip_frames >= upscale[0]) {
    fail("skip_frames", text("a number from 0 to ", upscale[0] - 1), text(skip_frames));
  }
  PixelShuffleParams p;
  p.dtype = float_dtype(*input);
  p.batch = size[kBatch];
  p.channels = size[kChannels] / parts;
  p.frames = size[kFrames];
  p.height = size[kHeight];
  p.width = size[kWidth];
  p.skip = skip_frames;
  for (int i = 0; i < 3; ++i) p.upscale[i] = upscale[i];
  p.bias = check_vector(*bias, *input, size[kChannels]);
  if (*residual) {
    check_same_device(*residual, *input);
    check_same_dtype(*residual, *input);
    check_dim(*residual, kDims);
    p.residual_channels = residual->size[kChannels];
    if (p.residual_channels == 0 || p.residual_channels % parts != 0 || size[kChannels] % p.residual_channels != 0) {
      fail("residual",
           text("channels that are a multiple of ", parts, " and divide those of input ", shape_text(*input)),
           "shape " + shape_text(*residual));
    }
    check_shape(*residual, {p.batch, p.residual_channels, p.frames, p.height, p.width});
    p.residual = residual->data;
    const int dims[] = {kBatch, kFrames, kHeight, kWidth};
    for (int i = 0; i < 4; ++i) p.residual_stride[i] = residual->size[dims[i]] == 1 ? 0 : residual->stride[dims[i]];
  }
  const int64_t frames = p.frames == 0 ? 0 : p.frames * upscale[0] - skip_frames;
  const int64_t out_size[] = {p.batch, p.channels, frames, p.height * upscale[1], p.width * upscale[2]};
  Tensor made;
  if (!given_out) {
    made = new_channels_last(out_size, *input);
    given_out = &made;
  }
  const Arg out = mutable_arg("out", *given_out);
  check_channels_last_output(out, *input, out_size, true);
  for (const Readable* other : {&input, &bias, &residual}) check_overlap(out, **other, false);
  if (out.numel() != 0) {
    p.input = input->data;
    p.out = out.data;
    Launch launch(*input);
    ltx::pixel_shuffle(p, launch.context());
  }
  return made;
}

// ---- unpatchify

Tensor run_unpatchify(const Tensor& input_tensor, const OptionalTensor& bias_tensor, int64_t patch_size, bool clamp,
                      const Tensor* given_out) {
  const Readable input = dense_channels_last("input", input_tensor), bias = plain("bias", bias_tensor);
  check_video(*input);
  const int64_t* size = input->size;
  if (patch_size < 1 || patch_size > kMaxGrowth) {
    fail("patch_size", text("a number from 1 to ", kMaxGrowth), text(patch_size));
  }
  if (size[kChannels] % (patch_size * patch_size) != 0) {
    fail("input", text("channels that are a multiple of ", patch_size * patch_size), "shape " + shape_text(*input));
  }
  UnpatchifyParams p;
  p.dtype = float_dtype(*input);
  p.clamp = clamp;
  p.batch = size[kBatch];
  p.channels = size[kChannels] / (patch_size * patch_size);
  p.frames = size[kFrames];
  p.height = size[kHeight];
  p.width = size[kWidth];
  p.patch = patch_size;
  p.bias = check_vector(*bias, *input, size[kChannels]);
  const int64_t out_size[] = {p.batch, p.channels, p.frames, p.height * patch_size, p.width * patch_size};
  Tensor made;
  if (!given_out) {
    int64_t stride[kDims], step = 1;
    for (int d = kDims - 1; d >= 0; --d) {
      stride[d] = step;
      step *= out_size[d] > 1 ? out_size[d] : 1;
    }
    made = empty_strided(out_size, stride, kDims, *input);
    given_out = &made;
  }
  const Arg out = mutable_arg("out", *given_out);
  check_output(out, *input, out_size, kDims);
  if (out.numel() != 0 && !given_out->is_contiguous()) {
    fail("out", "contiguous memory", "strides " + shape_text(out.stride, out.dim));
  }
  for (const Readable* other : {&input, &bias}) check_overlap(out, **other, false);
  if (out.numel() != 0) {
    p.input = input->data;
    p.out = out.data;
    Launch launch(*input);
    ltx::unpatchify(p, launch.context());
  }
  return made;
}

}  // namespace

Tensor channel_norm(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& noise,
                    const OptionalTensor& noise_scale, const OptionalTensor& residual, const OptionalTensor& weight,
                    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& scale_table,
                    const OptionalTensor& shift_table, double eps, int64_t norm, bool silu,
                    std::vector<int64_t> padding) {
  return std::get<0>(run_norm({input, bias, noise, noise_scale, residual, weight, scale, shift, scale_table,
                               shift_table, eps, norm, silu, padding},
                              nullptr, nullptr, false));
}

void channel_norm_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias, const OptionalTensor& noise,
                      const OptionalTensor& noise_scale, const OptionalTensor& residual, const OptionalTensor& weight,
                      const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& scale_table,
                      const OptionalTensor& shift_table, double eps, int64_t norm, bool silu,
                      std::vector<int64_t> padding) {
  run_norm({input, bias, noise, noise_scale, residual, weight, scale, shift, scale_table, shift_table, eps, norm, silu,
            padding},
           &out, nullptr, false);
}

std::tuple<Tensor, Tensor> channel_norm_residual(const Tensor& input, const OptionalTensor& bias,
                                                 const OptionalTensor& noise, const OptionalTensor& noise_scale,
                                                 const OptionalTensor& residual, const OptionalTensor& weight,
                                                 const OptionalTensor& scale, const OptionalTensor& shift,
                                                 const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                                                 double eps, int64_t norm, bool silu, std::vector<int64_t> padding) {
  return run_norm({input, bias, noise, noise_scale, residual, weight, scale, shift, scale_table, shift_table, eps, norm,
                   silu, padding},
                  nullptr, nullptr, true);
}

void channel_norm_residual_out(const Tensor& out, const Tensor& residual_out, const Tensor& input,
                               const OptionalTensor& bias, const OptionalTensor& noise,
                               const OptionalTensor& noise_scale, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& scale, const OptionalTensor& shift,
                               const OptionalTensor& scale_table, const OptionalTensor& shift_table, double eps,
                               int64_t norm, bool silu, std::vector<int64_t> padding) {
  run_norm({input, bias, noise, noise_scale, residual, weight, scale, shift, scale_table, shift_table, eps, norm, silu,
            padding},
           &out, &residual_out, true);
}

Tensor pixel_shuffle(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                     std::vector<int64_t> upscale, int64_t skip_frames) {
  return run_shuffle(input, bias, residual, upscale, skip_frames, nullptr);
}

void pixel_shuffle_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias,
                       const OptionalTensor& residual, std::vector<int64_t> upscale, int64_t skip_frames) {
  run_shuffle(input, bias, residual, upscale, skip_frames, &out);
}

Tensor unpatchify(const Tensor& input, const OptionalTensor& bias, int64_t patch_size, bool clamp) {
  return run_unpatchify(input, bias, patch_size, clamp, nullptr);
}

void unpatchify_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias, int64_t patch_size,
                    bool clamp) {
  run_unpatchify(input, bias, patch_size, clamp, &out);
}

}  // namespace ltx::host
