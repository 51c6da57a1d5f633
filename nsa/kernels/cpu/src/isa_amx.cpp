#define NSA_NAMESPACE amx
#include "amx_gradient.h"
#include "choose.h"
#include "kernels.h"

namespace nsa::amx {

void forward(const Problem& p) { forward<AmxBackward>(p); }
void choose(const Problem& p) { choose<AmxBackward>(p); }
bool backward(const Problem& p) { return backward<AmxBackward>(p); }
void decode_step(const Step& step) { avx512::decode_step(step); }  // one query has too few rows to fill a tile
void mix(const Mix& m) { avx512::mix(m); }
bool append(const CacheAppend& tokens) { return avx512::append(tokens); }

}  // namespace nsa::amx
