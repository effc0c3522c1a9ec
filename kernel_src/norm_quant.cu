// The norm family with quantised results (norm.cu has the formula, quant.cu the other quantising ops).
//
//   scale  = max(amax(|out|) / 448, 2^-120) of the row, or one number for all rows
//   values = e4m3(out * (1 / scale))
//
// RMS norms alone have kernels of their own in quant.cu. On the row kernel they are as fast, but take more machine code
// (h200-layernorm-quant.json).
#include "ltx/row/kernel.cuh"

namespace ltx {

// quant.cu: rows without a norm, and norms by the root mean square.
void rows_quant(const NormParams& p, const Context& context);

namespace {

template <typename T>
void layernorm_quant(const NormParams& p, const Context& context) {
  constexpr Statistic kLayer = Statistic::kLayer;
  constexpr Output kQuantised = Output::kQuantised;
  if (p.residual.data) return launch<T, kLayer, Fusion::kGated, kQuantised>(p, context);
  const bool modulated = p.scale.value.data || p.shift.value.data;
  modulated ? launch<T, kLayer, Fusion::kModulate, kQuantised>(p, context)
            : launch<T, kLayer, Fusion::kPlain, kQuantised>(p, context);
}

}  // namespace

void norm_quant(const NormParams& p, const Context& context) {
  if (needs_split(p.rows)) return for_each_norm_slice(p, [&](const NormParams& q) { norm_quant(q, context); });
  if (p.norms_branch) return norm_branch(p, context);
  if (p.quantised2.values) return norm_pair(p, context);
  if (p.statistic != Statistic::kLayer) return rows_quant(p, context);
  dispatch(p.dtype, [&](auto zero) { layernorm_quant<decltype(zero)>(p, context); });
}

}  // namespace ltx
