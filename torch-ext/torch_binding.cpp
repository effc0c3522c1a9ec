// Every schema of the package, and the compiled kernels of this variant's backend.
//
// Modes are int codes (kernel_src/ltx/params.h): statistic 1 rms, 2 layer; rounding 0 fp32, 1 eager, 2 (norms) eager
// with the weight before the rounding; activation 0 gelu,
// 1 tanh gelu, 2 silu. `x` allocates its results, `x_out` writes into its leading arguments. There is no autograd
// kernel: it would cost every call; the Python functions send inputs that need a gradient through _autograd.py.
#include "torch_binding.h"

#include "registration.h"
#include "stable_abi.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
#define LTX_NORM_ARGS \
  "Tensor input, Tensor? weight, Tensor? bias, float eps, float weight_offset, int statistic, int rounding"
  ops.def("norm(" LTX_NORM_ARGS ") -> Tensor");
  ops.def("norm_out(Tensor(a!) out, " LTX_NORM_ARGS ") -> ()");

#define LTX_ADALN_ARGS                                                                                           \
  "Tensor input, Tensor? weight, Tensor? bias, Tensor scale, Tensor? shift, Tensor? gate, Tensor? scale_table, " \
  "Tensor? shift_table, Tensor? gate_table, Tensor? index, float eps, int statistic, int rounding"
  ops.def("adaln_norm(" LTX_ADALN_ARGS ") -> Tensor");
  ops.def("adaln_norm_out(Tensor(a!) out, " LTX_ADALN_ARGS ") -> ()");

#define LTX_RESIDUAL_ARGS                                                                                         \
  "Tensor input, Tensor residual, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, "     \
  "Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, Tensor? index, float eps, float weight_offset, " \
  "int statistic, int rounding"
  ops.def("residual_norm(" LTX_RESIDUAL_ARGS ") -> (Tensor, Tensor)");
  ops.def("residual_norm_out(Tensor(a!) out, Tensor(b!) residual_out, " LTX_RESIDUAL_ARGS ") -> ()");

#define LTX_GATED_RESIDUAL_ARGS \
  "Tensor input, Tensor residual, Tensor gate, Tensor? gate_table, Tensor? index, int rounding"
  ops.def("gated_residual(" LTX_GATED_RESIDUAL_ARGS ") -> Tensor");
  ops.def("gated_residual_out(Tensor(a!) out, " LTX_GATED_RESIDUAL_ARGS ") -> ()");

#define LTX_NORM_RESIDUAL_ARGS                                                                                        \
  "Tensor input, Tensor residual, Tensor? weight, Tensor? gate, Tensor? gate_table, Tensor? index, float eps, float " \
  "weight_offset, int rounding"
  ops.def("norm_residual(" LTX_NORM_RESIDUAL_ARGS ") -> Tensor");
  ops.def("norm_residual_out(Tensor(a!) out, " LTX_NORM_RESIDUAL_ARGS ") -> ()");

#define LTX_NORM_RESIDUAL_NORM_ARGS                                                                          \
  "Tensor input, Tensor residual, Tensor? gate, Tensor? weight1, Tensor? weight2, Tensor? scale, "           \
  "Tensor? shift, Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, Tensor? index, float eps1, " \
  "float eps2, float weight_offset, int rounding"
  ops.def("norm_residual_norm(" LTX_NORM_RESIDUAL_NORM_ARGS ") -> (Tensor, Tensor)");
  ops.def("norm_residual_norm_out(Tensor(a!) out, Tensor(b!) residual_out, " LTX_NORM_RESIDUAL_NORM_ARGS ") -> ()");

