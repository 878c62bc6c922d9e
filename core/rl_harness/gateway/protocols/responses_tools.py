"""The tools of a responses request: functions, functions in name spaces, tools whose input is free text, and the local
shell, all offered to the model as functions, whose calls become items of their own kind again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_harness.contracts.renderer import ToolSpec
from rl_harness.gateway.arguments import load_object
from rl_harness.gateway.errors import bad_request
from rl_harness.gateway.protocols.fields import function_tool
from rl_harness.records.turn import ToolCall

#: The one argument of a tool that takes free text.
CUSTOM = "input"
SHELL = "local_shell"
#: Tools that clients run as well, whose calls have forms of their own.
_UNKNOWN = frozenset({"shell", "apply_patch", "computer", "computer_use_preview"})

_SHELL_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "the program and its arguments"},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}


class Toolbox:
    """``tools``: what the model is told of. Tools that OpenAI's servers would run are not among them."""

    def __init__(self, sent: Sequence[Mapping[str, Any]]) -> None:
        self.tools: list[ToolSpec] = []
        self._spaces: dict[str, tuple[str, str]] = {}  # qualified name -> name space, name
        self._qualified: dict[tuple[str, str], str] = {}
        self._custom: set[str] = set()
        self._shell = False
        self.add(sent, "tools")

    def add(self, sent: Sequence[Any], where: str) -> None:
        """Tools of a request, or of an item in the midst of its conversation."""
        for position, tool in enumerate(sent):
            self._add(tool, None, f"{where}[{position}]")

    def qualified(self, space: str | None, name: str) -> str:
        """The name by which the model knows a tool."""
        if not space:
            return name
        return self._qualified.get((space, name)) or _join(space, name)

    def find(self, choice: Any) -> str | None:
        """The name by which the model knows the tool that a ``tool_choice`` names."""
        if not isinstance(choice, dict):
            return None
        name = SHELL if choice.get("type") == SHELL else choice.get("name")
        space = choice.get("namespace")
        if not isinstance(name, str):
            return None
        name = self.qualified(space if isinstance(space, str) else None, name)
        return name if name in [tool["function"]["name"] for tool in self.tools] else None

    def item(self, call: ToolCall) -> tuple[str, dict[str, Any], str, str]:
        """A call as the kind of its item, the item's own fields without what the model wrote, the field for that, and
        what the model wrote."""
        if self._shell and call.name == SHELL:
            return "local_shell_call", {"call_id": call.id}, "action", call.arguments
        space, name = self._spaces.get(call.name, (None, call.name))
        fields: dict[str, Any] = {"call_id": call.id, "name": name}
        if space is not None:
            fields["namespace"] = space
        if call.name in self._custom:
            value = (load_object(call.arguments) or {}).get(CUSTOM)
            return "custom_tool_call", fields, "input", value if isinstance(value, str) else call.arguments
        return "function_call", fields, "arguments", call.arguments

    def _add(self, tool: Any, space: str | None, where: str) -> None:
        if not isinstance(tool, dict):
            raise bad_request(f"{where}: a tool is an object", param=where)
        kind, name, description = tool.get("type"), tool.get("name"), tool.get("description")
        text = description if isinstance(description, str) else None
        if kind == "namespace" and space is None:
            inner = tool.get("tools")
            if not isinstance(name, str) or not name or not isinstance(inner, list):
                raise bad_request(f"{where}: a namespace has a name and a list of tools", param=where)
            for number, one in enumerate(inner):
                self._add(one, name, f"{where}.tools[{number}]")
        elif kind == "function":
            self._offer(name, space, text, tool.get("parameters"), where)
        elif kind == "custom":
            schema = {
                "type": "object",
                "properties": {CUSTOM: {"type": "string", "description": _free_text(tool.get("format"))}},
                "required": [CUSTOM],
            }
            self._custom.add(self._offer(name, space, text, schema, where))
        elif kind == SHELL:
            self._shell = True
            self._offer(SHELL, None, "Run a program on this machine.", dict(_SHELL_SCHEMA), where)
        elif kind in _UNKNOWN:
            raise bad_request(f"{where}: {kind!r} is not supported here; offer a function instead", param=where)

    def _offer(self, name: Any, space: str | None, description: str | None, schema: Any, where: str) -> str:
        if not isinstance(name, str):
            raise bad_request(f"{where}.name: a non-empty string is needed", param=where)
        known = name if space is None else _join(space, name)
        self.tools.append(function_tool(known if name else "", description, schema, where))
        if space is not None:
            self._spaces[known] = (space, name)
            self._qualified[space, name] = known
        return known


def _join(space: str, name: str) -> str:
    return f"{space}{name}" if space.endswith("__") else f"{space}__{name}"


def _free_text(format: Any) -> str:
    """What the input of a tool that takes free text has to look like, as far as that is said."""
    definition = format.get("definition") if isinstance(format, dict) else None
    if not isinstance(definition, str):
        return "any text"
    return f"text of this {format.get('syntax') or 'formal'} grammar:\n{definition}"
