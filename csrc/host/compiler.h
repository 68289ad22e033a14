// The compilers that build this package, and everything in which they differ
// but a shuffle of registers (cpu/simd/transpose.h): GCC, Clang and Apple's
// clang, on Windows clang-cl, whose libraries work with those of Microsoft's
// compiler. That one has no vector types, in which every CPU kernel is written;
// under nvcc it compiles the host side of the CUDA kernels.
#pragma once

#if !defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#error "pkg is built by GCC 11, Clang 14 or newer; on Windows: set CXX=clang-cl"
#endif

// A function that others find in the library by its name.
#if defined(_WIN32)
#define PKG_EXPORT __declspec(dllexport)
#else
#define PKG_EXPORT [[gnu::visibility("default"), gnu::used]]
#endif

// A function that is the same on the host and on a CUDA device.
#ifdef __CUDACC__
#define PKG_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PKG_HOST_DEVICE inline
#endif
