"""From a model to a plan: which weights are cut over the tensor-parallel ranks, how, and why (§9.13).

Three sources speak, in this order: the user's `partition_config` says which regions are cut, the model's own
`tp_plan` is named where it agrees, and the code of its blocks (`reading`) shows which layers belong together.
A plan that contradicts the code would compute something else and is refused; how wide the parts are follows
from heads and columns and never from a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ds_lite.dealing import deal_by_grain
from ds_lite.tensor_parallel.checks import check_dropout, check_numbers
from ds_lite.tensor_parallel.heads import changing_numbers, head_width, is_per_head
from ds_lite.tensor_parallel.kinds import features, holds_linears, is_linear, is_stack_of_experts
from ds_lite.tensor_parallel.partition_config import AutoTPConfig, PartitionType
from ds_lite.tensor_parallel.placing import Placer, Region, regions_of
from ds_lite.tensor_parallel.plan import Placement, Plan
from ds_lite.tensor_parallel.reading import Flow, Geometry, read_block
from ds_lite.tensor_parallel.tp_plan import style_of
from ds_lite.tensor_parallel.user_plan import UserPlan


def make_plan(
    model: nn.Module,
    ranks: int,
    *,
    grain: int = 1,
    partition_config: AutoTPConfig | None = None,
    vocab_parallel: bool = False,
) -> Plan:
    """Who holds what of a model, for so many tensor-parallel ranks.

    Columns of MLPs are dealt in units of `grain`. With `vocab_parallel` the output layer is cut over the
    vocabulary and its output gathered, and so is an embedding that shares its weight; else both stay whole.

    Raises: ValueError for a model without linear layers, for a block in which no attention or no MLP was
    found, for heads or fused weights that cannot be dealt, and for a partition_config that does not fit the
    model.
    """
    if not any(is_linear(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no linear layer, so there is nothing to cut; give AutoTP a model of "
            f"torch.nn.Linear or Conv1D layers (§9.13)"
        )
    planner = _Planner(Placer(model, ranks, grain), partition_config)
    for name, block in blocks_of(model):
        planner.add_block(name, block)
    if vocab_parallel:
        planner.add_vocabulary()
    return planner.finished()


def tp_parser(model: nn.Module) -> list[tuple[type[nn.Module], tuple[str, ...]]]:
    """For each class of repeated blocks the layers whose outputs are summed over the ranks.

    Source: §9.13; DeepSpeed `module_inject/auto_tp.py::AutoTP.tp_parser` @ 0.19.8.
    Differs: DeepSpeed goes by names and by what stands before a norm; here the code is read.
    """
    found: dict[type[nn.Module], dict[str, None]] = {}
    plan = make_plan(model, 1)
    for name, block in blocks_of(model):
        rows = [
            row.removeprefix(f"{name}.")
            for row in plan.names("row")
            if not name or row.startswith(f"{name}.")
        ]
        if rows:
            found.setdefault(type(block), {}).update(dict.fromkeys(rows))
    return [(kind, tuple(rows)) for kind, rows in found.items()]


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated parts of a model, the outermost ones: what its lists of modules hold.

    A model without such a list is one block.
    """
    return list(_listed(model, "")) or [("", model)]


def _is_list_of_blocks(module: nn.Module) -> bool:
    """A ModuleList, or a Sequential of modules that are more than layers."""
    is_deep = any(holds_linears(child) and not is_linear(child) for child in module.children())
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and is_deep)


