"""From the names in the configuration (`tools.offered`) to tools. Names come from there alone, never from a model."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping

from paravt_ray.errors import InputError
from paravt_ray.tools.tool import BadCallError, Tool

Tools = Mapping[str, Tool]
"""By name, in the order in which the model is told of them."""

_SHIPPED = re.compile(r"[a-z]\w*", re.ASCII)
_ANYWHERE = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<object>[A-Za-z_]\w*)", re.ASCII)
_CALLABLE = re.compile(r"[A-Za-z_]\w+", re.ASCII)
"""Names that the parser finds in calls written as code."""


class ToolNameError(InputError):
    """`tools.offered` names something that is no tool or cannot be imported; the message says which and why."""


def load_tools(names: Iterable[str]) -> Tools:
    """The tools of the names `package.module:OBJECT`; `crop_video` is short for
    `paravt_ray.tools.crop_video:CROP_VIDEO`, and so on for every file beside this one.

    Raises:
        ToolNameError: one is no such name, cannot be imported, or is no usable tool, or two have the same name.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        tool = _load(name)
        if tool.name in tools:
            raise ToolNameError(f"{name} offers a tool {tool.name}, but there is one of that name already.")
        tools[tool.name] = tool
    return tools


def _load(name: str) -> Tool:
    full = f"{__package__}.{name}:{name.upper()}" if _SHIPPED.fullmatch(name) else name
    found = _ANYWHERE.fullmatch(full)
    if found is None:
        raise ToolNameError(f"{name!r} is no name of a tool: write package.module:OBJECT, or crop_video.")
    try:
        tool = getattr(importlib.import_module(found["module"]), found["object"])
    except Exception as error:  # a module may fail in any way while it is imported
        raise ToolNameError(
            f"{name} cannot be imported ({type(error).__name__}: {error}). Its module must be installed, or lie in a "
            "folder of PYTHONPATH, on every machine of the cluster."
        ) from error
    if not isinstance(tool, Tool):
        raise ToolNameError(f"{name} is no tool, but {type(tool).__name__}: name an object whose class extends Tool.")
    _check(name, tool)
    return tool


def _check(name: str, tool: Tool) -> None:
    """Refuse a tool that the model could not be told of or could not call, by what its own example gives."""
    try:
        json.dumps([tool.schema, tool.example])
        named, strange = tool.name, sorted(set(tool.example) - set(tool.parameters))
        tool.read(tool.example)
    except BadCallError as error:
        raise ToolNameError(f"{name} does not read its own example: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ToolNameError(f"{name} has no usable schema or example ({type(error).__name__}: {error}).") from error
    if not _CALLABLE.fullmatch(named) or strange:
        raise ToolNameError(
            f"{name} needs a name of two or more letters, digits and _, and an example whose arguments are in its "
            f"schema; its name is {named!r}{', its example adds ' + ', '.join(strange) if strange else ''}."
        )


DEFAULT = load_tools(("crop_video",))
"""What is offered unless the configuration says otherwise, and what recorded conversations are read with."""
