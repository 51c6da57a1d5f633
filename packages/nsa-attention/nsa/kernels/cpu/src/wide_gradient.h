// Gradients of one block in fp32.
#pragma once
#include "backward.h"

namespace nsa {
namespace NSA_NAMESPACE {

struct WideBackward : Wide {
  using E = WideBackward;
  static constexpr int64_t kKeyStepRows = kStepRows;
  struct KeySide {
    const Packed<E>&keys, &values;
    KeySide(const Problem&, const Grid&, const std::vector<uint8_t>&, const Packed<E>& k, const Packed<E>& v)
        : keys(k), values(v) {}
  };
  static void key_step(const Problem& p, const KeySide& side, int64_t block, int64_t g, const Gathered<E>& rows,
                       int64_t n, const Columns& seen, int64_t block_keys, float* dk, float* dv, Scratch& scratch) {
    const int64_t n_rows = n * p.R, K = E::width(p.K), V_ = E::width(p.V), c0 = seen.c0, c1 = seen.c1;
    auto* scores = scratch.take<float>(n_rows * block_keys);
    auto* products = scratch.take<float>(n_rows * block_keys);
    E::scores(rows.q, n_rows, side.keys.at(block, g), p.K, block_keys, c0, c1, scores, block_keys);
    E::scores(rows.dout, n_rows, side.values.at(block, g), p.V, block_keys, c0, c1, products, block_keys);
    for (int64_t i = 0; i < n_rows; ++i) {
      float *s = scores + i * block_keys, *x = products + i * block_keys;
      gradient_row<E, kFine>(s, x, c0, c1, seen.begin[i / p.R], seen.end[i / p.R], 1, rows.lse[i], rows.delta[i],
                             [&](int64_t c, V a, V b, V da, V db) {
                               store(s + c, a), store(s + c + W, b), store(x + c, da), store(x + c + W, db);
                             });
    }
    seen.products(0, n_rows, [&](int64_t i, int64_t m, int64_t from, int64_t to) {
      gemm<true>(to - from, V_, m, scores + i * block_keys + from, block_keys, rows.dout + i * V_, V_, dv + from * V_,
                 V_, true);
      gemm<true>(to - from, K, m, products + i * block_keys + from, block_keys, rows.q + i * K, K, dk + from * K, K,
                 true);
    });
  }
};

}  // namespace NSA_NAMESPACE
}  // namespace nsa
