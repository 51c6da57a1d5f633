// Gradients of one block with AMX tiles: scores are computed with keys as rows, so that probabilities come out
// as the left side of the products that sum over queries.
#pragma once
#include "amx.h"
#include "backward.h"

namespace nsa {
namespace NSA_NAMESPACE {

struct AmxBackward : Amx {
  using E = AmxBackward;
  static constexpr int64_t kKeyStepRows = 128;
  struct KeySide {
    Packed<E> keys, values;
    KeySide(const Problem& p, const Grid& grid, const std::vector<uint8_t>& used, const Packed<E>&, const Packed<E>&)
        : keys(p, grid, used, p.k, p.K, plain_size, pack_plain), values(p, grid, used, p.v, p.V, plain_size, pack_plain) {}
  };

  static void key_step(const Problem& p, const KeySide& side, int64_t block, int64_t g, const Gathered<E>& rows,
                       int64_t n, const Columns& seen, int64_t block_keys, float* dk, float* dv, Scratch& scratch) {
    const int64_t R = p.R, n_rows = n * R, padded = round_up(n_rows, 32), K = width(p.K), V_ = width(p.V);
    memset(rows.q + n_rows * K, 0, (padded - n_rows) * K * sizeof(Cell));
    memset(rows.dout + n_rows * V_, 0, (padded - n_rows) * V_ * sizeof(Cell));
    auto* begin = scratch.take<int32_t>(padded);
    auto* end = scratch.take<int32_t>(padded);
    for (int64_t i = 0; i < padded; ++i) {
      begin[i] = i < n_rows ? seen.begin[i / R] : 0, end[i] = i < n_rows ? seen.end[i / R] : 0;
      if (i >= n_rows) rows.lse[i] = rows.delta[i] = 0;
    }
    auto* q_across = scratch.take<Cell>(padded * K);
    auto* q_along = scratch.take<Cell>(padded * K);
    auto* dout_across = scratch.take<Cell>(padded * V_);
    auto* dout_along = scratch.take<Cell>(padded * V_);
    pair_rows(rows.q, padded, K, q_across, q_along);
    pair_rows(rows.dout, padded, V_, dout_across, dout_along);
    auto* weights = scratch.take<Cell>(block_keys * padded);
    auto* slopes = scratch.take<Cell>(block_keys * padded);
    const Cell *keys = side.keys.at(block, g), *values = side.values.at(block, g);
    for (int64_t i = 0; i < padded; i += 32) {
      int32_t latest = 0, earliest = INT32_MAX;
      bool is_large = false;
      for (int64_t j = i; j < i + 32; ++j) {
        latest = std::max(latest, begin[j]), earliest = std::min(earliest, end[j]);
        is_large |= !(std::abs(rows.lse[j]) < kLargeLse);
      }
      for (int64_t c = seen.c0; c < seen.c1; c += 32) {
        alignas(64) float scores[32 * 32], products[32 * 32];
        square(keys + c * K, q_across + i * K, K, scores);
        square(values + c * V_, dout_across + i * V_, V_, products);
        const bool whole = latest <= c && earliest >= c + 32;
        by_size(is_large, [&](auto large) NSA_INLINE_LAMBDA {
          const V base = set1(large ? 1 : kLog2e), unit = set1(score_unit(p)) * base;
          const V at0 = load(rows.lse + i) * base, at1 = load(rows.lse + i + W) * base;
          for (int64_t key = 0; key < 32; ++key) {
            V p0 = probabilities<E, kRough, large>(load(scores + key * 32), at0, unit);
            V p1 = probabilities<E, kRough, large>(load(scores + key * 32 + W), at1, unit);
            V d0 = p0 * (load(products + key * 32) - load(rows.delta + i));
            V d1 = p1 * (load(products + key * 32 + W) - load(rows.delta + i + W));
            if (!whole) {
              hide_lanes(begin + i, end + i, c + key, p0, d0);
              hide_lanes(begin + i + W, end + i + W, c + key, p1, d1);
            }
            store_weights(weights + (c + key) * padded + i, p0, p1);
            store_weights(slopes + (c + key) * padded + i, d0, d1);
          }
        });
      }
    }
    for (int64_t c = seen.c0; c < seen.c1; c += 32) {
      add_product(weights + c * padded, padded, dout_along, V_, dv + c * V_);
      add_product(slopes + c * padded, padded, q_along, K, dk + c * K);
    }
  }

 private:
  static void pair_rows(const Cell* rows, int64_t n_rows, int64_t wide, Cell* across, Cell* along) {
    for (int64_t i = 0; i < n_rows; i += 16)
      for (int64_t k = 0; k < wide; k += 32, across += kTileCells) pair_across(rows + i * wide + k, wide, across);
    for (int64_t i = 0; i < n_rows; i += 32)
      for (int64_t k = 0; k < wide; k += 16, along += kTileCells) pair_along(rows + i * wide + k, wide, along);
  }

  // 32 keys against 32 rows.
  static NSA_INLINE void square(const Cell* keys, const Cell* across, int64_t wide, float* out) {
    const int64_t depth = wide / 32;
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    for (int64_t k = 0; k < depth; ++k) {
      tile_load<4>(keys + k * 32, wide * 2), tile_load<6>(across + k * kTileCells, 64);
      tile_multiply<0, 4, 6>();
      tile_load<7>(across + (depth + k) * kTileCells, 64);
      tile_multiply<1, 4, 7>();
      tile_load<5>(keys + 16 * wide + k * 32, wide * 2);
      tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
    }
    tile_store<0>(out, 128), tile_store<1>(out + 16, 128);
    tile_store<2>(out + 16 * 32, 128), tile_store<3>(out + 16 * 32 + 16, 128);
  }

  // 0 in the lanes of rows that do not see the key.
  static NSA_INLINE void hide_lanes(const int32_t* begin, const int32_t* end, int32_t key, V& x, V& dx) {
    const __m512i at = _mm512_set1_epi32(key);
    const __mmask16 sees = _mm512_cmple_epi32_mask(_mm512_loadu_si512(begin), at) &
                           _mm512_cmplt_epi32_mask(at, _mm512_loadu_si512(end));
    x = _mm512_maskz_mov_ps(sees, x), dx = _mm512_maskz_mov_ps(sees, dx);
  }

  // out[32 keys][wide] += left[32 keys][n] · right
  static NSA_INLINE void add_product(const Cell* left, int64_t n, const Cell* right, int64_t wide, float* out) {
    const int64_t tiles = wide / 16;
    for (int64_t v = 0; v < tiles; v += 2) {
      float *to = out + v * 16, *below = to + 16 * wide;
      tile_load<0>(to, wide * 4), tile_load<1>(to + 16, wide * 4);
      tile_load<2>(below, wide * 4), tile_load<3>(below + 16, wide * 4);
      for (int64_t i = 0; i < n; i += 32) {
        const Cell* b = right + (i / 32 * tiles + v) * kTileCells;
        tile_load<4>(left + i, n * 2), tile_load<6>(b, 64);
        tile_multiply<0, 4, 6>();
        tile_load<7>(b + kTileCells, 64);
        tile_multiply<1, 4, 7>();
        tile_load<5>(left + 16 * n + i, n * 2);
        tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
      }
      tile_store<0>(to, wide * 4), tile_store<1>(to + 16, wide * 4);
      tile_store<2>(below, wide * 4), tile_store<3>(below + 16, wide * 4);
    }
  }
};

}  // namespace NSA_NAMESPACE
}  // namespace nsa
