// spatial_correlation_sample: products of each pixel with those around it in
// another image, the cost volume of FlowNet (Dosovitskiy and others, arXiv
// 1504.06852), with the parameters of the package spatial-correlation-sampler.
//
// Both images are packed once. For a row of input1 and a row of the patch, one
// pass of register tiles over the channels gives the products of all pixels at
// all shifts in width: "products", a few kilobytes. A kernel window of more
// than one pixel is a sum of these rows, so it costs additions but no further
// products, whatever its size. Only terms whose pixels both exist are taken
// from the rows, so that a NaN beside the border spoils nothing that it is no
// part of. Rows of the patch that leave the image cost nothing.
//
// 2 C operations for each pixel of input1 and element of the patch, from rows
// that come from the second-level cache, at 1 + 1/8 loads for each
// multiply-add: bound by unaligned loads (cpu/correlation/tile.h).
#include "spatial_correlation_sample.h"

#include "cpu/correlation/images.h"
#include "cpu/correlation/tile.h"
#include "cpu/pointwise/pointwise.h"
#include "cpu/runtime/workspace.h"
#include "host/integer_math.h"
#include "host/namespace.h"

namespace pkg::cpu {
namespace {

using namespace spatial_correlation;

template <class Input>
class Correlation {
 public:
  using Number = simd::Compute<Input>;

  Correlation(const SpatialCorrelationPlan& plan, const TensorView& input1,
              const TensorView& input2, const Tensor& output)
      : plan_(plan),
        input1_(input1),
        input2_(input2),
        output_(static_cast<Input*>(output.mutable_data_ptr())),
        shifts_(plan),
        layout1_(plan, 0, simd::kLanes<Number>),
        layout2_(plan, shifts_.reach, simd::kLanes<Number>),
        threads_(threads_for(plan)),
        has_window_(plan.kernel[0] > 1 || plan.kernel[1] > 1) {}

  void run() const {
    const int64_t size = layout1_.image_size() + layout2_.image_size();
    const int64_t at_once = images_at_once(
        plan_.batch, size * static_cast<int64_t>(sizeof(Number)));
    auto& workspace = Workspace::of_this_thread<Slot::CorrelationImages>();
    Number* memory = workspace.request<Number>(at_once * size);
    for (int64_t begin = 0; begin < plan_.batch; begin += at_once) {
      const int64_t end = std::min(plan_.batch, begin + at_once);
      const Packed packed = {
          pack_images(input1_, begin, end, layout1_, {}, memory),
          pack_images(input2_, begin, end, layout2_, {},
                      memory + at_once * layout1_.image_size())};
      run_images(packed, begin, end);
    }
    workspace.release_excess();
  }

 private:
  struct Packed {
    PackedImages<Number> images1;
    PackedImages<Number> images2;
  };

  // Rows [row, row_end) of the output, of one image and one row of the patch.
  struct Piece {
    int64_t image;  // of those that are packed
    int64_t patch_row;
    int64_t row;
    int64_t row_end;
    Input* output;  // (patch width, output height, output width)
  };

  void run_images(const Packed& packed, int64_t begin, int64_t end) const {
    const int64_t images = end - begin;
    const int64_t wanted = kTasksOfThread * threads_;
    const int64_t rows = rows_of_task(images, wanted);
    const int64_t row_tasks = ceil_div(plan_.output[0], rows);
    const int64_t tasks = std::max<int64_t>(images * row_tasks, 1);
    // All rows of the patch in a task reuse the row of input1, where there are
    // tasks enough; sums over a window reuse their products instead.
    const int64_t groups =
        has_window_ ? plan_.patch[0]
                    : std::min(plan_.patch[0], ceil_div(wanted, tasks));
    for_each_task(images * row_tasks * groups, threads_, [&](int64_t task) {
      const int64_t group = task % groups;
      const int64_t row = task / groups % row_tasks * rows;
      const int64_t image = task / groups / row_tasks;
      for (int64_t p = plan_.patch[0] * group / groups;
           p < plan_.patch[0] * (group + 1) / groups; ++p) {
        run_piece(packed, {image, p, row, std::min(plan_.output[0], row + rows),
                           output_ + ((begin + image) * plan_.patch[0] + p) *
                                         plan_.patch[1] * plane()});
      }
    });
  }

  int64_t plane() const { return plan_.output[0] * plan_.output[1]; }

  int64_t rows_of_task(int64_t images, int64_t wanted) const {
    if (!has_window_) {
      return 1;
    }
    // The sums of a task stay in the second-level cache.
    constexpr int64_t kBytes = int64_t{256} << 10;
    const int64_t row_bytes =
        plan_.patch[1] * plan_.output[1] * static_cast<int64_t>(sizeof(Number));
    const int64_t whole = images * plan_.patch[0];
    const int64_t row_tasks =
        (wanted + whole - 1) / std::max<int64_t>(whole, 1);
    return std::max<int64_t>(
        1, std::min(kBytes / std::max<int64_t>(row_bytes, 1),
                    plan_.output[0] / std::max<int64_t>(row_tasks, 1)));
  }

  void run_piece(const Packed& packed, const Piece& piece) const {
    if (has_window_) {
      sum_windows(packed, piece);
    } else {
      for (int64_t h = piece.row; h < piece.row_end; ++h) {
        store_products(packed, piece, h);
      }
    }
  }

