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
#define PKG_IMPLEMENT(key, library)                                   \
  void implement_operators(::pkg::KernelLibrary& library);            \
  PKG_IMPLEMENT_IN(PKG_NAMESPACE, key, stable_library) {              \
    ::pkg::KernelLibrary kernels(stable_library, PKG_STRINGIZE(key)); \
    implement_operators(kernels);                                     \
  }                                                                   \
  void implement_operators(::pkg::KernelLibrary& library)
#define PKG_IMPLEMENT_IN(name, key, library) \
  STABLE_TORCH_LIBRARY_IMPL(name, key, library)
