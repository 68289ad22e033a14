// Which kernel a call of decode_attention takes.
#pragma once

#include "cuda/attention/decode_mma.cuh"
#include "cuda/attention/decode_panels.cuh"

namespace pkg::cuda {

// Calls use(kernel, pieces, blocks, shape) for the tiles of a block's rows and
// columns: with the pieces of `call`, and how many blocks a multiprocessor can
// hold. Of half precision the panels are for rare shapes, and there are fewer
// kernels of them.
template <class Element, class Use>
void with_decode_panels(const DecodeAttention<Element>& call, Use&& use) {
  const auto with_tiles = [&]<int kRows, int kWidth>() {
    use(decode_attention_panels_kernel<Element, kRows, kWidth>,
        call.template piece_count<kRows, kWidth>(), kDecodeBlocks,
        LaunchShape(kDecodeThreads));
  };
  const auto with_width = [&]<int kRows>() {
    // 128 columns where 64 would have several blocks repeat the scores, if the
    // registers of a thread hold so many.
    if constexpr (std::is_same_v<Element, double>) {
      with_tiles.template operator()<kRows, 64>();
    } else if constexpr (sizeof(Element) == 2) {
      with_tiles.template operator()<kRows, 128>();
    } else if (call.value_size > 64) {
      with_tiles.template operator()<kRows, 128>();
    } else {
      with_tiles.template operator()<kRows, 64>();
    }
  };
  if (call.shared_rows() == 1) {
    with_width.template operator()<1>();
  } else {
    with_width.template operator()<kDecodeRows<Element>>();
  }
}

// The same with the kernel for the call, of which a block may use so much
// shared memory.
template <class Element, class Use>
void with_decode_kernel(const DecodeAttention<Element>& call,
                        int most_shared_bytes, Use&& use) {
  if constexpr (sizeof(Element) == 2) {
    const auto with_width = [&]<int kWidth>() {
      using Mma = DecodeMma<Element, kWidth>;
      const LaunchShape shape = Mma::launch_shape(call.head_size);
      if (shape.shared_bytes + Mma::kDeclaredBytes > most_shared_bytes) {
        return false;
      }
      use(decode_attention_mma_kernel<Element, kWidth>,
          call.template piece_count<Mma::kRows, kWidth>(), Mma::kBlocks, shape);
      return true;
    };
    if (call.head_size <= kMostDecodeHead &&
        call.capacity < kMostDecodeLength &&
        call.shared_rows() < kMostDecodeLength) {
      // The scores are repeated for each tile of columns.
      if ((call.value_size > 128 && with_width.template operator()<256>()) ||
          (call.value_size > 64 && with_width.template operator()<128>()) ||
          with_width.template operator()<64>()) {
        return;
      }
    }
  }
  with_decode_panels(call, use);
}

}  // namespace pkg::cuda
