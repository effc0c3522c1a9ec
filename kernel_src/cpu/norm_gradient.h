// The gradient of a norm, of one fp32 row that is padded with zeros: norm_backward.cpp and rope_backward.cpp.
//
// Included once per instruction set, after simd.h; hence no include guard.

namespace ltx {
namespace cpu {
namespace LTX_ISA {
namespace {

struct SumTerm {
  const float* row;
  LTX_INLINE F operator()(int64_t c) const { return load(row + c); }
};
struct ProductTerm {
  const float *a, *b;
  LTX_INLINE F operator()(int64_t c) const { return load(a + c) * load(b + c); }
};

// row *= factor; without a factor it stays.
void multiply(float* row, const float* factor, int64_t width) {
  if (factor == nullptr) return;
  for (int64_t c = 0; c < width; c += kLanes) store(row + c, load(row + c) * load(factor + c));
}

// row - its mean, with zeros in the padding.
void centre(float* row, int64_t width) {
  const float mean = sum_row(width, SumTerm{row}) / static_cast<float>(width);
  for (int64_t c = 0; c < width; c += kLanes) store(row + c, load(row + c) - mean);
  std::fill(row + width, row + round_up(width, kSumLanes), 0.f);
}

// t becomes norm'(t; h), both centred where the norm does it.
void apply_norm(float* t, const float* h, int64_t width, float eps) {
  const float count = static_cast<float>(width), rstd = rms_rstd(h, width, eps);
  const float slope = rstd * (sum_row(width, ProductTerm{t, h}) / count) * rstd;  // rstd^2 alone may overflow
  for (int64_t c = 0; c < width; c += kLanes) store(t + c, (load(t + c) - load(h + c) * slope) * rstd);
}

}  // namespace
}  // namespace LTX_ISA
}  // namespace cpu
}  // namespace ltx
