"""The jinja environment of chat templates, in which every rendering ends soon and in little memory.

Owns what a template may do and how much. Templates are programs of strangers: jinja's sandbox keeps them
from reaching out, but not from `10 ** 10 ** 7`, `'x'.center(10 ** 9)` or a list that holds itself twice,
forty times over. No thread can be stopped inside such a call, so it must not begin: whatever makes, compares,
writes or walks a value asks the rendering's `Budget` first, and what it makes is weighed before it is used
again.

Where jinja has no hook (`~`, comparisons, literals, slices, loop bodies), the parsed template is rewritten to
call a filter whose name no template can spell. It knows no message and no checkpoint (`template.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, ValuesView
from itertools import chain, islice
from types import NoneType
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

BUDGET = " budget"  # the variable that holds it; no template can name it

MAX_RENDER_STEPS = 300_000  # a second or two; every message that is given adds at least 384
MAX_WEIGHT = 1 << 20  # of one value: a million elements, or 64 million characters
CHARS_PER_WEIGHT = 64
MAX_INTEGER_BITS = 4096
MAX_NESTING = 100  # containers in containers
MAX_DECIMALS = 300  # of round(); a float has no more

# What one step pays for: looking at this much weight, or making that much.
_READ_PER_STEP = 64
_MADE_PER_STEP = 4

# Filters that serve no prompt, and whose cost is not plain from their arguments.
_LEFT_OUT = ("pprint", "striptags", "urlize", "xmlattr")
_LISTING = {"list", "sort", "dictsort", "unique", "groupby", "sum", "min", "max", "random"}
_SPLITTING = {"split", "rsplit", "splitlines"}
_FORMATTING = {"format", "format_map", "strftime"}
_PADDING = {
    "center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "tojson", "batch", "slice",
    "to_bytes", "translate", "truncate",
}  # fmt: skip
_OWNERS = (str, bytes, int, float, list, tuple, dict, Set)


class Budget:
    """What one rendering may still use, and how heavy a value it may make; grows with what it was given.

    Weight is what a value would take written out: one for each element or plain value, and one for every 64
    characters. An object met twice counts twice, because writing or comparing it takes twice as long.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        # By id: a value that cannot change, its weight and how deep it nests. Keeps the value, and so the id.
        self._known: dict[int, tuple[Any, int, int]] = {}
        self._most = 1 << 62
        total = sum(map(self._weigh, given))
        # What was given may be copied and taken apart, character by character, as often as a template needs.
        self._steps = self._left = MAX_RENDER_STEPS + CHARS_PER_WEIGHT * total
        self._most = MAX_WEIGHT + CHARS_PER_WEIGHT * total

    def take(self, steps: int) -> None:
        """Uses up steps.

        Raises:
            jinja2.TemplateError: if there are not that many left.
        """
        self._left -= steps
        if self._left < 0:
            raise jinja2.TemplateError(
                f"the chat template uses more than {self._steps} steps (calls, loop items, values made); it "
                "may never end"
            )

    def read(self, *values: Any) -> None:
        """Pays for looking at whole values."""
        self.take(1 + sum(map(self._weigh, values)) // _READ_PER_STEP)

    def made(self, value: Any) -> Any:
        """Pays for a new value and returns it; an iterator comes back as the list of what it yields."""
        if isinstance(value, Iterator):
            value = list(islice(value, self._most + 1))
        self.take(self._weigh(value) // _MADE_PER_STEP)
        return value

    def range(self, *bounds: int) -> range:
        """Returns a range that is paid for."""
        numbers = safe_range(*bounds)
        self.take(1 + len(numbers))
        return numbers

    def allow_call(self, name: str, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Pays for a filter or a method of a plain value, and refuses one that would make too much.

        Args:
            name: of the filter or method.
            subject: what it is applied to.
            args, kwargs: its arguments.
        """
        given = (*args, *kwargs.values())
        self.read(subject, *given)
        ints = sum(abs(value) for value in given if isinstance(value, int))
        if name in _LISTING and isinstance(subject, str | bytes):
            self._allow(len(subject))
        elif name == "sum" and any(isinstance(value, list | tuple | str) for value in given):
            self._allow(self._weigh(subject) ** 2)  # adds lists one by one
        elif name in _SPLITTING:
            separator = next((value for value in given if isinstance(value, str | bytes) and value), None)
            parts = len(subject) // 2 if separator is None else subject.count(separator)
            self._allow(parts + 1)
        elif name == "replace" and isinstance(subject, str) and len(args) >= 2:
            old, new = map(str, args[:2])
            self._allow_chars(subject.count(old) * len(new))
        elif name in ("join", "replace"):
            self._allow_chars((self._chars(subject) + 1) * (1 + max(map(_length, given), default=0)))
            if name == "join" and isinstance(subject, str | bytes):  # the method: the subject stands between
                self._allow_chars(self._chars(*given) + len(subject) * self._elements(given))
        elif name in _FORMATTING:
            self.allow_format(given[0] if name == "strftime" and given else subject, given)
        elif name in _PADDING:
            self._allow_chars((self._places(name, subject) + 1) * (1 + ints + self._texts(given)))
        elif name == "round" and ints > MAX_DECIMALS:
            raise jinja2.TemplateError(
                f"the chat template rounds to {ints:.3g} decimals, more than any number has"
            )

    def allow_format(self, template: Any, values: Any) -> None:
        """Pays for `template % values` or `template.format(values)`: numbers in a template may be widths."""
        if not isinstance(template, str | bytes):
            return
        text = template if isinstance(template, str) else template.decode("latin-1")
        widths = [int(digits[:12]) for digits in re.findall(r"\d+", text)]
        fields = text.count("%") + text.count("{")
        if "*" in text or re.search(r"\{[^{}]*\{", text):  # a width of its own among the values
            items = values if isinstance(values, tuple) else (values,)
            widths += [fields * abs(value) for value in items if isinstance(value, int)]
        self._allow_chars(sum(widths) + fields * self._chars(values))

    def allow_operator(self, operator: str, left: Any, right: Any) -> None:
        """Pays for an arithmetic operator, and refuses one whose result would be too large."""
        self.read(left, right)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > MAX_INTEGER_BITS:
                raise jinja2.TemplateError(
                    f"the chat template raises a number to the power {right:.3g}, which is too large"
                )
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(many, str | bytes):
                    self._allow_chars(len(many) * times)
                elif isinstance(times, int) and isinstance(many, list | tuple):
                    self._allow(self._weigh(many) * times)
        elif operator == "%":
            self.allow_format(left, right)

    def _allow(self, weight: int) -> None:
        if weight > self._most:
            raise jinja2.TemplateError(
                f"the chat template would make or walk a value of {weight:.3g} elements, more than "
                f"{self._most} are allowed for this conversation"
            )

    def _allow_chars(self, chars: int) -> None:
        self._allow(chars // CHARS_PER_WEIGHT)

    def _places(self, name: str, subject: Any) -> int:
        """How often in a subject a filter or method puts what its arguments say."""
        if name in ("wordwrap", "translate"):
            return self._chars(subject)
        if name == "tojson":
            return MAX_NESTING * self._weigh(subject)  # lines, each with one indentation for every level
        mark = {"indent": "\n", "expandtabs": "\t"}.get(name)
        return subject.count(mark) if mark and isinstance(subject, str) else 0

    def _texts(self, values: Iterable[Any]) -> int:
        return sum(self._chars(value) for value in values if not isinstance(value, int | None))

    def _chars(self, *values: Any) -> int:
        """An upper bound of the characters of values written out one after another."""
        return CHARS_PER_WEIGHT * sum(map(self._weigh, values))

    def _elements(self, values: Iterable[Any]) -> int:
        return sum(_length(value) for value in values)

    def _weigh(self, value: Any) -> int:
        kind = type(value)
        if kind is str:
            weight = 1 + len(value) // CHARS_PER_WEIGHT
        elif kind is bool or kind is NoneType or kind is float:
            weight = 1
        else:
            walked: dict[int, tuple[Any, int, int]] = {}
            weight, _, is_fixed = self._walk(value, walked, 0)
            if walked and is_fixed:
                self._known.update(walked)
        if weight > self._most:
            self._allow(weight)
        return weight

    def _walk(self, value: Any, walked: dict[int, tuple[Any, int, int]], depth: int) -> tuple[int, int, bool]:
        """Returns the weight of a value, how deep it nests, and whether it can never change."""
        if isinstance(value, str | bytes):
            return 1 + len(value) // CHARS_PER_WEIGHT, 0, True
        if isinstance(value, int):
            if value.bit_length() > MAX_INTEGER_BITS:
                raise jinja2.TemplateError(
                    f"the chat template makes a number of {value.bit_length()} bits, expected at most "
                    f"{MAX_INTEGER_BITS}"
                )
            return 1, 0, True
        is_fixed = True
        if isinstance(value, dict | Mapping):
            parts: Iterable[Any] = chain(value.keys(), value.values())
        elif isinstance(value, Namespace):
            parts, is_fixed = value._Namespace__attrs.values(), False  # type: ignore[attr-defined]
        elif isinstance(value, list | tuple | Set | ValuesView):
            parts = value
        else:
            return (1 + len(value) if isinstance(value, range) else 1), 0, True
        known = self._known.get(id(value)) or walked.get(id(value))
        if known is None:
            weight = height = 0
            if depth <= MAX_NESTING:
                walked[id(value)] = (value, 0, 2 * MAX_NESTING)  # met again before its end, it holds itself
                for part in parts:
                    part_weight, part_height, part_is_fixed = self._walk(part, walked, depth + 1)
                    weight += part_weight
                    height = max(height, part_height)
                    is_fixed &= part_is_fixed
            known = walked[id(value)] = (value, 1 + weight, 1 + height)
        if depth + known[2] > MAX_NESTING:
            raise jinja2.TemplateError(
                f"the chat template is given or makes lists or objects nested more than {MAX_NESTING} deep"
            )
        return known[1], known[2], is_fixed


def make_environment() -> jinja2.Environment:
    """Returns the environment of chat templates; what is rendered in it needs a `Budget` as `BUDGET`."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
        finalize=_written,
    )
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _tojson
    for name in _LEFT_OUT:
        del environment.filters[name]
    environment.filters.update({name: _metered(name, make) for name, make in environment.filters.items()})
    environment.tests.update({name: _metered(name, test) for name, test in environment.tests.items()})
    environment.filters.update({_CONCAT: _concat, _MADE: _made, _READ: _read, _STEP: _step})
    return environment


class _GenerationBlock(Extension):
    """Accepts ``{% generation %}``, which marks answers for training and changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 - the name and the type are jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which calls and operators ask the budget, and whose templates are rewritten to."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # jinja's signature
        budget = _budget_of(__context)
        method = getattr(__obj, "__wrapped__", __obj)  # str.format comes wrapped
        owner = getattr(method, "__self__", None)
        if isinstance(owner, _OWNERS) or getattr(method, "__name__", "") == "strftime":
            budget.allow_call(method.__name__, owner, args, kwargs)
        else:
            budget.read(*args, *kwargs.values())
        result = super().call(__context, __obj, *args, **kwargs)
        return result if isinstance(result, Iterator) else budget.made(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget_of(context)
        budget.allow_operator(operator, left, right)
        return budget.made(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Rewriter().visit(super()._parse(source, name, filename))


_CONCAT, _MADE, _READ, _STEP = " concat", " made", " read", " step"  # filters no template can name


class _Rewriter(NodeTransformer):
    """Sends what jinja compiles to bare Python through a filter that asks the budget."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_plain(node.items) else _filtered(node, _MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" or _is_plain(node.items) else _filtered(node, _MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if node.items else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        contains = any(operand.op in ("in", "notin") for operand in node.ops)
        if contains or not any(isinstance(side, nodes.Const) for side in sides):
            # Comparing with a constant ends where the constant does; everything else may be a long walk.
            node.expr = _filtered(node.expr, _READ)
            for operand in node.ops:
                operand.expr = _filtered(operand.expr, _READ)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = _filtered(node.test, _READ)
        return _with_step(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        return _with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        return _with_step(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        return _with_step(node)


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _with_step(node: Any) -> Any:
    """Makes every run through a body pay for itself and for the text that stands in it."""
    written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    steps = nodes.Const(1 + written // (CHARS_PER_WEIGHT * _MADE_PER_STEP), lineno=node.lineno)
    node.body = [nodes.ExprStmt(_filtered(steps, _STEP), lineno=node.lineno), *node.body]
    return node


def _is_plain(items: Iterable[nodes.Node]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


def _budget_of(context: Context) -> Budget:
    budget = context.parent.get(BUDGET)
    if not isinstance(budget, Budget):
        raise jinja2.TemplateError("a chat template must be rendered with a budget")
    return budget


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    budget = _budget_of(context)
    budget.read(*values)
    return budget.made("".join(map(str, values)))


@pass_context
def _made(context: Context, value: Any) -> Any:
    return _budget_of(context).made(value)


@pass_context
def _read(context: Context, value: Any) -> Any:
    _budget_of(context).read(value)
    return value


@pass_context
def _step(context: Context, steps: int) -> None:
    _budget_of(context).take(steps)


@pass_context
def _written(context: Context, value: Any) -> Any:
    return value if isinstance(value, Iterator) else _budget_of(context).made(value)


def _metered(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that asks the budget; needing the context, it is never folded while compiling."""
    passes = getattr(getattr(inner, "jinja_pass_arg", None), "name", None)  # set by jinja's pass_* decorators

    @pass_context
    def metered(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        budget.allow_call(name, value, args, kwargs)
        head: tuple[Any, ...] = ()
        if passes is not None:
            head = ({"context": context, "eval_context": context.eval_ctx}.get(passes, context.environment),)
        return budget.made(inner(*head, value, *args, **kwargs))

    return metered


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") and not isinstance(value, Undefined) else 1


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter sorts keys and escapes for HTML, and models were not trained on that."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
