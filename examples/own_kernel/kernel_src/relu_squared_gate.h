// What the binding hands to a backend: pointers and sizes, nothing of torch.
#pragma once

#include <cstdint>

// out = relu(gate)^2 * up, of `count` elements one after the other.
struct ReluSquaredGate {
  const void* gate;
  const void* up;
  void* out;
  int64_t count;
  bool bfloat16;  // else float32
};

// `stream`: a cudaStream_t; the CPU has none.
void relu_squared_gate(const ReluSquaredGate& p, void* stream);
