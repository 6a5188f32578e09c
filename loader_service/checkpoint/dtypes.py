"""The safetensors dtype codes: their width in bits and the torch dtype that holds them.

Pure data: torch is named, not imported. A dtype's id is its place in `DTYPE_LIST`; catalogs keep ids in a numpy column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

DTypeCode = Literal[
    "BOOL",
    "U8",
    "I8",
    "U16",
    "I16",
    "U32",
    "I32",
    "U64",
    "I64",
    "F16",
    "BF16",
    "F32",
    "F64",
    "C64",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
]


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype of the format.

    `bits` is the width of one element as the header's shape counts them. `torch_name` is the attribute of `torch` that
    holds such elements, None where torch has none (F6). Two F4 elements share a byte and one `float4_e2m1fn_x2`, so
    torch sees the last dimension halved.
    """

    code: DTypeCode
    bits: int
    torch_name: str | None


_BITS_AND_TORCH: Final[Mapping[DTypeCode, tuple[int, str | None]]] = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
}

DTYPE_LIST: Final[tuple[DType, ...]] = tuple(DType(code, *_BITS_AND_TORCH[code]) for code in get_args(DTypeCode))
"""Every dtype; the index in this tuple is the dtype's id."""

DTYPES: Final[Mapping[str, DType]] = MappingProxyType({dtype.code: dtype for dtype in DTYPE_LIST})
"""Every dtype by its code as the header writes it."""

DTYPE_IDS: Final[Mapping[str, int]] = MappingProxyType({dtype.code: i for i, dtype in enumerate(DTYPE_LIST)})
"""Every dtype's id by its code."""


def dtype_id(code: str) -> int:
    """The id of a dtype code. Raises KeyError for a code that the format does not know."""
    return DTYPE_IDS[code]
