// Ops on images and videos in channels-last memory that span pixels: group_norm, group_norm_residual and
// upsample_nearest. Checks the tensors, fills the params of ltx/group_norm.h and calls the backend.
#include "ltx/group_norm.h"

#include <algorithm>

#include "channels_last.h"
#include "torch_binding.h"

namespace ltx::host {
namespace {

void check_image_or_video(const Arg& a) {
  if (!is_image_or_video(a)) fail(a.name, "4 or 5 dimensions", "shape " + shape_text(a));
  float_dtype(a);
}

int64_t pixels_of(const Arg& a) {
  int64_t pixels = 1;
  for (int64_t d = kChannels + 1; d < a.dim; ++d) pixels *= a.size[d];
  return pixels;
}

// The operands of h (ltx/group_norm.h). They outlive the launch.
struct Hidden {
  Readable input, residual, bias, residual_bias;

  Hidden(const Tensor& input_tensor, const OptionalTensor& bias_tensor, const OptionalTensor& residual_tensor,
         const OptionalTensor& residual_bias_tensor)
      : input(channels_last("input", input_tensor)),
        residual(channels_last("residual", residual_tensor)),
        bias(rows("bias", bias_tensor)),
        residual_bias(rows("residual_bias", residual_bias_tensor)) {}

  HiddenParams params() const {
    HiddenParams p;
    p.input = input->data;
    p.input_stride = batch_stride(*input);
    if (*residual) {
      p.residual = residual->data;
      p.residual_stride = batch_stride(*residual);
    }
    if (*bias) {
      p.bias = bias->data;
      p.bias_stride = bias_stride(*bias);
    }
    if (*residual_bias) {
      p.residual_bias = residual_bias->data;
      p.residual_bias_stride = bias_stride(*residual_bias);
    }
    return p;
  }

  // Of all but the input.
  void check() const {
    check_bias(*bias);
    check_like(*residual, *input);
    check_bias(*residual_bias);
  }

 private:
  static int64_t bias_stride(const Arg& a) { return a.dim == 1 || a.size[0] == 1 ? 0 : a.stride[0]; }

