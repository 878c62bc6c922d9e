"""The kinds of plugins: for each, its hook, its contract, and where a user names one."""

from __future__ import annotations

from typing import NamedTuple


class PluginKind(NamedTuple):
    """``contracts`` are names in :mod:`rl_harness.contracts`; ``section`` is the kind's table in the configuration."""

    plural: str
    singular: str
    contracts: tuple[str, ...]
    option: str
    section: str

    @property
    def hook(self) -> str:
        return f"rl_harness_{self.plural}"


#: By plural, in the order in which the names of a run are looked up: what is quick to tell wrong comes first.
KINDS: dict[str, PluginKind] = {
    kind.plural: kind
    for kind in (
        PluginKind("benchmarks", "benchmark", ("Benchmark",), "rl-harness run", "benchmark"),
        PluginKind("harnesses", "harness", ("Harness",), "--harness", "harness"),
        PluginKind("algorithms", "algorithm", ("Algorithm",), "--trainer", "trainer"),
        PluginKind("sandboxes", "sandbox", ("SandboxProvider",), "--sandbox", "sandbox"),
        PluginKind("engines", "engine", ("TokenEngine", "ChatEngine"), "--engine", "engine"),
        PluginKind("renderers", "renderer", ("Renderer",), "-o renderer.name=", "renderer"),
        PluginKind("backends", "backend", ("Backend",), "--backend", "backend"),
    )
}
