// Defines the kernels of one instruction set with fp32 arithmetic.
#pragma once
#include "cache_append.h"
#include "choose.h"
#include "decode.h"
#include "kernels.h"
#include "mix.h"
#include "range_gradient.h"

namespace nsa {
namespace NSA_NAMESPACE {

void forward(const Problem& p) { forward<WideBackward>(p); }
void choose(const Problem& p) { choose<WideBackward>(p); }
bool backward(const Problem& p) {
  if (p.branch == kSelected) return backward<WideBackward>(p) == kComputed;
  range_gradients(p, Grid(p, WideBackward::kRunKeys));
  return true;
}
void decode_step(const Step& step) { Decode(step).run(); }
bool append(const CacheAppend& tokens) { return append_tokens(tokens); }

}  // namespace NSA_NAMESPACE
}  // namespace nsa
