// What follows the product of linear, named the same on the host and on a CUDA
// device.
#pragma once

namespace pkg {

// Gelu is x Phi(x); GeluTanh its approximation by the hyperbolic tangent.
enum class Activation { None, Relu, Gelu, GeluTanh, Silu };

}  // namespace pkg
