"""The containers beside the agent's: networks of their own, started in order, waited for, removed together."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from rl_harness.contracts.sandbox import Limits, NetworkPolicy
from rl_harness.errors import SandboxError

from rl_harness_docker import containers
from rl_harness_docker.compose import MAIN, Project, Service
from rl_harness_docker.engine import Engine, EngineError
from rl_harness_docker.networks import make_private
from rl_harness_docker.options import DockerOptions
from rl_harness_docker.sandbox import remove_or_warn

_POLL = 0.1


class Services:
    """The services of one sandbox ``name``. :meth:`close` removes whatever of them there is."""

    def __init__(
        self, engine: Engine, options: DockerOptions, owner: str, name: str, project: Project, given: Mapping[str, str]
    ) -> None:
        self._engine = engine
        self._options = options
        self._name = name
        self._project = project
        self._labels = containers.labels("service", owner, given)
        self._network_labels = containers.labels("network", owner, given)
        self.containers: dict[str, str] = {}

    async def make_networks(self, policy: NetworkPolicy) -> None:
        """Those of the file; without a way out unless the policy has one."""
        for network, internal in self._project.networks.items():
            closed = internal or policy is not NetworkPolicy.FULL
            await make_private(self._engine, self.network(network), closed, self._network_labels)

    def bypass(self, env: Mapping[str, str]) -> dict[str, str]:
        """Where programs in the agent's container are told of a proxy, they are told that services are nearer."""
        own = self._project.main.environment
        names = [name for service in self._project.services for name in (service.name, service.hostname) if name]
        return {
            key: ",".join(dict.fromkeys(filter(None, (env[key], own.get(key), *names))))
            for key in ("NO_PROXY", "no_proxy")
            if key in env
        }

    def network(self, name: str) -> str:
        return f"{self._name}-{name}"

    def first_network(self, service: Service) -> dict[str, Any]:
        """The part of a container's form that joins it to the first of its networks."""
        name = self.network(service.networks[0])
        return {"EndpointsConfig": {name: {"Aliases": [service.name]}}}

    async def join_others(self, container: str, service: Service) -> None:
        for network in service.networks[1:]:
            body = {"Container": container, "EndpointConfig": {"Aliases": [service.name]}}
            await self._engine.request("POST", f"/networks/{self.network(network)}/connect", body=body)

    async def start(self, images: Mapping[str, Mapping[str, Any]], timeout: float) -> None:
        """Start all but the agent's, each when what it depends on is as far as it asks for."""
        try:
            async with asyncio.timeout(timeout):
                for service in self._project.services:
                    for other, condition in service.depends_on.items():
                        if other != MAIN:
                            await self._reached(other, condition)
                    if service.name != MAIN:
                        await self._start(service, images[service.name])
        except TimeoutError:
            raise SandboxError(
                f"the services of {self._name} were not ready within {timeout:g} s",
                remedy="raise [environment] build_timeout_sec, or look at their health checks",
            ) from None

    async def _start(self, service: Service, image: Mapping[str, Any]) -> None:
        check = service.healthcheck
        body: dict[str, Any] = {
            "Image": image["Id"],
            "Env": [f"{key}={value}" for key, value in service.environment.items()],
            "Labels": self._labels,
            "NetworkingConfig": self.first_network(service),
            "HostConfig": {
                **containers.security(self._options),
                **containers.limits_of(Limits(), self._options),
                "NetworkMode": self.network(service.networks[0]),
                "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "1"}},
            },
        }
        optional = {
            "Cmd": list(service.command) if service.command is not None else None,
            "Entrypoint": list(service.entrypoint) if service.entrypoint is not None else None,
            "WorkingDir": service.working_dir,
            "User": service.user,
            "Hostname": service.hostname or service.name,
        }
        body |= {key: value for key, value in optional.items() if value is not None}
        if check is not None:
            nanoseconds = {"Interval": check.interval, "Timeout": check.timeout, "StartPeriod": check.start_period}
            body["Healthcheck"] = {
                "Test": list(check.test),
                "Retries": check.retries,
                **{key: int(value * 1e9) for key, value in nanoseconds.items()},
            }
        params = {"name": f"{self._name}-{service.name}"}
        made = await self._engine.request("POST", "/containers/create", params=params, body=body)
        self.containers[service.name] = made["Id"]
        await self.join_others(made["Id"], service)
        await self._engine.request("POST", f"/containers/{made['Id']}/start")

    async def _reached(self, name: str, condition: str) -> None:
        container = self.containers[name]
        while True:
            state = (await self._engine.request("GET", f"/containers/{container}/json"))["State"]
            health = (state.get("Health") or {}).get("Status")
            if condition == "service_completed_successfully":
                if state["Status"] == "exited" and state["ExitCode"] == 0:
                    return
                failed = state["Status"] == "exited"
            else:
                failed = not state["Running"] or health == "unhealthy"
                if not failed and (condition == "service_started" or health in ("healthy", None, "none")):
                    return
            if failed:
                said = await self._said(container)
                raise SandboxError(
                    f"service {name}: {health or state['Status']}, exit code {state['ExitCode']}: {said}"
                )
            await asyncio.sleep(_POLL)

    async def _said(self, container: str) -> str:
        """The end of what a service wrote."""
        params = {"stdout": 1, "stderr": 1, "tail": 20}
        async with self._engine.stream("GET", f"/containers/{container}/logs", params=params) as response:
            content = await response.content.read(1 << 16)
        text = b""
        while len(content) >= 8:
            size = int.from_bytes(content[4:8], "big")
            text, content = text + content[8 : 8 + size], content[8 + size :]
        return text.decode("utf-8", "replace").strip()[-2000:] or "it wrote nothing"

    async def close(self) -> None:
        names = [f"{self._name}-{service.name}" for service in self._project.services if service.name != MAIN]
        await asyncio.gather(*(remove_or_warn(self._engine, name, name) for name in names))
        for network in self._project.networks:
            await remove_network(self._engine, self.network(network))


async def remove_network(engine: Engine, name: str) -> None:
    """Remove a network unless something uses it still."""
    with contextlib.suppress(EngineError):
        await engine.request("DELETE", f"/networks/{name}")


async def reap_parts(engine: Engine, dead: Any) -> None:
    """Remove the services and networks of sandboxes whose owner (a label) ``dead`` says is gone."""
    for kind in ("service", "network"):
        filters = json.dumps({"label": [f"{containers.KIND}={kind}"]})
        path, more = ("/networks", {}) if kind == "network" else ("/containers/json", {"all": 1})
        listed = await engine.request("GET", path, params={"filters": filters, **more}) or ()
        doomed = [found["Id"] for found in listed if dead(found["Labels"])]
        if kind == "service":
            await asyncio.gather(*(remove_or_warn(engine, one, one[:12]) for one in doomed))
        else:
            await asyncio.gather(*(remove_network(engine, one) for one in doomed))
