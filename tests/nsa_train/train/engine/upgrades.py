"""Simulates upgrades of the training engine that rename, remove or change one of its members, for `test_contract`."""

import dataclasses
import inspect
import re
import sys
import textwrap

import pytest

RENAMED = "_renamed_by_an_upgrade"


def rename(monkeypatch: pytest.MonkeyPatch, member: str, *classes: type) -> None:
    """Rename a method or field in these classes of the engine, definition and uses alike."""
    new = f"{member}{RENAMED}"
    for cls in classes:
        for name, value in list(vars(cls).items()):
            if (source := _source(value)) is not None and re.search(rf"\b{member}\b", source):
                changed = _compile(cls, name, re.sub(rf"\b{member}\b", new, source), new if name == member else name)
                monkeypatch.setattr(cls, new if name == member else name, changed, raising=False)
        if member in vars(cls):
            default = vars(cls)[member]
            if not callable(default):
                monkeypatch.setattr(cls, new, default, raising=False)
            monkeypatch.delattr(cls, member)
        for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
            if field.name == member and field.default_factory is not dataclasses.MISSING:
                monkeypatch.setattr(cls, new, field.default_factory(), raising=False)


def rewrite(monkeypatch: pytest.MonkeyPatch, cls: type, method: str, old: str, new: str) -> None:
    """Replace text in the source of one method of the engine."""
    source = _source(vars(cls)[method])
    assert source is not None
    assert old in source, f"{cls.__name__}.{method} has changed: adapt this mutation"
    monkeypatch.setattr(cls, method, _compile(cls, method, source.replace(old, new), method))


def _source(value: object) -> str | None:
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) or hasattr(value, "__func__") else None
    try:
        return textwrap.dedent(inspect.getsource(value)) if inspect.isfunction(value) else None
    except OSError:  # made by dataclass, without a file
        return None


def _compile(cls: type, name: str, source: str, compiled_name: str) -> object:
    namespace: dict[str, object] = {}
    module = sys.modules[cls.__module__]
    exec(
        compile("from __future__ import annotations\n" + source, f"<{name} after an upgrade>", "exec"),
        vars(module),
        namespace,
    )
    return namespace[compiled_name]
