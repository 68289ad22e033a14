// Bulk tensor copies as csrc/cuda/device/tensor_map.cuh has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/device/tf32.cuh"
#include "cuda_emulator.h"
#include "emulated_mbarrier.h"
#include "shared_span.h"

namespace pkg::cuda {

template <class Element>
struct MappedTensor;

}  // namespace pkg::cuda

namespace pkg::emulation {

constexpr size_t kBoxLineBytes = 128;

// Vectors of sixteen bytes change places within a line as the line's number in
// its eight says, counted from where shared memory begins.
inline size_t swizzled(size_t byte) { return byte ^ (byte / 128 % 8 * 16); }

struct TensorMap {
  const void* data = nullptr;
  int64_t width = 0;
  int64_t lines = 0;
  int64_t matrices = 0;
  int64_t line_stride = 0;
  int64_t matrix_stride = 0;
  int64_t groups = 0;
  int64_t group_stride = 0;
  int box_lines = 0;
  size_t element_size = 0;
};

template <class Element>
TensorMap encode_tensor_map(const cuda::MappedTensor<Element>& tensor) {
  if (!tensor.has_map()) {
    throw Report("cuda emulator: a tensor that has no map is to be mapped");
  }
  return {tensor.data,     tensor.width,        tensor.lines,
          tensor.matrices, tensor.line_stride,  tensor.matrix_stride,
          tensor.groups,   tensor.group_stride, tensor.box_lines,
          sizeof(Element)};
}

// An element as the engine brings it: rounded, where the map says so.
template <class Element>
Element as_copied(Element element) {
  if constexpr (std::is_same_v<Element, cuda::Tf32>) {
    const uint32_t bits = cuda::bits_of_float(element.value);
    return Element(
        cuda::float_of_bits(cuda::round_to_tf32(bits) & ~cuda::kBelowTf32));
  } else {
    return element;
  }
}

void check_box(const TensorMap& map, size_t element_size, size_t first_byte,
               Site site);
void count_box();

template <class Element>
void copy_box(const SharedSpan<Element>& to, int index, const TensorMap& map,
              int place, int line, int matrix, int group,
              const Mbarriers& barriers, int barrier,
              Site site = Site::current()) {
  constexpr auto kWidth = static_cast<int64_t>(kBoxLineBytes / sizeof(Element));
  const size_t first_byte = to.byte(index);
  check_box(map, sizeof(Element), first_byte, site);
  count_box();
  begin_bulk_copy(
      to.storage(), first_byte,
      static_cast<size_t>(map.box_lines) * kBoxLineBytes, barriers.at(barrier),
      [=](std::byte* memory) {
        for (int64_t i = 0; i < map.box_lines; ++i) {
          for (int64_t j = 0; j < kWidth; ++j) {
            const bool exists = line + i >= 0 && line + i < map.lines &&
                                place + j >= 0 && place + j < map.width &&
                                matrix >= 0 && matrix < map.matrices &&
                                group >= 0 && group < map.groups;
            Element element = {};
            if (exists) {
              element = as_copied(static_cast<const Element*>(
                  map.data)[group * map.group_stride +
                            matrix * map.matrix_stride +
                            (line + i) * map.line_stride + place + j]);
            }
            const size_t byte = first_byte +
                                static_cast<size_t>(i) * kBoxLineBytes +
                                static_cast<size_t>(j) * sizeof(Element);
            std::memcpy(memory + swizzled(byte), &element, sizeof(element));
          }
        }
      },
      site);
}

template <class Element>
void copy_box(const SharedSpan<Element>& to, int index, const TensorMap& map,
              int place, int line, int matrix, const Mbarriers& barriers,
              int barrier, Site site = Site::current()) {
  copy_box(to, index, map, place, line, matrix, 0, barriers, barrier, site);
}

}  // namespace pkg::emulation
