"""The Compose file, read: it is not run here."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.common.config import parse_config_args

from benchmarks._deployment import takes
from perdl_experiments._run_config import read_run_config
from perdl_experiments.studies import configure, find

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
NODES = {name: service for name, service in SERVICES.items() if name.startswith("ward-")}


def after(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_every_node_has_its_own_file_name_and_state() -> None:
    configs = {
        name: parse_config_args([after(node["command"], "--node-config")])
        for name, node in NODES.items()
    }
    assert [config["partition-id"] for config in configs.values()] == [0, 1, 2]
    for name, node in NODES.items():
        assert configs[name]["name"] == name
        mounts = dict(volume.split(":")[1::-1] for volume in node["volumes"])
        own = str(configs[name]["partition-id"])
        assert mounts[configs[name]["data"]] == f"./wards/{own}.npz"
        assert mounts[configs[name]["state-dir"]] == f"state-{own}"
        assert f"./wards/{own}.npz:/data/own.npz:ro" in node["volumes"]
        assert f"state-{own}" in COMPOSE["volumes"]
        assert node["environment"]["FLWR_PERDL_STATE_KEY"] == "${FLWR_PERDL_STATE_KEY:-}"


def test_all_talk_to_the_one_superlink_and_to_nobody_outside() -> None:
    port = after(SERVICES["superlink"]["command"], "--port")
    flower = tomllib.loads(COMPOSE["configs"]["flower"]["content"])
    assert flower["superlink"]["lan"]["address"] == f"superlink:{port}"
    for node in NODES.values():
        assert after(node["command"], "--superlink") == f"superlink:{port}"
    for service in SERVICES.values():
        assert service["networks"] == ["federation"]
        assert "ports" not in service
    assert COMPOSE["networks"]["federation"] == {"internal": True}


def test_the_run_is_of_an_experiment_with_its_options() -> None:
    config = parse_config_args([after(SERVICES["run"]["command"], "--run-config")])
    name, options = read_run_config(config)
    assert configure(find(name), options=options).clients == len(NODES)
    assert str(config["out"]).startswith(SERVICES["superlink"]["volumes"][0].split(":")[1])


@pytest.mark.slow
def test_flower_knows_the_options() -> None:
    """Today's Flower knows all of them; one whose SuperLink has no `--port` is too old."""
    run, word, *options = SERVICES["run"]["command"]
    commands = [(f"{run} {word}", options)]
    for service in (SERVICES["superlink"], *NODES.values()):
        command, *options = service["command"]
        commands.append((command, options))
    unknown = [
        (command, option)
        for command, options in commands
        for option in options
        if option.startswith("--") and not takes(command, option)
    ]
    if takes("flower-superlink", "--port"):
        assert unknown == []
    else:
        assert ("flower-superlink", "--port") in unknown
