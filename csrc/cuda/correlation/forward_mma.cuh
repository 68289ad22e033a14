// The correlation of two images by tensor cores, of half precision.
//
// For a row of input1 and one of input2, 16 positions times the 24 pixels that
// they meet at 9 shifts, summed over the channels, is a product of matrices. Of
// its 384 sums the 144 of a band are results: 37.5%, with which the tensor
// cores of an A100 could still make 117 TFLOP/s of the 312 that they have, and
// its multiply-adds no more than 19.5.
//
// A block computes 4 rows of positions of a class at 3 rows of shifts, in width
// 2 groups of 16; a warp, 2 rows of a group. For 32 channels a warp loads four
// times four matrices of input1 and twelve times of the 4 rows of input2 that
// these meet, for 36 products: 64 cycles of a multiprocessor's shared memory,
// of which the products take 72 at the rate of an A100 and 36 at that of an
// H200. Sums are 72 registers of a thread; a third block on a multiprocessor
// would leave it 168, with which the compiler spilled ten.
//
// A thread brings 8 channels of a pixel into shared memory at a time, 16 bytes
// of a line that holds 32 channels. Elements that lie a stride apart go through
// registers one by one, by which a warp spends some 1000 instructions on what
// it multiplies by 140: so an A100 issues no more than 29 TFLOP/s, not 117, and
// 40 where channels are neighbours. (Counted in nvcc 13.0's code for sm_80; the
// register tiles of forward.cuh with the same loads are bound to 19.)
//
// Products go on where one of the pixels does not exist. What is left of the
// band is added to totals in shared memory for each place of the kernel window,
// and written from there in rows of 16 positions.
//
// 2 C operations for each pixel, shift and place of the window.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/correlation/correlation.cuh"
#include "cuda/correlation/piece.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/shared.cuh"

namespace pkg::cuda {

template <class Element>
class CorrelationMma {
 public:
  using Width = CorrelationTile<16, 2>;
  static constexpr int kWarpRows = 2;
  static constexpr int kRows = 2 * kWarpRows;  // of positions
  static constexpr int kShiftRows = 3;
  static constexpr int kThreads = 32 * Width::kGroups * kRows / kWarpRows;
  using Piece = CorrelationPiece<Width, kRows, kShiftRows>;

  static LaunchShape launch_shape(const CorrelationPlan&) {
    return {kThreads, (kTotals + kThreads / 32 * kWarpTotals) *
                          static_cast<int>(sizeof(Element))};
  }

  __device__ __forceinline__ CorrelationMma(const Correlation<Element>& call,
                                            int64_t index)
      : call_(call), memory_(dynamic_shared<Element>()), piece_(call, index) {}

  __device__ __forceinline__ void compute() const {
    const CorrelationShape& shape = call_.shape;
    clear_totals();
    PKG_UNROLL_BY(1)
    for (int64_t ki = 0; ki < shape.kernel[0]; ++ki) {
      if (!piece_.has_rows(ki)) {
        continue;  // all threads alike
      }
      PKG_UNROLL_BY(1)
      for (int64_t kj = 0; kj < shape.kernel[1]; ++kj) {
        add_channels(ki, kj);
      }
    }
  }

