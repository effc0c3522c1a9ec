// out = relu(gate)^2 * up on the CPU: the compiler vectorises the loop.
#include "relu_squared_gate.h"

#include <cstring>

namespace {

// A bfloat16 is the upper half of a float32.
float to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);     // a NaN stays one
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to the nearest, ties to even
}

float gated(float gate, float up) {
  const float positive = gate < 0.f ? 0.f : gate;  // NaN stays
  return positive * positive * up;
}

}  // namespace

void relu_squared_gate(const ReluSquaredGate& p, void*) {
  if (p.bfloat16) {
    const auto *gate = static_cast<const uint16_t*>(p.gate), *up = static_cast<const uint16_t*>(p.up);
    auto* out = static_cast<uint16_t*>(p.out);
    for (int64_t i = 0; i < p.count; ++i) out[i] = to_bfloat16(gated(to_float(gate[i]), to_float(up[i])));
  } else {
    const auto *gate = static_cast<const float*>(p.gate), *up = static_cast<const float*>(p.up);
    auto* out = static_cast<float*>(p.out);
    for (int64_t i = 0; i < p.count; ++i) out[i] = gated(gate[i], up[i]);
  }
}
