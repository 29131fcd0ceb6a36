"""A chat template is foreign code that runs on the thread which serves everybody: so it has bounds.

Jinja's sandbox keeps a template from the machine, not from time and memory. Here every pass of a loop
and every call of a macro looks at the clock, what is written is counted, and what could make a huge
value in one go (`'x' * 10**10`, `9 ** 9 ** 9`, `center(10**10)`) is refused beforehand.
"""

import re
import time
from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS_MAX = 0.5
"""Of this thread's own time; a thousand messages take some 10 ms."""
CHARACTERS_MAX = 10_000_000
NUMBER_MAX = 100_000
"""Of widths and counts: the sandbox allows as much for `range`."""
EXPONENT_MAX = 64
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)|\{[^}]*(\d{6}|\{)")
_SIZED = ("center", "indent", "batch", "slice", "wordwrap", "truncate", "round")
_WIDENING = ("center", "ljust", "rjust", "zfill", "expandtabs")


class TemplateTooLarge(jinja2.TemplateError):
    """It takes longer, or makes more, than any honest template."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with bounds. One rendering at a time: `begin` starts the clock of the next one."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._written, **options)
        del self.globals["lipsum"]
        for name in (*_SIZED, "replace", "join", "format"):
            self.filters[name] = _bounded_filter(name, self.filters[name])
        self._deadline_s = 0.0
        self._num_characters = 0

    def template(self, source: str) -> jinja2.Template:
        """`source`, compiled with a look at the clock wherever it may run for long."""
        tree = self.parse(source)
        for node in tree.find_all(nodes.Stmt):
            if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
                self._look_into(node.body, node.lineno)
        for parent in tree.find_all(nodes.Node):
            self._bound_concatenations(parent)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def begin(self) -> None:
        """A rendering starts."""
        self._deadline_s = time.thread_time() + SECONDS_MAX
        self._num_characters = 0

    def look(self, num_characters: int) -> None:
        """Another pass, in which so many characters are written beside values."""
        self._count(num_characters)
        if time.thread_time() > self._deadline_s:
            raise TemplateTooLarge(f"it takes longer than {SECONDS_MAX} s")

    def joined(self, *parts: object) -> str:
        """`a ~ b`."""
        texts = [str(part) for part in parts]
        _require_small(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An intercepted operator; see Jinja's sandbox."""
        if operator == "**" and isinstance(right, int) and abs(right) > EXPONENT_MAX:
            raise TemplateTooLarge("a power is too large")
        if operator == "*":
            _require_small(_size(left) * _size(right))
        if operator == "+":
            _require_small(_size(left) + _size(right))
        if operator == "%" and isinstance(left, str):
            _require_narrow(left)
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        """A call from the template; those of text that make more of it are looked at first."""
        if isinstance(called, BuiltinMethodType) and isinstance(called.__self__, str):
            _require_small_call(called.__name__, called.__self__, args)
        return _checked(super().call(context, called, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """`'…'.format`, which the sandbox replaces by its own."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _require_narrow(value.__self__)
        return wrapped

    def _written(self, value: Any) -> Any:
        if isinstance(value, str):
            self._count(len(value))
        return value

    def _count(self, num_characters: int) -> None:
        self._num_characters += num_characters
        _require_small(self._num_characters)

    def _look_into(self, body: list[nodes.Node], lineno: int) -> None:
        texts = [text for node in body for text in node.find_all(nodes.TemplateData)]
        num_characters = sum(len(text.data) for text in texts)
        look = nodes.ExprStmt(self._call_of("look", [nodes.Const(num_characters)]))
        body.insert(0, look.set_lineno(lineno, override=True))

    def _call_of(self, name: str, arguments: list[nodes.Expr]) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)

    def _bound_concatenations(self, parent: nodes.Node) -> None:
        for name, value in parent.iter_fields():
            if isinstance(value, nodes.Concat):
                setattr(parent, name, self._bounded(value))
            elif isinstance(value, list):
                value[:] = [
                    self._bounded(each) if isinstance(each, nodes.Concat) else each
                    for each in value
                ]

    def _bounded(self, concatenation: nodes.Concat) -> nodes.Node:
        call = self._call_of("joined", concatenation.nodes)
        return call.set_lineno(concatenation.lineno, override=True)


def _size(value: Any) -> int:
    """How much of the value there is: for a number its own worth, for others their length."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, str | list | tuple | dict) else 1


def _require_small(num_characters: int) -> None:
    if num_characters > CHARACTERS_MAX:
        raise TemplateTooLarge(f"it makes more than {CHARACTERS_MAX:,} characters")


def _require_small_numbers(arguments: tuple[Any, ...]) -> None:
    if any(isinstance(each, int) and abs(each) > NUMBER_MAX for each in arguments):
        raise TemplateTooLarge(f"a width is larger than {NUMBER_MAX:,}")


def _require_narrow(layout: str) -> None:
    if _WIDE_FORMAT.search(layout):
        raise TemplateTooLarge(f"a width is larger than {NUMBER_MAX:,}")


def _require_small_call(name: str, text: str, args: tuple[Any, ...]) -> None:
    """What a method of `text`, or the filter of the same name, is about to make."""
    if name in _SIZED or name in _WIDENING:
        _require_small_numbers(args)
    if name == "replace" and len(args) > 1:
        _require_small(text.count(str(args[0])) * len(str(args[1])))
    if name == "join" and args and isinstance(args[0], list | tuple):
        _require_small(sum(_size(each) + len(text) for each in args[0]))
    if name == "format":
        _require_narrow(text)


def _bounded_filter(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, looked at before and after."""
    num_given = 1 if hasattr(apply, "jinja_pass_arg") else 0  # Jinja's own argument comes first

    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, *rest = args[num_given:]
        if name == "join":
            value = list(value)
            separator = str(rest[0]) if rest else str(kwargs.get("d", ""))
            _require_small_call(name, separator, (value,))
        else:
            _require_small_call(name, str(value), (*rest, *kwargs.values()))
        return _checked(apply(*args[:num_given], value, *rest, **kwargs))

    if num_given:
        bounded.jinja_pass_arg = apply.jinja_pass_arg  # type: ignore[attr-defined]  # as Jinja marks filters
    return bounded


def _checked(made: Any) -> Any:
    if isinstance(made, str):
        _require_small(len(made))
    return made