  void check_bias(const Arg& a) const {
    if (!a) return;
    check_same_device(a, *input);
    check_same_dtype(a, *input);
    const int64_t channels = input->size[kChannels], full[] = {input->size[kBatch], channels};
    const bool fits =
        (a.dim == 1 && a.size[0] == channels) || (a.dim == 2 && a.size[0] == full[0] && a.size[1] == channels);
    if (!fits) {
      fail(a.name, text("shape ", shape_text(&channels, 1), " or ", shape_text(full, 2)), shape_text(a));
    }
  }
};

// ---- group_norm

struct GroupNormTensors {
  const Tensor& input;
  const OptionalTensor &bias, &residual, &residual_bias, &weight, &bias_norm;
  int64_t groups;
  double eps;
  bool silu;
};

// Runs with the given outputs, or makes those that are missing. `keep`: there is a residual_out.
std::tuple<Tensor, Tensor> run_group_norm(const GroupNormTensors& t, const Tensor* given_out,
                                          const Tensor* given_residual_out, bool keep) {
  const Hidden hidden(t.input, t.bias, t.residual, t.residual_bias);
  const Readable weight = plain("weight", t.weight), bias_norm = plain("bias_norm", t.bias_norm);
  const Arg& input = *hidden.input;
  check_image_or_video(input);
  GroupNormParams p;
  p.dtype = float_dtype(input);
  p.silu = t.silu;
  p.batch = input.size[kBatch];
  p.channels = input.size[kChannels];
  p.pixels = pixels_of(input);
  if (t.groups < 1 || p.channels % t.groups != 0) {
    fail("groups", text("a divisor of the ", p.channels, " channels of input"), text(t.groups));
  }
  p.groups = t.groups;
  p.eps = check_eps(t.eps);
  hidden.check();
  p.weight = check_vector(*weight, input, p.channels);
  p.bias_norm = check_vector(*bias_norm, input, p.channels);

  std::tuple<Tensor, Tensor> made;
  if (!given_out) {
    std::get<0>(made) = new_channels_last(input.size, input);
    given_out = &std::get<0>(made);
  }
  const Arg out = mutable_arg("out", *given_out);
  check_channels_last_output(out, input, input.size, false);
  Arg residual_out;
  if (keep) {
    if (!given_residual_out) {
      std::get<1>(made) = new_channels_last(input.size, input);
      given_residual_out = &std::get<1>(made);
    }
    residual_out = mutable_arg("residual_out", *given_residual_out);
    check_channels_last_output(residual_out, input, input.size, false);
    check_overlap(residual_out, out, false);
  }
  for (const Arg* written : {static_cast<const Arg*>(&out), static_cast<const Arg*>(&residual_out)}) {
    if (!*written) continue;
    check_overlap(*written, input, true);
    check_overlap(*written, *hidden.residual, true);
    for (const Readable* vector : {&hidden.bias, &hidden.residual_bias, &weight, &bias_norm}) {
      check_overlap(*written, **vector, false);
    }
  }
  if (input.numel() == 0) return made;
  p.hidden = hidden.params();
  p.out = out.data;
  p.out_stride = batch_stride(out);
  if (keep) {
    p.residual_out = residual_out.data;
    p.residual_out_stride = batch_stride(residual_out);
  }
  Arg floats = input;
  floats.dtype = aoti_torch_dtype_float32();
  const int64_t count = p.factor_count() + p.moment_count(), step = 1;
  const Tensor scratch = empty_strided(&count, &step, 1, floats);
  p.factors = static_cast<float*>(scratch.mutable_data_ptr());  // first, because they are read in packs
  p.moments = p.factors + p.factor_count();
  Launch launch(input);
  ltx::group_norm(p, launch.context());
  return made;
}

// ---- upsample_nearest

Tensor run_upsample(const Tensor& input_tensor, const OptionalTensor& bias, const OptionalTensor& residual,
                    const OptionalTensor& residual_bias, const std::vector<int64_t>& scale, const Tensor* given_out) {
  const Hidden hidden(input_tensor, bias, residual, residual_bias);
  const Arg& input = *hidden.input;
  check_image_or_video(input);
  const auto is_factor = [](int64_t factor) { return factor >= 1 && factor <= kMaxGrowth; };
  if (scale.size() != 2 || !std::all_of(scale.begin(), scale.end(), is_factor)) {
    fail("scale", text("two numbers from 1 to ", kMaxGrowth),
         shape_text(scale.data(), static_cast<int64_t>(scale.size())));
  }
  hidden.check();
  int64_t out_size[kDims];
  std::copy(input.size, input.size + input.dim, out_size);
  for (int i = 0; i < 2; ++i) out_size[input.dim - 2 + i] *= scale[i];
  Tensor made;
  if (!given_out) {
    made = new_channels_last(out_size, input);
    given_out = &made;
  }
  const Arg out = mutable_arg("out", *given_out);
  check_channels_last_output(out, input, out_size, true);
  for (const Readable* other : {&hidden.input, &hidden.bias, &hidden.residual, &hidden.residual_bias}) {
    check_overlap(out, **other, false);
  }
  if (out.numel() != 0) {
    UpsampleParams p;
    p.dtype = float_dtype(input);
    p.batch = input.size[kBatch];
    p.channels = input.size[kChannels];
    p.width = input.size[input.dim - 1];
    p.lines = pixels_of(input) / p.width;
    for (int i = 0; i < 2; ++i) p.scale[i] = scale[i];
    p.hidden = hidden.params();
    p.out = out.data;
    Launch launch(input);
    ltx::upsample_nearest(p, launch.context());
  }
  return made;
}

}  // namespace

Tensor group_norm(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                  const OptionalTensor& residual_bias, const OptionalTensor& weight, const OptionalTensor& bias_norm,
                  int64_t groups, double eps, bool silu) {
  return std::get<0>(run_group_norm({input, bias, residual, residual_bias, weight, bias_norm, groups, eps, silu},
                                    nullptr, nullptr, false));
}

void group_norm_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                    const OptionalTensor& residual_bias, const OptionalTensor& weight, const OptionalTensor& bias_norm,
                    int64_t groups, double eps, bool silu) {
  run_group_norm({input, bias, residual, residual_bias, weight, bias_norm, groups, eps, silu}, &out, nullptr, false);
}

std::tuple<Tensor, Tensor> group_norm_residual(const Tensor& input, const OptionalTensor& bias,
                                               const OptionalTensor& residual, const OptionalTensor& residual_bias,
                                               const OptionalTensor& weight, const OptionalTensor& bias_norm,
                                               int64_t groups, double eps, bool silu) {
  return run_group_norm({input, bias, residual, residual_bias, weight, bias_norm, groups, eps, silu}, nullptr, nullptr,
                        true);
}

void group_norm_residual_out(const Tensor& out, const Tensor& residual_out, const Tensor& input,
                             const OptionalTensor& bias, const OptionalTensor& residual,
                             const OptionalTensor& residual_bias, const OptionalTensor& weight,
                             const OptionalTensor& bias_norm, int64_t groups, double eps, bool silu) {
  run_group_norm({input, bias, residual, residual_bias, weight, bias_norm, groups, eps, silu}, &out, &residual_out,
                 true);
}

Tensor upsample_nearest(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                        const OptionalTensor& residual_bias, std::vector<int64_t> scale) {
  return run_upsample(input, bias, residual, residual_bias, scale, nullptr);
}

void upsample_nearest_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias,
                          const OptionalTensor& residual, const OptionalTensor& residual_bias,
                          std::vector<int64_t> scale) {
  run_upsample(input, bias, residual, residual_bias, scale, &out);
}

}  // namespace ltx::host
