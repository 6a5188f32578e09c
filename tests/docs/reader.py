"""A reader who does what a page says: block after block, in one folder, with one Python session.

```python runs. ```sh is done as a shell does it: commands of the loader, by `torchrun` too, and `| grep WORD` behind.
```yaml is written to a file if its first line names one (`# model.yaml`), and has to be a valid configuration anyway.
```text output is what the block before it prints: `...` in it stands for anything, and lines may be left out.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
import shlex
from pathlib import Path
from types import CodeType

import yaml

import loader_service as ls
from loader_service.cli.app import run
from tests.cli.support import start_ranks
from tests.docs.documents import Block, all_blocks


def compiled(block: Block, document: str) -> CodeType:
    """The block as a module that may await, its lines numbered as in the document."""
    text = "\n" * (block.line - 1) + block.text
    code = compile(text, document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def execute(block: Block, document: str, names: dict[str, object]) -> None:
    code = compiled(block, document)
    outcome = eval(code, names)  # a coroutine if the block awaits anything, else it has run
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(outcome)


class Reader:
    """`folder` is the current one, and stays it."""

    def __init__(self, document: str, folder: Path) -> None:
        self._document = document
        self._folder = folder
        self._names: dict[str, object] = {}
        self._printed = ""
        self.followed: list[Block] = []

    def follow(self, *languages: str) -> None:
        """Does what all blocks say, or those of some languages."""
        do = {"python": self._python, "sh": self._shell, "yaml": self._configuration, "text output": self._output}
        for block in all_blocks(self._document):
            if block.language in (languages or do):
                try:
                    do[block.language](block)
                except BaseException as error:
                    error.add_note(f"in the block at {self._document}:{block.line}")
                    raise
                self.followed.append(block)

    def _python(self, block: Block) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            execute(block, self._document, self._names)
        self._printed = out.getvalue()

    def _configuration(self, block: Block) -> None:
        name = re.match(r"# (\S+\.yaml)$", block.text.splitlines()[0])
        if name:
            (self._folder / name[1]).write_text(block.text)
            ls.load_config(self._folder / name[1])
        else:
            document = {"checkpoint": {"path": "x"}, "loads": {"target": {}}} | yaml.safe_load(block.text)
            ls.config_from_dict(document, base_dir=str(self._folder))

    def _shell(self, block: Block) -> None:
        self._printed = "".join(self._line(line) for line in block.text.splitlines() if line.strip(" ")[:1] not in "#")

    def _line(self, line: str) -> str:
        command, _, rest = line.partition(" | grep ")
        words = shlex.split(command, comments=True)
        match words:
            case ["loader-service", "demo", *_]:
                return ""  # whoever runs the page has made it: .ci/run runs the demo itself
            case ["loader-service", *args]:
                printed = self._run(args)
            case ["torchrun", "--standalone", "--nproc-per-node", ranks, "-m", "loader_service", *args]:
                printed = self._run_ranks(args, int(ranks))
            case _:
                raise AssertionError(f"a reader cannot do this here: {line}")
        if rest:
            (word,) = shlex.split(rest, comments=True)
            printed = "".join(found for found in printed.splitlines(keepends=True) if word in found)
            assert printed, f"nothing has {word!r} in it: {line}"
        return printed

    def _run(self, args: list[str]) -> str:
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        with contextlib.redirect_stdout(out):
            code = run(args)
        assert code == 0, args
        out.seek(0)
        return out.read()

    def _run_ranks(self, args: list[str], ranks: int) -> str:
        there = [str(self._folder / arg) if (self._folder / arg).exists() else arg for arg in args]
        ended = [rank.end() for rank in start_ranks([there] * ranks, self._folder)]
        assert [rank.code for rank in ended] == [0] * ranks, ended
        return ended[0].out

    def _output(self, block: Block) -> None:
        printed = [" ".join(line.split()) for line in self._printed.splitlines()]
        at = 0
        for line in filter(str.strip, block.text.splitlines()):
            wanted = re.escape(" ".join(line.split())).replace(re.escape("..."), ".*")
            found = next((i for i in range(at, len(printed)) if re.fullmatch(wanted, printed[i])), None)
            assert found is not None, f"{line!r} is not printed (after line {at} of): {self._printed}"
            at = found + 1
