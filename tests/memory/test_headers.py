"""Headers that are kept: one state of each file, so many bytes, the least recently used out first."""

from __future__ import annotations

from loader_service.memory.headers import HeaderCache


def test_a_header_is_found_in_the_state_in_which_it_was_read_alone() -> None:
    headers = HeaderCache()
    headers.keep("/m/a", (1, 2), b"first")
    assert headers.get("/m/a", (1, 2)) == b"first"
    assert headers.get("/m/a", (1, 3)) is None
    assert headers.get("/m/b", (1, 2)) is None
    headers.keep("/m/a", (1, 3), b"second one")
    assert headers.get("/m/a", (1, 2)) is None
    assert headers.get("/m/a", (1, 3)) == b"second one"
    assert (len(headers), headers.kept_bytes) == (1, 10)
    headers.clear()
    assert (headers.get("/m/a", (1, 3)), headers.kept_bytes) == (None, 0)


def test_the_least_recently_used_goes_first() -> None:
    headers = HeaderCache(30)
    for name in "abc":
        headers.keep(name, 0, bytes(10))
    assert headers.get("a", 0) is not None
    headers.keep("d", 0, bytes(15))
    assert [headers.get(name, 0) is not None for name in "abcd"] == [True, False, False, True]
    assert headers.kept_bytes == 25


def test_what_is_too_large_is_not_kept_and_drives_nothing_out() -> None:
    headers = HeaderCache(30)
    headers.keep("a", 0, bytes(30))
    headers.keep("b", 0, bytes(31))
    assert (headers.get("b", 0), headers.kept_bytes) == (None, 30)
