// Attention of one query over some of its keys: a softmax of its own, to be merged with those of the other keys.
#pragma once
#include "forward.h"

namespace nsa {
namespace NSA_NAMESPACE {

// Softmax over some keys, for the R heads of a group: totals and sums relative to e^at, the largest score; −inf: none.
struct Partial {
  float *at, *total, *sums;
  Partial(float* memory, int64_t R) : at(memory), total(memory + R), sums(memory + round_up(2 * R, W)) {}
  static int64_t size(int64_t R, int64_t V_) { return round_up(2 * R, W) + R * V_; }
};

#if defined(__AVX512F__)
// The sums of 16 vectors, in one.
NSA_INLINE V sum_each(const V* x) {
  V y[8], z[4], u[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    y[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(y[2 * i]), b = _mm512_castps_pd(y[2 * i + 1]);
    z[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    u[i] = _mm512_shuffle_f32x4(z[2 * i], z[2 * i + 1], 0x88) + _mm512_shuffle_f32x4(z[2 * i], z[2 * i + 1], 0xdd);
  return _mm512_shuffle_f32x4(u[0], u[1], 0x88) + _mm512_shuffle_f32x4(u[0], u[1], 0xdd);
}
#else
NSA_INLINE V sum_each(const V* x) {
  V out;
  for (int i = 0; i < W; ++i) out[i] = sum(x[i]);
  return out;
}
#endif

// Rows of keys or values as fp32, `n` of them from `t` on: in place if they are stored so, else widened or collected from
// their pages.
NSA_INLINE const float* wide_rows(const Problem& p, const Rows& x, int64_t b, int64_t g, int64_t t, int64_t n,
                                  int64_t width, float* memory, int64_t& stride) {
  if (p.dtype == kFloat && width % W == 0 && follow_each_other(x, b, t, n)) {
    stride = x.token;
    return reinterpret_cast<const float*>(row(p, x, b, t, g));
  }
  stride = round_up(width, W);
  for (int64_t i = 0; i < n; ++i) widen_row(p.dtype, row(p, x, b, t + i, g), memory + i * stride, width, stride);
  return memory;
}

// Products of one query with W keys, the query held in kVectors registers; `next` gives the keys' addresses in turn.
template <int kVectors, class Next>
NSA_INLINE V score_keys(const float* q, Next&& next) {
  V products[W], query[kVectors];
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) query[c] = load(q + c * W);
#pragma GCC unroll 16
  for (int key = 0; key < W; ++key) {
    const float* from = next(key);
    V product = query[0] * load(from);
#pragma GCC unroll 8
    for (int c = 1; c < kVectors; ++c) product += query[c] * load(from + c * W);
    products[key] = product;
  }
  return sum_each(products);
}

template <class Next>
NSA_INLINE V score_keys(int64_t K, const float* q, Next&& next) {
  if (K == 4 * W) return score_keys<4>(q, next);
  if (K == 8 * W) return score_keys<8>(q, next);
  V products[W];
  for (int key = 0; key < W; ++key) {
    const float* from = next(key);
    V product{};
    for (int64_t c = 0; c < K; c += W) product += load(q + c) * load(from + c);
    products[key] = product;
  }
  return sum_each(products);
}

// Scores of up to W keys from `t` on for all heads: out[r][key], ld apart, −inf where there is no key.
template <bool kAll>
NSA_INLINE void score_some(const Problem& p, int64_t b, int64_t g, const float* q, int64_t t, int64_t some, float* out,
                           int64_t ld, float* memory) {
  const int64_t K = round_up(p.K, W);
  int64_t stride;
  const float* keys = wide_rows(p, p.k, b, g, t, some, p.K, memory, stride);
  const auto next = [&](int key) { return keys + (kAll || key < some ? key : 0) * stride; };
  for (int64_t r = 0; r < p.R; ++r) {
    const V scores = score_keys(K, q + r * K, next);
    store(out + r * ld, kAll ? scores : lanes_in(scores, 0, some, -INFINITY));
  }
}

inline void decode_scores(const Problem& p, int64_t b, int64_t g, const float* q, const Span& run, float* out,
                          int64_t ld, float* memory) {
  int64_t t = run.begin;
  for (; t + W <= run.end; t += W, out += W) score_some<true>(p, b, g, q, t, W, out, ld, memory);
  if (t < run.end) score_some<false>(p, b, g, q, t, run.end - t, out, ld, memory);
}

// Turns scores[r][0 … n) into weights relative to their largest.
inline void decode_soften(const Problem& p, float* scores, int64_t ld, int64_t n, Partial& to) {
  for (int64_t r = 0; r < p.R; ++r) {
    float* of_row = scores + r * ld;
    V most = load(of_row);
    for (int64_t c = W; c < n; c += W) most = vmax(most, load(of_row + c));
    to.at[r] = top(most);
    const V from = set1(to.at[r] == -INFINITY ? 0.f : to.at[r]), log2e = set1(kLog2e);
    V total{};
    for (int64_t c = 0; c < n; c += W) {
      const V x = exp2v((load(of_row + c) - from) * log2e);
      total += x;
      store(of_row + c, x);
    }
    to.total[r] = sum(total);
  }
}

constexpr int64_t kWidened = 32;  // rows that are widened at a time

// Adds the runs' values, weighted; the runs' weights follow each other, each padded to W.
inline void decode_weigh(const Problem& p, int64_t b, int64_t g, const Span* runs, int64_t n_runs, const float* weights,
                         int64_t ld, Partial& to, float* memory) {
  const int64_t V_ = round_up(p.V, W);
  memset(to.sums, 0, p.R * V_ * sizeof(float));
  for (int64_t i = 0; i < n_runs; ++i) {
    const int64_t length = runs[i].end - runs[i].begin;
    for (int64_t j = 0; j < length; j += kWidened) {
      const int64_t some = std::min(kWidened, length - j);
      int64_t stride;
      const float* values = wide_rows(p, p.v, b, g, runs[i].begin + j, some, p.V, memory, stride);
      gemm<false>(p.R, V_, some, weights + j, ld, values, stride, to.sums, V_, true);
    }
    weights += round_up(length, W);
  }
}

// One group's output as fp32 rows from its pieces, merged in order; none where `out` is null. Where wanted, `share` becomes
// the factor that makes e^(score − at) a probability, per head.
inline void decode_merge(const Problem& p, float* pieces, int64_t n_pieces, float* out, float* at = nullptr,
                         float* share = nullptr) {
  const int64_t V_ = round_up(p.V, W), size = Partial::size(p.R, V_);
  for (int64_t r = 0; r < p.R; ++r) {
    float high = -INFINITY, total = 0;
    float* sums = out ? out + r * V_ : nullptr;
    for (int64_t i = 0; i < n_pieces; ++i) high = std::max(high, Partial(pieces + i * size, p.R).at[r]);
    if (sums) memset(sums, 0, V_ * sizeof(float));
    for (int64_t i = 0; i < n_pieces; ++i) {
      const Partial piece(pieces + i * size, p.R);
      if (piece.at[r] == -INFINITY) continue;
      const float factor = std::exp(piece.at[r] - high);
      total += piece.total[r] * factor;
      for (int64_t c = 0; sums && c < V_; c += W)
        store(sums + c, load(sums + c) + load(piece.sums + r * V_ + c) * set1(factor));
    }
    const float whole = total == 0 ? 0.f : 1.f / total;
    if (sums) multiply_row(sums, V_, whole);
    if (at) at[r] = high == -INFINITY ? 0.f : high, share[r] = whole;
  }
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
