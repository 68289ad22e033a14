// Products of warpgroups as csrc/cuda/device/wgmma.cuh has them. They read
// shared memory, and change the sums, between the instruction and the wait;
// until then the sums are poisoned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/device/matrix_descriptor.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/tf32.cuh"
#include "cuda_emulator.h"
#include "shared_span.h"

namespace pkg::cuda {

enum class Major;

}  // namespace pkg::cuda

namespace pkg::emulation {

// An operand in shared memory: what the descriptor says of it.
class WarpgroupOperand {
 public:
  template <class Element>
  WarpgroupOperand(const SharedSpan<Element>& memory, int index,
                   int part_bytes = 16)
      : storage_(&memory.storage()),
        descriptor_(static_cast<uint32_t>(memory.byte(index)), part_bytes) {}

  WarpgroupOperand at(int bytes) const {
    WarpgroupOperand moved = *this;
    moved.descriptor_ = descriptor_.at(bytes);
    return moved;
  }

  bool operator==(const WarpgroupOperand&) const = default;
  const SharedStorage& storage() const { return *storage_; }
  size_t byte() const { return descriptor_.address(); }
  size_t part_bytes() const { return descriptor_.part_bytes(); }
  size_t eight_lines() const { return descriptor_.eight_lines(); }

 private:
  const SharedStorage* storage_;
  cuda::MatrixDescriptor descriptor_;
};

constexpr int kGroupRows = 64;
constexpr size_t kStepBytes = 32;  // of the summed dimension

struct GroupProduct {
  int columns;
  size_t element_size;
  bool a_by_steps;  // lines are steps of the summed dimension
  bool b_by_steps;
  bool add;
  // sums[64][columns] += a b, of lines of 32 bytes, by rows and by columns.
  void (*multiply)(const std::byte* a, const std::byte* b, void* sums,
                   int columns);
};

// By each thread of the warpgroup, whose sums are [2][columns / 4] words; A is
// the words of mma or an operand in shared memory.
void begin_group_product(const GroupProduct& product, void* sums,
                         const uint32_t* a_words, const WarpgroupOperand* a,
                         const WarpgroupOperand& b, Site site);

// What the tensor cores read of an element.
template <class Sum, class Element>
Sum number_read(Element element) {
  if constexpr (std::is_same_v<Element, cuda::Tf32>) {
    return cuda::float_of_bits(cuda::bits_of_float(element.value) &
                               ~cuda::kBelowTf32);
  } else {
    return cuda::convert<Sum>(element);
  }
}

template <class Element, class Sum>
void multiply_group(const std::byte* a, const std::byte* b, void* to,
                    int columns) {
  constexpr size_t kDepth = kStepBytes / sizeof(Element);
  const auto read = [](const std::byte* lines, int line, size_t step) {
    Element element;
    std::memcpy(
        &element,
        lines + static_cast<size_t>(line) * kStepBytes + step * sizeof(Element),
        sizeof(element));
    return number_read<Sum>(element);
  };
  Sum* const sums = static_cast<Sum*>(to);
  for (size_t step = 0; step < kDepth; ++step) {
    Sum of_columns[256];
    for (int column = 0; column < columns; ++column) {
      of_columns[column] = read(b, column, step);
    }
    for (int row = 0; row < kGroupRows; ++row) {
      const Sum of_row = read(a, row, step);
      Sum* const sums_of_row = sums + row * columns;
      for (int column = 0; column < columns; ++column) {
        sums_of_row[column] += of_row * of_columns[column];
      }
    }
  }
}

template <class Element, cuda::Major kMajorA, cuda::Major kMajorB, class Sum,
          int kOwn>
void begin_product(Sum (&sums)[2][kOwn], const WarpgroupOperand& a,
                   const WarpgroupOperand& b, bool add = true,
                   Site site = Site::current()) {
  constexpr bool kASteps = static_cast<int>(kMajorA) != 0;
  constexpr bool kBSteps = static_cast<int>(kMajorB) != 0;
  static_assert(sizeof(Element) == 2 || (!kASteps && !kBSteps));
  static_assert(kOwn == 16 || kOwn == 32 || kOwn == 64 ||
                (kOwn == 8 && sizeof(Element) == 2));
  begin_group_product({4 * kOwn, sizeof(Element), kASteps, kBSteps, add,
                       &multiply_group<Element, Sum>},
                      sums, nullptr, &a, b, site);
}

template <class Element, cuda::Major kMajorB, class Sum, int kOwn>
void begin_product(Sum (&sums)[2][kOwn], const uint32_t (&a_words)[4],
                   const WarpgroupOperand& b, bool add = true,
                   Site site = Site::current()) {
  constexpr bool kBSteps = static_cast<int>(kMajorB) != 0;
  static_assert(sizeof(Element) == 2 || !kBSteps);
  static_assert(kOwn == 16 || kOwn == 32 || kOwn == 64);
  begin_group_product({4 * kOwn, sizeof(Element), false, kBSteps, add,
                       &multiply_group<Element, Sum>},
                      sums, a_words, nullptr, b, site);
}

void order_registers(Site site = Site::current());
void commit_products(Site site = Site::current());
void wait_for_groups(size_t pending, Site site);

template <int kPending>
void wait_for_products(Site site = Site::current()) {
  wait_for_groups(kPending, site);
}

template <class Sum, int kOwn>
void hold_sums(Sum (&)[2][kOwn]) {}

template <int kSteps>
void hold_words(uint32_t (&)[kSteps][4]) {}

template <int kRegisters>
void give_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}

template <int kRegisters>
void take_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}

void forget_products();
// That the running thread, which returns, has waited for its products.
void check_products_are_over();

}  // namespace pkg::emulation
