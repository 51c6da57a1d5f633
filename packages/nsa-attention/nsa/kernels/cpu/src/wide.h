// fp32 arithmetic for every dtype and instruction set: inputs are widened to fp32 when they are packed, all arithmetic is fp32.
#pragma once
#include "gemm.h"
#include "pool.h"

namespace nsa {
namespace NSA_NAMESPACE {

struct Wide {
  using Cell = float;      // as in packed rows of queries
  using Weight = float;    // as probabilities go into the second product
  static constexpr bool kInPlace = true;   // weights overwrite the scores they come from
  static constexpr Exactness kOfWeights = kFine, kOfChoice = kFine;
  static constexpr int64_t kColumns = kPair;  // scores are computed and weighed in multiples of this many keys
  static constexpr bool kAnyColumns = true;   // `weigh` may begin and end anywhere
  static constexpr int64_t kTileRows = 2048;  // rows of a tile that chose blocks: their sums should stay in cache
  static constexpr int64_t kPassRows = 24;  // rows that a block's scores are computed, turned into weights and used for at once
  static constexpr int64_t kLongChoiceRows = 64;  // rows of a tile that chooses among more keys than the second-level cache holds
  static constexpr int64_t kRunKeys = 64;  // keys per block where queries see runs of keys
  struct Thread {
    Scratch scratch;
  };

  static int64_t width(int64_t n) { return round_up(n, W); }

  static void load_row(int64_t dtype, const char* from, Cell* to, int64_t n) { widen_row(dtype, from, to, n, width(n)); }
  // Queries are scaled, so that scores need not be: a score is one natural unit of the softmax.
  static void load_query(const Problem& p, const char* from, Cell* to) {
    load_row(p.dtype, from, to, p.K);
    const V scale = set1(static_cast<float>(p.scale));
    for (int64_t i = 0; i < width(p.K); i += W) store(to + i, load(to + i) * scale);
  }
  static float score_unit(const Problem&) { return 1; }
  static NSA_INLINE V in_units(V scores, V) { return scores; }
  static bool finite(const Cell* x, int64_t n) {  // n is a multiple of W
    V zeros{};
    for (int64_t i = 0; i < n; i += W) zeros += load(x + i) * set1(0.f);
    return sum(zeros) == 0;
  }

  static NSA_INLINE void copy_row(Cell* to, const Cell* from, int64_t wide) {
    for (int64_t i = 0; i < wide; i += W) store(to + i, load(from + i));
  }

  // Packed for products that sum over the width: [n][keys]. A null row is one that no query sees.
  static int64_t across_size(int64_t n, int64_t keys) { return n * keys; }
  static void pack_across(int64_t dtype, const char* const* rows, int64_t n_rows, int64_t n, int64_t keys, Cell* to,
                          Scratch& scratch) {
    float* along = scratch.take<float>(along_size(n, keys));
    pack_along(dtype, rows, n_rows, n, keys, along, scratch);
    for (int64_t k = 0; k < n; ++k)
      for (int64_t i = 0; i < keys; ++i) to[k * keys + i] = along[i * width(n) + k];
  }
  // Packed for products that sum over the keys: [keys][width(n)].
  static int64_t along_size(int64_t n, int64_t keys) { return keys * width(n); }
  static void pack_along(int64_t dtype, const char* const* rows, int64_t n_rows, int64_t n, int64_t keys, Cell* to,
                         Scratch&) {
    for (int64_t i = 0; i < keys; ++i, to += width(n)) {
      if (i < n_rows && rows[i])
        widen_row(dtype, rows[i], to, n, width(n));
      else
        memset(to, 0, width(n) * sizeof(float));
    }
  }

  // out[row][key] for keys c0 … c1 − 1, from rows of width(n) cells.
  static void scores(const Cell* rows, int64_t n_rows, const Cell* across, int64_t n, int64_t keys, int64_t c0,
                     int64_t c1, float* out, int64_t ld_out) {
    gemm<false>(n_rows, c1 - c0, n, rows, width(n), across + c0, keys, out + c0, ld_out, false);
  }
  // out[row][·] (+)= Σ over keys c0 … c1 − 1 of weight[row][key] · along[key][·]
  static void weigh(const Weight* weights, int64_t ld, int64_t n_rows, const Cell* along, int64_t n, int64_t c0,
                    int64_t c1, float* out, bool add) {
    gemm<false>(n_rows, width(n), c1 - c0, weights + c0, ld, along + c0 * width(n), width(n), out, width(n), add);
  }
  static NSA_INLINE void store_weights(Weight* to, V x, V y) { store(to, x), store(to + W, y); }
  // Scores are overwritten by what they become.
  static Weight* weights_in(float* scores, Scratch&, int64_t) { return scores; }
};

}  // namespace NSA_NAMESPACE
}  // namespace nsa
