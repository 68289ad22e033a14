from __future__ import annotations

from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from quantised_samples import INNER_K_TILES, words

import pkg
from pkg.testing import ErrorSample, Sample


class TestUnpackTensorCoreTiledLayout(OperatorTests):
    op = torch.ops.pkg.unpack_tensor_core_tiled_layout.default
    reference = staticmethod(references.unpack_tensor_core_tiled_layout)
    function = staticmethod(pkg.ops.unpack_tensor_core_tiled_layout)
    options = MappingProxyType({"without": {"gradients"}})

    def samples(self) -> list[Sample]:
        samples = [
            Sample((words(24, 96, 2), 2), family="two"),
            Sample((words(40, 160, 2), 2), family="two"),
            Sample((words(24, 256, 8), 8)),
            Sample((words(0, 64, 4), 4)),
            Sample((words(16, 0, 4), 4)),
        ]
        for tiles in INNER_K_TILES:
            for rows, supertiles in ((8, 1), (16, 3), (40, 2)):
                packed = words(rows, supertiles * 16 * tiles, tiles, seed=1)
                samples.append(Sample((packed, tiles), values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        packed = words(16, 64, 2)
        return [
            ErrorSample((packed, 5), match="inner_k_tiles is 5; it must be 2, 4 or 8"),
            ErrorSample((packed, 4), match=r"\(2, 2, 32, 1\); with inner_k_tiles 4"),
            ErrorSample((packed[:, :, :16], 2), match=r"packed_w has shape \(2, 2, 16, 1\)"),
            ErrorSample((packed[0], 2), match=r"packed_w has shape \(2, 32, 1\)"),
            ErrorSample((packed.long(), 2), match="packed_w is torch.int64"),
        ]

    @pytest.mark.parametrize("inner_k_tiles", INNER_K_TILES)
    def test_packing_is_the_inverse(self, device: torch.device, inner_k_tiles: int) -> None:
        packed = words(40, 512, inner_k_tiles).to(device)
        values = pkg.ops.unpack_tensor_core_tiled_layout(packed, inner_k_tiles)
        again = pkg.ops.pack_tensor_core_tiled_layout(values, inner_k_tiles)
        assert torch.equal(again, packed)
