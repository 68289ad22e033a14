#define PKG_ON_CUDA
#include "cpu/muladd.cpp"
