#define PKG_ON_CUDA
#include "cpu/mul.cpp"
