// The ops as C++ functions, one per schema of torch_binding.cpp. Defined in norm.cpp, row_sums.cpp, rope.cpp,
// attention.cpp, glu.cpp, quant.cpp, linear.cpp and channels_last.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "stable_abi.h"

namespace ltx::host {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

void norm_out(const Tensor& out, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
              double eps, double weight_offset, int64_t statistic, int64_t rounding);
Tensor norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
            double weight_offset, int64_t statistic, int64_t rounding);
void adaln_norm_out(const Tensor& out, const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                    const Tensor& scale, const OptionalTensor& shift, const OptionalTensor& gate,
                    const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                    const OptionalTensor& gate_table, const OptionalTensor& index, double eps, int64_t statistic,
                    int64_t rounding);
Tensor adaln_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& scale,
                  const OptionalTensor& shift, const OptionalTensor& gate, const OptionalTensor& scale_table,
                  const OptionalTensor& shift_table, const OptionalTensor& gate_table, const OptionalTensor& index,
                  double eps, int64_t statistic, int64_t rounding);
void residual_norm_out(const Tensor& out, const Tensor& residual_out, const Tensor& input, const Tensor& residual,
                       const OptionalTensor& gate, const OptionalTensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& gate_table,
                       const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                       const OptionalTensor& index, double eps, double weight_offset, int64_t statistic,
                       int64_t rounding);
std::tuple<Tensor, Tensor> residual_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& gate,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& scale, const OptionalTensor& shift,
                                         const OptionalTensor& gate_table, const OptionalTensor& scale_table,
                                         const OptionalTensor& shift_table, const OptionalTensor& index, double eps,
                                         double weight_offset, int64_t statistic, int64_t rounding);
void gated_residual_out(const Tensor& out, const Tensor& input, const Tensor& residual, const Tensor& gate,
                        const OptionalTensor& gate_table, const OptionalTensor& index, int64_t rounding);
Tensor gated_residual(const Tensor& input, const Tensor& residual, const Tensor& gate, const OptionalTensor& gate_table,
                      const OptionalTensor& index, int64_t rounding);
Tensor apply_rotary_backward(const Tensor& grad, const Tensor& cos, const Tensor& sin, int64_t sequence_dim,
                             int64_t rotary_dim, bool interleaved);
std::tuple<Tensor, Tensor> apply_rotary_qk_backward(const Tensor& grad_query, const Tensor& grad_key, const Tensor& cos,
                                                    const Tensor& sin, int64_t sequence_dim, int64_t rotary_dim,
                                                    bool interleaved);
std::tuple<Tensor, Tensor> qk_norm_rope_backward(const Tensor& grad_query, const Tensor& grad_key, const Tensor& query,
                                                 const Tensor& key, const OptionalTensor& query_weight,
                                                 const OptionalTensor& key_weight, const Tensor& cos, const Tensor& sin,
                                                 const OptionalTensor& key_cos, const OptionalTensor& key_sin,
                                                 double eps, double key_eps, double weight_offset, int64_t statistic,
                                                 bool across_heads, int64_t rotary_dim, bool interleaved);
void apply_rotary_out(const Tensor& out, const Tensor& input, const Tensor& cos, const Tensor& sin,
                      int64_t sequence_dim, int64_t rotary_dim, bool interleaved, int64_t rounding);
Tensor apply_rotary(const Tensor& input, const Tensor& cos, const Tensor& sin, int64_t sequence_dim, int64_t rotary_dim,
                    bool interleaved, int64_t rounding);
void apply_rotary_qk_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query, const Tensor& key,
                         const Tensor& cos, const Tensor& sin, int64_t sequence_dim, int64_t rotary_dim,
                         bool interleaved, int64_t rounding);
std::tuple<Tensor, Tensor> apply_rotary_qk(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin,
                                           int64_t sequence_dim, int64_t rotary_dim, bool interleaved,
                                           int64_t rounding);
