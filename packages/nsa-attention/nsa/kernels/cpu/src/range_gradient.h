// Gradients where each query sees one range of keys, in one pass over (tile, block): five products instead of seven.
//
// Queries are cut into chunks by the length alone. A chunk sums its share of the keys' gradients in memory of its own,
// and the shares are added in order: no sum depends on which thread came first.
#pragma once
#include "wide_gradient.h"

namespace nsa {
namespace NSA_NAMESPACE {

constexpr int64_t kMostChunks = 16, kFewestQueries = 256;  // memory is at most kMostChunks times the keys' gradients

class Chunks {
 public:
  struct Chunk {
    int64_t b, begin, end;        // queries
    int64_t block, n_blocks, at;  // the blocks they see, and where their sums begin
  };
  std::vector<Chunk> all;
  int64_t n_blocks = 0;  // of all chunks together

  Chunks(const Problem& p, const Grid& grid) {
    const int64_t queries = std::max(kFewestQueries, (p.S + kMostChunks - 1) / kMostChunks);
    for (int64_t b = 0; b < p.B; ++b)
      for (int64_t begin = 0; begin < p.S; begin += queries) {
        const int64_t end = std::min(p.S, begin + queries);
        Span seen{p.T, 0};
        for (int64_t s = begin; s < end; ++s)
          if (const Span& span = grid.spans[b * p.S + s]; !span.empty())
            seen = {std::min(seen.begin, span.begin), std::max(seen.end, span.end)};
        const int64_t first = seen.begin / grid.width, n = seen.empty() ? 0 : (seen.end - 1) / grid.width + 1 - first;
        all.push_back({b, begin, end, grid.first[b] + first, n, n_blocks});
        n_blocks += n;
      }
  }
};

inline void range_gradients(const Problem& p, const Grid& grid) {
  using E = WideBackward;
  large_pages_for(p, p.dq, p.K);
  const auto used = used_blocks(p, grid);
  const auto keys = across<E>(p, grid, used, p.k, p.K), values = across<E>(p, grid, used, p.v, p.V);
  const auto keys_along = along<E>(p, grid, used, p.k, p.K);
  const Chunks chunks(p, grid);
  const int64_t R = p.R, K = E::width(p.K), V_ = E::width(p.V), block_keys = round_up(grid.width, E::kColumns);
  const int64_t per_block = block_keys * (K + V_), step = std::max<int64_t>(1, kStepRows / R);
  Array<float> shares(chunks.n_blocks * p.G * per_block), deltas(p.B * p.S * p.G * R);

  parallel<E::Thread>(chunks.all.size() * p.G, p.threads, [&](auto& thread, int64_t item) {
    const auto& chunk = chunks.all[chunks.all.size() - 1 - item / p.G];  // the last ones see most
    const int64_t g = item % p.G, b = chunk.b;
    float* share = shares.get() + (chunk.at * p.G + g * chunk.n_blocks) * per_block;
    memset(share, 0, chunk.n_blocks * per_block * sizeof(float));
    for (int64_t s = chunk.begin; s < chunk.end; s += step) {
      Scratch scratch = thread.scratch;
      const Tile tile{b, g, s, std::min(step, chunk.end - s)};
      const int64_t n_rows = tile.n * R;
      Gathered<E> rows(scratch, n_rows, K, V_);
      auto* sums = scratch.template take<float>(n_rows * K);
      auto* scores = scratch.template take<float>(n_rows * block_keys);
      auto* products = scratch.template take<float>(n_rows * block_keys);
      auto* queries = scratch.template take<int64_t>(tile.n);
      for (int64_t i = 0; i < tile.n; ++i) queries[i] = s + i;
      find_deltas(p, tile, deltas.get(), scratch);
      for (int64_t i = 0; i < tile.n; ++i) rows.load(p, deltas.get(), b, s + i, g, i * R);
      const bool finite = rows.finite(p, n_rows) && keys_along.finite();
      memset(sums, 0, n_rows * K * sizeof(float));
      for_each_block(p, grid, tile, scratch, [&](int64_t block, const int32_t*, int64_t n) {
        Scratch inner = scratch;
        const Columns seen = columns<E>(p, grid, grid.blocks[block], b, queries, n, finite, inner);
        if (seen.none()) return;
        const int64_t c0 = seen.c0, c1 = seen.c1;
        E::scores(rows.q, n_rows, keys.at(block, g), p.K, block_keys, c0, c1, scores, block_keys);
        E::scores(rows.dout, n_rows, values.at(block, g), p.V, block_keys, c0, c1, products, block_keys);
        for (int64_t i = 0; i < n_rows; ++i) {
          float *x = scores + i * block_keys, *dx = products + i * block_keys;
          gradient_row<E, kFine>(x, dx, c0, c1, seen.begin[i / R], seen.end[i / R], 1, rows.lse[i], rows.delta[i],
                                 [&](int64_t c, V p0, V p1, V d0, V d1) {
                                   store(x + c, p0), store(x + c + W, p1), store(dx + c, d0), store(dx + c + W, d1);
                                 });
        }
        float* dk = share + (block - chunk.block) * per_block;
        float* dv = dk + block_keys * K;
        seen.products(0, n_rows, [&](int64_t i, int64_t m, int64_t from, int64_t to) {
          const float *of_scores = products + i * block_keys, *weights = scores + i * block_keys;
          E::weigh(of_scores, block_keys, m, keys_along.at(block, g), p.K, from, to, sums + i * K, true);
          gemm<true>(to - from, K, m, of_scores + from, block_keys, rows.q + i * K, K, dk + from * K, K, true);
          gemm<true>(to - from, V_, m, weights + from, block_keys, rows.dout + i * V_, V_, dv + from * V_, V_, true);
        });
      });
      for (int64_t i = 0; i < n_rows; ++i) {
        multiply_row(sums + i * K, K, p.scale);
        narrow_row(p.dtype, sums + i * K, row(p, p.dq, b, s + i / R, g, i % R), p.K);
      }
    }
  });

  parallel<E::Thread>(grid.blocks.size() * p.G, p.threads, [&](auto& thread, int64_t item) {
    Scratch scratch = thread.scratch;
    const int64_t block = item / p.G, g = item % p.G;
    const Block& of = grid.blocks[block];
    float* sums = scratch.template take<float>(per_block);
    memset(sums, 0, per_block * sizeof(float));
    for (const auto& chunk : chunks.all) {
      if (chunk.b != of.b || block < chunk.block || block >= chunk.block + chunk.n_blocks) continue;
      const float* share = shares.get() + (chunk.at * p.G + g * chunk.n_blocks + block - chunk.block) * per_block;
      for (int64_t c = 0; c < per_block; c += W) store(sums + c, load(sums + c) + load(share + c));
    }
    for (int64_t t = 0; t < of.n; ++t) {
      narrow_row(p.dtype, sums + t * K, row(p, p.dk, of.b, of.begin + t, g), p.K);
      narrow_row(p.dtype, sums + block_keys * K + t * V_, row(p, p.dv, of.b, of.begin + t, g), p.V);
    }
  });
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
