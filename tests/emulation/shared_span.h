// Memory shared by a block as csrc/cuda/device/shared.cuh has it: neighbouring
// elements that are read and written one by one, as vectors, by the lanes of a
// warp as the rows of matrices, and by asynchronous copies.
#pragma once

#include "cuda_emulator.h"

namespace pkg::emulation {

template <class Element>
class SharedSpan {
 public:
  SharedSpan(const SharedStorage& storage, size_t first, size_t count)
      : storage_(&storage), first_(first), count_(count) {}

  SharedElement<Element> operator[](int64_t index) const {
    if (index < 0 || static_cast<size_t>(index) >= count_) {
      report_index(*storage_, index, count_);
    }
    return {*storage_, first_ + static_cast<size_t>(index)};
  }

  SharedSpan part(int64_t first, int64_t count) const {
    if (first < 0 || static_cast<size_t>(first + count) > count_) {
      report_index(*storage_, first + count, count_);
    }
    return {*storage_, first_ + static_cast<size_t>(first),
            static_cast<size_t>(count)};
  }

  template <class Vector>
  void store(int64_t index, const Vector& value) const {
    check_vector(*storage_, place<Vector>(index), kNeighbours<Vector>,
                 Access::write);
    std::memcpy(address(index), &value, sizeof(value));
  }

  template <class Vector>
  Vector load(int64_t index) const {
    check_vector(*storage_, place<Vector>(index), kNeighbours<Vector>,
                 Access::read);
    Vector value;
    std::memcpy(&value, address(index), sizeof(value));
    return value;
  }

  // Of sixteen bytes the first `valid` elements from global memory, then zeros.
  void copy_async(int64_t index, const Element* from, int valid) const {
    begin_copy(*storage_, place<std::byte[16]>(index), 16 / sizeof(Element),
               from, static_cast<size_t>(valid) * sizeof(Element));
  }

  // An element from global memory, or 0 where it is not `valid`.
  void copy_element_async(int64_t index, const Element* from,
                          bool valid) const {
    static_assert(sizeof(Element) == 4 || sizeof(Element) == 8);
    begin_copy(*storage_, place<Element>(index), 1, from,
               valid ? sizeof(Element) : 0);
  }

  // Four matrices of eight rows of sixteen bytes: lane i says where row i % 8
  // of matrix i / 8 begins, and gets 32 bits of each matrix.
  // It is counted as such, and not as the loads by which it is emulated.
  [[gnu::no_sanitize("thread"), gnu::no_sanitize_coverage]] void load_matrices(
      int64_t index, bool transposed, uint32_t (&words)[4],
      Site site = Site::current()) const {
    check_vector_place(*storage_, place<std::byte[16]>(index),
                       16 / sizeof(Element));
    const int64_t row = static_cast<int64_t>(first_) + index;
    const LaneBytes* rows = collective(
        ~0u, &row, sizeof(row), nullptr, 0,
        [](const LaneBytes(&given)[32], LaneBytes(&)[32]) {
          count_matrix_load(given, sizeof(Element));
        },
        site);
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t halves[2];
      for (int half = 0; half < 2; ++half) {
        // Of a transposed matrix the lane gets two rows of one column.
        const int at_row =
            transposed ? lane_index() % 4 * 2 + half : lane_index() / 4;
        const int at_column =
            transposed ? lane_index() / 4 : lane_index() % 4 * 2 + half;
        int64_t begin;
        std::memcpy(&begin, rows[matrix * 8 + at_row], sizeof(begin));
        const size_t byte = static_cast<size_t>(begin) * sizeof(Element) +
                            static_cast<size_t>(at_column) * sizeof(uint16_t);
        for (size_t i = 0; i < sizeof(uint16_t); i += sizeof(Element)) {
          check_access(*storage_, (byte + i) / sizeof(Element), Access::read);
        }
        std::memcpy(&halves[half], storage_->bytes + byte, sizeof(uint16_t));
      }
      words[matrix] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
    }
  }

  // The bits of an element, by a load of the whole warp.
  uint32_t load_word(int64_t index, Site site = Site::current()) const {
    static_assert(sizeof(Element) == sizeof(uint32_t));
    const int64_t element = place<uint32_t>(index);
    collective(
        ~0u, &element, sizeof(element), nullptr, 0,
        [](const LaneBytes(&given)[32], LaneBytes(&)[32]) {
          count_word_load(given);
        },
        site);
    return load<uint32_t>(index);
  }

  // Where the element is in the storage.
  size_t byte(int64_t index) const {
    return (first_ + static_cast<size_t>(index)) * sizeof(Element);
  }
  const SharedStorage& storage() const { return *storage_; }

 private:
  template <class Vector>
  static constexpr size_t kNeighbours = sizeof(Vector) / sizeof(Element);

  template <class Vector>
  int64_t place(int64_t index) const {
    constexpr auto kCount = static_cast<int64_t>(kNeighbours<Vector>);
    if (index < 0 || index + kCount > static_cast<int64_t>(count_)) {
      report_index(*storage_, index, count_);
    }
    return static_cast<int64_t>(first_) + index;
  }

  std::byte* address(int64_t index) const {
    return storage_->bytes +
           (first_ + static_cast<size_t>(index)) * sizeof(Element);
  }

  const SharedStorage* storage_;
  size_t first_;
  size_t count_;
};

template <class Element>
SharedSpan<Element> dynamic_shared(const char* name) {
  const SharedStorage& storage = dynamic_shared_storage(name, sizeof(Element));
  return {storage, 0, storage.count};
}

}  // namespace pkg::emulation
