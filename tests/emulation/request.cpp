#include "request.h"

#include <cstdio>
#include <cstdlib>
#include <iostream>

namespace pkg::emulation {
namespace {

template <class Map>
const auto& find(const Map& map, const std::string& name) {
  const auto found = map.find(name);
  if (found == map.end()) {
    fail("the request has no " + name);
  }
  return found->second;
}

// Where CUDA would: with the same sectors.
std::byte* allocate(size_t size) {
  constexpr size_t kAlignment = 512;
  void* bytes = nullptr;
  if (posix_memalign(&bytes, kAlignment, size) != 0) {
    fail("no memory for " + std::to_string(size) + " bytes");
  }
  return static_cast<std::byte*>(bytes);
}

}  // namespace

void fail(const std::string& message) {
  std::fprintf(stderr, "emulation: %s\n", message.c_str());
  std::exit(2);
}

Request Request::read() {
  Request request;
  std::string kind;
  std::string name;
  while (std::cin >> kind >> name) {
    if (kind == "text") {
      std::cin >> request.texts_[name];
    } else if (kind == "real") {
      std::string value;
      std::cin >> value;  // strtod knows inf and nan, streams do not
      request.reals_[name] = std::strtod(value.c_str(), nullptr);
    } else if (kind == "integers") {
      size_t count = 0;
      std::cin >> count;
      auto& values = request.integers_[name];
      values.resize(count);
      for (int64_t& value : values) {
        std::cin >> value;
      }
    } else if (kind == "output") {
      request.outputs_.push_back(name);
    } else if (kind == "buffer") {
      Buffer buffer = {};
      std::cin >> buffer.offset >> buffer.size;
      std::cin.get();  // the end of the line
      buffer.bytes = allocate(buffer.size);
      std::cin.read(reinterpret_cast<char*>(buffer.bytes),
                    static_cast<std::streamsize>(buffer.size));
      request.buffers_[name] = buffer;
    } else {
      fail("the request has a line that begins with " + kind);
    }
  }
  return request;
}

void Request::watch_outputs() const {
  for (const std::string& name : outputs_) {
    const Buffer& buffer = find(buffers_, name);
    watch_output(name.c_str(), buffer.bytes, buffer.size);
  }
}

void Request::count_accesses() {
  access_counts_.push_back(&shared_access_counts());
  for (const auto& [name, buffer] : buffers_) {
    access_counts_.push_back(&count_accesses_to(buffer.bytes, buffer.size));
  }
}

void Request::write_access_counts() const {
  auto* to = buffer<AccessCounts>("accesses");
  for (const AccessCounts* counts : access_counts_) {
    *to++ = *counts;
  }
}

void Request::write_outputs() const {
  for (const std::string& name : outputs_) {
    const Buffer& buffer = find(buffers_, name);
    std::cout.write(reinterpret_cast<const char*>(buffer.bytes),
                    static_cast<std::streamsize>(buffer.size));
  }
  std::cout.flush();
}

const std::string& Request::text(const std::string& name) const {
  return find(texts_, name);
}

double Request::real(const std::string& name) const {
  return find(reals_, name);
}

const std::vector<int64_t>& Request::integers(const std::string& name) const {
  return find(integers_, name);
}

int64_t Request::integer(const std::string& name) const {
  return integers(name).at(0);
}

std::byte* Request::find_buffer(const std::string& name) const {
  const auto found = buffers_.find(name);
  return found == buffers_.end() ? nullptr
                                 : found->second.bytes + found->second.offset;
}

}  // namespace pkg::emulation
