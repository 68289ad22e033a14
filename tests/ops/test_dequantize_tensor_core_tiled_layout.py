from __future__ import annotations

from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from quantised_samples import GROUP_SIZES, INNER_K_TILES, scales_and_zeros, words

import pkg
from pkg.testing import ErrorSample, Sample
from pkg.testing.samples import same_bits


def call(rows: int, columns: int, group_size: int, inner_k_tiles: int, **options: object) -> Sample:
    packed = words(rows, columns, inner_k_tiles)
    pairs = scales_and_zeros(rows, columns, group_size)
    return Sample((packed, pairs, group_size, inner_k_tiles), **options)


class TestDequantizeTensorCoreTiledLayout(OperatorTests):
    op = torch.ops.pkg.dequantize_tensor_core_tiled_layout.default
    reference = staticmethod(references.dequantize_tensor_core_tiled_layout)
    function = staticmethod(pkg.ops.dequantize_tensor_core_tiled_layout)
    options = MappingProxyType({"without": {"gradients"}})

    def samples(self) -> list[Sample]:
        samples = [
            call(24, 96, 32, 2, family="two"),
            call(40, 160, 32, 2, family="two"),
            call(24, 256, 128, 8),
            call(0, 64, 64, 4),
            call(16, 0, 32, 4),
        ]
        for tiles in INNER_K_TILES:
            for group_size in GROUP_SIZES:
                samples.append(call(8, 256, group_size, tiles, values_only=True))
                samples.append(call(24, 768, group_size, tiles, values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        packed, pairs = words(16, 64, 2), scales_and_zeros(16, 64, 32)
        return [
            ErrorSample((packed, pairs, 16, 2), match="group_size is 16; it must be 32, 64, 128"),
            ErrorSample((packed, pairs, -32, 2), match="group_size is -32"),
            ErrorSample((packed, pairs, 128, 2), match="64 columns, not a multiple of group_size"),
            ErrorSample(
                (packed, pairs, 64, 2), match=r"\(2, 16, 2\).*must have shape \(1, 16, 2\)"
            ),
            ErrorSample((packed, pairs[:, :8], 32, 2), match=r"\(2, 8, 2\)"),
            ErrorSample((packed, pairs[0], 32, 2), match=r"scales_and_zeros has shape \(16, 2\)"),
            ErrorSample((packed, pairs.float(), 32, 2), match="scales_and_zeros is torch.float32"),
            ErrorSample((packed, pairs, 32, 8), match=r"packed_w has shape \(2, 2, 32, 1\)"),
            ErrorSample((packed.short(), pairs, 32, 2), match="packed_w is torch.int16"),
        ]

    def test_bits(self, device: torch.device) -> None:
        """To the bit, for scales and zeros of any size, infinities and NaN among them."""
        generator = torch.Generator().manual_seed(0)
        packed = words(64, 512, 8)
        bits = torch.randint(-(2**15), 2**15, (16, 64, 2), generator=generator).short()
        pairs = bits.view(torch.bfloat16)
        pairs[3, 5, 0], pairs[4, 6, 1], pairs[5, 7, 0] = torch.inf, -torch.inf, torch.nan
        arguments = (packed, pairs, 32, 8)
        expected = references.dequantize_tensor_core_tiled_layout(*arguments)
        result = pkg.ops.dequantize_tensor_core_tiled_layout(
            packed.to(device), pairs.to(device), 32, 8
        ).cpu()
        assert torch.equal(result.isnan(), expected.isnan())
        assert same_bits(result.nan_to_num(), expected.nan_to_num())
        assert expected.isnan().any()
        assert expected.isinf().any()

    def test_the_sum_is_rounded_once(self, device: torch.device) -> None:
        """Every value with many scales and zeros, against fractions, to the bit.

        A product has up to eleven significant bits, so it may lie between two numbers of bfloat16,
        and then a zero as small as may be decides.
        """
        assert references.fused(3, 129 / 128, -(2.0**-24)) == 3.015625
        assert references.fused(-8, 2.0**125, 2.0**120) == -(2.0**128 - 2.0**120)
        scales = [1 + n / 128 for n in range(128)] + [2.0**-133, 127 * 2.0**-133, 2.0**-126, 0.0]
        scales += [
            sign * n * 2.0**e for sign in (1, -1) for n in (1.5, 1.9921875) for e in (125, 127)
        ]
        scales += [2.0**125, -(2.0**124), -129 / 128, -0.0]
        zeros = [sign * 2.0**e for sign in (1, -1) for e in (*range(-30, 6), -133, -100, -60, 120)]
        zeros += [0.0, -0.0, -129 * 2.0**-31, 255 * 2.0**-20, -255 * 2.0**-10, 255 * 2.0**120]
        pairs = torch.cartesian_prod(*(torch.tensor(each).double() for each in (scales, zeros)))
        assert torch.equal(pairs.bfloat16().double(), pairs)
        pairs = torch.nn.functional.pad(pairs, (0, 0, 0, -len(pairs) % 8)).bfloat16()[None]
        rows = pairs.shape[1]
        values = torch.arange(32, dtype=torch.int32) % 16
        packed = pkg.ops.pack_tensor_core_tiled_layout(values.expand(rows, 32), 2).to(device)
        result = pkg.ops.dequantize_tensor_core_tiled_layout(packed, pairs.to(device), 32, 2).cpu()
        expected = torch.tensor(
            [[references.fused(q - 8, *pair) for q in range(16)] for pair in pairs[0].tolist()],
            dtype=torch.float64,
        )
        assert same_bits(result, expected.bfloat16().repeat(1, 2))
        # float32 would have rounded some of them twice.
        wide = (values - 8).float() * pairs[0, :, :1].float() + pairs[0, :, 1:].float()
        twice = wide.bfloat16() != result
        assert twice.any()
        assert (wide.isinf() & result.isfinite()).any()

    def test_a_gradient_is_refused(self, device: torch.device) -> None:
        packed = words(16, 64, 2).to(device)
        pairs = scales_and_zeros(16, 64, 32).to(device).requires_grad_()
        with pytest.raises(RuntimeError, match=r"requires grad.*scales_and_zeros\.detach"):
            pkg.ops.dequantize_tensor_core_tiled_layout(packed, pairs, 32, 2)
