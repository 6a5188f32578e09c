"""Ranks act together: the protocol, what carries it, and who takes part.

`join_group` makes a `Group`, which makes one `Session` a load. Below: `participant` drives the pure machines `leader`
and `member` over a carrier; `messages` and `codec` are what travels.
"""

from loader_service.agreement.group import Group, GroupChoice, Rendezvous, from_environment, join_group
from loader_service.agreement.messages import JSON, PHASES, Detail, Failure, Phase, PhaseRecord, Verdict, error_of
from loader_service.agreement.session import Session

__all__ = [
    "JSON",
    "PHASES",
    "Detail",
    "Failure",
    "Group",
    "GroupChoice",
    "Phase",
    "PhaseRecord",
    "Rendezvous",
    "Session",
    "Verdict",
    "error_of",
    "from_environment",
    "join_group",
]
