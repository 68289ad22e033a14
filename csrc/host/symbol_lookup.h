// Functions of PyTorch's C shim that newer versions have and older ones lack.
#pragma once

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace pkg {

// Null where the loaded PyTorch does not have the function.
template <class Function>
Function find_torch_symbol(const char* name) {
#if defined(_WIN32)
  for (const char* library : {"torch_cpu.dll", "torch_python.dll"}) {
    if (const HMODULE module = GetModuleHandleA(library)) {
      if (const FARPROC address = GetProcAddress(module, name)) {
        return reinterpret_cast<Function>(address);
      }
    }
  }
  return nullptr;
#else
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
#endif
}

}  // namespace pkg
