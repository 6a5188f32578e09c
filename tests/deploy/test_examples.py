"""The examples of deploy/: Docker Compose, Kubernetes' schemas and systemd take them, and they agree with each other
and with the program."""

from __future__ import annotations

import ipaddress
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

import loader_service as ls
from loader_service import errors
from loader_service.cli.commands import app
from loader_service.memory.admission import Room, reserve_of
from loader_service.sizes import parse_size
from tests.deploy.examples import (
    DEPLOY,
    KUBERNETES,
    MODEL,
    ROOT,
    UNIT,
    compose,
    engine,
    kubernetes,
    last_stage,
    pod,
    sidecar,
    unit,
)

GIB = 1 << 30
OLDEST, NEWEST = "1.29", kubernetes_validate.latest_version()  # the first with native sidecars; the newest known
PORT = 9595
CONFIG = "/etc/loader-service/model.yaml"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("kind", ["ConfigMap", "Deployment"])
def test_kubernetes_schemas_take_the_manifests(kind: str, version: str) -> None:
    """Strictly: keys that the schema does not know are refused too."""
    assert set(kubernetes()) == {"ConfigMap", "Deployment"}
    assert kubernetes_validate.validate(kubernetes()[kind], version, strict=True) == ".".join(version.split(".")[:2])


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Without a word, where systemd is installed. The program stands in for the one that the unit starts."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = UNIT.read_text()
    assert text.count("=/opt/loader-service/bin/loader-service ") == 1
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace("=/opt/loader-service/bin/loader-service ", f"={sys.executable} "))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


YES_OR_NO = r"yes|no"
KNOWN_KEYS = {
    "Unit": {"Description": r".+", "After": r"[\w@. -]+", "Wants": r"[\w@. -]+"},
    "Service": {
        "Type": r"notify",
        "TimeoutStartSec": r"1h",
        "User": r"[a-z_-]+",
        "Group": r"[a-z_-]+",
        "Environment": r"[A-Z_]+=\S+",
        "EnvironmentFile": r"-?/\S+",
        "ExecStart": r"/\S+( \S+)*",
        "RuntimeDirectory": r"[\w%/-]+",
        "RuntimeDirectoryMode": r"0[0-7]{3}",
        "Restart": r"on-failure|always",
        "RestartSec": r"\d+",
        "RestartPreventExitStatus": r"\d+( \d+)*",
        "SuccessExitStatus": r"\d+( \d+)*",
        "KillMode": r"mixed|control-group",
        "TimeoutStopSec": r"\d+",
        "MemoryMax": r"\d+G",
        "MemorySwapMax": r"0",
        "LimitNOFILE": r"\d+",
        "LimitMEMLOCK": r"infinity",
        "OOMScoreAdjust": r"-?\d+",
        "CapabilityBoundingSet": r"",
        "ProtectSystem": r"strict",
        "ProtectHome": r"read-only",
        "RestrictAddressFamilies": r"AF_[A-Z0-9]+( AF_[A-Z0-9]+)*",
        "SystemCallArchitectures": r"native",
        "SystemCallFilter": r"@system-service",
        "SystemCallErrorNumber": r"E[A-Z]+",
        "UMask": r"0[0-7]{3}",
    },
    "Install": {"WantedBy": r"[\w.-]+\.target"},
}
SWITCHES = re.compile(r"NoNewPrivileges|LockPersonality|Private(Tmp|Devices)|Protect[A-Z]\w+|Restrict[A-Z]\w+")


def test_the_unit_has_known_keys_with_possible_values() -> None:
    """What holds where systemd is not installed: no key is misspelt, no value is of another kind."""
    assert unit().sections() == list(KNOWN_KEYS)
    for section, known in KNOWN_KEYS.items():
        for key, value in unit()[section].items():
            pattern = known.get(key) or (YES_OR_NO if SWITCHES.fullmatch(key) else known[key])
            assert re.fullmatch(pattern, value), f"{section}.{key}={value}"


def serve_commands() -> dict[str, list[str]]:
    """The service's command line in every file that starts it."""
    environment = dict([unit()["Service"]["Environment"].split("=", 1)])
    started = unit()["Service"]["ExecStart"].replace("%i", "model")
    for name, value in environment.items():
        started = started.replace(f"${{{name}}}", value)
    return {
        "Dockerfile": yaml.safe_load(last_stage()["CMD"]),
        "compose.yaml": compose()["services"]["loader"]["command"],
        "kubernetes.yaml": sidecar()["args"],
        UNIT.name: [Path(started.split()[0]).name, *started.split()[1:]],
    }


@pytest.mark.parametrize("file", ["Dockerfile", "compose.yaml", "kubernetes.yaml", UNIT.name])
def test_every_file_starts_the_service_alike(file: str) -> None:
    program, command, config, option, address = serve_commands()[file]
    assert (program, command, config, option) == ("loader-service", "serve", CONFIG, "--http")
    host, port = address.rsplit(":", 1)
    assert int(port) == PORT
    # Of a machine's own addresses the loopback; within a container all, since probes come from outside of it.
    assert ipaddress.ip_address(host).is_loopback == (file == UNIT.name)


