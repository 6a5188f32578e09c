"""What holds in every simulated session, whatever happens to whom and when: one function, `check`, for all of them."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import get_args

from loader_service.agreement.messages import Failure, Phase, Verdict, entry_key
from loader_service.agreement.protocol import LEADER, MISSED_BEATS
from tests.agreement.simulation import Harm, SilentKind, SimulatedRank, World

PRECEDENCE = ("error", "died", "timeout", "consequence", "cancelled")
SILENT = get_args(SilentKind)
FOREVER = float("inf")
LONGEST_WORK_S = 3.0


def check(world: World) -> None:
    """Everything at once. That nobody hangs is the run's own bound: `World.run` fails where it is not met."""
    end = check_log(world)
    check_endings(world, end)
    check_ends_alone(world)
    if end is None:
        return
    check_leaving(world)
    if not end.final:
        check_success(world)
        return
    assert end.failure is not None
    check_blame(world, end.failure)
    check_precedence(world, end, end.failure)
    check_limits(world, end)


# -- the log ----------------------------------------------------------------------------------------------------------


def check_log(world: World) -> Verdict | None:
    """The log of the board: each place is written once, in order, and nothing follows an end. Returns the end."""
    keys = [key for _, key, _ in world.board.log]
    assert keys == [entry_key(sequence) for sequence in range(len(keys))], f"written: {keys}"
    verdicts = world.verdicts_on_board()
    assert not any(verdict.ends for verdict in verdicts[:-1]), f"something follows an end: {verdicts}"
    for before, after in pairwise(verdicts):
        step = after.phase.position - before.phase.position
        assert step == (1 if before.action == "go" else 0), f"{before} is followed by {after}"
    for rank in world.ranks:
        assert rank.log == verdicts[: len(rank.log)], f"rank {rank.rank} reads another log: {rank.log}, {verdicts}"
        alone = [] if rank.ended is None or rank.ended in rank.log else [rank.ended]
        assert rank.verdicts == rank.log + alone, f"rank {rank.rank} is told {rank.verdicts} of {rank.log}"
    return verdicts[-1] if verdicts and verdicts[-1].ends else None


# -- how it ends on each rank -----------------------------------------------------------------------------------------


def check_endings(world: World, end: Verdict | None) -> None:
    for rank in world.living:
        if any(harm.kind == "log" for harm in world.harms):
            assert rank.ended is not None, f"rank {rank.rank} does not know how it ends"
            assert rank.ended.final or rank.ended == end, "a log that cannot be read tells of no success"
        elif rank.carrier_lost:
            assert may_lose_the_board(world, rank), f"rank {rank.rank} lost the board: {rank.ended}"
            assert rank.ended is not None, f"rank {rank.rank} does not know how it ends"
            assert rank.ended.final or rank.ended == end, "who hears nothing cannot know of a success"
        elif rank.gave_up:
            assert rank.failed, "only who fails gives up waiting"
            assert may_be_unanswered(world), f"rank {rank.rank} had no answer to its failure"
            assert rank.ended in (None, end)
        else:
            assert rank.ended is not None, f"rank {rank.rank} does not know how it ends"
            assert rank.ended == end, f"rank {rank.rank} sees {rank.ended} instead of {end}"


def check_ends_alone(world: World) -> None:
    """Who has lost the board ends within the limit of silence, and says the same as all others that have lost it."""
    said: dict[bool, set[tuple[str, str, int | None]]] = {}  # who has seen the host's process end may know more
    for rank in world.living:
        if not rank.carrier_lost or rank.ended is None or rank.ended.failure is None:
            continue
        record = rank.ended.failure.record
        assert record.rank in (None, LEADER, rank.rank), f"rank {rank.rank} blames {record}"
        since_s = min(harm.at_s for harm in world.harms)
        out_s = sum(harm.for_s for harm in harms_of(world, rank.rank) if harm.kind in {"frozen", "stuck"})
        limits = world.limits
        within_s = limits.timeout_s if rank.log else limits.start_timeout_s + limits.suspect_s
        killed = any(harm.kind == "killed" for harm in harms_of(world, LEADER))
        if killed and LEADER in rank.saw:  # who saw the host's process end does not wait for its answer
            within_s = limits.suspect_s
        if len(world.harms) == 1 and rank.ended_at_s is not None:
            limit_s = max(since_s, rank.started_at_s or 0.0) + out_s + within_s + 3 * limits.heartbeat_s
            assert rank.ended_at_s < limit_s, f"rank {rank.rank} is held by a lost board until {rank.ended_at_s}"
        if rank.rank != LEADER and rank.log and not harms_of(world, rank.rank):
            said.setdefault(LEADER in rank.saw, set()).add((record.error, record.message, record.rank))
    assert all(len(causes) == 1 for causes in said.values()), f"not one cause: {said}"


