"""The plain, obviously right version of each operator, which everything is compared to.

Each takes the operator's arguments and runs in any dtype. In float64 it gives what the operator
should give exactly; in a lower dtype, what plain PyTorch makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import copysign, frexp, inf, isfinite
from typing import Any

import torch
from torch import Tensor


def mul(a: Tensor, b: Tensor) -> Tensor:
    return a * b


def muladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    dtype = torch.result_type(a, b)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return a.to(dtype) * b.to(dtype) + c


def add_out(a: Tensor, b: Tensor, out: Tensor) -> None:
    out.copy_(a + b)


def d_sigmoid(z: Tensor) -> Tensor:
    # sigmoid(-z) is 1 - sigmoid(z) without the cancellation.
    return torch.sigmoid(z) * torch.sigmoid(-z)


def d_sigmoid_backward(grad: Tensor, z: Tensor) -> Tensor:
    above, below = torch.sigmoid(z), torch.sigmoid(-z)
    return grad * (above * below * (below - above))


def matmul(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    dtype = out_dtype or a.dtype
    if not dtype.is_floating_point:
        return torch.matmul(a.double(), b.double()).to(dtype)  # exact below 2**53
    return torch.matmul(a.to(dtype), b.to(dtype))


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """The scaled, capped, biased and masked scores, of shape (..., L, S)."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // max(key.shape[-3], 1), -3)
    # Without a head dimension every score is zero, whatever the scale.
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores + alibi_bias(alibi_slopes, *scores.shape[-2:]).to(scores.dtype)
    seen = keys_in_window(*scores.shape[-2:], window_left, window_right).to(query.device)
    if is_causal:
        seen = seen.tril()
    if is_causal or window_left >= 0 or window_right >= 0:
        scores = scores.masked_fill(~seen, -torch.inf)
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -torch.inf)
    return scores + attn_mask


def keys_in_window(rows: int, columns: int, left: int, right: int) -> Tensor:
    """Flash-attn's window, key by key: aligned to the last query and the last key."""
    own = torch.arange(rows)[:, None] + columns - rows
    key = torch.arange(columns)
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if left >= 0:
        seen &= own - key <= left
    if right >= 0:
        seen &= key - own <= right
    return seen


def alibi_bias(slopes: Tensor, rows: int, columns: int) -> Tensor:
    """Flash-attn's bias: a slope times how far a key is from the query's own."""
    own = torch.arange(rows)[:, None] + columns - rows
    distance = (own - torch.arange(columns)).abs()
    return -slopes[..., None, None] * distance.to(slopes)


