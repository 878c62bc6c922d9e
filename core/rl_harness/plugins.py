"""Loads plugins and hands out what they registered. One broken plugin never stops another: it is named, with its
distribution, version and error, in :meth:`Registry.plugins` and wherever its absence could matter.

Modules named by entry points are imported when the first name is asked for; the implementation behind a name only
when that name is chosen.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pluggy

from rl_harness import hookspecs
from rl_harness.discovery import EntryPoint, canonical, entry_points
from rl_harness.errors import ConfigError, PluginError, PluginFileError, UnknownName
from rl_harness.hookspecs import GROUP, Extension
from rl_harness.kinds import KINDS, PluginKind
from rl_harness.mistakes import wrong
from rl_harness.textfile import MOST

if TYPE_CHECKING:
    from rl_harness.contracts import Plugin

DISABLE_VARIABLE = "RL_HARNESS_DISABLE_PLUGINS"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


class Entry(NamedTuple):
    """A registered name and who registered it."""

    kind: str
    extension: Extension
    plugin: LoadedPlugin

    @property
    def name(self) -> str:
        return self.extension.name

    @property
    def full_name(self) -> str:
        return f"{self.plugin.distribution}:{self.extension.name}"


class LoadedPlugin:
    """One entry point or local file: what it registered, and everything found wrong with it."""

    def __init__(self, distribution: str, version: str, source: str) -> None:
        self.distribution = distribution
        self.version = version
        #: The module an entry point names, or the path of a local file.
        self.source = source
        self.disabled = False
        self.problems: list[str] = []
        self.entries: list[Entry] = []

    @property
    def label(self) -> str:
        return f"{self.distribution} {self.version} ({self.source})"

    def is_called(self, distribution: str) -> bool:
        return canonical(self.distribution) == canonical(distribution)


def load_registry(plugin_files: Sequence[Path] = ()) -> Registry:
    """Everything installed, plus local files the user named.

    A local file that does not load raises :class:`PluginFileError`, since it was asked for; an installed plugin that
    does not load is reported by :meth:`Registry.plugins`.
    """
    return Registry(entry_points(), plugin_files)


class Registry:
    """Names of every kind and the classes behind them."""

    def __init__(self, points: Iterable[EntryPoint], plugin_files: Sequence[Path] = ()) -> None:
        self._points = list(points)
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hookspecs)
        self._disabled = {
            canonical(name.strip()) for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()
        }
        self._plugins: list[LoadedPlugin] | None = None
        self._entries: dict[str, list[Entry]] = {}
        self._files = [self._load_file(Path(file)) for file in plugin_files]

    # -- what there is ---------------------------------------------------------------------------------------

    def plugins(self) -> list[LoadedPlugin]:
        """Every plugin found, failed and disabled ones included, with all hooks called."""
        for kind in KINDS:
            self.entries(kind)
        return list(self._loaded())

    def unknown_disabled(self) -> list[str]:
        """Names in ``RL_HARNESS_DISABLE_PLUGINS`` that belong to no installed plugin."""
        return sorted(self._disabled - {point.distribution for point in self._points})

    def entries(self, kind: str) -> list[Entry]:
        """Everything registered for a kind, in the order of distributions, local files last."""
        if kind not in self._entries:
            hook = KINDS[kind].hook
            self._entries[kind] = [
                entry for plugin in self._loaded() for entry in self._call(plugin, kind, hook) if not plugin.disabled
            ]
        return self._entries[kind]

    def names(self, kind: str) -> list[str]:
        return sorted({entry.name for entry in self.entries(kind)})

    def versions(self) -> dict[str, str]:
        """Version of every distribution that registered something."""
        return {plugin.distribution: plugin.version for plugin in self.plugins() if plugin.entries}

    # -- choosing one ----------------------------------------------------------------------------------------

    def find(self, kind: str, name: str) -> Entry:
        """The one entry that ``name`` or ``DISTRIBUTION:name`` means."""
        distribution, separator, bare = name.partition(":")
        if separator:
            matches = [e for e in self.entries(kind) if e.name == bare and e.plugin.is_called(distribution)]
        else:
            matches = [e for e in self.entries(kind) if e.name == name]
        if not matches:
            raise self._unknown(KINDS[kind], name)
        if len(matches) > 1:
            choices = " or ".join(sorted({entry.full_name for entry in matches}))
            owners = " and ".join(sorted(entry.plugin.label for entry in matches))
            raise UnknownName(
                f"{KINDS[kind].singular} {name!r} is registered by {owners}",
                remedy=f"name one of them as {choices}, or switch one off with {DISABLE_VARIABLE}=DISTRIBUTION",
            )
        return matches[0]

    def load(self, kind: str, name: str) -> type[Plugin]:
        """The class behind a name, checked against the contract of its kind.

        Raises :class:`UnknownName`, or :class:`PluginError` naming the distribution at fault.
        """
        return _load_class(self.find(kind, name))

    def create(self, kind: str, name: str, options: Mapping[str, Any], **extra: Any) -> Plugin:
        """An instance with validated options; :class:`ConfigError` names every key that is wrong."""
        cls = self.load(kind, name)
        return cls(validate_options(cls, options, KINDS[kind].section), **extra)

    def split_argument(self, kind: str, spec: str) -> tuple[str, dict[str, Any]]:
        """A name as typed on the command line, and the option set by what follows it.

        ``NAME:ARGUMENT`` sets the option that the class behind NAME calls its ``argument``; ``DIST:NAME`` and
        ``DIST:NAME:ARGUMENT`` work too.
        """
        first, separator, rest = spec.partition(":")
        if not separator:
            return spec, {}
        second, more, argument = rest.partition(":")
        if any(e.name == second and e.plugin.is_called(first) for e in self.entries(kind)):
            name = f"{first}:{second}"
        elif first in self.names(kind):
            name, more, argument = first, separator, rest
        else:
            raise self._unknown(KINDS[kind], spec)
        if not more:
            return name, {}
        option = self.load(kind, name).argument
        if option is None:
            raise UnknownName(
                f"{KINDS[kind].singular} {name!r} takes no argument, but {argument!r} follows its name",
                remedy=f"write {KINDS[kind].option} {name}",
            )
        return name, {option: argument}

    # -- loading ---------------------------------------------------------------------------------------------

    def _loaded(self) -> list[LoadedPlugin]:
        if self._plugins is None:
            self._plugins = [self._load_point(point) for point in self._points] + self._files
        return self._plugins

    def _load_point(self, point: EntryPoint) -> LoadedPlugin:
        plugin = LoadedPlugin(point.distribution, point.version, point.target)
        if point.distribution in self._disabled:
            plugin.disabled = True
            return plugin
        try:
            self._register(plugin, _resolve(point.target))
        except (Exception, SystemExit) as error:  # whatever it is, it must not stop another plugin
            plugin.problems.append(_describe(error))
        return plugin

    def _load_file(self, file: Path) -> LoadedPlugin:
        if not file.exists():
            raise PluginFileError(f"there is no plugin file {file}", remedy="check -p, or plugins in the configuration")
        plugin = LoadedPlugin(file.name, "local file", str(file))
        try:
            self._register(plugin, _import_file(file))
        except (Exception, SystemExit) as error:
            raise PluginFileError(f"plugin file {file} does not load: {_describe(error)}") from error
        if plugin.problems:
            raise PluginFileError(f"plugin file {file}: {'; '.join(plugin.problems)}")
        return plugin

    def _register(self, plugin: LoadedPlugin, namespace: object) -> None:
        if self._manager.is_registered(namespace):
            plugin.problems.append(f"{plugin.source} is registered already, by {self._manager.get_name(namespace)}")
            return
        try:
            self._manager.register(namespace, name=plugin.label)
        except pluggy.PluginValidationError:
            if self._manager.is_registered(namespace):  # pluggy before 1.7 leaves what it had registered by then
                self._manager.unregister(namespace)
            raise
        plugin.problems += self._misspelt(namespace)
        if not self._manager.get_hookcallers(namespace):
            plugin.problems.append(f"registers no hook; decorate its functions with @{GROUP}.hookimpl")

    def _misspelt(self, namespace: object) -> list[str]:
        problems = []
        known = [kind.hook for kind in KINDS.values()]
        for caller in self._manager.get_hookcallers(namespace) or []:
            optional = any(i.plugin is namespace and i.optionalhook for i in caller.get_hookimpls())
            if not caller.has_spec() and not optional:
                problems.append(f"{caller.name} is not a hook{_did_you_mean(caller.name, known)}")
        implemented = {caller.name for caller in self._manager.get_hookcallers(namespace) or []}
        for name, value in vars(namespace).items() if hasattr(namespace, "__dict__") else ():
            if name in known and name not in implemented and inspect.isfunction(value):
                problems.append(f"{name} lacks the decorator @{GROUP}.hookimpl and is never called")
        return problems

    def _call(self, plugin: LoadedPlugin, kind: str, hook: str) -> list[Entry]:
        """Call one plugin's implementation of one hook; what is wrong with its result is a problem of the plugin."""
        caller = getattr(self._manager.hook, hook)
        entries: list[Entry] = []
        for implementation in caller.get_hookimpls():
            if implementation.plugin_name != plugin.label:
                continue
            try:
                result = implementation.function()
                extensions = _checked(hook, result, {entry.name for entry in entries})
            except (Exception, SystemExit) as error:
                plugin.problems.append(_describe(error, where=hook))
                continue
            entries += (Entry(kind, extension, plugin) for extension in extensions)
        plugin.entries += entries
        return entries

    # -- errors ----------------------------------------------------------------------------------------------

    def _unknown(self, kind: PluginKind, name: str) -> UnknownName:
        names = self.names(kind.plural)
        bare = name.rpartition(":")[2] if ":" in name else name
        remedies = []
        known = known_plugins().get(kind.plural, {})
        package = known.get(bare)
        if package is None:
            near_known = difflib.get_close_matches(bare, known, n=1)
            package = known[near_known[0]] if near_known and near_known[0] not in names else None
            bare = near_known[0] if package else bare
        if package is not None:
            remedies.append(self._about_package(kind, bare, package))
        near = difflib.get_close_matches(name, names, n=3)
        if near:
            remedies.append(f"did you mean {' or '.join(near)}?")
        remedies.append(f"registered: {', '.join(names) or 'none at all'}")
        broken = [plugin.label for plugin in self._loaded() if plugin.problems]
        if broken:
            remedies.append(f"these plugins have problems: {', '.join(broken)} (see rl-harness plugins list)")
        return UnknownName(f"there is no {kind.singular} {name!r}", remedy="; ".join(remedies))

    def _about_package(self, kind: PluginKind, name: str, package: str) -> str:
        for plugin in self._loaded():
            if plugin.is_called(package):
                if plugin.disabled:
                    return f"{name} comes with {package}, which {DISABLE_VARIABLE} switches off"
                if plugin.problems:
                    return f"{name} comes with {package}, which failed to load: {plugin.problems[0]}"
        return f"{name} comes with the package {package}: pip install {package}"


