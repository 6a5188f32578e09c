"""An Engram-like lookup table as an engine has it: FP8 rows with E8M0 scales, in host memory, filled from row sources.

    table = HostEmbedding(rows=37, columns=64, group=16, share=(9, 18), layout="per_rank")
    for name, value in service.iter_weights("target"):
        if not table.load(name, value):
            ...                                    # an ordinary tensor

Weight and scales lie in one buffer, as two views of it. In layout "per_rank" it holds this rank's rows, in layout
"shared" the whole table, of which `load` fills this rank's rows and touches no other.
"""

from __future__ import annotations

from typing import Literal

import torch

import loader_service as ls


class HostEmbedding(torch.nn.Module):
    """Rows of FP8 numbers (E4M3), each `group` of them with one scale (E8M0), looked up in host memory.

    `share` (start, stop) are this rank's rows of all `rows`. `memory` is where the table lies: uint8, `nbytes` of it;
    None takes fresh memory, for tests with a sentinel in every byte.
    """

    SENTINEL = 0xA5

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
        weight_bytes, scale_bytes = held * columns, held * (columns // group)
        if memory is None:
            memory = torch.full((weight_bytes + scale_bytes,), self.SENTINEL, dtype=torch.uint8)
        self.memory = memory
        self.weight = memory[:weight_bytes].view(torch.float8_e4m3fn).view(held, columns)
        self.scale = memory[weight_bytes : weight_bytes + scale_bytes].view(torch.float8_e8m0fnu).view(held, -1)
        self.layout = layout
        self.share = share
        self.first = 0 if layout == "shared" else share[0]
        self._parts = {f"{prefix}.weight": self.weight, f"{prefix}.scale": self.scale}

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
        held = torch.where(mine, held, 0)
        numbers = self.weight.view(torch.uint8)[held].view(torch.float8_e4m3fn).float()
        scales = self.scale.view(torch.uint8)[held].view(torch.float8_e8m0fnu).float()
        rows = numbers.unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)
        return torch.where(mine.unsqueeze(-1), rows.flatten(-2), 0.0)
