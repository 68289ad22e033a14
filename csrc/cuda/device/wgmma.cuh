// Products of 64 rows by a warpgroup, which is four warps: the operands are in
// shared memory, or the first in registers; the sums are in the registers of
// the 128 threads. (PTX ISA, "wgmma"; compute capability 9.0 alone, code for
// 9.0a.)
//
// The tensor cores work by themselves: what a product reads must not be
// written, and what it adds to must not be touched, before the threads have
// waited for it. Sums lie as MmaThread (cuda/gemm/tile.cuh) has them where a
// warp has 16 rows and all columns.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device/device.cuh"
#include "cuda/device/matrix_descriptor.cuh"
#include "cuda/device/numeric.cuh"
#include "cuda/device/shared.cuh"
#include "cuda/device/tf32.cuh"

namespace pkg::cuda {

constexpr int kWarpgroup = 128;  // threads

// Which of the block's the thread belongs to, as a number of which the compiler
// sees that all lanes of a warp have the same: what follows from it, as an
// operand's place does, then takes one register of the warp. By whole warps.
__device__ __forceinline__ int warpgroup_of_thread() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup,
                     0);
}

// Whether the architecture that is compiled for has the instructions. A kernel
// that needs them is empty for the others, and nothing compiles it in vain.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kCompilesWarpgroups = true;
#else
constexpr bool kCompilesWarpgroups = false;
#endif

// How the lines of an operand lie in shared memory; see WarpgroupOperand.
enum class Major {
  depth,  // a line is a row or a column: neighbours in the summed dimension
  outer,  // a line is a step: neighbours are rows or columns
};

}  // namespace pkg::cuda

#ifdef __CUDACC__

namespace pkg::cuda {

// An operand in shared memory.
class WarpgroupOperand : public MatrixDescriptor {
 public:
  template <class Element>
  __device__ __forceinline__ WarpgroupOperand(const SharedSpan<Element>& memory,
                                              int index, int part_bytes = 16)
      : MatrixDescriptor(memory.address(index), part_bytes) {}

  __device__ __forceinline__ WarpgroupOperand at(int bytes) const {
    return WarpgroupOperand(MatrixDescriptor::at(bytes));
  }

 private:
  __device__ __forceinline__ explicit WarpgroupOperand(
      const MatrixDescriptor& descriptor)
      : MatrixDescriptor(descriptor) {}
};

#define PKG_WGMMA_16               \
  "%0, %1, %2, %3, %4, %5, %6, %7" \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PKG_WGMMA_32                         \
  PKG_WGMMA_16                               \
  ", %16, %17, %18, %19, %20, %21, %22, %23" \
  ", %24, %25, %26, %27, %28, %29, %30, %31"
#define PKG_WGMMA_64                         \
  PKG_WGMMA_32                               \
  ", %32, %33, %34, %35, %36, %37, %38, %39" \
  ", %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PKG_WGMMA_128                                \
  PKG_WGMMA_64                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71"         \
  ", %72, %73, %74, %75, %76, %77, %78, %79"         \
  ", %80, %81, %82, %83, %84, %85, %86, %87"         \
  ", %88, %89, %90, %91, %92, %93, %94, %95"         \
  ", %96, %97, %98, %99, %100, %101, %102, %103"     \
  ", %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119" \
  ", %120, %121, %122, %123, %124, %125, %126, %127"

// Sums of eight columns, of 32, of 64.
#define PKG_WGMMA_8_SUMS(kind, j)                             \
  kind(sums[0][j]), kind(sums[0][(j) + 1]), kind(sums[1][j]), \
      kind(sums[1][(j) + 1])
#define PKG_WGMMA_32_SUMS(kind, j)                            \
  PKG_WGMMA_8_SUMS(kind, j), PKG_WGMMA_8_SUMS(kind, (j) + 2), \
      PKG_WGMMA_8_SUMS(kind, (j) + 4), PKG_WGMMA_8_SUMS(kind, (j) + 6)
#define PKG_WGMMA_64_SUMS(kind, j) \
  PKG_WGMMA_32_SUMS(kind, j), PKG_WGMMA_32_SUMS(kind, (j) + 8)
#define PKG_WGMMA_128_SUMS(kind, j) \
  PKG_WGMMA_64_SUMS(kind, j), PKG_WGMMA_64_SUMS(kind, (j) + 16)
#define PKG_WGMMA_256_SUMS(kind, j) \
  PKG_WGMMA_128_SUMS(kind, j), PKG_WGMMA_128_SUMS(kind, (j) + 32)

// One instruction: its shape and types, the registers of the sums, then the
// numbers of the operands that follow them.
#define PKG_WGMMA_TEXT(shape, registers, added, operands)                   \
  "{\n.reg .pred added;\nsetp.ne.b32 added, " added                         \
  ", 0;\nwgmma.mma_async.sync.aligned." shape " {" registers "}, " operands \
  ";\n}"
#define PKG_WGMMA_SHARED(columns, types, registers, a, b, added, a_major,      \
                         b_major)                                              \
  asm volatile(PKG_WGMMA_TEXT("m64n" #columns "k16." types, registers, added,  \
                              a ", " b ", added, 1, 1, " a_major ", " b_major) \
               : PKG_WGMMA_##columns##_SUMS("+f", 0)                           \
               : "l"(a_words), "l"(b_words), "r"(static_cast<int>(add)),       \
                 "n"(static_cast<int>(kMajorA)),                               \
                 "n"(static_cast<int>(kMajorB)))
