"""The tokenizer side of a model folder: ``tokenizer.json`` plus the special tokens and chat template that
``tokenizer_config.json`` and its neighbours declare. Knows nothing of messages."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from rl_harness.errors import Unavailable
from rl_harness.records.arrays import IdArray

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_CONTROL = re.compile(r"<[|｜].*[|｜]>")


def read_json(path: Path) -> Any:
    """A JSON file of a model folder. Raises ``Unavailable`` naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unavailable(
            f"{path} does not exist", remedy="give --model a complete Hugging Face model folder"
        ) from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error


class _Spelled(dict[int, bytes | None]):
    """Filled as ids are asked for."""

    def __init__(self, spell: Callable[[int], bytes | None]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token: int) -> bytes | None:
        found = self[token] = self._spell(token)
        return found


class TokenizerFolder:
    """Text to ids and back for one model folder."""

    def __init__(self, path: Path) -> None:
        # One call, one thread: the cores belong to the model, and processes are forked off this one.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.path = path
        file = path / "tokenizer.json"
        if not file.is_file():
            raise Unavailable(
                f"{file} does not exist",
                remedy="a model folder needs a fast tokenizer; save one with transformers' save_pretrained",
            )
        text = file.read_text(encoding="utf-8")
        try:
            self.tokenizer = Tokenizer.from_str(text)
            # A second instance that reads the text of special tokens as plain text: what users and tools write
            # must not be able to end a turn.
            self._plain = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise Unavailable(f"{file} cannot be loaded: {error}") from error
        self._plain.encode_special_tokens = True
        # Some families (DeepSeek) do not declare all tokens special that structure a conversation.
        control = [
            AddedToken(token.content, special=True, normalized=False)
            for token in self.tokenizer.get_added_tokens_decoder().values()
            if not token.special and _CONTROL.fullmatch(token.content)
        ]
        for tokenizer in (self.tokenizer, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.add_special_tokens(control)
        config_file = path / "tokenizer_config.json"
        self.config: dict[str, Any] = read_json(config_file) if config_file.is_file() else {}
        added = self.tokenizer.get_added_tokens_decoder()
        #: Text of every special token -> its id.
        self.special: dict[str, int] = {token.content: number for number, token in added.items() if token.special}
        self._special_ids = frozenset(self.special.values())
        self._added = {number: token.content for number, token in added.items()}
        #: Text of every token that was added to the vocabulary, special or not.
        self.added: frozenset[str] = frozenset(self._added.values())
        self._byte_level = _is_byte_level(json.loads(text).get("decoder"))
        #: What each id is spelled with, None for special ones and where ids have no bytes of their own.
        self.spelled: Mapping[int, bytes | None] = _Spelled(self._spell)
        pattern = "|".join(re.escape(text) for text in sorted(self.special, key=len, reverse=True))
        self._special_pattern = re.compile(f"({pattern})") if pattern else None

    def named_tokens(self) -> dict[str, Any]:
        """``bos_token`` and its like, as chat templates expect to find them."""
        found: dict[str, Any] = {}
        for name in _SPECIAL_NAMES:
            text = _token_text(self.config.get(name))
            if text is not None:
                found[name] = text
        extra = self.config.get("additional_special_tokens") or self.config.get("extra_special_tokens")
        if isinstance(extra, list):
            found["additional_special_tokens"] = [t for t in map(_token_text, extra) if t is not None]
        return found

    def end_ids(self) -> tuple[int, ...]:
        """End-of-text ids that the folder itself declares, in ``tokenizer_config`` and ``generation_config``."""
        found: list[int] = []
        eos = _token_text(self.config.get("eos_token"))
        if eos is not None and (number := self.tokenizer.token_to_id(eos)) is not None:
            found.append(int(number))
        for name in ("generation_config.json", "config.json"):
            file = self.path / name
            declared = read_json(file).get("eos_token_id") if file.is_file() else None
            found += [declared] if isinstance(declared, int) else list(declared or ())
        return tuple(dict.fromkeys(found))

    def chat_template(self, *, tools: bool) -> str | None:
        """The folder's chat template; of several named ones, ``tool_use`` when ``tools`` and it exists."""
        file = self.path / "chat_template.jinja"
        named: dict[str, str] = {}
        if file.is_file():
            named["default"] = file.read_text(encoding="utf-8")
        else:
            declared = self.config.get("chat_template")
            if declared is None and (self.path / "chat_template.json").is_file():
                declared = read_json(self.path / "chat_template.json").get("chat_template")
            if isinstance(declared, str):
                named["default"] = declared
            elif isinstance(declared, list):
                named = {entry["name"]: entry["template"] for entry in declared}
        more = self.path / "additional_chat_templates"
        if more.is_dir():
            named |= {entry.stem: entry.read_text(encoding="utf-8") for entry in more.glob("*.jinja")}
        if tools and "tool_use" in named:
            return named["tool_use"]
        return named.get("default")

    def special_text(self, token: int) -> str | None:
        """The text of a special token; None for every other id."""
        return self._added[token] if token in self._special_ids else None

    def _spell(self, token: int) -> bytes | None:
        if not self._byte_level or token in self._special_ids:
            return None
        if token in self._added:
            return self._added[token].encode()
        text = self.tokenizer.id_to_token(token)
        return b"" if text is None else bytes(_BYTE_OF[c] for c in text if c in _BYTE_OF)

    def encode(self, text: str) -> list[int]:
        """Ids of template text: special tokens are recognised, none is added."""
        return _ids(self.tokenizer, text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of somebody's text: what looks like a special token stays text."""
        return _ids(self._plain, text)

    def count(self, text: str) -> int:
        """How many ids :meth:`encode_plain` gives."""
        return len(self._plain.encode_batch_fast([text], add_special_tokens=False)[0])

    def has_special(self, text: str) -> bool:
        """Whether ``text`` contains what would be read as a special token."""
        return self._special_pattern is not None and self._special_pattern.search(text) is not None

    def split_special(self, text: str) -> list[str]:
        """``text`` cut at special tokens, which are pieces of their own (odd positions)."""
        return self._special_pattern.split(text) if self._special_pattern else [text]

    def decode(self, tokens: IdArray | Sequence[int], *, special: bool) -> str:
        """Text of ids, with or without special tokens. Ids beyond the vocabulary have no text."""
        return str(self.tokenizer.decode([int(t) for t in tokens], skip_special_tokens=not special))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # Of a batch, since that lets other threads run meanwhile; fast, since nobody wants offsets.
    found: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return found


def _byte_of() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: printable ones stand for themselves, the others for
    characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_of()


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders") or [None]
        return all(_is_byte_level(part) for part in parts)
    return decoder.get("type") == "ByteLevel"


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
