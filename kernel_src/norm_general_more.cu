// The general kernel for a branch with a norm of its own, two outputs, and quantised ones.
#include "ltx/row/general.cuh"

namespace ltx {

void launch_general_more(const NormParams& p, const Geometry& g, dim3 block, uint32_t packed, const Context& context) {
  launch_general_kernel<true>(p, g, block, packed, context);
}

}  // namespace ltx
