// The general kernel for what most norms have; norm_general_more.cu has it for the others.
#include "ltx/row/general.cuh"

namespace ltx {

// Blocks of a cluster. Clusters came with compute capability 9.0; a newer GPU may still run code that was compiled for
// an older one.
int most_blocks(int device) {
  return once_a_device(device, [device] {
    const int major = device_attribute<cudaDevAttrComputeCapabilityMajor>(device);
    cudaFuncAttributes code{};
    if (major < 9 || cudaFuncGetAttributes(&code, norm_kernel_general<float, Statistic::kRms, false>) != cudaSuccess ||
        code.ptxVersion < 90) {
      return 1;
    }
    return major <= 10 ? kMaxBlocks : kPortableBlocks;
  });
}

void launch_general(const NormParams& p, const Geometry& g, dim3 block, uint32_t packed, const Context& context) {
  const bool more = p.norms_branch || p.out2.data || p.quantised.values;
  more ? launch_general_more(p, g, block, packed, context) : launch_general_kernel<false>(p, g, block, packed, context);
}

}  // namespace ltx