#define LTX_PAIR_ARGS                                                                                             \
  "Tensor input, Tensor? weight, Tensor? bias, Tensor scale, Tensor? shift, Tensor scale2, Tensor? "              \
  "shift2, Tensor? scale_table, Tensor? shift_table, Tensor? scale2_table, Tensor? shift2_table, Tensor? index, " \
  "float eps, int statistic, int rounding"
  ops.def("adaln_norm_pair(" LTX_PAIR_ARGS ") -> (Tensor, Tensor)");
  ops.def("adaln_norm_pair_out(Tensor(a!) out, Tensor(b!) out2, " LTX_PAIR_ARGS ") -> ()");

#define LTX_RESIDUAL_PAIR_ARGS                                                                           \
  "Tensor input, Tensor residual, Tensor? gate, Tensor? weight, Tensor? bias, Tensor scale, Tensor? "    \
  "shift, Tensor scale2, Tensor? shift2, Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, " \
  "Tensor? scale2_table, Tensor? shift2_table, Tensor? index, float eps, int statistic, int rounding"
  ops.def("residual_norm_pair(" LTX_RESIDUAL_PAIR_ARGS ") -> (Tensor, Tensor, Tensor)");
  ops.def("residual_norm_pair_out(Tensor(a!) out, Tensor(b!) out2, Tensor(c!) residual_out, " LTX_RESIDUAL_PAIR_ARGS
          ") -> ()");

#define LTX_GLU_ARGS "Tensor input, Tensor? up, int activation, bool gate_first, int rounding"
  ops.def("glu(" LTX_GLU_ARGS ") -> Tensor");
  ops.def("glu_out(Tensor(a!) out, " LTX_GLU_ARGS ") -> ()");

#define LTX_CLAMPED_ARGS "Tensor input, Tensor? up, float alpha, float limit, bool interleaved, int rounding"
  ops.def("swiglu_clamped(" LTX_CLAMPED_ARGS ") -> Tensor");
  ops.def("swiglu_clamped_out(Tensor(a!) out, " LTX_CLAMPED_ARGS ") -> ()");

#define LTX_GATE_HEADS_ARGS "Tensor input, Tensor logits, float scale, int rounding"
  ops.def("gate_heads(" LTX_GATE_HEADS_ARGS ") -> Tensor");
  ops.def("gate_heads_out(Tensor(a!) out, " LTX_GATE_HEADS_ARGS ") -> ()");

