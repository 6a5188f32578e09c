"""A destination is checked before any byte moves: no file is even opened for one that does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader_service.errors import DestinationError
from tests.rows.making import SENTINEL, Table, Workshop, bytes_of, empty_rows, make_table, untouched

E4M3 = torch.float8_e4m3fn


def of(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.full(shape, SENTINEL, dtype=torch.uint8).view(dtype)


def freed() -> torch.Tensor:
    tensor = of(3, 20)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: list[Any] = [
    pytest.param(lambda: np.zeros((3, 20), np.uint8), 0, "is a ndarray, not a torch.Tensor", id="an array"),
    pytest.param(lambda: [of(20)], 0, "is a list, not a torch.Tensor", id="a list"),
    pytest.param(lambda: None, 0, "is a NoneType", id="nothing"),
    pytest.param(lambda: of(3, 20), True, "row_start is True, not an integer", id="a truth value"),
    pytest.param(lambda: of(3, 20), 1.0, "row_start is 1.0, not an integer", id="a fraction"),
    pytest.param(lambda: of(3, 20), "1", "row_start is '1', not an integer", id="text"),
    pytest.param(lambda: torch.empty(3, 20, dtype=E4M3, device="meta"), 0, "is on meta", id="another device"),
    pytest.param(lambda: of(3, 20, dtype=torch.uint8), 0, "is torch.uint8, the table torch.float8_e4m3fn", id="u8"),
    pytest.param(lambda: of(3, 20, dtype=torch.int8), 0, "is torch.int8", id="i8"),
    pytest.param(lambda: of(3, 20, dtype=torch.bool), 0, "is torch.bool", id="bool"),
    pytest.param(lambda: of(3, 20, dtype=torch.float8_e5m2), 0, "is torch.float8_e5m2", id="e5m2"),
    pytest.param(lambda: of(3, 20, dtype=torch.float8_e8m0fnu), 0, "is torch.float8_e8m0fnu", id="e8m0"),
    pytest.param(lambda: of(3, 20, dtype=torch.float8_e4m3fnuz), 0, "is torch.float8_e4m3fnuz", id="e4m3fnuz"),
    pytest.param(lambda: of(3, 20, dtype=torch.float4_e2m1fn_x2), 0, "is torch.float4_e2m1fn_x2", id="f4"),
    pytest.param(lambda: of(3, 19), 0, r"shape is \(3, 19\); its rows must be like the table's, \(20,\)", id="narrow"),
    pytest.param(lambda: of(3, 21), 0, r"shape is \(3, 21\)", id="wide"),
    pytest.param(lambda: of(20, 3), 0, r"shape is \(20, 3\)", id="turned"),
    pytest.param(lambda: of(60), 0, r"shape is \(60,\)", id="flat"),
    pytest.param(lambda: of(3, 1, 20), 0, r"shape is \(3, 1, 20\)", id="one dimension more"),
    pytest.param(lambda: of(3, 4, 5), 0, r"shape is \(3, 4, 5\)", id="the same bytes in other rows"),
    pytest.param(lambda: of(1)[0], 0, r"shape is \(\)", id="no dimension"),
    pytest.param(lambda: of(3, 40)[:, :20], 0, "is not contiguous", id="columns of something wider"),
    pytest.param(lambda: of(6, 20)[::2], 0, "is not contiguous", id="every other row"),
    pytest.param(lambda: of(20, 3).t(), 0, "is not contiguous", id="transposed"),
    pytest.param(lambda: of(1, 20).expand(3, 20), 0, "elements that share memory", id="expanded"),
    pytest.param(freed, 0, "beyond its storage", id="freed"),
    pytest.param(lambda: of(3, 20), -1, r"rows \[-1, 2\) are not all among the table's 37", id="before the first row"),
    pytest.param(lambda: of(3, 20), 35, r"rows \[35, 38\) are not all among the table's 37", id="behind the last"),
    pytest.param(lambda: of(3, 20), 2**62, "are not all among", id="far behind"),
    pytest.param(lambda: of(38, 20), 0, r"rows \[0, 38\)", id="more rows than there are"),
    pytest.param(lambda: of(0, 20), 38, r"rows \[38, 38\)", id="no rows behind the end"),
    pytest.param(lambda: of(0, 19), 0, r"shape is \(0, 19\)", id="no rows of another shape"),
]


@pytest.mark.parametrize(("make", "row_start", "problem"), REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_touched(
    tmp_path: Path,
    workshop: Callable[..., Workshop],
    make: Callable[[], Any],
    row_start: Any,
    problem: str,
) -> None:
    one = workshop()
    table = make_table(tmp_path)
    source = table.over(one.reader)
    dst = make()
    looks = one.fake.identifies()

    def aread(dst: Any, row_start: Any) -> None:
        asyncio.run(source.aread_rows_into(dst, row_start))

    for ask in (source.read_rows_into, aread):
        with pytest.raises(DestinationError, match=problem) as caught:
            ask(dst, row_start)
        assert isinstance(caught.value, ValueError)
        assert (caught.value.path, caught.value.tensor) == (table.path, "table")
        assert "nothing was read of tensor 'table'" in str(caught.value)
    assert (one.fake.opens(), one.fake.reads, one.fake.identifies()) == (0, [], looks)
    assert one.pool._workers == set(), "no thread was started"


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.int16),
        (torch.float32, torch.int32),
        (torch.int64, torch.float64),
        (torch.complex64, torch.float64),
        (torch.float8_e8m0fnu, torch.uint8),
        (torch.bool, torch.uint8),
    ],
    ids=str,
)
def test_a_type_of_the_same_size_is_another_type(
    tmp_path: Path, workshop: Callable[..., Workshop], held: torch.dtype, wanted: torch.dtype
) -> None:
    table = make_table(tmp_path, (5, 4), held)
    one = workshop()
    dst = torch.zeros(5, 4, dtype=wanted)
    with pytest.raises(DestinationError, match=f"is {wanted}, the table {held}"):
        table.over(one.reader).read_rows_into(dst, 0)
    assert one.fake.opens() == 0
    assert not dst.any()


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view], ids=["conjugated", "negated"])
def test_a_lazy_view_is_refused(
    tmp_path: Path, workshop: Callable[..., Workshop], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    table = make_table(tmp_path, (5, 4), torch.complex64)
    with pytest.raises(DestinationError, match="lazily"):
        table.over(workshop().reader).read_rows_into(view(torch.zeros(5, 4, dtype=torch.complex64)), 0)


def test_a_sparse_tensor_is_refused(tmp_path: Path, workshop: Callable[..., Workshop]) -> None:
    table = make_table(tmp_path, (5, 4), torch.float32)
    with pytest.raises(DestinationError, match="only strided tensors"):
        table.over(workshop().reader).read_rows_into(torch.zeros(5, 4).to_sparse(), 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: torch.nested.nested_tensor([torch.zeros(3, 4), torch.zeros(2, 4)]), "is nested"),
        (lambda: torch.quantize_per_tensor(torch.zeros(5, 4), 1.0, 0, torch.quint8), "is quantized"),
    ],
    ids=["nested", "quantized"],
)
def test_what_is_no_plain_tensor_is_refused(
    tmp_path: Path, workshop: Callable[..., Workshop], make: Callable[[], torch.Tensor], problem: str
) -> None:
    table = make_table(tmp_path, (5, 4), torch.float32)
    with pytest.raises(DestinationError, match=f"the destination {problem}"):
        table.over(workshop().reader).read_rows_into(make(), 0)


@pytest.mark.parametrize("rows", [2, 0])
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_a_tensor_within_a_transform_is_refused(
    tmp_path: Path, workshop: Callable[..., Workshop], transform: str, rows: int
) -> None:
    source = make_table(tmp_path, (5, 4), torch.float32).over(workshop().reader)

    def fill(dst: torch.Tensor) -> torch.Tensor:
        source.read_rows_into(dst, 0)
        return dst.sum()

    with pytest.raises(DestinationError, match=r"no memory of its own \(within torch\.vmap, torch\.func\.grad"):
        getattr(torch.func, transform)(fill)(torch.zeros(*((3,) if transform == "vmap" else ()), rows, 4))


def with_gradient(table: Table) -> torch.Tensor:
    return torch.nn.Parameter(torch.zeros(4, 6), requires_grad=True)


def a_part_of_a_buffer(table: Table) -> torch.Tensor:
    return torch.zeros(10, 6)[3:7]


def odd_strides(table: Table) -> torch.Tensor:
    """One row, with a stride that says nothing."""
    return torch.as_strided(torch.zeros(4 * 6), (4, 6, 1), (6, 1, 77))


@pytest.mark.parametrize("make", [with_gradient, a_part_of_a_buffer])
def test_what_fits_is_taken_however_it_came_about(
    tmp_path: Path, workshop: Callable[..., Workshop], make: Callable[[Table], torch.Tensor]
) -> None:
    table = make_table(tmp_path, (9, 6), torch.float32)
    dst = make(table)
    table.over(workshop().reader).read_rows_into(dst, 5)
    assert bytes_of(dst) == table.rows(5, 9)


def test_strides_of_dimensions_of_one_element_mean_nothing(tmp_path: Path, workshop: Callable[..., Workshop]) -> None:
    table = make_table(tmp_path, (9, 6, 1), torch.float32)
    dst = odd_strides(table)
    table.over(workshop().reader).read_rows_into(dst, 2)
    assert bytes_of(dst.reshape(-1)) == table.rows(2, 6)


@pytest.mark.parametrize("row_start", [0, 20, 37])
def test_no_rows_are_read_without_touching_the_file(
    tmp_path: Path, workshop: Callable[..., Workshop], row_start: int
) -> None:
    one = workshop()
    table = make_table(tmp_path)
    table.over(one.reader).read_rows_into(empty_rows(table, 0), row_start)
    assert one.fake.opens() == 0


def test_rows_without_bytes_are_read_without_touching_the_file(
    tmp_path: Path, workshop: Callable[..., Workshop]
) -> None:
    one = workshop()
    table = make_table(tmp_path, (5, 0, 3))
    table.over(one.reader).read_rows_into(torch.empty(5, 0, 3, dtype=E4M3), 0)
    assert one.fake.opens() == 0


def test_nothing_around_the_rows_is_written(tmp_path: Path, workshop: Callable[..., Workshop]) -> None:
    table = make_table(tmp_path)
    whole = empty_rows(table, 37)
    table.over(workshop().reader).read_rows_into(whole[9:18], 9)
    assert untouched(whole[:9])
    assert bytes_of(whole[9:18]) == table.rows(9, 18)
    assert untouched(whole[18:])
