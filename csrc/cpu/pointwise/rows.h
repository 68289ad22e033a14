// The rows of a tensor of any strides (host/rows.h), as vector loads want them.
#pragma once

#include <cstdint>

#include "cpu/pointwise/pointwise.h"
#include "cpu/runtime/workspace.h"
#include "host/rows.h"

namespace pkg::cpu {

// Rows of T whose elements lie side by side: in place where they do, else
// copied into the scratch memory `slot` of the thread, where each row takes the
// place of the one before. Made and used by one thread.
template <class T, Slot slot>
class ContiguousRows {
 public:
  // The tensor has at least one dimension, is of T's dtype, and stays.
  explicit ContiguousRows(const TensorView& tensor)
      : tensor_(tensor),
        leading_dims_(tensor.sizes.size() - 1),
        source_{static_cast<const char*>(tensor.const_data_ptr()),
                tensor.dtype},
        copy_(stride() == 1 ? nullptr : workspace().request<T>(inner())) {}
  ~ContiguousRows() { workspace().release_excess(); }
  ContiguousRows(const ContiguousRows&) = delete;
  ContiguousRows& operator=(const ContiguousRows&) = delete;

  const T* operator[](int64_t row) const {
    return contiguous_run(source_, row_offset(tensor_, leading_dims_, row),
                          stride(), inner(), copy_);
  }

 private:
  static Workspace& workspace() { return Workspace::of_this_thread<slot>(); }
  int64_t stride() const { return tensor_.strides[leading_dims_]; }
  int64_t inner() const { return tensor_.sizes[leading_dims_]; }

  const TensorView& tensor_;
  const size_t leading_dims_;
  const Source source_;
  T* const copy_;
};

}  // namespace pkg::cpu
