// Two modulations of one norm: adaln_rmsnorm_pair, adaln_layernorm_pair, their gated_residual_ forms, and the
// quantising forms of all. norm.cu has the formula.
#include "ltx/row/kernel.cuh"

namespace ltx {
namespace {

template <typename T, Statistic S, Output O>
void dispatch_fusion(const NormParams& p, const Context& context) {
  p.residual.data ? launch<T, S, Fusion::kGatedPair, O>(p, context) : launch<T, S, Fusion::kPair, O>(p, context);
}

template <typename T, Statistic S>
void dispatch_output(const NormParams& p, const Context& context) {
  p.quantised.values ? dispatch_fusion<T, S, Output::kQuantised>(p, context)
                     : dispatch_fusion<T, S, Output::kRounded>(p, context);
}

}  // namespace

void norm_pair(const NormParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    p.statistic == Statistic::kLayer ? dispatch_output<T, Statistic::kLayer>(p, context)
                                     : dispatch_output<T, Statistic::kRms>(p, context);
  });
}

}  // namespace ltx