def known_plugins() -> dict[str, dict[str, str]]:
    """Kind to name to the package known to provide it. For error texts only."""
    text = Path(__file__).with_name("known_plugins.json").read_text("utf-8")
    data: dict[str, dict[str, str]] = json.loads(text)
    return data


def validate_options(
    cls: type[Plugin], options: Mapping[str, Any], section: str, origins: Mapping[str, str] | None = None
) -> Any:
    """``options`` as the class's options model.

    :class:`ConfigError` names every wrong key with its section and, from ``origins`` by key, where it was set.
    """
    from pydantic import ValidationError

    try:
        return cls.Options.model_validate(dict(options))
    except ValidationError as error:
        problems = []
        unknown = False
        for item in error.errors():
            path = [section, *(str(part) for part in item["loc"])]
            parents = (".".join(path[:length]) for length in range(len(path), 0, -1))
            origin = next((origins[key] for key in parents if origins and key in origins), None)
            where = f"{origin}: " if origin else ""
            key = ".".join(path)
            if item["type"] == "extra_forbidden":
                unknown = True
                problems.append(f"{where}there is no option {key!r}{_did_you_mean(path[-1], option_names(cls))}")
            else:
                problems.append(f"{where}{key} = {item['input']!r}: {wrong(item)}")
        raise ConfigError("\n".join(problems), remedy=_options_of(cls, section) if unknown else None) from None