#define PKG_WGMMA_REGISTERS(columns, types, registers, a, b, added, b_major)  \
  asm volatile(PKG_WGMMA_TEXT("m64n" #columns "k16." types, registers, added, \
                              a ", " b ", added, 1, 1, " b_major)             \
               : PKG_WGMMA_##columns##_SUMS("+f", 0)                          \
               : "r"(a_words[0]), "r"(a_words[1]), "r"(a_words[2]),           \
                 "r"(a_words[3]), "l"(b_words), "r"(static_cast<int>(add)),   \
                 "n"(static_cast<int>(kMajorB)))
#define PKG_WGMMA_TF32(columns, registers, a, b, added)                      \
  asm volatile(PKG_WGMMA_TEXT("m64n" #columns "k8.f32.tf32.tf32", registers, \
                              added, a ", " b ", added, 1, 1")               \
               : PKG_WGMMA_##columns##_SUMS("+f", 0)                         \
               : "l"(a_words), "l"(b_words), "r"(static_cast<int>(add)))
#define PKG_WGMMA_INT8(columns, registers, a, b, added)                   \
  asm volatile(PKG_WGMMA_TEXT("m64n" #columns "k32.s32.s8.s8", registers, \
                              added, a ", " b ", added")                  \
               : PKG_WGMMA_##columns##_SUMS("+r", 0)                      \
               : "l"(a_words), "l"(b_words), "r"(static_cast<int>(add)))

#define PKG_WGMMA_INT8_REGISTERS(columns, registers, a, b, added)         \
  asm volatile(PKG_WGMMA_TEXT("m64n" #columns "k32.s32.s8.s8", registers, \
                              added, a ", " b ", added")                  \
               : PKG_WGMMA_##columns##_SUMS("+r", 0)                      \
               : "r"(a_words[0]), "r"(a_words[1]), "r"(a_words[2]),       \
                 "r"(a_words[3]), "l"(b_words), "r"(static_cast<int>(add)))

// The instruction that is for the type and for the columns.
#define PKG_WGMMA_BY_DEPTH_OF(kind)                   \
  if constexpr (kColumns == 64) {                     \
    kind(64, PKG_WGMMA_32, "%32", "%33", "%34");      \
  } else if constexpr (kColumns == 128) {             \
    kind(128, PKG_WGMMA_64, "%64", "%65", "%66");     \
  } else {                                            \
    kind(256, PKG_WGMMA_128, "%128", "%129", "%130"); \
  }
#define PKG_WGMMA_SHARED_OF(types)                                         \
  if constexpr (kColumns == 32) {                                          \
    PKG_WGMMA_SHARED(32, types, PKG_WGMMA_16, "%16", "%17", "%18", "%19",  \
                     "%20");                                               \
  } else if constexpr (kColumns == 64) {                                   \
    PKG_WGMMA_SHARED(64, types, PKG_WGMMA_32, "%32", "%33", "%34", "%35",  \
                     "%36");                                               \
  } else if constexpr (kColumns == 128) {                                  \
    PKG_WGMMA_SHARED(128, types, PKG_WGMMA_64, "%64", "%65", "%66", "%67", \
                     "%68");                                               \
  } else {                                                                 \
    PKG_WGMMA_SHARED(256, types, PKG_WGMMA_128, "%128", "%129", "%130",    \
                     "%131", "%132");                                      \
  }
#define PKG_WGMMA_REGISTERS_OF(types)                                          \
  if constexpr (kColumns == 64) {                                              \
    PKG_WGMMA_REGISTERS(64, types, PKG_WGMMA_32, "{%32, %33, %34, %35}",       \
                        "%36", "%37", "%38");                                  \
  } else if constexpr (kColumns == 128) {                                      \
    PKG_WGMMA_REGISTERS(128, types, PKG_WGMMA_64, "{%64, %65, %66, %67}",      \
                        "%68", "%69", "%70");                                  \
  } else {                                                                     \
    PKG_WGMMA_REGISTERS(256, types, PKG_WGMMA_128, "{%128, %129, %130, %131}", \
                        "%132", "%133", "%134");                               \
  }

