// What the kernels share that make all gradients of attention at once, those of
// half precision by tensor cores (joint_gradients_mma.cuh) and those of float32
// by multiply-adds (joint_gradients_panels.cuh): the call, the turns in which
// blocks of keys add to the gradient of the query, and the sums in memory.
#pragma once

#include <cstdint>

#include "cuda/attention/gradients.cuh"
#include "cuda/attention/problem.cuh"
#include "cuda/device/device.cuh"
#include "cuda/device/turns.cuh"
#include "cuda/gemm/tile.cuh"

namespace pkg::cuda {

template <class Element>
constexpr int kJointKeys = sizeof(Element) == 2 ? 128 : 64;
constexpr int kJointRows = kAttentionTile;

// The batch as the query sees it is the whole batch.
template <class Element>
struct AttentionJointGradients : AttentionGradKeyValue<Element> {
  ResultBatch<Element> grad_query;
  float* sums = nullptr;  // sum_count()
  int* turns = nullptr;   // turn_count() zeros, the first one for tickets
  uint32_t together = 1;  // owned_together(), where tickets go by joint_work()

  __host__ __device__ int64_t row_tiles() const {
    return tiles_of(this->backward.problem.rows, kJointRows);
  }
  __host__ __device__ int64_t column_tiles() const {
    return tiles_of(this->backward.problem.columns, kJointKeys<Element>);
  }
  __host__ __device__ int64_t tile_count() const {
    return this->partition.owned_count * column_tiles();
  }
  // Of how many matrices the tiles come by turns, where so many blocks take
  // them: as few as have four for each block, divided evenly.
  int64_t owned_together(int64_t blocks) const {
    const int64_t times = tiles_of(tile_count(), static_cast<int>(4 * blocks));
    return tiles_of(this->partition.owned_count, static_cast<int>(times));
  }
  int64_t turn_count() const {
    return 1 + this->backward.problem.batch_count * row_tiles();
  }
  // Where one block adds up all, there are no sums in memory.
  int64_t sum_count(int width) const {
    return column_tiles() > 1 ? sum_tiles() * kJointRows * width : 0;
  }

  // Where the sums of a tile of queries are, counted in such tiles: those of
  // packed sequences side by side, as many as they have tokens.
  __device__ __forceinline__ int64_t sum_tile(int64_t batch,
                                              const AttentionExtent& extent,
                                              int64_t row_begin) const {
    const PackedSequences& packed = this->backward.problem.packed;
    if (packed.rows.data == nullptr) {
      return batch * row_tiles() + row_begin / kJointRows;
    }
    // A sequence begins in a tile of its own.
    return batch % packed.heads * packed_tiles() +
           (extent.first_row + row_begin) / kJointRows + batch / packed.heads;
  }

