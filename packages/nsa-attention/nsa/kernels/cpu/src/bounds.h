// Bounds checks before any kernel runs: rejects sizes and positions that would index outside of the given tensors.
//
// Python checks that the tensors fit together; only their contents and the sizes are left. Positions and starts may be
// anything up to kFarthest, whether there are keys or not: kernels cut them to the keys. Beyond, sums could overflow.
#pragma once
#include <algorithm>
#include <cstdint>

#include "grid.h"

namespace nsa {

constexpr int64_t kFarthest = int64_t{1} << 40, kLargestSize = (int64_t{1} << 31) - 1;

inline bool is_size(int64_t n) { return n >= 1 && n <= kLargestSize; }

// Of the branch; `choosing`: of the choice of blocks too, whose taps and places follow from them.
inline bool sizes_hold(const Problem& p, bool choosing) {
  if (std::min({p.B, p.S, p.T, p.G}) < 0 || p.R < 1 || p.K < 1 || p.threads < 1) return false;
  if (p.branch == kSliding && !is_size(p.w)) return false;
  if (p.branch == kCompressed && !(is_size(p.l) && is_size(p.d))) return false;
  if (p.branch == kSelected && !(is_size(p.l_sel) && p.n_sel >= 0 && p.n_sel <= kLargestSize)) return false;
  if (!choosing) return true;
  return p.branch == kCompressed && is_size(p.l_sel) && is_size(p.n_sel) && p.n_sel >= 3 && p.l % p.d == 0 && p.l_sel % p.d == 0;
}

// A choice lists blocks up to the query's own, so its position must be one that the compressed keys reach, or nearly.
inline bool positions_hold(const Problem& p, bool choosing) {
  for (int64_t i = 0; i < p.B * p.S; ++i) {
    const int64_t pos = p.pos[i], start = p.start[i];
    if (pos < -kFarthest || pos > kFarthest || start < -kFarthest || start > kFarthest) return false;
    if (choosing && pos / p.d > std::max<int64_t>(0, p.T - start) + (p.l + p.l_sel) / p.d) return false;
  }
  return true;
}

// Whether every page that holds one of these tokens is one of the pool's.
inline bool pages_hold(const Rows& x, int64_t b, const Span& tokens) {
  if (!x.table || tokens.empty()) return true;
  const int32_t* page = x.table + b * x.table_row;
  int32_t least = 0, most = -1;
  for (int64_t j = tokens.begin / x.page_tokens; j <= (tokens.end - 1) / x.page_tokens; ++j)
    least = std::min(least, page[j]), most = std::max(most, page[j]);
  return least >= 0 && most < x.n_pages;
}

// Of a decode step: S is 1.
inline bool tables_hold(const Problem& p) {
  for (int64_t b = 0; b < p.B; ++b) {
    const Span tokens = visible(p, b, 0);
    if (!pages_hold(p.k, b, tokens) || !pages_hold(p.v, b, tokens)) return false;
  }
  return true;
}

inline bool slot_holds(const Rows& x, int64_t b, int64_t at) {
  if (!x.table) return true;
  const int32_t page = x.table[b * x.table_row + at / x.page_tokens];
  return page >= 0 && page < x.n_pages;
}

// Whether every row has a slot for its next token and for the compressed entry that the token may complete, and all
// tokens of that entry.
inline bool has_room(const CacheAppend& a) {
  if (!is_size(a.l) || !is_size(a.d) || !is_size(a.w)) return false;
  for (const Stream& stream : a.streams)
    if (!stream.fresh.data) return false;  // a tensor without memory
  const int64_t n_slots = std::min(a.streams[2].n_slots, a.streams[3].n_slots);
  for (int64_t b = 0; b < a.B; ++b) {
    const int64_t length = a.length[b];
    if (length < 0 || length >= n_slots) return false;
    for (const Stream& stream : a.streams)
      if (!slot_holds(stream.slots, b, length % stream.n_slots)) return false;
    if (length + 1 < a.l) continue;
    const int64_t entry = a.first[b] + (length + 1 - a.l) / a.d;
    if (entry < 0 || entry >= a.n_compressed_slots) return false;
    for (const Rows& x : a.compressed)
      if (!slot_holds(x, b, entry)) return false;
    if (!a.means || (length + 1 - a.l) % a.d != 0) continue;
    for (int64_t t = length + 1 - a.l; t < length; ++t)  // the tokens that the entry is the mean of
      for (int64_t i = 0; i < 2; ++i)
        if (!slot_holds(a.streams[i].slots, b, t % a.streams[i].n_slots)) return false;
  }
  return true;
}

}  // namespace nsa
