"""What the linear layers of a block are for, read from its code without running it (§9.13).

`read_block` follows `forward` into the modules and functions it calls, with the block's input as the stream:

    a linear layer on a whole value      opens a region: each rank may compute some of its output columns
    a linear layer on an open value      closes it: each rank has some input columns, the products are summed
    an open value meets the stream       no region: the layers behind it stay whole
    an open value leaves the block       no region either: routers, classifiers, projections on their own
    an open value in an operation that   no region: one that needs all columns, or of which nobody knows
    is not known to keep columns apart   what it does with them

Names of layers play no part in it, so a block of any author is read like one of transformers. What the code
cannot show, such as which rows of a fused weight belong to a head, is asked elsewhere.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ds_lite.tensor_parallel.kinds import features, holds_linears, is_linear, is_stack_of_experts
from ds_lite.tensor_parallel.reading.flow import Closing, Flow
from ds_lite.tensor_parallel.reading.frame import Frame
from ds_lite.tensor_parallel.reading.operations import SIZED, after, indexed, is_elementwise, name_of
from ds_lite.tensor_parallel.reading.source import bound, is_worth_reading, tree_of, unwrapped
from ds_lite.tensor_parallel.reading.values import (
    OF_THE_STREAM,
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


class Geometry:
    """What the reader has to know of heads; the planner knows more than this."""

    def is_per_head(self, module: nn.Module, opener: str) -> bool:
        """Whether a module with parameters treats each head of an opener's output alike."""
        return False

    def head_width(self, opener: str) -> int | None:
        """The width of a head in an opener's output, where somebody says it."""
        return None

    def changing(self, opener: str) -> frozenset[int]:
        """Numbers of heads and widths that are others on each rank once the opener is cut."""
        return frozenset()


def read_block(
    block: nn.Module, geometry: Geometry | None = None, kept_whole: Mapping[str, str] | None = None
) -> Flow:
    """The part that each linear layer of the block plays; those in `kept_whole` are whole from the start.

    A layer that is found whole may make others whole, so the code is read again until nothing is found.

    Raises: ValueError if the code of a module cannot be read.
    """
    whole = dict(kept_whole or {})
    while True:
        flow = _Reader(block, whole, geometry or Geometry()).read()
        found = flow.whole or _without_a_region(flow)
        if not found:
            flow.whole = whole
            return flow
        whole = {**whole, **found}


def _without_a_region(flow: Flow) -> dict[str, str]:
    """Openers that nobody closes, or that are something else besides."""
    found = {name: "it both opens and closes a region" for name in sorted(flow.openers & flow.closers.keys())}
    for name, openers in sorted(flow.inside.items()):
        if name in flow.outside:
            found |= dict.fromkeys(sorted(openers), f"{name} is used outside its region, too")
    closed = frozenset[str]().union(*(closing.opened_by for closing in flow.closers.values()))
    open_at_the_end = sorted((flow.openers - closed) | flow.left_by)
    return found or dict.fromkeys(open_at_the_end, "its output leaves the block as it is")


