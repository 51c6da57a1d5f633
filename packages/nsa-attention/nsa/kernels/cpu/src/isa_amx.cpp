#define NSA_NAMESPACE amx
#include "amx_gradient.h"
#include "choose.h"
#include "kernels.h"

namespace nsa::amx {

// Numbers that are not finite are left to vectors: a tile would multiply them by the weights 0 of rows that do not see them.
void forward(const Problem& p) {
  if (!forward<AmxBackward>(p)) avx512::forward(p);
}
void choose(const Problem& p) {
  if (!choose<AmxBackward>(p)) avx512::choose(p);
}
bool backward(const Problem& p) {
  const BackwardOutcome outcome = backward<AmxBackward>(p);
  return outcome == kNotFinite ? avx512::backward(p) : outcome == kComputed;
}
void decode_step(const Step& step) { avx512::decode_step(step); }  // one query has too few rows to fill a tile
void mix(const Mix& m) { avx512::mix(m); }
bool append(const CacheAppend& tokens) { return avx512::append(tokens); }

}  // namespace nsa::amx
