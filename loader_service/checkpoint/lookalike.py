"""Recognises what people find in a `.safetensors` file that is none, from its first 8 bytes.

The first 8 bytes of a real file are a header length below 2**27, so its bytes 4 to 7 are zero: none of the texts and
magic numbers here can be mistaken for one.
"""

from __future__ import annotations

from typing import Final

_SIGNATURES: Final[tuple[tuple[bytes, str], ...]] = (
    (b"version ", "a Git LFS pointer (the file itself was never fetched: run `git lfs pull`)"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes it (a pickle: convert it to safetensors)"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive (unpack it first)"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive (unpack it first)"),
    (b"\xfd7zXZ", "an xz archive (unpack it first)"),
    (b"\x93NUMPY", "a numpy array"),
)
_PICKLE_PROTOCOLS: Final = range(2, 6)


def lookalike(first_bytes: bytes) -> str | None:
    """What a file that begins with these (at most 8) bytes looks like, or None where nothing is recognised."""
    if len(first_bytes) == 8 and not any(first_bytes):
        return "a file that begins with zero bytes (an unfinished download, or a hole that was never written)"
    for signature, words in _SIGNATURES:
        if first_bytes.startswith(signature):
            return words
    text = first_bytes.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").lower()
    if text.startswith((b"<!", b"<htm", b"<?xm", b"<hea", b"<bod")):
        return "an HTML or XML page (an error page was saved instead of the file: download it again)"
    if text.startswith((b"{", b"[")) and any(first_bytes[4:]):
        return "a JSON text without the 8 bytes of header length before it"
    if len(first_bytes) > 1 and first_bytes[0] == 0x80 and first_bytes[1] in _PICKLE_PROTOCOLS and any(first_bytes[4:]):
        return "a pickle (convert it to safetensors)"
    return None
