#define PKG_ON_CUDA
#include "../../integer_formulas.cpp"
