"""A Jinja sandbox that bounds the time and the memory of a chat template.

A template comes with a checkpoint, so that it is not trusted. The sandbox of transformers keeps it from running code,
but lets it loop and allocate. Here every loop, call, filter and operator is counted, and no single one of them may
make, or walk through, more than is left of the limits. Text that stays within them is that of transformers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from functools import wraps
from types import GeneratorType
from typing import Any, cast

from jinja2 import Environment, TemplateRuntimeError, nodes, pass_context
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 10.0  # of one rendering
MAX_STEPS = 5_000_000  # blocks, calls, filters, operators, and values that one of them walks through
MAX_SIZE = 64 * 2**20  # of all values made, in characters; a template may make more for a longer conversation
_SIZE_PER_CHARACTER = 32  # of the messages
_MAX_SOURCE = 2**20  # characters of a template
_MAX_BITS = 10_000  # of a whole number
_PER_VALUE, _PER_ITEM = 32, 64  # what a value, and an item of a list, counts beside its characters
_MAX_GROWTH = 6  # of a text that a filter or method changes character by character, as escaping does
_TEXT = (str, bytes, bytearray)
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_COMPARISONS = {"in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan"}
_COMPARISONS |= {"<=", "le"}
_CONSTANT_FILTERS = {"default", "d", "length", "count", "first", "last", "attr", "safe", "abs", "int", "float", "items"}
_LINEAR_FILTERS = {"trim", "upper", "lower", "capitalize", "string", "escape", "e", "forceescape", "tojson", "join"}
_LINEAR_FILTERS |= {"replace", "format", "center", "indent", "urlencode", "truncate", "min", "max", "sort", "dictsort"}
_LINEAR_FILTERS |= {"unique", "groupby"}
_LAZY_FILTERS = {"map", "select", "reject", "selectattr", "rejectattr", "list", "reverse"}
_REFUSED_FILTERS = {"urlize", "striptags", "pprint"}  # quadratic, and of no use in a chat template
_REFUSED_METHODS = {"striptags", "unescape"}
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*))?")
_BRACE_SPEC = re.compile(r"\{[^{}]*:([^{}]*)[{}]")


class TemplateLimitError(TemplateRuntimeError):
    """Template that takes too long or makes too much."""


class Meter:
    """Counter of the steps, characters and seconds that one rendering has left.

    `characters`: length of the text that the template is given.
    """

    def __init__(self, characters: int) -> None:
        self._steps = MAX_STEPS
        self._size = MAX_SIZE + _SIZE_PER_CHARACTER * characters
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self, count: int = 1) -> bool:
        """Count steps; return True, so that it can be part of a condition."""
        self._steps -= count
        if self._steps < 0:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it takes longer than {MAX_SECONDS:g} s")
        return True

    def require(self, size: int) -> None:
        """Raise TemplateLimitError if a value of this size may not be made."""
        if size > self._size:
            raise TemplateLimitError(f"it makes more than {MAX_SIZE} characters of text")

    def make(self, size: int) -> None:
        """Count a value that is made."""
        self.require(size)
        self._size -= size

    def made(self, value: Any) -> Any:
        """Count a value that was made, and return it; a generator is counted as it runs."""
        if isinstance(value, _TEXT):
            self.make(len(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.make(_PER_ITEM * len(value))
        elif isinstance(value, int):
            _require_small(value.bit_length())
        elif isinstance(value, GeneratorType):
            return self.counted(value)
        return value

    def counted(self, values: Iterable[Any]) -> Iterator[Any]:
        """Count the items of an iterable as they come."""
        for value in values:
            self.step()
            yield value

    def walk(self, *values: Any) -> int:
        """Return an upper bound of the size of the values as text, with all that they contain.

        A value that is contained in several places counts in each of them, as it does where values are printed,
        compared or hashed.
        """
        size, waiting = 0, list(values)
        while waiting:
            value = waiting.pop()
            self.step()
            size += _PER_VALUE
            if isinstance(value, _TEXT):
                size += len(value)
            elif isinstance(value, int):
                size += value.bit_length() // 3
            elif isinstance(value, Mapping):
                waiting += [*value.keys(), *value.values()]
            elif isinstance(value, Namespace):
                raise TemplateLimitError("it prints or compares a namespace")
            elif isinstance(value, range):
                size += _PER_VALUE * len(value)
            elif isinstance(value, _CONTAINERS):
                waiting += value
            self.require(size)
        return size


def _require_small(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")


class LimitedTemplate:
    """A compiled template with the filters, functions and tags of another environment; not to be used by two threads.

    Raises TemplateSyntaxError if the source is not a template.
    """

    def __init__(self, source: str, model: Environment) -> None:
        if len(source) > _MAX_SOURCE:
            raise TemplateLimitError(f"it has {len(source)} characters, more than {_MAX_SOURCE}")
        self._environment = _LimitedEnvironment(model)
        tree = _Counting().visit(self._environment.parse(source))
        self._template = self._environment.from_string(tree)

    def render(self, **variables: Any) -> str:
        """Return the text; raise TemplateLimitError if it takes too long or makes too much."""
        self._environment.meter = Meter(_characters(variables))
        pieces = list(self._template.generate(**variables))
        return "".join(pieces)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(one) for one in value.values())
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 0


class _LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox whose operators, calls, filters, tests and outputs go through a meter."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, model: Environment) -> None:
        super().__init__(
            trim_blocks=model.trim_blocks,
            lstrip_blocks=model.lstrip_blocks,
            keep_trailing_newline=model.keep_trailing_newline,
            undefined=model.undefined,
            extensions=[type(one) for one in model.extensions.values()],
            optimized=False,  # or constant expressions would be evaluated while the template is compiled
            finalize=_output,
        )
        self.meter = Meter(0)
        self.globals.update(model.globals)
        self.globals.pop("lipsum", None)  # makes any number of paragraphs
        self.filters = {name: self._metered_filter(name, one) for name, one in model.filters.items()}
        self.filters |= {"_made": lambda value: self.meter.made(value), "_operand": self._operand}
        self.tests = {
            name: self._metered_test(name, cast(Callable[..., Any], one)) for name, one in model.tests.items()
        }

    def step(self) -> bool:
        """Count a step; the compiled template calls this in every loop and macro."""
        return self.meter.step()

    def make(self, size: int) -> bool:
        """Count literal text; the compiled template calls this."""
        self.meter.make(size)
        return self.meter.step()

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operator, if its result is not too large."""
        meter = self.meter
        meter.step()
        if operator == "%" and isinstance(left, _TEXT):
            meter.require(_percent_bound(meter, left, right if isinstance(right, tuple) else (right,)))
        elif operator == "+" and _is_sequence(left) and _is_sequence(right):
            meter.require(_sequence_size(left) + _sequence_size(right))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if _is_sequence(one) and isinstance(times, int):
                    meter.require(_sequence_size(one) * max(times, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require_small(left.bit_length() * max(right, 0))
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, if its result is not too large."""
        meter = __self.meter
        meter.step()
        owner, name = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None), getattr(__obj, "__name__", "")
        given = [*args, *(value for key, value in kwargs.items() if not key.startswith("_"))]
        if isinstance(owner, _TEXT):
            if name == "join" and args:
                args = (list(meter.counted(args[0])), *args[1:])
                given[0] = args[0]
            meter.require(_method_bound(meter, owner, name, given))
        elif isinstance(owner, int):
            meter.require(sum(abs(one) for one in given if isinstance(one, int)))  # `to_bytes`
        elif name in ("count", "index"):
            meter.walk(owner, *given)
        elif name == "strftime_now":
            meter.require(256 * meter.walk(*given))  # of the C library's buffer
        elif not isinstance(__obj, (Macro, LoopContext)):  # the body of a macro counts for itself
            meter.walk(*(one for one in given if not isinstance(one, (Macro, Namespace))))
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item. A key that contains values is walked through, since it is hashed."""
        if isinstance(argument, tuple):
            self.meter.walk(argument)
        return super().getitem(obj, argument)

    def _operand(self, value: Any) -> Any:
        """Return a value that is compared, hashed or printed."""
        if not isinstance(value, (*_TEXT, Namespace)):
            self.meter.walk(value)
        return value

    def _metered_filter(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        skipped = int(hasattr(own, "jinja_pass_arg"))  # the context or environment comes first

        @wraps(own)
        def metered(*args: Any, **kwargs: Any) -> Any:
            meter = self.meter
            meter.step()
            if name == "join" and len(args) > skipped and isinstance(args[skipped], Iterator):
                args = (*args[:skipped], list(args[skipped]), *args[skipped + 1 :])
            meter.require(_filter_bound(meter, name, *args[skipped:], **kwargs))
            return meter.made(own(*args, **kwargs))

        return metered

    def _metered_test(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.meter.step()
            if name in _COMPARISONS:
                for value in args:
                    self._operand(value)
            return own(*args, **kwargs)

        return metered


@pass_context  # so that constants are not printed while the template is compiled
def _output(context: Context, value: Any) -> Any:
    meter: Meter = context.environment.meter  # type: ignore[attr-defined]
    if not isinstance(value, _TEXT):
        meter.require(_MAX_GROWTH * meter.walk(value))
        value = str(value)
    meter.make(len(value))
    return value


class _Counting(NodeTransformer):
    """Adds calls of the meter to the tree of a template, where the environment's own hooks see nothing."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count every iteration, also of items that the loop's condition leaves out."""
        self.generic_visit(node)
        node.body = [_statement("step"), *node.body]
        if node.test is not None:
            node.test = nodes.And(_call("step"), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """Count every call of a macro."""
        self.generic_visit(node)
        node.body = [_statement("step"), *node.body]
        return node

    def visit_Output(self, node: nodes.Output) -> Any:
        """Count literal text."""
        self.generic_visit(node)
        size = sum(len(one.data) for one in node.nodes if isinstance(one, nodes.TemplateData))
        return [_statement("make", nodes.Const(size)), node] if size else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Count the parts of a text before they are joined."""
        self.generic_visit(node)
        node.nodes = [_filter(one, "string") for one in node.nodes]
        return _filter(node, "_made")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Walk through values before they are compared."""
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_operand")
        for one in node.ops:
            one.expr = _filter(one.expr, "_operand")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Count slices."""
        self.generic_visit(node)
        return _filter(node, "_made") if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """Walk through the keys of a dictionary, which are hashed."""
        self.generic_visit(node)
        node.key = _filter(node.key, "_operand")
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """Count lists."""
        self.generic_visit(node)
        return _filter(node, "_made")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """Count dictionaries."""
        self.generic_visit(node)
        return _filter(node, "_made")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Count tuples, but for those that are assigned to."""
        self.generic_visit(node)
        return _filter(node, "_made") if node.ctx == "load" else node


def _call(name: str, *arguments: nodes.Expr) -> nodes.Expr:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


def _statement(name: str, *arguments: nodes.Expr) -> nodes.Stmt:
    return nodes.ExprStmt(_call(name, *arguments))


def _filter(node: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# ---- upper bounds of results


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (*_TEXT, list, tuple))


def _sequence_size(value: Any) -> int:
    return len(value) if isinstance(value, _TEXT) else _PER_ITEM * len(value)


def _length(value: Any, default: int = 1) -> int:
    """Return the length of a text, or a number itself."""
    if isinstance(value, _TEXT):
        return len(value)
    return abs(value) if isinstance(value, int) else default


def _method_bound(meter: Meter, owner: Any, name: str, given: list[Any]) -> int:
    """Return an upper bound of the size of what a text's method makes."""
    size, first = len(owner), given[0] if given else None
    if name in _REFUSED_METHODS:
        raise TemplateLimitError(f"it uses {name}, which spmoe does not allow")
    if name in ("center", "ljust", "rjust", "zfill"):
        return size + _length(first)
    if name == "expandtabs":
        return size * (1 + _length(first, 8))
    if name == "join":
        return meter.walk(first) + size * len(first or ())
    if name == "replace":
        return _replaced_size(owner, first, given[1] if len(given) > 1 else None)
    if name == "translate":
        widest = [_length(one) for one in first.values() if isinstance(one, _TEXT)] if isinstance(first, dict) else []
        return size * max(1, *widest) if widest else size
    if name in ("format", "format_map"):
        return _brace_bound(meter, owner, given)
    if name in ("split", "rsplit"):
        pieces = owner.count(first) + 1 if isinstance(first, type(owner)) and first else size
        return size + _PER_ITEM * pieces
    if name == "splitlines":
        return size + _PER_ITEM * size
    return _MAX_GROWTH * (size + meter.walk(*given))


def _filter_bound(meter: Meter, name: str, value: Any = None, *args: Any, **kwargs: Any) -> int:
    """Return an upper bound of the size of what a filter makes."""
    given = [*args, *kwargs.values()]
    widths = [_length(one, 0) for one in given]
    if name in _REFUSED_FILTERS:
        raise TemplateLimitError(f"it uses the filter {name}, which spmoe does not allow")
    if name in _CONSTANT_FILTERS:
        return 0
    if name in _LAZY_FILTERS:
        return _PER_ITEM * len(value) if hasattr(value, "__len__") else 0
    if name == "round":
        _require_small(4 * max(widths, default=0))
        return 0
    if name == "sum":
        if any(not isinstance(one, (int, float, str)) for one in given):  # adding lists is quadratic
            raise TemplateLimitError("it adds up values that are not numbers")
        return 0
    size = meter.walk(value, *given)
    if name == "replace":
        old, new = (str(one) for one in (*given, "", "")[:2])
        return _replaced_size(str(value), old, new)
    if name == "format":
        return _percent_bound(meter, str(value), tuple(given))
    if name == "join":
        items = len(value) if hasattr(value, "__len__") else 0
        return _MAX_GROWTH * size + items * sum(widths)
    if name in ("center", "batch", "slice", "truncate"):
        return _PER_ITEM * (size if name != "truncate" else 0) + _MAX_GROWTH * size + _PER_ITEM * sum(widths)
    if name == "indent":
        return size + (str(value).count("\n") + 1) * max(4, sum(widths))
    if name == "tojson":
        return _MAX_GROWTH * size * (1 + sum(widths))
    return (_MAX_GROWTH if name in _LINEAR_FILTERS else _PER_ITEM * (1 + sum(widths))) * size


def _replaced_size(text: Any, old: Any, new: Any) -> int:
    if not isinstance(old, type(text)) or not isinstance(new, type(text)):
        return len(text)
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def _percent_bound(meter: Meter, text: Any, given: tuple[Any, ...]) -> int:
    """Return an upper bound of `text % given`."""
    shown = text if isinstance(text, str) else bytes(text).decode("latin-1")
    fields = _PERCENT_FIELD.findall(shown)
    return len(text) + sum(_width(one) for field in fields for one in field) + len(fields) * meter.walk(*given)


def _brace_bound(meter: Meter, text: str, given: list[Any]) -> int:
    """Return an upper bound of `text.format(given)`."""
    specs = _BRACE_SPEC.findall(text)
    if re.search(r":[^{}]*\{", text.replace("{{", "")):
        raise TemplateLimitError("it formats text with a variable width")
    widths = sum(_width(one) for spec in specs for one in re.findall(r"\d+", spec))
    return len(text) + widths + text.count("{") * meter.walk(*given)


def _width(digits: str) -> int:
    if digits == "*":
        raise TemplateLimitError("it formats text with a variable width")
    return 2**62 if len(digits) > 12 else int(digits or 0)