def option_names(cls: type[Plugin]) -> list[str]:
    """The keys a user may write: each field's alias where it has one."""
    return [field.alias or name for name, field in cls.Options.model_fields.items()]


def _options_of(cls: type[Plugin], section: str) -> str:
    names = option_names(cls)
    return f"options of {section}: {', '.join(names)}" if names else f"{section} has no options"


def _load_class(entry: Entry) -> type[Plugin]:
    from rl_harness import contracts

    kind = KINDS[entry.kind]
    who = f"{kind.singular} {entry.name!r} of {entry.plugin.label}"
    try:
        target = _resolve(entry.extension.load)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{who} does not load: {_describe(error)}", remedy=f"rl-harness plugins check {entry.plugin.distribution}"
        ) from error
    bases = tuple(getattr(contracts, name) for name in kind.contracts)
    wanted = " or ".join(f"rl_harness.contracts.{name}" for name in kind.contracts)
    if not (inspect.isclass(target) and issubclass(target, bases)):
        raise PluginError(f"{who}: {entry.extension.load} is not a subclass of {wanted}")
    api = getattr(target, "api", None)
    if type(api) is not int:
        raise PluginError(f"{who}: {entry.extension.load} states no api number", remedy=f"set api = {contracts.API}")
    if api != contracts.API:
        newer = "rl-harness" if api > contracts.API else entry.plugin.distribution
        raise PluginError(
            f"{who} is written for api {api}; this rl-harness speaks api {contracts.API}", remedy=f"upgrade {newer}"
        )
    if inspect.isabstract(target):
        missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
        raise PluginError(f"{who}: {entry.extension.load} does not implement {missing}")
    return cast("type[Plugin]", target)  # issubclass with a computed tuple does not narrow


