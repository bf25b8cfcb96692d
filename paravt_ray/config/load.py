"""From YAML files and `key=value` overrides to a checked configuration, and back."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from paravt_ray.config.check import ConfigError, check_config
from paravt_ray.config.schema import Config

BASE = "base"
"""The one line of a file that is no section: which file it is based on, as a path from its own folder."""

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
}


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and what it is based on, apply `key=value` overrides, check every key and value.

    Raises:
        ConfigError: the file is missing or no YAML, a key is unknown, a value has the wrong type or range.
    """
    file = Path(path)
    files = _read_files(file)
    changes = [_read_override(override) for override in overrides or []]
    for layer in (*files, *changes):
        _check_sections(layer)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), *files, *changes)
        config = cast(Config, OmegaConf.to_object(merged))
    except ConfigKeyError as error:
        raise ConfigError(_unknown_key_message(str(error.full_key or error.key or ""))) from error
    except (OmegaConfBaseException, ValueError) as error:
        key, reason = str(getattr(error, "full_key", None) or "").partition("[")[0], str(error).splitlines()[0]
        raise ConfigError(_wrong_kind_message(key, reason) or f"{file} cannot be used: {reason}") from error
    check_config(config)
    return config


def _read_files(file: Path, above: tuple[Path, ...] = ()) -> list[Any]:
    """The trees of the file and of those it is based on, which come first; `above` are the files that led to it."""
    said = f"{above[-1]} is based on {file}" if above else ""
    if file.resolve() in [other.resolve() for other in above]:
        raise ConfigError(f"{said}, which is based on itself: end the circle.")
    if not file.is_file():
        raise ConfigError(f"{said}, which does not exist." if above else f"There is no configuration file {file}.")
    try:
        loaded = OmegaConf.load(file)
    except Exception as error:  # OmegaConf passes on whatever its YAML reader raises
        raise ConfigError(f"{file} is not readable as YAML: {error}") from error
    if not OmegaConf.is_dict(loaded):
        raise ConfigError(f"{file} must hold sections with keys, such as `trainer:` with `steps: 20`.")
    settings = OmegaConf.to_container(loaded, resolve=False)
    if BASE not in settings:
        return [loaded]
    base = settings.pop(BASE)
    if not isinstance(base, str) or not base:
        raise ConfigError(f"`{BASE}` in {file} must name the file that it is based on, as a path from its own folder.")
    return [*_read_files(file.parent / base, (*above, file)), OmegaConf.create(settings)]


def _read_override(override: str) -> Any:
    """One `key=value` as a tree; `key=` sets an empty text."""
    if "=" not in override:
        raise ConfigError(f"'{override}' is not an override: write it as key=value, for example trainer.steps=20.")
    try:
        return OmegaConf.from_dotlist([f"{override}''" if override.endswith("=") else override])
    except Exception as error:  # OmegaConf passes on whatever its YAML reader raises
        raise ConfigError(f"The value in '{override}' is not readable as YAML.") from error


def _check_sections(layer: Any) -> None:
    for name, value in layer.items():
        if name in vars(Config()) and not OmegaConf.is_dict(value):
            raise ConfigError(
                f"{name} is a section, so it cannot be '{value}': set one of its keys, as {name}.KEY=VALUE."
            )


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")


def config_items(config: Config) -> dict[str, Any]:
    """All keys, dotted, with their values."""

    def walk(node: Any, prefix: str) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for name, value in vars(node).items():
            if hasattr(value, "__dataclass_fields__"):
                items |= walk(value, f"{prefix}{name}.")
            else:
                items[f"{prefix}{name}"] = value
        return items

    return walk(config, "")


def _wrong_kind_message(key: str, reason: str) -> str:
    """What a known key takes and why its value is refused; empty for any other key."""
    default = config_items(Config()).get(key)
    if default is None:
        return ""
    like = f" like {default}" if isinstance(default, list) and default else ""
    return f"{key} must be {_KINDS[type(default)]}{like}: {reason}"


def _unknown_key_message(key: str) -> str:
    known = list(config_items(Config()))
    leaf = key.rsplit(".", maxsplit=1)[-1]
    same_name = [k for k in known if k.split(".")[1] == leaf]
    close = same_name or difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    hint = (
        f" Did you mean {' or '.join(close)}?" if close else " `paravt train --help` says where all keys are described."
    )
    return f"Unknown configuration key {key}.{hint}"