class _AttendToValues(torch.autograd.Function):
    """Softmax of the scores, dropout, product with the values; with FlashAttention-2's gradient.

    Its formulas (arXiv 2307.08691, algorithm 2) on whole matrices: P = exp(S - L) from the rounded
    log-sum-exp L, dP = dO V^T, D = rowsum(dO O), dS = P (dP - D). Autograd of the softmax keeps P,
    and sums P dP for D, whose rounding errors are those of dP and cancel in part: as a measure of
    error it would ask for another algorithm.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, value: Tensor, factors: Tensor) -> Tensor:
        excluded = (scores == -torch.inf).all(-1, keepdim=True)
        # A row without a key gets weights of zero; the softmax alone would make them NaN.
        weights = torch.softmax(scores.masked_fill(excluded, 0), -1).masked_fill(excluded, 0)
        return (weights * factors).to(value.dtype) @ value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        scores, value, factors, output = ctx.saved_tensors
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        excluded = (scores == -torch.inf).all(-1, keepdim=True)
        log_sum_exp = torch.logsumexp(wide.masked_fill(excluded, 0), -1, keepdim=True)
        # An infinite score leaves no weight that is a number, also where exp(-inf) would be 0.
        log_sum_exp = log_sum_exp.masked_fill(log_sum_exp.isinf(), torch.nan)
        weights = (wide - log_sum_exp).exp().masked_fill(excluded, 0).to(scores.dtype)
        products = grad @ value.mT * factors
        if grad.dtype == torch.float64:
            # As a product, which pkg.testing has accurate: where one key is seen, dP - D is 0.
            dots = (grad[..., None, :] @ output[..., None])[..., 0]
        else:
            dots = (grad * output).sum(-1, keepdim=True)
        grad_scores = weights * (products - dots)
        grad_value = (weights * factors).to(value.dtype).mT @ grad
        return (
            grad_scores.sum_to_size(scores.shape).to(scores.dtype),
            grad_value.sum_to_size(value.shape),
            None,
        )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    *,
    kept: Tensor | None = None,
) -> Tensor:
    """Attention by its definition; ``kept`` says which weights dropout leaves, in (..., L, S)."""
    options = (is_causal, scale, enable_gqa, window_left, window_right, softcap, alibi_slopes)
    scores = attention_scores(query, key, attn_mask, *options)
    factors = scores.new_ones(())
    if kept is not None:
        # Everything is dropped at 1, where the survivors' factor has no value.
        factors = kept.to(scores.dtype) / (1 - dropout_p) if dropout_p < 1 else factors * 0
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // max(value.shape[-3], 1), -3)
    return _AttendToValues.apply(scores, value, factors)


def attention_log_sum_exp(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """The logarithm of the sum of the exponentials of each row of scores, of shape (..., L)."""
    options = (is_causal, scale, enable_gqa, window_left, window_right, softcap, alibi_slopes)
    return attention_scores(query, key, attn_mask, *options).logsumexp(-1)


def packed_sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> list[tuple[slice, slice]]:
    """Of each sequence of a packed batch, where its queries and its keys lie.

    What of a sequence lies beyond the maximum is no part of it.
    """
    sides = [
        [slice(begin, min(end, begin + most)) for begin, end in pairwise(offsets.tolist())]
        for offsets, most in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k))
    ]
    return list(zip(*sides, strict=True))


def scaled_dot_product_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """Sequence by sequence; ``kept`` has the shape (B, Hq, max_seqlen_q, max_seqlen_k).

    Zeros for the tokens of no sequence.
    """
    most = (max_seqlen_q, max_seqlen_k)
    outputs = []
    done = 0
    for index, (rows, columns) in enumerate(packed_sequences(cu_seqlens_q, cu_seqlens_k, *most)):
        outputs.append(query.new_zeros(rows.start - done, query.shape[1], value.shape[2]))
        done = rows.stop
        q, k, v = (t.transpose(0, 1) for t in (query[rows], key[columns], value[columns]))
        scores = (q.shape[1], k.shape[1])
        mask = None
        if causal:
            mask = torch.ones(scores, dtype=torch.bool, device=q.device).tril(scores[1] - scores[0])
        own = None if kept is None else kept[index, :, : scores[0], : scores[1]]
        extras = (window_left, window_right, softcap, slopes_of_sequence(alibi_slopes, index))
        output = scaled_dot_product_attention(
            q, k, v, mask, dropout_p, False, softmax_scale, True, *extras, kept=own
        )
        outputs.append(output.transpose(0, 1))
    outputs.append(query.new_zeros(len(query) - done, query.shape[1], value.shape[2]))
    return torch.cat(outputs)


def slopes_of_sequence(slopes: Tensor | None, index: int) -> Tensor | None:
    """Those of the heads of one sequence, of (heads) or (sequences, heads)."""
    return slopes[index] if slopes is not None and slopes.dim() == 2 else slopes


def packed_log_sum_exp(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """The log-sum-exp of each query of a packed batch, of shape (Hq, total_q)."""
    most = (max_seqlen_q, max_seqlen_k)
    sums = []
    done = 0
    for index, (rows, columns) in enumerate(packed_sequences(cu_seqlens_q, cu_seqlens_k, *most)):
        sums.append(query.new_full((query.shape[1], rows.start - done), -torch.inf))
        done = rows.stop
        q, k = query[rows].transpose(0, 1), key[columns].transpose(0, 1)
        mask = None
        if causal:
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
            mask = mask.tril(k.shape[1] - q.shape[1])
        extras = (window_left, window_right, softcap, slopes_of_sequence(alibi_slopes, index))
        sums.append(attention_log_sum_exp(q, k, mask, False, softmax_scale, True, *extras))
    sums.append(query.new_full((query.shape[1], len(query) - done), -torch.inf))
    return torch.cat(sums, -1)


def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cache_lengths: Tensor,
    block_table: Tensor | None = None,
    scale: float | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Row by row: the keys that it sees are gathered, and nothing else is looked at."""
    batch, heads, rows, head_size = query.shape
    scale = max(head_size, 1) ** -0.5 if scale is None else scale
    output = query.new_zeros(batch, heads, rows, value_cache.shape[-1])
    for b, length in enumerate(cache_lengths.tolist()):
        keys, values = (
            cache[b]
            if block_table is None
            else torch.cat([cache[p] for p in block_table[b].tolist() if 0 <= p < len(cache)], 1)
            for cache in (key_cache, value_cache)
        )
        for row in range(rows):
            end = max(length - rows + row + 1, 0)
            seen = slice(0 if window_left < 0 else max(end - 1 - window_left, 0), end)
            slopes = slopes_of_sequence(alibi_slopes, b)
            for head in range(heads if end else 0):
                of_head = head * keys.shape[0] // heads
                scores = keys[of_head, seen] @ query[b, head, row] * scale
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                if slopes is not None:
                    before = torch.arange(seen.start, end, device=scores.device) - (end - 1)
                    scores = scores + (slopes[head] * before).to(scores.dtype)
                weights = torch.softmax(scores, 0)
                output[b, head, row] = weights @ values[of_head, seen]
    return output