#define LTX_GELU_ARGS "Tensor input, Tensor? bias, int activation, int rounding"
  ops.def("gelu(" LTX_GELU_ARGS ") -> Tensor");
  ops.def("gelu_out(Tensor(a!) out, " LTX_GELU_ARGS ") -> ()");

  // The gradients of the arguments, given that of the result. A packed input has one like it; gate and up have theirs
  // side by side, [2, ...]. In the norms `input` is what the norm read: the op's input or its residual_out; `branch` is
  // the input of an op that normalises it on its own. Two results are the gradients of input and residual.
  ops.def(
      "norm_backward(Tensor grad, Tensor input, Tensor? grad2, Tensor? grad_residual, Tensor? weight, Tensor? scale, "
      "Tensor? gate, Tensor? scale2, Tensor? scale_table, Tensor? gate_table, Tensor? scale2_table, Tensor? index, "
      "float eps, float weight_offset, int statistic) -> Tensor");
  ops.def(
      "residual_norm_backward(Tensor grad, Tensor input, Tensor gate, Tensor? grad2, Tensor? grad_residual, "
      "Tensor? weight, Tensor? scale, Tensor? scale2, Tensor? gate_table, Tensor? scale_table, Tensor? scale2_table, "
      "Tensor? index, float eps, float weight_offset, int statistic) -> (Tensor, Tensor)");
  ops.def("gated_residual_backward(Tensor grad, Tensor gate, Tensor? gate_table, Tensor? index) -> Tensor");
  ops.def(
      "norm_residual_norm_backward(Tensor grad, Tensor input, Tensor branch, Tensor? grad_residual, Tensor? gate, "
      "Tensor? weight1, Tensor? weight2, Tensor? scale, Tensor? gate_table, Tensor? scale_table, Tensor? index, "
      "float eps1, float eps2, float weight_offset) -> (Tensor, Tensor)");
  // Sums of grad * n(input) and of grad over the rows of each group, [groups, H] in float32, for [groups, rows, H]. n
  // is the norm without a weight, or nothing.
  ops.def("row_sums(Tensor grad, Tensor input, float eps, int statistic) -> (Tensor, Tensor)");
  ops.def("glu_backward(Tensor grad, Tensor input, Tensor? up, int activation, bool gate_first) -> Tensor");
  ops.def(
      "swiglu_clamped_backward(Tensor grad, Tensor input, Tensor? up, float alpha, float limit, bool interleaved) -> "
      "Tensor");
  ops.def("gelu_backward(Tensor grad, Tensor input, Tensor? bias, int activation) -> Tensor");
  ops.def("gate_heads_backward(Tensor grad, Tensor input, Tensor logits, float scale) -> (Tensor, Tensor)");

  ops.def(
      "apply_rotary_backward(Tensor grad, Tensor cos, Tensor sin, int sequence_dim, int rotary_dim, bool interleaved) "
      "-> Tensor");
  ops.def(
      "apply_rotary_qk_backward(Tensor grad_query, Tensor grad_key, Tensor cos, Tensor sin, int sequence_dim, "
      "int rotary_dim, bool interleaved) -> (Tensor, Tensor)");
  ops.def(
      "qk_norm_rope_backward(Tensor grad_query, Tensor grad_key, Tensor query, Tensor key, Tensor? query_weight, "
      "Tensor? key_weight, Tensor cos, Tensor sin, Tensor? key_cos, Tensor? key_sin, float eps, float key_eps, "
      "float weight_offset, int statistic, bool across_heads, int rotary_dim, bool interleaved) -> (Tensor, Tensor)");

  // Quantised results: values (e4m3), scales (fp32, one a row) and, where there is one, the residual stream. They are
  // always new. Statistic 0 quantises the row itself.
  ops.def(
      "norm_quant(Tensor input, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, Tensor? scale_table, "
      "Tensor? shift_table, Tensor? static_scale, Tensor? index, float eps, float weight_offset, int statistic) -> "
      "(Tensor, Tensor)");
  ops.def(
      "residual_norm_quant(Tensor input, Tensor residual, Tensor? gate, Tensor? weight, Tensor? bias, Tensor? scale, "
      "Tensor? shift, Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, Tensor? static_scale, "
      "Tensor? index, float eps, float weight_offset, int statistic) -> (Tensor, Tensor, Tensor)");
  ops.def(
      "norm_residual_norm_quant(Tensor input, Tensor residual, Tensor? gate, Tensor? weight1, Tensor? "
      "weight2, Tensor? scale, Tensor? shift, Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, "
      "Tensor? static_scale, Tensor? index, float eps1, float eps2, float weight_offset) -> (Tensor, Tensor, Tensor)");
  ops.def(
      "adaln_norm_pair_quant(Tensor input, Tensor? weight, Tensor? bias, Tensor scale, Tensor? shift, "
      "Tensor scale2, Tensor? shift2, Tensor? scale_table, Tensor? shift_table, Tensor? scale2_table, "
      "Tensor? shift2_table, Tensor? static_scale, Tensor? index, float eps, int statistic) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  ops.def(
      "residual_norm_pair_quant(Tensor input, Tensor residual, Tensor? gate, Tensor? weight, Tensor? bias, "
      "Tensor scale, Tensor? shift, Tensor scale2, Tensor? shift2, Tensor? gate_table, Tensor? scale_table, "
      "Tensor? shift_table, Tensor? scale2_table, Tensor? shift2_table, Tensor? static_scale, Tensor? index, "
      "float eps, int statistic) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  ops.def(
      "glu_quant(Tensor input, Tensor? up, Tensor? prefix, Tensor? static_scale, int activation, bool gate_first) -> "
      "(Tensor, Tensor)");
  ops.def(
      "gelu_quant(Tensor input, Tensor? bias, Tensor? prefix, Tensor? static_scale, int activation) -> "
      "(Tensor, Tensor)");
  ops.def("gate_heads_quant(Tensor input, Tensor logits, Tensor? static_scale, float scale) -> (Tensor, Tensor)");

  // Compiled for CUDA alone.
