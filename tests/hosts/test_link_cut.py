"""The link between two hosts is cut while ranks on both are in the middle of a load: each side names whom it lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.cli.support import wait_until, write_config, write_small_checkpoint
from tests.e2e import forty
from tests.hosts.holding import BOUND_S, ON_FIRST, ON_SECOND, RANKS, cause, disturb
from tests.hosts.host import Direction, need_hosts, two_hosts
from tests.hosts.stuck_rank import mark_of
from tests.hosts.torchrun import Torchrun
from tests.support.checkpoints import Checkpoint

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True, scope="module")
def possible() -> None:
    need_hosts()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return forty.write(tmp_path_factory.mktemp("hosts"))


def test_both_sides_of_a_cut_link_end_and_name_whom_they_have_lost(checkpoint: Checkpoint) -> None:
    with two_hosts() as hosts:
        outcomes = disturb(hosts, checkpoint.folder, lambda pids: hosts.cut_link())
    causes = [cause(outcome) for outcome in outcomes]
    assert causes[0] == causes[1]
    assert causes[0] in [("RankFailure", "LostRank", rank) for rank in ON_SECOND]
    assert causes[2:] == [("RankFailure", "LostStore", 0)] * 2


def test_both_hosts_of_torchrun_end_with_code_4_when_the_link_is_cut(tmp_path: Path) -> None:
    config = write_config(
        tmp_path / "config.yaml",
        write_small_checkpoint(tmp_path / "checkpoint"),
        ranks=RANKS,
        agreement={"timeout_s": 2, "start_timeout_s": 60, "grace_s": 0.2},
    )
    program = ["-m", "tests.hosts.stuck_rank", str(tmp_path), "load", str(config), "--load", "all", "--json"]
    with two_hosts() as hosts:
        launched = Torchrun(hosts, [program, program], tmp_path)
        wait_until(lambda: all(mark_of(tmp_path, rank).exists() for rank in range(RANKS)))
        hosts.cut_link()
        cut_at_s = time.monotonic()
        ended = launched.end()
        assert time.monotonic() - cut_at_s < BOUND_S
    assert ended.codes == [1, 1], "torchrun's own code, whatever its ranks' are"
    assert [rank.code for rank in ended.ranks] == [4] * RANKS, [rank.err for rank in ended.ranks]
    record = ended.ranks[0].document
    assert (record["error"], record["rank"] in ON_SECOND) == ("LostRank", True)
    for rank in ON_SECOND:
        assert "LostStore" in ended.ranks[rank].err
        assert "rank 0" in ended.ranks[rank].err
    assert [rank.out for rank in ended.ranks[1:]] == [""] * 3


@pytest.mark.parametrize("direction", ["a>b", "b>a"])
def test_a_link_that_is_cut_in_one_direction_ends_both_sides(direction: Direction, checkpoint: Checkpoint) -> None:
    with two_hosts("relay") as hosts:
        assert hosts.relay is not None
        relay = hosts.relay
        outcomes = disturb(hosts, checkpoint.folder, lambda pids: relay.cut(direction))
    causes = [cause(outcome) for outcome in outcomes]
    no_sign_of_life = [("RankFailure", "LostRank", rank) for rank in ON_SECOND]
    no_answer = ("RankFailure", "LostStore", 0)
    assert causes[0] == causes[1]
    # Where one direction is open, what one side found can reach the other before that has found anything itself.
    assert causes[0] in [*no_sign_of_life, *([no_answer] if direction == "a>b" else [])]
    for found in causes[2:]:
        assert found in [no_answer, *([causes[0]] if direction == "b>a" else [])]


def test_a_rank_that_is_killed_on_the_other_host_is_named_by_all(checkpoint: Checkpoint) -> None:
    with two_hosts() as hosts:
        outcomes = disturb(hosts, checkpoint.folder, lambda pids: os.kill(pids[3], signal.SIGKILL))
    assert outcomes[3].exitcode == -signal.SIGKILL
    for rank in (*ON_FIRST, 2):
        assert cause(outcomes[rank]) == ("RankFailure", "LostRank", 3)
