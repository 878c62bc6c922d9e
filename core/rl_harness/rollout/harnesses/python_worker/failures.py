"""Say what an agent's exception was, where its own code raised it, and whether the gateway was the cause."""

from __future__ import annotations

import contextlib
import os
import re

_LIMIT_CODES = ("turn_limit", "context_length_exceeded")
_QUOTED_CODE = re.compile(r"""['"]code['"]: *['"](turn_limit|context_length_exceeded)['"]""")
_MAX_CHARS = 4000


def describe(error: BaseException) -> str:
    """``ValueError: text (agent.py, line 12, in solve)``, the place being the innermost of the agent's own code."""
    own = os.path.join(os.getcwd(), "")  # noqa: PTH118, PTH109  pathlib would double the start-up time
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(own) and "site-packages" not in code.co_filename:
            place = f" ({os.path.relpath(code.co_filename)}, line {trace.tb_lineno}, in {code.co_name})"
        trace = trace.tb_next
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text[:_MAX_CHARS] + place


def full_traceback(error: BaseException) -> str:
    """The end of the traceback as Python prints it."""
    import traceback

    return "".join(traceback.format_exception(type(error), error, error.__traceback__))[-_MAX_CHARS:]


def gateway_failure(error: BaseException | None, base_url: str | None) -> str | None:
    """What the gateway refused or failed, where the agent let that through: its limit's code, ``engine``, or None.

    Recognised by shape, since an agent may use any client: openai and what builds on it, httpx, requests, urllib,
    or a framework whose message quotes the gateway's answer. A timeout of the agent's own choice is the agent's.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        limit = _limit_code(error)
        if limit is not None:
            return limit
        url = str(getattr(getattr(error, "request", None), "url", None) or getattr(error, "url", None) or "")
        if base_url and url.startswith(base_url):
            status = _status(error)
            if status is None and "Timeout" not in type(error).__name__:
                return "engine"
            if status is not None and status >= 500:
                return "engine"
        error = error.__cause__ or error.__context__
    return None


def _limit_code(error: BaseException) -> str | None:
    code = getattr(error, "code", None)
    if code in _LIMIT_CODES:
        return str(code)
    texts = [str(error)]
    with contextlib.suppress(Exception):  # a body that cannot be had says nothing; the error itself is reported
        texts.append(error.response.text if hasattr(error, "response") else error.read().decode())  # type: ignore[attr-defined]  # by shape
    quoted = _QUOTED_CODE.search(" ".join(texts))
    return quoted[1] if quoted else None


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    for value in (getattr(response, "status_code", None), getattr(error, "status", None), getattr(error, "code", None)):
        if isinstance(value, int):
            return value
    return None
