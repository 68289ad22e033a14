// How an instruction of a warpgroup is told where an operand lies in shared
// memory (PTX ISA, "Matrix Descriptor Format" of wgmma). The device's
// instruction, the emulated one and a test against the manual's table all take
// it from here.
#pragma once

#include <cstdint>

#include "cuda/device/device.cuh"

namespace pkg::cuda {

// Lines of 128 bytes whose vectors of 16 have changed places as SwizzledTile
// (device/shared.cuh) does, eight lines after eight. Where lines are steps of
// the summed dimension and the operand is wider than a line, parts of a line's
// width follow `part_bytes` after each other; for others that is not used.
class MatrixDescriptor {
 public:
  __host__ __device__ constexpr MatrixDescriptor(uint32_t address,
                                                 int part_bytes)
      : words_(encoded(address) |
               encoded(static_cast<uint32_t>(part_bytes)) << 16 |
               encoded(kEightLines) << 32 | kSwizzle128 << 62) {}

  // The same so many bytes further on.
  __host__ __device__ constexpr MatrixDescriptor at(int bytes) const {
    MatrixDescriptor moved = *this;
    moved.words_ += static_cast<uint64_t>(bytes) >> 4;
    return moved;
  }

  __host__ __device__ constexpr uint64_t words() const { return words_; }

  // What the words say, for those who read them on the host.
  constexpr uint32_t address() const { return decoded(words_); }
  constexpr uint32_t part_bytes() const { return decoded(words_ >> 16); }
  constexpr uint32_t eight_lines() const { return decoded(words_ >> 32); }
  constexpr bool is_swizzled() const { return words_ >> 62 == kSwizzle128; }

  bool operator==(const MatrixDescriptor&) const = default;

 private:
  static constexpr uint32_t kEightLines = 1024;
  static constexpr uint64_t kSwizzle128 = 1;

  // Bytes as a field of 14 bits.
  __host__ __device__ static constexpr uint64_t encoded(uint32_t bytes) {
    return (bytes & 0x3ffff) >> 4;
  }
  static constexpr uint32_t decoded(uint64_t field) {
    return static_cast<uint32_t>(field & 0x3fff) << 4;
  }

  uint64_t words_;
};

}  // namespace pkg::cuda
