"""The Compose files as values: the development stack, and the public one, merged as Compose merges them.

Owns:     how the files are read: `!override` and `!reset`, variables with the values of a `.env`.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

COMPOSE = Path(__file__).parents[1] / "deploy" / "compose"
# What .env must have; everything else has a default.
SECRETS = {
    "POSTGRES_PASSWORD": "secret-of-postgres",
    "REDIS_PASSWORD": "secret-of-redis",
    "TOWLINE_TOKEN_KEYS": "k" * 44,
    "TOWLINE_SECRET_KEYS": "x7cT8Zqv2nq0Y0yJXc3v7m2sH1o4u5w6e7r8t9y0a1s=",
}
# Members whose lists Compose joins by what they are for, not by position; here all lists are joined.
_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Z_]+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\})")

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A member under `!override` or `!reset`: it takes the place of the earlier file's."""

    value: Any


class _Loader(yaml.SafeLoader):
    pass


def _replaced(loader: yaml.SafeLoader, node: yaml.Node) -> Replaced:
    construct = {
        yaml.MappingNode: lambda: loader.construct_mapping(node, deep=True),
        yaml.SequenceNode: lambda: loader.construct_sequence(node, deep=True),
    }
    return Replaced(construct[type(node)]())


_Loader.add_constructor("!override", _replaced)
_Loader.add_constructor("!reset", _replaced)


@functools.cache
def development() -> Object:
    """What `compose.yaml` alone says. Not to be changed by tests."""
    return _plain(_read("compose.yaml"))


@functools.cache
def public() -> Object:
    """What `compose.yaml` and `public.yaml` say together. Not to be changed by tests."""
    return _plain(_merge(_read("compose.yaml"), _read("public.yaml")))


def substitute(text: str, variables: Mapping[str, str] = SECRETS) -> str:
    """Put variables into a value, as Compose does."""

    def value(found: re.Match[str]) -> str:
        if found["name"] is None:
            return "$"
        default = found["rest"] if found["kind"] == "-" else ""
        return variables.get(found["name"]) or default or ""

    return _VARIABLE.sub(value, text)


def services(document: Object) -> dict[str, Object]:
    """The services by name."""
    found: dict[str, Object] = document["services"]
    return found


def networks_of(service: Object) -> set[str]:
    """The names of a service's networks."""
    return set(service.get("networks", ()))


def is_once(service: Object) -> bool:
    """Whether it runs to its end, and not until it is stopped."""
    return bool(service.get("restart") == "no")


def seconds(text: str) -> float:
    """Read a duration such as `45s`."""
    found = re.fullmatch(r"(\d+)(s|m)", text)
    assert found, text
    return int(found[1]) * {"s": 1, "m": 60}[found[2]]


def _read(name: str) -> Object:
    loaded: Object = yaml.load((COMPOSE / name).read_text(), _Loader)
    return loaded


def _merge(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {name: _merge(base.get(name), over[name]) if name in over else base[name] for name in {**base, **over}}
    if isinstance(base, list) and isinstance(over, list):
        return base + over
    return base if over is None else over


def _plain(value: Any) -> Any:
    match value:
        case Replaced(value=inner):
            return _plain(inner)
        case dict():
            return {name: _plain(member) for name, member in value.items()}
        case list():
            return [_plain(item) for item in value]
        case str():
            return substitute(value)
    return value
