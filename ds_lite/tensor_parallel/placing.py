"""The geometry of a plan: how heads and columns of each region are dealt (§9.13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from ds_lite.dealing import Ranges, deal_by_grain, query_columns, repeated
from ds_lite.tensor_parallel.fused_qkv import mlp_layout
from ds_lite.tensor_parallel.heads import heads_of
from ds_lite.tensor_parallel.kinds import features
from ds_lite.tensor_parallel.partition_config import TPLayerSpec
from ds_lite.tensor_parallel.plan import AttentionHeads, Kind, Placement, Plan, out_dim
from ds_lite.tensor_parallel.reading import Flow


@dataclass
class Region:
    """Layers that are cut together: those that open it and the one that closes it.

    `around` is the innermost module that holds them all; `picked` are openers whose columns the code takes
    apart, `folded` those that it folds into heads or groups.
    """

    around: str
    openers: list[str]
    closer: str
    is_attention: bool
    picked: set[str]
    folded: set[str]
    source: str = "the code; "


def regions_of(name: str, flow: Flow) -> list[Region]:
    """The regions of a block.

    Raises: ValueError for a layer whose output two closing layers take.
    """
    regions = []
    closer_of: dict[str, str] = {}
    for closer, closing in flow.closers.items():
        openers = sorted(f"{name}.{opener}".strip(".") for opener in closing.opened_by)
        path = f"{name}.{closer}".strip(".")
        picked = {f"{name}.{opener}".strip(".") for opener in closing.picked}
        folded = {f"{name}.{opener}".strip(".") for opener in closing.folded}
        around = _around_all([*openers, path])
        regions.append(Region(around, openers, path, closing.is_attention, picked, folded))
        for opener in openers:
            if closer_of.setdefault(opener, path) != path:
                raise ValueError(
                    f"both {closer_of[opener]} and {path} take the output of {opener}; AutoTP knows one "
                    f"closing layer for a region. Leave them whole by partition_config (§9.13)"
                )
    return regions


def _around_all(names: Sequence[str]) -> str:
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


@dataclass
class Placer:
    """Collects the placements of a model."""

    model: nn.Module
    ranks: int
    grain: int
    placed: dict[str, Placement] = field(default_factory=dict)
    attentions: list[AttentionHeads] = field(default_factory=list)
    arguments: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        self.first_name = {id(module): name for name, module in reversed(self.modules.items())}

    def canonical(self, name: str) -> str:
        """The first name of a module, which may have several."""
        return self.first_name[id(self.modules[name])]

    def place(self, placement: Placement) -> None:
        """Add a placement; the last word on a module counts."""
        self.placed[placement.name] = placement

    def near(self, name: str) -> list[nn.Module]:
        """The module, what it holds, then what holds it, innermost first."""
        parts = name.split(".")
        outer = [self.modules[".".join(parts[:length])] for length in range(len(parts), -1, -1)]
        return [*self.modules[name].modules(), *outer]

    # ---------------------------------------------------------------------------------------- attention

    def add_attention(self, region: Region, specs: Mapping[str, TPLayerSpec]) -> None:
        """Whole heads to every rank; the closing layer takes the columns of its query heads."""
        openers = {name: self.modules[name] for name in region.openers}
        closer = self.modules[region.closer]
        heads, layouts = heads_of(region.around, self.near(region.around), openers, closer, specs)
        dealt = heads.deal(self.ranks)
        for name, module in openers.items():
            layout = layouts[name]
            if len(layout.parts) == 1 and name in region.picked:
                raise ValueError(_taken_apart(name))
            is_shared = dealt.kv_is_replicated and layout.parts != ("q",)
            packed = f", packed as {layout.describe()}" if len(layout.parts) > 1 else ""
            why = (
                f"{region.source}opens the attention of {heads.query} query and {heads.kv} kv heads of width "
                f"{heads.width} that {_last(region.closer)} closes{packed}"
            )
            rows = layout.rows(heads, self.ranks)
            held = layout.held(heads, self.ranks) if is_shared else ()
            kind: Kind = "shared" if is_shared else "column"
            self.place(Placement(name, kind, why, out_dim(module), rows, layout, held))
        columns = query_columns(heads.query, heads.kv, heads.width, self.ranks)
        why = f"{region.source}sums the attention of {heads.query} query heads"
        self.place(Placement(region.closer, "row", why, 1 - out_dim(closer), columns))
        if all(region.around != one.name for one in self.attentions):
            self.attentions.append(AttentionHeads(region.around, heads, dealt.query, dealt.kv))

    def add_weight(self, name: str, openers: Sequence[str]) -> None:
        """A weight that the code itself puts into a region: a bias of positions with a column for each head.

        Raises: ValueError for any other.
        """
        module = self.modules.get(name)
        regions = [one for one in self.attentions if any(o.startswith(f"{one.name}.") for o in openers)]
        if (
            isinstance(module, nn.Embedding)
            and regions
            and module.embedding_dim == regions[0].heads.query > 1
        ):
            why = "a bias of positions, a column for each head"
            self.place(Placement(name, "heads", why, 1, tuple((one,) for one in regions[0].query)))
            return
        raise ValueError(
            f"{name} is a weight of its own in a region that {', '.join(openers)} open, and nobody knows "
            f"what of it belongs to a rank; leave the region whole by partition_config (§9.13)"
        )

    def add_inside(self, name: str, openers: Sequence[str]) -> None:
        """A module with parameters inside an attention, such as a norm of each head."""
        shapes = {tuple(weight.shape) for weight in self.modules[name].parameters()}
        opener = self.placed[openers[0]]
        if len({len(shape) for shape in shapes}) > 1 or (len(openers) > 1 and max(map(len, shapes)) > 1):
            raise ValueError(
                f"{name} in the region that {', '.join(openers)} open has weights of shapes "
                f"{sorted(shapes)}, of which nobody knows what belongs to a head; leave the region whole by "
                "partition_config (§9.13)"
            )
        if all(len(shape) < 2 for shape in shapes):
            why = f"the same for each head of {_last(openers[0])}; its gradient is summed over the ranks"
            self.place(Placement(name, "partial", why))
            return
        count, width = max(shapes)
        if opener.kind == "shared":
            raise ValueError(
                f"{name} has a row for each of {count} key and value heads, which {self.ranks} "
                f"tensor-parallel ranks would share; choose a degree of at most {count} (§9.13)"
            )
        heads = tuple(tuple((start // width, stop // width) for start, stop in one) for one in opener.ranges)
        self.place(Placement(name, "heads", f"a row for each head of {_last(openers[0])}", 0, heads))

    # ----------------------------------------------------------------------------------------- columns

    def add_mlp(self, region: Region, specs: Mapping[str, TPLayerSpec]) -> None:
        """The columns between the opening layers and the closing one."""
        closer = self.modules[region.closer]
        total, _ = features(closer)
        ranges = self._columns(region.around, total)
        for name in region.openers:
            module = self.modules[name]
            times, rest = divmod(features(module)[1], total)
            if rest or times not in (1, 2):
                raise ValueError(
                    f"{name} makes {features(module)[1]} columns and {region.closer} takes {total}; AutoTP "
                    "knows equal numbers, and twice as many for gate and up in one weight. Leave both whole "
                    f"by partition_config (§9.13)"
                )
            if times == 1 and name in region.picked:
                raise ValueError(_taken_apart(name))
            if name in region.folded:
                raise ValueError(
                    f"the code folds the columns of {name} into groups that no rank may share, and there is "
                    f"no attention by whose heads to cut; leave the region whole by partition_config (§9.13)"
                )
            spec = specs.get(name)
            is_declared = spec is not None and spec.parts() in (2, (total, total))
            if times == 2 and not is_declared and mlp_layout(self.near(region.around)) is None:
                raise ValueError(
                    f"the layout of the fused weight {name} is unknown: gate and up may lie one behind the "
                    f"other or row by row; declare it in tensor_parallel.partition_config with shape=(2, -1) "
                    f"(§9.13)"
                )
            packed = ", packed as [gate|up]" if times == 2 else ""
            why = f"{region.source}opens the MLP that {_last(region.closer)} closes{packed}"
            self.place(Placement(name, "column", why, out_dim(module), repeated(ranges, total, times)))
        why = f"{region.source}sums the MLP"
        self.place(Placement(region.closer, "row", why, 1 - out_dim(closer), ranges))

    def add_experts(self, name: str) -> None:
        """All experts on every rank, with some of the columns between gate, up and down."""
        total = int(self.modules[name].down_proj.shape[2])  # type: ignore[union-attr, index]
        why = "gate, up and down of each expert, as 3-D weights"
        self.place(Placement(name, "experts", why, 2, self._columns(name, total)))

    def add_gathered(self, name: str, why: str) -> None:
        """A layer whose output columns are made apart and used whole."""
        module = self.modules[name]
        ranges = self._columns(name, features(module)[1])
        self.place(Placement(name, "gathered", why, out_dim(module), ranges))

    def _columns(self, name: str, total: int) -> Ranges:
        if total < self.ranks:
            raise ValueError(
                f"{name} has {total} columns for {self.ranks} tensor-parallel ranks, and each needs one; "
                f"choose at most {total} (§9.13)"
            )
        return deal_by_grain(total, self.ranks, self.grain)

    # --------------------------------------------------------------------------------------- the whole

    def plan(self) -> Plan:
        """All placements in the order of the model's modules.

        Raises: ValueError for a weight of two modules that would be cut in two ways.
        """
        self._check_ties()
        order = {name: place for place, name in enumerate(self.modules)}
        placements = sorted(self.placed.values(), key=lambda placement: order[placement.name])
        return Plan(self.ranks, placements, self.attentions, self.arguments)

    def _check_ties(self) -> None:
        holders: dict[int, tuple[str, Placement]] = {}
        for one in self.placed.values():
            for key, weight in self.modules[one.name].named_parameters(recurse=False):
                name, other = holders.setdefault(id(weight), (f"{one.name}.{key}", one))
                if _how(other) != _how(one):
                    raise ValueError(
                        f"{name} ({other.kind}) and {one.name}.{key} ({one.kind}) are one weight, but would "
                        f"be cut differently; leave both whole by partition_config (§9.13)"
                    )


def _how(placement: Placement) -> tuple[object, ...]:
    """What has to be equal for two modules that share a weight."""
    uncut = placement.kind if placement.kind in ("whole", "partial") else "cut"
    return uncut, placement.dim, placement.ranges


def _taken_apart(name: str) -> str:
    return (
        f"the code takes the columns of {name} apart, and nobody said how it is packed; declare it in "
        f"tensor_parallel.partition_config with shape, or leave it whole (§9.13)"
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
