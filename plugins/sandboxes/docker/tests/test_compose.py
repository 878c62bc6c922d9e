"""Compose files: what is read of them, and that everything else is refused with file and key."""

from __future__ import annotations

import os
from collections.abc import Callable
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


def bomb() -> str:
    """A list that stands for 10 ** 12 words."""
    lists = ["x-0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lists += [f"x-{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return "\n".join([*lists, "services: {db: {image: a, command: [*a11]}}"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services: " + "[" * 20_000 + "]" * 20_000, "is nested too deeply"),
        ("services: {db: {image: a, hostname: 2001-99-99}}", "month must be in 1..12"),
        ("services: !!map foo", "expected a mapping node"),
        ('services: {main: {command: [sh, -c, "it\'s"]}}', 'services.main.command: "it\'s": No closing quotation'),
        ('services: {db: {build: "a\\0b"}}', "services.db.build.context: 'a\\x00b' has a NUL"),
        ('services: {db: {image: a, environment: ["A=\\0"]}}', "services.db.environment: 'A=\\x00' has a NUL"),
        (
            "services: {db: {image: a, healthcheck: {test: x, 1: a, b: c}}}",
            "services.db.healthcheck.1: is not supported",
        ),
        (
            "services: {db: {image: a, healthcheck: {test: x, disable: 'no'}}}",
            "services.db.healthcheck.disable: must be",
        ),
        ("services: {db: {image: a, healthcheck: {test: x, interval: 9999999999h}}}", "longer than a year"),
        ("services: {db: {image: a}}\nnetworks: {n: {internal: 'true'}}", "networks.n.internal: must be true or false"),
        (
            "services: {db: {build: 'https://host/a.git'}}",
            "services.db.build.context: https://host/a.git: URL contexts",
        ),
        ("services: {db: {build: 'git@host:a.git'}}", "URL contexts are not supported"),
        ("services: {a: {image: x, depends_on: [b]}, b: {image: x, depends_on: [a]}}", "depends on itself"),
        ("services: {db: {image: a, command: [{a: b}]}}", "services.db.command: must be a string"),
        (bomb(), "services.db.command: must be a string"),
        ("services: {db: {image: a, user: " + "9" * 5000 + "}}", "integer string"),
        ("? [a]\n: b", "docker-compose.yaml"),
        ("services: {db: {? {a: b} : c}}", "docker-compose.yaml"),
        ("", "has no services"),
    ],
)
def test_whatever_a_file_holds_the_error_names_it(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TaskError) as refusal:
        read(tmp_path, text)
    assert str(tmp_path / "docker-compose.yaml") in refusal.value.message
    assert said in refusal.value.message


def test_a_long_chain_of_dependencies_is_in_order(tmp_path: Path) -> None:
    chain = "".join(f"  s{n}: {{image: a, depends_on: [s{n + 1}]}}\n" for n in range(1199))
    project = read(tmp_path, f"services:\n{chain}  s1199: {{image: a}}\n")
    assert [service.name for service in project.services if service.name != "main"] == [
        f"s{n}" for n in range(1199, -1, -1)
    ]


def test_a_name_may_be_a_number(tmp_path: Path) -> None:
    project = read(tmp_path, "services: {1: {image: a}, db: {image: b, depends_on: [1]}}")
    assert [service.name for service in project.services if service.name != "main"] == ["1", "db"]


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: os.mkfifo(path), lambda path: None])
def test_what_is_no_file_is_an_error_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "docker-compose.yaml")
    with pytest.raises(TaskError, match=r"docker-compose.yaml: cannot be read"):
        read_compose(tmp_path / "docker-compose.yaml")


@pytest.mark.parametrize(
    ("service", "near"),
    [
        ("imgae: a", "image"),
        ("build: {contxt: .}", "context"),
        ("image: a\n    healthcheck: {test: x, intervall: 1s}", "interval"),
    ],
)
def test_a_key_that_is_misspelt_names_the_nearest(tmp_path: Path, service: str, near: str) -> None:
    with pytest.raises(TaskError) as refusal:
        read(tmp_path, f"services:\n  db:\n    {service}\n")
    assert refusal.value.remedy == f"did you mean {near!r}?"
