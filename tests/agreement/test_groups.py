"""Who takes part: what `group=` and the environment mean, before any rank is met."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from loader_service.agreement.group import Rendezvous, from_environment, join_group
from loader_service.errors import ConfigError

SETTINGS = SimpleNamespace(timeout_s=60.0, start_timeout_s=600.0, grace_s=10.0)
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("choice", "environ"),
    [
        pytest.param("solo", {"WORLD_SIZE": "8"}, id="solo whatever else"),
        pytest.param(None, {}, id="nothing says otherwise"),
        pytest.param(None, {"WORLD_SIZE": "1"}, id="torchrun with one rank"),
        pytest.param(None, {"WORLD_SIZE": ""}, id="an empty variable"),
        pytest.param(None, {"SLURM_NTASKS": "8", "PMI_SIZE": "8"}, id="an interactive allocation"),
        pytest.param(Rendezvous("host:1", 0, 1, "n"), {}, id="a rendezvous of one"),
    ],
)
def test_alone(choice: Any, environ: Mapping[str, str]) -> None:
    group = join_group(choice, settings=SETTINGS, environ=environ)
    assert (group.rank, group.world_size) == (0, 1)
    group.close()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_ranks_that_nobody_connected_are_refused_and_told_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 2.*init_process_group.*Rendezvous.*solo"):
        join_group(None, settings=SETTINGS, environ={name: "2"})


@pytest.mark.parametrize("choice", ["all", 7, object()], ids=["text", "number", "object"])
def test_what_is_no_group_is_refused(choice: Any) -> None:
    with pytest.raises(ConfigError, match="it takes None, 'solo', a torch"):
        join_group(choice, settings=SETTINGS, environ={})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param(("host:1", 2, 2, "n"), "rank 2 is not one of 2", id="rank beyond"),
        pytest.param(("host:1", -1, 2, "n"), "rank -1", id="negative rank"),
        pytest.param(("host:1", 0, 0, "n"), "0 ranks", id="no ranks"),
        pytest.param(("host", 0, 2, "n"), "not an address", id="no port"),
        pytest.param((":29500", 0, 2, "n"), "not an address", id="no host"),
        pytest.param(("host:99999", 0, 2, "n"), "not an address: ports", id="port beyond"),
        pytest.param(("host:٢", 0, 2, "n"), "not an address", id="digits of another script"),
        pytest.param(("fe80::1:29500", 0, 2, "n"), "not an address", id="IPv6 without brackets"),
        pytest.param(("[]:29500", 0, 2, "n"), "not an address", id="nothing in brackets"),
        pytest.param(("[host]:29500", 0, 2, "n"), "not an address", id="a name in brackets"),
        pytest.param(("host:1", "0", 2, "n"), "rank is '0', which is no number", id="rank as text"),
        pytest.param(("host:1", 0, None, "n"), "world_size is None", id="no size"),
        pytest.param(("host:1", 0, 2, ""), "nonce is ''", id="an empty nonce"),
        pytest.param(("host:1", 0, 2, 7), "nonce is 7", id="a nonce that is no text"),
    ],
)
def test_a_rendezvous_is_checked_when_it_is_made(arguments: tuple[Any, Any, Any, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Rendezvous(*arguments)


def test_a_rendezvous_over_what_is_no_store_is_refused() -> None:
    with pytest.raises(ConfigError, match="dict is neither"):
        join_group(Rendezvous({}, 0, 2, "n"), settings=SETTINGS, environ={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, None, id="none"),
        pytest.param(TORCHRUN | {"WORLD_SIZE": "1"}, None, id="one rank"),
        pytest.param(TORCHRUN, Rendezvous("10.0.0.1:29500", 2, 4, "env.0"), id="by hand: rank 0 serves"),
        pytest.param(
            TORCHRUN
            | {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RUN_ID": "job",
                "TORCHELASTIC_RESTART_COUNT": "3",
            },
            Rendezvous("10.0.0.1:29500", 2, 4, "job.3", served=True),
            id="torchrun: its agent serves",
        ),
        pytest.param(
            TORCHRUN | {"MASTER_ADDR": "fe80::1"}, Rendezvous("[fe80::1]:29500", 2, 4, "env.0"), id="an IPv6 address"
        ),
        pytest.param(
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "1",
            },
            Rendezvous("h:1", 1, 2, "env.0"),
            id="mpirun",
        ),
    ],
)
def test_the_environment_says_where_ranks_meet(environ: Mapping[str, str], expected: Rendezvous | None) -> None:
    assert from_environment(environ) == expected


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_refused(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing} is not set"):
        from_environment({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize("value", ["two", "-1", "1.5", "٢"])
def test_a_number_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="which is no number"):
        join_group(None, settings=SETTINGS, environ={"WORLD_SIZE": value})
