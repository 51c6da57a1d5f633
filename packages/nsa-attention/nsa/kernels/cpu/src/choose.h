// Compressed attention and top-n block selection in one pass: both need the same probabilities.
//
// A tile's scores against all compressed keys it sees fit a thread's cache, so they are kept until the rows' maxima are
// known; then every probability is computed once. Equal keys get equal probabilities to the last bit, so ties stay ties.
#pragma once
#include "forward.h"
#include "select_blocks.h"

namespace nsa {
namespace NSA_NAMESPACE {

// Scores of a tile: at most what a second-level cache holds beside the keys and values that fit it.
template <class E>
int64_t choose_rows(const Problem& p) {
  return p.T <= 2048 ? kStepRows : E::kLongChoiceRows;
}

// Sum over the group's heads of the probabilities that one query gives the keys of a block.
NSA_INLINE void group_mass(const float* weights, const float* share, int64_t R, int64_t block_keys, float* mass) {
  for (int64_t c = 0; c < block_keys; c += W) {
    V total{};
    for (int64_t r = 0; r < R; ++r) total += load(weights + r * block_keys + c) * set1(share[r]);
    store(mass + c, total);
  }
}

// p.idx: the chosen blocks. p.out (may be null) and p.lse: the compressed branch. p.branch is kCompressed.
// Returns false, with nothing computed, where values that are not finite must be left out and E cannot.
template <class E>
bool choose(const Problem& p) {
  const Grid grid(p, E::kRunKeys);
  const auto used = used_blocks(p, grid);
  const auto keys = across<E>(p, grid, used, p.k, p.K);
  const bool attend = p.out.data != nullptr;
  if (attend) large_pages_for(p, p.out, p.V);
  Problem of_values = p;
  if (!attend) of_values.G = 0;  // no values were given: nothing is packed
  const auto values = along<E>(of_values, grid, used, p.v, p.V);
  const int64_t R = p.R, K = E::width(p.K), V_ = E::width(p.V), block_keys = round_up(grid.width, E::kColumns);
  if (!E::kAnyColumns && !values.finite()) return false;
  const float scale2 = E::score_unit(p) * kLog2e;
  const int64_t n_taps = p.l_sel / p.d + p.l / p.d - 1;
  std::vector<float> taps(n_taps);
  overlap_weights(p, taps.data());
  const Tiles tiles(p, choose_rows<E>(p));

  parallel<typename E::Thread>(tiles.count(), p.threads, [&](auto& thread, int64_t item) {
    Scratch scratch = thread.scratch;
    const Tile tile = tiles[item];
    const int64_t n_rows = tile.n * R, padded_rows = round_up(n_rows, 32);
    int64_t most_blocks = 0;
    Span all{p.T, 0};
    for (int64_t i = 0; i < tile.n; ++i) {
      const int64_t query = tile.b * p.S + tile.begin + i;
      if (const Span& span = grid.spans[query]; !span.empty())
        all = {std::min(all.begin, span.begin), std::max(all.end, span.end)};
      const int64_t n_blocks = blocks_up_to(p, p.pos[query]);
      most_blocks = std::max(most_blocks, n_blocks);
      if (n_blocks <= p.n_sel) all_blocks(n_blocks, p.n_sel, p.idx + (query * p.G + tile.g) * p.n_sel);
    }
    if (!attend && most_blocks <= p.n_sel) return;
    const int64_t first = all.begin / grid.width, n_blocks = all.end > all.begin ? (all.end - 1) / grid.width + 1 - first : 0;
    const int64_t per_block = padded_rows * block_keys;  // a block's scores lie together: rows far apart cost page lookups
    auto* q = scratch.template take<typename E::Cell>(padded_rows * K);
    auto* sums = scratch.template take<float>(padded_rows * V_);
    auto* totals = scratch.template take<float>(n_rows * W);
    auto* most = scratch.template take<float>(n_rows * W);
    auto* at = scratch.template take<float>(n_rows);
    auto* scores = scratch.template take<float>(n_blocks * per_block);
    auto* weights = E::weights_in(scores, scratch, E::kPassRows * block_keys);
    auto* queries = scratch.template take<int64_t>(tile.n);
    for (int64_t i = 0; i < tile.n; ++i) queries[i] = tile.begin + i;
    for (int64_t i = 0; i < n_rows; ++i) {
      E::load_query(p, row(p, p.q, tile.b, tile.begin + i / R, tile.g, i % R), q + i * K);
      store(most + i * W, set1(-INFINITY));
      store(totals + i * W, V{});
    }
    memset(sums, 0, n_rows * V_ * sizeof(float));

    for (int64_t j = 0; j < n_blocks; ++j) {
      Scratch inner = scratch;
      const int64_t block = grid.first[tile.b] + first + j;
      const Columns seen = columns<E>(p, grid, grid.blocks[block], tile.b, queries, tile.n, true, inner);
      E::scores(q, n_rows, keys.at(block, tile.g), p.K, block_keys, 0, block_keys, scores + j * per_block,
                block_keys);
      for (int64_t i = 0; i < n_rows; ++i) {
        float* of_row = scores + j * per_block + i * block_keys;
        hide(of_row, 0, block_keys, seen.begin[i / R], seen.end[i / R]);
        V high = load(most + i * W);
        for (int64_t c = 0; c < block_keys; c += W) high = vmax(high, load(of_row + c));
        store(most + i * W, high);
      }
    }
    for (int64_t i = 0; i < n_rows; ++i) {
      const float high = top(load(most + i * W));
      at[i] = high == -INFINITY ? 0.f : high;
    }
    for (int64_t j = 0; j < n_blocks; ++j) {
      Scratch inner = scratch;
      const int64_t block = grid.first[tile.b] + first + j;
      Columns seen = columns<E>(p, grid, grid.blocks[block], tile.b, queries, tile.n, values.finite(), inner);
      seen.c0 = 0, seen.c1 = block_keys;  // of which all have weights
      for (int64_t done = 0; done < n_rows; done += E::kPassRows) {
        const int64_t m = std::min(E::kPassRows, n_rows - done);
        float* of_pass = scores + j * per_block + done * block_keys;
        for (int64_t i = 0; i < m; ++i) {
          float *of_row = of_pass + i * block_keys, *total = totals + (done + i) * W;
          by_size(!(std::abs(at[done + i]) * scale2 < kLargeScore), [&](auto large) NSA_INLINE_LAMBDA {
            const V c2 = set1(scale2), from = set1(large ? at[done + i] : at[done + i] * scale2);
            V added{};
            for (int64_t c = 0; c < block_keys; c += kPair) {
              const V x = exp2v<E::kOfChoice>(relative<large>(load(of_row + c), from, c2));
              const V y = exp2v<E::kOfChoice>(relative<large>(load(of_row + c + W), from, c2));
              added += x + y;
              store(of_row + c, x), store(of_row + c + W, y);
              if (!E::kInPlace) E::store_weights(weights + i * block_keys + c, x, y);
            }
            store(total, load(total) + added);
          });
        }
        auto* of_values = E::kInPlace ? reinterpret_cast<typename E::Weight*>(of_pass) : weights;
        if (attend)
          seen.products(done, m, [&](int64_t i, int64_t n, int64_t c0, int64_t c1) {
            E::weigh(of_values + i * block_keys, block_keys, n, values.at(block, tile.g), p.V, c0, c1,
                     sums + (done + i) * V_, true);
          });
      }
    }
    auto* share = scratch.template take<float>(n_rows);
    for (int64_t i = 0; i < n_rows; ++i) {
      const float total = sum(load(totals + i * W));
      share[i] = total == 0 ? 0.f : 1.f / total;
      if (attend) finish_row<E>(p, tile.b, tile.begin + i / R, tile.g, i % R, sums + i * V_, total, at[i]);
    }
    auto* of_blocks = scratch.template take<float>(most_blocks + W);
    for (int64_t i = 0; i < tile.n; ++i) {
      const int64_t query = tile.b * p.S + tile.begin + i, n_mine = blocks_up_to(p, p.pos[query]);
      if (n_mine <= p.n_sel) continue;
      Scratch inner = scratch;
      // Compressed block 0 of the document lies at `start`; blocks before key 0 are gone and have no mass, and keys that
      // the query does not see have none: what lies around its own is zeros.
      const int64_t gone = std::max<int64_t>(0, -p.start[query]), lead = p.l / p.d - 1 + gone;
      const int64_t from = std::max<int64_t>(0, grid.spans[query].begin - first * grid.width);
      const int64_t end = lead + n_blocks * block_keys, size = from + n_mine * (p.l_sel / p.d) + n_taps + W;
      auto* mass = inner.template take<float>(std::max(end, size));
      memset(mass, 0, lead * sizeof(float));
      for (int64_t j = 0; j < n_blocks; ++j)
        group_mass(scores + j * per_block + i * R * block_keys, share + i * R, R, block_keys,
                   mass + lead + j * block_keys);
      if (size > end) memset(mass + end, 0, (size - end) * sizeof(float));
      block_scores(p, taps.data(), mass + from, n_mine, of_blocks, inner);
      select_top_blocks(of_blocks, n_mine, p.n_sel, p.idx + (query * p.G + tile.g) * p.n_sel, inner);
    }
  });
  return true;
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
