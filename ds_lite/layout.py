"""Which layouts are legal for a model on so many ranks: one function for `initialize` and for
`ds-lite explain` (§9.6 §9.7).

Everything here is decided from the config, from facts about the model and from the number of ranks, before
any process group exists; so a refusal comes on every rank, and in the same words without any process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ds_lite.config import refuse_what_is_not_built, resolve_batch
from ds_lite.config_keys import DSConfig
from ds_lite.dealing import deal_heads
from ds_lite.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology


@dataclass(frozen=True)
class Facts:
    """What legality depends on, of a model; equal on all ranks.

    `kind` says whether it is a plain module, a pipeline of LayerSpecs, or a pipeline that `from_model` made.
    `heads` are (query heads, key and value heads) where attention is exchanged by heads; `experts` the
    numbers of experts in its stacks, which `expert_parallel` spreads; `ep_sizes` those of its MoE layers.
    `topology` is what a pipeline fixes; it is given by the user if `is_given`.
    """

    name: str
    kind: Literal["plain", "specs", "model"] = "plain"
    num_stages: int = 1
    heads: tuple[int, int] | None = None
    experts: tuple[int, ...] = ()
    ep_sizes: tuple[int, ...] = ()
    topology: ProcessTopology | None = None
    is_given: bool = False


def layout_of(config: DSConfig, facts: Facts, world_size: int) -> ProcessTopology:
    """The axes of a job and their sizes.

    Raises: ValueError for what cannot be honoured; the first reason that is found.
    """
    refuse_what_is_not_built(config)
    topology = _topology_of(config, facts, world_size)
    sizes = {axis: max(1, topology.get_dim(axis)) for axis in ("pipe", "data", "seq", "model")}
    sp = max(sizes["seq"], config.sequence_parallel_size)
    if facts.kind == "specs" and sp > 1:
        raise ValueError(
            f"a PipelineModule of LayerSpecs whose sequences are spread over {sp} ranks: nobody "
            "knows which of its layers mix tokens; make it by PipelineModule.from_model, or use the axes "
            "pipe, data and model (§9.14)"
        )
    _check_domino(config, facts, sp)
    check_axes(sizes, config)
    _check_heads(facts, sizes["model"], sp)
    _check_experts(config, facts, sizes["data"] * sizes["seq"])
    return topology


def stages_of(num_stages: int, world_size: int) -> ProcessTopology:
    """Stages and replicas.

    Raises: ValueError for a world that the stages do not divide.
    """
    if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1:
        raise ValueError(f"num_stages={num_stages!r} must be an integer >= 1 (§9.2)")
    if world_size % num_stages:
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"world size {world_size} is not divisible by num_stages={num_stages}; choose num_stages "
            f"from {fitting} or start a multiple of {num_stages} processes (§9.2)"
        )
    return PipeDataParallelTopology(num_pp=num_stages, num_dp=world_size // num_stages)


def check_stages(num_stages: int, num_layers: int) -> None:
    """Raises: ValueError for more stages than layers."""
    if num_layers < num_stages:
        raise ValueError(
            f"num_stages={num_stages} exceeds num_layers={num_layers}; choose at most {num_layers} "
            f"stages or give more layers (§9.9)"
        )


def _topology_of(config: DSConfig, facts: Facts, world_size: int) -> ProcessTopology:
    """The module's own topology, or pipe x data x seq x model with the degrees that the config names."""
    degree, sp = config.tensor_parallel.degree, config.sequence_parallel_size
    topology = facts.topology
    if topology is None:
        return axes_of(facts.num_stages, sp, degree, world_size)
    is_wide = degree == max(1, topology.get_dim("model")) or not config.tensor_parallel.is_given
    if is_wide and sp in (1, max(1, topology.get_dim("seq"))):
        return topology
    if facts.is_given and not is_wide:
        raise ValueError(
            f"tensor_parallel asks for {degree} ranks and the PipelineModule's topology has "
            f"model={max(1, topology.get_dim('model'))}; make them equal, or give the module num_stages "
            "alone (§9.3)"
        )
    if facts.is_given:
        raise ValueError(
            f"sequence_parallel_size={sp} and the PipelineModule's topology has "
            f"seq={max(1, topology.get_dim('seq'))}; make them equal, or give the module num_stages "
            "alone (§9.14)"
        )
    return axes_of(facts.num_stages, sp, degree, world_size)


