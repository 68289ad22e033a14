// Threads: PyTorch's own, through the stable ABI, so that no second OpenMP
// runtime is loaded and torch.set_num_threads holds for these kernels too.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#include "host/check.h"

namespace pkg::cpu {

inline int64_t num_threads() {
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return threads;
}

// Work that a thread should have at the least, or another one costs more than
// it brings: multiply-adds, or elements that are read once (bytes, of weights
// of four bits).
inline constexpr int64_t kMultiplyAddGrain = 64 * 64 * 64;
inline constexpr int64_t kElementGrain = 32768;

// The grain of parallel_for for so much work of a thread, where one count has
// `each` of it.
inline int64_t grain_of(int64_t work_of_thread, int64_t each) {
  return std::max<int64_t>(work_of_thread / std::max<int64_t>(each, 1), 1);
}

// Calls body(begin, end) for consecutive ranges that cover [0, count), in
// parallel where more than `grain` elements are left for each. A range never
// has fewer than one element. An exception in a worker is rethrown here: one
// that leaves an OpenMP region ends the process.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) {
    return;
  }
  if (count <= grain) {
    body(int64_t{0}, count);
    return;
  }
  struct Context {
    const Body& body;
    std::mutex mutex;
    std::exception_ptr failure;
  } context{body, {}, nullptr};
  const auto run = [](int64_t begin, int64_t end, void* opaque) {
    auto& shared = *static_cast<Context*>(opaque);
    try {
      shared.body(begin, end);
    } catch (...) {
      const std::lock_guard lock(shared.mutex);
      shared.failure = std::current_exception();
    }
  };
  TORCH_ERROR_CODE_CHECK(
      torch_parallel_for(0, count, std::max<int64_t>(grain, 1), run, &context));
  if (context.failure) {
    std::rethrow_exception(context.failure);
  }
}

// Calls body(task) for each task on at most `threads` threads; one that is done
// takes the next. Which thread runs a task must not matter to its result.
template <class Body>
void for_each_task(int64_t tasks, int64_t threads, const Body& body) {
  const int64_t workers = std::min(tasks, threads);
  if (workers <= 1) {
    for (int64_t task = 0; task < tasks; ++task) {
      body(task);
    }
    return;
  }
  std::atomic<int64_t> next{0};
  parallel_for(workers, 1, [&](int64_t, int64_t) {
    for (int64_t task = next++; task < tasks; task = next++) {
      body(task);
    }
  });
}

}  // namespace pkg::cpu
