// Defines the kernels of one instruction set with the fp32 engine.
#pragma once
#include "arrival.h"
#include "choose.h"
#include "decode.h"
#include "kernels.h"
#include "mix.h"
#include "run_gradient.h"

namespace nsa {
namespace NSA_NAMESPACE {

void forward(const Problem& p) { forward<WideBackward>(p); }
void choose(const Problem& p) { choose<WideBackward>(p); }
bool backward(const Problem& p) {
  if (p.branch == kSelected) return backward<WideBackward>(p);
  run_gradients(p, Grid(p, WideBackward::kRunKeys));
  return true;
}
void decode_step(const Step& step) { Decode(step).run(); }
bool take_in(const Arrival& arrival) { return arrive(arrival); }

}  // namespace NSA_NAMESPACE
}  // namespace nsa
