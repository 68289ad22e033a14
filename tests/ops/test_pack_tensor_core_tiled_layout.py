from __future__ import annotations

from types import MappingProxyType

import pytest
import references
import torch
from operator_tests import OperatorTests
from quantised_samples import INNER_K_TILES, values

import pkg
from pkg.testing import ErrorSample, Sample


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
        ]
        for tiles in INNER_K_TILES:
            for rows, supertiles in ((8, 1), (16, 3), (40, 2)):
                w = values(rows, supertiles * 16 * tiles, seed=1)
                samples.append(Sample((w, tiles), values_only=True))
        return samples

    def errors(self) -> list[ErrorSample]:
        w = values(16, 64)
        return [
            ErrorSample((w, 3), match="inner_k_tiles is 3; it must be 2, 4 or 8"),
            ErrorSample((w, 0), match="inner_k_tiles is 0"),
            ErrorSample((w, -2), match="inner_k_tiles is -2"),
            ErrorSample((w, 8), match=r"\(16, 64\) has 64 columns.*a multiple of 128"),
            ErrorSample((w[:12], 2), match=r"\(12, 64\) has 12 rows.*a multiple of 8"),
            ErrorSample((w[0], 2), match=r"w has shape \(64,\)"),
            ErrorSample((w.long(), 2), match="w is torch.int64; it must be torch.int32"),
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
