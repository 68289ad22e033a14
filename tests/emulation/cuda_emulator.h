// Runs CUDA device code on a CPU, compiled by the host compiler, and checks it.
//
// Included by csrc/cuda/device/device.cuh in place of nvcc's own definitions.
// Each thread of a block is a fiber; the threads between two barriers run one
// after another in shuffled order, and so do some blocks, by turns. Reported,
// with the place and the threads, by an exception that launch() throws:
//
//   - a read of shared memory that no thread of the block has written,
//   - a shared element that two threads access between two barriers, one of
//     them to write it: a race, as a barrier is missing,
//   - an index outside a dimension of a shared array,
//   - a barrier that some threads of the block (or lanes of the mask) do not
//     reach, or reach at another line,
//   - an access to where an asynchronous copy goes before its thread has waited
//     for it, and a copy that nobody waits for,
//   - a vector or a row of a matrix in shared memory that is not aligned,
//   - an output that two blocks of a launch change,
//   - a block of more threads than the kernel's launch bounds say, and one or a
//     grid or shared memory that no launch can have.
//
// What asynchronous.h declares is emulated and checked too: barriers with
// phases, bulk tensor copies and the products of warpgroups.
//
// Global memory is what the caller passes; build with -fsanitize=address and
// pass allocations of the exact size, and accesses beyond it are reported too.
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <source_location>
#include <stdexcept>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
// launch_bounds.py has each kernel call check_launch_bounds() with these words.
#define __launch_bounds__(...)

#define PKG_UNROLL
#define PKG_UNROLL_BY(count)

