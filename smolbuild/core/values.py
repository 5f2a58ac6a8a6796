"""Slotted dataclasses whose methods are written when they are first needed.

The standard library compiles six methods for every frozen dataclass as its module is imported:
0.4 ms each, and a command that has nothing to do imports eighty. Of these classes a command uses a
few, so here ``__init__`` is compiled at the first instance of a class, and what need not be
compiled never is: 0.05 ms. All else is the standard library's: fields, ``replace``, ``asdict``,
``is_dataclass``, comparison, hash, text, and what type checkers see.

Modules that ``smolbuild build`` imports when nothing changed take ``dataclass`` from here.
"""

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(
        *, slots: bool, frozen: bool = False, kw_only: bool = False
    ) -> Callable[[type], type]:
        """Return the decorator, as ``dataclasses.dataclass``; classes always have slots.

        Raises:
            TypeError: ``slots`` is false, or a field is not a parameter of ``__init__``.

        """
        if not slots:
            raise TypeError("classes that are made here have slots")
        return lambda cls: _made(cls, frozen=frozen, kw_only=kw_only)


def _made(cls: type, *, frozen: bool, kw_only: bool) -> type:
    if cls.__doc__ is None:
        cls.__doc__ = cls.__name__  # the standard library would write a signature into it
    dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
    fields = dataclasses.fields(cls)
    if not all(field.init for field in fields):
        raise TypeError(f"{cls.__name__} has a field that __init__ does not take")
    names = [field.name for field in fields]
    inherited = {name for base in cls.__mro__[1:-1] for name in getattr(base, "__slots__", ())}
    space = dict(cls.__dict__)
    for name in (*names, "__dict__", "__weakref__"):
        space.pop(name, None)
    space["__slots__"] = tuple(name for name in names if name not in inherited)
    space["__qualname__"] = cls.__qualname__
    made = type(cls)(cls.__name__, cls.__bases__, space)
    methods: dict[str, Any] = {
        "__init__": _first_init(made),
        "__repr__": _repr,
        "__eq__": _equality(tuple(field.name for field in fields if field.compare)),
        "__getstate__": _get_state,
        "__setstate__": _set_state,
    }
    if frozen:
        methods |= {"__setattr__": _no_setattr, "__delattr__": _no_delattr}
    for name, method in methods.items():
        if name not in space:
            setattr(made, name, method)
    if "__hash__" not in space or space["__hash__"] is None:
        hashed = tuple(f.name for f in fields if (f.compare if f.hash is None else f.hash))
        made.__hash__ = _hashing(hashed) if frozen else None  # type: ignore[assignment]
    return made


def _first_init(cls: type) -> Callable[..., None]:
    def __init__(self: object, /, *args: object, **values: object) -> None:  # noqa: N807
        compiled = _compiled_init(cls)
        cls.__init__ = compiled  # type: ignore[misc]
        compiled(self, *args, **values)

    return __init__


def _compiled_init(cls: type) -> Callable[..., None]:
    """Return the ``__init__`` that the standard library would have written."""
    space: dict[str, Any] = {"_absent": dataclasses.MISSING}
    positional: list[str] = []
    named: list[str] = []
    body: list[str] = []
    for field in dataclasses.fields(cls):
        name = value = parameter = field.name
        # The slot's own setter goes around a frozen class's __setattr__.
        space[f"_set_{name}"] = getattr(cls, name).__set__
        if field.default_factory is not dataclasses.MISSING:
            space[f"_make_{name}"] = field.default_factory
            parameter = f"{name}=_absent"
            value = f"_make_{name}() if {name} is _absent else {name}"
        elif field.default is not dataclasses.MISSING:
            space[f"_default_{name}"] = field.default
            parameter = f"{name}=_default_{name}"
        (named if field.kw_only else positional).append(parameter)
        body.append(f"_set_{name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    star = ["*"] if named else []
    parameters = ", ".join(["self", *positional, *star, *named])
    source = f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"])
    exec(source, space)  # noqa: S102 - the names of a class's own fields
    init: Callable[..., None] = space["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


def _values(names: tuple[str, ...]) -> Callable[[object], object]:
    return attrgetter(*names) if names else lambda _: ()


def _equality(names: tuple[str, ...]) -> Callable[[object, object], bool]:
    values = _values(names)

    def __eq__(self: object, other: object) -> bool:  # noqa: N807
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    return __eq__


def _hashing(names: tuple[str, ...]) -> Callable[[object], int]:
    values = _values(names)
    return lambda self: hash(values(self))


def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _no_setattr(self: object, name: str, value: object) -> None:
    del self, value
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _no_delattr(self: object, name: str) -> None:
    del self
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _get_state(self: Any) -> list[object]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[object]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