void qk_norm_rope_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query, const Tensor& key,
                      const OptionalTensor& query_weight, const OptionalTensor& key_weight,
                      const OptionalTensor& query_bias, const OptionalTensor& key_bias, const Tensor& cos,
                      const Tensor& sin, const OptionalTensor& key_cos, const OptionalTensor& key_sin, double eps,
                      double key_eps, double weight_offset, int64_t statistic, bool across_heads,
                      bool cast_before_weight, int64_t rotary_dim, bool interleaved, int64_t rounding);
std::tuple<Tensor, Tensor> qk_norm_rope(const Tensor& query, const Tensor& key, const OptionalTensor& query_weight,
                                        const OptionalTensor& key_weight, const OptionalTensor& query_bias,
                                        const OptionalTensor& key_bias, const Tensor& cos, const Tensor& sin,
                                        const OptionalTensor& key_cos, const OptionalTensor& key_sin, double eps,
                                        double key_eps, double weight_offset, int64_t statistic, bool across_heads,
                                        bool cast_before_weight, int64_t rotary_dim, bool interleaved,
                                        int64_t rounding);
void qk_norm_cross_attention_out(const Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value,
                                 const OptionalTensor& query_weight, const OptionalTensor& key_weight,
                                 const OptionalTensor& mask, double eps, std::optional<double> scale);
Tensor qk_norm_cross_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptionalTensor& query_weight, const OptionalTensor& key_weight,
                               const OptionalTensor& mask, double eps, std::optional<double> scale);
void attention_out(const Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value,
                   const OptionalTensor& mask, const OptionalTensor& key_lengths, std::optional<double> scale,
                   bool is_causal);
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                 const OptionalTensor& key_lengths, std::optional<double> scale, bool is_causal);
void attention_lse_out(const Tensor& out, const Tensor& lse, const Tensor& query, const Tensor& key,
                       const Tensor& value, const OptionalTensor& mask, const OptionalTensor& key_lengths,
                       std::optional<double> scale, bool is_causal);
std::tuple<Tensor, Tensor> attention_lse(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const OptionalTensor& mask, const OptionalTensor& key_lengths,
                                         std::optional<double> scale, bool is_causal);
void attention_int8_out(const Tensor& out, const Tensor& query, const Tensor& key, const Tensor& value,
                        const OptionalTensor& key_lengths, std::optional<double> scale);
Tensor attention_int8(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& key_lengths,
                      std::optional<double> scale);
bool has_attention(int64_t device);
void rope_out(const Tensor& query_out, const Tensor& key_out, const Tensor& query, const Tensor& key,
              const OptionalTensor& positions, std::vector<int64_t> grid, std::vector<int64_t> axis_dims,
              std::vector<double> theta, bool interleaved);
std::tuple<Tensor, Tensor> rope(const Tensor& query, const Tensor& key, const OptionalTensor& positions,
                                std::vector<int64_t> grid, std::vector<int64_t> axis_dims, std::vector<double> theta,
                                bool interleaved);
Tensor norm_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& grad2,
                     const OptionalTensor& grad_residual, const OptionalTensor& weight, const OptionalTensor& scale,
                     const OptionalTensor& gate, const OptionalTensor& scale2, const OptionalTensor& scale_table,
                     const OptionalTensor& gate_table, const OptionalTensor& scale2_table, const OptionalTensor& index,
                     double eps, double weight_offset, int64_t statistic);
std::tuple<Tensor, Tensor> residual_norm_backward(const Tensor& grad, const Tensor& input, const Tensor& gate,
                                                  const OptionalTensor& grad2, const OptionalTensor& grad_residual,
                                                  const OptionalTensor& weight, const OptionalTensor& scale,
                                                  const OptionalTensor& scale2, const OptionalTensor& gate_table,
                                                  const OptionalTensor& scale_table, const OptionalTensor& scale2_table,
                                                  const OptionalTensor& index, double eps, double weight_offset,
                                                  int64_t statistic);
Tensor gated_residual_backward(const Tensor& grad, const Tensor& gate, const OptionalTensor& gate_table,
                               const OptionalTensor& index);
