"""Long-lived assistants, each asked once: OpenClaw, ZeroClaw and nanobot, on the base of rl-harness-cli-agents."""
