// The operator namespace. pkg.jit builds the same sources under another name,
// so that they can live beside an installed pkg in one process.
#pragma once

#include "host/kernel_library.h"

#ifndef PKG_NAMESPACE
#define PKG_NAMESPACE pkg
#endif

#define PKG_STRINGIZE_TOKEN(token) #token
#define PKG_STRINGIZE(token) PKG_STRINGIZE_TOKEN(token)
#define PKG_NAMESPACE_TEXT PKG_STRINGIZE(PKG_NAMESPACE)

// Registers a source file's kernels for a dispatch key: PKG_IMPLEMENT(CPU,
// library) { library.impl<&function>("name"); }
#define PKG_IMPLEMENT(key, library) \
  PKG_IMPLEMENT_NUMBERED(key, library, __COUNTER__)
#define PKG_IMPLEMENT_NUMBERED(key, library, number) \
  PKG_IMPLEMENT_BY(key, library, PKG_JOIN(implement_operators_, number))
#define PKG_IMPLEMENT_BY(key, library, implement)                     \
  void implement(::pkg::KernelLibrary& library);                      \
  PKG_IMPLEMENT_IN(PKG_NAMESPACE, key, stable_library) {              \
    ::pkg::KernelLibrary kernels(stable_library, PKG_STRINGIZE(key)); \
    implement(kernels);                                               \
  }                                                                   \
  void implement(::pkg::KernelLibrary& library)
#define PKG_JOIN(a, b) a##b
#define PKG_IMPLEMENT_IN(name, key, library) \
  STABLE_TORCH_LIBRARY_IMPL(name, key, library)
