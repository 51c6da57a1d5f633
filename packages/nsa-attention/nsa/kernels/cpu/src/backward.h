// Gradients from the saved log-sum-exp. Queries' gradients go tile by tile, as forward does; those of keys and values
// block by block, each block meeting the queries that see it in ascending order. No sum is shared between threads.
#pragma once
#include "forward.h"

namespace nsa {
namespace NSA_NAMESPACE {

constexpr float kLargeLse = 64;  // whose rounding would show in a probability

// Unless they are large, the log-sum-exp and the unit are given times log2 e.
template <class E, Exactness kHow, bool kLarge>
NSA_INLINE V probabilities(V scores, V lse, V score_unit) {
  if constexpr (kLarge) return exp2v<kHow>(relative<true>(E::in_units(scores, score_unit), lse, set1(kLog2e)));
  return exp2v<kHow>(relative<false>(scores, lse, score_unit));
}

// Scores c0 … c1 − 1 of a row and the products dout · v become p and p · (dout · v − delta), the gradient of a score times
// the scale. Both are 0 where a key is hidden, whatever the numbers are.
template <class E, Exactness kHow, class Store>
NSA_INLINE void gradient_row(const float* scores, const float* products, int64_t c0, int64_t c1, int64_t begin,
                             int64_t end, float score_unit, float lse, float delta, Store&& put) {
  by_size(!(std::abs(lse) < kLargeLse), [&](auto large) NSA_INLINE_LAMBDA {
    const float base = large ? 1 : kLog2e;
    const V at = set1(lse * base), unit = set1(score_unit * base), less = set1(delta);
    for (int64_t c = c0; c < c1; c += kPair) {
      V x = probabilities<E, kHow, large>(load(scores + c), at, unit);
      V y = probabilities<E, kHow, large>(load(scores + c + W), at, unit);
      V dx = x * (load(products + c) - less), dy = y * (load(products + c + W) - less);
      if (c < begin || c + kPair > end) {
        x = lanes_in(x, begin - c, end - c, 0.f), y = lanes_in(y, begin - c - W, end - c - W, 0.f);
        dx = lanes_in(dx, begin - c, end - c, 0.f), dy = lanes_in(dy, begin - c - W, end - c - W, 0.f);
      }
      put(c, x, y, dx, dy);
    }
  });
}

// Rows of queries gathered for a step, with what their gradients need.
template <class E>
struct Gathered {
  typename E::Cell *q, *dout;
  float *lse, *delta;
  Gathered(Scratch& scratch, int64_t rows, int64_t K, int64_t V_)
      : q(scratch.take<typename E::Cell>(rows * K)), dout(scratch.take<typename E::Cell>(rows * V_)),
        lse(scratch.take<float>(rows)), delta(scratch.take<float>(rows)) {}
  void load(const Problem& p, const float* deltas, int64_t b, int64_t s, int64_t g, int64_t i) {
    const int64_t K = E::width(p.K), V_ = E::width(p.V);
    for (int64_t r = 0; r < p.R; ++r, ++i) {
      const int64_t at = ((b * p.S + s) * p.G + g) * p.R + r;
      E::load_query(p, row(p, p.q, b, s, g, r), q + i * K);
      E::load_row(p.dtype, row(p, p.dout, b, s, g, r), dout + i * V_, p.V);
      lse[i] = p.lse[at] == -INFINITY ? 0.f : p.lse[at];
      delta[i] = deltas[at];
    }
  }
  // Whether the first n rows are; of dout that of delta, which is a sum of products with all of it.
  bool finite(const Problem& p, int64_t n) const {
    bool all = E::finite(q, n * E::width(p.K));
    for (int64_t i = 0; i < n; ++i) all &= std::isfinite(delta[i]);
    return all;
  }
};

// delta = dout · out for every row of a tile: what the softmax takes off each product. A gradient of the log-sum-exp adds
// p times itself to every score's, so it is outcome off delta.
inline void find_deltas(const Problem& p, const Tile& tile, float* deltas, Scratch scratch) {
  const int64_t width = round_up(p.V, W);
  float *dout = scratch.take<float>(width), *out = scratch.take<float>(width);
  for (int64_t s = tile.begin; s < tile.begin + tile.n; ++s)
    for (int64_t r = 0; r < p.R; ++r) {
      widen_row(p.dtype, row(p, p.dout, tile.b, s, tile.g, r), dout, p.V, width);
      widen_row(p.dtype, row(p, p.out, tile.b, s, tile.g, r), out, p.V, width);
      V products{};
      for (int64_t c = 0; c < width; c += W) products += load(dout + c) * load(out + c);
      const int64_t at = ((tile.b * p.S + s) * p.G + tile.g) * p.R + r;
      deltas[at] = sum(products) - (p.dlse ? p.dlse[at] : 0.f);
    }
}

// Returns whether the rows of all queries are finite.
template <class E>
bool query_gradients(const Problem& p, const Grid& grid, const Packed<E>& keys_across, const Packed<E>& values_across,
                     const Packed<E>& keys_along, float* deltas) {
  std::atomic<bool> finite{true};
  const int64_t R = p.R, K = E::width(p.K), V_ = E::width(p.V), block_keys = round_up(grid.width, E::kColumns);
  const Tiles tiles(p, tile_rows<E>(p));
  parallel<typename E::Thread>(tiles.count(), p.threads, [&](auto& thread, int64_t item) {
    Scratch scratch = thread.scratch;
    const Tile tile = tiles[item];
    const int64_t n_rows = tile.n * R, step_rows = round_up(std::max(kStepRows, R), 32);
    Gathered<E> rows(scratch, n_rows + 32, K, V_), few(scratch, step_rows, K, V_);
    auto* sums = scratch.template take<float>((n_rows + 32) * K);
    auto* part = scratch.template take<float>(step_rows * K);
    auto* scores = scratch.template take<float>(step_rows * block_keys);
    auto* products = scratch.template take<float>(step_rows * block_keys);
    auto* weights = E::weights_in(scores, scratch, step_rows * block_keys);
    auto* at = scratch.template take<int64_t>(tile.n);
    find_deltas(p, tile, deltas, scratch);
    for (int64_t i = 0; i < tile.n; ++i) rows.load(p, deltas, tile.b, tile.begin + i, tile.g, i * R);
    if (!rows.finite(p, n_rows)) finite = false;
    memset(sums, 0, n_rows * K * sizeof(float));

    for_each_block(p, grid, tile, scratch, [&](int64_t block, const int32_t* queries, int64_t n) {
      Scratch inner = scratch;
      for (int64_t i = 0; i < n; ++i) at[i] = tile.begin + (queries ? queries[i] : i);
      const Columns seen = columns<E>(p, grid, grid.blocks[block], tile.b, at, n, keys_along.finite(), inner);
      if (seen.none()) return;
      const Gathered<E>* from = &rows;
      if (queries) {
        for (int64_t i = 0; i < n; ++i) {
          memcpy(few.q + i * R * K, rows.q + queries[i] * R * K, R * K * sizeof(*few.q));
          memcpy(few.dout + i * R * V_, rows.dout + queries[i] * R * V_, R * V_ * sizeof(*few.dout));
        }
        from = &few;
      }
      E::scores(from->q, n * R, keys_across.at(block, tile.g), p.K, block_keys, seen.c0, seen.c1, scores, block_keys);
      E::scores(from->dout, n * R, values_across.at(block, tile.g), p.V, block_keys, seen.c0, seen.c1, products,
                block_keys);
      for (int64_t i = 0; i < n * R; ++i) {
        const int64_t target = queries ? queries[i / R] * R + i % R : i;
        auto* to = weights + i * block_keys;
        gradient_row<E, E::kOfChoice>(scores + i * block_keys, products + i * block_keys, seen.c0, seen.c1,
                                   seen.begin[i / R], seen.end[i / R], E::score_unit(p), rows.lse[target],
                                   rows.delta[target],
                                   [&](int64_t c, V, V, V dx, V dy) { E::store_weights(to + c, dx, dy); });
      }
      seen.products(0, n * R, [&](int64_t i, int64_t n_rows, int64_t c0, int64_t c1) {
        E::weigh(weights + i * block_keys, block_keys, n_rows, keys_along.at(block, tile.g), p.K, c0, c1,
                 (queries ? part : sums) + i * K, !queries);
      });
      if (queries)
        for (int64_t i = 0; i < n; ++i) {
          float* to = sums + queries[i] * R * K;
          for (int64_t c = 0; c < R * K; c += W) store(to + c, load(to + c) + load(part + i * R * K + c));
        }
    });
    for (int64_t i = 0; i < n_rows; ++i) {
      multiply_row(sums + i * K, K, p.scale);
      narrow_row(p.dtype, sums + i * K, row(p, p.dq, tile.b, tile.begin + i / R, tile.g, i % R), p.K);
    }
  });
  return finite;
}

// For each block and group, the queries that need it, ascending.
class Readers {
 public:
  Readers(const Problem& p, const Grid& grid) : p_(p), grid_(grid) {
    if (p.branch == kSelected)
      by_choice();
    else
      by_span();
  }
  // Calls take(s) for each query of block i (of all groups' blocks: block · G + g).
  template <class Take>
  void for_each(int64_t i, Take&& take) const {
    if (p_.branch == kSelected) {
      for (int64_t at = end_[i]; at < end_[i + 1]; ++at) take(queries_[at]);
      return;
    }
    const Block& block = grid_.blocks[i / p_.G];
    const int64_t per_row = (p_.S + kRun - 1) / kRun;
    for (int64_t run = 0; run < per_row; ++run) {
      const Span& all = runs_[block.b * per_row + run];
      if (all.begin >= block.begin + block.n || all.end <= block.begin) continue;
      for (int64_t s = run * kRun; s < std::min(p_.S, (run + 1) * kRun); ++s) {
        const Span& span = grid_.spans[block.b * p_.S + s];
        if (!span.empty() && span.begin < block.begin + block.n && span.end > block.begin) take(s);
      }
    }
  }

