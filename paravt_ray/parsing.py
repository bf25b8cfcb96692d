"""The one parser of assistant turns, used by SFT, rollouts, rewards and evaluation alike.

What counts as a call:
- `<tool_call>` blocks hold JSON objects `{"name", "arguments"}`: several, or a list of them; Python literals are read
  where JSON fails. `<tool_code>` blocks hold calls written as code; they are read with `ast`, never evaluated.
  Objects outside both tags are text.
- Every attempt becomes one `ToolCall`, in order, with its own status and raw text. A broken one never costs a good one.
- Calls and answers in a think block that is closed are drafts and are left out. Where `</think>` is missing, thinking
  ends at the first complete call or the first closed, non-empty answer.
- An object is complete when its last bracket is there, with or without the closing tag; a cut-off one is an error.
- The turn ends at the first end-of-turn marker.

Which tools there are, and how their arguments are read, is not decided here (`tools/`).
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from paravt_ray.episode import ToolCall, Turn
from paravt_ray.tools.offered import DEFAULT, Tools
from paravt_ray.tools.tool import BadCallError, Tool

STRUCTURAL_TAGS = ("</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>")
"""The tags that the policy itself must write; `<think>` is forced by the prompt."""

_TAG = re.compile(r"</?(?:think|tool_call|tool_code|answer)>")
_END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext)\|>")
_JSON = json.JSONDecoder()
_OBJECT_START = re.compile(r"\{")
_NEXT_OBJECT = re.compile(r"\{\s*[\"']name[\"']\s*:")
_CODE_START = re.compile(r"\b[A-Za-z_]\w*+\(")
# A string that is never closed runs to the end (and is then no string): this keeps the scan linear.
_BRACKET_OR_STRING = re.compile(r"[\[\](){}]|\"(?:[^\"\\]|\\.)*+\"?|'(?:[^'\\]|\\.)*+'?", re.DOTALL)
_OPENING = frozenset("([{")
_CLOSING = frozenset(")]}")
# Python's own parser needs bounds: it is recursive, and slow on large invalid input.
_MAX_LITERAL_DEPTH = 16
_MAX_LITERAL_CHARS = 20_000


def parse_turn(text: str, think_prefilled: bool = False, tools: Tools = DEFAULT) -> Turn:
    """Read one assistant turn; any text gives a Turn, in time about linear in its length.

    Args:
        text: what the policy generated, special tokens as text or stripped.
        think_prefilled: the text begins inside a think block whose opener was forced by the prompt.
        tools: those that can be called.
    """
    end = _END_OF_TURN.search(text)
    return _TurnReader(text[: end.start()] if end else text, think_prefilled, tools).read(text)


@dataclass
class _TurnReader:
    """One pass over the tags of `text`, from left to right."""

    text: str
    prefilled: bool
    tools: Tools
    thinks: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    answer: str | None = None
    answer_closed: bool = False
    unclosed: bool = False

    def __post_init__(self) -> None:
        self.tags = [(m.start(), m.end(), m.group()) for m in _TAG.finditer(self.text)]
        self.starts = [start for start, _, _ in self.tags]
        self.starts_of: dict[str, list[int]] = {}
        for start, _, tag in self.tags:
            self.starts_of.setdefault(tag, []).append(start)

    def read(self, whole_text: str) -> Turn:
        first_close = self.next_of("</think>", 0)
        first_open = self.next_of("<think>", 0)
        # A closing tag without an opener: the text began inside a think block all the same.
        headless = first_close is not None and (first_open is None or first_close < first_open)
        position = self.skip_think(0) if self.prefilled or headless else 0
        while (index := bisect_left(self.starts, position)) < len(self.tags):
            start, end, tag = self.tags[index]
            if tag == "<think>":
                position = self.skip_think(end)
            elif tag in ("<tool_call>", "<tool_code>"):
                found, position = self.block(start, end, tag)
                self.calls += found
            elif tag == "<answer>":
                self.answer, self.answer_closed, position = self.answer_block(end)
            else:
                position = end
        return Turn(
            text=whole_text,
            think=self.thinks[0] if self.thinks else None,
            think_opened=self.prefilled or "<think>" in self.starts_of,
            think_closed=bool(self.thinks) and not self.unclosed,
            calls=tuple(self.calls),
            answer=self.answer,
            answer_closed=self.answer_closed,
        )

    def next_of(self, tag: str, position: int) -> int | None:
        """Start of the next such tag at or after `position`."""
        starts = self.starts_of.get(tag, [])
        index = bisect_left(starts, position)
        return starts[index] if index < len(starts) else None

    def next_tag(self, position: int) -> tuple[int, str]:
        """Start and text of the next tag of any kind; the end of the text and "" where there is none."""
        index = bisect_left(self.starts, position)
        return (self.starts[index], self.tags[index][2]) if index < len(self.tags) else (len(self.text), "")

    def skip_think(self, begin: int) -> int:
        """Record the think block whose text starts at `begin`; return where it ends."""
        close = self.next_of("</think>", begin)
        if close is not None:
            self.thinks.append(self.text[begin:close])
            return close + len("</think>")
        self.unclosed = True
        end = self.first_complete(begin)
        self.thinks.append(self.text[begin:end])
        return end

    def first_complete(self, position: int) -> int:
        """Start of the first complete call or answer, or the end of the text."""
        while (index := bisect_left(self.starts, position)) < len(self.tags):
            start, position, tag = self.tags[index]
            if tag in ("<tool_call>", "<tool_code>"):
                found, position = self.block(start, position, tag)
                if any(call.name is not None for call in found):
                    return start
            elif tag == "<answer>":
                answer, closed, position = self.answer_block(position)
                if answer is not None and closed:
                    return start
        return len(self.text)

    def answer_block(self, begin: int) -> tuple[str | None, bool, int]:
        """Text (None if empty), whether it is closed, and end of the answer whose text starts at `begin`."""
        close, reopened = self.next_of("</answer>", begin), self.next_of("<answer>", begin)
        closed = close is not None and (reopened is None or close < reopened)
        end = close if closed and close is not None else self.next_tag(begin)[0]
        return self.text[begin:end].strip() or None, closed, end + len("</answer>") * closed

    def block(self, start: int, begin: int, tag: str) -> tuple[list[ToolCall], int]:
        """The calls of the block whose opening tag stands at `start` and whose content starts at `begin`; its end."""
        style: Literal["json", "code"] = "json" if tag == "<tool_call>" else "code"
        attempts = list(self.json_attempts(begin) if style == "json" else self.code_attempts(begin))
        content_end = attempts[-1][1] if attempts else begin
        end, end_tag = self.next_tag(content_end)
        closed = end_tag == tag.replace("<", "</")
        if closed:
            end += len(end_tag)
        if not attempts:
            kind = "JSON object" if style == "json" else "function call"
            attempts = [(start, end, BadCallError(f"The {tag} block holds no {kind}."))]
        calls = [self.call(self.text[a:b].strip(), outcome, style, closed) for a, b, outcome in attempts]
        return calls, end

    def json_attempts(self, begin: int) -> Iterator[tuple[int, int, Any]]:
        """Start, end and decoded object (or error) of each object of a block, also of those in a list."""
        limit, _ = self.next_tag(begin)
        while match := _OBJECT_START.search(self.text, begin, limit):
            start = match.start()
            try:
                # JSON may run over a tag that stands inside one of its strings.
                value, begin = _JSON.raw_decode(self.text, start)
                limit, _ = self.next_tag(begin)
            except RecursionError:
                value, begin = BadCallError("The call is nested too deeply."), limit
            except ValueError:
                value, begin = _python_object(self.text, start, limit)
            yield start, begin, value

    def code_attempts(self, begin: int) -> Iterator[tuple[int, int, Any]]:
        """Start, end and `{"name", "arguments"}` (or error) of each call expression of a block."""
        limit, _ = self.next_tag(begin)
        while match := _CODE_START.search(self.text, begin, limit):
            start = match.start()
            end = _balanced_end(self.text, match.end() - 1, limit)
            if end is None:
                following = _CODE_START.search(self.text, match.end(), limit)
                begin = following.start() if following else limit
                yield start, begin, BadCallError("The call is cut off.")
            else:
                begin = end
                yield start, begin, _code_call(self.text[start:end], self.tools)

    def call(self, raw: str, outcome: Any, style: Literal["json", "code"], closed: bool) -> ToolCall:
        """The record of one attempt: `outcome` is the decoded object or the error that came instead."""
        name: str | None = None
        try:
            if isinstance(outcome, BadCallError):
                raise outcome
            name = outcome["name"] if isinstance(outcome.get("name"), str) else None
            if name is None:
                raise BadCallError('The call has no "name".')
            if name not in self.tools:
                only = "the only tool is" if len(self.tools) == 1 else "the tools are"
                raise BadCallError(f"There is no tool {name[:40]!r}; {only} {', '.join(self.tools)}.")
            found = self.tools[name].read(_argument_object(outcome.get("arguments")))
        except BadCallError as error:
            return ToolCall(False, name, None, None, str(error), raw, style=style, closed=closed)
        window = (found.start_time, found.end_time)
        return ToolCall(
            True, name, *window, None, raw, video=found.video, detail=found.detail, style=style, closed=closed
        )


def _balanced_end(text: str, start: int, limit: int) -> int | None:
    """One past the bracket that closes the one at `start`, strings skipped; None if there is none before `limit`.

    Kinds of brackets are not told apart: where they do not match, the text is refused when it is read.
    """
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text, start, limit):
        if match.group() in _OPENING:
            depth += 1
            if depth > _MAX_LITERAL_DEPTH:
                return None
        elif match.group() in _CLOSING:
            depth -= 1
            if depth == 0:
                return match.end()
    return None


def _python_object(text: str, start: int, limit: int) -> tuple[Any, int]:
    """The Python literal at `start` (or the error) and its end; a cut-off one ends where the next object starts."""
    end = _balanced_end(text, start, limit)
    if end is None:
        following = _NEXT_OBJECT.search(text, start + 1, limit)
        end = following.start() if following else limit
        return BadCallError("The JSON object is cut off."), end
    try:
        value = ast.literal_eval(_python_tree(text[start:end]))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return BadCallError("The call is not valid JSON."), end
    return (value if _is_plain(value) else BadCallError("The call may hold only plain JSON types.")), end


def _python_tree(source: str) -> ast.Expression:
    """Syntax tree of one expression.

    Raises:
        BadCallError: it is none, or too large to be tried.
    """
    if len(source) > _MAX_LITERAL_CHARS:
        raise BadCallError("The call is too long.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's opinion on the model's escape sequences is no news for us
            return ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # MemoryError: its stack overflowed
        raise BadCallError("The call is not valid Python.") from error


def _is_plain(value: object) -> bool:
    """Whether a literal is built from the types of JSON alone: no tuples, sets, bytes or complex numbers."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float)


