"""Encodes PNG images with 8 bits per channel, without using an image library."""

from __future__ import annotations

import struct
import zlib

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOR_TYPES = {1: 0, 3: 2, 4: 6}
"""Maps the number of channels to the PNG color type for grayscale, RGB or RGBA images."""


def encode_png(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """Encode `pixels`, which contains height x width x channels bytes, as PNG."""
    length = width * channels
    rows = b"".join(b"\0" + pixels[start : start + length] for start in range(0, len(pixels), length))
    header = struct.pack(">IIBBBBB", width, height, 8, COLOR_TYPES[channels], 0, 0, 0)
    return SIGNATURE + b"".join(
        _chunk(kind, data)
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b""))
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