 private:
  static constexpr int64_t kRun = 64;

  void by_span() {
    for (int64_t b = 0; b < p_.B; ++b)
      for (int64_t s0 = 0; s0 < p_.S; s0 += kRun) {
        Span all{p_.T, 0};
        for (int64_t s = s0; s < std::min(p_.S, s0 + kRun); ++s) {
          const Span& span = grid_.spans[b * p_.S + s];
          if (!span.empty()) all = {std::min(all.begin, span.begin), std::max(all.end, span.end)};
        }
        runs_.push_back(all);
      }
  }
  // A stable counting sort.
  void by_choice() {
    end_.assign(grid_.blocks.size() * p_.G + 1, 0);
    const auto each = [&](auto&& visit) {
      for (int64_t b = 0; b < p_.B; ++b)
        for (int64_t s = 0; s < p_.S; ++s)
          for (int64_t g = 0; g < p_.G; ++g)
            chosen(p_, grid_, b, s, g, [&](int64_t block) { visit(block * p_.G + g, s); });
    };
    each([&](int64_t i, int64_t) { ++end_[i + 1]; });
    for (size_t i = 1; i < end_.size(); ++i) end_[i] += end_[i - 1];
    queries_.resize(end_.back());
    std::vector<int64_t> next(end_.begin(), end_.end() - 1);
    each([&](int64_t i, int64_t s) { queries_[next[i]++] = static_cast<int32_t>(s); });
  }

