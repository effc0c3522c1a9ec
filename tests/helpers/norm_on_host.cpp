// The norm family by its CUDA kernels, on the host: stands in for kernel_src/cpu/norm.cpp (test_cuda_on_host.py). The
// general kernel takes all calls but those with an index that models make, which norm_kernel takes.
#include "cuda_on_host.h"
#include "norm_general.cu"
#include "norm_general_more.cu"

namespace ltx {
namespace {

// With an index norm_kernel runs, and an instance of it has to be there. Else the general kernel runs, with the
// geometry of that instance.
template <Statistic S, Fusion F, Output O>
void run_model_row(const NormParams& p, const Context& context) {
  using T = __nv_bfloat16;
  const Geometry g = geometry(p.rows.width, kPackWidth<T>, S, F, O, 1);
  const unsigned threads = static_cast<unsigned>(g.threads), rows = threads > 32 ? 1 : kShortRowThreads / threads;
  bool fast = false;
  VectorTypes types{};
  const uint32_t packed = whole_pack_operands<T>(p, fast, types);
  if (!p.index.data) return launch_general(p, g, dim3(threads, rows), packed, context);
  CompactParams q{};
  fast = fast && types == VectorTypes::kRows && compact_params(p, q);
  const int instance = fast ? instance_by_index<T, S, F, O>(q, g) : -1;
  if (instance < 0) throw std::runtime_error("norm_kernel has no instance for this index");
  const unsigned outer = p.rows.ndim == 2 ? static_cast<unsigned>(p.rows.size[0]) : 1;
  instance == 0 ? launch_by_index<T, S, F, O, 0>(q, dim3(threads, rows), outer, nullptr)
                : launch_by_index<T, S, F, O, 1>(q, dim3(threads, rows), outer, nullptr);
}

template <Output O>
void run_model_row(const NormParams& p, const Context& context) {
  if (p.norms_branch) {
    return p.statistic == Statistic::kRms ? run_model_row<Statistic::kRms, Fusion::kBranch, O>(p, context)
                                          : run_model_row<Statistic::kNone, Fusion::kBranch, O>(p, context);
  }
  if (p.statistic == Statistic::kNone) return run_model_row<Statistic::kNone, Fusion::kGated, O>(p, context);
  if (p.residual.data) return run_model_row<Statistic::kLayer, Fusion::kGated, O>(p, context);
  return p.statistic == Statistic::kRms ? run_model_row<Statistic::kRms, Fusion::kModulate, O>(p, context)
                                        : run_model_row<Statistic::kLayer, Fusion::kModulate, O>(p, context);
}

// As many columns as the models have that norm_kernel reads an index for.
bool is_model_row(const NormParams& p) { return p.rows.width == 3072 || p.rows.width == 3584 || p.rows.width == 3840; }

}  // namespace

void norm(const NormParams& p, const Context& context) {
  dispatch(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (p.dtype == DType::kBFloat16 && is_model_row(p)) {
      return p.quantised.values ? run_model_row<Output::kQuantised>(p, context)
                                : run_model_row<Output::kRounded>(p, context);
    }
    bool fast = false;
    VectorTypes types{};
    const uint32_t packed = whole_pack_operands<T>(p, fast, types);
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
