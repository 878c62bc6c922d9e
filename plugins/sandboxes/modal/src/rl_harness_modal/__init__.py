"""Sandboxes on Modal: the provider behind ``--sandbox modal``."""