def activated(x: Tensor, name: str | None) -> Tensor:
    if name is None:
        return x
    if name == "relu":
        return torch.relu(x)
    if name == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="none" if name == "gelu" else "tanh")


def linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    return linear_forward(input, weight, bias, activation)[0]


def linear_forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """The output, and the activation's argument where the derivative needs it."""
    if weight.dim() == 1 and bias is not None:  # PyTorch takes no bias there
        sums = torch.nn.functional.linear(input, weight) + bias
    else:
        sums = torch.nn.functional.linear(input, weight, bias)
    kept = activation not in (None, "relu")
    return activated(sums, activation), sums if kept else sums.new_empty(0)


def linear_activation_backward(grad: Tensor, saved: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, saved, 0)
    if activation == "gelu":
        density = 0.3989422804014327 * torch.exp(-0.5 * saved * saved)
        return grad * (0.5 * torch.erfc(saved * -(0.5**0.5)) + saved * density)
    # x sigmoid(v). PyTorch's own formulas have 1 - sigmoid(v), or 1 - tanh(v / 2)**2, which cancel
    # so much in float64 too that they are no reference.
    v, slope = saved, torch.ones_like(saved)
    if activation == "gelu_tanh":
        scale = 1.5957691216057308  # sqrt(8 / pi)
        v = scale * (saved + 0.044715 * saved**3)
        slope = scale * (1 + 3 * 0.044715 * saved**2)
    above, below = torch.sigmoid(v), torch.sigmoid(-v)
    return grad * (above + saved * (above * below) * slope)


