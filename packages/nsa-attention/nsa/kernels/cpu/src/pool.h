// Thread pool for numbered items. Any thread may run any item, so an item's result must depend
// on its number alone: then any number of threads gives the same bits.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace nsa {

// torch's OpenMP runtime, where it can be found: its waiting threads spin, and a second pool would run against them.
using OpenMpParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
extern OpenMpParallel openmp_parallel;

template <class OneThread>
void on_each_thread(int64_t threads, OneThread&& run) {
  if (threads <= 1) return run();
  if (openmp_parallel) {
    openmp_parallel([](void* f) { (*static_cast<std::remove_reference_t<OneThread>*>(f))(); }, &run,
                    static_cast<unsigned>(threads), 0);
    return;
  }
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i) others.emplace_back([&] { run(); });
  run();
  for (auto& other : others) other.join();
}

// `Context` is made once per thread, before its first item. What an item throws (there may be no memory) ends the rest
// and is thrown again by the calling thread: no exception may leave a thread of the pool.
template <class Context, class Item>
void parallel(int64_t n_items, int64_t threads, Item&& item) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  on_each_thread(threads < n_items ? threads : n_items, [&] {
    try {
      Context context;
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n_items;) item(context, i);
    } catch (...) {
      next.store(n_items, std::memory_order_relaxed);
      if (!failed.exchange(true)) error = std::current_exception();
    }
  });
  if (failed) std::rethrow_exception(error);
}

}  // namespace nsa
