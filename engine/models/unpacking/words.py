"""Small unsigned integers that share 32-bit words, the first one in the lowest bits."""

import torch

WORD_BITS = 32


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """words: int32 [..., n, ...] -> uint8 [..., n * 32 / bits, ...] along `dim`.

    out[i * (32 / bits) + j] = (words[i] >> bits * j) mod 2^bits
    """
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    moved = words.movedim(dim, -1).unsqueeze(-1)
    values = (moved >> shifts) & ((1 << bits) - 1)  # the sign's copies are masked away
    return values.flatten(-2).movedim(-1, dim).to(torch.uint8)
