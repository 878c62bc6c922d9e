"""Registers the provider; imports nothing heavy."""

from __future__ import annotations

from rl_harness.hookspecs import Extension, hookimpl


@hookimpl
def rl_harness_sandboxes() -> list[Extension]:
    return [Extension("modal", "rl_harness_modal.provider:ModalProvider", "machines on Modal, any image, GPUs")]
