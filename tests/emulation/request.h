// What a test asks of the emulation program: named numbers, words and buffers,
// read from standard input; buffers named as outputs go to standard output.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cuda_emulator.h"

namespace pkg::emulation {

class Request {
 public:
  // Each line is `text NAME WORD`, `integers NAME COUNT VALUES`,
  // `real NAME VALUE`, `output NAME`, or `buffer NAME OFFSET BYTES` with the
  // bytes after it.
  static Request read();
  // Lets the emulator see that no two blocks of a launch write the same.
  void watch_outputs() const;
  // Counts accesses to each buffer, and writes what was counted, of shared
  // memory and then of the buffers in the order of their names, as the test's
  // numbers.
  void count_accesses();
  void write_access_counts() const;
  void write_outputs() const;

  const std::string& text(const std::string& name) const;
  double real(const std::string& name) const;
  const std::vector<int64_t>& integers(const std::string& name) const;
  int64_t integer(const std::string& name) const;

  // Null where the test passed none. The allocation ends where the test's
  // bytes end, so that the address sanitizer sees an access beyond.
  template <class Element>
  Element* buffer(const std::string& name) const {
    return reinterpret_cast<Element*>(find_buffer(name));
  }

 private:
  struct Buffer {
    std::byte* bytes;
    size_t offset;
    size_t size;
  };
  std::byte* find_buffer(const std::string& name) const;

  std::map<std::string, std::string> texts_;
  std::map<std::string, double> reals_;
  std::map<std::string, std::vector<int64_t>> integers_;
  std::map<std::string, Buffer> buffers_;
  std::vector<std::string> outputs_;
  std::vector<const AccessCounts*> access_counts_;
};

[[noreturn]] void fail(const std::string& message);

}  // namespace pkg::emulation