def _code_call(source: str, tools: Tools) -> Any:
    """`{"name", "arguments"}` of a call expression, `print(...)` around it removed, or the error."""
    try:
        node: ast.expr = _python_tree(source).body
    except BadCallError as error:
        return error
    if _function_name(node) == "print" and isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    name = _function_name(node)
    if name is None or not isinstance(node, ast.Call):
        return BadCallError("The block must hold function calls.")
    return {"name": name, "arguments": _code_arguments(node, tools[name]) if name in tools else {}}


def _function_name(node: ast.expr) -> str | None:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _code_arguments(node: ast.Call, tool: Tool) -> dict[str, Any] | BadCallError:
    """The arguments of a call expression by name, or the error."""
    names = tool.parameters
    if len(node.args) > len(names) or any(keyword.arg is None for keyword in node.keywords):
        return BadCallError(f"{tool.name} takes the arguments {', '.join(names)}.")
    nodes = dict(zip(names, node.args, strict=False)) | {str(k.arg): k.value for k in node.keywords}
    refused = BadCallError("The arguments must be plain values.")
    try:
        values = {key: ast.literal_eval(value) for key, value in nodes.items()}
    except (ValueError, TypeError, RecursionError, MemoryError):
        return refused
    return values if _is_plain(values) else refused


def _argument_object(arguments: Any) -> dict[str, Any]:
    """The arguments by name.

    Raises:
        BadCallError: they are no object, nor the text of one.
    """
    if isinstance(arguments, BadCallError):
        raise arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise BadCallError('"arguments" must be a JSON object.') from error
    if not isinstance(arguments, dict):
        raise BadCallError('The call has no "arguments" object.')
    return arguments
