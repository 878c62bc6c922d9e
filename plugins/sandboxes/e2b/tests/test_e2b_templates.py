"""Environments as templates of E2B: what is built, once for one content, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rl_harness.contracts.sandbox import EnvironmentSpec, Limits, SandboxSpec
from rl_harness.errors import SandboxError, Unsupported
from rl_harness_e2b.provider import E2BProvider

pytestmark = pytest.mark.needs("root", "userns", "e2b")

BUILDS = "POST /v3/templates"
DOCKERFILE = """
ARG VERSION=1
FROM --platform=linux/amd64 python:3.12
ARG GREETING=hello
ENV MODE=built WORD="two words"
WORKDIR /srv
COPY data/ ./data/
COPY --chmod=0755 tool.sh /usr/local/bin/tool
RUN echo "$GREETING" > greeting \\
    && echo made > data/made
CMD ["sleep", "1"]
"""


def environment(folder: Path, dockerfile: str = DOCKERFILE, **fields: object) -> EnvironmentSpec:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data/given").write_text("given\n")
    (folder / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (folder / "Dockerfile").write_text(dockerfile)
    return EnvironmentSpec(directory=folder, dockerfile=folder / "Dockerfile", workdir="/srv", **fields)


async def test_a_dockerfile_is_built_once_and_its_content_is_there(
    provider: E2BProvider, stand_in, tmp_path: Path
) -> None:
    spec = SandboxSpec(environment=environment(tmp_path))
    first, second = await asyncio.gather(provider.create(spec), provider.create(spec))
    for sandbox in (first, second):
        shown = await sandbox.exec("cat greeting data/given data/made; tool; echo $MODE $WORD; pwd")
        assert shown.stdout == b"hello\ngiven\nmade\ntool\nbuilt two words\n/srv\n"
    other = E2BProvider(E2BProvider.Options())
    await other.create(spec)
    assert await other.fingerprint(spec) == await provider.fingerprint(spec)
    await other.close()
    assert stand_in.ask("calls")[BUILDS] == 1
    [name] = [name for name in stand_in.ask("templates") if name != "base"]
    assert "startCmd" not in stand_in.ask("build", template=name)


async def test_another_content_is_another_template(provider: E2BProvider, stand_in, tmp_path: Path) -> None:
    spec = SandboxSpec(environment=environment(tmp_path))
    seen = {(await provider.fingerprint(spec))["template"]}
    (tmp_path / "data/given").write_text("other\n")
    seen.add((await provider.fingerprint(spec))["template"])
    environment(tmp_path, DOCKERFILE.replace("MODE=built", "MODE=other"))
    seen.add((await provider.fingerprint(spec))["template"])
    asked = E2BProvider(E2BProvider.Options(build_args={"GREETING": 'say "5"'}))
    seen.add((await asked.fingerprint(spec))["template"])
    sandbox = await asked.create(spec)
    assert (await sandbox.exec("cat greeting")).stdout == b'say "5"\n'
    await asked.close()
    assert len(seen) == 4


async def test_limits_are_the_templates(provider: E2BProvider, stand_in) -> None:
    limits = Limits(memory=257 << 20, cpus=2)
    await provider.create(SandboxSpec(environment=EnvironmentSpec(image="python:3.12"), limits=limits))
    sandbox = await provider.create(SandboxSpec(limits=limits))
    from e2b import AsyncSandbox

    info = await AsyncSandbox.get_info(sandbox.id)
    assert (info.cpu_count, info.memory_mb) == (2, 258)
    assert stand_in.ask("calls")[BUILDS] == 2


async def test_a_build_that_fails_shows_its_output_and_is_tried_again(
    provider: E2BProvider, stand_in, tmp_path: Path
) -> None:
    spec = SandboxSpec(environment=environment(tmp_path, "FROM python:3.12\nRUN echo the reason >&2; exit 7\n"))
    for _ in range(2):
        with pytest.raises(SandboxError, match=r"exit status 7(.|\n)*the reason"):
            await provider.create(spec)
    assert stand_in.ask("calls")[BUILDS] == 2


async def test_an_image_that_does_not_exist_is_said_in_e2bs_words(provider: E2BProvider, stand_in) -> None:
    with pytest.raises(SandboxError, match="failed to pull image 'nobody/has-it:1'"):
        await provider.create(SandboxSpec(environment=EnvironmentSpec(image="nobody/has-it:1")))


async def test_a_template_that_does_not_exist_is_said(stand_in) -> None:
    provider = E2BProvider(E2BProvider.Options(template="nobody-has-it"))
    with pytest.raises(SandboxError, match="template 'nobody-has-it' not found"):
        await provider.create(SandboxSpec())
    await provider.close()


async def test_a_build_that_takes_too_long_is_given_up(provider: E2BProvider, stand_in, tmp_path: Path) -> None:
    spec = environment(tmp_path, "FROM python:3.12\nRUN sleep 600\n", build_timeout=0.5)
    with pytest.raises(SandboxError, match=r"not built within 0\.5 s"):
        await provider.create(SandboxSpec(environment=spec))


@pytest.mark.parametrize(
    ("dockerfile", "reason"),
    [
        ("FROM python AS a\nFROM python\nCOPY --from=a /x /x\n", "Multi-stage"),
        ("RUN true\n", "FROM"),
        ("FROM python\nADD https://example.org/x /x\n", "remote URL"),
        ("FROM python\nHEALTHCHECK CMD true\n", "HEALTHCHECK"),
        ("FROM python\nCOPY ../outside /x\n", "outside"),
        ("FROM python\nCOPY missing /x\n", "missing"),
    ],
    ids=["stages", "no base", "url", "unknown", "outside", "missing"],
)
async def test_what_e2b_cannot_build_is_refused_with_the_reason(
    dockerfile: str, reason: str, provider: E2BProvider, tmp_path: Path
) -> None:
    spec = SandboxSpec(environment=environment(tmp_path, dockerfile))
    for asked in (provider.check, provider.create):
        with pytest.raises(Unsupported, match=reason) as caught:
            await asked(spec)
        assert str(tmp_path / "Dockerfile") in str(caught.value)
