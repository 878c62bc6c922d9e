"""Sandboxes on E2B: the provider behind ``--sandbox e2b``."""
