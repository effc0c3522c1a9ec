// The norm family by its general CUDA kernel, on the host: stands in for kernel_src/cpu/norm.cpp
// (test_cuda_on_host.py).
#include "cuda_on_host.h"
#include "norm_general.cu"
#include "norm_general_more.cu"

namespace ltx {

void norm(const NormParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    bool fast = false, wide = false;
    const uint32_t packed = whole_pack_operands<T>(p, fast, wide);
    const Statistic statistic = p.statistic == Statistic::kLayer ? Statistic::kLayer : Statistic::kRms;
    const Geometry g =
        geometry(p.rows.width, kPackWidth<T>, statistic, Fusion::kPlain, Output::kRounded, most_blocks(0));
    const int rows = g.threads > 32 ? 1 : kShortRowThreads / g.threads;
    launch_general(p, g, dim3(static_cast<unsigned>(g.threads), static_cast<unsigned>(rows)), packed, context);
  });
}

// Without a norm: as the CPU has it.
void rows_quant_on_cpu(const NormParams& p, const Context& context);

void norm_quant(const NormParams& p, const Context& context) {
  p.statistic == Statistic::kNone ? rows_quant_on_cpu(p, context) : norm(p, context);
}

}  // namespace ltx
