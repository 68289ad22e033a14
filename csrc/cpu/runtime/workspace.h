// Scratch memory of a thread, kept for the next call so that the hot path
// allocates nothing, and given back where it is large.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>

namespace pkg::cpu {

// The buffers that a thread may hold at the same time; one number is one piece
// of memory. A product's own are 0 to 2 and 7; whatever runs a product keeps to
// the numbers above. int4 and attention, and lltm and rowwise_scaled_linear,
// never run inside one another, and share.
enum class Slot {
  // What a product of matrices packs or copies (cpu/gemm, and the loops of
  // cpu/int4 and cpu/lltm in its place).
  PackedLeft = 0,  // A; the vector of a product with one
  PartialSums = 1,
  Compensation = 1,  // of int8, whose sums need no PartialSums
  PackedRight = 2,   // B
  GatheredColumns = 7,
  // Of float64 by residues.
  IntegerRows = 14,
  MicroTileFlags = 15,

  // cpu/int4, few rows: limbs of the activations, sums of their blocks, scales
  // of a tile, as they are and unpacked.
  Limbs = 0,
  BlockSums = 1,
  TileScales = 2,
  UnpackedScales = 3,
  // By micro-panels: limbs as strips, and the units of their chunks.
  LimbStrips = 4,
  LimbUnits = 7,
  // Many rows: activations in the weight's order, numbers of a pass' groups.
  ReorderedRows = 3,
  GroupNumbers = 4,
  // Either: the weight and its scales, where they are not contiguous.
  WeightWords = 5,
  WeightScales = 6,
  // rowwise_scaled_linear: its rows, their totals, a block of sums.
  SplitRows = 0,
  RowTotals = 1,
  IntegerSums = 2,
  QuadStrips = 4,
  QuadPanel = 5,

  // cpu/attention, which uses none of a product's: a task's blocks; then of a
  // whole call packed heads or where heads begin, partial results, and flags of
  // finite blocks.
  AttentionTask = 3,
  AttentionHeads = 4,
  AttentionParts = 5,
  AttentionFlags = 6,
  CacheCopies = 6,  // decode_attention

  // Of a whole call, around products: the bias, or scales and bias.
  Bias = 8,
  ContiguousWeight = 9,  // rowwise_scaled_linear
  // lltm: packed weights, sums of a sequence or the gates' gradients, and of
  // the backward what is carried from step to step, rows of all steps, bias
  // sums.
  LltmWeights = 9,
  LltmSums = 10,
  LltmGradients = 10,
  LltmCarried = 11,
  LltmRows = 12,
  LltmRun = 13,

  // Without a product: spatial_correlation_sample's images, sums and rows; and,
  // for any operator, rows of its operands (cpu/pointwise/rows.h), of which
  // docs/adding_a_kernel.md has the third.
  CorrelationImages = 0,
  CorrelationSums = 1,
  CorrelationRows = 2,
  FirstRow = 0,
  SecondRow = 1,
  ThirdRow = 2,
};

// In words, which need no memory of their own.
class NoScratchMemory : public std::bad_alloc {
 public:
  explicit NoScratchMemory(size_t bytes) {
    std::snprintf(words_.data(), words_.size(),
                  "no memory for %zu bytes of scratch; free some, or split the "
                  "call into smaller ones",
                  bytes);
  }
  const char* what() const noexcept override { return words_.data(); }

 private:
  std::array<char, 128> words_;
};

class Workspace {
 public:
  // A thread's scratch memory.
  template <Slot slot>
  static Workspace& of_this_thread() {
    thread_local Workspace workspace;
    return workspace;
  }

  // At least `count` elements, aligned to a cache line, with any content. Valid
  // until the next request of this slot.
  template <class T>
  T* request(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<std::byte*>(
          ::operator new(bytes, std::align_val_t{kAlignment}, std::nothrow)));
      if (memory_ == nullptr) {
        throw NoScratchMemory(bytes);
      }
      size_ = bytes;
    }
    return reinterpret_cast<T*>(memory_.get());
  }

  // Keeps at most kKept bytes for later calls.
  void release_excess() {
    if (size_ > kKept) {
      memory_.reset();
      size_ = 0;
    }
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kKept = size_t{64} << 20;

  struct Delete {
    void operator()(std::byte* memory) const {
      ::operator delete(memory, std::align_val_t{kAlignment});
    }
  };

  std::unique_ptr<std::byte, Delete> memory_;
  size_t size_ = 0;
};

}  // namespace pkg::cpu
