"""`compare`: how two manifests differ, what is no manifest, and names that could do harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from loader_service.cli import app, manifest_json
from tests.cli.support import write_config, write_small_checkpoint
from tests.support.shards import pattern_bytes, write_shard

Capture = pytest.CaptureFixture[str]
Manifest = dict[str, Any]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def entry(dtype: str = "F32", shape: object = (2, 3), sha256: str = "0" * 64) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "sha256": sha256}


def run(tmp_path: Path, a: object, b: object, *options: str) -> int:
    for name, content in (("a", a), ("b", b)):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"{name}.json").write_text(text)
    return app.run(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *options])


def refused(tmp_path: Path, content: object, capsys: Capture) -> str:
    """The line that says why B is no manifest."""
    assert run(tmp_path, {"t": entry()}, content, "--json") == 2
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert (record["error"], record["path"]) == ("ConfigError", str(tmp_path / "b.json"))
    (line,) = captured.err.splitlines()
    assert line == f"loader-service: {record['message']}"
    assert line.startswith(f"loader-service: {tmp_path / 'b.json'}: no manifest: ")
    return str(record["message"])


class TestTwoLoads:
    def manifest(self, tmp_path: Path, name: str, checkpoint: Path) -> Path:
        out = tmp_path / name
        config = write_config(tmp_path / "config.yaml", checkpoint)
        assert app.run(["load", str(config), "--load", "all", "--manifest", str(out)]) == 0
        return out

    def test_manifests_of_the_same_checkpoint_are_the_same(self, tmp_path: Path, capsys: Capture) -> None:
        checkpoint = write_small_checkpoint(tmp_path / "checkpoint")
        paths = [str(self.manifest(tmp_path, f"{i}.json", checkpoint)) for i in range(2)]
        capsys.readouterr()
        assert app.run(["compare", *paths, "--json"]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out) == {"same": True, "compared": 8, "differ": [], "missing": [], "extra": []}
        assert captured.err == ""
        assert app.run(["compare", *paths]) == 0
        assert capsys.readouterr().out.strip() == (
            "The same: of 8 tensors that both have 0 differ; 0 are in A alone, 0 in B alone."
        )

    def test_a_changed_byte_type_and_shape_and_other_names_are_found(self, tmp_path: Path, capsys: Capture) -> None:
        before = self.manifest(tmp_path, "a.json", write_small_checkpoint(tmp_path / "before"))
        after = write_small_checkpoint(tmp_path / "after")
        changed = bytearray(pattern_bytes(28, 5))
        changed[27] ^= 1
        write_shard(
            after / "b.safetensors",
            {
                "down.weight": ("F8_E4M3", (4, 7), bytes(changed)),
                "down.scale": ("F8_E8M0", (2, 4), pattern_bytes(8, 6)),
                "new": ("U8", (1,), b"x"),
            },
        )
        write_shard(after / "c.safetensors", {"scale": ("I32", (), pattern_bytes(4, 4)), "newer": ("U8", (0,), b"")})
        a_shard = {
            "embed.weight": ("BF16", (7, 6), pattern_bytes(84, 1)),
            "experts.0.w": ("F32", (5,), pattern_bytes(20, 2)),
            "experts.1.w": ("F32", (5,), pattern_bytes(20, 3)),
            "nothing": ("F16", (0, 3), b""),
        }
        write_shard(after / "a.safetensors", a_shard)
        other = self.manifest(tmp_path, "b.json", after)
        capsys.readouterr()
        assert app.run(["compare", str(before), str(other), "--json"]) == 3
        found = json.loads(capsys.readouterr().out)
        a, b = (json.loads(path.read_text()) for path in (before, other))
        assert found == {
            "same": False,
            "compared": 7,
            "differ": [{"name": name, "a": a[name], "b": b[name]} for name in ("scale", "down.weight", "down.scale")],
            "missing": ["draft.norm"],
            "extra": ["new", "newer"],
        }
        assert app.run(["compare", str(before), str(other)]) == 3
        lines = capsys.readouterr().out.splitlines()

        def line_of(name: str) -> str:
            (line,) = (line for line in lines if line.strip().startswith(repr(name)))
            return " ".join(line.split())

        assert line_of("down.weight").startswith(
            f"'down.weight' bytes F8_E4M3 [4, 7] {a['down.weight']['sha256'][:12]}"
        )
        assert line_of("down.scale").startswith("'down.scale' shape F8_E8M0 [4, 2]")
        assert line_of("scale").startswith("'scale' dtype F32 []")
        assert line_of("draft.norm") == "'draft.norm' in A alone"
        assert line_of("newer") == "'newer' in B alone"
        assert lines[-1] == "Not the same: of 7 tensors that both have 3 differ; 1 are in A alone, 2 in B alone."


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (entry(dtype="I32"), "dtype"),
        (entry(shape=(3, 2)), "shape"),
        (entry(sha256="1" * 64), "bytes"),
        (entry(dtype="I32", shape=(), sha256="1" * 64), "dtype, shape, bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_table_says_in_what_they_differ(
    other: dict[str, object], words: str, tmp_path: Path, capsys: Capture
) -> None:
    assert run(tmp_path, {"t": entry()}, {"t": other}) == 3
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "'t'" in line)
    assert line.split("'t'")[1].strip().startswith(f"{words}  ")


def test_empty_manifests_are_the_same(tmp_path: Path, capsys: Capture) -> None:
    assert run(tmp_path, {}, {}) == 0
    assert run(tmp_path, {}, {"t": entry()}) == 3


def test_long_lists_are_cut_in_the_table_and_whole_in_json(tmp_path: Path, capsys: Capture) -> None:
    a = {f"{kind}.{i:03d}": entry() for kind in ("both", "old") for i in range(50)}
    b = {f"{kind}.{i:03d}": entry(sha256="f" * 64) for kind in ("both", "new") for i in range(50)}
    assert run(tmp_path, a, b) == 3
    out = capsys.readouterr().out
    assert [out.count(f"'{kind}.") for kind in ("both", "old", "new")] == [20, 20, 20]
    assert out.count("and 30 more") == 3
    assert "of 50 tensors that both have 50 differ; 50 are in A alone, 50 in B alone." in out
    assert run(tmp_path, a, b, "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert [len(found[key]) for key in ("differ", "missing", "extra")] == [50, 50, 50]


HOSTILE = ["\x1b[2J\x1b]0;owned\x07", "a\nb\rc", "[red]x[/red]", ":smile:", "\u202egnp", "\ud800", "x" * 5000, "", "\\"]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name[:12]))
def test_names_are_shown_quoted_and_do_nothing_to_a_terminal(name: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(tmp_path, {name: entry()}, {name: entry(shape=(1,))}) == 3
    assert run(tmp_path, {name: entry()}, {}) == 3
    assert run(tmp_path, {}, {name: entry()}) == 3
    out = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in out)
    assert len(out) < 10_000
    quoted = repr(name[:200])
    assert "".join(out.split()).count("".join(quoted.split())) >= 1 or len(name) > 20
    assert run(tmp_path, {name: entry()}, {name: entry(dtype="x")}) == 2
    assert all(character.isprintable() or character == "\n" for character in capsys.readouterr().err)


NOT_MANIFESTS = {
    "not JSON": ('{"t": ', "not JSON"),
    "nothing": ("", "not JSON"),
    "after the end": ('{"t": {}} x', "not JSON"),
    "a list": ([], "no object of tensor names"),
    "a number": ("1", "no object of tensor names"),
    "an entry of the wrong type": ({"t": []}, "tensor 't': must be an object with dtype, shape and sha256"),
    "no sha256": ({"t": {"dtype": "F32", "shape": []}}, "tensor 't': must be an object with"),
    "one key more": ({"t": {**entry(), "x": 1}}, "tensor 't': must be an object with"),
    "an unknown dtype": ({"t": entry(dtype="float32")}, "dtype is no code"),
    "a dtype that is a list": ({"t": {**entry(), "dtype": ["F32"]}}, "dtype is no code"),
    "a shape that is text": ({"t": entry(shape="2")}, "shape is no list"),
    "a shape with a fraction": ({"t": entry(shape=[1.0])}, "shape is no list"),
    "a shape with a truth": ({"t": entry(shape=[True])}, "shape is no list"),
    "a negative shape": ({"t": entry(shape=[-1])}, "shape is no list"),
    "a short hash": ({"t": entry(sha256="0" * 63)}, "sha256 is not 64"),
    "a hash in capitals": ({"t": entry(sha256="A" * 64)}, "sha256 is not 64"),
    "a hash and a line": ({"t": entry(sha256="0" * 64 + "\n")}, "sha256 is not 64"),
    "a name twice": ('{"t": 1, "t": 1}', "'t' is in it twice"),
    "a key twice": ('{"t": {"dtype": "F32", "dtype": "F32"}}', "'dtype' is in it twice"),
    "too deep": ("[" * 100_000, "not JSON"),
    "a number without end": ('{"t": ' + "9" * 10_000 + "}", "not JSON"),
    "a report": ({"load": "all", "rank": 0}, "tensor 'load': must be"),
}


@pytest.mark.parametrize(("content", "words"), NOT_MANIFESTS.values(), ids=NOT_MANIFESTS.keys())
def test_what_is_no_manifest_is_one_clear_line(content: object, words: str, tmp_path: Path, capsys: Capture) -> None:
    assert words in refused(tmp_path, content, capsys)


def test_bytes_that_are_no_text(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.json").write_bytes(b'{"\xff": {}}')
    assert app.run(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 2
    assert "it is not UTF-8" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_difference(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.json").write_text("{}", encoding="utf-8-sig")
    assert app.run(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "b.json", "wb") as file:
        file.truncate(manifest_json.MAX_MANIFEST_BYTES + 1)
    (tmp_path / "a.json").write_text("{}")
    assert app.run(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert f"it has {manifest_json.MAX_MANIFEST_BYTES + 1} bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: os.mkfifo(path), "no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
    ],
    ids=["nothing", "a folder", "a pipe that nobody writes to", "a device"],
)
def test_what_cannot_be_read_is_one_line_and_code_2(make: Any, words: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "x.json"
    make(path)
    assert app.run(["compare", str(path), str(path), "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["path"] == str(path)
    assert len(captured.err.splitlines()) == 1
    assert words in captured.err


def test_one_file_alone_is_a_usage_error(tmp_path: Path, capsys: Capture) -> None:
    assert app.run(["compare", str(tmp_path)]) == 2
    assert "B.json" in capsys.readouterr().err
