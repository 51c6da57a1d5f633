// Packs the blocks of keys and values that queries use, once per call; memory is linear in the number of keys.
#pragma once
#include "grid.h"
#include "wide.h"

namespace nsa {
namespace NSA_NAMESPACE {

// Whether any query of group g uses block i.
inline std::vector<uint8_t> used_blocks(const Problem& p, const Grid& grid) {
  std::vector<uint8_t> used(grid.blocks.size() * p.G, p.branch != kSelected);
  if (p.branch == kSelected)
    for (int64_t b = 0; b < p.B; ++b)
      for (int64_t s = 0; s < p.S; ++s)
        for (int64_t g = 0; g < p.G; ++g)
          chosen(p, grid, b, s, g, [&](int64_t block) { used[block * p.G + g] = 1; });
  return used;
}

template <class E>
class Packed {
 public:
  using Size = int64_t (*)(int64_t, int64_t);
  using Pack = void (*)(int64_t, const char* const*, int64_t, int64_t, int64_t, typename E::Cell*, Scratch&);

  Packed(const Problem& p, const Grid& grid, const std::vector<uint8_t>& used, const Rows& x, int64_t n, Size size,
         Pack pack, bool check = false)
      : groups_(p.G), keys_(round_up(grid.width, E::kColumns)), size_(size(n, keys_)) {
    const int64_t n_blocks = grid.blocks.size();
    cells_.reset(n_blocks * groups_ * size_);
    parallel<typename E::Thread>(n_blocks * groups_, p.threads, [&](auto& thread, int64_t i) {
      if (!used[i]) return;
      Scratch scratch = thread.scratch;
      const Block& block = grid.blocks[i / groups_];
      auto** rows = scratch.take<const char*>(block.n);
      for (int64_t t = 0; t < block.n; ++t)
        rows[t] = block.begin + t >= 0 ? row(p, x, block.b, block.begin + t, i % groups_) : nullptr;
      pack(p.dtype, rows, block.n, n, keys_, cells_.get() + i * size_, scratch);
      if (check && !E::finite(cells_.get() + i * size_, size_)) finite_ = false;
    });
  }
  const typename E::Cell* at(int64_t block, int64_t group) const {
    return cells_.get() + (block * groups_ + group) * size_;
  }
  bool finite() const { return finite_; }

 private:
  int64_t groups_, keys_, size_;
  Array<typename E::Cell> cells_;
  std::atomic<bool> finite_{true};
};

template <class E>
Packed<E> across(const Problem& p, const Grid& grid, const std::vector<uint8_t>& used, const Rows& x, int64_t n) {
  return Packed<E>(p, grid, used, x, n, E::across_size, E::pack_across);
}
template <class E>
Packed<E> along(const Problem& p, const Grid& grid, const std::vector<uint8_t>& used, const Rows& x, int64_t n) {
  return Packed<E>(p, grid, used, x, n, E::along_size, E::pack_along, true);
}

}  // namespace NSA_NAMESPACE
}  // namespace nsa
