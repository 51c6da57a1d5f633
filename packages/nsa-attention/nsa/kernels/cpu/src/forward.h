// Attention forward: online softmax over the blocks that a tile visits.
#pragma once
#include "tile.h"

namespace nsa {
namespace NSA_NAMESPACE {

// Softmax state of a row: the score that exponentials are relative to. It moves only when a score passes it by kSlack, a
// power of two, or so: until then nothing has to be rescaled, and sums stay far from overflow.
constexpr float kSlack = 8, kMuch = 256;
constexpr float kLargeScore = 1 << 26;  // whose rounding, a factor of a whole row, could leave fp32's range
struct RowState {
  float at = -INFINITY, limit = -INFINITY;
};

// Scores c0 … c1 − 1 of a row become weights. `rescale(factor)` is called before if the reference point moves.
template <class E, class Rescale>
NSA_INLINE void softmax_row(float* scores, typename E::Weight* weights, int64_t c0, int64_t c1, int64_t begin,
                            int64_t end, float scale2, RowState& state, float* total, Rescale&& rescale) {
  if (begin >= end) {
    for (int64_t c = c0; c < c1; c += kPair) E::store_weights(weights + c, V{}, V{});
    return;
  }
  hide(scores, c0, c1, begin, end);
  V sums = load(total);
  const auto keep_up = [&] {
    V most = load(scores + c0);
    for (int64_t c = c0 + W; c < c1; c += W) most = vmax(most, load(scores + c));
    if (!any_above(most, set1(state.limit))) return;
    const float at = top(most);
    const float factor = state.at == -INFINITY ? 0.f : std::exp2((state.at - at) * scale2);
    state = {at, at + kSlack / scale2};
    sums *= set1(factor);
    rescale(factor);
  };
  const auto weigh = [&](auto large) NSA_INLINE_LAMBDA {
    const float from = state.at == -INFINITY ? 0.f : state.at;
    const V c2 = set1(scale2), at = set1(large ? from : from * scale2);
    V added{};
    for (int64_t c = c0; c < c1; c += kPair) {
      const V x = exp2v<E::kOfWeights>(relative<large>(load(scores + c), at, c2));
      const V y = exp2v<E::kOfWeights>(relative<large>(load(scores + c + W), at, c2));
      added += x + y;
      E::store_weights(weights + c, x, y);
    }
    return added;
  };
  // Where scores outlive their weights, a score that was too high shows in the sum, and the row is done again: that is
  // rare, and looking for the highest score first would cost every row a tenth of its time.
  if (E::kInPlace || state.at == -INFINITY) keep_up();
  const auto weigh_any = [&]() NSA_INLINE_LAMBDA { return by_size(!(std::abs(state.at) * scale2 < kLargeScore), weigh); };
  V added = weigh_any();
  if (!E::kInPlace && any_above(added, set1(kMuch * (c1 - c0)))) keep_up(), added = weigh_any();
  store(total, sums + added);
}

NSA_INLINE void multiply_row(float* x, int64_t n, float by) {
  for (int64_t i = 0; i < n; i += W) store(x + i, load(x + i) * set1(by));
}

NSA_INLINE void add_row(float* to, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += W) store(to + i, load(to + i) + load(x + i));
}

// Writes a row's output and log-sum-exp; zeros and −inf where nothing was seen.
template <class E>
NSA_INLINE void finish_row(const Problem& p, int64_t b, int64_t s, int64_t g, int64_t r, float* sums, float total,
                           float at) {
  const bool nothing = total == 0;
  multiply_row(sums, E::width(p.V), nothing ? 0.f : 1.f / total);
  narrow_row(p.dtype, sums, row(p, p.out, b, s, g, r), p.V);
  p.lse[((b * p.S + s) * p.G + g) * p.R + r] = nothing ? -INFINITY : at * E::score_unit(p) + std::log(total);
}

// Returns false, with nothing computed, where values that are not finite must be left out and E cannot.
template <class E>
bool forward(const Problem& p) {
  large_pages_for(p, p.out, p.V);
  const Grid grid(p, E::kRunKeys);
  const auto used = used_blocks(p, grid);
  const auto keys = across<E>(p, grid, used, p.k, p.K);
  const auto values = along<E>(p, grid, used, p.v, p.V);
  const int64_t R = p.R, K = E::width(p.K), V_ = E::width(p.V), block_keys = round_up(grid.width, E::kColumns);
  if (!E::kAnyColumns && !values.finite()) return false;
  const float scale2 = E::score_unit(p) * kLog2e;
  const Tiles tiles(p, tile_rows<E>(p));

  parallel<typename E::Thread>(tiles.count(), p.threads, [&](auto& thread, int64_t item) {
    Scratch scratch = thread.scratch;
    const Tile tile = tiles[item];
    const int64_t n_rows = tile.n * R;
    auto* q = scratch.template take<typename E::Cell>((n_rows + 32) * K);
    auto* few = scratch.template take<typename E::Cell>(E::kPassRows * K);
    auto* sums = scratch.template take<float>((n_rows + 32) * V_);
    auto* part = scratch.template take<float>(E::kPassRows * V_);
    auto* totals = scratch.template take<float>(n_rows * W);
    auto* states = scratch.template take<RowState>(n_rows);
    auto* scores = scratch.template take<float>(E::kPassRows * block_keys);
    auto* weights = E::weights_in(scores, scratch, E::kPassRows * block_keys);
    auto* at = scratch.template take<int64_t>(tile.n);
    for (int64_t i = 0; i < n_rows; ++i)
      E::load_query(p, row(p, p.q, tile.b, tile.begin + i / R, tile.g, i % R), q + i * K);
    memset(sums, 0, n_rows * V_ * sizeof(float));
    memset(totals, 0, n_rows * W * sizeof(float));
    std::fill_n(states, n_rows, RowState{});

    for_each_block(p, grid, tile, scratch, [&](int64_t block, const int32_t* queries, int64_t n) {
      Scratch inner = scratch;
      for (int64_t i = 0; i < n; ++i) at[i] = tile.begin + (queries ? queries[i] : i);
      const Columns seen = columns<E>(p, grid, grid.blocks[block], tile.b, at, n, values.finite(), inner);
      if (seen.none()) return;
      for (int64_t done = 0, i = 0, r = 0; done < n * R; done += E::kPassRows) {
        const int64_t m = std::min(E::kPassRows, n * R - done);
        struct {
          int64_t row, query;  // in the tile, in the step
        } of[E::kPassRows];
        for (int64_t k = 0; k < m; ++k) {
          of[k] = {(queries ? queries[i] : i) * R + r, i};
          if (++r == R) r = 0, ++i;
        }
        const typename E::Cell* rows = q + done * K;
        if (queries) {
          for (int64_t k = 0; k < m; ++k) E::copy_row(few + k * K, q + of[k].row * K, K);
          rows = few;
        }
        E::scores(rows, m, keys.at(block, tile.g), p.K, block_keys, seen.c0, seen.c1, scores, block_keys);
        for (int64_t k = 0; k < m; ++k)
          softmax_row<E>(scores + k * block_keys, weights + k * block_keys, seen.c0, seen.c1, seen.begin[of[k].query],
                         seen.end[of[k].query], scale2, states[of[k].row], totals + of[k].row * W,
                         [&](float factor) { multiply_row(sums + of[k].row * V_, V_, factor); });
        seen.products(done, m, [&](int64_t k, int64_t n_rows, int64_t c0, int64_t c1) {
          E::weigh(weights + k * block_keys, block_keys, n_rows, values.at(block, tile.g), p.V, c0, c1,
                   (queries ? part : sums + done * V_) + k * V_, !queries);
        });
        if (queries)
          for (int64_t k = 0; k < m; ++k) add_row(sums + of[k].row * V_, part + k * V_, V_);
      }
    });
    for (int64_t i = 0; i < n_rows; ++i)
      finish_row<E>(p, tile.b, tile.begin + i / R, tile.g, i % R, sums + i * V_, sum(load(totals + i * W)),
                    states[i].at);
  });
  return true;
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