std::tuple<Tensor, Tensor> norm_residual_norm_backward(const Tensor& grad, const Tensor& input, const Tensor& branch,
                                                       const OptionalTensor& grad_residual, const OptionalTensor& gate,
                                                       const OptionalTensor& weight1, const OptionalTensor& weight2,
                                                       const OptionalTensor& scale, const OptionalTensor& gate_table,
                                                       const OptionalTensor& scale_table, const OptionalTensor& index,
                                                       double eps1, double eps2, double weight_offset);
std::tuple<Tensor, Tensor> row_sums(const Tensor& grad, const Tensor& input, double eps, int64_t statistic);
Tensor glu_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& up, int64_t activation,
                    bool gate_first);
Tensor swiglu_clamped_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& up, double alpha,
                               double limit, bool interleaved);
Tensor gelu_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& bias, int64_t activation);
std::tuple<Tensor, Tensor> gate_heads_backward(const Tensor& grad, const Tensor& input, const Tensor& logits,
                                               double scale);
void glu_out(const Tensor& out, const Tensor& input, const OptionalTensor& up, int64_t activation, bool gate_first,
             int64_t rounding);
Tensor glu(const Tensor& input, const OptionalTensor& up, int64_t activation, bool gate_first, int64_t rounding);
void swiglu_clamped_out(const Tensor& out, const Tensor& input, const OptionalTensor& up, double alpha, double limit,
                        bool interleaved, int64_t rounding);
Tensor swiglu_clamped(const Tensor& input, const OptionalTensor& up, double alpha, double limit, bool interleaved,
                      int64_t rounding);
void gate_heads_out(const Tensor& out, const Tensor& input, const Tensor& logits, double scale, int64_t rounding);
Tensor gate_heads(const Tensor& input, const Tensor& logits, double scale, int64_t rounding);
void gelu_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias, int64_t activation, int64_t rounding);
Tensor gelu(const Tensor& input, const OptionalTensor& bias, int64_t activation, int64_t rounding);
std::tuple<Tensor, Tensor> norm_quant(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                      const OptionalTensor& scale, const OptionalTensor& shift,
                                      const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                                      const OptionalTensor& static_scale, const OptionalTensor& index, double eps,
                                      double weight_offset, int64_t statistic);
std::tuple<Tensor, Tensor, Tensor> residual_norm_quant(const Tensor& input, const Tensor& residual,
                                                       const OptionalTensor& gate, const OptionalTensor& weight,
                                                       const OptionalTensor& bias, const OptionalTensor& scale,
                                                       const OptionalTensor& shift, const OptionalTensor& gate_table,
                                                       const OptionalTensor& scale_table,
                                                       const OptionalTensor& shift_table,
                                                       const OptionalTensor& static_scale, const OptionalTensor& index,
                                                       double eps, double weight_offset, int64_t statistic);
std::tuple<Tensor, Tensor> glu_quant(const Tensor& input, const OptionalTensor& up, const OptionalTensor& prefix,
                                     const OptionalTensor& static_scale, int64_t activation, bool gate_first);
std::tuple<Tensor, Tensor> gelu_quant(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& prefix,
                                      const OptionalTensor& static_scale, int64_t activation);
std::tuple<Tensor, Tensor> gate_heads_quant(const Tensor& input, const Tensor& logits,
                                            const OptionalTensor& static_scale, double scale);
void scaled_linear_out(const Tensor& out, const Tensor& values, const Tensor& scales, const Tensor& weight,
                       const Tensor& weight_scales, const OptionalTensor& bias, const OptionalTensor& addend,
                       bool use_fast_accum);
Tensor scaled_linear(const Tensor& values, const Tensor& scales, const Tensor& weight, const Tensor& weight_scales,
                     const OptionalTensor& bias, const OptionalTensor& addend, bool use_fast_accum);
Tensor weight_only_linear(const Tensor& input, const Tensor& weight, const Tensor& weight_scales,
                          const OptionalTensor& bias);
