// Runs one kernel of csrc/cuda on the CPU, as a request on standard input asks.
#include "program.h"

#include <algorithm>
#include <iterator>

#include "cuda_emulator.h"

namespace {

using namespace pkg::emulation;

Schedule schedule_of(const Request& request) {
  const std::string& name = request.text("schedule");
  return name == "forwards"    ? Schedule::forwards
         : name == "backwards" ? Schedule::backwards
                               : Schedule::by_chance;
}

}  // namespace

int main() {
  Request request = Request::read();
  const bool counts_accesses = request.buffer<AccessCounts>("accesses");
  set_order(static_cast<uint64_t>(request.integer("order")));
  set_schedule(schedule_of(request));
  request.watch_outputs();
  if (counts_accesses) {
    request.count_accesses();
  }
  try {
    const bool known =
        run_pointwise(request) || run_matmul(request) ||
        run_matmul_few_rows(request) || run_matmul_warpgroups(request) ||
        run_linear(request) || run_int4_linear(request) ||
        run_rowwise_scaled_linear(request) || run_lltm(request) ||
        run_rotary_embedding(request) || run_decode_attention(request) ||
        run_spatial_correlation_sample(request) ||
        run_attention_forward(request) || run_attention_backward(request) ||
        run_attention_uncovered(request) || run_attention_dropout_mask(request);
    if (!known) {
      fail("no kernel is called " + request.text("kernel"));
    }
  } catch (const Report& report) {
    fail(report.what());
  }
  if (auto* const numbers = request.buffer<int64_t>("counters")) {
    const Counters& counted = counters();
    const int64_t all[] = {counted.products,
                           counted.matrix_loads,
                           counted.matrix_load_cycles,
                           counted.copies,
                           counted.copy_cycles,
                           counted.copied_bytes,
                           counted.copied_sectors,
                           counted.group_products,
                           counted.boxes,
                           counted.word_loads,
                           counted.word_load_cycles};
    std::copy(std::begin(all), std::end(all), numbers);
  }
  if (counts_accesses) {
    request.write_access_counts();
  }
  request.write_outputs();
}