#define LTX_SCALED_LINEAR_ARGS                                                                        \
  "Tensor values, Tensor scales, Tensor weight, Tensor weight_scales, Tensor? bias, Tensor? addend, " \
  "bool use_fast_accum"
  ops.def("scaled_linear(" LTX_SCALED_LINEAR_ARGS ") -> Tensor");
  ops.def("scaled_linear_out(Tensor(a!) out, " LTX_SCALED_LINEAR_ARGS ") -> ()");
  ops.def("weight_only_linear(Tensor input, Tensor weight, Tensor weight_scales, Tensor? bias) -> Tensor");

#define LTX_ROPE_ARGS \
  "Tensor query, Tensor key, Tensor? positions, SymInt[] grid, int[] rope_dims, float[] theta_base, bool interleaved"
  ops.def("rope(" LTX_ROPE_ARGS ") -> (Tensor, Tensor)");
  ops.def("rope_out(Tensor(a!) query_out, Tensor(b!) key_out, " LTX_ROPE_ARGS ") -> ()");

#define LTX_ROTARY_ARGS "Tensor cos, Tensor sin, int sequence_dim, int rotary_dim, bool interleaved, int rounding"
  ops.def("apply_rotary(Tensor input, " LTX_ROTARY_ARGS ") -> Tensor");
  ops.def("apply_rotary_out(Tensor(a!) out, Tensor input, " LTX_ROTARY_ARGS ") -> ()");
  ops.def("apply_rotary_qk(Tensor query, Tensor key, " LTX_ROTARY_ARGS ") -> (Tensor, Tensor)");
  ops.def("apply_rotary_qk_out(Tensor(a!) query_out, Tensor(b!) key_out, Tensor query, Tensor key, " LTX_ROTARY_ARGS
          ") -> ()");

#define LTX_QK_NORM_ROPE_ARGS                                                                                  \
  "Tensor query, Tensor key, Tensor? query_weight, Tensor? key_weight, Tensor? query_bias, Tensor? key_bias, " \
  "Tensor cos, Tensor sin, Tensor? key_cos, Tensor? key_sin, float eps, float key_eps, float weight_offset, "  \
  "int statistic, bool across_heads, bool cast_before_weight, int rotary_dim, bool interleaved, int rounding"
  ops.def("qk_norm_rope(" LTX_QK_NORM_ROPE_ARGS ") -> (Tensor, Tensor)");
  ops.def("qk_norm_rope_out(Tensor(a!) query_out, Tensor(b!) key_out, " LTX_QK_NORM_ROPE_ARGS ") -> ()");

#define LTX_CROSS_ATTENTION_ARGS                                                                                \
  "Tensor query, Tensor key, Tensor value, Tensor? query_weight, Tensor? key_weight, Tensor? mask, float eps, " \
  "float? scale"
  ops.def("qk_norm_cross_attention(" LTX_CROSS_ATTENTION_ARGS ") -> Tensor");
  ops.def("qk_norm_cross_attention_out(Tensor(a!) out, " LTX_CROSS_ATTENTION_ARGS ") -> ()");

  // Compiled for CUDA alone: of 16-bit heads of 64 and 128 columns, on the GPUs that has_attention knows.
#define LTX_ATTENTION_ARGS \
  "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? key_lengths, float? scale, bool is_causal"
  ops.def("attention(" LTX_ATTENTION_ARGS ") -> Tensor");
  ops.def("attention_out(Tensor(a!) out, " LTX_ATTENTION_ARGS ") -> ()");
  ops.def("attention_lse(" LTX_ATTENTION_ARGS ") -> (Tensor, Tensor)");
  ops.def("attention_lse_out(Tensor(a!) out, Tensor(b!) lse, " LTX_ATTENTION_ARGS ") -> ()");
