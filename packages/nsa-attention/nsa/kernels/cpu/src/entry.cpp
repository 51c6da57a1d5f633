// The C interface: which instruction sets this machine has, and one function per computation.
#include <new>
#include <stdexcept>

#include "bounds.h"
#include "kernels.h"
#include "pool.h"
#if defined(__x86_64__) && !defined(NSA_PLAIN_ONLY)
#define NSA_X86
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nsa {
OpenMpParallel openmp_parallel = nullptr;

namespace {

#ifdef NSA_X86
// Linux enables the tile registers only for a process that requests them: they make every context switch slower.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_tiles() {
  unsigned a, b, c, d;
  __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  const bool tiles = (d >> 24 & 1) && (d >> 22 & 1);
  __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(1));
  const bool narrows = a >> 5 & 1;  // AVX512-BF16
  return tiles && narrows && may_use_tiles();
}
#endif

int64_t best_isa() {
#ifdef NSA_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return has_tiles() ? kAmx : kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
  return kPlain;
}

enum Outcome : int64_t { kDone = 0, kOverlap = 1, kNoMemory = 2, kBadSizes = 3, kBadPositions = 4, kBadPages = 5 };
enum Taken : int64_t { kNothingToEmit = 0, kToEmit = 1, kNoRoom = -1 };

template <class Run>
int64_t guarded(Run&& run) {
  try {
    return run() ? kDone : kOverlap;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::length_error&) {
    return kNoMemory;
  }
}

// Runs only what stays inside the given tensors, and nothing where there is nothing to compute.
template <class Run>
int64_t checked(const Problem& p, bool choosing, Run&& run) {
  if (!sizes_hold(p, choosing)) return kBadSizes;
  if (!positions_hold(p, choosing)) return kBadPositions;
  return p.B * p.S * p.G ? guarded(run) : kDone;
}

#ifdef NSA_X86
#define NSA_DISPATCH(call)                    \
  switch (p->isa) {                           \
    case kAmx: return amx::call;              \
    case kAvx512: return avx512::call;        \
    case kAvx2: return avx2::call;            \
    default: return plain::call;              \
  }
#else
#define NSA_DISPATCH(call) return plain::call;
#endif

}  // namespace
}  // namespace nsa

#define NSA_EXPORT extern "C" __attribute__((visibility("default")))

using nsa::Problem;

// The best instruction set of this machine, as nsa::Isa; all below it run here too.
NSA_EXPORT int64_t nsa_best_isa() { return nsa::best_isa(); }

// Total size of the argument structures; Python compares it with its own to detect a mismatch.
NSA_EXPORT int64_t nsa_sizes() { return sizeof(nsa::Step) + sizeof(nsa::CacheAppend) + sizeof(nsa::Mix); }

NSA_EXPORT void nsa_use_openmp(void* parallel) {
  nsa::openmp_parallel = reinterpret_cast<nsa::OpenMpParallel>(parallel);
}

NSA_EXPORT int64_t nsa_forward(const Problem* p) {
  return nsa::checked(*p, false, [&] {
    using namespace nsa;
    [&] { NSA_DISPATCH(forward(*p)) }();
    return true;
  });
}

NSA_EXPORT int64_t nsa_choose(const Problem* p) {
  return nsa::checked(*p, true, [&] {
    using namespace nsa;
    [&] { NSA_DISPATCH(choose(*p)) }();
    return true;
  });
}

NSA_EXPORT int64_t nsa_backward(const Problem* p) {
  return nsa::checked(*p, false, [&] {
    using namespace nsa;
    return [&]() -> bool { NSA_DISPATCH(backward(*p)) }();
  });
}

NSA_EXPORT int64_t nsa_decode(const nsa::Step* step) {
  if (step->far)
    for (int64_t b = 0; b < step->sliding.B; ++b)
      step->far[b] = std::max<int64_t>(-1, step->sliding.pos[b] - step->sliding.w);
  for (const Problem* p : {&step->compressed, &step->selected, &step->sliding}) {
    if (!nsa::sizes_hold(*p, false)) return nsa::kBadSizes;
    if (!nsa::positions_hold(*p, false)) return nsa::kBadPositions;
    if (!nsa::tables_hold(*p)) return nsa::kBadPages;
  }
  return nsa::checked(step->compressed, true, [&] {
    using namespace nsa;
    const Problem* p = &step->compressed;
    [&] { NSA_DISPATCH(decode_step(*step)) }();
    return true;
  });
}

NSA_EXPORT int64_t nsa_mix(const nsa::Mix* p) {
  return nsa::guarded([&] {
    using namespace nsa;
    [&] { NSA_DISPATCH(mix(*p)) }();
    return true;
  });
}

// Whether a compressed entry is still to be emitted; kNoRoom, and nothing written, if a row has no slot for its token.
NSA_EXPORT int64_t nsa_append(const nsa::CacheAppend* p) {
  using namespace nsa;
  if (!has_room(*p)) return kNoRoom;
  return [&]() -> bool { NSA_DISPATCH(append(*p)) }() ? kToEmit : kNothingToEmit;
}
