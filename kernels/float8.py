"""8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa, at most 448) inside Triton kernels.

GPUs from Ada on read them by an instruction ("native"), others by shifting bits: the bits of an e4m3
in the place of a wider float's exponent and mantissa are its value times a power of two, subnormal
numbers included.

Source: FP8 Formats for Deep Learning, arXiv 2209.05433.
"""

from __future__ import annotations

from kernels.triton_support import jit, tl


@jit
def from_e4m3(x: tl.tensor, dtype: tl.constexpr, FLOAT8: tl.constexpr) -> tl.tensor:
    """8-bit floats as `dtype`; anything else as it is."""
    out = x
    if FLOAT8 == "native":
        out = x.to(dtype)
    if FLOAT8 == "bits":
        wide = x.to(tl.int16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)  # as fp16: 2^-8 of the value
        out = (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    return out


@jit
def to_e4m3(x: tl.tensor, dtype: tl.constexpr, FLOAT8: tl.constexpr) -> tl.tensor:
    """fp32 to the nearest 8-bit float, at most 448; to `dtype` where there are none.

    By shifting bits everywhere: whoever writes waits for memory, and every GPU rounds alike.
    """
    if FLOAT8 == "none":
        out = x.to(dtype)
    else:
        limited = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = (limited * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2^-120: fp32's bias
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # half to even
        out = (((bits >> 24) & 0x80) | rounded).to(tl.uint8).to(dtype, bitcast=True)
    return out
