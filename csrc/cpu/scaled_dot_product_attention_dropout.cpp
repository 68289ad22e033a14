// attention_dropout_mask: which probabilities the dropout of attention keeps.
// The attention kernels draw the same bits themselves; this is for whoever must
// compute attention in another way.
//
// Philox of host/philox.h, four columns a counter: some 70 integer operations
// for 4 bytes written, bound by arithmetic.
#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu/runtime/parallel.h"
#include "host/namespace.h"
#include "host/philox.h"
#include "scaled_dot_product_attention.h"

namespace pkg::cpu {
namespace {

Tensor attention_dropout_mask(const TensorView& seed, int64_t batch,
                              int64_t rows, int64_t columns, double dropout_p) {
  check_dropout_mask(seed, batch, rows, columns, dropout_p);
  const Tensor mask = empty_contiguous(std::array{batch, rows, columns},
                                       ScalarType::Bool, device_of(seed));
  bool* kept = static_cast<bool*>(mask.mutable_data_ptr());
  const int64_t key = *static_cast<const int64_t*>(seed.const_data_ptr());
  const uint64_t threshold = dropout_keep_threshold(dropout_p);
  const int64_t grain =
      std::max<int64_t>(1, 4096 / std::max<int64_t>(columns, 1));
  parallel_for(
      columns > 0 ? batch * rows : 0, grain, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          for (int64_t column = 0; column < columns; column += 4) {
            const PhiloxCounter words =
                dropout_words(key, row / rows, row % rows, column / 4);
            const int64_t count = std::min<int64_t>(4, columns - column);
            for (int64_t i = 0; i < count; ++i) {
              kept[row * columns + column + i] =
                  dropout_keeps(words.words[i], threshold);
            }
          }
        }
      });
  return mask;
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&attention_dropout_mask>("attention_dropout_mask");
}

}  // namespace
}  // namespace pkg::cpu
