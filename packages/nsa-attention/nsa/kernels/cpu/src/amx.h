// bf16 matrix products on AMX tile registers: products of bf16 summed in fp32, softmax in fp32, probabilities rounded to bf16
// before the second product, as PyTorch's own attention rounds them.
//
// A tile is 16 rows of 64 bytes. C[16×16] += A[16 rows × 32] · B, with B holding pairs of its rows interleaved: row k of
// a B tile is b[2k][0], b[2k+1][0], b[2k][1], b[2k+1][1] …
#pragma once
#include <algorithm>

#include "pool.h"
#include "vec.h"

namespace nsa {
namespace NSA_NAMESPACE {

// The compiler's intrinsics do not say that they read and write memory; these do.
template <int kTile>
NSA_INLINE void tile_load(const void* from, int64_t bytes_per_row) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(bytes_per_row), "i"(kTile) : "memory");
}
template <int kTile>
NSA_INLINE void tile_store(void* to, int64_t bytes_per_row) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(bytes_per_row), "i"(kTile) : "memory");
}
template <int kTile>
NSA_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kC, int kA, int kB>
NSA_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

struct TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr int64_t kTileCells = 16 * 32;  // of bf16, and half of that of fp32

// 16 rows of 16 32-bit values, transposed. `from` are row addresses.
NSA_INLINE void transpose16(const __m512i* x, __m512i* y) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    y[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
    y[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
  }
}

// A B tile that sums over the width: pairs of cells of 16 rows, `from` being [16][ld].
NSA_INLINE void pair_across(const Bf16* from, int64_t ld, Bf16* to) {
  __m512i x[16], y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(from + i * ld);
  transpose16(x, y);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * 32, y[i]);
}

// A B tile that sums over rows: 32 rows of 16 cells, `from` being [32][ld].
NSA_INLINE void pair_along(const Bf16* from, int64_t ld, Bf16* to) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int i = 0; i < 16; ++i) {
    const __m256i even = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i * ld));
    const __m256i odd = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + (2 * i + 1) * ld));
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
    _mm512_storeu_si512(to + i * 32, _mm512_permutexvar_epi16(order, both));
  }
}

