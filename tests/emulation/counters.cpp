// Counts what instructions of whole warps cost. Compiled without sanitizers, as
// all of the emulator.
//
// Products, loads of matrices and asynchronous copies are calls of the
// emulator. Plain loads and stores are not: the compiler announces them, as to
// a detector of races, by calls of __tsan_*, and each block of machine code, as
// to a fuzzer, by one of __sanitizer_cov_trace_pc. Those are here. Lanes of a
// warp that come to the same access by the same calls, in the same turn of each
// loop around it, do so together: that is a request.
//
// Each access counts as it is written: what nvcc moves, drops or merges with a
// neighbour is not known.
#include "counters.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <list>
#include <set>

#include "outputs.h"

namespace pkg::emulation {
namespace {

constexpr size_t kBanks = 32;
constexpr size_t kWord = 4;
constexpr size_t kSector = 32;

struct CountedMemory {
  uintptr_t begin;
  uintptr_t end;
  AccessCounts counts;
};

Counters counted{};
AccessCounts counted_shared{};
std::list<CountedMemory> counted_memories;

// Of lanes that are served together: as many as one bank has different words
// to give.
int64_t bank_cycles(const std::set<uintptr_t>& words) {
  std::array<int64_t, kBanks> asked = {};
  for (const uintptr_t word : words) {
    ++asked[word % kBanks];
  }
  return *std::max_element(asked.begin(), asked.end());
}

// Lanes whose accesses of so many bytes shared memory serves together: all
// where they are words, a quarter of a warp where they are of sixteen bytes.
int lanes_at_a_time(size_t size) {
  return static_cast<int>(
      std::clamp<size_t>(kBanks * kWord / size, 1, kWarpSize));
}

struct Cycles {
  int64_t taken;
  int64_t least;
};

Cycles shared_cycles(const std::vector<AccessedPlace>& places, size_t size) {
  std::map<int, std::set<uintptr_t>> words;  // by the lanes served together
  for (const auto& [lane, place] : places) {
    auto& together = words[lane / lanes_at_a_time(size)];
    for (uintptr_t word = place / kWord; word * kWord < place + size; ++word) {
      together.insert(word);
    }
  }
  Cycles cycles = {0, static_cast<int64_t>(words.size())};
  for (const auto& [lanes, together] : words) {
    cycles.taken += bank_cycles(together);
  }
  return cycles;
}

// Of the elements that the lanes name by their number.
std::vector<AccessedPlace> named_places(const LaneBytes (&elements)[kWarpSize],
                                        size_t element_size) {
  std::vector<AccessedPlace> places;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    int64_t element;
    std::memcpy(&element, elements[lane], sizeof(element));
    places.push_back({lane, static_cast<size_t>(element) * element_size});
  }
  return places;
}

int64_t different_bytes(const std::vector<AccessedPlace>& places, size_t size) {
  std::set<uintptr_t> starts;
  for (const auto& [lane, place] : places) {
    starts.insert(place);
  }
  int64_t bytes = 0;
  uintptr_t end = 0;
  for (const uintptr_t start : starts) {
    bytes += static_cast<int64_t>(start + size - std::max(start, end));
    end = start + size;
  }
  return bytes;
}

int64_t count_sectors(const std::vector<AccessedPlace>& places, size_t size) {
  std::set<uintptr_t> sectors;
  for (const auto& [lane, place] : places) {
    for (uintptr_t sector = place / kSector; sector * kSector < place + size;
         ++sector) {
      sectors.insert(sector);
    }
  }
  return static_cast<int64_t>(sectors.size());
}

bool is_shared(const AccessCount* count) {
  return count == &counted_shared.loads || count == &counted_shared.stores;
}

void count_request(const std::vector<AccessedPlace>& places, size_t size,
                   AccessCount& count) {
  const int64_t bytes = different_bytes(places, size);
  ++count.requests;
  count.bytes += bytes;
  if (is_shared(&count)) {
    const Cycles cycles = shared_cycles(places, size);
    count.transactions += cycles.taken;
    count.least += cycles.least;
  } else {
    constexpr auto kBytes = static_cast<int64_t>(kSector);
    count.transactions += count_sectors(places, size);
    count.least += (bytes + kBytes - 1) / kBytes;
  }
}

// Counts an instruction of a warp: the copies of those lanes that have it.
void count_copy(const std::vector<CopiedVector>& copies,
                const std::vector<AccessedPlace>& places) {
  std::set<uintptr_t> sectors;
  for (const CopiedVector& copy : copies) {
    if (copy.valid > 0) {
      sectors.insert(copy.from / kSector);
    }
    counted.copied_bytes += static_cast<int64_t>(copy.valid);
  }
  ++counted.copies;
  counted.copy_cycles += shared_cycles(places, copies.front().size).taken;
  counted.copied_sectors += static_cast<int64_t>(sectors.size());
}

void count_copies(const Warp& warp) {
  for (size_t i = 0;; ++i) {
    std::vector<CopiedVector> copies;
    std::vector<AccessedPlace> places;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if (i < warp.copies[lane].size()) {
        copies.push_back(warp.copies[lane][i]);
        places.push_back({lane, copies.back().place});
      }
    }
    if (copies.empty()) {
      return;
    }
    count_copy(copies, places);
  }
}

struct Counted {
  AccessCounts* counts = nullptr;  // null of memory that nobody asked about
  uintptr_t place = 0;
};

Counted find_memory(uintptr_t address) {
  for (const auto& [declaration, array] : block->arrays) {
    const auto begin = reinterpret_cast<uintptr_t>(array.owned_bytes.data());
    if (address >= begin && address < begin + array.owned_bytes.size()) {
      return {&counted_shared, address - begin};
    }
  }
  for (CountedMemory& memory : counted_memories) {
    if (address >= memory.begin && address < memory.end) {
      return {&memory.counts, address};
    }
  }
  return {};
}