def harms_of(world: World, rank: int) -> list[Harm]:
    return [harm for harm in world.harms if harm.rank == rank]


def may_lose_the_board(world: World, rank: SimulatedRank) -> bool:
    kinds = {harm.kind for harm in harms_of(world, rank.rank)}
    if kinds & {"lost", "cut off"}:
        return True
    if not world.hosted:
        return False
    host_ended = any(harm.kind in {"killed", "frozen"} for harm in harms_of(world, LEADER))
    host_was_left = any(harm.kind in {"lost", "cut off"} for harm in harms_of(world, LEADER))
    return host_ended or host_was_left or bool(kinds & {"frozen", "stuck", "absent"}) or world.weather.lost_beats > 0


def may_be_unanswered(world: World) -> bool:
    """A failing rank may give up where the leader cannot answer: out, not there yet, or not reached."""
    trouble = any(harm.kind in {*SILENT, "absent", "log"} for harm in harms_of(world, LEADER))
    cut = any(harm.kind == "cut off" for harm in world.harms)
    return trouble or cut or world.weather.lost_beats > 0


# -- success ----------------------------------------------------------------------------------------------------------


def is_bearable(world: World, harm: Harm) -> bool:
    """Both a success and a failure are right: a rank was out before it was heard, or the host before anything was
    agreed, and only the limit of the first meeting counts; or most of the time all others were out as well."""
    if harm.kind in {"frozen", "stuck"} and watched_s(world, harm) <= world.limits.timeout_s + world.limits.suspect_s:
        return True
    is_host = world.hosted and harm.rank == LEADER and harm.kind == "frozen"
    early = (is_host and harm.sent <= 0) or not was_heard(world, harm)
    return early and harm.kind in SILENT and harm.for_s < world.limits.start_timeout_s + world.limits.suspect_s


def watched_s(world: World, harm: Harm) -> float:
    """For how long, of the time that a rank was out, another one was not."""
    start_s, stop_s = harm.at_s, harm.at_s + harm.for_s
    for rank in world.ranks:
        out = [(each.at_s, each.at_s + each.for_s) for each in harms_of(world, rank.rank) if each.kind in SILENT]
        if not out:
            return harm.for_s
        start_s, stop_s = max(start_s, out[0][0]), min(stop_s, out[0][1])
    return harm.for_s - max(0.0, stop_s - start_s)


def is_harmless(world: World, harm: Harm) -> bool:
    if harm.kind in {"frozen", "stuck", "cut off"}:
        return harm.for_s <= world.limits.timeout_s / 2
    return harm.kind in {"retry", "busy"} or (harm.kind == "absent" and harm.for_s < world.limits.start_timeout_s)


def check_success(world: World) -> None:
    """What happens to a rank that has done everything and said so no longer spoils anything."""
    for harm in world.harms:
        spoils = harm.sent < Phase.FINISH.position or harm.kind in {"differs", "late"}
        if harm.kind == "beats":  # not seen, if the load was over before the next one
            spoils = ended_at_s(world) > harm.at_s + 2 * world.limits.heartbeat_s + look_s(world)
        assert is_harmless(world, harm) or is_bearable(world, harm) or not spoils, f"a success in spite of {harm}"
    for rank in world.ranks:
        assert rank.sent == Phase.FINISH.position, f"a success without rank {rank.rank}"


# -- the cause --------------------------------------------------------------------------------------------------------


def ended_at_s(world: World) -> float:
    return world.board.log[-1][0]


def kinds_that(harm: Harm, world: World) -> tuple[str, ...]:
    """As what a harm may be told."""
    if harm.kind in SILENT:
        # Where others were stopped from outside, nobody can tell one that has missed beats from a dead rank.
        others_stopped = any(other.kind == "cancelled" for other in world.harms)
        suspicious = others_stopped and harm.for_s > (MISSED_BEATS - 1) * world.limits.heartbeat_s
        if is_harmless(world, harm):
            return ("died",) if suspicious else ()
        late = harm.kind == "stuck" or not was_heard(world, harm)  # no progress, or it did not arrive
        return ("died", "timeout") if late else ("died",)
    if is_harmless(world, harm):
        return ()
    if harm.kind == "record":  # found once all others have come; until then it is one that has not come
        return ("error", "timeout")
    named = {"cancelled": "cancelled", "late": "timeout", "absent": "timeout", "differs": "disagreement"}
    return (named.get(harm.kind, "error"),)


