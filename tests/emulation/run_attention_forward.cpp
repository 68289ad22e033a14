#include "attention_request.h"
#include "cuda/attention/dropout.cuh"
#include "cuda/attention/forward_kernels.cuh"
#include "cuda/attention/uncovered.cuh"

namespace pkg::emulation {
namespace {

template <class Element>
void run_forward(const Request& request) {
  const cuda::AttentionForward<Element> call = {
      .problem = attention_problem<Element>(request),
      .output = result_batch<Element>(request, "output"),
      .output_residual = result_batch<Element>(request, "output_residual"),
      .log_sum_exp = request.buffer<cuda::Accumulator<Element>>("log_sum_exp"),
  };
  const auto launch = [&](auto kernel, int64_t tiles, cuda::LaunchShape shape,
                          const auto& arguments) {
    launch_blocks(request, tiles, shape, kernel, arguments);
  };
  const auto allocate = [&](int64_t numbers) {
    if (numbers != request.integer("part_numbers")) {
      fail("other memory for parts than the test has");
    }
    return request.buffer<cuda::Accumulator<Element>>("parts");
  };
  if constexpr (std::is_same_v<Element, float>) {
    if (request.integer("copied_panels") != 0) {
      if (!cuda::launch_attention_forward_copied(call, device_of(request),
                                                 request.integer("key_parts"),
                                                 launch, allocate)) {
        fail("the kernel of copied panels does not take the call");
      }
      return;
    }
  }
  cuda::launch_attention_forward_kernel(call, device_of(request), launch,
                                        allocate);
}

// Into how many parts the kernel of copied panels divides the keys for so many
// matrices, queries, keys, columns of values and multiprocessors.
void run_copied_forward_parts(const Request& request) {
  const auto& sizes = request.integers("sizes");
  cuda::AttentionForward<float> call = {};
  call.problem.batch_count = sizes.at(0);
  call.problem.rows = sizes.at(1);
  call.problem.columns = sizes.at(2);
  call.problem.value_size = sizes.at(3);
  cuda::with_attention_width<float>(sizes.at(3), [&]<int kWidth>() {
    *request.buffer<int64_t>("parts") =
        cuda::copied_forward_parts<kWidth>(call, sizes.at(4));
  });
}

// A tensor (tokens, heads, size), contiguous; none where it is absent.
cuda::ZeroedRows zeroed_rows(const Request& request, const std::string& name,
                             int64_t heads, int64_t size, int64_t bytes) {
  return {request.buffer<uint8_t>(name), heads * size * bytes};
}

template <class Element>
void run_uncovered_queries(const Request& request) {
  using Number = cuda::Accumulator<Element>;
  const auto problem = attention_problem<Element>(request);
  const auto rows = [&](const std::string& name) {
    return zeroed_rows(request, name, problem.packed.heads,
                       request.integer("zeroed_size"), sizeof(Element));
  };
  const cuda::UncoveredTokens<Number> call = {
      .offsets = problem.packed.rows,
      .sequences = problem.batch.sizes[0],
      .tokens = problem.packed.total_rows,
      .most = problem.rows,
      .rows = {rows("output"), rows("output_residual")},
      .log_sum_exp = request.buffer<Number>("log_sum_exp"),
      .heads = problem.packed.heads,
  };
  launch_blocks(request, call.block_count(), cuda::kUncoveredThreads,
                cuda::attention_uncovered_kernel<Number>, call);
}

template <class Element>
void run_uncovered_keys(const Request& request) {
  using Number = cuda::Accumulator<Element>;
  const auto problem = attention_problem<Element>(request);
  const int64_t heads = problem.batch.sizes[1];
  const cuda::UncoveredTokens<Number> call = {
      .offsets = problem.packed.columns,
      .sequences = problem.batch.sizes[0],
      .tokens = problem.packed.total_columns,
      .most = problem.columns,
      .rows = {zeroed_rows(request, "grad_key", heads, problem.head_size,
                           sizeof(Element)),
               zeroed_rows(request, "grad_value", heads, problem.value_size,
                           sizeof(Element))},
      .log_sum_exp = nullptr,
      .heads = 0,
  };
  launch_blocks(request, call.block_count(), cuda::kUncoveredThreads,
                cuda::attention_uncovered_kernel<Number>, call);
}

}  // namespace

bool run_attention_uncovered(const Request& request) {
  const std::string& kernel = request.text("kernel");
  if (kernel == "attention_uncovered_queries") {
    for_attention_type(request, [&]<class Element>() {
      run_uncovered_queries<Element>(request);
    });
  } else if (kernel == "attention_uncovered_keys") {
    for_attention_type(request, [&]<class Element>() {
      run_uncovered_keys<Element>(request);
    });
  } else {
    return false;
  }
  return true;
}

bool run_attention_forward(const Request& request) {
  if (request.text("kernel") == "copied_forward_parts") {
    run_copied_forward_parts(request);
    return true;
  }
  if (request.text("kernel") != "attention_forward") {
    return false;
  }
  for_attention_type(request,
                     [&]<class Element>() { run_forward<Element>(request); });
  return true;
}

bool run_attention_dropout_mask(const Request& request) {
  if (request.text("kernel") != "attention_dropout_mask") {
    return false;
  }

  const cuda::DropoutMask mask = {
      .kept = request.buffer<uint8_t>("kept"),
      .seed = request.buffer<int64_t>("seed"),
      .keep_threshold = dropout_keep_threshold(request.real("dropout")),
      .batch = request.integers("shape").at(0),
      .rows = request.integers("shape").at(1),
      .columns = request.integers("shape").at(2),
  };
  launch_blocks(request, mask.quad_count(), cuda::kDropoutThreads,
                cuda::attention_dropout_mask_kernel, mask);
  return true;
}

}  // namespace pkg::emulation
