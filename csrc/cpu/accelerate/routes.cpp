#include "cpu/accelerate/routes.h"

#include <algorithm>
#include <cmath>

#include "cpu/runtime/parallel.h"
#include "host/compiler.h"

namespace pkg::cpu::accelerate {

namespace {

// The nearest class: they are a factor of `step` apart.
template <size_t kCount>
size_t class_of(int64_t size, const std::array<int64_t, kCount>& classes) {
  size_t nearest = 0;
  // size^2 > c d: beyond the geometric mean of neighbouring classes.
  while (nearest + 1 < kCount &&
         static_cast<double>(size) * static_cast<double>(size) >
             static_cast<double>(classes[nearest] * classes[nearest + 1])) {
    ++nearest;
  }
  return nearest;
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

float ratio(Family family, int type, Layout layout, const ProductSizes& sizes) {
  return state().ratios.products[several_threads()][static_cast<int>(family)]
                                [type][static_cast<int>(layout)]
                                [class_of(sizes.rows, kRowClasses)]
                                [class_of(sizes.columns, kColumnClasses)]
                                [class_of(sizes.inner, kColumnClasses)];
}

float ratio(Pass pass, int type, Hidden hidden, int64_t queries, int64_t keys) {
  return state().ratios.attention[several_threads()][static_cast<int>(
      pass)][type][static_cast<int>(hidden)][class_of(queries, kQueryClasses)]
                                 [class_of(keys, kKeyClasses)];
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

// For pkg/accelerate.py, by ctypes.
extern "C" PKG_EXPORT void pkg_accelerate_switch(int is_on, int takes_time) {
  state().takes_time.store(takes_time);
  state().is_on.store(is_on);
}

extern "C" PKG_EXPORT float* pkg_accelerate_ratios() {
  return &state().ratios.products[0][0][0][0][0][0][0];
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