 private:
  int64_t sum_tiles() const {
    const auto& problem = this->backward.problem;
    return problem.packed.rows.data == nullptr
               ? problem.batch_count * row_tiles()
               : problem.packed.heads * packed_tiles();
  }
  __host__ __device__ int64_t packed_tiles() const {
    const auto& problem = this->backward.problem;
    return problem.packed.total_rows / kJointRows + problem.batch.sizes[0];
  }
};

// What a block has by a ticket: a tile of keys of a matrix, as keys are
// counted.
struct JointWork {
  uint32_t owned;
  uint32_t column_tile;
};

// Tiles of keys from the first to the last, each of so many matrices before the
// next, and then other matrices.
template <class Element>
__device__ __forceinline__ JointWork
joint_work(const AttentionJointGradients<Element>& call, uint32_t ticket) {
  const auto column_tiles = static_cast<uint32_t>(call.column_tiles());
  const auto owned_count = static_cast<uint32_t>(call.partition.owned_count);
  const uint32_t tiles = call.together * column_tiles;
  const uint32_t first = ticket / tiles * call.together;
  const uint32_t left = owned_count - first;
  const uint32_t here = call.together < left ? call.together : left;
  return {first + ticket % tiles % here, ticket % tiles / here};
}

// The tiles of keys that see one of queries, those of which first_row() and
// row_end() say so.
struct SeenTiles {
  int first;
  int end;
};

template <int kKeys>
__device__ __forceinline__ SeenTiles seen_tiles(const AttentionExtent& extent,
                                                int64_t row_begin) {
  const int64_t seen = row_begin + kJointRows + extent.limits.last;
  const int64_t columns = seen < extent.columns ? seen : extent.columns;
  const int end = columns > 0 ? static_cast<int>(tiles_of(columns, kKeys)) : 0;
  const int64_t column = row_begin + extent.limits.first;
  const int first = column > 0 ? static_cast<int>(column / kKeys) : 0;
  return {first, end};
}

// When a tile of keys has its turn at a tile of queries.
struct JointTurn {
  int index;
  bool is_last;
  bool is_seen;  // by any key
};

// The last of the tiles that see it begins.
template <int kKeys>
__device__ __forceinline__ JointTurn joint_turn(const AttentionExtent& extent,
                                                int64_t row_begin,
                                                int column_tile) {
  const auto [first, end] = seen_tiles<kKeys>(extent, row_begin);
  return {end - 1 - column_tile, column_tile == first, first < end};
}

// Calls function(i, j, index) for every four of the thread's sums, from row i
// and column j on, with where they are in the tile in memory.
template <class Sums, class Function>
__device__ __forceinline__ void for_each_vector(Function&& function) {
  constexpr int kOfRow = Sums::kThreadColumns / 4;
  constexpr int kThreads = Sums::Thread::kThreads;
  PKG_UNROLL
  for (int i = 0; i < Sums::kThreadRows; ++i) {
    PKG_UNROLL
    for (int j = 0; j < kOfRow; ++j) {
      function(
          i, 4 * j,
          4 * ((i * kOfRow + j) * kThreads + static_cast<int>(threadIdx.x)));
    }
  }
}

// The sums of the blocks that had their turn before, and what this one makes of
// them.
template <class Sums>
__device__ __forceinline__ void load_sums(Sums& sums, const float* from) {
  for_each_vector<Sums>([&](int i, int j, int index) {
    const FourNumbers four = load_in_turn(from + index);
    PKG_UNROLL
    for (int k = 0; k < 4; ++k) {
      sums.values[i][j + k] = four.values[k];
    }
  });
}
template <class Sums>
__device__ __forceinline__ void store_sums(const Sums& sums, float* to) {
  for_each_vector<Sums>([&](int i, int j, int index) {
    const float (&row)[Sums::kThreadColumns] = sums.values[i];
    store_in_turn(to + index, {{row[j], row[j + 1], row[j + 2], row[j + 3]}});
  });
}

// Calls function(owned, column tile) for the tiles of keys that the block has
// by tickets, each matrix's from the last on.
template <class Element, class Function>
__device__ __forceinline__ void for_joint_tiles(
    const AttentionJointGradients<Element>& call, Function&& function) {
  PKG_SHARED(int, ticket, [1]);
  const int64_t tiles = call.tile_count();
  const int64_t column_tiles = call.column_tiles();
  while (true) {
    if (threadIdx.x == 0) {
      ticket[0] = take_ticket(call.turns);
    }
    __syncthreads();
    const int64_t index = ticket[0];
    __syncthreads();
    if (index >= tiles) {
      break;
    }
    function(index / column_tiles,
             static_cast<int>(column_tiles - 1 - index % column_tiles));
  }
}

// Zeros for queries that see no key, which no tile of keys comes to: the blocks
// share out the tiles of queries.
template <class Sums, class Element>
__device__ __forceinline__ void zero_unseen_queries(
    const AttentionJointGradients<Element>& call) {
  const AttentionProblem<Element>& problem = call.backward.problem;
  const int64_t row_tiles = call.row_tiles();
  const int64_t tiles = problem.batch_count * row_tiles;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t batch = index / row_tiles;
    const int64_t row = index % row_tiles * kJointRows;
    const AttentionExtent extent = problem.extent(batch);
    if (row < extent.rows &&
        !joint_turn<kJointKeys<Element>>(extent, row, 0).is_seen) {
      store_tile(
          Sums(0), call.grad_query.row(problem.batch, batch, extent.first_row),
          extent.rows, problem.head_size, call.grad_query.row_stride, row, 0);
    }
  }
}

}  // namespace pkg::cuda
