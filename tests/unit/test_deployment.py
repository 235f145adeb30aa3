"""The files of docs/deployment are what they say, as far as that can be known without the systems that run them."""

from __future__ import annotations

import configparser
import pathlib
import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest

from asyncckpt import cli
from asyncckpt.protocol.endpoint import MAX_SOCKET_PATH_BYTES, socket_path
from asyncckpt_worker.cli import _config, _parser

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DEPLOYMENT = REPOSITORY / "docs" / "deployment"
PAGES = sorted(DEPLOYMENT.glob("*.md"))


def config_of(words: list[str], endpoint: str = "ipc:///run/x/w.sock") -> Any:
    """The worker's settings that these words make; fails for an option that there is not."""
    options = _parser().parse_args(words)
    options.endpoint = options.endpoint or endpoint
    return _config(options)


def test_the_page_names_the_default_of_the_drain() -> None:
    named = re.search(r"`--drain-timeout-s` \(([0-9]+) s\)", (DEPLOYMENT / "README.md").read_text())
    assert named is not None and int(named[1]) == config_of([]).drain_timeout_s


# ---- systemd


def unit() -> dict[str, dict[str, list[str]]]:
    """The unit by section and key; a key may stand several times."""

    class Several(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if isinstance(value, list) and isinstance(self.get(key), list):
                self[key].extend(value)
            else:
                super().__setitem__(key, value)

    parser = configparser.RawConfigParser(dict_type=Several, strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOYMENT / "asyncckpt-worker@.service").read_text())
    return {name: {key: value.split("\n") for key, value in parser[name].items()} for name in parser.sections()}


def test_the_unit_starts_a_worker_that_speaks_to_systemd_and_outlasts_its_drain() -> None:
    service = {key: values[0] for key, values in unit()["Service"].items()}
    assert service["Type"] == "notify" and service["NotifyAccess"] == "main"
    program, *words = shlex.split(service["ExecStart"])
    config = config_of([word.replace("%i", "alice") for word in words])
    assert program.endswith("/asyncckpt-worker") and config.supervised
    assert int(service["TimeoutStopSec"]) > config.drain_timeout_s + config.staging_grace_s
    assert service["RuntimeDirectoryMode"] == "0700"
    assert socket_path(config.endpoint) == f"/run/{service['RuntimeDirectory'].replace('%i', 'alice')}/worker.sock"
    assert config.idle_exit_s == 0, "systemd would take it for a success, and start none"
    assert set(config.roots) <= set(service["ReadWritePaths"].split())
    assert int(service["WatchdogSec"]) >= 10, "told at half of it, by a loop that turns every second"
    assert not {"PrivatePIDs", "PrivateUsers", "ProtectProc"} & set(service), "slots are opened through /proc/PID/fd"


def test_the_unit_has_only_what_systemd_knows() -> None:
    known = {
        "Unit": {"Description", "After", "RequiresMountsFor"},
        "Install": {"WantedBy"},
        "Service": {
            *("Type", "NotifyAccess", "User", "RuntimeDirectory", "RuntimeDirectoryMode", "ExecStart", "KillMode"),
            *("TimeoutStopSec", "WatchdogSec", "Restart", "RestartSec", "RestartPreventExitStatus", "MemoryMax"),
            *("OOMPolicy", "LimitNOFILE", "LimitMEMLOCK", "UMask", "NoNewPrivileges", "CapabilityBoundingSet"),
            *("ProtectSystem", "ReadWritePaths", "ProtectHome"),
        },
    }
    found = unit()
    assert set(found) == set(known)
    for section, keys in found.items():
        assert set(keys) <= known[section]
        assert all(len(values) == 1 for values in keys.values())


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: pathlib.Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (package systemd)")
    text = (DEPLOYMENT / "asyncckpt-worker@.service").read_text()
    path = tmp_path / "asyncckpt-worker@.service"
    path.write_text(text.replace("/opt/asyncckpt/bin/asyncckpt-worker", shutil.which("true") or "/bin/true"))
    found = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in found.stderr.splitlines() if path.stem in line]
    assert not said, said
    path.write_text(path.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    found = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60, check=False)
    assert "WatchdogSecs" in found.stderr, "it looks"


# ---- SLURM


