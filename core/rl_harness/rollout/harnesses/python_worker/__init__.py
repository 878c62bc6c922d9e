"""The process in which a Python agent runs.

It uses nothing but the standard library and imports nothing of rl-harness, so that it starts fast and runs under
any interpreter (Python 3.9 and later). See ``__main__`` for how it is started.
"""
