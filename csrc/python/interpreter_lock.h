// Python's lock during a kernel: given away where other threads of Python could
// make use of the time, which takes 60 ns, and else kept.
#pragma once

#include <cstdint>

#include "python/pybind_headers.h"

namespace pkg::python {

class ReleasedLock {
 public:
  explicit ReleasedLock(bool is_released)
      : thread_(is_released ? PyEval_SaveThread() : nullptr) {}
  ~ReleasedLock() {
    if (thread_ != nullptr) {
      PyEval_RestoreThread(thread_);
    }
  }
  ReleasedLock(const ReleasedLock&) = delete;
  ReleasedLock& operator=(const ReleasedLock&) = delete;

 private:
  PyThreadState* thread_;
};

// Of the tensors of a call that is done in far less than the 5 ms for which
// Python lets a thread keep the lock: operators compute at most each element of
// a tensor with each of another's, here a million times, unless numbers among
// their arguments ask for more.
inline constexpr int64_t kFewElements = 2048;

}  // namespace pkg::python