class _Reader:
    """One pass over a block's code, with some layers known to be whole."""

    def __init__(self, block: nn.Module, whole: Mapping[str, str], geometry: Geometry) -> None:
        self.block, self.whole, self.geometry = block, whole, geometry
        self.modules = dict(block.named_modules())
        self.names = {
            id(module): name for name, module in self.modules.items()
        }  # one for each, if it has two
        self.flow = Flow()
        self.running: list[nn.Module] = []
        self.functions: list[Callable[..., Any]] = []

    def read(self) -> Flow:
        block = Known(self.block)
        if is_linear(self.block) or is_stack_of_experts(self.block):
            self.call(block, [STREAM], {})
        elif isinstance(self.block, nn.ModuleList):  # who calls them, and on what, is not seen here
            for child in items_of(block) or ():
                self.call(child, [STREAM], {})
        elif type(self.block).forward is nn.Sequential.forward:
            self._ends_with(self._each_in_turn(block, STREAM))
        else:
            function = self._code_of(block)
            _, *names = inspect.signature(function).parameters
            given = {name: Flowing(arguments=frozenset([name])) for name in names}
            given |= dict.fromkeys(names[:1], STREAM)
            self._ends_with(self._function(Known(function, owner=block), [], given))
        return self.flow

    def _ends_with(self, returned: Value) -> None:
        """Of what a block returns only attention weights may be of this rank's heads alone."""
        self.flow.left_by = union(one for one in flows([returned]) if not one.attended).open

    def _code_of(self, what: Known) -> Callable[..., Any]:
        """The forward of a module that holds linear layers."""
        function = unwrapped(type(what.object).forward)
        if tree_of(function) is None:
            raise ValueError(
                f"the code of {type(what.object).__name__} ({what.name or 'the block'}) cannot be read, so "
                "nobody knows what its linear layers are for; say it in tensor_parallel.partition_config "
                "(§9.13)"
            )
        return function

    # ------------------------------------------------------------------------------------------- calls

    def call(self, what: Value, args: Sequence[Value], named: Mapping[str, Value], text: str = "") -> Value:
        """The result of what(*args, **named); `text` is the callee in the code."""
        if isinstance(what, OneOf):
            results = [self.call(choice, args, named, text) for choice in what.choices]
            return functools.reduce(either, results, UNKNOWN)
        thing = what.object if isinstance(what, Known) else None
        if isinstance(what, Known) and isinstance(thing, nn.Module):
            return self._module(what, args, named)
        if isinstance(thing, functools.partial):
            known = {key: Known(value) for key, value in thing.keywords.items()}
            return self.call(Known(thing.func), [*map(Known, thing.args), *args], {**known, **named}, text)
        if isinstance(what, Known) and inspect.isfunction(thing) and (what.owner or is_worth_reading(thing)):
            return self._function(what, args, named)
        owner = getattr(thing, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) and text.endswith(".apply"):
            return self._function(Known(owner.forward), [UNKNOWN, *args], named)
        name = name_of(what, text)
        if name == "checkpoint" and args:  # torch's, which calls its first argument
            return self.call(args[0], args[1:], {}, "")
        self._hands_out(args, named)
        return self.operation(name, args, named)

    def operation(self, name: str, args: Sequence[Value], named: Mapping[str, Value]) -> Flowing:
        """What torch makes of its arguments."""
        given = [*args, *named.values()]
        if name not in SIZED:
            self._numbers(given)
        x = self.met(given)
        if not x.open:
            return x
        if name in SIZED and (why := self._unchanged_size(name, args, x)):
            return self._unless_whole(x, why)
        return self._unless_whole(x, after(name, args, named, x, *self._measures(x)))

    def computed(self, values: Sequence[Value]) -> Flowing:
        """Values added, multiplied and so on, which takes numbers for what they are."""
        self._numbers(values)
        return self.met(values)

    def sized(self, values: Sequence[Value]) -> None:
        """Numbers that are sizes of what is cut."""
        self.flow.sizes |= set().union(*(one.made_of for one in values if isinstance(one, Known)))

    def _numbers(self, values: Sequence[Value]) -> None:
        """Counts and widths that the code computes with must not change with the cut."""
        self.flow.numbers |= set().union(*(one.made_of for one in values if isinstance(one, Known)))
        sizes = union(values).size_of - {OF_THE_STREAM}
        self._stays_whole(sizes, "the code computes with the number of its columns")

    def _unchanged_size(self, name: str, args: Sequence[Value], x: Flowing) -> str | None:
        """A size that has to change with the cut, but is no attribute that can."""
        of_name = {"view": args[1:], "reshape": args[1:], "unflatten": args[2:], "split": args[1:2]}
        self.sized([one for value in args for one in (value if isinstance(value, tuple) else (value,))])
        given = of_name.get(name, ())
        sizes = [one for value in given for one in (value if isinstance(value, tuple) else (value,))]
        changing = frozenset[int]().union(*(self.geometry.changing(opener) for opener in x.open))
        for place, size in enumerate(sizes):
            is_last = place == len(sizes) - 1 and name != "split"
            if isinstance(size, Known) and size.object in changing and not size.made_of and not is_last:
                return f"the code folds it by {size.object}, a number that nobody can change with the cut"
        return None

    def index(self, x: Flowing, index: Sequence[tuple[str, Value]]) -> Flowing:
        """x[index] of a tensor."""
        return self._unless_whole(x, indexed(x, index)) if x.open else x

    def give_up(self, values: Sequence[Value], why: str) -> None:
        """Code of a kind that is not followed: nothing may be open in it."""
        self._stays_whole(union(values).open, why)

    def _unless_whole(self, x: Flowing, result: Flowing | str) -> Flowing:
        if isinstance(result, Flowing):
            return result
        self._stays_whole(x.open, result)
        return STREAM

    def _measures(self, x: Flowing) -> tuple[int, int | None]:
        """The fewest columns of the layers that made x, and the width of a head in it."""
        columns = min(features(self.modules[opener])[1] for opener in x.open)
        widths = [width for opener in sorted(x.open) if (width := self.geometry.head_width(opener))]
        return columns, widths[0] if widths else None

    def _hands_out(self, args: Sequence[Value], named: Mapping[str, Value]) -> None:
        """A function that nobody reads gets a method or a layer, and may call it with whatever it gets."""
        given = [*args, *named.values()]
        for value in given:
            module = value.owner.object if isinstance(value, Known) and value.owner else None
            if isinstance(value, Known) and isinstance(value.object, nn.Module):
                module = value.object
            if module is None or module in self.running:
                continue
            if holds_linears(module):
                rest = [union(given)] if flows(given) else []
                self.call(value, rest, {})

    # ----------------------------------------------------------------------------------------- modules

    def _module(self, what: Known, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
        module = what.object
        name = self.names.get(id(module), what.name)
        x = union([*args, *named.values()])
        if is_linear(module):
            why = self._why_kept(what)
            if why and name not in self.whole:
                self._stays_whole(x.open | {name}, why)
                return STREAM
            return self._linear(name, x)
        if x.open and _has_hooks(module):
            return self._unless_whole(x, f"{name} has hooks, which nobody reads")
        if is_stack_of_experts(module):
            if name not in self.whole:
                self.flow.experts.add(name)
            self._stays_whole(union([*args, *named.values()]).open, "its output goes into experts")
            return STREAM
        if not holds_linears(module):
            return self._leaf(Known(module, name), args, named)
        if type(module).forward is nn.Sequential.forward:
            return self._each_in_turn(what, union([*args, *named.values()]))
        return self._function(Known(self._code_of(what), owner=what), args, named)

    def _why_kept(self, what: Known) -> str | None:
        """Why a linear layer cannot be replaced by a part of it."""
        if _has_hooks(what.object):
            return "it has hooks, which would be lost"
        if not what.name and what.object is not self.block:
            return "it is held in a plain list or dictionary, where nobody can replace it"
        return None

    def _leaf(self, what: Known, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
        """A module without a linear layer."""
        module = what.object
        x = self.met([*args, *named.values()])
        has_parameters = any(True for _ in module.parameters())
        if not x.open:
            if has_parameters:
                self.flow.outside.add(what.name)
            return x if x.is_stream or not has_parameters else replace(x, weights=x.weights | {what.name})
        if has_parameters:
            return self._inside(what, x)
        if is_elementwise(module):
            return x
        if isinstance(module, (nn.Softmax, nn.LogSoftmax)):
            return self.operation("softmax", [x], {"dim": Known(module.dim)})
        if type(module).__module__.startswith("torch."):
            return self.operation(type(module).__name__, args, named)
        return self._function(Known(type(module).forward, owner=what), args, named)

    def _inside(self, what: Known, x: Flowing) -> Flowing:
        """A module with parameters on an open value: a norm of each head, or one that needs all columns."""
        is_one_number = all(weight.numel() == 1 for weight in what.object.parameters())
        fits = is_one_number or all(self.geometry.is_per_head(what.object, opener) for opener in x.open)
        if fits and (x.has_heads or (is_one_number and is_elementwise(what.object))):
            self.flow.inside.setdefault(what.name, set()).update(x.open)
            return x
        return self._unless_whole(x, f"{what.name} needs all columns of its output")

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
        if x.has_heads:
            return self._unless_whole(x, f"{name} takes its output head by head")
        closing = self.flow.closers.setdefault(name, Closing())
        closing.opened_by |= x.open
        closing.is_attention |= x.attended
        closing.picked |= x.open if x.is_picked else set()
        closing.folded |= x.open if x.was_folded else set()
        return STREAM

    # --------------------------------------------------------------------------------------- functions

    def _function(self, what: Known, args: Sequence[Value], named: Mapping[str, Value]) -> Value:
        """What a function or method returns, from its code; what goes into one without must be whole."""
        function = unwrapped(what.object)
        tree = tree_of(function) if inspect.isfunction(function) else None
        if tree is None or len(self.running) >= _DEEPEST or self.functions.count(function) > 1:
            return self.operation(f"{getattr(function, '__name__', 'a function')} ", args, named)
        positional = list(args) if what.owner is None else [what.owner, *args]
        variables = bound(inspect.signature(function).parameters, positional, named)
        self.running.append(what.owner.object if what.owner else self.block)
        self.functions.append(function)
        frame = Frame(self, variables, function, what.owner)
        frame.body(tree.body)
        self.running.pop()
        self.functions.pop()
        return UNKNOWN if frame.returned is None else frame.returned

    def met(self, values: Sequence[Value]) -> Flowing:
        """Values that one operation takes together: what is open beside the stream has to be whole."""
        result = union(values)
        if result.open and any(part.is_stream for part in flows(values)):
            return self._unless_whole(result, "its output meets the stream")
        self._used_by_itself(result.weights)
        if result.open:
            for name in result.weights:
                self.flow.weights.setdefault(name, set()).update(result.open)
            self.flow.arguments |= result.arguments
            return replace(result, weights=frozenset(), arguments=frozenset(), size_of=frozenset())
        return result

    def _used_by_itself(self, weights: frozenset[str]) -> None:
        """The weight of a linear layer that the code uses beside the layer has to be whole."""
        for weight in weights:
            layer = self.modules.get(weight.rpartition(".")[0])
            if layer is not None and is_linear(layer) and self.names[id(layer)] not in self.whole:
                self._stays_whole(
                    frozenset([self.names[id(layer)]]), "the code uses its weight by itself, too"
                )

    def _stays_whole(self, names: frozenset[str], why: str) -> None:
        for name in names:
            self.flow.whole.setdefault(name, why)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