NSA_INLINE __m512i to_bf16(V low, V high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

struct Amx {
  using Cell = Bf16;
  using Weight = Bf16;
  static constexpr bool kInPlace = false;
  static constexpr Exactness kOfWeights = kWeight, kOfChoice = kRough;
  static constexpr int64_t kColumns = 32;
  static constexpr bool kAnyColumns = false;  // tiles are whole
  static constexpr int64_t kTileRows = 3072;
  // Longer passes let the tile unit power down during the softmax, and waking it up costs as much as a pass of 16 x 64 takes.
  static constexpr int64_t kPassRows = 16;
  static constexpr int64_t kLongChoiceRows = 32;
  static constexpr int64_t kRunKeys = 64;

  struct Thread {
    Scratch scratch;
    Thread() {
      const TileConfig config;
      asm volatile("ldtilecfg %0" : : "m"(config));
    }
    ~Thread() { asm volatile("tilerelease"); }
  };

  static int64_t width(int64_t n) { return round_up(n, 32); }

  static void load_row(int64_t, const char* from, Cell* to, int64_t n) {
    memcpy(to, from, n * sizeof(Cell));
    memset(to + n, 0, (width(n) - n) * sizeof(Cell));
  }

  // A scaled query would have to be rounded again: scores are scaled instead. The largest must stay the largest, so the
  // scale's sign, or that it is 0, goes to the query.
  static void load_query(const Problem& p, const char* from, Cell* to) {
    load_row(p.dtype, from, to, p.K);
    if (p.scale > 0) return;
    for (int64_t i = 0; i < p.K; ++i) to[i].bits = p.scale < 0 ? to[i].bits ^ 0x8000 : 0;
  }
  // Never 0, by which a hidden score, −inf, cannot be multiplied.
  static float score_unit(const Problem& p) { return std::max(static_cast<float>(std::abs(p.scale)), 1e-37f); }
  // Rounded before anything is subtracted, as the log-sum-exp is.
  static NSA_INLINE V in_units(V scores, V unit) {
    return _mm512_mul_round_ps(scores, unit, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static bool finite(const Cell* x, int64_t n) {  // n is a multiple of 32
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 any = 0;
    for (int64_t i = 0; i < n; i += 32)
      any |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_loadu_si512(x + i), exponent), exponent);
    return any == 0;
  }

  static NSA_INLINE void copy_row(Cell* to, const Cell* from, int64_t wide) {
    for (int64_t i = 0; i < wide; i += 32) _mm512_storeu_si512(to + i, _mm512_loadu_si512(from + i));
  }

  // [key tile][width tile][16][32], a tile being made of kKeys keys and kCells of their cells.
  template <int64_t kKeys, int64_t kCells, void (*kPair)(const Cell*, int64_t, Cell*)>
  static void pack_tiles(int64_t dtype, const char* const* rows, int64_t n_rows, int64_t n, int64_t keys, Cell* to,
                         Scratch& scratch) {
    Cell* plain = scratch.take<Cell>(plain_size(n, keys));
    pack_plain(dtype, rows, n_rows, n, keys, plain, scratch);
    for (int64_t i = 0; i < keys; i += kKeys)
      for (int64_t k = 0; k < width(n); k += kCells, to += kTileCells) kPair(plain + i * width(n) + k, width(n), to);
  }
  static int64_t across_size(int64_t n, int64_t keys) { return width(n) * keys; }
  static constexpr auto pack_across = pack_tiles<16, 32, pair_across>;
  static int64_t along_size(int64_t n, int64_t keys) { return width(n) * keys; }
  static constexpr auto pack_along = pack_tiles<32, 16, pair_along>;
  // [keys][width]: the left side of a product.
  static int64_t plain_size(int64_t n, int64_t keys) { return width(n) * keys; }
  static void pack_plain(int64_t dtype, const char* const* rows, int64_t n_rows, int64_t n, int64_t keys, Cell* to,
                         Scratch&) {
    for (int64_t i = 0; i < keys; ++i, to += width(n)) {
      if (i < n_rows && rows[i])
        load_row(dtype, rows[i], to, n);
      else
        memset(to, 0, width(n) * sizeof(Cell));
    }
  }

  // Four tiles of sums at a time, two by two or in one row: a product takes three times as long to finish as the next one
  // to start. `depth` steps along A; the B tiles of a step lie `apart` cells apart, those of two steps `step` cells.
  static NSA_INLINE void sum_two_by_two(const Cell* a, int64_t ld, bool two, const Cell* b, int64_t apart, int64_t step,
                                        int64_t depth) {
    for (int64_t k = 0; k < depth; ++k, a += 32, b += step) {
      tile_load<4>(a, ld * 2);
      tile_load<6>(b, 64), tile_multiply<0, 4, 6>();
      tile_load<7>(b + apart, 64), tile_multiply<1, 4, 7>();
      if (two) {
        tile_load<5>(a + 16 * ld, ld * 2);
        tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
      }
    }
  }
  static NSA_INLINE void sum_four_in_a_row(const Cell* a, int64_t ld, const Cell* b, int64_t apart, int64_t step,
                                           int64_t depth) {
    for (int64_t k = 0; k < depth; ++k, a += 32, b += step) {
      tile_load<4>(a, ld * 2);
      tile_load<5>(b, 64), tile_multiply<0, 4, 5>();
      tile_load<6>(b + apart, 64), tile_multiply<1, 4, 6>();
      tile_load<7>(b + 2 * apart, 64), tile_multiply<2, 4, 7>();
      tile_load<5>(b + 3 * apart, 64), tile_multiply<3, 4, 5>();
    }
  }
  // Tiles 0 and 1 beside each other; 2 and 3 where `rest` is, if anywhere.
  static NSA_INLINE void store_sums(float* to, float* rest, int64_t ld) {
    tile_store<0>(to, ld * 4), tile_store<1>(to + 16, ld * 4);
    if (rest) tile_store<2>(rest, ld * 4), tile_store<3>(rest + 16, ld * 4);
  }

  // Rows are computed in whole tiles: inputs and outputs must have room up to a multiple of 16, whatever lies there.
  static void scores(const Cell* rows, int64_t n_rows, const Cell* across, int64_t n, int64_t keys, int64_t c0,
                     int64_t c1, float* out, int64_t ld_out) {
    const int64_t ld = width(n), depth = ld / 32, per_tile = depth * kTileCells;
    for (int64_t i = 0; i < n_rows; i += 32) {
      const bool two = i + 16 < n_rows;
      for (int64_t c = c0; c < c1;) {
        const Cell *a = rows + i * ld, *b = across + c / 16 * per_tile;
        float* to = out + i * ld_out + c;
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        if (two || c + 32 == c1) {
          sum_two_by_two(a, ld, two, b, per_tile, kTileCells, depth);
          store_sums(to, two ? to + 16 * ld_out : nullptr, ld_out);
          c += 32;
        } else {
          sum_four_in_a_row(a, ld, b, per_tile, kTileCells, depth);
          store_sums(to, to + 32, ld_out);
          c += 64;
        }
      }
    }
  }

  static void weigh(const Weight* weights, int64_t ld, int64_t n_rows, const Cell* along, int64_t n, int64_t c0,
                    int64_t c1, float* out, bool add) {
    const int64_t wide = width(n), tiles = wide / 16, depth = (c1 - c0 + 31) / 32;
    for (int64_t i = 0; i < n_rows; i += 32) {
      const bool two = i + 16 < n_rows;
      for (int64_t v = 0; v < tiles;) {  // a width is a multiple of two tiles
        const bool square = two || v + 2 == tiles;
        float* to = out + i * wide + v * 16;
        float* rest = square ? (two ? to + 16 * wide : nullptr) : to + 32;
        const Cell *a = weights + i * ld + c0, *b = along + (c0 / 32 * tiles + v) * kTileCells;
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        if (add) tile_load<0>(to, wide * 4), tile_load<1>(to + 16, wide * 4);
        if (add && rest) tile_load<2>(rest, wide * 4), tile_load<3>(rest + 16, wide * 4);
        if (square)
          sum_two_by_two(a, ld, two, b, kTileCells, tiles * kTileCells, depth);
        else
          sum_four_in_a_row(a, ld, b, kTileCells, tiles * kTileCells, depth);
        store_sums(to, rest, wide);
        v += square ? 2 : 4;
      }
    }
  }
  static NSA_INLINE void store_weights(Weight* to, V x, V y) { _mm512_storeu_si512(to, to_bf16(x, y)); }
  static Weight* weights_in(float*, Scratch& scratch, int64_t n) { return scratch.take<Weight>(n); }
};

}  // namespace NSA_NAMESPACE
}  // namespace nsa
