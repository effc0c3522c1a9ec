// The norm family with quantised results (norm.cu has the formula, quant.cu the other quantising ops).
//
//   scale  = max(amax(|out|) / 448, 2^-120) of the row, or one number for all rows
//   values = e4m3(out * (1 / scale))
#include "ltx/row/kernel.cuh"

namespace ltx {

// quant.cu: rows without a norm, and norms by the root mean square.
void rows_quant(const NormParams& p, const Context& context);

namespace {

template <typename T, Statistic S>
void dispatch_fusion(const NormParams& p, const Context& context) {
  constexpr Output kQuantised = Output::kQuantised;
  const bool modulated = p.scale.value.data || p.shift.value.data;
  if (p.residual.data) {
    if constexpr (S == Statistic::kRms) {
      if (!p.gate.value.data && !modulated) return launch<T, S, Fusion::kAdd, kQuantised>(p, context);
    }
    return launch<T, S, Fusion::kGated, kQuantised>(p, context);
  }
  modulated ? launch<T, S, Fusion::kModulate, kQuantised>(p, context)
            : launch<T, S, Fusion::kPlain, kQuantised>(p, context);
}

}  // namespace

void norm_quant(const NormParams& p, const Context& context) {
  if (needs_split(p.rows)) return for_each_norm_slice(p, [&](const NormParams& q) { norm_quant(q, context); });
  if (p.norms_branch) return norm_branch(p, context);
  if (p.quantised2.values) return norm_pair(p, context);
#ifdef LTX_UNIFIED_RMS
  if (p.statistic == Statistic::kRms) {
    return dispatch(p.dtype, [&](auto zero) { dispatch_fusion<decltype(zero), Statistic::kRms>(p, context); });
  }
#endif
  if (p.statistic != Statistic::kLayer) return rows_quant(p, context);
  dispatch(p.dtype, [&](auto zero) { dispatch_fusion<decltype(zero), Statistic::kLayer>(p, context); });
}

}  // namespace ltx
