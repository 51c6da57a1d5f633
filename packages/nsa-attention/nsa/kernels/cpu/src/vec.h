// A vector of W floats and the few operations the kernels need, for the instruction set this file is compiled for.
// Arithmetic uses the compiler's vector operators; what they cannot say well is spelled per instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "memory.h"
#include "problem.h"

namespace nsa {
namespace NSA_NAMESPACE {

#define NSA_INLINE inline __attribute__((always_inline))
#define NSA_INLINE_LAMBDA __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float V __attribute__((vector_size(W * 4)));
typedef float VUnaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t VInt __attribute__((vector_size(W * 4)));
constexpr int kPair = 2 * W;  // rows of scores are padded to this, so that two vectors can be narrowed into one

NSA_INLINE V load(const float* p) { return *reinterpret_cast<const VUnaligned*>(p); }
NSA_INLINE void store(float* p, V x) { *reinterpret_cast<VUnaligned*>(p) = x; }
#if defined(__AVX512F__)
NSA_INLINE V set1(float x) { return _mm512_set1_ps(x); }
#elif defined(__AVX2__)
NSA_INLINE V set1(float x) { return _mm256_set1_ps(x); }
#else
NSA_INLINE V set1(float x) { return V{x, x, x, x}; }
#endif

#if defined(__AVX512F__)
NSA_INLINE V vmax(V a, V b) { return _mm512_max_ps(a, b); }
NSA_INLINE uint32_t lanes_above(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
NSA_INLINE uint32_t lanes_reaching(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
NSA_INLINE float sum(V x) { return _mm512_reduce_add_ps(x); }
NSA_INLINE float top(V x) { return _mm512_reduce_max_ps(x); }
NSA_INLINE V lanes_in(V x, int begin, int end, float other) {
  const __mmask16 below_end = end >= W ? 0xffff : end <= 0 ? 0 : (1u << end) - 1;
  const __mmask16 below_begin = begin >= W ? 0xffff : begin <= 0 ? 0 : (1u << begin) - 1;
  return _mm512_mask_mov_ps(set1(other), below_end & ~below_begin, x);
}
#else
NSA_INLINE V vmax(V a, V b) { return a > b ? a : b; }
NSA_INLINE float sum(V x) {
  float total = 0;
  for (int i = 0; i < W; ++i) total += x[i];
  return total;
}
NSA_INLINE float top(V x) {
  float most = x[0];
  for (int i = 1; i < W; ++i) most = x[i] > most ? x[i] : most;
  return most;
}
NSA_INLINE V lanes_in(V x, int begin, int end, float other) {
  VInt lane;
  for (int i = 0; i < W; ++i) lane[i] = i;
  return (lane >= begin) & (lane < end) ? x : set1(other);
}
#if defined(__AVX2__)
NSA_INLINE uint32_t lanes_above(V a, V b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
NSA_INLINE uint32_t lanes_reaching(V a, V b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
#else
NSA_INLINE uint32_t lanes_set(VInt x) {
  uint32_t bits = 0;
  for (int i = 0; i < W; ++i) bits |= (x[i] & 1u) << i;
  return bits;
}
NSA_INLINE uint32_t lanes_above(V a, V b) { return lanes_set(a > b); }
NSA_INLINE uint32_t lanes_reaching(V a, V b) { return lanes_set(a >= b); }
#endif
#endif
NSA_INLINE V vmin(V a, V b) { return a < b ? a : b; }
NSA_INLINE bool any_above(V a, V b) { return lanes_above(a, b) != 0; }

// How exact 2^x has to be, as a relative error: fp32's own; 3e-6 where what follows is bf16 but small differences
// decide; 8e-5 for weights that are rounded to bf16 (4e-3) at once.
enum Exactness { kFine, kRough, kWeight };

// 2^x for x ≤ 126 or so; exactly 0 far below and for −inf, NaN for NaN.
template <Exactness kHow = kFine>
NSA_INLINE V exp2v(V x) {
#if defined(__AVX512F__)
  if constexpr (kHow != kFine) {
    const V f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    V p;
    if constexpr (kHow == kWeight) {
      p = set1(0x1.3f96a4p-4f);
      p = p * f + set1(0x1.cefc4cp-3f);
      p = p * f + set1(0x1.64444cp-1f);
      p = p * f + set1(0x1.fff632p-1f);
    } else {
      p = set1(0x1.bb7cd4p-7f);
      p = p * f + set1(0x1.aa13fp-5f);
      p = p * f + set1(0x1.ee798ap-3f);
      p = p * f + set1(0x1.62d166p-1f);
      p = p * f + set1(0x1.00002cp+0f);
    }
    return _mm512_scalef_ps(p, x);  // rounds x down, as above
  }
  const V f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // 0 for −inf
  const V n = x - f;
#else
  const V small = set1(-127.f);
  const V clamped = vmax(small, x);  // in this order a NaN stays
  const V magic = set1(12582912.f);  // 1.5 · 2^23: adding it rounds to an integer
  const V n = (clamped + magic) - magic;
  const V f = clamped - n;
#endif
  V p = set1(0x1.5bba12p-10f);
  p = p * f + set1(0x1.3cea88p-7f);
  p = p * f + set1(0x1.c6b752p-5f);
  p = p * f + set1(0x1.ebf9bcp-3f);
  p = p * f + set1(0x1.62e42ap-1f);
  p = p * f + set1(1.f);
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  const VInt exponent = (__builtin_convertvector(n, VInt) + 127) << 23;
  V power;
  memcpy(&power, &exponent, sizeof power);
  return x < small + 1.f ? V{} : p * power;
#endif
}

// Stored elements.
struct Bf16 {
  uint16_t bits;
};

NSA_INLINE float widen(Bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
NSA_INLINE float widen(_Float16 x) { return static_cast<float>(x); }
NSA_INLINE void narrow(float x, _Float16& y) { y = static_cast<_Float16>(x); }
NSA_INLINE void narrow(float x, Bf16& y) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  // To nearest, ties to even; a NaN must not round up into infinity.
  y.bits = x != x ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rows of the caller's tensors: addresses, and the dtype they hold. Widened once when packed, so dispatch here is cheap.
NSA_INLINE int64_t token_at(const Rows& x, int64_t b, int64_t t) {
  if (!x.table) return b * x.batch + t * x.token;
  return x.table[b * x.table_row + t / x.page_tokens] * x.page + t % x.page_tokens * x.token;
}
NSA_INLINE char* row(const Problem& p, const Rows& x, int64_t b, int64_t t, int64_t g, int64_t r = 0) {
  return x.data + (token_at(x, b, t) + g * x.group + r * x.head) * (p.dtype == kFloat ? 4 : 2);
}

// Whether tokens t … t + n − 1 of a row lie x.token apart: in one page, or in pages that follow each other.
NSA_INLINE bool follow_each_other(const Rows& x, int64_t b, int64_t t, int64_t n) {
  if (!x.table) return true;
  const int64_t first = t / x.page_tokens, last = (t + n - 1) / x.page_tokens;
  if (first == last) return true;
  if (x.page != x.page_tokens * x.token) return false;
  const int32_t* page = x.table + b * x.table_row;
  for (int64_t j = first; j < last; ++j)
    if (page[j + 1] != page[j] + 1) return false;
  return true;
}

// For an output that is about to be written for the first time.
inline void large_pages_for(const Problem& p, const Rows& x, int64_t width) {
  const bool whole = x.head == width && x.group == p.R * x.head && x.token == p.G * x.group && x.batch == p.S * x.token;
  if (whole) prefer_large_pages(x.data, p.B * x.batch * (p.dtype == kFloat ? 4 : 2));
}

template <class T>
NSA_INLINE void widen_as(const T* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = widen(from[i]);
}
inline void widen_row(int64_t dtype, const char* from, float* to, int64_t n, int64_t padded) {
  if (dtype == kFloat)
    memcpy(to, from, n * sizeof(float));
  else if (dtype == kBfloat16)
    widen_as(reinterpret_cast<const Bf16*>(from), to, n);
  else
    widen_as(reinterpret_cast<const _Float16*>(from), to, n);
  for (int64_t i = n; i < padded; ++i) to[i] = 0;
}

template <class T>
NSA_INLINE void narrow_as(const float* from, T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) narrow(from[i], to[i]);
}
#if defined(__AVX512BF16__)
NSA_INLINE void narrow_as(const float* from, Bf16* to, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load(from + i))));
  for (; i < n; ++i) narrow(from[i], to[i]);
}
#endif
inline void narrow_row(int64_t dtype, const float* from, char* to, int64_t n) {
  if (dtype == kFloat)
    memcpy(to, from, n * sizeof(float));
  else if (dtype == kBfloat16)
    narrow_as(from, reinterpret_cast<Bf16*>(to), n);
  else
    narrow_as(from, reinterpret_cast<_Float16*>(to), n);
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
