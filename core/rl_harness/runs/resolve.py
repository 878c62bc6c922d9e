"""Turns layers of configuration into one :class:`RunConfig`, and remembers where every value came from.

Precedence: command line > ``RL_HARNESS_*`` > the file > benchmark > default. What a task says about itself fills in
what is still unset, when that task runs. Every key that nothing reads is an error, never ignored; the options of a
plugin that another layer replaced by name are listed as unused.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from rl_harness.contracts import Benchmark, ChatEngine, Harness, Plugin
from rl_harness.errors import ConfigError, PluginError, RlHarnessError, UnknownName
from rl_harness.mistakes import wrong
from rl_harness.plugins import Registry, load_registry, validate_options
from rl_harness.runs.config import PluginChoice, RunConfig
from rl_harness.runs.keys import SECTIONS, annotation_of, known_keys, option_annotation, parse, unknown_key
from rl_harness.runs.layers import (
    Key,
    Layer,
    Value,
    config_file,
    dotted,
    environment_layer,
    file_layer,
    nest,
    option_layer,
)

DEFAULT = "default"
#: The engine that ``base_url`` selects.
API_ENGINE = "api"
#: The origin of what ``run`` is given to run.
COMMAND_LINE = "command line"
#: The keys that ``serve`` reads; all others are for ``run``, and the last two not.
_SERVE_READS = (
    *(("model",), ("base_url",), ("api_key_env",), ("seed",), ("name",), ("runs_dir",), ("plugins",), ("sampling",)),
    ("secrets",),
    *(("engine",), ("renderer",), ("backend",), ("trainer",)),
    *(("training", name) for name in ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm")),
    *(("training", "keep_checkpoints"), ("serving",), ("online",)),
)
_SERVE_ONLY = frozenset({"serving", "online"})

#: The origin of what follows from the command being ``serve``.
SERVE = "serve"
#: Not the name of a plugin: no training.
NO_TRAINER = "none"

_FILE_PATHS = frozenset({"tasks", "plugins", "runs_dir"})
#: What a benchmark's defaults cannot set.
_NOT_A_BENCHMARKS = frozenset({"benchmark", "tasks", "plugins", "runs_dir", "name", "model", "base_url", "api_key_env"})
#: What describes an evaluation; a training run has keys of its own for that.
_EVALUATION_ONLY = {"split": "evaluation.split", "limit": "evaluation.limit", "samples": "training.group_size"}

P = TypeVar("P", bound=BaseModel)


class Setting(NamedTuple):
    """One line of ``config show``."""

    key: str
    value: Any
    origin: str


class Resolved(NamedTuple):
    """``settings`` holds every value in force, plugin options included; ``unused`` what was given in vain and why;
    ``errors`` what :func:`resolve` would have raised had it been strict."""

    config: RunConfig
    registry: Registry
    settings: list[Setting]
    unused: list[Setting]
    errors: list[RlHarnessError]
    file: Path | None


def resolve(
    flags: Mapping[Key, tuple[str, Any]] | None = None,
    options: Sequence[str] = (),
    *,
    config: Path | None = None,
    environment: Mapping[str, str] | None = None,
    strict: bool = True,
    serve: bool = False,
) -> Resolved:
    """Find the layers, merge and validate them, and load the plugins they choose.

    ``flags`` are values of command-line flags by key, with the flag they came from. Without ``strict``, a plugin
    that is missing or refuses its options is an entry of ``errors`` beside everything that could be resolved. For
    ``serve`` there are neither tasks nor an agent: what describes these is unused.
    """
    environment = os.environ if environment is None else environment
    file = config_file(config, environment)
    given = [option_layer(flags or {}, options), environment_layer(environment)]
    if file is not None:
        given.append(_absolute_paths(file_layer(file), file.resolve().parent))
    given = [_expand_names(layer) for layer in given]
    files = _plugin_files(given)
    registry = load_registry([Path(file.value) for file in files])
    given = [_split_arguments(layer, registry) for layer in given]
    _check_keys(given, environment)
    merged, unused = _merge(given)
    if files:
        origins = dict.fromkeys(file.origin for file in files)
        merged["plugins",] = Value([file.value for file in files], ", ".join(origins))
    unused += _for_the_other_command(merged, serve=serve)
    if serve:
        merged["benchmark",] = Value(None, SERVE)
    else:
        _one_source_of_tasks(merged, given, unused)
    errors: list[RlHarnessError] = []
    settings: list[Setting] = []
    with _collecting(errors, strict):
        settings += _settle_benchmark(merged, given, registry)
    _select_api_engine(merged)
    for section in SECTIONS:
        if not any(key[0] == section and key[1:] in ((), ("name",)) for key in merged):
            merged[section, "name"] = Value(RunConfig.model_fields[section].default.name, DEFAULT)
    run_config = _validate(merged)
    for directory in run_config.tasks:
        if not directory.is_dir():
            raise ConfigError(f"{merged['tasks',].origin}: there is no task directory {directory}")
    unused += _not_for_training(run_config, merged)
    unused += _without_a_reader(run_config, merged)
    without = dict.fromkeys(("harness", "sandbox"), "serve runs no agent") if serve else {}
    run_config, chosen, idle = _choose_plugins(run_config, merged, registry, errors, without, strict=strict)
    settings = [*_core_settings(run_config, merged), *settings, *chosen]
    return Resolved(run_config, registry, settings, [*unused, *idle], errors, file)


def configured_runs_dir() -> Path:
    """Where runs are, as the environment and the file say. Loads no plugin."""
    file = config_file(None)
    layers = [environment_layer(os.environ)]
    if file is not None:
        layers.append(_absolute_paths(file_layer(file), file.resolve().parent))
    default = RunConfig.model_fields["runs_dir"].default
    return next((Path(layer.values["runs_dir",].value) for layer in layers if ("runs_dir",) in layer.values), default)


@contextlib.contextmanager
def _collecting(errors: list[RlHarnessError], strict: bool) -> Iterator[None]:
    try:
        yield
    except RlHarnessError as error:
        if strict:
            raise
        errors.append(error)


# -- layers ------------------------------------------------------------------------------------------------------


def _absolute_paths(layer: Layer, directory: Path) -> Layer:
    """Paths in a file are relative to that file."""

    def absolute(value: Any) -> Any:
        if isinstance(value, str):
            return str(directory / Path(value).expanduser())
        return [absolute(item) for item in value] if isinstance(value, list) else value

    def is_path(key: Key, value: Any) -> bool:
        return key[0] in _FILE_PATHS or (key == ("model",) and str(value).startswith(("./", "../", "~/")))

    return Layer(
        layer.name,
        {k: Value(absolute(v.value), v.origin) if is_path(k, v.value) else v for k, v in layer.values.items()},
    )


def _expand_names(layer: Layer) -> Layer:
    """``sandbox = "docker"`` is short for ``sandbox.name = "docker"``."""
    return Layer(
        layer.name, {(*k, "name") if len(k) == 1 and k[0] in SECTIONS else k: v for k, v in layer.values.items()}
    )


def _split_arguments(layer: Layer, registry: Registry) -> Layer:
    """``harness = "python:module:function"``: what follows a name is the value of one of its options."""
    values = dict(layer.values)
    for section, kind in SECTIONS.items():
        chosen = values.get((section, "name"))
        if chosen is None or not isinstance(chosen.value, str) or ":" not in chosen.value:
            continue
        spec, at, version = str(chosen.value).partition("@")
        name, argument = registry.split_argument(kind.plural, spec)
        values[section, "name"] = Value(name + at + version, chosen.origin)
        for option, value in argument.items():
            values[section, option] = Value(value, chosen.origin)
    return Layer(layer.name, values)


def _plugin_files(layers: Sequence[Layer]) -> list[Value]:
    """Local plugin files of all layers together: naming one more does not unload the file's."""
    files: dict[str, Value] = {}
    for layer in reversed(layers):
        value = layer.values.get(("plugins",))
        if value is not None:
            parsed = parse(value.value, tuple[Path, ...])
            for item in [parsed] if isinstance(parsed, str | Path) else parsed:
                files.setdefault(str(item), Value(str(item), value.origin))
    return list(files.values())