  // The totals of the warp, a row of positions at a shift each lane.
  __device__ __forceinline__ void store() const {
    const CorrelationShape& shape = call_.shape;
    const CorrelationClasses& columns = call_.classes[1];
    const auto group = piece_.width.group(group_of_warp());
    const bool vectorised = stores_packets<Width::kOwn>(
        call_.output, shape.output[1], columns.position_step);
    const int shifts =
        Width::shifts_of_tile(piece_.first_shift, columns.shifts);
    __syncwarp();
    PKG_UNROLL_BY(1)
    for (int line = lane(); line < kLines; line += 32) {
      const int s = line % Width::kShifts;
      const int64_t shift_row =
          piece_.shift_row(line / Width::kShifts % kShiftRows);
      const int64_t row =
          piece_.row(row_of_warp() + line / (Width::kShifts * kShiftRows));
      const int64_t shift = piece_.shift_of(s);
      if (s >= shifts || shift >= shape.patch[1] ||
          shift_row >= shape.patch[0] || row >= shape.output[0] ||
          group.of_class >= columns.position_classes) {
        continue;
      }
      float values[Width::kOwn];
      PKG_UNROLL
      for (int i = 0; i < Width::kOwn; i += 4) {
        const auto four =
            memory_.template load<Packet<float, 4>>(total_place(line, i));
        PKG_UNROLL
        for (int k = 0; k < 4; ++k) {
          values[i + k] = four.values[k];
        }
      }
      const int64_t plane =
          (piece_.image * shape.patch[0] + shift_row) * shape.patch[1] + shift;
      store_group(
          values,
          call_.output + (plane * shape.output[0] + row) * shape.output[1],
          group.of_class + group.index * columns.position_step,
          columns.position_step, shape.output[1], vectorised);
    }
    __syncwarp();  // before the totals of the next piece
  }

 private:
  static constexpr int kDepth = 32;  // channels at a time
  static constexpr int kOctet = 8;   // of them are 16 bytes
  static constexpr int kOctets = kDepth / kOctet;
  // Lines of an odd number of vectors: eight neighbours lie in different banks.
  static constexpr int kLine = kDepth + kOctet;
  static constexpr int kRows2 = Piece::kRows2;
  static constexpr int kWarpRows2 = kWarpRows + kShiftRows - 1;
  static constexpr int kMetTiles = Width::kMet / 8;
  static constexpr int kPixels2 = kRows * Width::kPlaces1 * kLine;
  // Totals are of float: rows of 16 positions, and four more for the banks.
  static constexpr int kTotals = kPixels2 + kRows2 * Width::kPlaces2 * kLine;
  static constexpr int kLines = kWarpRows * kShiftRows * Width::kShifts;
  static constexpr int kTotalLine = Width::kOwn + 4;
  static constexpr int kFloat = sizeof(float) / sizeof(Element);
  static constexpr int kWarpTotals = kLines * kTotalLine * kFloat;
  static_assert(sizeof(Element) == 2 && Width::kOwn == 16);
  static_assert(kThreads == 32 * kOctets && Width::kPlaces1 == 32);
  static_assert(Width::kPlaces2 <= kThreads / 2);

  // 16 x 8 sums of two rows of input1, each with three of input2.
  struct Sums {
    float values[kWarpRows][kShiftRows][kMetTiles][4];
  };