def packed_linear(
    input: Tensor,
    weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Of a weight that lies in the corner of a tensor as large as a packed one."""
    return linear(input, weight[:out_features, : input.shape[-1]], bias, activation)


def pack_tensor_core_tiled_layout(w: Tensor, inner_k_tiles: int) -> Tensor:
    """Word by word, as the layout is written down."""
    if w.dtype == torch.uint8:  # the even column in the high four bits
        w = torch.stack([w >> 4, w & 15], -1).flatten(-2).int()
    rows, columns = w.shape
    supertiles, words_of_lane = columns // (16 * inner_k_tiles), inner_k_tiles // 2
    tiles = (rows + 7) // 8
    packed = torch.zeros(tiles, supertiles, 32, words_of_lane, dtype=torch.int64)
    values = w.tolist() + [[0] * columns] * (8 * tiles - rows)
    for n8 in range(tiles):
        for ko in range(supertiles):
            for t in range(32):
                row = values[8 * n8 + t // 4]
                for word in range(words_of_lane):
                    first = (ko * inner_k_tiles + 2 * word) * 16 + 2 * (t % 4)
                    v = [row[base + i] for base in (first, first + 16) for i in (0, 1, 8, 9)]
                    nibbles = [v[0], v[2], v[4], v[6], v[1], v[3], v[5], v[7]]
                    packed[n8, ko, t, word] = sum(v << (4 * i) for i, v in enumerate(nibbles))
    # The same 32 bits as a signed number.
    return (packed - ((packed >> 31) << 32)).int().to(w.device)


@cache
def _places(rows: int, columns: int, inner_k_tiles: int) -> Tensor:
    """The place in (rows, columns) of each value of a packed weight, found by packing places."""
    places = torch.arange(rows * columns, dtype=torch.int32).view(rows, columns)
    where = torch.zeros(rows * columns, dtype=torch.int64)
    # A value has four bits, so the numbers of the places are packed digit by digit.
    for shift in range(0, max(rows * columns - 1, 1).bit_length(), 4):
        digits = pack_tensor_core_tiled_layout((places >> shift) & 15, inner_k_tiles)
        where += _nibbles(digits) << shift
    return where


def unpack_tensor_core_tiled_layout(packed_w: Tensor, inner_k_tiles: int) -> Tensor:
    rows = packed_w.shape[0] * 8
    columns = packed_w.shape[1] * 16 * inner_k_tiles
    values = torch.zeros(rows * columns, dtype=torch.int32)
    values[_places(rows, columns, inner_k_tiles)] = _nibbles(packed_w.cpu()).int()
    return values.view(rows, columns).to(packed_w.device)


def _nibbles(words: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4)
    return ((words.reshape(-1, 1).long() >> shifts) & 15).flatten()


def dequantized(
    packed_w: Tensor, scales_and_zeros: Tensor, group_size: int, inner_k_tiles: int
) -> Tensor:
    """The weight in the dtype of the scales."""
    values = unpack_tensor_core_tiled_layout(packed_w, inner_k_tiles)
    scales, zeros = scales_and_zeros.repeat_interleave(group_size, 0).unbind(-1)
    return (values - 8).to(scales.dtype) * scales.mT + zeros.mT


def dequantize_tensor_core_tiled_layout(
    packed_w: Tensor, scales_and_zeros: Tensor, group_size: int, inner_k_tiles: int
) -> Tensor:
    """By fractions, and so rounded once."""
    values = unpack_tensor_core_tiled_layout(packed_w, inner_k_tiles).long()
    pairs = scales_and_zeros.double().transpose(0, 1)
    weights = [[fused(q - 8, *pair) for q in range(16)] for pair in pairs.flatten(0, 1).tolist()]
    table = torch.tensor(weights, dtype=torch.float64).view(*pairs.shape[:2], 16)
    groups = values.unflatten(-1, (pairs.shape[1], group_size))
    return table.to(values.device).gather(-1, groups).flatten(-2).bfloat16()


def fused(whole: int, scale: float, zero: float) -> float:
    """``whole * scale + zero`` of bfloat16, rounded once to it, to nearest even."""
    if not (isfinite(scale) and isfinite(zero)):
        return whole * scale + zero
    exact = whole * Fraction(scale) + Fraction(zero)
    if exact == 0:
        return whole * scale + zero  # which zero it is
    # frexp's exponent is one more, of a value from 0.5 to 1; eight bits are kept, and those of
    # denormal numbers fewer.
    unit = Fraction(2) ** (max(frexp(float(exact))[1], -125) - 8)
    rounded = round(exact / unit) * unit
    return float(rounded) if abs(rounded) < 2**128 else copysign(inf, float(exact))


def int4_linear(
    input: Tensor,
    packed_w: Tensor,
    scales_and_zeros: Tensor,
    group_size: int,
    inner_k_tiles: int,
    bias: Tensor | None = None,
) -> Tensor:
    """On a weight of real numbers, which only the product's dtype rounds."""
    wide = scales_and_zeros.to(torch.float64 if input.dtype == torch.float64 else torch.float32)
    weight = dequantized(packed_w, wide, group_size, inner_k_tiles).to(input.dtype)
    if input.dtype != torch.float64:
        return torch.nn.functional.linear(input, weight, bias)
    product = input @ weight.mT  # of which the exact one is taken, unlike that of linear
    return product if bias is None else product + bias


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


class _Shifts:
    """The parameters of spatial_correlation_sample, for images of one shape."""

    def __init__(self, images: Tensor, *options: int | Sequence[int]) -> None:
        self.kernel, patch, self.stride, self.padding, self.dilation, step = map(_pair, options)
        self.patch = patch
        self.size = images.shape[2:]
        self.shifts = [
            [(p - (patch[axis] - 1) // 2) * step[axis] for p in range(patch[axis])]
            for axis in range(2)
        ]
        self.output = [
            (size + 2 * pad - (kernel - 1) * dilation - 1) // stride + 1
            for size, pad, kernel, dilation, stride in zip(
                self.size, self.padding, self.kernel, self.dilation, self.stride, strict=True
            )
        ]

    def pixels(self, ph: int, pw: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """The pixels of input1 whose partner exists, and their partners in input2."""
        pairs = zip(self.size, (self.shifts[0][ph], self.shifts[1][pw]), strict=True)
        ranges = [(max(0, -s), max(0, -s, min(size, size - s)), s) for size, s in pairs]
        first = tuple(slice(begin, end) for begin, end, _ in ranges)
        second = tuple(
            slice(begin + s, end + s) if end > begin else slice(0, 0) for begin, end, s in ranges
        )
        return first, second  # type: ignore[return-value]

    def windows(self) -> list[tuple[slice, slice]]:
        """For each place of the kernel window, the pixels of the padded image that it visits."""
        along = [
            [
                slice(k * dilation, k * dilation + (count - 1) * stride + 1, stride)
                for k in range(kernel)
            ]
            for kernel, dilation, count, stride in zip(
                self.kernel, self.dilation, self.output, self.stride, strict=True
            )
        ]
        return [(rows, columns) for rows in along[0] for columns in along[1]]

    def padded(self, images: Tensor) -> Tensor:
        return torch.nn.functional.pad(
            images, (self.padding[1], self.padding[1], self.padding[0], self.padding[0])
        )

    def cropped(self, images: Tensor) -> Tensor:
        (top, left), (height, width) = self.padding, self.size
        return images[..., top : top + height, left : left + width]


def spatial_correlation_sample(
    input1: Tensor,
    input2: Tensor,
    kernel_size: int | Sequence[int] = 1,
    patch_size: int | Sequence[int] = 1,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    dilation_patch: int | Sequence[int] = 1,
) -> Tensor:
    """Shift by shift: the products that exist, in an image of zeros; then the sums of windows."""
    options = (kernel_size, patch_size, stride, padding, dilation, dilation_patch)
    plan = _Shifts(input1, *options)
    results = []
    for ph in range(plan.patch[0]):
        for pw in range(plan.patch[1]):
            first, second = plan.pixels(ph, pw)
            products = input1.new_zeros(input1.shape[0], *plan.size)
            products[:, first[0], first[1]] = (
                input1[:, :, first[0], first[1]] * input2[:, :, second[0], second[1]]
            ).sum(1)
            image = plan.padded(products)
            results.append(sum(image[:, rows, columns] for rows, columns in plan.windows()))
    return torch.stack(results, 1).unflatten(1, plan.patch)


def spatial_correlation_sample_backward(
    grad: Tensor, other: Tensor, of_input2: bool, *options: int | Sequence[int]
) -> Tensor:
    """The same backwards; what no output reads has no part in a gradient, even where it is NaN."""
    plan = _Shifts(other, *options)
    read = torch.zeros(plan.size, dtype=torch.bool, device=other.device)
    read = plan.padded(read)
    for rows, columns in plan.windows():
        read[rows, columns] = True
    read = plan.cropped(read)
    result = torch.zeros_like(other)
    for ph in range(plan.patch[0]):
        for pw in range(plan.patch[1]):
            spread = plan.padded(other.new_zeros(other.shape[0], *plan.size))
            for rows, columns in plan.windows():
                spread[:, rows, columns] += grad[:, ph, pw]
            first, second = plan.pixels(ph, pw)
            to, by = (second, first) if of_input2 else (first, second)
            factor = plan.cropped(spread)[:, None, first[0], first[1]]
            terms = factor * other[:, :, by[0], by[1]]
            result[:, :, to[0], to[1]] += terms.where(read[first[0], first[1]], 0.0)
    return result


def rotary_embedding(
    input: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> Tensor:
    half = cos.shape[-1]
    turned, rest = input[..., : 2 * half], input[..., 2 * half :]
    if interleaved:
        x, y = turned[..., 0::2], turned[..., 1::2]
    else:
        x, y = turned[..., :half], turned[..., half:]
    pair = x * cos - y * sin, y * cos + x * sin
    together = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([together.to(input.dtype), rest], -1)


def rotary_embedding_backward(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return rotary_embedding(grad, cos, -sin, interleaved=interleaved)


def lltm(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    return lltm_forward(input, weights, bias, old_h, old_cell)[:2]


def lltm_sequence(
    input: Tensor, weights: Tensor, bias: Tensor, old_h: Tensor, old_cell: Tensor
) -> tuple[Tensor, Tensor]:
    return lltm_forward(input, weights, bias, old_h, old_cell)[:2]


def lltm_forward(
    input: Tensor, weights: Tensor, bias: Tensor, h: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """States, cells and gates after each step; of one step without that dimension."""
    states, cells, all_gates = [], [], []
    for x in input if input.dim() == 3 else [input]:
        gates = torch.nn.functional.linear(torch.cat([h, x], -1), weights, bias.flatten())
        in_gate, out_gate, candidate = gates.unflatten(-1, (3, h.shape[-1])).unbind(-2)
        cell = cell + torch.nn.functional.elu(candidate) * torch.sigmoid(in_gate)
        h = torch.tanh(cell) * torch.sigmoid(out_gate)
        states.append(h)
        cells.append(cell)
        all_gates.append(gates)
    if input.dim() == 2:
        return states[0], cells[0], all_gates[0]
    if not states:
        empty = h.new_empty(0, *h.shape)
        # So that no argument is without a gradient.
        zero = sum((t.sum() * 0 for t in (input, weights, bias, h, cell)), h.new_zeros(()))
        return empty + zero, empty + zero, empty.repeat(1, 1, 3) + zero
    return torch.stack(states), torch.stack(cells), torch.stack(all_gates)


def lltm_backward(
    grad_hidden: Tensor | None,
    grad_cells: Tensor | None,
    grad_gates: Tensor | None,
    gates: Tensor,
    hidden: Tensor,
    cells: Tensor,
    input: Tensor,
    weights: Tensor,
    old_h: Tensor,
    needs_input: bool,
    needs_weights: bool,
    needs_old_h: bool,
) -> tuple[Tensor, ...]:
    """The chain rule, a step after the other, from the last."""
    is_cell, size = input.dim() == 2, old_h.shape[-1]
    steps = range(1 if is_cell else len(input))

    def at(tensor: Tensor | None, step: int) -> Tensor | float:
        return 0.0 if tensor is None else tensor if is_cell else tensor[step]

    grad_h = grad_cell = torch.zeros_like(old_h)
    grad_input, grad_weights = [], torch.zeros_like(weights)
    grad_bias = weights.new_zeros(weights.shape[0])
    for step in reversed(steps):
        in_gate, out_gate, candidate = at(gates, step).unflatten(-1, (3, size)).unbind(-2)
        sigma, opened = torch.sigmoid(in_gate), torch.sigmoid(out_gate)
        squashed = torch.tanh(at(cells, step))
        grad_h = grad_h + at(grad_hidden, step)
        grad_cell = grad_cell + at(grad_cells, step) + grad_h * opened * (1 - squashed**2)
        grad = torch.cat(
            [
                grad_cell * torch.nn.functional.elu(candidate) * sigma * torch.sigmoid(-in_gate),
                grad_h * squashed * opened * torch.sigmoid(-out_gate),
                grad_cell * sigma * torch.exp(candidate.clamp(max=0)),
            ],
            -1,
        )
        grad = grad + at(grad_gates, step)
        before = old_h if step == 0 else hidden[step - 1]
        grad_weights = grad_weights + grad.mT @ torch.cat([before, at(input, step)], -1)
        grad_bias = grad_bias + grad.sum(0)
        grad_input.append(grad @ weights[:, size:])
        grad_h = grad @ weights[:, :size]
    if is_cell:
        of_input = grad_input[0]
    else:
        of_input = torch.stack(grad_input[::-1]) if grad_input else torch.zeros_like(input)
    nothing = weights.new_empty(0)
    return (
        of_input if needs_input else nothing,
        grad_weights if needs_weights else nothing,
        grad_bias,
        grad_h if needs_old_h else nothing,
        grad_cell,
    )
