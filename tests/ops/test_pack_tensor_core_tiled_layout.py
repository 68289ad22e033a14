from __future__ import annotations

from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from quantised_samples import INNER_K_TILES, values
from torch import Tensor

import pkg
from pkg.testing import ErrorSample, Sample


def pairs(rows: int, columns: int) -> Tensor:
    """uint8: two values in each byte."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)


class TestPackTensorCoreTiledLayout(OperatorTests):
    op = torch.ops.pkg.pack_tensor_core_tiled_layout.default
    reference = staticmethod(references.pack_tensor_core_tiled_layout)
    function = staticmethod(pkg.ops.pack_tensor_core_tiled_layout)
    options = MappingProxyType({"without": {"gradients"}})

    def samples(self) -> list[Sample]:
        samples = [
            Sample((values(24, 96), 2), family="two"),
            Sample((values(40, 160), 2), family="two"),
            Sample((values(24, 256), 8)),
            Sample((values(0, 64), 4)),
            Sample((values(16, 0), 4)),
            Sample((values(13, 96), 2)),
            Sample((values(1, 128), 8)),
            Sample((pairs(24, 96), 2)),
            Sample((pairs(13, 256), 8)),
            Sample((pairs(0, 64), 4)),
            Sample((pairs(16, 0), 4)),
        ]
        for tiles in INNER_K_TILES:
            for rows, supertiles in ((8, 1), (16, 3), (40, 2)):
                w = values(rows, supertiles * 16 * tiles, seed=1)
                samples.append(Sample((w, tiles), values_only=True))
            for rows in range(1, 18):
                samples.append(Sample((values(rows, 32 * tiles), tiles), values_only=True))
                samples.append(Sample((pairs(rows, 32 * tiles), tiles), values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        w = values(16, 64)
        return [
            ErrorSample((w, 3), match="inner_k_tiles is 3; it must be 2, 4 or 8"),
            ErrorSample((w, 0), match="inner_k_tiles is 0"),
            ErrorSample((w, -2), match="inner_k_tiles is -2"),
            ErrorSample((w, 8), match=r"\(16, 64\) has 64 columns.*a multiple of 128"),
            ErrorSample(
                (w[:, :16].byte(), 4), match=r"\(16, 16\) has 32 columns.*a multiple of 64"
            ),
            ErrorSample((w[0], 2), match=r"w has shape \(64,\)"),
            ErrorSample((w.long(), 2), match="w is torch.int64; it must be torch.int32.*uint8"),
            ErrorSample((w.char(), 2), match="w is torch.int8"),
            ErrorSample((w.float(), 2), match="w is torch.float32"),
        ]

    @pytest.mark.parametrize("value", [16, -1, 2**31 - 1])
    def test_a_value_of_five_bits_is_refused(self, value: int) -> None:
        w = values(16, 64)
        w[9, 63] = value
        with pytest.raises(RuntimeError, match="a value in row 9 that is not from 0 to 15"):
            pkg.ops.pack_tensor_core_tiled_layout(w, 2)

    def test_the_layout_in_words(self) -> None:
        """Lane 5 of row tile 1 holds row 9, its second word of supertile 1 columns from 162 on."""
        w = torch.zeros(16, 256, dtype=torch.int32)
        first = (1 * 8 + 2 * 1) * 16 + 2 * 1
        for place, column in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
            w[9, first + column] = place + 1
        packed = pkg.ops.pack_tensor_core_tiled_layout(w, 8)
        assert packed.shape == (2, 2, 32, 4)
        assert packed[1, 1, 5, 1] == 0x87654321 - 2**32
        assert packed.count_nonzero() == 1

    @pytest.mark.parametrize("inner_k_tiles", INNER_K_TILES)
    def test_bytes_are_what_pytorch_takes(self, device: torch.device, inner_k_tiles: int) -> None:
        """The even column is in the high four bits; on CUDA PyTorch's own operator says so."""
        whole = values(24, 256).to(device)
        both = (whole[:, ::2] << 4 | whole[:, 1::2]).to(torch.uint8)
        packed = pkg.ops.pack_tensor_core_tiled_layout(both, inner_k_tiles)
        assert torch.equal(packed, pkg.ops.pack_tensor_core_tiled_layout(whole, inner_k_tiles))
        if device.type == "cuda":
            theirs = torch.ops.aten._convert_weight_to_int4pack(both, inner_k_tiles)
            assert torch.equal(packed, theirs)

    @pytest.mark.parametrize("rows", [1, 9, 15])
    def test_rows_that_fill_up_a_tile_are_zero(self, device: torch.device, rows: int) -> None:
        """So every operator that reads the weight sees a multiple of eight of them."""
        w = values(rows, 64).to(device)
        packed = pkg.ops.pack_tensor_core_tiled_layout(w, 4)
        all_rows = (rows + 7) // 8 * 8
        assert packed.shape == (all_rows // 8, 1, 32, 2)
        unpacked = pkg.ops.unpack_tensor_core_tiled_layout(packed, 4)
        assert unpacked.shape == (all_rows, 64)
        assert torch.equal(unpacked[:rows], w)
        assert not unpacked[rows:].any()
        scales = torch.tensor([0.5, 0.25]).bfloat16().to(device).expand(2, all_rows, 2)
        weight = pkg.ops.dequantize_tensor_core_tiled_layout(packed, scales, 32, 4)
        assert torch.equal(weight[:rows].float(), (w - 8) * 0.5 + 0.25)
        input = torch.ones(3, 64, device=device)
        result = pkg.ops.int4_linear(input, packed, scales, 32, 4)
        assert torch.equal(result, weight.float().sum(1).expand(3, all_rows))
