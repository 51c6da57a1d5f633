// One new token per row: the three branches and the selection in one call, reading the cache in place.
//
// Keys are cut into pieces of a fixed length, each a softmax of its own; pieces are merged in order. So threads share
// the reading even at batch 1, and how many there are changes no bit.
#pragma once
#include "forward.h"
#include "top_blocks.h"

namespace nsa {
namespace NSA_NAMESPACE {

constexpr int64_t kPieceKeys = 256;

// Softmax over some keys, for the R heads of a group: totals and sums relative to 2^at.
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

// Rows of keys or values as fp32, W of them from `t` on: in place if they are stored so, else widened.
NSA_INLINE const float* wide_rows(const Problem& p, const Rows& x, int64_t b, int64_t g, int64_t t, int64_t n,
                                  int64_t width, float* memory, int64_t& stride) {
  if (p.dtype == kFloat && width % W == 0) {
    stride = x.token;
    return reinterpret_cast<const float*>(row(p, x, b, t, g));
  }
  stride = round_up(width, W);
  for (int64_t i = 0; i < n; ++i) widen_row(p.dtype, row(p, x, b, t + i, g), memory + i * stride, width, stride);
  return memory;
}

// Scores of `n` keys from `t` on for all heads: out[r][key], ld apart; padded to W keys with kHidden.
inline void decode_scores(const Problem& p, int64_t b, int64_t g, const float* q, int64_t t, int64_t n, float* out,
                          int64_t ld, float* memory) {
  const int64_t K = round_up(p.K, W);
  for (int64_t i = 0; i < n; i += W) {
    const int64_t some = std::min<int64_t>(W, n - i);
    int64_t stride;
    const float* keys = wide_rows(p, p.k, b, g, t + i, some, p.K, memory, stride);
    for (int64_t r = 0; r < p.R; ++r) {
      V products[W];
#pragma GCC unroll 16
      for (int64_t key = 0; key < W; ++key) {
        const float* from = keys + (key < some ? key : 0) * stride;
        V product{};
        for (int64_t c = 0; c < K; c += W) product += load(q + r * K + c) * load(from + c);
        products[key] = product;
      }
      store(out + r * ld + i, lanes_in(sum_each(products), 0, some, kHidden));
    }
  }
}

// Weighs runs of keys; `scores` are what decode_scores made of them, one run after the other, and become weights.
inline void decode_weigh(const Problem& p, int64_t b, int64_t g, const Span* runs, int64_t n_runs, float* scores,
                         int64_t ld, int64_t n, Partial& to, float* memory) {
  const int64_t V_ = round_up(p.V, W);
  const float scale2 = p.scale * kLog2e;
  for (int64_t r = 0; r < p.R; ++r) {
    float* of_row = scores + r * ld;
    V most = load(of_row);
    for (int64_t c = W; c < n; c += W) most = vmax(most, load(of_row + c));
    to.at[r] = top(most) * scale2;
    V total{};
    for (int64_t c = 0; c < n; c += W) {
      const V x = exp2v(load(of_row + c) * set1(scale2) - set1(to.at[r]));
      total += x;
      store(of_row + c, x);
    }
    to.total[r] = sum(total);
  }
  memset(to.sums, 0, p.R * V_ * sizeof(float));
  int64_t at = 0;
  for (int64_t i = 0; i < n_runs; ++i) {
    const int64_t length = runs[i].end - runs[i].begin;
    int64_t stride;
    const float* values = wide_rows(p, p.v, b, g, runs[i].begin, length, p.V, memory, stride);
    gemm<false>(p.R, V_, length, scores + at, ld, values, stride, to.sums, V_, true);
    at += round_up(length, W);
  }
}

// Writes a group's output from its pieces, merged in order. Returns, per head, the factor that makes 2^(score − at) a
// probability, in `share`, with `at` being what it is relative to.
inline void decode_merge(const Problem& p, int64_t b, int64_t g, float* pieces, int64_t n_pieces, Scratch& scratch,
                         float* at = nullptr, float* share = nullptr) {
  const int64_t V_ = round_up(p.V, W), size = Partial::size(p.R, V_);
  float* sums = scratch.take<float>(V_);
  for (int64_t r = 0; r < p.R; ++r) {
    float high = -INFINITY, total = 0;
    for (int64_t i = 0; i < n_pieces; ++i) high = std::max(high, Partial(pieces + i * size, p.R).at[r]);
    memset(sums, 0, V_ * sizeof(float));
    for (int64_t i = 0; i < n_pieces; ++i) {
      const Partial piece(pieces + i * size, p.R);
      const float factor = std::exp2(piece.at[r] - high);
      total += piece.total[r] * factor;
      for (int64_t c = 0; c < V_; c += W)
        store(sums + c, load(sums + c) + load(piece.sums + r * V_ + c) * set1(factor));
    }
    multiply_row(sums, V_, total > 0 ? 1.f / total : 0.f);
    narrow_row(p.dtype, sums, row(p, p.out, b, 0, g, r), p.V);
    if (at) at[r] = high, share[r] = total > 0 ? 1.f / total : 0.f;
  }
}

struct DecodeThread {
  Scratch scratch;
};

// `compressed` carries idx, l_sel and n_sel of the selection; `selected` reads that idx.
inline void decode(const Problem& compressed, const Problem& selected, const Problem& sliding) {
  const Problem& p = compressed;
  const int64_t R = p.R, K = round_up(p.K, W), V_ = round_up(p.V, W), size = Partial::size(R, V_), groups = p.B * p.G;
  const int64_t per_piece = std::max<int64_t>(1, kPieceKeys / p.l_sel);  // chosen blocks of a piece
  const int64_t piece_keys = std::max(kPieceKeys, per_piece * round_up(p.l_sel, W));
  const int64_t wide = piece_keys * std::max(K, V_);
  int64_t longest = 0, widest = 0;
  for (int64_t b = 0; b < p.B; ++b) {
    const Span c = visible(compressed, b, 0), w = visible(sliding, b, 0);
    longest = std::max(longest, c.end - c.begin), widest = std::max(widest, w.end - w.begin);
  }
  const int64_t n_compressed = (longest + kPieceKeys - 1) / kPieceKeys, n_window = (widest + kPieceKeys - 1) / kPieceKeys;
  const int64_t n_chosen = (p.n_sel + per_piece - 1) / per_piece, ld = std::max<int64_t>(1, n_compressed) * kPieceKeys;
  Array<float> q(groups * R * K), scores(groups * R * ld), pieces(groups * (n_compressed + n_window + n_chosen) * size);
  float *of_compressed = pieces.get(), *of_window = of_compressed + groups * n_compressed * size;
  float* of_chosen = of_window + groups * n_window * size;
  for (int64_t i = 0; i < groups * R; ++i)
    widen_row(p.dtype, row(p, p.q, i / R / p.G, 0, i / R % p.G, i % R), q.get() + i * K, p.K, K);

  const auto count = [](const Span& span) { return (span.end - span.begin + kPieceKeys - 1) / kPieceKeys; };
  const auto piece_of = [](const Span& span, int64_t i) {
    const int64_t begin = span.begin + i * kPieceKeys;
    return Span{begin, std::min(span.end, begin + kPieceKeys)};
  };
  parallel<DecodeThread>(groups * (n_compressed + n_window), p.threads, [&](auto& thread, int64_t item) {
    const bool first = item < groups * n_compressed;
    const Problem& branch = first ? compressed : sliding;
    const int64_t n = first ? n_compressed : n_window, at = first ? item : item - groups * n_compressed;
    const int64_t group = at / n, b = group / p.G, g = group % p.G;
    const Span all = visible(branch, b, 0);
    if (at % n >= count(all)) return;
    Scratch scratch = thread.scratch;
    const Span run = piece_of(all, at % n);
    float* memory = scratch.template take<float>(wide);
    float* some = scratch.template take<float>(R * kPieceKeys);
    decode_scores(branch, b, g, q.get() + group * R * K, run.begin, run.end - run.begin, some, kPieceKeys, memory);
    if (first)
      for (int64_t r = 0; r < R; ++r)
        memcpy(scores.get() + (group * R + r) * ld + at % n * kPieceKeys, some + r * kPieceKeys,
               round_up(run.end - run.begin, W) * sizeof(float));
    Partial piece((first ? of_compressed : of_window) + at * size, R);
    decode_weigh(branch, b, g, &run, 1, some, kPieceKeys, round_up(run.end - run.begin, W), piece, memory);
  });

  std::vector<float> taps(p.l_sel / p.d + p.l / p.d - 1);
  overlap_weights(p, taps.data());
  parallel<DecodeThread>(groups, p.threads, [&](auto& thread, int64_t group) {
    Scratch scratch = thread.scratch;
    const int64_t b = group / p.G, g = group % p.G, n_blocks = p.pos[b] / p.l_sel + 1;
    float *at = scratch.template take<float>(R), *share = scratch.template take<float>(R);
    const Span all = visible(compressed, b, 0), window = visible(sliding, b, 0);
    decode_merge(compressed, b, g, of_compressed + group * n_compressed * size, count(all), scratch, at, share);
    decode_merge(sliding, b, g, of_window + group * n_window * size, count(window), scratch);
    int32_t* idx = p.idx + group * p.n_sel;
    if (n_blocks <= p.n_sel) return all_blocks(n_blocks, p.n_sel, idx);
    const int64_t lead = p.l / p.d - 1 + std::max<int64_t>(0, -p.start[b]);
    const int64_t size_of_mass = n_blocks * (p.l_sel / p.d) + p.l / p.d - 1;
    const int64_t n = std::min(all.end - all.begin, size_of_mass - lead);
    float* mass = scratch.template take<float>(size_of_mass + 2 * W);
    float* of_blocks = scratch.template take<float>(n_blocks);
    memset(mass, 0, (size_of_mass + 2 * W) * sizeof(float));
    const V scale2 = set1(static_cast<float>(p.scale) * kLog2e);
    for (int64_t r = 0; r < R; ++r)
      for (int64_t c = 0; c < n; c += W) {
        const V x = exp2v(load(scores.get() + (group * R + r) * ld + c) * scale2 - set1(at[r])) * set1(share[r]);
        store(mass + lead + c, load(mass + lead + c) + lanes_in(x, 0, n - c, 0.f));
      }
    block_scores(p, taps.data(), mass, n_blocks, of_blocks, scratch);
    best_blocks(of_blocks, n_blocks, p.n_sel, idx, scratch);
  });

  parallel<DecodeThread>(groups * n_chosen, p.threads, [&](auto& thread, int64_t item) {
    Scratch scratch = thread.scratch;
    const int64_t group = item / n_chosen, b = group / p.G, g = group % p.G, from = item % n_chosen * per_piece;
    const Span all = visible(selected, b, 0);
    const int32_t* idx = p.idx + group * p.n_sel;
    float* memory = scratch.template take<float>(wide);
    float* some = scratch.template take<float>(R * piece_keys);
    Span* runs = scratch.template take<Span>(per_piece);
    int64_t n_runs = 0, n = 0;
    for (int64_t i = from; i < std::min(p.n_sel, from + per_piece); ++i) {
      if (idx[i] < 0) continue;
      const int64_t begin = selected.start[b] + idx[i] * p.l_sel;
      const Span run{std::max(begin, all.begin), std::min(begin + p.l_sel, all.end)};
      if (run.empty()) continue;
      decode_scores(selected, b, g, q.get() + group * R * K, run.begin, run.end - run.begin, some + n, piece_keys,
                    memory);
      runs[n_runs++] = run;
      n += round_up(run.end - run.begin, W);
    }
    Partial piece(of_chosen + item * size, R);
    if (n_runs) {
      decode_weigh(selected, b, g, runs, n_runs, some, piece_keys, n, piece, memory);
    } else {
      std::fill_n(piece.at, R, -1e30f), std::fill_n(piece.total, R, 0.f);
      memset(piece.sums, 0, R * V_ * sizeof(float));
    }
  });
  Scratch scratch;
  for (int64_t group = 0; group < groups; ++group) {
    Scratch inner = scratch;
    decode_merge(selected, group / p.G, group % p.G, of_chosen + group * n_chosen * size, n_chosen, inner);
  }
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
