// The norm family, rounded: rmsnorm, rmsnorm_residual, layernorm, adaln_rmsnorm, adaln_layernorm, adaln_zero,
// gated_residual, gated_residual_adaln_rmsnorm, gated_residual_adaln_layernorm. The others have files of their own,
// which are compiled side by side: norm_branch.cu, norm_pair.cu, norm_quant.cu, and norm_general.cu and
// norm_general_more.cu with the general kernel.
//
//   b   = input, or input * rstd * (weight_offset + branch_weight)
//   h   = residual + b * gate
//   n   = h * rstd * (weight_offset + weight)            rstd = 1 / sqrt(mean(h^2) + eps)
//       = (h - mean) * rstd * weight + bias              rstd = 1 / sqrt(mean((h - mean)^2) + eps)
//   out = (n * (1 + scale) + shift) * out_gate           residual_out = h
//
// ltx/params.h (NormParams) says which operands may be absent and how modulation tables enter. Every input is read once
// and every output written once; the row stays in registers between the statistic and the output (ltx/row/kernel.cuh).
#include "ltx/row/kernel.cuh"

namespace ltx {
namespace {

template <typename T, Statistic S>
void dispatch_fusion(const NormParams& p, const Context& context) {
  constexpr Output kRounded = Output::kRounded;
  const bool modulated = p.scale.value.data || p.shift.value.data || p.out_gate.value.data;
  if (p.residual.data) {
    return p.gate.value.data || modulated ? launch<T, S, Fusion::kGated, kRounded>(p, context)
                                          : launch<T, S, Fusion::kAdd, kRounded>(p, context);
  }
  if (modulated) return launch<T, S, Fusion::kModulate, kRounded>(p, context);
  return launch<T, S, Fusion::kPlain, kRounded>(p, context);
}

}  // namespace

void norm(const NormParams& p, const Context& context) {
  if (needs_split(p.rows)) return for_each_norm_slice(p, [&](const NormParams& q) { norm(q, context); });
  if (p.norms_branch) return norm_branch(p, context);
  if (p.out2.data) return norm_pair(p, context);
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.statistic == Statistic::kRms) return dispatch_fusion<T, Statistic::kRms>(p, context);
    if (p.statistic == Statistic::kLayer) return dispatch_fusion<T, Statistic::kLayer>(p, context);
    return launch<T, Statistic::kNone, Fusion::kGated, Output::kRounded>(p, context);
  });
}

}  // namespace ltx
