// Two ways of seeing who writes an output. In every program the bytes are
// compared after each turn of a block: what two blocks change is reported, and
// what is written as it was is not seen. Where the kernels announce their
// stores, each of them is seen, and the second one of the same thread too.
#include "outputs.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "emulator_state.h"

namespace pkg::emulation {
namespace {

struct Writer {
  int64_t block = -1;
  int thread = 0;
};

struct WatchedOutput {
  const char* name;
  const std::byte* bytes;
  std::vector<std::byte> before;
  std::vector<int64_t> changed_by;  // blocks, from 1; 0 is none
  std::vector<Writer> stored_by;    // of announced stores
};

std::vector<WatchedOutput> outputs;
bool stores_are_announced = false;

void note_change(WatchedOutput& output, size_t byte) {
  const int64_t writer = int64_t{block->linear} + 1;
  int64_t& changed_by = output.changed_by[byte];
  if (changed_by != 0 && changed_by != writer) {
    report("byte %zu of %s is written by this block and by block %lld", byte,
           output.name, static_cast<long long>(changed_by - 1));
  }
  if (stores_are_announced && output.stored_by[byte].block < 0) {
    report("byte %zu of %s is written, and no store has been announced", byte,
           output.name);
  }
  output.before[byte] = output.bytes[byte];
  changed_by = writer;
}

void note_store(WatchedOutput& output, size_t byte) {
  Writer& writer = output.stored_by[byte];
  if (writer.block >= 0) {
    report(
        "byte %zu of %s is stored again, by thread %d: thread %d of block %lld "
        "has stored it",
        byte, output.name, running, writer.thread,
        static_cast<long long>(writer.block));
  }
  writer = {block->linear, running};
}

}  // namespace

void watch_output(const char* name, const std::byte* bytes, size_t size) {
  outputs.push_back({name, bytes, std::vector<std::byte>(size), {}, {}});
}

void begin_to_watch() {
  for (WatchedOutput& output : outputs) {
    const size_t size = output.before.size();
    std::copy_n(output.bytes, size, output.before.begin());
    output.changed_by.assign(size, 0);
    output.stored_by.assign(size, {});
  }
}

void note_changes() {
  for (WatchedOutput& output : outputs) {
    const size_t size = output.before.size();
    if (size == 0 ||
        std::memcmp(output.bytes, output.before.data(), size) == 0) {
      continue;
    }
    for (size_t i = 0; i < size; ++i) {
      if (output.bytes[i] != output.before[i]) {
        note_change(output, i);
      }
    }
  }
}

void note_store(const void* address, size_t size) {
  stores_are_announced = true;
  const auto* const first = static_cast<const std::byte*>(address);
  for (WatchedOutput& output : outputs) {
    const std::byte* const end = output.bytes + output.before.size();
    const std::byte* const begin = std::max(first, output.bytes);
    for (const std::byte* byte = begin; byte < std::min(first + size, end);
         ++byte) {
      note_store(output, static_cast<size_t>(byte - output.bytes));
    }
  }
}

}  // namespace pkg::emulation
