#include "emulated_wgmma.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "asynchronous.h"
#include "clocks.h"
#include "cuda/device/mma_places.cuh"
#include "emulated_tensor_map.h"
#include "emulator_state.h"

namespace pkg::emulation {
namespace {

constexpr int kGroupThreads = 128;
using Word = uint32_t;
constexpr Word kPoison = ~Word{0};

// What the threads of a warpgroup bring to an instruction.
struct Given {
  const GroupProduct* product;
  void* sums;
  const uint32_t* a_words;
  const WarpgroupOperand* a;
  const WarpgroupOperand* b;
};

// The sums of a warpgroup while products are on their way to them.
struct Sums {
  std::array<Word*, kGroupThreads> registers;
  std::vector<Word> values;  // [64][columns]
  int columns;
  uint64_t last_group;  // that adds to them
};

struct Warpgroup {
  int arrived = 0;
  Site site;
  std::array<Given, kGroupThreads> given;
  // Whether the threads have ordered what they did with their registers before
  // what products do.
  bool is_ordered = false;
  uint64_t group = 0;          // that is not committed
  std::deque<uint64_t> begun;  // groups of the products that have not run
  std::vector<std::shared_ptr<Sums>> sums;
};

std::map<int, Warpgroup> of_blocks[kBlocksAtATime];

std::map<int, Warpgroup>& warpgroups() { return of_blocks[block->slot]; }

int warpgroup_of(int thread) { return thread / kGroupThreads; }

// The last thread of the warpgroup to come calls `act`; all go on then.
template <class Act>
void as_warpgroup(const Given& given, Site site, Act&& act) {
  start_clocks();
  const int number = warpgroup_of(running);
  const int first = number * kGroupThreads;
  if (first + kGroupThreads > static_cast<int>(block->thread_count)) {
    report("thread %d is in no whole warpgroup, at %s:%u", running,
           site.file_name(), site.line());
  }
  Warpgroup& group = warpgroups()[number];
  if (group.arrived != 0 && group.site.line() != site.line()) {
    report("divergent: threads of warpgroup %d are at %s:%u and at line %u",
           number, site.file_name(), site.line(), group.site.line());
  }
  group.site = site;
  group.given[running - first] = given;
  if (++group.arrived < kGroupThreads) {
    wait(State::in_warpgroup, site);
    return;
  }
  group.arrived = 0;
  act(number, group);
  for (int thread = first; thread < first + kGroupThreads; ++thread) {
    block->threads[thread]->state = State::ready;
  }
}

// Where the vector of 16 bytes is that holds the byte of the step, of a row or
// column: before vectors change places.
size_t vector_of(const WarpgroupOperand& operand, bool by_steps, int outer,
                 size_t step_byte, size_t element_size) {
  const auto lines = [&](size_t line) {
    return line / 8 * operand.eight_lines() + line % 8 * kBoxLineBytes;
  };
  const auto place = static_cast<size_t>(outer);
  if (!by_steps) {
    return operand.byte() + lines(place) + step_byte / 16 * 16;
  }
  const size_t per_line = kBoxLineBytes / element_size;
  return operand.byte() + place / per_line * operand.part_bytes() +
         lines(step_byte / element_size) +
         place % per_line * element_size / 16 * 16;
}

// Checks, and tells the products that are to come, what one reads.
void check_operand(const WarpgroupOperand& operand, bool by_steps, int extent,
                   size_t element_size, int number, const Warpgroup& group) {
  const SharedStorage& storage = operand.storage();
  size_t begin = SIZE_MAX;
  size_t end = 0;
  const int outer_step = by_steps ? static_cast<int>(16 / element_size) : 1;
  const size_t byte_step = by_steps ? element_size : 16;
  const size_t in_eight = operand.byte() % (8 * kBoxLineBytes);
  // Of lines of steps the operand is whole lines, or a part of them.
  const size_t width = static_cast<size_t>(extent) * element_size;
  if (in_eight % 16 != 0 || in_eight >= kBoxLineBytes ||
      (by_steps && in_eight != 0 && in_eight + width > kBoxLineBytes)) {
    report(
        "an operand of warpgroup %d begins at byte %zu, which is not aligned",
        number, operand.byte());
  }
  for (int outer = 0; outer < extent; outer += outer_step) {
    for (size_t byte = 0; byte < kStepBytes; byte += byte_step) {
      const size_t vector =
          vector_of(operand, by_steps, outer, byte, element_size);
      begin = std::min(begin, vector);
      end = std::max(end, vector + 16);
      const size_t first = swizzled(vector) / storage.element_size;
      const size_t count = 16 / storage.element_size;
      // Each warp has to know that the bytes are there.
      for (int warp = 0; warp < kGroupThreads / kWarpSize; ++warp) {
        for (size_t i = first; i < first + count; ++i) {
          if (i >= storage.count) {
            report_index(storage, static_cast<int64_t>(i), storage.count);
          }
          check_product_read(storage, i,
                             number * kGroupThreads + warp * kWarpSize);
        }
      }
    }
  }
  add_reading({.storage = &storage,
               .begin = begin / 1024 * 1024,
               .end = (end + 1023) / 1024 * 1024,
               .warpgroup = number,
               .group = group.group,
               .time = block->now,
               .clocks = {}});
}

// The operand as lines of 32 bytes, one for each row or column.
std::vector<std::byte> operand_lines(const WarpgroupOperand& operand,
                                     bool by_steps, int extent,
                                     size_t element_size) {
  std::vector<std::byte> lines(static_cast<size_t>(extent) * kStepBytes);
  for (int outer = 0; outer < extent; ++outer) {
    for (size_t byte = 0; byte < kStepBytes; byte += element_size) {
      const size_t vector =
          vector_of(operand, by_steps, outer, byte, element_size);
      const size_t in_vector =
          by_steps ? static_cast<size_t>(outer) * element_size % 16 : byte % 16;
      std::copy_n(
          operand.storage().bytes + swizzled(vector) + in_vector, element_size,
          lines.data() + static_cast<size_t>(outer) * kStepBytes + byte);
    }
  }
  return lines;
}

// The same of an operand A that is in registers now: a word has the same bytes
// of a line whatever their elements.
std::vector<std::byte> lines_of_words(
    const std::array<Given, kGroupThreads>& given) {
  using Places = cuda::MmaPlaces<2>;
  std::vector<std::byte> lines(kGroupRows * kStepBytes);
  for (int thread = 0; thread < kGroupThreads; ++thread) {
    for (int word = 0; word < 4; ++word) {
      for (int element = 0; element < Places::kInWord; ++element) {
        const cuda::MatrixPlace at =
            Places::a(thread % kWarpSize, word, element);
        const auto row =
            static_cast<size_t>(thread / kWarpSize * Places::kRows + at.row);
        const auto half =
            static_cast<uint16_t>(given[thread].a_words[word] >> 16 * element);
        std::memcpy(lines.data() + row * kStepBytes +
                        static_cast<size_t>(at.column) * sizeof(half),
                    &half, sizeof(half));
      }
    }
  }
  return lines;
}

// Calls function(word of the thread's registers, word of the matrix).
template <class Function>
void for_each_sum(Sums& sums, int thread, Function&& function) {
  using Places = cuda::MmaPlaces<2>;
  const int own = sums.columns / 4;
  for (int row = 0; row < 2; ++row) {
    for (int j = 0; j < own; ++j) {
      const cuda::MatrixPlace at =
          Places::sum(thread % kWarpSize, 2 * row + j % 2);
      const int in_group = thread / kWarpSize * Places::kRows + at.row;
      const int column = j / 2 * Places::kColumns + at.column;
      function(
          sums.registers[thread][row * own + j],
          sums.values[static_cast<size_t>(in_group * sums.columns + column)]);
    }
  }
}

// The sums that the instruction adds to: those on their way, or what the
// registers hold.
std::shared_ptr<Sums> sums_of(Warpgroup& group, int number, Site site) {
  const int columns = group.given[0].product->columns;
  auto* const first = static_cast<Word*>(group.given[0].sums);
  for (const std::shared_ptr<Sums>& sums : group.sums) {
    if (sums->registers[0] == first) {
      return sums;
    }
  }
  if (!group.is_ordered) {
    report(
        "warpgroup %d adds to registers at %s:%u without having ordered what "
        "it "
        "did with them",
        number, site.file_name(), site.line());
  }
  auto sums = std::make_shared<Sums>();
  sums->columns = columns;
  sums->values.resize(static_cast<size_t>(kGroupRows * columns));
  for (int thread = 0; thread < kGroupThreads; ++thread) {
    sums->registers[thread] = static_cast<Word*>(group.given[thread].sums);
    for_each_sum(*sums, thread, [](Word& in_register, Word& value) {
      value = in_register;
      in_register = kPoison;
    });
  }
  group.sums.push_back(sums);
  return sums;
}

void check_agreement(const Warpgroup& group, int number, Site site) {
  const Given& first = group.given[0];
  for (const Given& other : group.given) {
    const bool same_a =
        first.a == nullptr ? other.a == nullptr : *first.a == *other.a;
    if (!same_a || !(*first.b == *other.b) ||
        first.product->add != other.product->add) {
      report("threads of warpgroup %d multiply different operands at %s:%u",
             number, site.file_name(), site.line());
    }
  }
}

void begin(int number, Warpgroup& group, Site site) {
  check_agreement(group, number, site);
  const Given& given = group.given[0];
  const GroupProduct product = *given.product;
  count_group_product();
  if (given.a == nullptr && !group.is_ordered) {
    report(
        "warpgroup %d multiplies registers at %s:%u without having ordered "
        "what "
        "it did with them",
        number, site.file_name(), site.line());
  }
  const std::shared_ptr<Sums> sums = sums_of(group, number, site);
  sums->last_group = group.group;
  check_operand(*given.b, product.b_by_steps, product.columns,
                product.element_size, number, group);
  const WarpgroupOperand b = *given.b;
  const WarpgroupOperand a = given.a == nullptr ? b : *given.a;
  std::vector<std::byte> a_lines;
  if (given.a == nullptr) {
    a_lines = lines_of_words(group.given);
  } else {
    check_operand(a, product.a_by_steps, kGroupRows, product.element_size,
                  number, group);
  }
  group.begun.push_back(group.group);
  add_operation(number, [=, &group] {
    const auto read_a = [&] {
      return operand_lines(a, product.a_by_steps, kGroupRows,
                           product.element_size);
    };
    const std::vector<std::byte> lines_a = a_lines.empty() ? read_a() : a_lines;
    const std::vector<std::byte> lines_b = operand_lines(
        b, product.b_by_steps, product.columns, product.element_size);
    if (!product.add) {
      std::fill(sums->values.begin(), sums->values.end(), Word{0});
    }
    product.multiply(lines_a.data(), lines_b.data(), sums->values.data(),
                     product.columns);
    group.begun.pop_front();
  });
}

void wait_for(int number, Warpgroup& group, size_t pending) {
  const uint64_t open = group.group > pending ? group.group - pending : 0;
  while (!group.begun.empty() && group.begun.front() < open) {
    run_operation_of(number);
  }
  finish_readings(number, open);
  const int first = number * kGroupThreads;
  for (int thread = first; thread < first + kGroupThreads; ++thread) {
    advance_clock(thread);
  }
  std::erase_if(group.sums, [&](const std::shared_ptr<Sums>& sums) {
    if (sums->last_group >= open) {
      return false;
    }
    for (int thread = 0; thread < kGroupThreads; ++thread) {
      for_each_sum(*sums, thread, [&](Word& in_register, const Word& value) {
        if (in_register != kPoison) {
          report("thread %d has changed sums that products are on their way to",
                 first + thread);
        }
        in_register = value;
      });
    }
    return true;
  });
  group.is_ordered = false;
}

}  // namespace

void begin_group_product(const GroupProduct& product, void* sums,
                         const uint32_t* a_words, const WarpgroupOperand* a,
                         const WarpgroupOperand& b, Site site) {
  as_warpgroup(
      {&product, sums, a_words, a, &b}, site,
      [=](int number, Warpgroup& group) { begin(number, group, site); });
}

void order_registers(Site site) {
  as_warpgroup({}, site,
               [](int, Warpgroup& group) { group.is_ordered = true; });
}

void commit_products(Site site) {
  as_warpgroup({}, site, [](int, Warpgroup& group) { ++group.group; });
}

void wait_for_groups(size_t pending, Site site) {
  as_warpgroup({}, site, [=](int number, Warpgroup& group) {
    wait_for(number, group, pending);
  });
}

void forget_products() { warpgroups().clear(); }

void check_products_are_over() {
  const auto found = warpgroups().find(warpgroup_of(running));
  if (found != warpgroups().end() && !found->second.sums.empty()) {
    report("thread %d returns and has not waited for its warpgroup's products",
           running);
  }
}

}  // namespace pkg::emulation