  const Problem& p_;
  const Grid& grid_;
  std::vector<int64_t> end_;
  std::vector<int32_t> queries_;
  std::vector<Span> runs_;
};

template <class E>
void key_gradients(const Problem& p, const Grid& grid, const typename E::KeySide& keys, bool finite,
                   const float* deltas) {
  const Readers readers(p, grid);
  const int64_t R = p.R, K = E::width(p.K), V_ = E::width(p.V), block_keys = round_up(grid.width, E::kColumns);
  const int64_t step_queries = std::max<int64_t>(1, E::kKeyStepRows / R), step_rows = round_up(step_queries * R, 32);
  parallel<typename E::Thread>(grid.blocks.size() * p.G, p.threads, [&](auto& thread, int64_t item) {
    Scratch scratch = thread.scratch;
    const Block& block = grid.blocks[item / p.G];
    const int64_t g = item % p.G;
    auto* dk = scratch.template take<float>(block_keys * K);
    auto* dv = scratch.template take<float>(block_keys * V_);
    Gathered<E> rows(scratch, step_rows, K, V_);
    auto* queries = scratch.template take<int64_t>(step_queries);
    memset(dk, 0, block_keys * K * sizeof(float));
    memset(dv, 0, block_keys * V_ * sizeof(float));
    int64_t n = 0;
    const auto step = [&] {
      Scratch inner = scratch;
      const Columns seen = columns<E>(p, grid, block, block.b, queries, n, finite, inner);
      if (!seen.none()) E::key_step(p, keys, item / p.G, g, rows, n, seen, block_keys, dk, dv, inner);
      n = 0;
    };
    readers.for_each(item, [&](int64_t s) {
      rows.load(p, deltas, block.b, s, g, n * R);
      queries[n++] = s;
      if (n == step_queries) step();
    });
    if (n) step();
    for (int64_t t = std::max<int64_t>(0, -block.begin); t < block.n; ++t) {
      multiply_row(dk + t * K, K, E::score_unit(p));
      narrow_row(p.dtype, dk + t * K, row(p, p.dk, block.b, block.begin + t, g), p.K);
      narrow_row(p.dtype, dv + t * V_, row(p, p.dv, block.b, block.begin + t, g), p.V);
    }
  });
}

// Gradients cannot be computed where two documents share keys, which block-by-block sums cannot express, or where numbers
// that are not finite must be left out and E cannot.
enum BackwardOutcome { kComputed, kDocumentsOverlap, kNotFinite };
template <class E>
BackwardOutcome backward(const Problem& p) {
  large_pages_for(p, p.dq, p.K);
  const Grid grid(p, E::kRunKeys);
  if (grid.documents_overlap) return kDocumentsOverlap;
  const auto used = used_blocks(p, grid);
  Array<float> deltas(p.B * p.S * p.G * p.R);
  const auto keys = across<E>(p, grid, used, p.k, p.K);
  const auto values = across<E>(p, grid, used, p.v, p.V);
  const auto keys_along = along<E>(p, grid, used, p.k, p.K);
  if (!E::kAnyColumns && !keys_along.finite()) return kNotFinite;
  const bool finite = query_gradients<E>(p, grid, keys, values, keys_along, deltas.get());
  if (!E::kAnyColumns && !finite) return kNotFinite;
  key_gradients<E>(p, grid, typename E::KeySide(p, grid, used, keys, values), finite, deltas.get());
  return kComputed;
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
