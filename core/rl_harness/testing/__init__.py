"""Conformance kits and test doubles for plugin authors; our own plugins run the same ones.

``sandbox.CHECKS``, :func:`harness_checks`, :func:`renderer_checks`, :func:`engine_checks`, :func:`backend_checks` and
:func:`algorithm_checks` are lists of checks to parametrise a test with. The doubles are a scripted chat server, a
scripted engine, a tiny tokenizer, and what runs a stand-in for a service. Names are resolved on first use, so that a
sandbox's tests do not import the engine's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_harness.testing import sandbox
    from rl_harness.testing.algorithm import algorithm_checks
    from rl_harness.testing.backend import BackendKit, backend_checks
    from rl_harness.testing.chat_server import ScriptedChat, ScriptedReply
    from rl_harness.testing.engine import SCRIPTED_PLUGIN, Rule, ScriptedEngine, ScriptedOptions
    from rl_harness.testing.files import SandboxFiles
    from rl_harness.testing.harness import HarnessKit, harness_checks
    from rl_harness.testing.records import a_conversation, an_episode
    from rl_harness.testing.renderer import RendererKit, renderer_checks
    from rl_harness.testing.standin import StandIn, serve_requests
    from rl_harness.testing.token_engine import EngineKit, engine_checks
    from rl_harness.testing.tokenizer import write_tokenizer
    from rl_harness.testing.wires import Wires

__all__ = [
    "SCRIPTED_PLUGIN",
    "BackendKit",
    "EngineKit",
    "HarnessKit",
    "RendererKit",
    "Rule",
    "SandboxFiles",
    "ScriptedChat",
    "ScriptedEngine",
    "ScriptedOptions",
    "ScriptedReply",
    "StandIn",
    "Wires",
    "a_conversation",
    "algorithm_checks",
    "an_episode",
    "backend_checks",
    "engine_checks",
    "harness_checks",
    "renderer_checks",
    "sandbox",
    "serve_requests",
    "write_tokenizer",
]

_HOMES = {
    "SCRIPTED_PLUGIN": "engine",
    "BackendKit": "backend",
    "EngineKit": "token_engine",
    "HarnessKit": "harness",
    "RendererKit": "renderer",
    "Rule": "engine",
    "SandboxFiles": "files",
    "ScriptedChat": "chat_server",
    "ScriptedEngine": "engine",
    "ScriptedOptions": "engine",
    "ScriptedReply": "chat_server",
    "StandIn": "standin",
    "Wires": "wires",
    "a_conversation": "records",
    "algorithm_checks": "algorithm",
    "an_episode": "records",
    "backend_checks": "backend",
    "engine_checks": "token_engine",
    "harness_checks": "harness",
    "renderer_checks": "renderer",
    "serve_requests": "standin",
    "write_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name == "sandbox":
        return importlib.import_module(f"{__name__}.sandbox")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
