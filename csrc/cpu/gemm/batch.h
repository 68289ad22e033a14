// A batch of products among threads: several at a time, one thread each, where
// there are enough of them; else one after the other, all threads at each.
#pragma once

#include <cstdint>

#include "cpu/runtime/parallel.h"

namespace pkg::cpu {

// Calls product(index, threads) for each of `batch` products of so many
// multiply-adds.
template <class Product>
void for_each_product(int64_t batch, int64_t multiply_adds,
                      const Product& product) {
  const int64_t threads = num_threads();
  if (batch < threads) {
    for (int64_t index = 0; index < batch; ++index) {
      product(index, threads);
    }
    return;
  }
  parallel_for(batch, grain_of(kMultiplyAddGrain, multiply_adds),
               [&](int64_t begin, int64_t end) {
                 for (int64_t index = begin; index < end; ++index) {
                   product(index, 1);
                 }
               });
}

}  // namespace pkg::cpu
