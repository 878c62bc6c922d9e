"""Renderers that ship with the core, and what they share: tokenizer folders and stream parsing."""