def _resolve(target: str) -> Any:
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split(".") if attribute else ():
        value = getattr(value, part)
    return value


def _import_file(file: Path) -> ModuleType:
    """Import a local file under a name of its own, so that ``f"{__name__}:Class"`` finds it again."""
    path = file.resolve()
    if not path.is_file():
        raise ValueError("it is not a regular file")
    if path.suffix != ".py":
        raise ValueError("a plugin file is a Python file (.py)")
    if path.stat().st_size > MOST:
        raise ValueError(f"it is larger than {MOST // 1024**2} MiB")
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"rl_harness_local_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python has no loader for {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _checked(hook: str, result: object, taken: set[str]) -> list[Extension]:
    if not isinstance(result, list):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(f"{hook} returned {type(result).__name__}, not a list of Extension")
    for item in result:
        if not isinstance(item, Extension) or not all(isinstance(part, str) for part in item):
            raise TypeError(f"{hook} returned {item!r} in its list, not an Extension of three strings")
        if not _NAME.fullmatch(item.name):
            raise ValueError(f"{hook}: {item.name!r} is not a name (letters, digits, '.', '_', '-')")
        if not _TARGET.fullmatch(item.load):
            raise ValueError(f"{hook}: {item.name} is to be loaded from {item.load!r}, which is not module:attr")
        if item.name in taken:
            raise ValueError(f"{hook}: {item.name} is registered twice")
        taken.add(item.name)
    return result


def _describe(error: BaseException, where: str | None = None) -> str:
    """An error in one line, with the place in the plugin's own code where it happened."""
    text = " ".join(str(error).split()) or type(error).__name__
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" at {error.filename}:{error.lineno}"
    elif error.__traceback__ is not None:
        frame = error.__traceback__
        while frame.tb_next is not None:
            frame = frame.tb_next
        filename = frame.tb_frame.f_code.co_filename
        if filename != __file__ and not filename.startswith("<") and not _of_import_system(filename):
            place = f" at {filename}:{frame.tb_lineno}"
    prefix = f"{where}: " if where and where not in text else ""
    return f"{prefix}{type(error).__name__}: {text}{place}"


def _of_import_system(filename: str) -> bool:
    return Path(filename).parent.name in ("importlib", "pluggy")


def _did_you_mean(name: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f"; did you mean {near[0]}?" if near else ""