def check_blame(world: World, cause: Failure) -> None:
    """A rank at fault is named, never a healthy one."""
    record = cause.record
    harms = [harm for harm in world.harms if harm.at_s <= ended_at_s(world)]
    if cause.kind == "disagreement":  # of two ranks nobody knows which one is right: both are named
        pair = {int(rank) for rank in re.findall(r"\d+", record.message.split(" differ in ")[0])}
        differ = {harm.rank for harm in harms if harm.kind == "differs"}
        assert pair & differ, f"{cause} is not of {differ}"
        assert record.rank in (differ if 2 * len(differ) < len(world.ranks) else pair), f"{cause} is not of {differ}"
        return
    guilty = [harm for harm in harms if harm.rank == record.rank and cause.kind in kinds_that(harm, world)]
    assert guilty, f"{cause} is nobody's fault: {harms}"


def was_heard(world: World, harm: Harm) -> bool:
    """True if others have surely had a sign of its life."""
    started_s = max(rank.started_at_s or 0.0 for rank in world.ranks)
    return harm.at_s > started_s + world.limits.heartbeat_s + look_s(world)


def was_seen(world: World, harm: Harm) -> float | None:
    """When a healthy rank first saw the process end; None if nobody did."""
    healthy = [rank for rank in world.living if not harms_of(world, rank.rank) and harm.rank in rank.saw]
    return min((rank.saw[harm.rank] for rank in healthy), default=None)


def look_s(world: World) -> float:
    """Within what time a failure that a rank tells is known to the leader, and what the leader says to everyone."""
    steps = 6 * world.weather.step_s + world.limits.heartbeat_s / 20
    lost = (world.limits.heartbeat_s * 2 if world.weather.lost_wakes else 0.0) + world.weather.lost_beats * 60
    return steps + lost + sum(harm.for_s for harm in world.harms if is_pause(world, harm))


def is_pause(world: World, harm: Harm) -> bool:
    return harm.kind in {"frozen", "stuck", "cut off"} and is_harmless(world, harm)


def check_precedence(world: World, end: Verdict, cause: Failure) -> None:
    """Own error > died > timed out > cancelled, then the lowest rank, as far as the leader could know by then."""
    leader_is_out = any(harm.kind in {*SILENT, "absent", "log"} for harm in harms_of(world, LEADER))
    if leader_is_out or cause.kind == "disagreement" or (LEADER, "beats") in {(h.rank, h.kind) for h in world.harms}:
        return
    chosen = (PRECEDENCE.index(cause.kind), -1 if cause.record.rank is None else cause.record.rank)
    told = [harm for harm in world.harms if harm.kind in {"error", "cancelled"}]
    window_ends_s = min(harm.at_s for harm in world.harms) + world.limits.window_s  # at the earliest
    for harm in told:
        first = min(harms_of(world, harm.rank), key=lambda other: other.at_s)
        awaited = harm.sent < end.phase.position
        known = harm.at_s + look_s(world) < max(ended_at_s(world), window_ends_s if awaited else 0.0)
        if first is harm and known:
            better = (PRECEDENCE.index(harm.kind), harm.rank)
            assert chosen <= better, f"{cause} is told instead of {harm}"
    if ended_at_s(world) < window_ends_s:
        harmed = {harm.rank for harm in world.harms}
        awaited_ranks = [r.rank for r in world.ranks if r.rank not in harmed and r.sent < end.phase.position]
        assert not awaited_ranks, f"{cause} is told without waiting for ranks {awaited_ranks}"
    if cause.kind == "cancelled":
        cancelled_at_s = min(harm.at_s for harm in told if harm.kind == "cancelled")
        for harm in world.harms:
            if harm.kind in SILENT and was_heard(world, harm) and not is_harmless(world, harm):
                knowable = harm.sent < end.phase.position and harm.at_s + look_s(world) < cancelled_at_s
                assert not knowable, f"others were cancelled because of {harm}, and {cause} is told"


# -- time limits ------------------------------------------------------------------------------------------------------


