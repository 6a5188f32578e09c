"""Where the file is found and what its relative paths stand on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from loader_service.config.schema import ServiceConfig
from loader_service.config.yaml_file import aload_config, config_from_dict, load_config
from loader_service.errors import ConfigError
from tests.config.making import minimal, write

TEXT = "checkpoint: {path: ../models/m}\nloads: {target: {}}\n"


def _path(config: ServiceConfig) -> object:
    return config.checkpoint_of("target").path


async def _both(file: str | Path) -> ServiceConfig:
    """The file's configuration, once read on the spot and once on the loop."""
    config = await asyncio.to_thread(load_config, file)
    assert await aload_config(file) == config
    return config


async def _refused(file: str | Path) -> ConfigError:
    with pytest.raises(ConfigError) as blocking:
        await asyncio.to_thread(load_config, file)
    with pytest.raises(ConfigError) as on_the_loop:
        await aload_config(file)
    assert str(on_the_loop.value) == str(blocking.value)
    assert on_the_loop.value.record() == blocking.value.record()
    return blocking.value


async def test_relative_paths_stand_on_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    file = write(tmp_path / "configs", TEXT)
    assert _path(await _both(file)) == str(tmp_path / "models/m")
    monkeypatch.chdir(tmp_path)
    assert _path(await _both("configs/service.yaml")) == str(tmp_path / "models/m")
    monkeypatch.chdir(tmp_path / "configs")
    assert _path(await _both("service.yaml")) == str(tmp_path / "models/m")
    assert _path(await _both("../configs/./service.yaml")) == str(tmp_path / "models/m")


async def test_a_link_to_the_file_stands_where_the_link_is(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").mkdir()
    write(tmp_path / "real", "checkpoint: {path: m}\nloads: {target: {}}\n")
    (tmp_path / "linked/service.yaml").symlink_to("../real/service.yaml")
    assert _path(await _both(tmp_path / "linked/service.yaml")) == str(tmp_path / "linked/m")


def test_relative_paths_of_a_dictionary_stand_on_base_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = minimal(checkpoint={"path": "m"})
    monkeypatch.chdir(tmp_path)
    assert _path(config_from_dict(data)) == str(tmp_path / "m")
    assert _path(config_from_dict(data, base_dir="a")) == str(tmp_path / "a/m")
    assert _path(config_from_dict(data, base_dir="/b")) == "/b/m"
    assert _path(config_from_dict(data, base_dir=Path("/b"))) == "/b/m"


def test_every_path_of_a_list_and_of_a_load_is_made_absolute() -> None:
    files = {"path": ["a.safetensors", "/abs/b.safetensors"]}
    data = minimal(checkpoint=files, loads={"target": {}, "draft": {"checkpoint": {"path": "d"}}})
    config = config_from_dict(data, base_dir="/base")
    assert _path(config) == ("/base/a.safetensors", "/abs/b.safetensors")
    assert config.checkpoint_of("draft").path == "/base/d"


@pytest.mark.parametrize(
    ("written", "absolute"),
    [
        ("~/m", "/home/somebody/m"),
        ("~", "/home/somebody"),
        ("./~/m", "/base/~/m"),
        ("a/~", "/base/a/~"),
        ("/a//b/./c/", "/a/b/c"),
        ("../../../..", "/"),
        (".", "/base"),
        ("m ", "/base/m "),
    ],
)
def test_a_path_is_expanded_and_tidied(written: str, absolute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert _path(config_from_dict(minimal(checkpoint={"path": written}), base_dir="/base")) == absolute


def test_an_unknown_home_folder_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"checkpoint.path: the home folder in '~no-such-user/m' is unknown; .* '\./~no-such"
    ):
        config_from_dict(minimal(checkpoint={"path": "~no-such-user/m"}))


def test_links_are_not_resolved_and_dots_behind_them_are_kept(tmp_path: Path) -> None:
    (tmp_path / "store/models").mkdir(parents=True)
    (tmp_path / "store/other").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here/link").symlink_to(tmp_path / "store/models")
    base = tmp_path / "here"
    written = {"link/m": base / "link/m", "link/../other": base / "link/../other", "plain/../m": base / "m"}
    for text, expected in written.items():
        assert _path(config_from_dict(minimal(checkpoint={"path": text}), base_dir=base)) == str(expected)
    assert os.path.isdir(_path(config_from_dict(minimal(checkpoint={"path": "link/../other"}), base_dir=base)))  # type: ignore[arg-type]


async def test_a_file_that_does_not_exist_is_said_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = await _refused("absent.yaml")
    assert str(error).startswith(f"absent.yaml: does not exist (looked from {tmp_path})")
    assert (error.exit_code, error.path, error.errno) == (2, "absent.yaml", 2)


async def test_a_folder_is_no_file(tmp_path: Path) -> None:
    error = await _refused(tmp_path)
    assert str(error) == f"{tmp_path}: is a folder; give the YAML file itself"


async def test_other_failures_to_open_carry_the_systems_reason(tmp_path: Path) -> None:
    file = write(tmp_path, TEXT)
    error = await _refused(file / "below")
    assert "cannot be read (Not a directory)" in str(error)
    assert error.errno == 20


@pytest.mark.parametrize(
    ("raw", "line"),
    [(b"loads: {}\nreads: \xff\n", 2), ("loads: {}".encode("utf-16"), 1), (b"\n\n\xc3(", 3)],
    ids=["byte", "utf-16", "cut"],
)
async def test_text_that_is_not_utf_8_is_refused_with_its_line(tmp_path: Path, raw: bytes, line: int) -> None:
    file = tmp_path / "service.yaml"
    file.write_bytes(raw)
    error = await _refused(file)
    assert str(error).startswith(f"{file}:{line}: is not UTF-8 text")
    assert error.path == str(file)


async def test_a_file_too_large_for_a_configuration_is_not_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: reading all of it would take minutes and all memory
    error = await _refused(file)
    assert str(error) == f"{file}: is larger than 4.00 MiB; is it a configuration?"


async def test_a_zero_byte_in_the_files_own_path_is_refused() -> None:
    assert "zero byte" in str(await _refused("a\0.yaml"))


async def test_the_files_own_path_expands_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, TEXT)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _path(await _both("~/service.yaml")) == str(tmp_path.parent / "models/m")


async def test_problems_in_a_file_read_on_the_loop_have_their_lines(tmp_path: Path) -> None:
    error = await _refused(write(tmp_path, TEXT + "reads: {threads: 0}\n"))
    assert str(error).startswith(f"{tmp_path / 'service.yaml'}:3: reads.threads: ")
