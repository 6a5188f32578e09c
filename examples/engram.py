"""An Engram-like lookup table as an engine has it: FP8 rows with E8M0 scales, in host memory.

Filled from row sources, by an engine's weight loader:

    table = HostEmbedding(rows=37, columns=64, group=16, share=(9, 18), layout="per_rank")
    for name, value in service.iter_weights("target"):
        if not table.load(name, value):
            ...                                    # an ordinary tensor

or over tables that the service fills, pinned where that is possible:

    weight, scale = service.host_table("target", "engram.weight"), service.host_table("target", "engram.scale")
    table = HostEmbedding.of_tables(weight, scale)

Run as a program it makes a small checkpoint, does both for four ranks, and looks rows up.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors.torch import save_file

import loader_service as ls


class HostEmbedding(torch.nn.Module):
    """Rows of FP8 numbers (E4M3), each `group` of them with one scale (E8M0), looked up in host memory.

    `share` (start, stop) are this rank's rows of all `rows`. Weight and scales lie in one buffer, as two views of it:
    in layout "per_rank" this rank's rows, in layout "shared" the whole table, of which `load` fills only this rank's
    rows. `memory` is that buffer: uint8, `nbytes` of it; None takes fresh memory.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        group: int,
        share: tuple[int, int],
        layout: Literal["per_rank", "shared"],
        memory: torch.Tensor | None = None,
        prefix: str = "engram",
    ) -> None:
        super().__init__()
        held = rows if layout == "shared" else share[1] - share[0]
        weight_bytes, nbytes = held * columns, self.nbytes(held, columns, group)
        if memory is None:
            memory = torch.empty(nbytes, dtype=torch.uint8)
        self.weight = memory[:weight_bytes].view(torch.float8_e4m3fn).view(held, columns)
        self.scale = memory[weight_bytes:nbytes].view(torch.float8_e8m0fnu).view(held, columns // group)
        self.share = share
        self.first = 0 if layout == "shared" else share[0]
        self._parts = {f"{prefix}.weight": self.weight, f"{prefix}.scale": self.scale}

    @staticmethod
    def nbytes(rows: int, columns: int, group: int) -> int:
        """What so many rows take, with their scales."""
        return rows * (columns + columns // group)

    @classmethod
    def of_tables(cls, weight: ls.HostTable, scale: ls.HostTable) -> Self:
        """Over tables that are filled already, of one layout and with the same rows."""
        made = cls(0, 1, 1, (0, 0), "per_rank")
        made.weight, made.scale, made.share = weight.tensor, scale.tensor, weight.rows
        made.first = 0 if weight.layout == "shared" else weight.rows[0]
        made._parts = {}
        return made

    def own(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the weight or the scales, as a view."""
        return part[self.share[0] - self.first : self.share[1] - self.first]

    def load(self, name: str, value: torch.Tensor | ls.RowSource) -> bool:
        """Takes this rank's rows of a row source, or of the whole tensor; False for a name that is not the table's."""
        part = self._parts.get(name)
        if part is None:
            return False
        own = self.own(part)
        if isinstance(value, ls.RowSource):
            value.read_rows_into(own, self.share[0])
        else:
            own.copy_(value[self.share[0] : self.share[1]])
        return True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows in float32, (*ids.shape, columns). Rows of other ranks are zero in layout "per_rank": add all ranks'."""
        held = ids - self.first
        mine = (held >= 0) & (held < len(self.weight))
        if not len(self.weight):  # a rank without rows
            return torch.zeros(*ids.shape, self.weight.shape[1])
        held = torch.where(mine, held, 0)
        numbers = self.weight.view(torch.uint8)[held].view(torch.float8_e4m3fn).float()
        scales = self.scale.view(torch.uint8)[held].view(torch.float8_e8m0fnu).float()
        rows = numbers.reshape(*scales.shape, -1) * scales.unsqueeze(-1)
        return torch.where(mine.unsqueeze(-1), rows.flatten(-2), 0.0)


# -- as a program -----------------------------------------------------------------------------------------------------

ROWS, COLUMNS, GROUP, RANKS = 37, 64, 16, 4


def main() -> int:
    """Looks rows up in tables of four ranks, filled in both ways. 0 if all is as torch alone computes it."""
    with tempfile.TemporaryDirectory() as folder:
        whole = write_checkpoint(Path(folder))
        ids = torch.tensor([[0, 36, 17], [9, 8, 18]])
        expected = plain_lookup(whole, ids)
        config = ls.config_from_dict(
            {
                "checkpoint": {"path": folder},
                "loads": {"target": {"rules": [{"match": "engram.*", "host_resident": {"layout": "shared"}}]}},
            }
        )
        tables = from_row_sources(folder)
        added = torch.equal(torch.stack([table(ids) for table in tables]).sum(0), expected)
        say(f"{RANKS} ranks hold {[len(table.weight) for table in tables]} of {ROWS} rows, read from row sources;")
        say(f"{ids.numel()} rows looked up and added over the ranks: equal to torch alone: {added}")
        with ls.LoaderService.blocking(config, "solo") as service:
            weight = service.host_table("target", "engram.weight")
            table = HostEmbedding.of_tables(weight, service.host_table("target", "engram.scale"))
        shared = torch.equal(table(ids), expected)
        say(f"one table of {len(weight.tensor)} rows, filled by the service, pinned: {weight.pinned};")
        say(f"the same rows looked up in it: equal to torch alone: {shared}")
        return 0 if added and shared else 1


def say(line: str) -> None:
    """Prints a line."""
    sys.stdout.write(f"{line}\n")


def write_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """A file with the table and an ordinary tensor; returns what is in it."""
    numbers = (torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 113 - 56) / 8
    powers = torch.arange(ROWS * (COLUMNS // GROUP), dtype=torch.uint8).view(ROWS, -1) % 7 + 124  # 2**-3 to 2**3
    tensors = {
        "embed.weight": torch.ones(8, 8),
        "engram.weight": numbers.to(torch.float8_e4m3fn),
        "engram.scale": powers.view(torch.float8_e8m0fnu),
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def from_row_sources(folder: str) -> Sequence[HostEmbedding]:
    """A table for each rank, as ranks of their own would make theirs."""
    shares = [(ROWS * rank // RANKS, ROWS * (rank + 1) // RANKS) for rank in range(RANKS)]
    tables = [HostEmbedding(ROWS, COLUMNS, GROUP, share, "per_rank") for share in shares]
    for name, value in ls.host_resident_weights(folder, ["engram.*"]):
        for table in tables:
            table.load(name, value)
    return tables


def plain_lookup(tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """What torch alone makes of the whole table."""
    scales = tensors["engram.scale"].float().repeat_interleave(GROUP, dim=1)
    return (tensors["engram.weight"].float() * scales)[ids]


if __name__ == "__main__":
    sys.exit(main())
