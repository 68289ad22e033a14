// The scale of a row of quantize_rowwise, the same on the host and on a CUDA
// device.
//
// Eight bits: the largest magnitude over 127. Half a step more on either side
// would make the steps 0.4 % smaller, and then whole numbers up to 127 no
// longer stay as they are.
//
// Four bits: there are eight negative values and seven positive ones, so the
// side on which the largest magnitude lies gets the eight, for which the scale
// may have to be negative (llama.cpp's q4_0 does so too), and the other side
// ends at 7.5 steps. No value is then off by more than half a step, the largest
// is exact unless the other side's is within 1/16 of it, and a step is a 7.5th
// of it at the most. What the choice was among, by the root of the mean of the
// rows' squared errors, relative to the rows; scales are the largest magnitude
// over the number in the head, `turned` with the sign of this one:
//
//                  over 7  over 7.5  over 8  over 9.25  turned 8  this one
//   normal,     8   0.072     0.080   0.086      0.148     0.064     0.064
//              64   0.108     0.103   0.099      0.113     0.095     0.095
//            4096   0.159     0.149   0.139      0.122     0.139     0.141
//   uniform,    8   0.062     0.069   0.077      0.140     0.057     0.056
//            4096   0.071     0.067   0.068      0.104     0.068     0.067
//   Laplace, 4096   0.249     0.233   0.219      0.192     0.219     0.221
//   t(4),    4096   0.458     0.433   0.410      0.363     0.409     0.410
//   relu,      64   0.097     0.095   0.102      0.142     0.085     0.085
//   one value of 100 among normal ones,
//               8   0.027     0.072   0.093      0.199     0.027     0.027
//            4096   0.540     0.542   0.545      0.566     0.540     0.540
//   -1 and 1        0.000     0.067   0.088      0.197     0.088     0.067
//
// To clip at a 9.25th is better for long rows without outliers alone. The best
// divisor of each row, searched by its error, would make 0.109 of the 0.141 and
// cost a pass over the row for each that is tried.
#pragma once

#include "host/compiler.h"

namespace pkg {

// The range of the quantised values.
PKG_HOST_DEVICE int least_quantized(int bits) { return bits == 8 ? -127 : -8; }
PKG_HOST_DEVICE int most_quantized(int bits) { return bits == 8 ? 127 : 7; }

// `positive` and `negative` are the largest magnitudes of either sign, zero
// where there are none, NaN where a value is. The scale is not yet rounded to
// the dtype of the row.
template <class Number>
PKG_HOST_DEVICE Number rowwise_scale(Number positive, Number negative,
                                     int bits) {
  const bool is_turned = !(negative >= positive);
  const Number largest = is_turned ? positive : negative;
  if (bits == 8) {
    return largest / Number(127);
  }
  const Number by_largest = largest / Number(8);
  const Number by_other = (is_turned ? negative : positive) / Number(7.5);
  const Number step = by_other > by_largest ? by_other : by_largest;
  return is_turned ? -step : step;
}

// Whether values may be divided by the scale with its reciprocal r, as a
// division rounds it, and with the same result: y + (value - y scale) r, by
// fused multiply-adds, is the quotient as a division rounds it for every y
// within a unit in its last place (Markstein, Computation of elementary
// functions on the IBM RISC System/6000 processor, 1990), and the first such
// step makes that of value r. Of float, as long as no residual underflows that
// could matter.
template <class Number>
PKG_HOST_DEVICE bool divides_by_reciprocal(Number scale) {
  const Number magnitude = scale < 0 ? -scale : scale;
  return sizeof(Number) == sizeof(float) && magnitude > Number(0x1p-60) &&
         magnitude < Number(0x1p60);
}

}  // namespace pkg
