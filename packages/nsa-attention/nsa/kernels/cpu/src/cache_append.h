// KV cache append: copies one new token per row to its slots, advances the counters and, where φ is the mean, writes the
// compressed entry of a block that ends with the token.
#pragma once
#include "vec.h"

namespace nsa {
namespace NSA_NAMESPACE {

NSA_INLINE char* slot(const CacheAppend& a, const Rows& x, int64_t b, int64_t at, int64_t g) {
  return x.data + (token_at(x, b, at) + g * x.group) * (a.dtype == kFloat ? 4 : 2);
}

// The mean of a ring's last l tokens, oldest first, into the slot of the block that they form.
inline void emit_mean(const CacheAppend& a, const Stream& tail, const Rows& to, int64_t b, int64_t length) {
  const int64_t width = round_up(tail.width, W);
  Scratch scratch;
  float *sum = scratch.take<float>(width), *one = scratch.take<float>(width);
  for (int64_t g = 0; g < a.G; ++g) {
    memset(sum, 0, width * sizeof(float));
    for (int64_t t = length - a.l; t < length; ++t) {
      widen_row(a.dtype, slot(a, tail.slots, b, t % tail.n_slots, g), one, tail.width, width);
      for (int64_t c = 0; c < width; c += W) store(sum + c, load(sum + c) + load(one + c));
    }
    for (int64_t c = 0; c < width; c += W) store(sum + c, load(sum + c) / set1(static_cast<float>(a.l)));
    narrow_row(a.dtype, sum, slot(a, to, b, a.first[b] + (length - a.l) / a.d, g), tail.width);
  }
}

// Returns whether any row now ends a compressed block that is still to be emitted.
inline bool append_tokens(const CacheAppend& a) {
  bool to_emit = false;
  for (int64_t b = 0; b < a.B; ++b) {
    const int64_t at = a.length[b];
    for (const Stream& stream : a.streams)
      for (int64_t g = 0; g < a.G; ++g)
        memcpy(slot(a, stream.slots, b, at % stream.n_slots, g), slot(a, stream.fresh, b, 0, g),
               stream.width * (a.dtype == kFloat ? 4 : 2));
    a.pos[b] = at;
    // Of a ring of w tokens, or of all tokens where the window shares the selected branch's slots.
    a.window_pos[b] = std::min(at, a.streams[4].n_slots - 1);
    const int64_t length = a.length[b] = at + 1;
    if (length < a.l || (length - a.l) % a.d != 0) continue;
    if (a.means) {
      for (int64_t i = 0; i < 2; ++i)
        if (a.compressed[i].data) emit_mean(a, a.streams[i], a.compressed[i], b, length);  // no values in merged layers
      ++a.n_compressed[b];
    } else {
      to_emit = true;
    }
  }
  return to_emit;
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
