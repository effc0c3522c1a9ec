// A branch that is normalised before it is added to the residual stream: norm_residual, norm_gated_residual_norm and
// its quantising form. norm.cu has the formula.
#include "ltx/row/kernel.cuh"

namespace ltx {

void norm_branch(const NormParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.statistic == Statistic::kNone)
      return launch<T, Statistic::kNone, Fusion::kBranch, Output::kRounded>(p, context);
    p.quantised.values ? launch<T, Statistic::kRms, Fusion::kBranch, Output::kQuantised>(p, context)
                       : launch<T, Statistic::kRms, Fusion::kBranch, Output::kRounded>(p, context);
  });
}

}  // namespace ltx
