// Functions and variables that a loaded PyTorch may have or lack, by name.
#pragma once

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace pkg {

// Null where the loaded PyTorch does not have it.
template <class Pointer>
Pointer find_torch_symbol(const char* name) {
#if defined(_WIN32)
  for (const char* library : {"torch_cpu.dll", "torch_python.dll"}) {
    if (const HMODULE module = GetModuleHandleA(library)) {
      if (const FARPROC address = GetProcAddress(module, name)) {
        return reinterpret_cast<Pointer>(address);
      }
    }
  }
  return nullptr;
#else
  return reinterpret_cast<Pointer>(dlsym(RTLD_DEFAULT, name));
#endif
}

}  // namespace pkg
