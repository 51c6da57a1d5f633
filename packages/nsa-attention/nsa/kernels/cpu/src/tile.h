// A tile: consecutive queries of one group, with all heads of the group as rows. It visits each block that any of its
// queries needs once, with only the rows that need it.
#pragma once
#include <type_traits>

#include "pack.h"

namespace nsa {
namespace NSA_NAMESPACE {

constexpr int64_t kStepRows = 96;  // rows computed together: a multiple of both register blockings, scores stay in cache

struct Tile {
  int64_t b, g, begin, n;  // queries begin … begin + n − 1
};

// Cuts all queries into tiles. `rows` is how many rows a tile should have.
class Tiles {
 public:
  Tiles(const Problem& p, int64_t rows)
      : p_(p), queries_(std::max<int64_t>(1, rows / p.R)), per_row_((p.S + queries_ - 1) / queries_) {}
  int64_t count() const { return p_.B * p_.G * per_row_; }
  int64_t queries() const { return queries_; }
  // The last tiles see most; they come first, so that no thread is left alone with one at the end.
  Tile operator[](int64_t i) const {
    i = count() - 1 - i;
    const int64_t row = i % (p_.B * p_.G), begin = i / (p_.B * p_.G) * queries_;
    return {row / p_.G, row % p_.G, begin, std::min(queries_, p_.S - begin)};
  }

 private:
  const Problem& p_;
  int64_t queries_, per_row_;
};

// Rows per tile: small where all rows share their blocks, large where blocks should find several queries to serve. How
// the queries are cut changes no bit of any result, so it may depend on the number of threads.
template <class E>
inline int64_t tile_rows(const Problem& p) {
  if (p.branch != kSelected) return kStepRows;
  const int64_t fair = p.B * p.G * p.S * p.R / (4 * p.threads);
  return std::clamp<int64_t>(fair, kStepRows, E::kTileRows);
}

// Calls visit(block, queries, n) for each block: queries are offsets in the tile, nullptr for all of them.
template <class Visit>
void for_each_block(const Problem& p, const Grid& grid, const Tile& tile, Scratch& scratch, Visit&& visit) {
  if (p.branch != kSelected) {
    Span all{p.T, 0};
    for (int64_t i = 0; i < tile.n; ++i) {
      const Span& span = grid.spans[tile.b * p.S + tile.begin + i];
      if (!span.empty()) all = {std::min(all.begin, span.begin), std::max(all.end, span.end)};
    }
    for (int64_t j = all.begin / grid.width; j * grid.width < all.end; ++j)
      visit(grid.first[tile.b] + j, static_cast<const int32_t*>(nullptr), tile.n);
    return;
  }
  // Counting sort of (block, query), stable: a query meets its blocks in ascending order.
  const int64_t n_blocks = grid.blocks.size();
  int32_t* end = scratch.take<int32_t>(n_blocks + 1);
  int32_t* queries = scratch.take<int32_t>(tile.n * p.n_sel);
  int64_t low = n_blocks, high = 0;
  memset(end, 0, (n_blocks + 1) * sizeof(int32_t));
  for (int64_t i = 0; i < tile.n; ++i)
    chosen(p, grid, tile.b, tile.begin + i, tile.g, [&](int64_t block) {
      ++end[block + 1];
      low = std::min(low, block), high = std::max(high, block + 1);
    });
  for (int64_t j = low; j < high; ++j) end[j + 1] += end[j];
  for (int64_t i = 0; i < tile.n; ++i)
    chosen(p, grid, tile.b, tile.begin + i, tile.g, [&](int64_t block) { queries[end[block]++] = i; });
  for (int64_t j = low, at = 0; j < high; at = end[j++]) {
    const int64_t per_step = std::max<int64_t>(1, kStepRows / p.R);
    for (int64_t q = at; q < end[j]; q += per_step) visit(j, queries + q, std::min(per_step, end[j] - q));
  }
}

// What a step's queries see of a block, as columns; and the columns that any of them sees.
struct Columns {
  int32_t *begin, *end;
  int64_t c0, c1, R;
  bool finite;
  bool none() const { return c0 >= c1; }
  // Calls multiply(row, n_rows, c0, c1) for `n` rows from `first` on: for all of them with the columns that any sees, where
  // weights of 0 stand for what is hidden. Unless all numbers are finite: 0 times another is NaN, so each row is multiplied
  // with the columns that it sees. The bits are the same.
  template <class Multiply>
  NSA_INLINE void products(int64_t first, int64_t n, Multiply&& multiply) const {
    if (finite) return multiply(0, n, c0, c1);
    for (int64_t i = 0; i < n; ++i) multiply(i, 1, begin[(first + i) / R], end[(first + i) / R]);
  }
};
template <class E>
Columns columns(const Problem& p, const Grid& grid, const Block& block, int64_t b, const int64_t* queries, int64_t n,
                bool finite, Scratch& scratch) {
  Columns seen{scratch.take<int32_t>(n), scratch.take<int32_t>(n), block.n, 0, p.R, finite};
  for (int64_t i = 0; i < n; ++i) {
    const Span& span = grid.spans[b * p.S + queries[i]];
    seen.begin[i] = std::max<int64_t>(span.begin - block.begin, 0);
    seen.end[i] = std::min(span.end - block.begin, block.n);
    if (seen.begin[i] >= seen.end[i]) {
      seen.begin[i] = seen.end[i] = 0;
      continue;
    }
    seen.c0 = std::min<int64_t>(seen.c0, seen.begin[i]), seen.c1 = std::max<int64_t>(seen.c1, seen.end[i]);
  }
  seen.c0 = seen.c0 / E::kColumns * E::kColumns;
  seen.c1 = round_up(seen.c1, E::kColumns);
  return seen;
}

// Overwrites the numbers of a row that lie in c0 … c1 − 1 and outside begin … end − 1.
NSA_INLINE void hide(float* row, int64_t c0, int64_t c1, int64_t begin, int64_t end, float with = -INFINITY) {
  if (begin <= c0 && end >= c1) return;
  for (int64_t c = c0; c < c1; c += W)
    if (c < begin || c + W > end) store(row + c, lanes_in(load(row + c), begin - c, end - c, with));
}

constexpr float kLog2e = 1.4426950408889634f;

// Scores relative to `at`, scaled. Large ones are subtracted first: their difference is exact, that of their rounded products
// is not. Else `at` is given scaled, and one instruction does both.
template <bool kLarge>
NSA_INLINE V relative(V scores, V at, V scale) {
  if constexpr (kLarge) return (scores - at) * scale;
  return scores * scale - at;
}
template <class Run>
NSA_INLINE auto by_size(bool large, Run&& run) {
  return large ? run(std::true_type{}) : run(std::false_type{});
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
