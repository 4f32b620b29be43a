"""A causal language model of transformers without its blocks: its own code, run in pieces (§9.9).

What stands before, around and behind the blocks differs from model to model: embeddings of positions, scaled
embeddings, masks, rotary tables, norms, scaled logits. None of it is written again here. The model's own
forward runs, with stand-ins where the blocks are:

    around     each stand-in records what its block is called with: the masks and the rotary tables
    before     the first stand-in keeps what reaches it, and no more is computed
    after      the first stand-in returns the hidden states that have travelled here; the rest follows

So every stage rebuilds masks and tables from the few integers that travel, by the model's own rules.

Legend: B micro-batch, T tokens, H width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.pipe.causal_lm.routers import router_of
from ds_lite.sequence.context import Context
from ds_lite.sequence.data import Part, part_of

CONTEXT = ("attention_mask", "position_ids")


@dataclass(frozen=True)
class Pieces:
    """The names of the modules with weights outside the blocks, by where they are used."""

    embedding: str
    before: tuple[str, ...]
    after: tuple[str, ...]  # inside the base model: the last norm
    head: str
    is_tied: bool


class _Reached(Exception):
    """The first block was reached; nothing behind it is wanted."""


class StandIn(nn.Module):
    """Stands where a block is; has the block's attributes, which models ask for (`attention_type`)."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not a child: its weights are elsewhere
        self.gives: Tensor | None = None
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.is_end = self.returns_tuple = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def forward(self, hidden: Tensor, *args: Any, **named: Any) -> Any:
        self.given = (hidden, *args), named
        if self.is_end:
            raise _Reached
        hidden = hidden if self.gives is None else self.gives
        return (hidden,) if self.returns_tuple else hidden