  __device__ __forceinline__ static int thread() {
    return static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ static int lane() { return thread() % 32; }
  __device__ __forceinline__ static int group_of_warp() {
    return thread() / 32 % Width::kGroups;
  }
  __device__ __forceinline__ static int row_of_warp() {
    return thread() / 32 / Width::kGroups * kWarpRows;
  }
  __device__ __forceinline__ static int total_place(int line, int position) {
    return kTotals + thread() / 32 * kWarpTotals +
           (line * kTotalLine + position) * kFloat;
  }

  __device__ __forceinline__ void clear_totals() const {
    PKG_UNROLL_BY(1)
    for (int i = lane() * 4; i < kLines * kTotalLine; i += 32 * 4) {
      memory_.store(total_place(0, i), Packet<float, 4>{});
    }
    __syncwarp();
  }

  // The totals += the products of all channels at a place of the window.
  __device__ __forceinline__ void add_channels(int64_t ki, int64_t kj) const {
    const CorrelationShape& shape = call_.shape;
    const auto group = piece_.width.group(lane() / Width::kOwn);
    const int64_t at1 = piece_.column1(
        kj, {group.of_class, group.index + lane() % Width::kOwn});
    const int place2 = thread() % (kThreads / 2);
    const int64_t at2 = piece_.column2(kj, piece_.width.place2(place2));
    const int met = piece_.width.met(group_of_warp());
    Sums sums = {};
    PKG_UNROLL_BY(1)
    for (int64_t channel = 0; channel < shape.channels; channel += kDepth) {
      __syncthreads();
      load_column<kRows, 1, Width::kPlaces1>(call_.images1, at1,
                                             piece_.row1(ki, 0), channel,
                                             thread() / 32, lane() * kLine);
      if (place2 < piece_.width.places2()) {
        load_column<kRows2, kOctets / 2, Width::kPlaces2>(
            call_.images2, at2, piece_.row2(ki, 0), channel,
            thread() / (kThreads / 2), kPixels2 + place2 * kLine);
      }
      __syncthreads();
      multiply(sums, met);
    }
    add_band(sums, ki, kj);
  }

  // So many octets of the channels of a column, every (kOctets / kCount)-th
  // from the first on, of so many rows, to lines that begin at `place`.
  template <int kLoaded, int kCount, int kPlaces>
  __device__ __forceinline__ void load_column(
      const CorrelationImages<Element>& images, int64_t column, int64_t row,
      int64_t channel, int first, int place) const {
    const CorrelationShape& shape = call_.shape;
    const bool exists = shape.has_pixel(1, column);
    const int64_t left = shape.channels - channel;
    const int channels = static_cast<int>(left < kDepth ? left : kDepth);
    const bool vectorised = has_channel_packets(images);
    const Element* from = images.data + piece_.image * images.strides[0] +
                          channel * images.strides[1] +
                          (exists ? column : 0) * images.strides[3];
    PKG_UNROLL_BY(1)
    for (int i = 0; i < kLoaded; ++i) {
      const bool valid = exists && shape.has_pixel(0, row);
      const Element* const pixel = from + (valid ? row : 0) * images.strides[2];
      PKG_UNROLL
      for (int k = 0; k < kCount; ++k) {
        const int begin = (first + k * (kOctets / kCount)) * kOctet;
        const int count = valid ? channels - begin : 0;
        load_octet(place + i * kPlaces * kLine + begin,
                   pixel + begin * images.strides[1], images.strides[1], count,
                   vectorised);
      }
      row = moved(row, 1, call_.classes[0].pitch);
    }
  }

  // Channels of a pixel, zeros behind the first `valid`: those of the border
  // and the last ones one by one.
  __device__ __forceinline__ void load_octet(int place, const Element* from,
                                             int64_t stride, int valid,
                                             bool vectorised) const {
    using Octet = Packet<Element, kOctet>;
    if (valid >= kOctet && vectorised) {
      memory_.store(place, *reinterpret_cast<const Octet*>(from));
    } else if (valid >= kOctet) {
      Octet octet;
      read_channels(from, stride, false, octet.values);
      memory_.store(place, octet);
    } else {
      memory_.store(place, Octet{});
      PKG_UNROLL_BY(1)
      for (int c = 0; c < valid; ++c) {
        memory_[place + c] = from[c * stride];
      }
    }
  }

  // sums += the products of kDepth channels: what is loaded of a row of input2
  // is multiplied with both rows of input1 that meet it.
  __device__ __forceinline__ void multiply(Sums& sums, int met) const {
    uint32_t a[kWarpRows][2][4];
    PKG_UNROLL
    for (int i = 0; i < kWarpRows; ++i) {
      const int line = (row_of_warp() + i) * Width::kPlaces1 +
                       group_of_warp() * Width::kOwn + lane() % 16;
      PKG_UNROLL
      for (int half = 0; half < 2; ++half) {
        memory_.load_matrices(line * kLine + (2 * half + lane() / 16) * kOctet,
                              false, a[i][half]);
      }
    }
    PKG_UNROLL
    for (int j = 0; j < kWarpRows2; ++j) {
      PKG_UNROLL
      for (int tile = 0; tile < kMetTiles; ++tile) {
        uint32_t b[4];
        const int line =
            (row_of_warp() + j) * Width::kPlaces2 + met + tile * 8 + lane() % 8;
        memory_.load_matrices(kPixels2 + line * kLine + lane() / 8 * kOctet,
                              false, b);
        PKG_UNROLL
        for (int i = 0; i < kWarpRows; ++i) {
          if (j < i || j - i >= kShiftRows) {
            continue;
          }
          float (&c)[4] = sums.values[i][j - i][tile];
          PKG_UNROLL
          for (int half = 0; half < 2; ++half) {
            multiply_add<Element>(c[0], c[1], c[2], c[3], a[i][half],
                                  &b[2 * half]);
          }
        }
      }
    }
  }

  // The totals += the sums of the band of which both pixels exist.
  __device__ __forceinline__ void add_band(const Sums& sums, int64_t ki,
                                           int64_t kj) const {
    using Places = MmaPlaces<2>;
    const uint32_t rows = rows_with_terms(ki);
    const uint32_t columns = existing_columns(kj);
    PKG_UNROLL
    for (int tile = 0; tile < kMetTiles; ++tile) {
      PKG_UNROLL
      for (int k = 0; k < 4; ++k) {
        const auto place = Places::sum(lane(), k);
        const int met = tile * Places::kColumns + place.column;
        const int s = met - place.row;
        const uint32_t both =
            1u << (kOwnBits + k / 2) | 1u << (2 * tile + k % 2);
        if (s < 0 || s >= Width::kShifts || (columns & both) != both) {
          continue;
        }
        PKG_UNROLL
        for (int pair = 0; pair < kWarpRows * kShiftRows; ++pair) {
          if ((rows >> pair & 1) != 0) {
            add_total(
                total_place(pair * Width::kShifts + s, place.row),
                sums.values[pair / kShiftRows][pair % kShiftRows][tile][k]);
          }
        }
      }
    }
  }
  // A bit for each pair of rows that both exist.
  __device__ __forceinline__ uint32_t rows_with_terms(int64_t ki) const {
    uint32_t rows = 0;
    PKG_UNROLL
    for (int pair = 0; pair < kWarpRows * kShiftRows; ++pair) {
      const int row = row_of_warp() + pair / kShiftRows;
      if (call_.shape.has_pixel(0, piece_.row1(ki, row)) &&
          call_.shape.has_pixel(0, piece_.row2(ki, row + pair % kShiftRows))) {
        rows |= 1u << pair;
      }
    }
    return rows;
  }
  // A bit for each of the lane's columns of sums whose pixel of input2 exists,
  // then one for each of its rows whose pixel of input1 does.
  static constexpr int kOwnBits = 2 * kMetTiles;
  __device__ __forceinline__ uint32_t existing_columns(int64_t kj) const {
    using Places = MmaPlaces<2>;
    const auto group = piece_.width.group(group_of_warp());
    uint32_t columns = 0;
    PKG_UNROLL
    for (int i = 0; i < kOwnBits; ++i) {
      const int met =
          i / 2 * Places::kColumns + Places::sum(lane(), i % 2).column;
      if (call_.shape.has_pixel(
              1, piece_.column2(kj, {group.of_class, group.index + met}))) {
        columns |= 1u << i;
      }
    }
    PKG_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int own = Places::sum(lane(), 2 * i).row;
      if (call_.shape.has_pixel(
              1, piece_.column1(kj, {group.of_class, group.index + own}))) {
        columns |= 1u << (kOwnBits + i);
      }
    }
    return columns;
  }
  __device__ __forceinline__ void add_total(int place, float value) const {
    memory_.store(place, memory_.template load<float>(place) + value);
  }

  const Correlation<Element>& call_;
  SharedSpan<Element> memory_;
  Piece piece_;
};

template <class Element>
__global__ void __launch_bounds__(CorrelationMma<Element>::kThreads, 2)
    spatial_correlation_mma_kernel(
        const __grid_constant__ Correlation<Element> call) {
  for (int64_t piece = blockIdx.x; piece < call.piece_count;
       piece += gridDim.x) {
    const CorrelationMma<Element> block(call, piece);
    block.compute();
    block.store();
  }
}

}  // namespace pkg::cuda