Tensor channel_norm(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& noise,
                    const OptionalTensor& noise_scale, const OptionalTensor& residual, const OptionalTensor& weight,
                    const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& scale_table,
                    const OptionalTensor& shift_table, double eps, int64_t norm, bool silu,
                    std::vector<int64_t> padding);
void channel_norm_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias, const OptionalTensor& noise,
                      const OptionalTensor& noise_scale, const OptionalTensor& residual, const OptionalTensor& weight,
                      const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& scale_table,
                      const OptionalTensor& shift_table, double eps, int64_t norm, bool silu,
                      std::vector<int64_t> padding);
std::tuple<Tensor, Tensor> channel_norm_residual(const Tensor& input, const OptionalTensor& bias,
                                                 const OptionalTensor& noise, const OptionalTensor& noise_scale,
                                                 const OptionalTensor& residual, const OptionalTensor& weight,
                                                 const OptionalTensor& scale, const OptionalTensor& shift,
                                                 const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                                                 double eps, int64_t norm, bool silu, std::vector<int64_t> padding);
void channel_norm_residual_out(const Tensor& out, const Tensor& residual_out, const Tensor& input,
                               const OptionalTensor& bias, const OptionalTensor& noise,
                               const OptionalTensor& noise_scale, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& scale, const OptionalTensor& shift,
                               const OptionalTensor& scale_table, const OptionalTensor& shift_table, double eps,
                               int64_t norm, bool silu, std::vector<int64_t> padding);
Tensor pixel_shuffle(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                     std::vector<int64_t> upscale, int64_t skip_frames);
void pixel_shuffle_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias,
                       const OptionalTensor& residual, std::vector<int64_t> upscale, int64_t skip_frames);
Tensor unpatchify(const Tensor& input, const OptionalTensor& bias, int64_t patch_size, bool clamp);
void unpatchify_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias, int64_t patch_size, bool clamp);

Tensor group_norm(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                  const OptionalTensor& residual_bias, const OptionalTensor& weight, const OptionalTensor& bias_norm,
                  int64_t groups, double eps, bool silu);
void group_norm_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                    const OptionalTensor& residual_bias, const OptionalTensor& weight, const OptionalTensor& bias_norm,
                    int64_t groups, double eps, bool silu);
std::tuple<Tensor, Tensor> group_norm_residual(const Tensor& input, const OptionalTensor& bias,
                                               const OptionalTensor& residual, const OptionalTensor& residual_bias,
                                               const OptionalTensor& weight, const OptionalTensor& bias_norm,
                                               int64_t groups, double eps, bool silu);
void group_norm_residual_out(const Tensor& out, const Tensor& residual_out, const Tensor& input,
                             const OptionalTensor& bias, const OptionalTensor& residual,
                             const OptionalTensor& residual_bias, const OptionalTensor& weight,
                             const OptionalTensor& bias_norm, int64_t groups, double eps, bool silu);
Tensor upsample_nearest(const Tensor& input, const OptionalTensor& bias, const OptionalTensor& residual,
                        const OptionalTensor& residual_bias, std::vector<int64_t> scale);
void upsample_nearest_out(const Tensor& out, const Tensor& input, const OptionalTensor& bias,
                          const OptionalTensor& residual, const OptionalTensor& residual_bias,
                          std::vector<int64_t> scale);

void norm_residual_out(const Tensor& out, const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                       const OptionalTensor& gate, const OptionalTensor& gate_table, const OptionalTensor& index,
                       double eps, double weight_offset, int64_t rounding);
Tensor norm_residual(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                     const OptionalTensor& gate, const OptionalTensor& gate_table, const OptionalTensor& index,
                     double eps, double weight_offset, int64_t rounding);
void norm_residual_norm_out(const Tensor& out, const Tensor& residual_out, const Tensor& input, const Tensor& residual,
                            const OptionalTensor& gate, const OptionalTensor& weight1, const OptionalTensor& weight2,
                            const OptionalTensor& scale, const OptionalTensor& shift, const OptionalTensor& gate_table,
                            const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                            const OptionalTensor& index, double eps1, double eps2, double weight_offset,
                            int64_t rounding);