#define PKG_SHARED(type, name, dimensions)                                 \
  static const char name##_declaration = 0;                                \
  const ::pkg::emulation::SharedView<type dimensions> name =               \
      ::pkg::emulation::shared_array<type dimensions>(&name##_declaration, \
                                                      #name)

struct uint3 {
  unsigned x = 0;
  unsigned y = 0;
  unsigned z = 0;
};

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

inline uint3 threadIdx;
inline uint3 blockIdx;
inline dim3 blockDim;
inline dim3 gridDim;

namespace pkg::emulation {

using Site = std::source_location;

struct Report : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What is known of one element of shared memory. Times count barriers; a
// reader below zero stands for several threads.
struct AccessRecord {
  uint32_t write_time = 0;
  uint32_t read_time = 0;
  // Of the writer's and the reader's own clocks, where the block has such.
  uint32_t write_clock = 0;
  uint32_t read_clock = 0;
  int16_t writer = 0;
  int16_t reader = 0;
  bool written_atomically = false;
  bool in_flight = false;  // an asynchronous copy has not been waited for
};

struct SharedStorage {
  const char* name = nullptr;
  std::byte* bytes = nullptr;
  AccessRecord* records = nullptr;
  size_t element_size = 0;
  size_t count = 0;
};

enum class Access { read, write, atomic };

// The storage of a declaration in the running block: poisoned when the block
// starts, the same for all its threads.
SharedStorage& shared_storage(const char* declaration, const char* name,
                              size_t element_size, size_t count);
SharedStorage& dynamic_shared_storage(const char* name, size_t element_size);
void check_access(const SharedStorage& storage, size_t index, Access access);
// The same of `count` neighbours that one instruction accesses, whose first
// must be a multiple of `count`.
void check_vector(const SharedStorage& storage, int64_t index, size_t count,
                  Access access);
void check_vector_place(const SharedStorage& storage, int64_t index,
                        size_t count);
[[noreturn]] void report_index(const SharedStorage& storage, int64_t index,
                               size_t extent);

template <class Element>
struct SharedElement {
  const SharedStorage* storage;
  size_t index;

  SharedElement(const SharedStorage& of, size_t at) : storage(&of), index(at) {}
  SharedElement(const SharedElement&) = default;

  Element* address() const {
    return reinterpret_cast<Element*>(storage->bytes) + index;
  }
  operator Element() const {
    check_access(*storage, index, Access::read);
    return *address();
  }
  const SharedElement& operator=(Element value) const {
    check_access(*storage, index, Access::write);
    *address() = value;
    return *this;
  }
  const SharedElement& operator=(const SharedElement& other) const {
    return *this = static_cast<Element>(other);
  }
  const SharedElement& operator+=(Element value) const {
    return *this = static_cast<Element>(*this) + value;
  }
  // Stands for a pointer into shared memory, which only atomics may take.
  SharedElement operator&() const { return *this; }
};

// An array in shared memory, or a part of one, of type Array.
template <class Array>
class SharedView {
 public:
  SharedView(const SharedStorage& storage, size_t offset)
      : storage_(&storage), offset_(offset) {}

  auto operator[](int64_t index) const {
    using Inner = std::remove_extent_t<Array>;
    constexpr size_t stride = sizeof(Inner) / sizeof(Element);
    constexpr size_t extent = std::extent_v<Array>;
    if (index < 0 || static_cast<size_t>(index) >= extent) {
      report_index(*storage_, index, extent);
    }
    const size_t offset = offset_ + static_cast<size_t>(index) * stride;
    if constexpr (std::is_array_v<Inner>) {
      return SharedView<Inner>(*storage_, offset);
    } else {
      return SharedElement<Element>(*storage_, offset);
    }
  }

 private:
  using Element = std::remove_all_extents_t<Array>;
  const SharedStorage* storage_;
  size_t offset_;
};

template <class Array>
SharedView<Array> shared_array(const char* declaration, const char* name) {
  using Element = std::remove_all_extents_t<Array>;
  return {shared_storage(declaration, name, sizeof(Element),
                         sizeof(Array) / sizeof(Element)),
          0};
}

// Runs every block of the grid. `kernel` is called once for each thread. Throws
// a Report of the first fault. Whoever does not ask for shared memory has 48
// KiB, dynamic and declared.
void launch(dim3 grid, dim3 threads, size_t dynamic_shared_bytes,
            const std::function<void()>& kernel,
            bool asks_for_shared_memory = false);
// What a kernel's __launch_bounds__ say, from each thread that enters it.
void check_launch_bounds(int64_t threads, int64_t blocks = 0);
// Whether the kernel of the last launch has said it.
bool have_stated_bounds();
// From each thread that waits for the kernel before its own
// (cuda/device/dependent_launch.cuh), and whether all of the last launch have.
void note_wait_for_kernel();
bool all_have_waited();
// Of a block of the device, as for compute capability 9.0 unless it is called.
void set_most_shared_bytes(size_t bytes);
// Watches memory that the kernels write: what one block of a launch changes, no
// other may change, and where stores are announced nobody may store again
// (outputs.cpp).
void watch_output(const char* name, const std::byte* bytes, size_t size);
// Chooses the order of blocks and threads of the launches that follow: one by
// chance, or one of the two that are furthest from each other. Forwards one
// block after another runs until it ends or waits for others, the first one
// first. Backwards as many as can begin do, the last one first, and who has
// begun last runs.
void set_order(uint64_t seed);
enum class Schedule { by_chance, forwards, backwards };
void set_schedule(Schedule schedule);

void synchronize_block(Site site);
// What a lane gives to, and takes from, an instruction of its whole warp.
constexpr size_t kMostLaneBytes = 64;
using LaneBytes = std::byte[kMostLaneBytes];
using Combine = void (*)(const LaneBytes (&given)[32], LaneBytes (&taken)[32]);
// Waits until all lanes of the mask have come; the last of them calls combine,
// once. Returns what each lane gave.
const LaneBytes* collective(unsigned mask, const void* given, size_t given_size,
                            void* taken, size_t taken_size, Combine combine,
                            Site site);
// Exchanges up to 8 bytes among the lanes of the mask: `values` receives those
// of all 32 lanes.
void exchange(unsigned mask, uint64_t value, uint64_t (&values)[32], Site site);
void synchronize_warp(unsigned mask, Site site);
int lane_index();
// Of the sixteen bytes at an aligned address the first `valid` and then zeros,
// on their way to `count` elements of shared memory: they arrive when the
// running thread waits, and must not be touched before.
void begin_copy(const SharedStorage& storage, int64_t index, size_t count,
                const void* from, size_t valid);
void commit_copies();
// Until at most so many of the thread's committed groups are on their way.
void wait_for_copies(size_t pending);
[[noreturn]] void report_lane(int source, Site site);

// What instructions of whole warps have cost, of all launches.
struct Counters {
  int64_t products;            // mma
  int64_t matrix_loads;        // of four matrices each
  int64_t matrix_load_cycles;  // of the shared memory: 4 without conflicts
  int64_t copies;              // of 16 bytes a lane, or an element
  int64_t copy_cycles;         // of the shared memory: 4 likewise
  int64_t copied_bytes;        // of global memory
  int64_t copied_sectors;      // of 32 bytes in it, that have to move
  int64_t group_products;      // wgmma
  int64_t boxes;               // bulk tensor copies
  int64_t word_loads;          // of 32 bits a lane
  int64_t word_load_cycles;    // of the shared memory: 1 without conflicts
};
const Counters& counters();

// Loads or stores of one kind of memory. Counted where the kernels are compiled
// with -fsanitize=thread, whose calls before each access lead to the emulator.
struct AccessCount {
  int64_t requests;      // instructions of a warp
  int64_t bytes;         // without those that several lanes of a request name
  int64_t transactions;  // cycles of shared memory, sectors of global memory
  int64_t least;         // as few as could have done
};
struct AccessCounts {
  AccessCount loads;
  AccessCount stores;
};
const AccessCounts& shared_access_counts();
// From now on, of these bytes of global memory.
const AccessCounts& count_accesses_to(const std::byte* bytes, size_t size);

void count_product();
void count_group_product();
// Of the rows of matrices that the lanes name by their first element.
void count_matrix_load(const LaneBytes (&rows)[32], size_t element_size);
// Of the words that the lanes name by their places.
void count_word_load(const LaneBytes (&words)[32]);

template <class Value>
Value shuffle(unsigned mask, Value value, int source, Site site) {
  static_assert(sizeof(Value) <= 8);
  uint64_t bits = 0;
  uint64_t values[32];
  std::memcpy(&bits, &value, sizeof(Value));
  exchange(mask, bits, values, site);
  if ((mask >> source & 1) == 0) {
    report_lane(source, site);
  }
  Value result;
  std::memcpy(&result, &values[source], sizeof(Value));
  return result;
}

template <class Element, class Update>
Element update_atomically(SharedElement<Element> element, Update update) {
  check_access(*element.storage, element.index, Access::atomic);
  const Element old = *element.address();
  *element.address() = update(old);
  return old;
}

template <class Element, class Update>
Element update_atomically(Element* address, Update update) {
  const Element old = *address;
  *address = update(old);
  return old;
}

}  // namespace pkg::emulation

inline void __syncthreads(
    pkg::emulation::Site site = pkg::emulation::Site::current()) {
  pkg::emulation::synchronize_block(site);
}

inline void __syncwarp(
    unsigned mask = 0xffffffffu,
    pkg::emulation::Site site = pkg::emulation::Site::current()) {
  pkg::emulation::synchronize_warp(mask, site);
}

template <class Value>
Value __shfl_sync(unsigned mask, Value value, int source, int width = 32,
                  pkg::emulation::Site site = pkg::emulation::Site::current()) {
  const int lane = pkg::emulation::lane_index();
  return pkg::emulation::shuffle(mask, value,
                                 lane / width * width + source % width, site);
}

// The upper half of a product.
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(a) * b >> 64);
}

