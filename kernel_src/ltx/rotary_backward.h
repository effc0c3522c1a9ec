// The gradients of the rotary family: what the bindings hand to the kernels.
#pragma once

#include "ltx/params.h"

namespace ltx {

// With the names of RotaryParams, and `input` as the op's query or key before its norm:
//   r      = grad rotated back: r[a] = grad[a] * cos[a] + grad[b] * sin[b], r[b] = grad[b] * cos[b] - grad[a] * sin[a]
//            in the first rotary_dim columns, grad in the others
//   output = r without a norm
//            else the norm's gradient of t = r * (weight_offset + weight), as in NormBackwardParams,
//            over a head (kPerHead) or all heads of a token (kAcrossHeads)
// `bias`, `rounding` and `cast_before_weight` are not used. Without a norm `input` is not read.
struct RotaryBackwardParams : RotaryParams {
  const void* grad[2] = {};
  HeadStrides grad_stride[2];
};

void rotary_backward(const RotaryBackwardParams& params, const Context& context);

}  // namespace ltx
