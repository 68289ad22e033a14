// The gradient of either input of spatial_correlation_sample: each of its
// pixels gathers, from every element of the patch, the output's gradient times
// the pixel of the other image that was multiplied with it. Nothing is
// scattered and no sum is shared, so results do not depend on threads.
//
// For a row of the result and a row of the patch, the output's gradient, summed
// over the kernel windows, is laid out as a row of pixels for each shift: zeros
// where no output reads the pixel or the other pixel does not exist. Several
// such rows, as many as the first-level cache holds, then meet the other
// image's rows in one pass of register tiles over the channels. For input2 the
// same with all shifts mirrored.
//
// As many operations as the forward pass for each of the two, bound alike.
#include "cpu/correlation/images.h"
#include "cpu/correlation/tile.h"
#include "cpu/pointwise/pointwise.h"
#include "cpu/runtime/workspace.h"
#include "host/integer_math.h"
#include "host/namespace.h"
#include "spatial_correlation_sample.h"

namespace pkg::cpu {
namespace {

using namespace spatial_correlation;

template <class Input>
class ImageGradient {
 public:
  using Number = simd::Compute<Input>;

  ImageGradient(const SpatialCorrelationPlan& plan, const TensorView& grad,
                const TensorView& other, bool of_input2, const Tensor& result)
      : plan_(plan),
        grad_(static_cast<const Input*>(grad.const_data_ptr())),
        other_(other),
        of_input2_(of_input2),
        sign_(of_input2 ? -1 : 1),
        result_(static_cast<Input*>(result.mutable_data_ptr())),
        shifts_(plan),
        layout_(plan, shifts_.reach, simd::kLanes<Number>),
        used_columns_(used_pixels(plan, 1)),
        threads_(threads_for(plan)) {
    std::ranges::copy(strides_of(grad), grad_strides_.begin());
  }

  void run() const {
    const int64_t size = layout_.image_size();
    const int64_t at_once = images_at_once(
        plan_.batch, size * static_cast<int64_t>(sizeof(Number)));
    auto& workspace = Workspace::of_this_thread<Slot::CorrelationImages>();
    Number* memory = workspace.request<Number>(at_once * size);
    // What no output reads of input1 must not meet the zeros in its place: it
    // may be NaN.
    const std::vector<bool> all;
    for (int64_t begin = 0; begin < plan_.batch; begin += at_once) {
      const int64_t end = std::min(plan_.batch, begin + at_once);
      run_images(pack_images(other_, begin, end, layout_,
                             of_input2_ ? used_columns_ : all, memory),
                 begin, end);
    }
    workspace.release_excess();
  }

 private:
  using Row = PatchRow<Number>;

  // Most rows of the patch that meet the channels in one pass.
  static constexpr int64_t kMostRows = 16;

  void run_images(const PackedImages<Number>& others, int64_t begin,
                  int64_t end) const {
    const int64_t rows = (end - begin) * plan_.size[0];
    const int64_t wanted = kTasksOfThread * threads_;
    // Groups of channels, where there are too few rows for all threads.
    const int64_t most = ceil_div(plan_.channels, kTileMost);
    const int64_t groups = std::max<int64_t>(
        1, std::min(most, wanted / std::max<int64_t>(rows, 1)));
    for_each_task(rows * groups, threads_, [&](int64_t task) {
      const int64_t group = task % groups;
      const int64_t image = task / groups / plan_.size[0];
      gather_row(others, begin, image, task / groups % plan_.size[0],
                 plan_.channels * group / groups,
                 plan_.channels * (group + 1) / groups);
    });
  }

  // One row of the result, of channels [channel, channel_end).
  void gather_row(const PackedImages<Number>& others, int64_t begin,
                  int64_t image, int64_t row, int64_t channel,
                  int64_t channel_end) const {
    const int64_t channels = channel_end - channel;
    const int64_t columns = layout_.columns;
    Number* sums =
        Workspace::of_this_thread<Slot::CorrelationSums>().request<Number>(
            channels * columns);
    std::fill_n(sums, channels * columns, Number(0));

    const int64_t size = shifts_.count * columns;
    const int64_t at_once = rows_at_once(size);
    Number* gradients =
        Workspace::of_this_thread<Slot::CorrelationRows>().request<Number>(
            at_once * size);
    std::array<Row, kMostRows> rows;
    int64_t count = 0;
    const auto [patch_begin, patch_end] = plan_.patch_range(0);
    for (int64_t p = patch_begin; p < patch_end; ++p) {
      const int64_t other = row + sign_ * plan_.shift(0, p);
      if (other < 0 || other >= plan_.size[0]) {
        continue;
      }
      Number* laid_out = gradients + count * size;
      const int64_t row1 = of_input2_ ? other : row;
      if (!lay_out_gradient(begin + image, p, row1, laid_out)) {
        continue;
      }
      rows[count++] = {laid_out, others.row(image, other) +
                                     channel * layout_.channel_step +
                                     sign_ * shifts_.offset};
      if (count == at_once) {
        gather(rows.data(), count, channels, sums);
        count = 0;
      }
    }
    gather(rows.data(), count, channels, sums);

    for (int64_t c = 0; c < channels; ++c) {
      Number* pixels = sums + c * columns;
      for (size_t j = 0; !of_input2_ && j < used_columns_.size(); ++j) {
        pixels[j] = used_columns_[j] ? pixels[j] : Number(0);
      }
      store_row(result_ + (((begin + image) * plan_.channels + channel + c) *
                               plan_.size[0] +
                           row) *
                              plan_.size[1],
                pixels, plan_.size[1]);
    }
  }