// sums += A B, or = A B where not `add`, for 32 bytes of the summed dimension.
// Begins the product; every thread of the warpgroup calls it.
template <class Element, Major kMajorA, Major kMajorB, class Sum, int kOwn>
__device__ __forceinline__ void begin_product(Sum (&sums)[2][kOwn],
                                              const WarpgroupOperand& a,
                                              const WarpgroupOperand& b,
                                              bool add = true) {
  constexpr int kColumns = 4 * kOwn;
  static_assert(kColumns == 64 || kColumns == 128 || kColumns == 256 ||
                (kColumns == 32 && sizeof(Element) == 2));
  static_assert(sizeof(Element) == 2 ||
                (kMajorA == Major::depth && kMajorB == Major::depth));
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const uint64_t a_words = a.words();
  const uint64_t b_words = b.words();
  if constexpr (std::is_same_v<Element, bfloat16>) {
    PKG_WGMMA_SHARED_OF("f32.bf16.bf16")
  } else if constexpr (std::is_same_v<Element, float16>) {
    PKG_WGMMA_SHARED_OF("f32.f16.f16")
  } else if constexpr (std::is_same_v<Element, Tf32>) {
    PKG_WGMMA_BY_DEPTH_OF(PKG_WGMMA_TF32)
  } else {
    static_assert(std::is_same_v<Element, int8_t>);
    PKG_WGMMA_BY_DEPTH_OF(PKG_WGMMA_INT8)
  }
#else
  __trap();
#endif
}

// The same where A is in registers: the words of mma.sync for the 16 rows of
// the warp (device/mma_places.cuh).
template <class Element, Major kMajorB, class Sum, int kOwn>
__device__ __forceinline__ void begin_product(Sum (&sums)[2][kOwn],
                                              const uint32_t (&a_words)[4],
                                              const WarpgroupOperand& b,
                                              bool add = true) {
  constexpr int kColumns = 4 * kOwn;
  static_assert(kColumns == 64 || kColumns == 128 || kColumns == 256);
  static_assert(sizeof(Element) == 2 || kMajorB == Major::depth);
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const uint64_t b_words = b.words();
  if constexpr (std::is_same_v<Element, bfloat16>) {
    PKG_WGMMA_REGISTERS_OF("f32.bf16.bf16")
  } else if constexpr (std::is_same_v<Element, float16>) {
    PKG_WGMMA_REGISTERS_OF("f32.f16.f16")
  } else {
    static_assert(std::is_same_v<Element, int8_t>);
    static_assert(kColumns > 64);
    if constexpr (kColumns == 128) {
      PKG_WGMMA_INT8_REGISTERS(128, PKG_WGMMA_64, "{%64, %65, %66, %67}", "%68",
                               "%69");
    } else {
      PKG_WGMMA_INT8_REGISTERS(256, PKG_WGMMA_128, "{%128, %129, %130, %131}",
                               "%132", "%133");
    }
  }
#else
  __trap();
#endif
}

#undef PKG_WGMMA_REGISTERS_OF
#undef PKG_WGMMA_SHARED_OF
#undef PKG_WGMMA_INT8_REGISTERS
#undef PKG_WGMMA_INT8
#undef PKG_WGMMA_TF32
#undef PKG_WGMMA_BY_DEPTH_OF
#undef PKG_WGMMA_REGISTERS
#undef PKG_WGMMA_SHARED
#undef PKG_WGMMA_TEXT
#undef PKG_WGMMA_256_SUMS
#undef PKG_WGMMA_128_SUMS
#undef PKG_WGMMA_64_SUMS
#undef PKG_WGMMA_32_SUMS
#undef PKG_WGMMA_8_SUMS
#undef PKG_WGMMA_128
#undef PKG_WGMMA_64
#undef PKG_WGMMA_32
#undef PKG_WGMMA_16

// Before products that add to registers, or read such, that the threads have
// written themselves.
__device__ __forceinline__ void order_registers() {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  __trap();
#endif
}

// The products that were begun since the last commit are a group.
__device__ __forceinline__ void commit_products() {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  __trap();
#endif
}

// Until at most `kPending` later groups are on their way.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#else
  __trap();
#endif
}

// Keeps the compiler from moving what it does with the sums to the other side
// of the products that they are waiting for: around the first product and the
// wait.
template <class Sum, int kOwn>
__device__ __forceinline__ void hold_sums(Sum (&sums)[2][kOwn]) {
  PKG_UNROLL
  for (int i = 0; i < 2; ++i) {
    PKG_UNROLL
    for (int j = 0; j < kOwn; ++j) {
      if constexpr (std::is_same_v<Sum, float>) {
        asm volatile("" : "+f"(sums[i][j])::"memory");
      } else {
        asm volatile("" : "+r"(sums[i][j])::"memory");
      }
    }
  }
}

// The same for the words of operand A: around the first product that reads
// them, and where they are made for the next.
template <int kSteps>
__device__ __forceinline__ void hold_words(uint32_t (&words)[kSteps][4]) {
  PKG_UNROLL
  for (int i = 0; i < kSteps; ++i) {
    PKG_UNROLL
    for (int j = 0; j < 4; ++j) {
      asm volatile("" : "+r"(words[i][j])::"memory");
    }
  }
}

// A warpgroup gives registers back, or takes such, and has so many of them for
// a thread: a multiple of 8. (PTX ISA, "setmaxnreg".)
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace pkg::cuda

#else

#include "emulated_wgmma.h"

namespace pkg::cuda {

using emulation::begin_product;
using emulation::commit_products;
using emulation::give_registers;
using emulation::hold_sums;
using emulation::hold_words;
using emulation::order_registers;
using emulation::take_registers;
using emulation::wait_for_products;
using emulation::WarpgroupOperand;

}  // namespace pkg::cuda

#endif
