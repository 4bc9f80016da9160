"""Reading fields of a parsed JSON object, with errors that say where a value was looked for."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]

_MISSING = object()
REQUIRED = object()


class ConfigError(ValueError):
    """A configuration that cannot be used: names the field, the value and its place."""


@dataclasses.dataclass(frozen=True)
class Section:
    """One JSON object, where it was read from, and its dotted place in that file.

    `null` counts as absent: Hugging Face writes it for every optional field.
    """

    values: Mapping[str, Any]
    source: str
    path: str = ""

    def place(self, name: str) -> str:
        """Where `name` stands, for messages: "draft/config.json: dflash_config.block_size"."""
        return f"{self.source}: {self.path + '.' if self.path else ''}{name}"

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def section(self, name: str) -> "Section":
        """The nested object `name`; an empty section when it is absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        elif not isinstance(value, Mapping):
            raise ConfigError(f"{self.place(name)} is {value!r}, expected an object")
        return Section(value, self.source, f"{self.path}.{name}" if self.path else name)


def read_json(path: pathlib.Path) -> Mapping[str, Any]:
    """Parses a JSON file that must hold an object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def open_section(source: ConfigSource) -> Section:
    """A dict as it is, a JSON file, or the `config.json` of a directory."""
    if isinstance(source, Mapping):
        return Section(source, "config")
    path = pathlib.Path(source)
    if path.is_dir():
        path = path / "config.json"
    return Section(read_json(path), str(path))


# --- kinds of value: (what the message calls it, conversion that returns _MISSING if unfit) ---


@dataclasses.dataclass(frozen=True)
class Kind:
    """A type check with a name; `convert` returns `_MISSING` for a value that does not fit."""

    name: str
    convert: Callable[[Any], Any]


def _integer(value: Any) -> Any:
    # bool is a subclass of int: `true` as a size is a mistake, not a 1.
    return value if isinstance(value, int) and not isinstance(value, bool) else _MISSING


def _positive(value: Any) -> Any:
    return value if _integer(value) is not _MISSING and value > 0 else _MISSING


def _number(value: Any) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return _MISSING
    return float(value) if math.isfinite(value) else _MISSING


def _positive_number(value: Any) -> Any:
    return float(value) if _number(value) is not _MISSING and value > 0 else _MISSING


def _token(value: Any) -> Any:
    return value if _integer(value) is not _MISSING and value >= 0 else _MISSING


def _token_or_tokens(value: Any) -> Any:
    return _tuple_of(_token)(value if isinstance(value, list | tuple) else [value])


def _instance(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kind) else _MISSING


def _tuple_of(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return _MISSING
        items = tuple(item(entry) for entry in value)
        return _MISSING if _MISSING in items else items

    return convert


INT = Kind("an integer", _integer)
SIZE = Kind("a positive integer", _positive)
NUMBER = Kind("a finite number", _number)
POSITIVE = Kind("a positive finite number", _positive_number)
BOOL = Kind("true or false", _instance(bool))
TEXT = Kind("a string", _instance(str))
INTS = Kind("a list of integers", _tuple_of(_integer))
TOKEN = Kind("a token id (an integer >= 0)", _token)
TOKENS = Kind("a token id (an integer >= 0) or a list of them", _token_or_tokens)
TEXTS = Kind("a list of strings", _tuple_of(_instance(str)))


def _convert(kind: Kind, name: str, section: Section) -> Any:
    raw = section.values[name]
    value = kind.convert(raw)
    if value is _MISSING:
        raise ConfigError(f"{section.place(name)} is {raw!r}, expected {kind.name}")
    return value


def read(
    kind: Kind,
    name: str,
    *sections: Section,
    default: Any = REQUIRED,
    first_wins: bool = False,
) -> Any:
    """Reads `name` from the sections that have it, innermost first.

    Args:
      kind: type check, one of the constants of this module.
      name: the field.
      *sections: places to look, the one that takes precedence first.
      default: value when no section has the field; without it, absence is an error.
      first_wins: let the first section override the others. Otherwise values that
        differ between two places are an error that names both.

    Raises:
      ConfigError: missing everywhere (names every place), wrong type, or conflict.
    """
    present = [section for section in sections if section.has(name)]
    if not present:
        if default is REQUIRED:
            places = ", ".join(f"'{section.place(name)}'" for section in sections)
            raise ConfigError(f"missing field '{name}'; looked for it at {places}")
        return default
    value = _convert(kind, name, present[0])
    if not first_wins:
        for other in present[1:]:
            other_value = _convert(kind, name, other)
            if other_value != value:
                raise ConfigError(
                    f"conflict: {present[0].place(name)} is {value!r} "
                    f"but {other.place(name)} is {other_value!r}"
                )
    return value


def require(name: str, expected: Any, section: Section, why: str) -> None:
    """Raises unless an optional field is absent or has the only supported value."""
    value = section.values.get(name)
    if value is not None and value != expected:
        raise ConfigError(f"{section.place(name)} is {value!r}: {why} (supported: {expected!r})")


def require_multiple(value: int, of: int, value_place: str, of_place: str) -> None:
    if value % of:
        raise ConfigError(f"{value_place} is {value}, not a multiple of {of_place}, which is {of}")


def read_layer_types(section: Section, layers: int, known: Sequence[str]) -> tuple[str, ...] | None:
    """`layer_types` checked against the layer count and the known kinds; None when absent."""
    kinds = read(TEXTS, "layer_types", section, default=None)
    if kinds is None:
        return None
    if len(kinds) != layers:
        raise ConfigError(
            f"{section.place('layer_types')} has {len(kinds)} entries "
            f"but num_hidden_layers is {layers}"
        )
    for index, kind in enumerate(kinds):
        if kind not in known:
            raise ConfigError(
                f"{section.place('layer_types')}[{index}] is {kind!r}, "
                f"expected one of {', '.join(map(repr, known))}"
            )
    return kinds
