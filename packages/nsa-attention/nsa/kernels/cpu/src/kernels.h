// The computations, once per instruction set. Each file that defines one is compiled for that set alone.
#pragma once
#include "problem.h"

namespace nsa {

#define NSA_KERNELS            \
  void forward(const Problem&); \
  void choose(const Problem&);  \
  bool backward(const Problem&); \
  void decode_step(const Step&); \
  void mix(const Mix&); \
  bool append(const CacheAppend&);

namespace plain { NSA_KERNELS }
namespace avx2 { NSA_KERNELS }
namespace avx512 { NSA_KERNELS }
namespace amx { NSA_KERNELS }

}  // namespace nsa
