#include "cpu/accelerate/routes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "cpu/runtime/parallel.h"
#include "host/compiler.h"

namespace pkg::cpu::accelerate {

namespace {

// The measured sizes around a size: one where it is measured itself, or beyond
// the first or last of them.
struct Around {
  size_t below;
  size_t above;
  float weight;  // of the one above, by the sizes' logarithms
  bool is_far;   // more than twice the last one

  Around(int64_t size, std::span<const int64_t> measured,
         bool has_large = false)
      : below(0),
        above(measured.size() - 1),
        weight(0),
        is_far(size > 2 * measured.back()) {
    while (above > 0 && measured[above - 1] >= size) {
      --above;
    }
    below = above > 0 && size < measured[above] ? above - 1 : above;
    // A large one lies far behind the others: next to those it says nothing.
    if (has_large && above == measured.size() - 1 &&
        size <= 2 * measured[below]) {
      above = below;
    }
    if (below != above) {
      const auto times = [&](int64_t larger) {
        return std::log(static_cast<float>(larger) /
                        static_cast<float>(measured[below]));
      };
      weight = times(size) / times(measured[above]);
    }
  }

  // What `at` gives for these, together.
  template <class At>
  Ratio together(const At& at) const {
    if (below == above) {
      return at(below);
    }
    const Ratio lower = at(below);
    const Ratio upper = at(above);
    // Of two that are infinite, as where everything is to be taken, infinity.
    return {(1 - weight) * lower.expected + weight * upper.expected,
            std::min(lower.least, upper.least)};
  }
};

// Far from all that was measured a call has to promise more.
Ratio cautious(const Ratio& ratio, bool is_far) {
  constexpr float kFarRatio = 1.3F;
  return is_far && ratio.expected < kFarRatio ? Ratio{} : ratio;
}

int several_threads() { return num_threads() > 1 ? 1 : 0; }

}  // namespace

State& state() {
  static State instance{};
  return instance;
}

int type_index(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
      return 0;
    case ScalarType::Float:
      return 1;
    case ScalarType::Half:
      return 2;
    case ScalarType::BFloat16:
      return 3;
    case ScalarType::Char:
      return 4;
    default:
      return -1;
  }
}

Ratio ratio(const Table& table, Family family, int type, Layout layout,
            const ProductSizes& sizes) {
  const auto& measured =
      table.ratios.products[several_threads()][static_cast<int>(family)][type]
                           [static_cast<int>(layout)];
  // Of the large sizes all or none are.
  const bool has_large =
      measured[0][0][kInnerClasses.size() - 1] != kNotMeasured;
  const auto classes = [&](std::span<const int64_t> all) {
    return all.first(all.size() - (has_large ? 0 : 1));
  };
  const Around rows(sizes.rows, classes(kRowClasses), has_large);
  const Around columns(sizes.columns, classes(kColumnClasses), has_large);
  const Around inner(sizes.inner, classes(kInnerClasses), has_large);
  const Ratio all = rows.together([&](size_t row) {
    return columns.together([&](size_t column) {
      return inner.together(
          [&](size_t k) { return Ratio(measured[row][column][k]); });
    });
  });
  return cautious(all, rows.is_far || columns.is_far || inner.is_far);
}

Ratio ratio(const Table& table, Pass pass, int type, Hidden hidden,
            int64_t queries, int64_t keys) {
  const auto& measured =
      table.ratios.attention[several_threads()][static_cast<int>(pass)][type]
                            [static_cast<int>(hidden)];
  const Around rows(queries, kQueryClasses);
  const Around columns(keys, kKeyClasses);
  const Ratio all = rows.together([&](size_t row) {
    return columns.together(
        [&](size_t column) { return Ratio(measured[row][column]); });
  });
  return cautious(all, rows.is_far || columns.is_far);
}

Ratio ratio(const Table& table, Pass pass, int type, Curve curve) {
  return Ratio(table.ratios.curves[several_threads()][static_cast<int>(pass)]
                                  [type][static_cast<int>(curve)]);
}

