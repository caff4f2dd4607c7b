# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trellisbank.errors import FormatError
from trellisbank.formats import fp8_block, mxfp4

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
SOUND_FP8 = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)


@given(st.integers(0, 252))
def test_every_mxfp4_code_survives_every_scale(scale):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).reshape(4, 64)
    scales = torch.full((4, 4), scale, dtype=torch.uint8)
    weight = mxfp4.dequantize(codes, scales)
    assert torch.equal(mxfp4.requantize(weight, scales), codes)
    # Values from the specification, in fp64: bf16 must hold them without rounding.
    low, high = codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4
    table = torch.tensor(MAGNITUDES + [-m for m in MAGNITUDES], dtype=torch.float64)
    nibbles = torch.stack((low, high), dim=-1).reshape(4, 128).to(torch.int64)
    assert torch.equal(weight.double(), table[nibbles] * 2.0 ** (scale - 127))


def test_negative_zero_is_kept():
    codes = torch.full((1, 16), 0x08, dtype=torch.uint8).view(torch.int8)
    scales = torch.full((1, 1), 120, dtype=torch.uint8)
    weight = mxfp4.dequantize(codes, scales)
    assert torch.signbit(weight[0, 0::2]).all() and not torch.signbit(weight[0, 1::2]).any()
    assert torch.equal(mxfp4.requantize(weight, scales), codes)


@pytest.mark.parametrize("scale", [253, 254, 255])
def test_mxfp4_scales_that_do_not_survive(scale):
    scales = torch.full((1, 1), scale, dtype=torch.uint8)
    with pytest.raises(FormatError, match=f"found: {scale}"):
        mxfp4.dequantize(torch.zeros(1, 16, dtype=torch.int8), scales)


@pytest.mark.parametrize("value", [5.0, 0.25, 12.0, float("nan"), float("inf")])
def test_mxfp4_refuses_what_is_not_on_its_grid(value):
    weight = torch.zeros(2, 32, dtype=torch.bfloat16)
    weight[1, 3] = value
    with pytest.raises(FormatError, match=r"\[1, 3\]"):
        mxfp4.requantize(weight, torch.full((2, 1), 127, dtype=torch.uint8))


@given(st.integers(3, 246))
def test_every_fp8_code_survives_every_scale(scale):
    codes = SOUND_FP8.view(torch.float8_e4m3fn).reshape(2, 127)
    scales = torch.full((1, 4), scale, dtype=torch.uint8)
    weight = fp8_block.dequantize(codes, scales)
    back = fp8_block.requantize(weight, scales)
    assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(weight.double(), codes.double() * 2.0 ** (scale - 127))


@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**31))
def test_fp8_blocks_and_rows_of_any_size(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(0, 254, (rows, columns), generator=generator)
    codes = SOUND_FP8[picked].view(torch.float8_e4m3fn)
    for block in (fp8_block.BLOCK, fp8_block.ROW_BLOCK):
        shape = (-(-rows // block[0]), -(-columns // block[1]))
        scales = torch.randint(100, 150, shape, generator=generator).to(torch.uint8)
        weight = fp8_block.dequantize(codes, scales, block)
        row, column = rows - 1, columns - 1
        scale = 2.0 ** (int(scales[row // block[0], column // block[1]]) - 127)
        assert float(weight[row, column]) == float(codes[row, column]) * scale
        back = fp8_block.requantize(weight, scales, block)
        assert torch.equal(back.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("scale", [0, 2, 247, 255])
def test_fp8_scales_that_do_not_survive(scale):
    scales = torch.full((1, 1), scale, dtype=torch.uint8)
    with pytest.raises(FormatError, match="3 to 246"):
        fp8_block.dequantize(torch.zeros(1, 32).to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_codes_are_refused(code):
    codes = torch.full((1, 32), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(FormatError, match="NaN"):
        fp8_block.dequantize(codes, torch.full((1, 1), 127, dtype=torch.uint8))


def test_shapes_that_do_not_fit():
    with pytest.raises(FormatError, match="scales do not fit"):
        mxfp4.dequantize(torch.zeros(2, 16, dtype=torch.int8), torch.zeros(2, 2).byte())
    with pytest.raises(FormatError, match="scales do not fit"):
        fp8_block.dequantize(torch.zeros(33, 32).to(torch.float8_e4m3fn), torch.ones(1, 1).byte())


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (torch.zeros(16, dtype=torch.int8), torch.zeros(1, 1, dtype=torch.uint8)),
        (torch.zeros(1, 16, dtype=torch.int8), torch.zeros(1, 1)),
        (torch.zeros(1, 16), torch.zeros(1, 1, dtype=torch.uint8)),
        (torch.zeros(1, 0, dtype=torch.int8), torch.zeros(1, 0, dtype=torch.uint8)),
    ],
    ids=["one axis", "fp32 scales", "fp32 codes", "empty"],
)
def test_tensors_of_another_kind(codes, scales):
    for decode in (mxfp4.dequantize, fp8_block.dequantize):
        with pytest.raises(FormatError, match="wrong dtype or shape"):
            decode(codes, scales)