def _listed(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if not name and _is_list_of_blocks(module):
        yield from module.named_children()
        return
    for key, child in module.named_children():
        path = f"{name}.{key}".lstrip(".")
        if _is_list_of_blocks(child):
            yield from ((f"{path}.{index}", item) for index, item in child.named_children())
        else:
            yield from _listed(child, path)


class _KnownHeads(Geometry):
    """What modules and configuration say of the heads of one block."""

    def __init__(self, placer: Placer, block: str) -> None:
        self.placer, self.block = placer, block

    def _name(self, opener: str) -> str:
        return f"{self.block}.{opener}".strip(".")

    def is_per_head(self, module: nn.Module, opener: str) -> bool:
        columns = features(self.placer.modules[self._name(opener)])[1]
        return is_per_head(module, columns, self.placer.near(self._name(opener)))

    def head_width(self, opener: str) -> int | None:
        columns = features(self.placer.modules[self._name(opener)])[1]
        return head_width(self.placer.near(self._name(opener)), columns)

    def changing(self, opener: str) -> frozenset[int]:
        columns = features(self.placer.modules[self._name(opener)])[1]
        return changing_numbers(self.placer.near(self._name(opener)), columns)


class _Planner:
    """Asks the sources block by block and hands what they say to the placer."""

    def __init__(self, placer: Placer, config: AutoTPConfig | None) -> None:
        self.placer, self.user = placer, UserPlan(config, placer.model)
        self.model, self.modules = placer.model, placer.modules

    # ------------------------------------------------------------------------------------------ one block

    def add_block(self, name: str, block: nn.Module) -> None:
        """Read a block and place everything in it."""

        def path(inner: str) -> str:
            return self.placer.canonical(f"{name}.{inner}".strip("."))

        flow = read_block(block, _KnownHeads(self.placer, name), self.user.kept(name, block))
        regions = regions_of(name, flow)
        for region in regions:
            region.openers = [self.placer.canonical(opener) for opener in region.openers]
            region.closer = self.placer.canonical(region.closer)
            region.around = self.placer.canonical(region.around)
        if self.user.config is None:
            self._check_found(name, flow, regions)
        for inner, why in flow.whole.items():
            self._place_whole(path(inner), why)
        for region in regions:
            self._say_source(region)
            specs = {opener: spec for opener in region.openers if (spec := self.user.spec_of(opener))}
            if region.is_attention:
                self.placer.add_attention(region, specs)
            else:
                self.placer.add_mlp(region, specs)
        for weight, met in flow.weights.items():
            self.placer.add_weight(f"{name}.{weight}".strip("."), [path(opener) for opener in sorted(met)])
        check_numbers(self.placer, name, flow, regions)
        check_dropout(self.placer, name, regions)
        if flow.arguments:
            self.placer.arguments[name] = sorted(flow.arguments)
        for experts in flow.experts:
            self.placer.add_experts(path(experts))
        for inner, openers in flow.inside.items():
            self.placer.add_inside(path(inner), [path(opener) for opener in sorted(openers)])
        roles = {path(inner): why for inner, why in flow.whole.items()}
        for region in regions:
            roles |= {region.closer: "row", **dict.fromkeys(region.openers, "column")}
        self.user.check_roles(roles)
        for inner, module in block.named_modules():
            if is_linear(module) and path(inner) not in self.placer.placed:
                self._place_whole(path(inner), "the code of its block does not call it")

    def _place_whole(self, name: str, why: str) -> None:
        spec = self.user.spec_of(name)
        if spec is not None and spec.gather_output and spec.partition_type is PartitionType.COLUMN:
            self.placer.add_gathered(name, why)
        elif spec is not None and spec.grad_allreduce:
            self.placer.place(Placement(name, "partial", "partition_config: used inside a region"))
        else:
            self.placer.place(Placement(name, "whole", why))

    def _say_source(self, region: Region) -> None:
        """Who says that the layers of a region are cut, for the table."""
        if self.user.config is not None:
            region.source = "partition_config; "
            return
        styles = {name: style_of(self.model, name) for name in [*region.openers, region.closer]}
        if set(styles.values()) <= {"colwise", "rowwise"}:
            region.source = "tp_plan; "
            return
        foreign = {style for style in styles.values() if style is not None} - {"colwise", "rowwise"}
        if foreign:
            region.source = f"the code (tp_plan's {', '.join(sorted(foreign))} is not known here); "

    def _check_found(self, name: str, flow: Flow, regions: Sequence[Region]) -> None:
        """A block of linear layers of which neither half can be cut, or only one, is not understood."""
        has_attention = any(region.is_attention for region in regions)
        has_mlp = bool(flow.experts) or any(not region.is_attention for region in regions)
        block = self.modules[name]
        unknown = [
            inner
            for inner, module in block.named_modules()
            if isinstance(module, nn.MultiheadAttention)
            or (
                any(weight.dim() == 3 for weight in module.parameters(recurse=False))
                and not is_stack_of_experts(module)
                and not isinstance(module, nn.Conv1d)
            )
        ]
        called = {*flow.openers, *flow.closers, *flow.whole}
        uncalled = [inner for inner, one in block.named_modules() if is_linear(one) and inner not in called]
        is_understood = len(flow.whole) + len(uncalled) < 2 and not unknown  # a router, or nothing at all
        if (has_attention and has_mlp) or is_understood:
            return
        halves = (("attention", has_attention), ("MLP", has_mlp))
        missing = " and ".join(what for what, is_there in halves if not is_there)
        found = [f"{region.closer} sums what {', '.join(region.openers)} open" for region in regions]
        found += [f"{linear} stays whole: {why}" for linear, why in flow.whole.items()]
        found += [f"{inner} is never called" for inner in uncalled]
        found += [f"{inner or name} holds weights of an unknown kind" for inner in unknown]
        raise ValueError(
            f"no row-parallel {missing} output was found in {name or 'the model'} ({type(block).__name__}): "
            f"{'; '.join(found)}. Say in tensor_parallel.partition_config which layers are cut (§9.13)"
        )

    # ------------------------------------------------------------------------------------------- the rest

    def add_vocabulary(self) -> None:
        """Cut the output layer over the vocabulary, and an embedding that shares its weight."""
        get_head = getattr(self.model, "get_output_embeddings", lambda: None)
        names = self.placer.first_name
        head = get_head()
        if head is None or id(head) not in names or not is_linear(head):
            raise ValueError(
                f"vocab_parallel_lm_head=true, but {type(self.model).__name__} has no linear output layer "
                f"over a vocabulary (get_output_embeddings); remove the key (§9.13)"
            )
        self.placer.add_gathered(names[id(head)], "the output layer, by vocabulary; its output is gathered")
        for name, module in self.modules.items():
            if module is not head and getattr(module, "weight", None) is head.weight:
                if type(module) is not nn.Embedding:
                    raise ValueError(
                        f"vocab_parallel_lm_head=true, but {name} shares the output layer's weight and is a "
                        f"{type(module).__name__}, not a plain Embedding; remove the key (§9.13)"
                    )
                ranges = deal_by_grain(module.num_embeddings, self.placer.ranks, self.placer.grain)
                self.placer.place(
                    Placement(name, "vocabulary", "shares the output layer's weight", 0, ranges)
                )

    def finished(self) -> Plan:
        """The plan, with what no block holds."""
        for name, module in self.modules.items():
            if name != self.placer.canonical(name) or name in self.placer.placed:
                continue
            if is_linear(module) or isinstance(module, nn.Embedding):
                self._place_whole(name, "outside the repeated blocks")
                self.user.check_roles({name: "outside the repeated blocks"})
        self.user.check_patterns()
        return self.placer.plan()
