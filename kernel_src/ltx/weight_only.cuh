// weight_only_linear: a linear layer whose weight alone is in fp8, for few rows. CUDA alone.
#pragma once

#include "ltx/params.h"

namespace ltx {

//   out[r, c] = scales[c] * sum_k input[r, k] * weight[c, k] + bias[c]
// Everything is contiguous, input and weight begin at multiples of 16 bytes, and the width is a multiple of 16.
struct WeightOnlyParams {
  const void* input = nullptr;   // [rows, width], as bias and out of `dtype`
  const void* weight = nullptr;  // [channels, width], e4m3
  const float* scales = nullptr;
  const void* bias = nullptr;  // null: none
  void* out = nullptr;
  int64_t rows = 0, width = 0, channels = 0;
  DType dtype = DType::kFloat32;
};

void weight_only_linear(const WeightOnlyParams& params, const Context& context);

}  // namespace ltx
