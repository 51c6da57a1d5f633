// Top-n block selection from the compressed branch's probabilities, exact: sorted by (score, −index).
#pragma once
#include "vec.h"

namespace nsa {
namespace NSA_NAMESPACE {

// Strides that a selection block shares with the compressed blocks that begin −(l/d − 1) … l_sel/d − 1 strides after it.
inline void overlap_weights(const Problem& p, float* to) {
  for (int64_t i = 1 - p.l / p.d; i < p.l_sel / p.d; ++i) {
    const int64_t begin = i * p.d;
    *to++ = (std::min(begin + p.l, p.l_sel) - std::max<int64_t>(begin, 0)) / p.d;
  }
}

// `mass` holds l/d − 1 zeros, then one value per compressed block of the document, then zeros for the last block's taps.
// Reads up to W − 1 values past its end. Every shift is scored and one in per_block kept: contiguous sums are cheaper.
inline void block_scores(const Problem& p, const float* taps, const float* mass, int64_t n_blocks, float* scores,
                         Scratch& scratch) {
  const int64_t per_block = p.l_sel / p.d, n_taps = per_block + p.l / p.d - 1, n = (n_blocks - 1) * per_block + 1;
  float* shifted = scratch.take<float>(round_up(n, W));
  for (int64_t c = 0; c < n; c += W) {
    V score{};
    for (int64_t i = 0; i < n_taps; ++i) score += set1(taps[i]) * load(mass + c + i);
    store(shifted + c, score);
  }
  for (int64_t j = 0; j < n_blocks; ++j) {
    const float score = shifted[j * per_block];
    scores[j] = score == score ? score : 0.f;  // NaN ranks lowest, as in the reference
  }
}

inline void all_blocks(int64_t n_blocks, int64_t n_sel, int32_t* idx) {
  for (int64_t i = 0; i < n_sel; ++i) idx[i] = i < n_blocks ? i : -1;
}

// The value that `place` − 1 others come before: the least that fewer than `place` exceed. n is a multiple of W.
inline float value_at_place(const float* values, int64_t n, int32_t place) {
  V least = set1(INFINITY);
  for (int64_t c = 0; c < n; c += W) {
    const V x = load(values + c);
    VInt above{};
    for (int64_t i = 0; i < n; ++i) above -= set1(values[i]) > x;
    least = vmin(least, above < place ? x : set1(INFINITY));
  }
  return -top(-least);
}

// A score that the best `places` reach and few others do: scores are dealt into twice as many heaps as there are places,
// and the heaps' highest scores are compared. −inf where there are too few scores to be worth it.
inline float score_to_reach(const float* scores, int64_t n, int64_t places, Scratch& scratch) {
  const int64_t heaps = round_up(2 * places, W);
  if (n < heaps + W) return -INFINITY;
  float* highest = scratch.take<float>(heaps);
  for (int64_t h = 0; h < heaps; h += W) {
    V high = load(scores + h);
    for (int64_t c = h + heaps; c + W <= n; c += heaps) high = vmax(high, load(scores + c));
    store(highest + h, high);
  }
  return value_at_place(highest, heaps, places);
}

// n_blocks > n_sel. Block 0 and the two nearest the query (the last two) are in; the others compete. Reads up to W − 1
// values past the last score.
inline void select_top_blocks(const float* scores, int64_t n_blocks, int64_t n_sel, int32_t* idx, Scratch& scratch) {
  const int64_t places = n_sel - 3, end = n_blocks - 2;
  float* few = scratch.take<float>(n_blocks + W);
  int32_t* block = scratch.take<int32_t>(n_blocks);
  const float reach = score_to_reach(scores + 1, end - 1, places, scratch);
  int64_t n = 0, ties = 0;
  for (int64_t j = 1; j < end; j += W) {
    uint32_t lanes = lanes_reaching(load(scores + j), set1(reach));
    if (j + W > end) lanes &= (1u << (end - j)) - 1;
    for (; lanes; lanes &= lanes - 1) {
      const int64_t i = j + __builtin_ctz(lanes);
      if (scores[i] == reach && ++ties > places) continue;  // so many of the same score and a lower index are in
      few[n] = scores[i], block[n++] = i;
    }
  }
  for (int64_t i = n; i < round_up(n, W); ++i) few[i] = -INFINITY;
  const float last = value_at_place(few, round_up(n, W), places);
  int64_t equal = places, outcome = 0;
  for (int64_t i = 0; i < n; ++i) equal -= few[i] > last;
  for (int64_t i = 0; i < n; ++i) {
    const bool is_last = few[i] == last;
    idx[1 + outcome] = block[i];  // stays if it is in: most guesses of a branch would be wrong
    outcome += (few[i] > last) | (is_last & (equal > 0));
    equal -= is_last;
  }
  idx[0] = 0, idx[n_sel - 2] = n_blocks - 2, idx[n_sel - 1] = n_blocks - 1;
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
