#include "batches.h"
#include "cuda/rotary_embedding.cuh"
#include "elements.h"
#include "program.h"

namespace pkg::emulation {
namespace {

cuda::RotaryShape rotary_shape(const Request& request) {
  cuda::RotaryShape shape = {};
  shape.rows_of = batch_sizes(request.integers("rows"));
  int operand = 0;
  for (const char* name : {"output", "input", "cos", "sin"}) {
    auto strides = request.integers(name + std::string("_strides"));
    shape.steps[operand] = strides.back();
    strides.pop_back();
    shape.row_strides[operand++] = batch_strides(strides);
  }
  shape.inner = request.integer("inner");
  shape.half = request.integer("half");
  shape.has_neighbours = request.integer("interleaved") != 0;
  shape.turns_back = request.integer("turns_back") != 0;
  return shape;
}

template <class Element, class Table, class Divisor, int kPacket>
void run_by(const Request& request,
            const cuda::RotaryOperands<Element, Table>& operands,
            const cuda::RotaryShape& shape) {
  const cuda::RotaryProblem<Element, Table, Divisor> problem(operands, shape,
                                                             kPacket);
  launch_blocks(request, problem.block_count(), cuda::kRotaryThreads,
                cuda::rotary_embedding_kernel<Element, Table, Divisor, kPacket>,
                problem);
}

// The test says which way the operands should take, by "packets" or by
// "elements"; "wide" is that of more rows than a test has memory for.
template <class Element, class Table>
void run(const Request& request) {
  const cuda::RotaryOperands<Element, Table> operands = {
      request.buffer<Element>("output"), request.buffer<Element>("input"),
      request.buffer<Table>("cos"), request.buffer<Table>("sin")};
  const cuda::RotaryShape shape = rotary_shape(request);
  const std::string& way = request.text("way");
  if (way != "wide" &&
      (way == "packets") != cuda::takes_packets(operands, shape)) {
    fail("these operands are not taken by " + way);
  }
  if (way == "packets") {
    run_by<Element, Table, cuda::FastDivisor, cuda::kRotaryPacket<Element>>(
        request, operands, shape);
  } else if (way == "elements") {
    run_by<Element, Table, cuda::FastDivisor, 1>(request, operands, shape);
  } else {
    run_by<Element, Table, cuda::WideDivisor, 1>(request, operands, shape);
  }
}

}  // namespace

bool run_rotary_embedding(const Request& request) {
  if (request.text("kernel") != "rotary_embedding") {
    return false;
  }
  with_type<double, float, cuda::float16, cuda::bfloat16>(
      request.text("type"), [&]<class Element>() {
        if (request.text("table_type") == request.text("type")) {
          run<Element, Element>(request);
        } else {
          run<Element, float>(request);
        }
      });
  return true;
}

}  // namespace pkg::emulation
