#define PKG_ON_CUDA
#include "cpu/d_sigmoid.cpp"
