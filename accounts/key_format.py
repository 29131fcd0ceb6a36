"""How an API key looks: `sk_ncompass_<id: 12>_<secret: 32><checksum: 6>`, all base 62.

The public id finds the row, the 190-bit secret proves the key, and the CRC-32 lets a typo, or a
scanner's false positive, be told without asking a database. Underscores keep a double click whole.
"""

import secrets
import zlib

from accounts.errors import InvalidKey

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
BRAND = "sk_ncompass_"
ID_LENGTH = 12
SECRET_LENGTH = 32
CHECKSUM_LENGTH = 6
PREFIX_LENGTH = len(BRAND) + ID_LENGTH
KEY_LENGTH = PREFIX_LENGTH + 1 + SECRET_LENGTH + CHECKSUM_LENGTH


def generate() -> str:
    """A new key from the system's randomness."""
    body = f"{BRAND}{_random(ID_LENGTH)}_{_random(SECRET_LENGTH)}"
    return body + _checksum(body)


def prefix_of(plaintext: str) -> str:
    """The public part that finds the key; raises InvalidKey when the key is mistyped."""
    is_whole = len(plaintext) == KEY_LENGTH and plaintext.startswith(BRAND)
    body, checksum = plaintext[:-CHECKSUM_LENGTH], plaintext[-CHECKSUM_LENGTH:]
    if not is_whole or not plaintext.isascii() or _checksum(body) != checksum:
        raise InvalidKey("This is not a valid API key: check that it was copied whole.")
    return plaintext[:PREFIX_LENGTH]


def _random(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


def _checksum(body: str) -> str:
    value = zlib.crc32(body.encode())
    digits = ""
    for _ in range(CHECKSUM_LENGTH):
        value, digit = divmod(value, len(ALPHABET))
        digits = ALPHABET[digit] + digits
    return digits
