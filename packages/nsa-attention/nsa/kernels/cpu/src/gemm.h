// C (+)= A · B on panels that fit the registers. Each element of C is one chain of multiply-adds in the order of k,
// whatever the other rows are: a query's result does not depend on which queries it is computed with.
#pragma once
#include "vec.h"

namespace nsa {
namespace NSA_NAMESPACE {

#if defined(__AVX512F__)
constexpr int kRows = 6, kVectors = 4;  // 24 of 32 registers accumulate
#elif defined(__AVX2__)
constexpr int kRows = 6, kVectors = 2;
#else
constexpr int kRows = 4, kVectors = 2;
#endif

// A's element (m, k) is a[m · lda + k], or a[k · lda + m] if transposed.
template <bool kTransposed, int M, int N>
NSA_INLINE void panel(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth,
                      bool add) {
  V sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[m][n] = add ? load(c + m * ldc + n * W) : V{};
  for (int64_t k = 0; k < depth; ++k, b += ldb) {
    V right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) right[n] = load(b + n * W);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const V left = set1(kTransposed ? a[k * lda + m] : a[m * lda + k]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] += left * right[n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(c + m * ldc + n * W, sum[m][n]);
}

template <bool kTransposed, int M>
NSA_INLINE void strip(int64_t columns, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                      int64_t depth, bool add) {
  int64_t n = 0;
  for (; n + kVectors * W <= columns; n += kVectors * W)
    panel<kTransposed, M, kVectors>(a, lda, b + n, ldb, c + n, ldc, depth, add);
  if constexpr (kVectors == 4) {
    if (n + 2 * W <= columns) {
      panel<kTransposed, M, 2>(a, lda, b + n, ldb, c + n, ldc, depth, add);
      n += 2 * W;
    }
  }
  if (n < columns) panel<kTransposed, M, 1>(a, lda, b + n, ldb, c + n, ldc, depth, add);
}

// `columns` is a multiple of W.
template <bool kTransposed>
void gemm(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t lda, const float* b, int64_t ldb,
          float* c, int64_t ldc, bool add) {
  const int64_t step = kTransposed ? 1 : lda;
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows)
    strip<kTransposed, kRows>(columns, a + m * step, lda, b, ldb, c + m * ldc, ldc, depth, add);
  a += m * step, c += m * ldc;
  switch (rows - m) {
    case 1: return strip<kTransposed, 1>(columns, a, lda, b, ldb, c, ldc, depth, add);
    case 2: return strip<kTransposed, 2>(columns, a, lda, b, ldb, c, ldc, depth, add);
    case 3: return strip<kTransposed, 3>(columns, a, lda, b, ldb, c, ldc, depth, add);
    case 4: return strip<kTransposed, 4>(columns, a, lda, b, ldb, c, ldc, depth, add);
    case 5: return strip<kTransposed, 5>(columns, a, lda, b, ldb, c, ldc, depth, add);
  }
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
