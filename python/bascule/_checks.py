"""Arguments that the core cannot take: numbers beyond its types, names of no option."""

from __future__ import annotations

import enum
from numbers import Integral
from typing import TypeVar

from bascule.errors import InvalidArgument

__all__ = ["U32_MAX", "U64_MAX", "choice", "whole"]

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

_E = TypeVar("_E", bound=enum.Enum)


def choice(option: str, value: str, options: type[_E]) -> _E:
    """Return the member of an enumeration of the core that an option's value names.

    Parameters
    ----------
    option
        Its name, for messages.
    value
        E.g. ``"auto"`` for ``AUTO``.
    options
        The enumeration.
    """
    if not isinstance(value, str):
        raise TypeError(f"{option}= must be a str, not {type(value).__name__}")
    found = options.__members__.get(value.upper())
    if found is None:
        allowed = ", ".join(repr(name.lower()) for name in options.__members__)
        raise InvalidArgument(f"{option}={value!r} is not one of {allowed}")
    return found


def whole(name: str, value: int, least: int, most: int = U32_MAX) -> int:
    """Return a whole number, if it is in a range. Other types are left to the core to refuse.

    Parameters
    ----------
    name
        Of the argument, for messages.
    value
        Of the argument.
    least, most
        Both allowed.
    """
    if isinstance(value, Integral) and not least <= value <= most:
        raise InvalidArgument(f"{name}={value} is out of range; {least} to {most} are allowed")
    return value
