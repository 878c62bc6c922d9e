"""A stand-in for E2B: a server that the real SDK talks to, whose sandboxes are real processes in real separate roots.

``python -m e2b_standin STATE`` prints its port and then answers control requests, one JSON line each, until its
standard input ends. What it does and says follows E2B's published server (its API, its proxy, envd).
"""