float if_enough(const Table& table, const Ratio& ratio) {
  const Enough& enough = table.enough[several_threads()];
  return ratio.expected >= enough.expected && ratio.least >= enough.least
             ? ratio.expected
             : 0;
}

void count_left(AtenOperator op, ScalarType type) {
  const int index = type_index(type);
  if (index >= 0) {
    state().counters[static_cast<int>(op)][index].left.fetch_add(
        1, std::memory_order_relaxed);
  }
}

}  // namespace pkg::cpu::accelerate

namespace {

using pkg::cpu::accelerate::state;

}  // namespace

// For pkg/_accelerate_routes.py, by ctypes.
extern "C" PKG_EXPORT void pkg_accelerate_switch(int is_on, int attention,
                                                 int takes_time) {
  state().takes_time.store(takes_time);
  state().attention.store(
      static_cast<pkg::cpu::accelerate::AttentionMode>(attention));
  state().is_on.store(is_on);
}

// A call that ran in one of pkg's operators, for which PyTorch has no kernel.
extern "C" PKG_EXPORT void pkg_accelerate_count_taken(int op, int type,
                                                      int64_t nanoseconds) {
  auto& counters = state().counters[op][type];
  ++counters.taken;
  counters.nanoseconds += nanoseconds;
}

// PyTorch's time divided by ours of attention, of a dtype by its place in the
// tables and with keys hidden by nothing, causality or a mask; 0 where it is
// left to PyTorch.
extern "C" PKG_EXPORT float pkg_accelerate_attention_gain(int type, int hidden,
                                                          int64_t queries,
                                                          int64_t keys) {
  using namespace pkg::cpu::accelerate;
  if (state().attention.load() != AttentionMode::ByTable) {
    return 0;
  }
  const Table& measured = table();
  return if_enough(measured, ratio(measured, Pass::Forward, type,
                                   static_cast<Hidden>(hidden), queries, keys));
}

// The sizes that are measured, for pkg/tune.py: a pointer to the classes of
// rows, of columns, inner dimensions, queries or keys, and how many there are.
extern "C" PKG_EXPORT int64_t pkg_accelerate_sizes(int which,
                                                   const int64_t** sizes) {
  using namespace pkg::cpu::accelerate;
  const std::span<const int64_t> classes[] = {
      kRowClasses, kColumnClasses, kInnerClasses, kQueryClasses, kKeyClasses};
  *sizes = classes[which].data();
  return static_cast<int64_t>(classes[which].size());
}

// Has calls from now on, and those that are about to look, decided by a copy of
// these ratios. `enough` is two numbers for one thread, then two for several.
extern "C" PKG_EXPORT void pkg_accelerate_put(const float* ratios,
                                              const float* enough) {
  auto* const made = new pkg::cpu::accelerate::Table;
  std::memcpy(&made->ratios, ratios, sizeof(made->ratios));
  std::memcpy(made->enough, enough, sizeof(made->enough));
  made->replaced = state().table.load(std::memory_order_acquire);
  state().table.store(made, std::memory_order_release);
}

// As pkg_accelerate_put took them.
extern "C" PKG_EXPORT const float* pkg_accelerate_ratios() {
  return &pkg::cpu::accelerate::table().ratios.products[0][0][0][0][0][0][0];
}

extern "C" PKG_EXPORT const float* pkg_accelerate_enough() {
  return &pkg::cpu::accelerate::table().enough[0].expected;
}

extern "C" PKG_EXPORT int64_t pkg_accelerate_ratio_count() {
  return sizeof(pkg::cpu::accelerate::Ratios) / sizeof(float);
}

// Copies the counters, [operator][dtype][taken, left, nanoseconds, saved], and
// sets them to 0.
extern "C" PKG_EXPORT void pkg_accelerate_counters(int64_t* to) {
  for (auto& of_operator : state().counters) {
    for (auto& counters : of_operator) {
      for (auto* counter : {&counters.taken, &counters.left,
                            &counters.nanoseconds, &counters.saved}) {
        *to++ = counter->exchange(0);
      }
    }
  }
}