std::tuple<Tensor, Tensor> norm_residual_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& gate,
                                              const OptionalTensor& weight1, const OptionalTensor& weight2,
                                              const OptionalTensor& scale, const OptionalTensor& shift,
                                              const OptionalTensor& gate_table, const OptionalTensor& scale_table,
                                              const OptionalTensor& shift_table, const OptionalTensor& index,
                                              double eps1, double eps2, double weight_offset, int64_t rounding);
void adaln_norm_pair_out(const Tensor& out, const Tensor& out2, const Tensor& input, const OptionalTensor& weight,
                         const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift,
                         const Tensor& scale2, const OptionalTensor& shift2, const OptionalTensor& scale_table,
                         const OptionalTensor& shift_table, const OptionalTensor& scale2_table,
                         const OptionalTensor& shift2_table, const OptionalTensor& index, double eps, int64_t statistic,
                         int64_t rounding);
std::tuple<Tensor, Tensor> adaln_norm_pair(const Tensor& input, const OptionalTensor& weight,
                                           const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift,
                                           const Tensor& scale2, const OptionalTensor& shift2,
                                           const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                                           const OptionalTensor& scale2_table, const OptionalTensor& shift2_table,
                                           const OptionalTensor& index, double eps, int64_t statistic,
                                           int64_t rounding);
void residual_norm_pair_out(const Tensor& out, const Tensor& out2, const Tensor& residual_out, const Tensor& input,
                            const Tensor& residual, const OptionalTensor& gate, const OptionalTensor& weight,
                            const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift,
                            const Tensor& scale2, const OptionalTensor& shift2, const OptionalTensor& gate_table,
                            const OptionalTensor& scale_table, const OptionalTensor& shift_table,
                            const OptionalTensor& scale2_table, const OptionalTensor& shift2_table,
                            const OptionalTensor& index, double eps, int64_t statistic, int64_t rounding);
std::tuple<Tensor, Tensor, Tensor> residual_norm_pair(
    const Tensor& input, const Tensor& residual, const OptionalTensor& gate, const OptionalTensor& weight,
    const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift, const Tensor& scale2,
    const OptionalTensor& shift2, const OptionalTensor& gate_table, const OptionalTensor& scale_table,
    const OptionalTensor& shift_table, const OptionalTensor& scale2_table, const OptionalTensor& shift2_table,
    const OptionalTensor& index, double eps, int64_t statistic, int64_t rounding);
std::tuple<Tensor, Tensor, Tensor> norm_residual_norm_quant(
    const Tensor& input, const Tensor& residual, const OptionalTensor& gate, const OptionalTensor& weight1,
    const OptionalTensor& weight2, const OptionalTensor& scale, const OptionalTensor& shift,
    const OptionalTensor& gate_table, const OptionalTensor& scale_table, const OptionalTensor& shift_table,
    const OptionalTensor& static_scale, const OptionalTensor& index, double eps1, double eps2, double weight_offset);
std::tuple<Tensor, Tensor, Tensor, Tensor> adaln_norm_pair_quant(
    const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, const Tensor& scale,
    const OptionalTensor& shift, const Tensor& scale2, const OptionalTensor& shift2, const OptionalTensor& scale_table,
    const OptionalTensor& shift_table, const OptionalTensor& scale2_table, const OptionalTensor& shift2_table,
    const OptionalTensor& static_scale, const OptionalTensor& index, double eps, int64_t statistic);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> residual_norm_pair_quant(
    const Tensor& input, const Tensor& residual, const OptionalTensor& gate, const OptionalTensor& weight,
    const OptionalTensor& bias, const Tensor& scale, const OptionalTensor& shift, const Tensor& scale2,
    const OptionalTensor& shift2, const OptionalTensor& gate_table, const OptionalTensor& scale_table,
    const OptionalTensor& shift_table, const OptionalTensor& scale2_table, const OptionalTensor& shift2_table,
    const OptionalTensor& static_scale, const OptionalTensor& index, double eps, int64_t statistic);

}  // namespace ltx::host
