"""What a Dockerfile starts from, and what an image may be called. Only that: the engine builds it, and nothing here
changes it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from rl_harness.errors import TaskError

from rl_harness_docker.files import read_text

_VARIABLE = re.compile(r"\\(.)|\$(?:\{(\w+)(?:(:?[-+])([^}]*))?\}|(\w+))")
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*$")


_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    r"(?:(?:[a-zA-Z0-9][a-zA-Z0-9.-]*|\[[0-9a-fA-F:]+\])(?::[0-9]+)?/)?"  # the registry
    rf"{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@[a-zA-Z][\w+.-]*:[0-9a-fA-F]+)?",
    re.ASCII,
)
_LONGEST_NAME = 512


def check_image(name: str, where: str) -> None:
    """Raises TaskError when no image can be called this."""
    if len(name) > _LONGEST_NAME or not _IMAGE.fullmatch(name):
        raise TaskError(f"{where}: {name!r:.80} is not the name of an image", remedy="write [REGISTRY/]NAME[:TAG]")


def base_images(dockerfile: Path, build_args: Mapping[str, str]) -> list[str]:
    """The images it is built from, each once, in order: of ``FROM`` and of ``COPY --from``, without its own stages
    and without ``scratch``. Raises TaskError naming file and line."""
    text = read_text(dockerfile)
    known: dict[str, str] = {}  # of ARG before the first FROM, which alone count there
    stages: list[str] = []
    count = 0
    found: list[str] = []
    for line, instruction, rest in _instructions(text):
        where = f"{dockerfile}:{line}"
        if instruction == "ARG" and not count:
            for name, default in _arguments(rest, where):
                known[name] = build_args.get(name, _expand(default, known))
        elif instruction == "FROM":
            image, stage = _from(rest, known, where)
            if image.lower() not in stages and image != "scratch":
                check_image(image, f"{where}: FROM")
                found.append(image)
            count += 1
            if stage:
                stages.append(stage.lower())
        elif instruction in ("COPY", "ADD"):
            source = re.match(r"(?:--\S+\s+)*?--from=(\S+)", rest)
            if source and source[1].lower() not in stages and not source[1].isdigit():
                image = _expand(source[1], known)
                check_image(image, f"{where}: {instruction} --from")
                found.append(image)
    if not count:
        raise TaskError(f"{dockerfile}: has no FROM", remedy="begin it with FROM and the image it builds on")
    return list(dict.fromkeys(found))


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Line number, keyword in capitals and the rest, with continued lines joined and comments dropped."""
    escape = "\\"
    lines = text.splitlines()
    for line in lines:  # parser directives come first of all
        directive = _DIRECTIVE.match(line.strip())
        if directive is None:
            break
        if directive[1].lower() == "escape":
            escape = directive[2]
    found = []
    pending, start, heredocs = "", 0, []  # type: ignore[var-annotated]
    for number, line in enumerate(lines, 1):
        if heredocs:
            if line.lstrip("\t") == heredocs[0] or line == heredocs[0]:
                heredocs.pop(0)
            continue
        stripped = line.strip()
        if stripped.startswith("#") or (not stripped and not pending):
            continue
        if not pending:
            start = number
        if stripped.endswith(escape):
            pending += stripped[: -len(escape)] + " "
            continue
        keyword, _, rest = (pending + stripped).strip().partition(" ")
        pending = ""
        if keyword.upper() in ("RUN", "COPY", "ADD"):
            heredocs = re.findall(r"<<-?\s*['\"]?(\w+)['\"]?", rest)
        found.append((start, keyword.upper(), rest.strip()))
    return found


def _arguments(rest: str, where: str) -> list[tuple[str, str]]:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise TaskError(f"{where}: ARG {rest}: {error}") from None
    return [(name, default) for name, _, default in (word.partition("=") for word in words)]


def _from(rest: str, known: Mapping[str, str], where: str) -> tuple[str, str | None]:
    words = [word for word in rest.split() if not word.startswith("--")]
    image = _expand(words[0], known).strip("\"'") if words else ""
    if not image or len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
        raise TaskError(f"{where}: FROM {rest}: names no image", remedy="write FROM IMAGE [AS NAME]")
    return image, words[2] if len(words) == 3 else None


def _expand(text: str, known: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        escaped, name, operator, word, bare = match.groups()
        if escaped is not None:
            return str(escaped)
        found = known.get(name or bare)
        missing = found is None or (found == "" and (operator or "").startswith(":"))
        if operator and operator.endswith("-"):
            return _expand(word, known) if missing else found or ""
        if operator:
            return "" if missing else _expand(word, known)
        return found or ""

    return _VARIABLE.sub(value, text)