@pytest.mark.parametrize("file", ["Dockerfile", "compose.yaml", "kubernetes.yaml", UNIT.name])
def test_the_program_knows_the_command_line(file: str) -> None:
    commands: Mapping[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    assert "load" in commands
    serve = commands["serve"]
    options = {name for parameter in serve.params for name in parameter.opts}
    used = {word for word in serve_commands()[file] if word.startswith("--")}
    assert used <= options, f"serve has {sorted(options)}"


def models() -> dict[str, dict[str, Any]]:
    """The loader's configuration in every file that has one."""
    inline = kubernetes()["ConfigMap"]["data"]["model.yaml"]
    return {"model.yaml": yaml.safe_load(MODEL.read_text()), "kubernetes.yaml": yaml.safe_load(inline)}


@pytest.mark.parametrize("file", ["model.yaml", "kubernetes.yaml"])
def test_the_loader_takes_the_configuration(file: str) -> None:
    config = ls.config_from_dict(models()[file])
    assert set(config.loads) == {"target", "draft"}


def test_the_configurations_differ_in_the_socket_alone() -> None:
    plain, in_a_pod = models().values()
    sockets = [document["serve"].pop("socket") for document in (plain, in_a_pod)]
    assert plain == in_a_pod
    assert sockets[0] == "auto"
    folder = str(Path(sockets[1]).parent)
    mounts = [{mount["mountPath"]: mount["name"] for mount in who["volumeMounts"]} for who in (sidecar(), engine())]
    assert mounts[0][folder] == mounts[1][folder]
    (volume,) = (volume for volume in pod()["volumes"] if volume["name"] == mounts[0][folder])
    assert volume["emptyDir"]["medium"] == "Memory"


def test_worker_and_service_see_the_same_files() -> None:
    for path in ("/models", "/etc/loader-service"):
        assert any(mount["mountPath"] == path for mount in engine()["volumeMounts"])
    volumes = [service["volumes"] for service in compose()["services"].values()]
    assert volumes[0] == volumes[1]
    assert all(volume["read_only"] for volume in volumes[0])
    assert {volume["target"] for volume in volumes[0]} == {"/models", CONFIG}
    assert Path(volumes[0][1]["source"]) == MODEL
    root = models()["model.yaml"]["checkpoint"]["path"]
    assert Path(root).is_relative_to("/models")


def test_worker_and_service_can_meet() -> None:
    """The abstract socket needs one network namespace, every socket one user: the image's."""
    loader, worker = (compose()["services"][name] for name in ("loader", "worker"))
    assert (worker["network_mode"], worker["ipc"], loader["ipc"]) == ("service:loader", "service:loader", "shareable")
    assert worker["depends_on"]["loader"]["condition"] == "service_healthy"
    security = pod()["securityContext"]
    in_the_pod = f"{security['runAsUser']}:{security['runAsGroup']}"
    assert {loader["user"], worker["user"], in_the_pod} == {last_stage()["USER"]}
    assert all("runAsUser" not in who["securityContext"] for who in (sidecar(), engine()))


def test_probes_ask_what_the_service_answers() -> None:
    probes = {name: sidecar()[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/healthz"}
    ports = {port["name"]: port["containerPort"] for port in sidecar()["ports"]}
    assert {ports[probe["httpGet"]["port"]] for probe in probes.values()} == {PORT}
    annotations = kubernetes()["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(PORT)
    (published,) = compose()["services"]["loader"]["ports"]
    assert (published["host_ip"], published["target"]) == ("127.0.0.1", PORT)
    assert f"http://127.0.0.1:{PORT}/healthz" in last_stage()["HEALTHCHECK"]


def test_the_service_has_no_more_rights_than_it_needs() -> None:
    wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert sidecar()["securityContext"] == wanted
    assert engine()["securityContext"].items() <= wanted.items()
    assert pod()["securityContext"]["runAsNonRoot"] is True
    loader = compose()["services"]["loader"]
    assert (loader["read_only"], loader["cap_drop"]) == (True, ["ALL"])
    assert loader["security_opt"] == ["no-new-privileges:true"]


def test_the_memory_that_the_examples_count_is_admitted() -> None:
    """By the rule of admission itself: beside what is kept and what the process has, the reserve stays free."""
    counted = re.search(r"(\d+) GiB kept.*?(\d+) GiB for the process", KUBERNETES.read_text(), re.DOTALL)
    assert counted is not None
    kept, process = (int(figure) * GIB for figure in counted.groups())
    resources = sidecar()["resources"]
    assert resources["requests"] == resources["limits"]
    assert engine()["resources"]["requests"] == engine()["resources"]["limits"]
    limit = parse_size(resources["limits"]["memory"] + "B")
    free = limit - process
    assert kept <= free - reserve_of(Room("cgroup", limit, free), "auto") < kept + GIB
    loader = compose()["services"]["loader"]
    assert int(loader["mem_limit"]) == int(loader["memswap_limit"]) == limit
    assert unit()["Service"]["MemoryMax"] == f"{limit // GIB}G"


def test_everywhere_everything_may_take_an_hour_to_be_there() -> None:
    probe = sidecar()["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600
    assert compose()["services"]["loader"]["healthcheck"]["start_period"] == "1h0m0s"
    assert unit()["Service"]["TimeoutStartSec"] == "1h"


def test_what_is_started_again_and_how_long_ending_may_take() -> None:
    service = unit()["Service"]
    final = {errors.EXIT_USAGE, errors.EXIT_CHECKPOINT, errors.EXIT_MEMORY}
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == final
    assert service["SuccessExitStatus"] == str(errors.EXIT_INTERRUPTED)
    grace_s = ls.config_from_dict({"checkpoint": {"path": "x"}, "loads": {"x": {}}}).agreement.grace_s
    assert compose()["services"]["loader"]["stop_grace_period"] == "1m0s"
    for limit_s in (int(service["TimeoutStopSec"]), pod()["terminationGracePeriodSeconds"], 60):
        assert limit_s > 2 * grace_s


def test_the_document_links_every_example() -> None:
    text = (ROOT / "docs/deployment.md").read_text()
    linked = re.findall(r"\]\(\.\./deploy/([^)#]+)\)", text)
    assert sorted(linked) == sorted(path.name for path in DEPLOY.iterdir())
