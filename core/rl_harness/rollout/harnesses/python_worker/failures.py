"""Say what an agent's exception was, where its own code raised it, and whether the gateway was the cause."""

from __future__ import annotations

import os

_LIMIT_CODES = ("turn_limit", "context_length_exceeded")
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

    Recognised by shape, since an agent may use any client: errors that carry a ``code`` as OpenAI's do, or the
    ``request`` and the ``response``. A timeout of the agent's own choice is the agent's.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        code = getattr(error, "code", None)
        if code in _LIMIT_CODES:
            return str(code)
        url = str(getattr(getattr(error, "request", None), "url", ""))
        if base_url and url.startswith(base_url):
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status is None and "Timeout" not in type(error).__name__:
                return "engine"
            if status is not None and status >= 500:
                return "engine"
        error = error.__cause__ or error.__context__
    return None