#define LTX_ATTENTION_INT8_ARGS "Tensor query, Tensor key, Tensor value, Tensor? key_lengths, float? scale"
  ops.def("attention_int8(" LTX_ATTENTION_INT8_ARGS ") -> Tensor");
  ops.def("attention_int8_out(Tensor(a!) out, " LTX_ATTENTION_INT8_ARGS ") -> ()");
  ops.def("has_attention(int device) -> bool");

  // Video tensors in channels-last memory. norm: 0 none, 1 rms, 2 rms with each step rounded, 3 l2
  // (kernel_src/ltx/channels_last.h). padding: frames before, frames after, 1 for reflected edges.
#define LTX_CHANNEL_NORM_ARGS                                                                                  \
  "Tensor input, Tensor? bias, Tensor? noise, Tensor? noise_scale, Tensor? residual, Tensor? weight, Tensor? " \
  "scale, Tensor? shift, Tensor? scale_table, Tensor? shift_table, float eps, int norm, bool silu, int[] padding"
  ops.def("channel_norm(" LTX_CHANNEL_NORM_ARGS ") -> Tensor");
  ops.def("channel_norm_out(Tensor(a!) out, " LTX_CHANNEL_NORM_ARGS ") -> ()");
  ops.def("channel_norm_residual(" LTX_CHANNEL_NORM_ARGS ") -> (Tensor, Tensor)");
  ops.def("channel_norm_residual_out(Tensor(a!) out, Tensor(b!) residual_out, " LTX_CHANNEL_NORM_ARGS ") -> ()");

#define LTX_PIXEL_SHUFFLE_ARGS "Tensor input, Tensor? bias, Tensor? residual, int[] upscale, int skip_frames"
  ops.def("pixel_shuffle(" LTX_PIXEL_SHUFFLE_ARGS ") -> Tensor");
  ops.def("pixel_shuffle_out(Tensor(a!) out, " LTX_PIXEL_SHUFFLE_ARGS ") -> ()");

#define LTX_UNPATCHIFY_ARGS "Tensor input, Tensor? bias, int patch_size, bool clamp"
  ops.def("unpatchify(" LTX_UNPATCHIFY_ARGS ") -> Tensor");
  ops.def("unpatchify_out(Tensor(a!) out, " LTX_UNPATCHIFY_ARGS ") -> ()");

  // Images and videos in channels-last memory (kernel_src/ltx/group_norm.h).
#define LTX_HIDDEN_ARGS "Tensor input, Tensor? bias, Tensor? residual, Tensor? residual_bias"
#define LTX_GROUP_NORM_ARGS LTX_HIDDEN_ARGS ", Tensor? weight, Tensor? bias_norm, int groups, float eps, bool silu"
  ops.def("group_norm(" LTX_GROUP_NORM_ARGS ") -> Tensor");
  ops.def("group_norm_out(Tensor(a!) out, " LTX_GROUP_NORM_ARGS ") -> ()");
  ops.def("group_norm_residual(" LTX_GROUP_NORM_ARGS ") -> (Tensor, Tensor)");
  ops.def("group_norm_residual_out(Tensor(a!) out, Tensor(b!) residual_out, " LTX_GROUP_NORM_ARGS ") -> ()");