def _check_keys(layers: Sequence[Layer], environment: Mapping[str, str]) -> None:
    """Every key must be one that :class:`RunConfig` has; plugin options are checked with their plugin."""
    named_by_others = {str(v.value) for layer in layers for k, v in layer.values.items() if k[-1].endswith("_env")}
    problems = []
    for layer in layers:
        for key, value in list(layer.values.items()):
            problem = unknown_key(key)
            if problem is None:
                continue
            if layer.name == "environment" and value.origin.removeprefix("$") in named_by_others:
                del layer.values[key]  # a secret whose variable merely has our prefix
                continue
            problems.append(f"{value.origin}: {problem}")
    if problems:
        raise ConfigError("\n".join(problems), remedy="rl-harness config show lists the keys there are")


# -- merging -----------------------------------------------------------------------------------------------------


def _merge(layers: Sequence[Layer]) -> tuple[dict[Key, Value], list[Setting]]:
    """Values by precedence (highest layer first). A plugin's options go with the plugin their layer names: where a
    higher layer chooses another one, they are unused."""
    chosen: dict[str, Value] = {}
    for section in SECTIONS:
        named = [layer.values[section, "name"] for layer in layers if (section, "name") in layer.values]
        if named:
            chosen[section] = named[0]
    merged: dict[Key, Value] = {}
    unused: list[Setting] = []
    for layer in layers:
        for key, value in layer.values.items():
            section = key[0]
            bound = layer.values.get((section, "name")) if section in SECTIONS else None
            if bound is not None and key[1:] != ("name",) and not _same(_name(bound), _name(chosen[section])):
                reason = f"for {section} {bound.value}, but {chosen[section].origin} chose {chosen[section].value}"
                unused.append(Setting(dotted(key), value.value, f"{value.origin} ({reason})"))
            elif not any(_overlap(key, other) for other in merged):
                merged[key] = value
    return merged, unused