class _Passing(nn.Module):
    """Stands where a module with weights is that another stage holds: what it computes is not wanted here."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x if x.is_floating_point() and x.dim() >= 3 else torch.zeros((), device=x.device)


class _Base(nn.Module):
    """Stands where the base model is, for the head: gives the last hidden states."""

    def __init__(self, hidden: Tensor, inner: set[str]) -> None:
        super().__init__()
        self.last_hidden_state, self.inner = hidden, inner

    def forward(self, *_: Any, **__: Any) -> _Base:
        return self

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("inner", ()):  # a head that asks a decoder inside the base model
            return self
        return None  # caches, attentions, router logits


class Hull:
    """The model, and where its pieces are.

    The model is taken over: its blocks run by themselves, and weights that this stage does not hold lose
    their storage.
    Raises: ValueError for a model that is not embeddings, one list of blocks, a norm and a linear head.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.base_name = str(getattr(model, "base_model_prefix", ""))
        base = getattr(model, self.base_name, None)
        if not isinstance(base, nn.Module) or not callable(getattr(model, "get_output_embeddings", None)):
            raise _not_understood(model, "it has no base model with a head")
        _check_buffers(model)
        self.base = base
        self.blocks_name, self.blocks = _blocks(model, base)
        self.holder_name, _, self._key = self.blocks_name.rpartition(".")
        self.stand_ins = nn.ModuleList(StandIn(block) for block in self.blocks)
        self._memo: tuple[Any, list[Any]] | None = None
        self.tokens: Context | None = None  # with sequences spread over ranks: which tokens are here
        self.router = router_of(model)
        kind: Any = () if self.router is None else self.router.kind
        self.num_gates = sum(isinstance(module, kind) for module in self.blocks.modules())
        self.changes_before = False  # whether anything happens between the embedding and the first block
        self.pieces = self._find_pieces()

    def spread(self, group: ProcessGroup) -> None:
        """From now on blocks work on this rank's tokens of a sequence, whose attention exchanges."""
        self.tokens = Context(group)

    @property
    def context(self) -> tuple[str, ...]:
        """What travels behind hidden states, in this order; if tokens are cut the first is always there."""
        return CONTEXT if self.tokens is None else tuple(reversed(CONTEXT))

    def part(self, num_tokens: int) -> Part | None:
        """Which of a sequence's tokens are here; None for all."""
        if self.tokens is None:
            return None
        group = self.tokens.group
        return part_of(num_tokens, comm.get_rank(group), comm.get_world_size(group))

    @contextmanager
    def at_work(self, context: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """Around blocks: this rank's tokens of the context; the attention knows the whole of it."""
        if self.tokens is None:
            yield context
            return
        positions = context["position_ids"]  # (T,) if nobody gave any
        part = self.part(positions.shape[-1])
        assert part is not None
        whole = {name: x if x.dim() > 1 else x.unsqueeze(0) for name, x in context.items()}
        with self.tokens.open():
            self.tokens.set_micro_batch(part, whole.get("attention_mask"), whole["position_ids"])
            try:
                yield {name: part.of(x) for name, x in whole.items()}
            finally:
                self.tokens.part = None

    # ------------------------------------------------------------------------------------- the pieces

    def before(self, embedded: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """From embedded tokens to what the first block gets. (B, T, H) -> (B, T, H)."""
        first = self.stand_in(0)
        first.is_end = True
        given = {name: x for name, x in context.items() if x.dim() > 1}  # the tokens are whole here
        try:
            with self._without_blocks(passing=self.pieces.after):
                self._run_base(embedded, given)
        except _Reached:
            pass
        finally:
            first.is_end = False
        return self._taken(0)[0][0]

    def around(self, hidden: Tensor, context: Mapping[str, Tensor], block: int) -> tuple[Any, Any]:
        """What a block is called with beside the hidden states: further arguments, and named ones."""
        key = (
            hidden.shape,
            hidden.dtype,
            self.base.training,
            *((name, id(x), x._version) for name, x in context.items()),
        )
        if self._memo is None or self._memo[0][0] != key:
            passing = (*self.pieces.before, *self.pieces.after)
            with torch.no_grad(), self._without_blocks(passing), self.at_work(context) as mine:
                self._run_base(hidden.detach(), mine)
            given = [self._taken(index) for index in range(len(self.blocks))]
            self._memo = (key, dict(context)), [(args[1:], named) for args, named in given]
        args, named = self._memo[1][block]
        return args, named

    def after(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """From the last block's output to what the head gets. (B, T, H) -> (B, T, H)."""
        first = self.stand_in(0)
        first.gives = hidden
        try:
            with self._without_blocks(passing=self.pieces.before), self.at_work(context) as mine:
                outputs = self._run_base(hidden, mine)
        finally:
            first.gives = None
            for index in range(len(self.blocks)):
                self.stand_in(index).given = None
        return outputs[0]

    def head(self, hidden: Tensor) -> Tensor:
        """(B, T, H) -> logits (B, T, V)."""
        with self._replaced({self.base_name: _Base(hidden, set(self.base._modules))}):
            outputs = self.model(inputs_embeds=hidden, **self._options("use_cache", "output_router_logits"))
        logits: Tensor = outputs.logits
        return logits

    def stand_in(self, index: int) -> StandIn:
        found = self.stand_ins[index]
        assert isinstance(found, StandIn)
        return found

    def module(self, name: str) -> nn.Module:
        """A module of the model by name, as it is now: AutoTP may have replaced it."""
        return self.model.get_submodule(name)

    # ------------------------------------------------------------------------------------- how they run

    def _run_base(self, embedded: Tensor, context: Mapping[str, Tensor]) -> Any:
        self._move_buffers(embedded.device)
        return self.base(inputs_embeds=embedded, **context, **self._options("use_cache"))

    def _options(self, *names: str) -> dict[str, bool]:
        return dict.fromkeys([name for name in names if hasattr(self.model.config, name)], False)

    def _taken(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stand_in = self.stand_in(index)
        given, stand_in.given = stand_in.given, None
        assert given is not None, f"the model's forward did not call block {index}"
        return given

    @contextmanager
    def _without_blocks(self, passing: tuple[str, ...]) -> Iterator[None]:
        """The model with stand-ins for its blocks and for some modules that lie elsewhere."""
        with self._replaced({self.blocks_name: self.stand_ins, **{name: _Passing() for name in passing}}):
            yield

    @contextmanager
    def _replaced(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        before: list[tuple[dict[str, Any], str, nn.Module]] = []
        try:
            for name, module in modules.items():
                parent, _, key = name.rpartition(".")
                children: Any = self.model.get_submodule(parent)._modules
                before.append((children, key, children[key]))
                children[key] = module
            yield
        finally:
            for children, key, module in reversed(before):
                children[key] = module

    def _move_buffers(self, device: torch.device) -> None:
        """Rotary frequencies are nobody's parameters: they follow the hidden states, in their own dtype."""
        for _, module in self._outside(self.model):
            for key, buffer in module.named_buffers(recurse=False):
                if buffer.device != device and not buffer.is_meta:
                    module._buffers[key] = buffer.to(device)

    def train(self, mode: bool) -> None:
        """The modes of what has no weights, e.g. a dropout before the blocks."""
        self.model.training = self.base.training = mode
        for _, module in self._outside(self.model):
            module.training = mode

    def _outside(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        inside = f"{self.blocks_name}."
        return [
            (name, module)
            for name, module in model.named_modules()
            if name != self.blocks_name and not f"{name}.".startswith(inside)
        ]

    # ------------------------------------------------------------------------------------- finding out

    def _find_pieces(self) -> Pieces:
        """Run a shadow of the model on two tokens; see what it uses before its blocks, and what after."""
        names = {id(module): name for name, module in self._outside(self.model)}
        embedding = names[id(self.model.get_input_embeddings())]  # type: ignore[operator]
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        if head is None or not isinstance(getattr(head, "weight", None), nn.Parameter):
            raise _not_understood(self.model, "its head has no weight")
        holding = [
            name
            for name, module in self._outside(self.model)
            if any(True for _ in module.parameters(recurse=False))
        ]
        called = self._called_in_order([name for name in holding if name != names[id(head)]])
        at = called.index(self.blocks_name)
        before, after = tuple(called[:at]), tuple(called[at + 1 :])
        unused = set(holding) - {embedding, names[id(head)], *before, *after}
        if unused:
            raise _not_understood(self.model, f"{sorted(unused)} are not used before or after its blocks")
        is_tied = head.weight is self.module(embedding).weight
        if is_tied and getattr(head, "bias", None) is not None:
            raise _not_understood(self.model, "its head shares a weight with the embedding and has a bias")
        return Pieces(embedding, before, after, names[id(head)], is_tied)

    def _called_in_order(self, holding: list[str]) -> list[str]:
        """Which of these modules the base model calls, and the list of blocks among them."""
        shadow, order = self._shadow(), []
        stand_ins = [shadow.get_submodule(f"{self.blocks_name}.{index}") for index in range(len(self.blocks))]

        def note_calls(module: nn.Module, name: str) -> None:
            module.register_forward_pre_hook(lambda *_: None if name in order else order.append(name))

        for name in holding:
            note_calls(shadow.get_submodule(name), name)
        note_calls(stand_ins[0], self.blocks_name)
        weight = self.model.get_input_embeddings().weight  # type: ignore[operator]
        tokens = torch.zeros(1, 2, weight.shape[1], dtype=weight.dtype)
        base: Any = shadow.get_submodule(self.base_name)
        failure: Exception | None = None
        for returns_tuple in (False, True):
            for stand_in in (*stand_ins, *self.stand_ins):
                assert isinstance(stand_in, StandIn)
                stand_in.returns_tuple = returns_tuple
            try:
                found = base(inputs_embeds=tokens, **self._options("use_cache"))[0]
            except (TypeError, IndexError, RuntimeError, ValueError) as error:
                failure = error
                continue
            first: Any = stand_ins[0]
            if found.shape == tokens.shape and first.given is not None:
                self.changes_before = first.given[0][0] is not tokens
                return order
            failure = ValueError(f"two tokens of width {tokens.shape[2]} became {tuple(found.shape)}")
        raise _not_understood(self.model, f"its forward without blocks fails: {failure}")

    def _shadow(self) -> nn.Module:
        """A copy of everything but the blocks, on the CPU; its weights are zeros that take no memory."""
        with self._replaced({self.blocks_name: self.stand_ins}):
            memo: dict[int, Any] = {
                id(x): nn.Parameter(torch.zeros((), dtype=x.dtype).expand(x.shape), requires_grad=False)
                for x in self.model.parameters()
            }
            memo |= {id(x): x.detach().cpu() for x in self.model.buffers() if not x.is_meta}
            memo |= {id(block): block for block in self.blocks}
            return copy.deepcopy(self.model, memo)


def _blocks(model: nn.Module, base: nn.Module) -> tuple[str, nn.ModuleList]:
    """The one outermost list of modules that the base model holds."""
    prefix = next(name for name, module in model.named_modules() if module is base)
    found = [
        (f"{prefix}.{name}", module)
        for name, module in base.named_modules()
        if isinstance(module, nn.ModuleList) and len(module)
    ]
    outer = [
        (name, module)
        for name, module in found
        if not any(name.startswith(f"{other}.") for other, _ in found)
    ]
    if len(outer) != 1:
        raise _not_understood(model, f"it has {len(outer)} lists of blocks, {[name for name, _ in outer]}")
    return outer[0]


def _not_understood(model: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"PipelineModule.from_model cannot cut {type(model).__name__} into layers: {why}; write its "
        "layers as LayerSpecs (§9.9)"
    )


def _check_buffers(model: nn.Module) -> None:
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise ValueError(
            f"the buffers {empty[:3]} have no values; build the model inside "
            "ds_lite.tensor_parallel.parameters_on_meta(), which leaves buffers as they are (§9.9)"
        )
