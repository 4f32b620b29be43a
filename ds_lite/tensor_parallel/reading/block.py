"""What the linear layers of a block are for, read from its code without running it (§9.13).

`read_block` follows `forward` into the modules and functions it calls, with the block's input as the stream:

    a linear layer on a whole value      opens a region: each rank may compute some of its output columns
    a linear layer on an open value      closes it: each rank has some input columns, the products are summed
    an open value meets the stream       no region: the layers behind it stay whole
    an open value leaves the block       no region either: routers, classifiers, projections on their own

Names play no part in it, so a block of any author is read like one of transformers. What the code cannot
show, such as which rows of a fused weight belong to a head, is asked elsewhere.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import nn

from ds_lite.tensor_parallel.kinds import holds_linears, is_linear, is_stack_of_experts
from ds_lite.tensor_parallel.reading.frame import Frame
from ds_lite.tensor_parallel.reading.operations import (
    folds_columns,
    is_elementwise,
    takes_columns_together,
)
from ds_lite.tensor_parallel.reading.values import (
    STREAM,
    UNKNOWN,
    Flowing,
    Known,
    OneOf,
    Value,
    either,
    flows,
    items_of,
    union,
)

_DEEPEST = 30  # calls within calls; recursion is not followed further


@dataclass
class Closing:
    """A linear layer that closes a region: who opened it, and whether attention lies between."""

    opened_by: set[str] = field(default_factory=set)
    is_attention: bool = False


@dataclass
class Flow:
    """What was read of one block; names are paths from it.

    `inside` are modules with parameters that an open value passes, such as the norm of each head; `weights`
    are parameters that the code itself puts into a region.
    """

    openers: set[str] = field(default_factory=set)
    closers: dict[str, Closing] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)  # and why
    inside: dict[str, set[str]] = field(default_factory=dict)
    weights: dict[str, set[str]] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)


IsPerHead = Callable[[nn.Module, str], bool]


def read_block(block: nn.Module, is_per_head: IsPerHead, kept: Mapping[str, str] | None = None) -> Flow:
    """The part that each linear layer of the block plays; those in `kept` are whole from the start.

    `is_per_head(module, opener)` says whether a module with parameters treats each head of the opener's
    output alike; one that needs all columns keeps the layer whole.

    Raises: ValueError if the code of a module cannot be read.
    """
    whole = dict(kept or {})
    while True:
        flow = _Reader(block, whole, is_per_head).read()
        found = flow.whole
        if not found:
            closed = set().union(*(closing.opened_by for closing in flow.closers.values()))
            found = dict.fromkeys(sorted(flow.openers - closed), "its output leaves the block as it is")
        if not found:
            flow.whole = whole
            return flow
        whole = {**whole, **found}


class _Reader:
    """One pass over a block's code, with some layers known to be whole."""

    def __init__(self, block: nn.Module, whole: Mapping[str, str], is_per_head: IsPerHead) -> None:
        self.block, self.whole, self.is_per_head = block, whole, is_per_head
        self.flow = Flow()
        self.depth = 0

    def read(self) -> Flow:
        if is_linear(self.block) or is_stack_of_experts(self.block):
            self.call(Known(self.block), [STREAM], {})
            return self.flow
        if isinstance(self.block, (nn.ModuleList, nn.Sequential)):
            self._each_in_turn(Known(self.block), STREAM)
            return self.flow
        function = inspect.unwrap(type(self.block).forward)
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        given = dict.fromkeys(names, UNKNOWN)
        if names:
            given[names[0]] = STREAM
        self.run(function, {"self": Known(self.block), **given})
        return self.flow

    # ------------------------------------------------------------------------------------------- calls

    def call(self, what: Value, args: Sequence[Value], named: Mapping[str, Value], text: str = "") -> Value:
        """The result of what(*args, **named)."""
        if isinstance(what, OneOf):
            result: Value = UNKNOWN
            for choice in what.choices:
                result = either(result, self.call(choice, args, named, text))
            return result
        if isinstance(what, Known) and isinstance(what.object, nn.Module):
            return self._module(what, args, named)
        if isinstance(what, Known) and (inspect.isfunction(what.object) or inspect.ismethod(what.object)):
            if what.owner is not None or _is_worth_reading(what.object):
                return self._function(what, args, named)
        passed_on = self._calls_inside(args, named)
        return self.operation(text.rpartition(".")[2], [*args, passed_on], named)

    def operation(self, name: str, args: Sequence[Value], named: Mapping[str, Value]) -> Flowing:
        """What torch makes of its arguments."""
        result = self.met([*args, *named.values()])
        if result.open and not result.has_heads and takes_columns_together(name, args, named):
            self._stays_whole(result.open, f"{name} needs all columns of its output")
            return STREAM
        return replace(
            result,
            has_heads=result.has_heads or folds_columns(name),
            attended=result.attended or "softmax" in name or "attention" in name,
        )

    def _module(self, what: Known, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
        module, name = what.object, what.name
        given = [*args, *named.values()]
        if is_linear(module):
            return self._linear(name, union(given))
        if is_stack_of_experts(module):
            if name not in self.whole:
                self.flow.experts.add(name)
            self._stays_whole(union(given).open, "its output goes into experts")
            return STREAM
        if not holds_linears(module):
            return self._leaf(what, args, named)
        if isinstance(module, nn.Sequential):
            return self._each_in_turn(what, union(given))
        function = inspect.unwrap(type(module).forward)
        if _tree_of(function) is None:
            raise ValueError(
                f"the code of {type(module).__name__} ({name}) cannot be read, so nobody knows what its "
                f"linear layers are for; say it in tensor_parallel.partition_config (§9.13)"
            )
        return self._function(Known(function, owner=what), args, named)

    def _leaf(self, what: Known, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
        """A module without a linear layer."""
        module = what.object
        result = self.met([*args, *named.values()])
        if not result.open:
            return result
        if any(True for _ in module.parameters()):
            return self._inside(what, result)
        if isinstance(module, (nn.Softmax, nn.LogSoftmax)):
            return self.operation("softmax", args, named)
        if is_elementwise(module):
            return result
        function = inspect.unwrap(type(module).forward)
        if type(module).__module__.startswith("torch.") or _tree_of(function) is None:
            self._stays_whole(
                result.open, f"nobody knows whether {type(module).__name__} needs all columns of it"
            )
            return STREAM
        return self._function(Known(function, owner=what), args, named)

    def _inside(self, what: Known, x: Flowing) -> Flowing:
        """A module with parameters on an open value."""
        if all(self.is_per_head(what.object, opener) for opener in x.open):
            self.flow.inside.setdefault(what.name, set()).update(x.open)
            return x
        self._stays_whole(x.open, f"{what.name} needs all columns of its output")
        return STREAM

    def _each_in_turn(self, modules: Known, x: Value) -> Value:
        for child in items_of(modules) or ():
            x = self.call(child, [x], {})
        return x

    def _linear(self, name: str, x: Flowing) -> Flowing:
        if name in self.whole:
            self._stays_whole(x.open, f"{name} is whole and takes its output")
            return STREAM
        if not x.open:
            self.flow.openers.add(name)
            return Flowing(frozenset([name]))
        closing = self.flow.closers.setdefault(name, Closing())
        closing.opened_by |= x.open
        closing.is_attention |= x.attended
        return STREAM

    def _function(self, what: Known, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
        function = inspect.unwrap(what.object)
        if self.depth >= _DEEPEST or not inspect.isfunction(function):
            return self.met([*args, *named.values()])
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:
            return self.met([*args, *named.values()])
        is_bound = what.owner is not None and not isinstance(what.object, staticmethod)
        positional = [what.owner, *args] if is_bound else list(args)
        return self.run(function, _bound(parameters, positional, named))

    def _calls_inside(self, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
        """A function that gets a method or a layer will call it with what else it gets."""
        rest = [value for value in (*args, *named.values()) if flows([value])]
        result: Value = UNKNOWN
        for value in (*args, *named.values()):
            if isinstance(value, Known) and value.owner is not None:
                result = either(result, self._function(value, [union(rest)], {}))
        return result

    def met(self, values: Sequence[Value]) -> Flowing:
        """Values that one operation takes together: what is open beside the stream has to be whole."""
        result = union(values)
        if result.open and any(part.is_stream for part in flows(values)):
            self._stays_whole(result.open, "its output meets the stream")
            return STREAM
        if result.open and result.weights:
            for name in result.weights:
                self.flow.weights.setdefault(name, set()).update(result.open)
            return replace(result, weights=frozenset())
        return result

    def _stays_whole(self, names: frozenset[str], why: str) -> None:
        for name in names:
            self.flow.whole.setdefault(name, why)

    # ---------------------------------------------------------------------------------------- functions

    def run(self, function: Callable[..., Any], variables: dict[str, Value]) -> Value:
        """What a function returns, for what its variables are."""
        tree = _tree_of(function)
        if tree is None:
            return self.met(list(variables.values()))
        self.depth += 1
        frame = Frame(self, {**variables}, function.__globals__)
        frame.body(tree.body)
        self.depth -= 1
        return UNKNOWN if frame.returned is None else frame.returned


def _bound(
    parameters: Mapping[str, inspect.Parameter], positional: Sequence[Value], named: Mapping[str, Value]
) -> dict[str, Value]:
    """Arguments by the name of their parameter; defaults where nothing is given."""
    values: dict[str, Value] = {}
    left = list(positional)
    more = dict(named)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            values[name], left = tuple(left), []
        elif parameter.kind is parameter.VAR_KEYWORD:
            values[name] = union(more.values())
        elif left and parameter.kind is not parameter.KEYWORD_ONLY:
            values[name] = left.pop(0)
        elif name in more:
            values[name] = more.pop(name)
        else:
            values[name] = UNKNOWN if parameter.default is parameter.empty else Known(parameter.default)
    return values


@cache
def _tree_of(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The syntax tree of a function; None if there is no source text to read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _is_worth_reading(function: Callable[..., Any]) -> bool:
    """A helper of the model's own; what torch does is known by its arguments."""
    return function.__module__ is not None and not function.__module__.startswith(("torch", "einops"))
