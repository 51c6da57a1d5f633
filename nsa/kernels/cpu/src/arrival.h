// Takes one new token per row into the cache: six rows copied to their slots, three counters moved on.
#pragma once
#include <cstring>

#include "problem.h"

namespace nsa {

// Returns whether any row now ends a compressed block, which is then to be emitted.
inline bool take_in(const Arrival& a) {
  bool any_ends = false;
  for (int64_t b = 0; b < a.B; ++b) {
    const int64_t at = a.length[b];
    for (const Stream& stream : a.streams)
      for (int64_t g = 0; g < a.G; ++g)
        std::memcpy(stream.slots.data + (b * stream.slots.batch + at % stream.n_slots * stream.slots.token +
                                         g * stream.slots.group) * a.element_bytes,
                    stream.fresh.data + (b * stream.fresh.batch + g * stream.fresh.group) * a.element_bytes,
                    stream.width * a.element_bytes);
    a.pos[b] = at;
    a.window_pos[b] = at < a.w ? at : a.w - 1;
    const int64_t length = a.length[b] = at + 1;
    any_ends |= length >= a.l && (length - a.l) % a.d == 0;
  }
  return any_ends;
}

}  // namespace nsa