uint64_t mixed(uint64_t hash, uint64_t value) {
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15U;
  const uint64_t sum = (hash ^ value) * kOdd;
  return sum ^ sum >> 29;
}

// What is equal in lanes that execute the instruction at `at` together.
uint64_t moment(const void* at) {
  const auto& activations = block->threads[running]->activations;
  if (activations.empty()) {
    return reinterpret_cast<uintptr_t>(at);
  }
  uint64_t hash = activations.back().call;
  for (const VisitedCode& code : activations.back().way) {
    if (code.turn > 0) {
      hash = mixed(mixed(hash, code.block), code.turn);
    }
  }
  return mixed(hash, reinterpret_cast<uintptr_t>(at));
}

void enter_function(const void* from) {
  if (running != kScheduler) {
    block->threads[running]->activations.push_back({moment(from), {}});
  }
}

void leave_function() {
  if (running != kScheduler) {
    block->threads[running]->activations.pop_back();
  }
}

void enter_code_block(uintptr_t at) {
  if (running == kScheduler || counted_memories.empty()) {
    return;
  }
  auto& way = block->threads[running]->activations.back().way;
  const auto before =
      std::find_if(way.begin(), way.end(),
                   [&](const VisitedCode& code) { return code.block == at; });
  if (before == way.end()) {
    way.push_back({at, 0});
    return;
  }
  ++before->turn;
  way.erase(before + 1, way.end());
}

// An access of the running thread by the instruction at `from`.
void note_access(const void* address, size_t size, bool is_store,
                 const void* from) {
  if (running == kScheduler) {
    return;
  }
  if (is_store) {
    note_store(address, size);
  }
  if (counted_memories.empty()) {
    return;
  }
  const Counted memory = find_memory(reinterpret_cast<uintptr_t>(address));
  if (memory.counts == nullptr) {
    return;
  }
  AccessCount* count =
      is_store ? &memory.counts->stores : &memory.counts->loads;
  const uint64_t key =
      mixed(mixed(moment(from), reinterpret_cast<uintptr_t>(count)), size);
  AccessRequest& request = block->warps[warp_of(running)].requests[key];
  request.count = count;
  request.size = size;
  request.places.push_back({lane_index(), memory.place});
}

}  // namespace

void count_accesses(int warp) {
  auto& requests = block->warps[warp].requests;
  for (const auto& [moment, request] : requests) {
    count_request(request.places, request.size, *request.count);
  }
  requests.clear();
  const size_t first = static_cast<size_t>(warp) * kWarpSize;
  for (size_t i = first; i < std::min(first + kWarpSize, block->thread_count);
       ++i) {
    for (Activation& activation : block->threads[i]->activations) {
      for (VisitedCode& code : activation.way) {
        code.turn = 0;
      }
    }
  }
}

void count_accesses() {
  for (size_t warp = 0; warp < block->warps.size(); ++warp) {
    count_accesses(static_cast<int>(warp));
  }
}

void count_copies() {
  for (const Warp& warp : block->warps) {
    count_copies(warp);
  }
}

const Counters& counters() { return counted; }

const AccessCounts& shared_access_counts() { return counted_shared; }

const AccessCounts& count_accesses_to(const std::byte* bytes, size_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(bytes);
  counted_memories.push_back({begin, begin + size, {}});
  return counted_memories.back().counts;
}

void count_product() { ++counted.products; }

void count_group_product() { ++counted.group_products; }

void count_box() { ++counted.boxes; }

void count_matrix_load(const LaneBytes (&rows)[32], size_t element_size) {
  ++counted.matrix_loads;
  counted.matrix_load_cycles +=
      shared_cycles(named_places(rows, element_size), sizeof(Copy::bytes))
          .taken;
}

void count_word_load(const LaneBytes (&words)[32]) {
  ++counted.word_loads;
  counted.word_load_cycles +=
      shared_cycles(named_places(words, kWord), kWord).taken;
}

}  // namespace pkg::emulation

// What GCC calls for -fsanitize=thread and -fsanitize-coverage=trace-pc.
extern "C" {

#define PKG_ANNOUNCED(size)                                     \
  void __tsan_read##size(void* address) {                       \
    ::pkg::emulation::note_access(address, size, false,         \
                                  __builtin_return_address(0)); \
  }                                                             \
  void __tsan_write##size(void* address) {                      \
    ::pkg::emulation::note_access(address, size, true,          \
                                  __builtin_return_address(0)); \
  }
PKG_ANNOUNCED(1)
PKG_ANNOUNCED(2)
PKG_ANNOUNCED(4)
PKG_ANNOUNCED(8)
PKG_ANNOUNCED(16)
#undef PKG_ANNOUNCED

// Of another size, or not aligned to it.
void __tsan_read_range(void* address, size_t size) {
  ::pkg::emulation::note_access(address, size, false,
                                __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t size) {
  ::pkg::emulation::note_access(address, size, true,
                                __builtin_return_address(0));
}

void __tsan_func_entry(void* from) { ::pkg::emulation::enter_function(from); }
void __tsan_func_exit() { ::pkg::emulation::leave_function(); }

void __sanitizer_cov_trace_pc() {
  ::pkg::emulation::enter_code_block(
      reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}

void __tsan_init() {}
void __tsan_vptr_update(void**, void*) {}
// Of the guard of a static variable.
char __tsan_atomic8_load(const volatile char* value, int) { return *value; }

}  // extern "C"
