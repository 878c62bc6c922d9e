"""Every hook of rl-harness, in one file.

A plugin package declares an entry point in the group ``rl_harness`` that names a module; functions of that module
decorated with ``@rl_harness.hookimpl`` implement the hooks below. Each hook is called when the first name of its kind
is asked for, takes no argument, has no side effect, and returns a list of light :class:`Extension` records: the
implementation named by ``load`` is imported only when it is chosen. The module itself must import nothing heavy
(no pydantic, numpy, torch).
"""

from __future__ import annotations

from typing import NamedTuple

import pluggy

GROUP = "rl_harness"

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class Extension(NamedTuple):
    """One named thing a plugin offers: ``load`` is ``"module:attr"`` of the class that implements the contract."""

    name: str
    load: str
    summary: str


@hookspec
def rl_harness_harnesses() -> list[Extension]:
    """Harnesses (:class:`rl_harness.contracts.Harness`), chosen with ``--harness NAME``."""
    raise AssertionError("a specification is never called")


@hookspec
def rl_harness_sandboxes() -> list[Extension]:
    """Sandbox providers (:class:`rl_harness.contracts.SandboxProvider`), chosen with ``--sandbox NAME``."""
    raise AssertionError("a specification is never called")


@hookspec
def rl_harness_engines() -> list[Extension]:
    """Engines (:class:`rl_harness.contracts.TokenEngine` or ``ChatEngine``), chosen with ``--engine NAME``."""
    raise AssertionError("a specification is never called")


@hookspec
def rl_harness_renderers() -> list[Extension]:
    """Renderers (:class:`rl_harness.contracts.Renderer`), chosen with ``-o renderer.name=NAME``."""
    raise AssertionError("a specification is never called")


@hookspec
def rl_harness_backends() -> list[Extension]:
    """Training backends (:class:`rl_harness.contracts.Backend`), chosen with ``--backend NAME``."""
    raise AssertionError("a specification is never called")


@hookspec
def rl_harness_algorithms() -> list[Extension]:
    """Learning algorithms (:class:`rl_harness.contracts.Algorithm`), chosen with ``--trainer NAME``."""
    raise AssertionError("a specification is never called")


@hookspec
def rl_harness_benchmarks() -> list[Extension]:
    """Benchmarks (:class:`rl_harness.contracts.Benchmark`), named as ``rl-harness run NAME``."""
    raise AssertionError("a specification is never called")
