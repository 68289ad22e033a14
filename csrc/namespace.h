// The operator namespace. pkg.jit builds the same sources under another name,
// so that they can live beside an installed pkg in one process.
#pragma once

#ifndef PKG_NAMESPACE
#define PKG_NAMESPACE pkg
#endif

#define PKG_STRINGIZE_TOKEN(token) #token
#define PKG_STRINGIZE(token) PKG_STRINGIZE_TOKEN(token)
#define PKG_NAMESPACE_TEXT PKG_STRINGIZE(PKG_NAMESPACE)

// Registers implementations for a dispatch key: PKG_IMPLEMENT(CPU, library) {
// library.impl("name", TORCH_BOX(&function)); }
#define PKG_IMPLEMENT(key, library) \
  PKG_IMPLEMENT_IN(PKG_NAMESPACE, key, library)
#define PKG_IMPLEMENT_IN(name, key, library) \
  STABLE_TORCH_LIBRARY_IMPL(name, key, library)