def axes_of(num_stages: int, sp: int, degree: int, world_size: int) -> ProcessTopology:
    """Stages, then replicas, then the ranks of a sequence, then tensor-parallel neighbours.

    Raises: ValueError for a world that they do not divide.
    """
    one_replica = num_stages * sp * degree
    if world_size % one_replica:
        sequence = f"{sp} sequence-parallel ranks * " if sp > 1 else ""
        raise ValueError(
            f"world size {world_size} is not divisible by {num_stages} stages * {sequence}{degree} "
            f"tensor-parallel ranks; start a multiple of {one_replica} processes or change one of them "
            f"({'§9.14' if sequence else '§9.3'})"
        )
    replicas = world_size // one_replica
    if sp > 1:
        return ProcessTopology(["pipe", "data", "seq", "model"], [num_stages, replicas, sp, degree])
    if degree == 1:
        return PipeDataParallelTopology(num_pp=num_stages, num_dp=replicas)
    return PipeModelDataParallelTopology(num_pp=num_stages, num_mp=degree, num_dp=replicas)


def check_axes(sizes: Mapping[str, int], config: DSConfig) -> None:
    """Raises: ValueError for sizes that contradict the config, or batch numbers that do not fit them."""
    if sizes["seq"] != config.sequence_parallel_size != 1:
        raise ValueError(
            f"sequence_parallel_size={config.sequence_parallel_size} in the config, but {sizes['seq']} "
            "ranks share a sequence; make them equal, or remove the key (§9.14)"
        )
    if config.data_parallel_size not in (None, sizes["data"]):
        raise ValueError(
            f"data_parallel_size={config.data_parallel_size} in the config, but the ranks form "
            f"{sizes['data']} replicas; remove the key or change the topology (§9.2)"
        )
    resolve_batch(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        sizes["data"],
    )


def _check_domino(config: DSConfig, facts: Facts, sp: int) -> None:
    tensor = config.tensor_parallel
    if tensor.domino and tensor.degree > 1 and (facts.kind == "specs" or sp > 1):
        raise ValueError(
            "domino=true in a PipelineModule of LayerSpecs or beside sequence_parallel_size is not yet built "
            "into ds_lite; write false, or make the pipeline by PipelineModule.from_model (§9.15)"
        )


def _check_heads(facts: Facts, degree: int, sp: int) -> None:
    """Each tensor-parallel rank deals its own heads over the ranks of a sequence."""
    if facts.heads is None or sp == 1:
        return
    dealt = deal_heads(*facts.heads, degree)
    for query, kv in zip(dealt.query, dealt.kv, strict=True):
        deal_heads(query[1] - query[0], kv[1] - kv[0], sp, what="sequence_parallel_size", section="§9.14")


def _check_experts(config: DSConfig, facts: Facts, replicas: int) -> None:
    for size in facts.ep_sizes:
        check_ep_size(size, replicas)
    if not config.expert_parallel.enabled:
        return
    if not facts.experts:
        raise ValueError(
            f"expert_parallel.enabled=true, but {facts.name} has no experts stacked in gate_up_proj "
            "(E, 2*I, H) and down_proj (E, H, I); write false, or use ds_lite.moe.layer.MoE (§9.4)"
        )
    size = config.expert_parallel.autoep_size
    for total in facts.experts:
        if total % size:
            fitting = [one for one in range(1, total + 1) if total % one == 0]
            raise ValueError(
                f"{facts.name} has layers of {total} experts, which autoep_size={size} does not divide; "
                f"choose it from {fitting} (§9.4)"
            )
    check_ep_size(size, replicas)


def check_ep_size(ep_size: int, replicas: int) -> None:
    """Raises: ValueError unless ep_size divides the ranks of the data and seq axes."""
    if ep_size < 1 or replicas % ep_size:
        fitting = [size for size in range(1, replicas + 1) if replicas % size == 0]
        raise ValueError(
            f"ep_size={ep_size} does not divide the {replicas} data x seq ranks that share the experts; "
            f"choose ep_size from {fitting} or start more replicas (§9.4)"
        )