  // The products of a row of input1 at all shifts, or null where it has none.
  const Number* products_of(const Packed& packed, const Piece& piece,
                            int64_t row) const {
    const int64_t other = row + plan_.shift(0, piece.patch_row);
    if (row < 0 || row >= plan_.size[0] || other < 0 ||
        other >= plan_.size[0]) {
      return nullptr;
    }
    const int64_t columns = layout1_.columns;
    Number* products =
        Workspace::of_this_thread<Slot::CorrelationSums>().request<Number>(
            shifts_.count * columns);
    const Number* a = packed.images1.row(piece.image, row);
    const Number* b = packed.images2.row(piece.image, other) + shifts_.offset;
    for_each_tile<Number>(
        shifts_.count, columns,
        [&]<int kCount, int kVectors>(int64_t first, int64_t column) {
          correlate_tile<Number, kCount, kVectors>(
              a + column, layout1_.channel_step,
              b + first * shifts_.step + column, layout2_.channel_step,
              shifts_.step, layout1_.channels,
              products + first * columns + column, columns);
        });
    return products;
  }

  bool is_shift(int64_t p) const {
    return p >= shifts_.first && p < shifts_.first + shifts_.count;
  }

  // A row of the output of a kernel window of one pixel.
  void store_products(const Packed& packed, const Piece& piece,
                      int64_t h) const {
    const int64_t width = plan_.output[1];
    const Number* products = products_of(packed, piece, plan_.pixel(0, h, 0));
    for (int64_t p = 0; p < plan_.patch[1]; ++p) {
      Input* to = piece.output + p * plane() + h * width;
      std::array<int64_t, 2> range = {0, 0};
      if (products != nullptr && is_shift(p)) {
        const auto [first, last] = overlap(plan_.size[1], plan_.shift(1, p));
        range = positions_of(plan_, 1, 0, first, last);
      }
      const auto [begin, end] = range;
      std::fill_n(to, begin, Input(0));
      std::fill(to + end, to + width, Input(0));
      if (begin == end) {
        continue;
      }
      const Number* from = products + (p - shifts_.first) * layout1_.columns +
                           plan_.pixel(1, begin, 0);
      if (plan_.stride[1] == 1) {
        store_row(to + begin, from, end - begin);
      } else {
        for (int64_t w = begin; w < end; ++w, from += plan_.stride[1]) {
          to[w] = static_cast<Input>(*from);
        }
      }
    }
  }

  // Rows of the output of a larger window. Each sum takes its terms in the
  // order of the window, however rows are cut into tasks.
  void sum_windows(const Packed& packed, const Piece& piece) const {
    const int64_t width = plan_.output[1];
    const int64_t row_size = plan_.patch[1] * width;
    const int64_t rows = piece.row_end - piece.row;
    Number* sums =
        Workspace::of_this_thread<Slot::CorrelationRows>().request<Number>(
            rows * row_size);
    std::fill_n(sums, rows * row_size, Number(0));
    const int64_t first = std::max<int64_t>(0, plan_.pixel(0, piece.row, 0));
    const int64_t last =
        std::min(plan_.size[0] - 1,
                 plan_.pixel(0, piece.row_end - 1, plan_.kernel[0] - 1));
    for (int64_t row = first; row <= last; ++row) {
      const Number* products = nullptr;
      for (int64_t k = 0; k < plan_.kernel[0]; ++k) {
        const int64_t h = plan_.position(0, row, k);
        if (h < piece.row || h >= piece.row_end) {
          continue;
        }
        if (products == nullptr) {
          products = products_of(packed, piece, row);
        }
        if (products == nullptr) {
          break;
        }
        add_window_row(products, sums + (h - piece.row) * row_size);
      }
    }
    for (int64_t h = piece.row; h < piece.row_end; ++h) {
      for (int64_t p = 0; p < plan_.patch[1]; ++p) {
        store_row(piece.output + p * plane() + h * width,
                  sums + (h - piece.row) * row_size + p * width, width);
      }
    }
  }

  void add_window_row(const Number* products, Number* sums) const {
    for (int64_t s = 0; s < shifts_.count; ++s) {
      const int64_t p = shifts_.first + s;
      const auto [first, last] = overlap(plan_.size[1], plan_.shift(1, p));
      for (int64_t k = 0; k < plan_.kernel[1]; ++k) {
        const auto [begin, end] = positions_of(plan_, 1, k, first, last);
        Number* to = sums + p * plan_.output[1];
        const Number* from =
            products + s * layout1_.columns + plan_.pixel(1, begin, k);
        if (plan_.stride[1] == 1) {
          add_row(to + begin, from, end - begin);
        } else {
          for (int64_t w = begin; w < end; ++w, from += plan_.stride[1]) {
            to[w] += *from;
          }
        }
      }
    }
  }

  const SpatialCorrelationPlan& plan_;
  Images<Input> input1_;
  Images<Input> input2_;
  Input* output_;
  Shifts shifts_;
  RowLayout layout1_;
  RowLayout layout2_;
  int64_t threads_;
  bool has_window_;
};

Tensor spatial_correlation_sample(
    const TensorView& input1, const TensorView& input2,
    std::vector<int64_t> kernel_size, std::vector<int64_t> patch_size,
    std::vector<int64_t> stride, std::vector<int64_t> padding,
    std::vector<int64_t> dilation, std::vector<int64_t> dilation_patch) {
  const SpatialCorrelationPlan plan = plan_spatial_correlation_sample(
      input1, input2,
      {kernel_size, patch_size, stride, padding, dilation, dilation_patch});
  const Tensor output = allocate_correlation(plan, input1);
  with_floating_type(plan.type, [&](auto example) {
    Correlation<decltype(example)>(plan, input1, input2, output).run();
  });
  return output;
}

PKG_IMPLEMENT(CPU, library) {
  library.impl<&spatial_correlation_sample>("spatial_correlation_sample");
}

}  // namespace
}  // namespace pkg::cpu
