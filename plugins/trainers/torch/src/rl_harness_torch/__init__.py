"""Embedded inference engine and single-device training backend on PyTorch."""