def _for_the_other_command(merged: dict[Key, Value], *, serve: bool) -> list[Setting]:
    """Take out the keys that only the other one of ``run`` and ``serve`` reads."""
    unused = []
    for key in list(merged):
        if serve and not any(key[: len(read)] == read for read in _SERVE_READS):
            reason = "serve does not read it"
        elif not serve and key[0] in _SERVE_ONLY:
            reason = "only serve reads it"
        else:
            continue
        value = merged.pop(key)
        unused.append(Setting(dotted(key), value.value, f"{value.origin} ({reason})"))
    return unused


def _name(value: Value) -> str:
    """The name of a plugin without a benchmark's version."""
    return str(value.value).partition("@")[0]


def _same(one: str, other: str) -> bool:
    """Whether two names mean one plugin: equal, or one of them without its distribution."""
    return one == other or ((":" not in one or ":" not in other) and one.rpartition(":")[2] == other.rpartition(":")[2])


def _overlap(one: Key, other: Key) -> bool:
    shorter = min(len(one), len(other))
    return one[:shorter] == other[:shorter]


def _one_source_of_tasks(merged: dict[Key, Value], layers: Sequence[Layer], unused: list[Setting]) -> None:
    """A benchmark or task directories: the highest layer that names either decides."""
    for layer in layers:
        named = [key for key in (("benchmark", "name"), ("tasks",)) if key in layer.values]
        if len(named) == 2:
            raise ConfigError(f"{layer.name} gives both a benchmark and task directories", remedy="give one of them")
        if not named:
            continue
        winner = layer.values[named[0]]
        loser = "tasks" if named[0][0] == "benchmark" else "benchmark"
        for key in [key for key in merged if key[0] == loser]:
            dropped = merged.pop(key)
            reason = f"{winner.origin} gives {named[0][0]} instead"
            unused.append(Setting(dotted(key), dropped.value, f"{dropped.origin} ({reason})"))
        if loser == "benchmark":
            merged["benchmark",] = Value(None, winner.origin)
        return


