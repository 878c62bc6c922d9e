"""A local plugin file that registers the scripted engine as ``scripted``: name it with ``-p``, or with ``plugins`` in a
configuration. It is not registered by itself, since nothing it says was sampled."""

from rl_harness.hookspecs import Extension, hookimpl


@hookimpl
def rl_harness_engines() -> list[Extension]:
    return [Extension("scripted", "rl_harness.testing.engine:ScriptedEngine", "replays what it is told")]
