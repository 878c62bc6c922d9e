"""From scored episodes to what a backend trains on: credit, advantages, aggregation, the prefix trie, losses.

Pure numpy: no torch, no sandboxes, no I/O. Backends may import this package's modules; nothing here knows them.
"""
