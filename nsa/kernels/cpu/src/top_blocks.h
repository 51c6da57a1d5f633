// From the compressed branch's probabilities to the best n_sel blocks, exactly: the key is (score, −index).
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
  for (int64_t j = 0; j < n_blocks; ++j) scores[j] = shifted[j * per_block];
}

inline void all_blocks(int64_t n_blocks, int64_t n_sel, int32_t* idx) {
  for (int64_t i = 0; i < n_sel; ++i) idx[i] = i < n_blocks ? i : -1;
}

// n_blocks > n_sel. Block 0 and the two nearest the query (the last two) are in; the others compete.
inline void best_blocks(const float* scores, int64_t n_blocks, int64_t n_sel, int32_t* idx, Scratch& scratch) {
  const int64_t places = n_sel - 3, end = n_blocks - 2;
  struct Entry {
    float score;
    int32_t block;
  };
  Entry* best = scratch.take<Entry>(places + 1);
  int64_t n = 0;
  float least = -INFINITY;
  const auto offer = [&](int64_t j) {
    if (n == places && !(scores[j] > least)) return;  // a tie goes to the lower index, which is already in
    if (n < places) ++n;
    int64_t i = n - 1;
    for (; i > 0 && scores[j] > best[i - 1].score; --i) best[i] = best[i - 1];
    best[i] = {scores[j], static_cast<int32_t>(j)};
    if (n == places) least = best[n - 1].score;
  };
  int64_t j = 1;
  if (places > 0) {
    for (; j < end && n < places; ++j) offer(j);
    for (; j + W <= end; j += W)
      if (any_above(load(scores + j), set1(least)))
        for (int64_t i = 0; i < W; ++i) offer(j + i);
    for (; j < end; ++j) offer(j);
  }
  idx[0] = 0;
  for (int64_t i = 0; i < n; ++i) idx[1 + i] = best[i].block;
  idx[1 + n] = n_blocks - 2, idx[2 + n] = n_blocks - 1;
  std::sort(idx + 1, idx + 1 + n);
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
