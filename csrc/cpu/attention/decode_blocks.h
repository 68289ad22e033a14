// The blocks of a range of keys, found before they are read, so that they can
// be prefetched (decode_prefetch.h). Each is found once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/attention/decode_elements.h"
#include "cpu/attention/decode_prefetch.h"
#include "host/integer_math.h"

namespace pkg::cpu::attention {

// How many blocks are kept: those in use, the present one and the one before,
// and those that are found.
inline constexpr int64_t kKeyBlockRing = 8;
static_assert(kBlocksTouchedAhead + 2 <= kKeyBlockRing);

// Place says where keys lie:
//   end()                where those end that may be prefetched
//   find(column, block)  sets the addresses of block.count keys from `column`
//                        on; called in the order of the keys
//   copy(block)          for one that is about to be read: may set its
//                        addresses to those of a copy
template <bool kScattered, class Input, class Place>
class KeyBlocks {
 public:
  // The keys from `column` to before `column_end`, `keys` to a block. The next
  // block is found before one is used, where that `looks_ahead`.
  KeyBlocks(KeyBlock<Input>* ring, Place& place, int64_t keys, int64_t column,
            int64_t column_end, bool looks_ahead, int64_t key_size,
            int64_t value_size)
      : ring_(ring),
        place_(place),
        keys_(keys),
        column_(column),
        column_end_(column_end),
        count_(ceil_div(column_end - column, keys)),
        key_size_(key_size),
        value_size_(value_size),
        ahead_(kScattered    ? kBlocksTouchedAhead
               : looks_ahead ? 1
                             : 0) {}

  int64_t count() const { return count_; }
  int64_t column(int64_t n) const { return column_ + n * keys_; }

  // Makes block n, after those before it, ready to be read.
  const KeyBlock<Input>& ready(int64_t n) {
    for (; found_ <= n + ahead_; ++found_) {
      find(found_);
    }
    place_.copy(slot(n));
    return slot(n);
  }

  const KeyBlock<Input>& operator[](int64_t n) const { return slot(n); }

  // What to prefetch while block n is read.
  const KeyBlock<Input>& next(int64_t n) const {
    return slot(ahead_ > 0 ? n + 1 : n);
  }

 private:
  KeyBlock<Input>& slot(int64_t n) const {
    return ring_[static_cast<uint64_t>(n) % kKeyBlockRing];
  }

  void find(int64_t n) {
    KeyBlock<Input>& block = slot(n);
    const int64_t end = n < count_ ? column_end_ : place_.end();
    block.count = std::min(keys_, end - column(n));
    if (block.count <= 0) {
      const KeyBlock<Input>& before = slot(n - 1);
      block.fill_up(0, before.keys[0], before.values[0]);
      return;
    }
    place_.find(column(n), block);
    const int64_t last = block.count - 1;
    if (block.count < keys_) {
      block.fill_up(block.count, block.keys[last], block.values[last]);
    }
    if constexpr (kScattered) {
      touch(block.keys, block.count, key_size_);
      touch(block.values, block.count, value_size_);
    }
  }

  // Its first and last line.
  static void touch(const Input* const* rows, int64_t count, int64_t size) {
    prefetch_line<PrefetchTo::L2>(rows[0]);
    prefetch_line<PrefetchTo::L2>(
        reinterpret_cast<const std::byte*>(rows[count - 1] + size) - 1);
  }

  KeyBlock<Input>* ring_;
  Place& place_;
  int64_t keys_;
  int64_t column_;
  int64_t column_end_;
  int64_t count_;
  int64_t key_size_;
  int64_t value_size_;
  int64_t ahead_;
  int64_t found_ = 0;
};

}  // namespace pkg::cpu::attention
