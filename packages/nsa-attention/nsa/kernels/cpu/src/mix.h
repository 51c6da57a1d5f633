// Gated sum of the three branches, in one pass over memory each way.
#pragma once
#include <algorithm>

#include "pool.h"
#include "vec.h"

namespace nsa {
namespace NSA_NAMESPACE {

NSA_INLINE float widen(float x) { return x; }
NSA_INLINE void narrow(float x, float& y) { y = x; }

struct MixThread {};

constexpr int64_t kMixRows = 256;  // that one item takes, or a little more: a gate's heads stay together

template <class T>
void mix_forward(const Mix& m) {
  const int64_t per_item = std::max<int64_t>(1, kMixRows / m.heads);
  parallel<MixThread>((m.n_gates + per_item - 1) / per_item, m.threads, [&](auto&, int64_t item) {
    for (int64_t i = item * per_item; i < std::min(m.n_gates, (item + 1) * per_item); ++i) {
      const float a = m.gates[3 * i], b = m.gates[3 * i + 1], c = m.gates[3 * i + 2];
      const int64_t from = i * m.heads * m.V;
      const T *x = static_cast<const T*>(m.branches[0]) + from, *y = static_cast<const T*>(m.branches[1]) + from,
              *z = static_cast<const T*>(m.branches[2]) + from;
      T* __restrict out = static_cast<T*>(m.out) + from;
      for (int64_t j = 0; j < m.heads * m.V; ++j) narrow(a * widen(x[j]) + b * widen(y[j]) + c * widen(z[j]), out[j]);
    }
  });
}

template <class T>
void mix_backward(const Mix& m) {
  const int64_t per_item = std::max<int64_t>(1, kMixRows / m.heads), n = m.heads * m.V;
  parallel<MixThread>((m.n_gates + per_item - 1) / per_item, m.threads, [&](auto&, int64_t item) {
    for (int64_t i = item * per_item; i < std::min(m.n_gates, (item + 1) * per_item); ++i)
      for (int64_t branch = 0; branch < 3; ++branch) {
        const float gate = m.gates[3 * i + branch];
        const T *x = static_cast<const T*>(m.branches[branch]) + i * n, *dout = static_cast<const T*>(m.dout) + i * n;
        T* __restrict dx = static_cast<T*>(m.dbranches[branch]) + i * n;
        float sums[W] = {};  // lanes of their own, so that the order of addition is the same however it is compiled
        int64_t j = 0;
        for (; j + W <= n; j += W)
          for (int64_t lane = 0; lane < W; ++lane) {
            const float d = widen(dout[j + lane]);
            sums[lane] += d * widen(x[j + lane]);
            narrow(gate * d, dx[j + lane]);
          }
        float total = 0;
        for (; j < n; ++j) {
          const float d = widen(dout[j]);
          total += d * widen(x[j]);
          narrow(gate * d, dx[j]);
        }
        for (int64_t lane = 0; lane < W; ++lane) total += sums[lane];
        m.dgates[3 * i + branch] = total;
      }
  });
}

void mix(const Mix& m) {
  const auto run = [&](auto element) {
    using T = decltype(element);
    m.dout ? mix_backward<T>(m) : mix_forward<T>(m);
  };
  m.dtype == kFloat ? run(float{}) : m.dtype == kBfloat16 ? run(Bf16{}) : run(_Float16{});
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