  static int64_t rows_at_once(int64_t size) {
    constexpr int64_t kBytes = int64_t{24} << 10;
    return std::clamp<int64_t>(
        kBytes / static_cast<int64_t>(size * sizeof(Number) + 1), 1, kMostRows);
  }

  void gather(const Row* rows, int64_t count, int64_t channels,
              Number* sums) const {
    if (count == 0) {
      return;
    }
    const int64_t columns = layout_.columns;
    for_each_tile<Number>(
        channels, columns,
        [&]<int kCount, int kVectors>(int64_t first, int64_t column) {
          gather_tile<Number, kCount, kVectors>(
              rows, count, columns, shifts_.count, sign_ * shifts_.step,
              layout_.channel_step, column,
              first * layout_.channel_step + column,
              sums + first * columns + column, columns);
        });
  }

  // The output's gradient for a row of the patch and of input1, summed over the
  // kernel windows, at the result's pixels. False where no output reads the
  // row.
  bool lay_out_gradient(int64_t image, int64_t patch_row, int64_t row1,
                        Number* to) const {
    const int64_t columns = layout_.columns;
    std::fill_n(to, shifts_.count * columns, Number(0));
    bool is_read = false;
    for (int64_t k = 0; k < plan_.kernel[0]; ++k) {
      const int64_t h = plan_.position(0, row1, k);
      if (h < 0) {
        continue;
      }
      is_read = true;
      const Input* from =
          grad_ + image * grad_strides_[0] + patch_row * grad_strides_[1] +
          shifts_.first * grad_strides_[2] + h * grad_strides_[3];
      for (int64_t s = 0; s < shifts_.count; ++s) {
        add_gradient_row(from + s * grad_strides_[2],
                         plan_.shift(1, shifts_.first + s), to + s * columns);
      }
    }
    return is_read;
  }

  void add_gradient_row(const Input* from, int64_t shift, Number* to) const {
    const auto [first, last] = overlap(plan_.size[1], shift);
    const int64_t moved = of_input2_ ? shift : 0;
    for (int64_t k = 0; k < plan_.kernel[1]; ++k) {
      const auto [begin, end] = positions_of(plan_, 1, k, first, last);
      Number* pixel = to + plan_.pixel(1, begin, k) + moved;
      if (plan_.stride[1] == 1 && grad_strides_[4] == 1) {
        add_row(pixel, from + begin, end - begin);
      } else {
        for (int64_t w = begin; w < end; ++w, pixel += plan_.stride[1]) {
          *pixel += static_cast<Number>(from[w * grad_strides_[4]]);
        }
      }
    }
  }

  const SpatialCorrelationPlan& plan_;
  const Input* grad_;
  std::array<int64_t, 5> grad_strides_;
  Images<Input> other_;
  bool of_input2_;
  int64_t sign_;
  Input* result_;
  Shifts shifts_;
  RowLayout layout_;
  std::vector<bool> used_columns_;
  int64_t threads_;
};

Tensor spatial_correlation_sample_backward(
    const TensorView& grad, const TensorView& other, bool of_input2,
    std::vector<int64_t> kernel_size, std::vector<int64_t> patch_size,
    std::vector<int64_t> stride, std::vector<int64_t> padding,
    std::vector<int64_t> dilation, std::vector<int64_t> dilation_patch) {
  const SpatialCorrelationPlan plan = plan_spatial_correlation_sample_backward(
      grad, other,
      {kernel_size, patch_size, stride, padding, dilation, dilation_patch});
  const Tensor result = allocate_image_gradient(plan, other);
  with_floating_type(plan.type, [&](auto example) {
    ImageGradient<decltype(example)>(plan, grad, other, of_input2, result)
        .run();
  });
  return result;
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&spatial_correlation_sample_backward>(
      "spatial_correlation_sample_backward");
}

}  // namespace
}  // namespace pkg::cpu
