"""Errors that a client of the gateway sees, in its protocol's own shape."""

from __future__ import annotations


class ApiError(Exception):
    """Answered with ``status``. ``type`` and ``code`` are OpenAI's words for what went wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param


class ContextTooLong(ApiError):
    """A conversation of at least ``tokens`` tokens does not fit a context of ``room``; ``size`` says it exactly."""

    def __init__(self, room: int, tokens: int, size: str) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {room} tokens. However, your messages resulted in {size}. "
            "Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )
        self.room = room
        self.tokens = tokens


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)