def _settle_benchmark(merged: dict[Key, Value], layers: Sequence[Layer], registry: Registry) -> list[Setting]:
    """Load the benchmark; what it recommends becomes the lowest layer above the defaults."""
    if ("benchmark",) in merged:
        return []
    if ("benchmark", "name") not in merged:
        merged["benchmark", "name"] = Value(RunConfig.model_fields["benchmark"].default.name, DEFAULT)
    named = merged["benchmark", "name"]
    if named.origin == COMMAND_LINE and _name(named) not in registry.names("benchmarks") and ":" not in named.value:
        raise _neither_folder_nor_benchmark(named.value, registry)
    chosen = _choose("benchmark", merged, registry)
    assert isinstance(chosen.plugin, Benchmark)
    origin = f"benchmark {chosen.name}"
    layer = Layer(origin, {tuple(k.split(".")): Value(v, origin) for k, v in chosen.plugin.defaults.items()})
    for key in layer.values:
        problem = unknown_key(key)
        if key[0] in _NOT_A_BENCHMARKS:
            problem = f"{dotted(key)!r} is not for a benchmark to set"
        if problem is not None:
            raise PluginError(f"{origin} is at fault: {problem}")
    with_defaults, _ = _merge([*layers, layer])
    merged |= {key: value for key, value in with_defaults.items() if value.origin == origin}
    merged |= {("benchmark", *key): Value(v, merged["benchmark", *key].origin) for key, v in chosen.typed.items()}
    return chosen.settings


def _neither_folder_nor_benchmark(target: str, registry: Registry) -> UnknownName:
    try:
        registry.find("benchmarks", target.partition("@")[0])
    except UnknownName as error:
        remedy = error.remedy
    there = "it is a file, not a task directory" if Path(target).exists() else f"there is no folder {target!r} here"
    folders = [path.name for path in Path().iterdir() if path.is_dir()]
    if near := difflib.get_close_matches(target, folders, n=1):
        remedy = f"did you mean the folder ./{near[0]}?\n  {remedy}"
    return UnknownName(f"{there}, and no benchmark of that name is registered", remedy=remedy)


def _select_api_engine(merged: dict[Key, Value]) -> None:
    """``base_url`` is short for that engine with that option."""
    base_url = merged.get(("base_url",))
    if base_url is None:
        return
    engine = merged.setdefault(("engine", "name"), Value(API_ENGINE, f"because of base_url, {base_url.origin}"))
    if _name(engine) != API_ENGINE:
        raise ConfigError(
            f"base_url ({base_url.origin}) is for engine {API_ENGINE!r}, but {engine.origin} chose {engine.value!r}",
            remedy="leave one of them out",
        )
    merged["engine", "base_url"] = base_url
    api_key_env = merged.get(("api_key_env",))
    if api_key_env is not None:
        merged["engine", "api_key_env"] = api_key_env


# -- typing and validation ---------------------------------------------------------------------------------------


def _validate(merged: dict[Key, Value]) -> RunConfig:
    values = {key: parse(value.value, annotation_of(key)) for key, value in merged.items()}
    return _as_model(RunConfig, nest(values), merged, ())


def _as_model(model: type[P], data: Mapping[str, Any], merged: Mapping[Key, Value], prefix: Key) -> P:
    """Validate; every problem is told with its origin and key."""
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        problems = []
        for item in error.errors():
            key = (*prefix, *(str(part) for part in item["loc"]))
            origin = next((merged[key[:n]].origin for n in range(len(key), 0, -1) if key[:n] in merged), DEFAULT)
            problems.append(f"{origin}: {dotted(key)} = {item['input']!r}: {wrong(item)}")
        raise ConfigError("\n".join(problems)) from None


# -- plugins -----------------------------------------------------------------------------------------------------


class _Chosen(NamedTuple):
    """A plugin section after its options were typed and validated; ``typed`` by path within the section."""

    name: str
    typed: dict[Key, Any]
    plugin: Plugin
    settings: list[Setting]


def _choose(section: str, merged: Mapping[Key, Value], registry: Registry) -> _Chosen:
    named = merged[section, "name"]
    name = _name(named)
    given = {key[1:]: value for key, value in merged.items() if key[0] == section and key[1:] != ("name",)}
    cls = registry.load(SECTIONS[section].plural, name)
    typed = {path: parse(value.value, option_annotation(cls.Options, path)) for path, value in given.items()}
    origins = {dotted((section, *path)): value.origin for path, value in given.items()}
    options = validate_options(cls, nest(typed), section, origins)
    settings = [Setting(f"{section}.name", str(named.value), named.origin)]
    for field_name, field in cls.Options.model_fields.items():
        key = field.alias or field_name
        source = next((value.origin for path, value in given.items() if path[0] == key), f"{DEFAULT} of {name}")
        settings.append(Setting(f"{section}.{key}", getattr(options, field_name), source))
    return _Chosen(name, typed, cls(options), settings)


