"""Compose files: what is read of them, and that everything else is refused with file and key."""

from __future__ import annotations

from pathlib import Path

import pytest
from rl_harness.errors import TaskError
from rl_harness_docker.compose import Check, Project, read_compose


def read(folder: Path, text: str) -> Project:
    file = folder / "docker-compose.yaml"
    file.write_text(text)
    return read_compose(file)


FULL = """
version: "3.8"
x-common: &common
  environment: {A: 1, B: "two"}
services:
  main:
    depends_on: {db: {condition: service_healthy}, seed: {condition: service_completed_successfully}}
    environment: [PGHOST=db, "PRICE=5$$"]
    networks: [default, back]
  seed:
    <<: *common
    build: {context: seed, args: {V: "1"}, target: last}
    depends_on: [db]
    networks: {back: }
  db:
    image: postgres:${VERSION:-16}
    command: postgres -c 'fsync=off'
    healthcheck: {test: ["CMD", "pg_isready"], interval: 1m30s, timeout: 500ms, retries: 5}
    expose: [5432]
    restart: "no"
networks:
  back: {internal: true}
"""


def test_services_are_read_in_the_order_of_their_dependencies(tmp_path: Path) -> None:
    project = read(tmp_path, FULL)
    assert [service.name for service in project.services] == ["db", "seed", "main"]
    assert project.networks == {"default": False, "back": True}
    db, seed, main = project.services
    assert (db.image, db.command) == ("postgres:16", ("postgres", "-c", "fsync=off"))
    assert db.healthcheck == Check(test=("CMD", "pg_isready"), interval=90.0, timeout=0.5, retries=5)
    assert seed.build is not None
    assert (seed.build.context, seed.build.args, seed.build.target) == (tmp_path / "seed", {"V": "1"}, "last")
    assert (seed.environment, seed.networks) == ({"A": "1", "B": "two"}, ("back",))
    assert main is project.main
    assert main.environment == {"PGHOST": "db", "PRICE": "5$"}
    assert main.depends_on == {"db": "service_healthy", "seed": "service_completed_successfully"}


def test_the_agents_service_may_be_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, "services: {db: {image: a}}").main.image is None


@pytest.mark.parametrize(
    ("service", "key"),
    [
        ("privileged: true", "services.db.privileged"),
        ("volumes: ['/var/run/docker.sock:/var/run/docker.sock']", "services.db.volumes"),
        ("volumes: ['./data:/data']", "services.db.volumes"),
        ("network_mode: host", "services.db.network_mode"),
        ("pid: host", "services.db.pid"),
        ("ipc: host", "services.db.ipc"),
        ("userns_mode: host", "services.db.userns_mode"),
        ("devices: ['/dev/kvm']", "services.db.devices"),
        ("cap_add: [SYS_ADMIN]", "services.db.cap_add"),
        ("security_opt: ['seccomp:unconfined']", "services.db.security_opt"),
        ("ports: ['80:80']", "services.db.ports"),
        ("env_file: .env", "services.db.env_file"),
        ("environment: [TOKEN]", "services.db.environment.TOKEN"),
        ("environment: {TOKEN: }", "services.db.environment.TOKEN"),
        ("environment: {TOKEN: '${TOKEN}'}", "services.db.environment.TOKEN"),
        ("deploy: {replicas: 2}", "services.db.deploy"),
        ("imgae: a", "services.db.imgae"),
        ("restart: always", "services.db.restart"),
        ("depends_on: [web]", "services.db.depends_on"),
        ("depends_on: [db]", "services.db.depends_on"),
        ("networks: [other]", "services.db.networks"),
        ("build: ../outside", "services.db.build.context"),
        ("build: {context: ., ssh: default}", "services.db.build.ssh"),
        ("healthcheck: {test: x, interval: soon}", "services.db.healthcheck.interval"),
    ],
)
def test_what_reaches_outside_or_would_be_ignored_is_refused(tmp_path: Path, service: str, key: str) -> None:
    with pytest.raises(TaskError) as refusal:
        read(tmp_path, f"services:\n  db:\n    image: a\n    {service}\n")
    assert f"docker-compose.yaml: {key}: " in refusal.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services: {db: {}}", "services.db: needs an image or a build"),
        ("services: []", "has no services"),
        ("services: {main: {command: ./server}}", "services.main.command"),
        ("services: {main: {healthcheck: {test: x}}}", "services.main.healthcheck"),
        ("services: {a: {image: x, image: y}}", "is there twice"),
        ("services: {a: {image: [}", "docker-compose.yaml"),
        ("services: {a: {image: x}}\nvolumes: {data: }", "volumes: is not supported"),
        ("services: {a: {image: x}}\nnetworks: {n: {external: true}}", "networks.n.external"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TaskError) as refusal:
        read(tmp_path, text)
    assert said in refusal.value.message


@pytest.mark.parametrize("command", ["sleep infinity", '["sh", "-c", "sleep infinity"]', "tail -f /dev/null"])
def test_the_agents_container_may_be_told_to_wait(tmp_path: Path, command: str) -> None:
    assert read(tmp_path, f"services: {{main: {{command: {command}}}}}").main.command