template <class Value>
Value __shfl_xor_sync(
    unsigned mask, Value value, int lanes, int width = 32,
    pkg::emulation::Site site = pkg::emulation::Site::current()) {
  const int lane = pkg::emulation::lane_index();
  const int source = lane ^ lanes;
  const bool inside = source / width <= lane / width;
  return pkg::emulation::shuffle(mask, value, inside ? source : lane, site);
}

template <class Value>
Value __shfl_up_sync(
    unsigned mask, Value value, int lanes, int width = 32,
    pkg::emulation::Site site = pkg::emulation::Site::current()) {
  const int lane = pkg::emulation::lane_index();
  const bool inside = lane % width >= lanes;
  return pkg::emulation::shuffle(mask, value, inside ? lane - lanes : lane,
                                 site);
}

template <class Value>
Value __shfl_down_sync(
    unsigned mask, Value value, int lanes, int width = 32,
    pkg::emulation::Site site = pkg::emulation::Site::current()) {
  const int lane = pkg::emulation::lane_index();
  const bool inside = lane % width + lanes < width;
  return pkg::emulation::shuffle(mask, value, inside ? lane + lanes : lane,
                                 site);
}

inline unsigned __ballot_sync(
    unsigned mask, int predicate,
    pkg::emulation::Site site = pkg::emulation::Site::current()) {
  uint64_t values[32];
  pkg::emulation::exchange(mask, predicate != 0, values, site);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && values[lane] != 0) {
      ballot |= 1u << lane;
    }
  }
  return ballot;
}