#define LTX_UPSAMPLE_ARGS LTX_HIDDEN_ARGS ", int[] scale"
  ops.def("upsample_nearest(" LTX_UPSAMPLE_ARGS ") -> Tensor");
  ops.def("upsample_nearest_out(Tensor(a!) out, " LTX_UPSAMPLE_ARGS ") -> ()");
}

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#elif defined(CPU_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#else
#error "Compile with -DCUDA_KERNEL or -DCPU_KERNEL: a variant has the kernels of one backend."
#endif
#define LTX_IMPL(name)                          \
  ops.impl(#name, TORCH_BOX(&ltx::host::name)); \
  ops.impl(#name "_out", TORCH_BOX(&ltx::host::name##_out))
  LTX_IMPL(norm);
  LTX_IMPL(adaln_norm);
  LTX_IMPL(residual_norm);
  LTX_IMPL(gated_residual);
  LTX_IMPL(norm_residual);
  LTX_IMPL(norm_residual_norm);
  LTX_IMPL(adaln_norm_pair);
  LTX_IMPL(residual_norm_pair);
  LTX_IMPL(glu);
  LTX_IMPL(swiglu_clamped);
  LTX_IMPL(gate_heads);
  LTX_IMPL(gelu);
  LTX_IMPL(rope);
  LTX_IMPL(apply_rotary);
  LTX_IMPL(apply_rotary_qk);
  LTX_IMPL(qk_norm_rope);
  LTX_IMPL(qk_norm_cross_attention);
  LTX_IMPL(channel_norm);
  LTX_IMPL(channel_norm_residual);
  LTX_IMPL(pixel_shuffle);
  LTX_IMPL(unpatchify);
  LTX_IMPL(group_norm);
  LTX_IMPL(group_norm_residual);
  LTX_IMPL(upsample_nearest);
  ops.impl("norm_quant", TORCH_BOX(&ltx::host::norm_quant));
  ops.impl("residual_norm_quant", TORCH_BOX(&ltx::host::residual_norm_quant));
  ops.impl("norm_residual_norm_quant", TORCH_BOX(&ltx::host::norm_residual_norm_quant));
  ops.impl("adaln_norm_pair_quant", TORCH_BOX(&ltx::host::adaln_norm_pair_quant));
  ops.impl("residual_norm_pair_quant", TORCH_BOX(&ltx::host::residual_norm_pair_quant));
  ops.impl("glu_quant", TORCH_BOX(&ltx::host::glu_quant));
  ops.impl("gelu_quant", TORCH_BOX(&ltx::host::gelu_quant));
  ops.impl("gate_heads_quant", TORCH_BOX(&ltx::host::gate_heads_quant));
  ops.impl("norm_backward", TORCH_BOX(&ltx::host::norm_backward));
  ops.impl("residual_norm_backward", TORCH_BOX(&ltx::host::residual_norm_backward));
  ops.impl("gated_residual_backward", TORCH_BOX(&ltx::host::gated_residual_backward));
  ops.impl("norm_residual_norm_backward", TORCH_BOX(&ltx::host::norm_residual_norm_backward));
  ops.impl("apply_rotary_backward", TORCH_BOX(&ltx::host::apply_rotary_backward));
  ops.impl("apply_rotary_qk_backward", TORCH_BOX(&ltx::host::apply_rotary_qk_backward));
  ops.impl("qk_norm_rope_backward", TORCH_BOX(&ltx::host::qk_norm_rope_backward));
  ops.impl("row_sums", TORCH_BOX(&ltx::host::row_sums));
  ops.impl("glu_backward", TORCH_BOX(&ltx::host::glu_backward));
  ops.impl("swiglu_clamped_backward", TORCH_BOX(&ltx::host::swiglu_clamped_backward));
  ops.impl("gelu_backward", TORCH_BOX(&ltx::host::gelu_backward));
  ops.impl("gate_heads_backward", TORCH_BOX(&ltx::host::gate_heads_backward));
#ifdef CUDA_KERNEL
  LTX_IMPL(scaled_linear);
  ops.impl("weight_only_linear", TORCH_BOX(&ltx::host::weight_only_linear));
  LTX_IMPL(attention);
  LTX_IMPL(attention_lse);
  LTX_IMPL(attention_int8);
#endif
}

#ifdef CUDA_KERNEL
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {  // it takes no tensor
  ops.impl("has_attention", TORCH_BOX(&ltx::host::has_attention));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
