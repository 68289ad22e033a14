#include <vector>

#include "few_rows.h"
#include "matmul_request.h"
#include "program.h"

namespace pkg::emulation {
namespace {

template <class Input, class Output>
void run(const Request& request) {
  auto problem = problem_of<Input, Output>(request);
  problem.count_tiles();
  const int64_t split_depth = request.integer("split_depth");
  if (split_depth == 0) {
    launch_few_rows(request, problem, cuda::KeepSums{});
    return;
  }
  using Sum = cuda::StoredSum<Input>;
  auto parts = cuda::divided<Input, Output, Sum>(problem, split_depth, nullptr);
  std::vector<Sum> sums(
      static_cast<size_t>(parts.batch_count * parts.rows * parts.columns));
  parts.c = sums.data();
  launch_few_rows(request, parts, cuda::KeepSums{});
  const auto sum = cuda::sum_of(problem, sums.data(), parts.splits);
  launch_blocks(request, sum.tiles, cuda::SumThread::kThreads,
                cuda::matmul_sum_kernel<Input, Output>, sum, cuda::KeepSums{});
}

// 1: the weight lies along the summed dimension, 2: along columns; 0: the
// kernel does not take it.
template <class Input>
void run_layout(const Request& request) {
  *request.buffer<int64_t>("found") = static_cast<int64_t>(
      cuda::few_rows_layout(problem_of<Input, Input>(request)));
}

template <class Layout>
void run_plan(const Request& request) {
  const auto& sizes = request.integers("sizes");
  const cuda::FewRowsPlan plan =
      cuda::plan_few_rows<cuda::FewRowsShape<cuda::bfloat16, Layout>>(
          sizes.at(0), sizes.at(1), sizes.at(2), sizes.at(3));
  int64_t* const found = request.buffer<int64_t>("found");
  found[0] = plan.share_shift;
  found[1] = plan.split_depth;
}

void run(const Request& request) {
  const std::string& input = request.text("input_type");
  const std::string& output = request.text("output_type");
  bool is_known = false;
  with_type<double, float, cuda::float16, cuda::bfloat16>(
      input, [&]<class Input>() {
        if (input == output) {
          is_known = true;
          run<Input, Input>(request);
        } else if constexpr (sizeof(Input) == 2) {
          is_known = with_type<float>(
              output, [&]<class Output>() { run<Input, Output>(request); });
        }
      });
  if (!is_known) {
    fail("few rows have no kernel for " + input + " and " + output);
  }
}

}  // namespace

bool run_matmul_few_rows(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "few_rows_layout") {
    with_type<double, float, cuda::float16, cuda::bfloat16>(
        request.text("input_type"),
        [&]<class Input>() { run_layout<Input>(request); });
  } else if (kernel == "plan_of_few_rows") {
    if (request.text("layout") == "along_depth") {
      run_plan<cuda::AlongDepth>(request);
    } else {
      run_plan<cuda::AlongColumns>(request);
    }
  } else if (kernel == "matmul_few_rows") {
    run(request);
  } else {
    return false;
  }
  return true;
}

}  // namespace pkg::emulation