def deadline_of(world: World, harm: Harm, end: Verdict) -> float:
    """Until when everyone that can be reached knows of it, if nothing comes before."""
    limits = world.limits
    slack_s = look_s(world) + 2 * world.weather.step_s + limits.window_s
    at_s = max(harm.at_s, world.ranks[LEADER].started_at_s or 0.0)
    if is_harmless(world, harm) or is_bearable(world, harm) or harm.sent == Phase.FINISH.position:
        return FOREVER
    if harm.kind == "error":
        return at_s + slack_s
    if harm.kind == "cancelled":  # the next beats of all others are waited for: has one died?
        return at_s + max(limits.window_s, (MISSED_BEATS + 2) * limits.heartbeat_s) + slack_s
    if harm.kind == "beats":
        return at_s + 2 * limits.heartbeat_s + slack_s
    if harm.kind == "killed" and (seen_at_s := was_seen(world, harm)) is not None:
        return max(at_s, seen_at_s) + slack_s
    if harm.kind == "stuck":  # its heartbeat goes on for a while
        at_s += limits.timeout_s
    if harm.kind in SILENT and was_heard(world, harm):
        return at_s + limits.timeout_s + 4 * limits.heartbeat_s + slack_s
    if harm.kind == "late" and end.phase is not Phase.CONFIG:
        return at_s + limits.timeout_s + LONGEST_WORK_S + 4 * limits.heartbeat_s + slack_s
    if harm.kind in {"absent", "late", *SILENT}:
        return at_s + limits.start_timeout_s + 4 * limits.heartbeat_s + slack_s
    awaited = [other for other in world.harms if other.kind in {"absent", "late", *SILENT}]  # all others must come
    busy_s = sum(other.for_s for other in world.harms if other.kind == "busy")
    return max([at_s + 2 * LONGEST_WORK_S + slack_s + busy_s] + [deadline_of(world, other, end) for other in awaited])


def check_limits(world: World, end: Verdict) -> None:
    """An explicit failure is known everywhere within the window and what messages take; silence within its limit."""
    deadline_s = min(deadline_of(world, harm, end) for harm in world.harms)
    for harm in harms_of(world, LEADER):
        if harm.kind in {*SILENT, "absent"} and harm.at_s <= deadline_s:
            deadline_s = max(deadline_s, deadline_of(world, harm, end))
    for rank in world.living:
        if rank.ended is None or rank.carrier_lost or rank.ended_at_s is None:
            continue
        out = [h for h in harms_of(world, rank.rank) if h.kind in {"frozen", "stuck", "cut off", "absent"}]
        back_s = [harm.at_s + harm.for_s + 2 * world.limits.heartbeat_s + look_s(world) for harm in out]
        if any(harm.kind in SILENT for harm in harms_of(world, LEADER)):  # who comes back may have to wait for it anew
            back_s = [at_s + world.limits.timeout_s + 2 * world.limits.heartbeat_s for at_s in back_s]
        started_s = rank.started_at_s or 0.0
        if started_s > ended_at_s(world):  # it came when all was over
            back_s.append(started_s + 2 * world.limits.heartbeat_s + look_s(world))
        limit_s = max([deadline_s, *back_s])
        assert rank.ended_at_s <= limit_s, f"rank {rank.rank} knows at {rank.ended_at_s}, not by {limit_s}"


def check_leaving(world: World) -> None:
    """The leader waits for those who read, and for no others, and never longer than it may."""
    if world.leave_s is None:
        return
    leader = world.ranks[LEADER]
    if not leader.alive or leader.left_at_s is None or harms_of(world, LEADER):
        return
    assert leader.leaving_at_s is not None
    most_s = leader.leaving_at_s + world.limits.grace_s + LONGEST_WORK_S
    assert leader.left_at_s <= most_s, f"rank 0 leaves at {leader.left_at_s}, not by {most_s}"
    others = [rank for rank in world.ranks if rank is not leader]
    if any(rank.left_at_s is None or rank.carrier_lost or harms_of_absence(world, rank) for rank in others):
        return
    last_s = max([leader.leaving_at_s + LONGEST_WORK_S] + [rank.left_at_s or 0.0 for rank in others])
    assert leader.left_at_s <= last_s + look_s(world), "all have said good-bye, and rank 0 still waits"


def harms_of_absence(world: World, rank: SimulatedRank) -> bool:
    return any(harm.kind in {*SILENT, "absent", "log"} for harm in harms_of(world, rank.rank))