inline int __any_sync(
    unsigned mask, int predicate,
    pkg::emulation::Site site = pkg::emulation::Site::current()) {
  return __ballot_sync(mask, predicate, site) != 0;
}

inline int __all_sync(
    unsigned mask, int predicate,
    pkg::emulation::Site site = pkg::emulation::Site::current()) {
  return __ballot_sync(mask, predicate, site) == mask;
}

template <class Pointer, class Value>
auto atomicAdd(Pointer address, Value value) {
  return pkg::emulation::update_atomically(address, [value](auto old) {
    return static_cast<decltype(old)>(old + value);
  });
}

template <class Pointer, class Value>
auto atomicMin(Pointer address, Value value) {
  return pkg::emulation::update_atomically(
      address, [value](auto old) { return value < old ? value : old; });
}

template <class Pointer, class Value>
auto atomicMax(Pointer address, Value value) {
  return pkg::emulation::update_atomically(
      address, [value](auto old) { return old < value ? value : old; });
}

template <class Pointer, class Value>
auto atomicOr(Pointer address, Value value) {
  return pkg::emulation::update_atomically(
      address, [value](auto old) { return old | value; });
}

template <class Pointer, class Value>
auto atomicExch(Pointer address, Value value) {
  return pkg::emulation::update_atomically(address,
                                           [value](auto) { return value; });
}

template <class Pointer, class Value>
auto atomicCAS(Pointer address, Value expected, Value value) {
  return pkg::emulation::update_atomically(
      address, [=](auto old) { return old == expected ? value : old; });
}

// Half types, with the conversions that device code uses: to nearest, ties to
// even, and CUDA's own NaN. Scalars, since GCC announces no access by which a
// structure is passed or returned (counters.cpp).
enum class __half : uint16_t {};

inline float __half2float(__half half) {
  const auto all = static_cast<uint32_t>(half);
  const uint32_t magnitude = all & 0x7fffu;
  float result;
  if (magnitude >= 0x7c00) {
    result = magnitude == 0x7c00 ? INFINITY : NAN;
  } else {
    // The bits as those of a float are too small by the difference of the
    // exponents' biases; the product is exact, also for denormals.
    const uint32_t bits = magnitude << 13;
    std::memcpy(&result, &bits, sizeof(result));
    result *= 0x1p112f;
  }
  return copysignf(result, (all & 0x8000u) != 0 ? -1.0f : 1.0f);
}

inline __half __float2half_rn(float value) {
  if (value != value) {
    return __half{0x7fff};
  }
  const uint32_t sign = signbit(value) ? 0x8000 : 0;
  const float magnitude = fabsf(value);
  uint32_t bits;
  if (magnitude >= 65520.0f) {  // halfway from the largest half to the next
    bits = 0x7c00;
  } else if (magnitude < 0x1p-14f) {
    bits = static_cast<uint32_t>(rintf(magnitude * 0x1p24f));
  } else {
    std::memcpy(&bits, &magnitude, sizeof(bits));
    bits += 0xfff + (bits >> 13 & 1);
    bits = (bits - (112u << 23)) >> 13;
  }
  return static_cast<__half>(sign | bits);
}

enum class __nv_bfloat16 : uint16_t {};

inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (value != value) {
    return __nv_bfloat16{0x7fff};
  }
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits += 0x7fff + (bits >> 16 & 1);
  return static_cast<__nv_bfloat16>(bits >> 16);
}