def _choose_plugins(
    config: RunConfig,
    merged: dict[Key, Value],
    registry: Registry,
    errors: list[RlHarnessError],
    idle: dict[str, str],
    *,
    strict: bool,
) -> tuple[RunConfig, list[Setting], list[Setting]]:
    """Settle every section this run uses; what was given for the others (``idle`` ones, with the reason, and those that
    turn out to be) is unused."""
    settings: list[Setting] = []
    unused: list[Setting] = []
    if not config.trains:
        idle |= dict.fromkeys(("trainer", "backend"), "this run does not train")
    for section in SECTIONS:  # the harness comes first: whether it calls a model decides about the others
        if section == "benchmark":
            continue
        if section in idle:
            unused += (
                Setting(dotted(key), value.value, f"{value.origin} ({idle[section]})")
                for key, value in merged.items()
                if key[0] == section and value.origin != DEFAULT and str(value.value) != NO_TRAINER
            )
            continue
        with _collecting(errors, strict):
            try:
                chosen = _choose(section, merged, registry)
            except UnknownName:
                named = merged[section, "name"]
                settings.append(Setting(f"{section}.name", named.value, named.origin))
                raise
            settings += chosen.settings
            choice = PluginChoice.model_validate({"name": chosen.name, **nest(chosen.typed)})
            config = config.model_copy(update={section: choice})
            if isinstance(chosen.plugin, Harness) and not chosen.plugin.capabilities.protocols:
                idle |= dict.fromkeys(("engine", "renderer"), f"harness {chosen.name} calls no model")
            if isinstance(chosen.plugin, ChatEngine):
                idle["renderer"] = f"engine {chosen.name} takes messages, not tokens"
    return config, settings, unused


def _not_for_training(config: RunConfig, merged: Mapping[Key, Value]) -> list[Setting]:
    """Keys of an evaluation mean nothing to a training run: refused when asked for right here, unused in a file."""
    unused = []
    for name, instead in _EVALUATION_ONLY.items() if config.trains else ():
        value = merged.get((name,))
        if value is None:
            continue
        if value.origin.startswith(("-", "$")):
            raise ConfigError(
                f"{value.origin}: {name} is for evaluations, and trainer {config.trainer.name!r} makes this a training",
                remedy=f"use -o {instead}={value.value}, or --trainer none",
            )
        unused.append(Setting(name, value.value, f"{value.origin} (a training run reads {instead})"))
    return unused


def _without_a_reader(config: RunConfig, merged: Mapping[Key, Value]) -> list[Setting]:
    """Keys of a training mean nothing to an evaluation, and splits nothing to task directories: those have none."""
    unused = []
    for key, value in merged.items():
        if config.tasks and key[-1] == "split":
            if value.origin.startswith(("-", "$")):
                raise ConfigError(
                    f"{value.origin}: task directories have no splits, and tasks are given as directories",
                    remedy="leave it out; to train on some tasks and evaluate on others, make a benchmark of them",
                )
            unused.append(Setting(dotted(key), value.value, f"{value.origin} (task directories have no splits)"))
        elif not config.trains and key[0] in ("training", "evaluation") and not value.origin.startswith("benchmark "):
            unused.append(Setting(dotted(key), value.value, f"{value.origin} (this run does not train)"))
    return unused


def _core_settings(config: RunConfig, merged: Mapping[Key, Value]) -> list[Setting]:
    settings = []
    if config.benchmark is None:
        settings.append(Setting("benchmark", None, merged["benchmark",].origin))
    for key in known_keys():
        if key[0] in SECTIONS:
            continue
        value: Any = config
        for part in key:
            value = getattr(value, part)
        settings.append(Setting(dotted(key), value, merged[key].origin if key in merged else DEFAULT))
    return settings
