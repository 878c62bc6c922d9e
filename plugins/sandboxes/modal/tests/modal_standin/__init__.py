"""A stand-in for Modal's service that the real SDK talks to: real processes with a real root for each sandbox.

``python -m modal_standin STATE_DIR`` serves until its standard input ends. It writes one line of JSON with its
``port``, then answers each line of JSON on standard input (see :mod:`modal_standin.control`) with one line.
"""