def test_the_batch_script_is_one_and_its_options_are_ours() -> None:
    path = DEPLOYMENT / "train.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)
    text = path.read_text()
    inner = re.search(r"bash -c '\n(.*?)\n'", text, re.S)
    assert inner is not None
    subprocess.run(["bash", "-n", "-c", inner[1]], check=True, timeout=60)
    words = shlex.split(inner[1].replace("\\\n", " ").replace("$(hostname)", "host").replace('"$CHECKPOINTS"', "/c"))
    assert words[:3] == ["exec", "asyncckpt", "run"]
    parsed = cli.parser().parse_args(words[2:])
    assert parsed.words[:2] == ["--", "torchrun"] and parsed.advertise == "host"
    signal = re.search(r"--signal=TERM@(\d+)", text)
    assert signal is not None and int(signal[1]) > parsed.drain_timeout_s
    directives = re.findall(r"^#SBATCH (--[a-z-]+)", text, re.M)
    assert len(directives) == len(set(directives)) and text.index("#SBATCH") < text.index("set -euo")


def test_the_line_of_the_readme_for_several_nodes_starts_a_worker_that_the_others_reach() -> None:
    lines = re.findall(r"`(srun [^`]+)`", (REPOSITORY / "docs/guides/several-ranks.md").read_text())
    assert len(lines) == 1
    words = shlex.split(lines[0].replace("\n", " "))
    assert words[:4] == ["srun", "--ntasks-per-node=1", "sh", "-c"] and len(words) == 5, "a worker on each node"
    subprocess.run(["sh", "-n", "-c", words[4]], check=True, timeout=60)
    program, *options = shlex.split(words[4].replace("$(hostname)", "host"))
    config = config_of(options)
    assert program == "asyncckpt-worker" and (config.advertise, config.port) == ("host", 7400)


# ---- Kubernetes


@pytest.fixture
def pod() -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is in the dev extra only")
    job = yaml.safe_load((DEPLOYMENT / "sidecar.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    return job["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_manifest_is_valid_under_the_schemas_of_kubernetes(version: str) -> None:
    reason = "kubernetes-validate is in no extra: it brings the schemas of every version"
    validate = pytest.importorskip("kubernetes_validate", reason=reason)
    yaml = pytest.importorskip("yaml", reason="PyYAML is in the dev extra only")
    validate.validate(yaml.safe_load((DEPLOYMENT / "sidecar.yaml").read_text()), version, strict=True)


def test_the_sidecar_shares_what_slots_and_socket_need(pod: Any) -> None:
    (worker,), (trainer,) = pod["initContainers"], pod["containers"]
    assert pod["shareProcessNamespace"] is True and worker["restartPolicy"] == "Always"
    assert worker["securityContext"] == trainer["securityContext"] and pod["securityContext"]["runAsNonRoot"]
    assert worker["volumeMounts"] == trainer["volumeMounts"] and worker["env"] == trainer["env"]
    assert {mount["name"] for mount in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (variable,) = worker["env"]
    assert variable["name"] == "ASYNCCKPT_ENDPOINT"
    mounts = {mount["name"]: mount["mountPath"] for mount in worker["volumeMounts"]}
    directory = pathlib.Path(socket_path(variable["value"])).parent
    assert str(directory.parent) == mounts["run"], "the volume's own directory is open to the group"
    assert len(socket_path(variable["value"])) <= MAX_SOCKET_PATH_BYTES


def test_the_sidecars_worker_takes_its_options_and_has_time_to_drain(pod: Any) -> None:
    (worker,) = pod["initContainers"]
    config = config_of(worker["args"], worker["env"][0]["value"])
    assert worker["command"] == ["asyncckpt-worker"] and config.idle_exit_s == 0
    assert pod["terminationGracePeriodSeconds"] > config.drain_timeout_s + config.staging_grace_s
    assert list(config.roots) == [m["mountPath"] for m in worker["volumeMounts"] if m["name"] == "checkpoints"]
    for probe in ("startupProbe", "livenessProbe"):
        program, *words = worker[probe]["exec"]["command"]
        assert program == "asyncckpt" and cli.parser().parse_args(words).action == "status"


# ---- the pages


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_page_says_what_survives_what_and_links_and_tests_exist(page: pathlib.Path) -> None:
    text = page.read_text()
    if page.stem != "README":
        assert "| what is lost | what survives | where a restart continues |" in text
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`(tests/[\w/]+\.py)", text):
        assert (REPOSITORY / name).is_file(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_shell_of_every_page_is_shell_and_knows_our_options(page: pathlib.Path) -> None:
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S):
        subprocess.run(["bash", "-n", "-c", block], check=True, timeout=60)
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.replace('"$(hostname)"', "host"), comments=True)
            if words[:1] == ["asyncckpt"]:
                cli.parser().parse_args(words[1:])
