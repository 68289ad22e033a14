// Which calls of PyTorch's own operators pkg.accelerate() takes over: a switch,
// the measured table that decides, and what is counted for the report.
//
// The table has, for each kind of product and of attention, the time that
// PyTorch's kernel took divided by ours, measured at the sizes below
// (pkg/tune.py), and of each activation at one; a call is taken over where what
// lies between those around its own sizes is enough, and the least of them too
// (if_enough). Python gives the table before it turns the switch, and reads the
// counters: see pkg/_accelerate_routes.py.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>

#include "accelerate.h"

namespace pkg::cpu::accelerate {

enum class Family : int32_t { Product, Batch };

// Which operand is read along its rows: both as they are (N N), the second
// transposed (linear's weight), the first (the gradient of that weight).
enum class Layout : int32_t { Plain, RightTransposed, LeftTransposed };

struct ProductSizes {
  int64_t rows;
  int64_t columns;
  int64_t inner;
};

// The sizes that are measured. The last of each is large: many tokens, a
// vocabulary, the tokens that a weight's gradient sums over. A table of before
// they were measured has kNotMeasured there.
inline constexpr std::array<int64_t, 5> kRowClasses = {1, 8, 64, 512, 4096};
inline constexpr std::array<int64_t, 5> kColumnClasses = {16, 64, 256, 1024,
                                                          32768};
inline constexpr std::array<int64_t, 5> kInnerClasses = {16, 64, 256, 1024,
                                                         4096};
inline constexpr float kNotMeasured = -1;
inline constexpr int kTypes = 5;  // float64, 32, 16, bfloat16, int8

enum class Pass : int32_t { Forward, Backward };
enum class Hidden : int32_t { Nothing, Causal, Mask };

// Queries and keys of attention.
inline constexpr std::array<int64_t, 4> kQueryClasses = {1, 64, 256, 1024};
inline constexpr std::array<int64_t, 3> kKeyClasses = {64, 256, 1024};

// What a tensor becomes element by element, or the gradient that it has of it.
enum class Curve : int32_t { Gelu, GeluTanh, Silu };
inline constexpr int kCurves = 3;

// It holds nothing but floats.
struct Ratios {
  // One thread or several, family, dtype, layout, rows, columns, inner.
  float products[2][2][kTypes][3][kRowClasses.size()][kColumnClasses.size()]
                [kInnerClasses.size()];
  // One thread or several, pass, dtype, hidden keys, queries, keys.
  float attention[2][2][kTypes - 1][3][kQueryClasses.size()]
                 [kKeyClasses.size()];
  // One thread or several, pass, dtype, curve.
  float curves[2][2][kTypes - 1][kCurves];
};

// From which ratios on a call is taken over: what is nearer to 1 is noise of
// the table's measurement.
struct Enough {
  float expected;
  float least;
};

// Not changed once it is published, and kept as long as the process, since a
// call may still read one that was replaced: they are few.
struct Table {
  Ratios ratios;
  Enough enough[2];  // with one thread, with several
  const Table* replaced;
};
inline constexpr Table kNoTable{};

// PyTorch's time divided by ours, of a call: what is expected of it from those
// measured around it, and the least of these.
struct Ratio {
  float expected = 0;
  float least = 0;

  Ratio() = default;
  Ratio(float expected_ratio, float least_ratio)
      : expected(expected_ratio), least(least_ratio) {}
  explicit Ratio(float measured) : Ratio(measured, measured) {}
};

// Of one operator and dtype.
struct Counters {
  std::atomic<int64_t> taken;
  std::atomic<int64_t> left;         // to PyTorch's kernel
  std::atomic<int64_t> nanoseconds;  // in ours, where time is taken
  std::atomic<int64_t> saved;        // by the table's ratio, likewise
};

// Which calls of attention are taken over: those that the table says are
// faster here, or all that these kernels can take, as PyTorch's
// activate_flash_attention_impl asks for.
enum class AttentionMode : int32_t { Off, ByTable, Always };

struct State {
  std::atomic<int32_t> is_on;  // for products
  std::atomic<AttentionMode> attention;
  std::atomic<int32_t> takes_time;
  std::atomic<const Table*> table{&kNoTable};
  Counters counters[kAtenOperators][kTypes];
};

State& state();

inline const Table& table() {
  return *state().table.load(std::memory_order_acquire);
}

inline bool is_on() {
  return state().is_on.load(std::memory_order_relaxed) != 0;
}

// What a kernel can read.
inline bool is_plain(const TensorView& tensor) {
  return tensor.is_defined && tensor.is_strided && tensor.has_memory();
}

// The place of a dtype in the tables, or -1.
int type_index(ScalarType type);

// What is expected, where that is enough for a call to be taken over; else 0.
// Asked of the table that the ratio is of.
float if_enough(const Table& table, const Ratio& ratio);

// 0 where it was not measured.
Ratio ratio(const Table& table, Family family, int type, Layout layout,
            const ProductSizes& sizes);

Ratio ratio(const Table& table, Pass pass, int type, Hidden hidden,
            int64_t queries, int64_t keys);

Ratio ratio(const Table& table, Pass pass, int type, Curve curve);

// A call that was left to PyTorch.
void count_left(AtenOperator op, ScalarType type);

// A call that was taken over, from its construction on. One that an exception
// ends, as for want of memory, is left to PyTorch after all.
class TakenCall {
 public:
  TakenCall(AtenOperator op, int type, float ratio)
      : counters_(state().counters[static_cast<int>(op)][type]),
        ratio_(ratio),
        takes_time_(state().takes_time.load(std::memory_order_relaxed) != 0) {
    if (takes_time_) {
      begin_ = std::chrono::steady_clock::now();
    }
  }
  ~TakenCall() {
    if (std::uncaught_exceptions() != exceptions_) {
      counters_.left.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    counters_.taken.fetch_add(1, std::memory_order_relaxed);
    if (takes_time_) {
      const std::chrono::nanoseconds time =
          std::chrono::steady_clock::now() - begin_;
      counters_.nanoseconds.fetch_add(time.count(), std::memory_order_relaxed);
      counters_.saved.fetch_add(
          static_cast<int64_t>(static_cast<float>(time.count()) * (ratio_ - 1)),
          std::memory_order_relaxed);
    }
  }
  TakenCall(const TakenCall&) = delete;
  TakenCall& operator=(const TakenCall&) = delete;

 private:
  Counters& counters_;
  float ratio_;
  bool takes_time_;
  int exceptions_ = std::uncaught_exceptions();
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace pkg::cpu::accelerate
