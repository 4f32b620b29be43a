"""§9.2-9.5 The keys of a ds_config: one class per JSON block, one field per key.

Every field says what it means, because the documentation's table of keys is made from this file. A field
declared with `unused` is a DeepSpeed key whose type is checked and whose value changes nothing here;
`config_ignored.py` names the DeepSpeed keys that are accepted unread. `config.py` loads and checks.

Source: DeepSpeed 0.19.8 `deepspeed/runtime/config.py::DeepSpeedConfig`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr


class Block(BaseModel):
    """One JSON object: types are strict (`"4"` is not 4), and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def unused(default: Any, description: str) -> Any:
    """A field for a DeepSpeed key that is type-checked, reported once, and otherwise ignored."""
    return Field(default, description=description, json_schema_extra={"unused": True})


class Optimizer(Block):
    type: str = Field(description="Name of the optimizer: any class of torch.optim, such as SGD or AdamW.")
    params: dict[str, Any] = Field({}, description="Arguments of the optimizer: lr, betas, weight_decay, ...")
    legacy_fusion: bool = unused(False, "DeepSpeed: fuse the parameter groups.")


class Scheduler(Block):
    type: str = Field(
        description="Learning-rate schedule: WarmupLR, WarmupDecayLR, WarmupCosineLR or OneCycle."
    )
    params: dict[str, Any] = Field({}, description="Arguments of the schedule.")


class Zero(Block):
    stage: int = Field(
        0, ge=0, le=3, description="What the data ranks share out: 1 optimizer state, 2 also gradients."
    )
    reduce_bucket_size: float = Field(
        2**25, ge=1, description="Elements that are reduced in one message; a larger parameter goes alone."
    )
    moe_min_capacity: int = Field(
        4, ge=0, description="Capacity floor of the MoE layers that set none themselves."
    )
    moe_layer_size_threshold: int = Field(
        0,
        ge=0,
        description="MoE layers with fewer parameters stay out of ZeRO sharding; 0 shards all of them.",
    )


class Fp16(Block):
    enabled: bool = Field(False, description="Compute in float16 with loss scaling.")
    auto_cast: bool = Field(False, description="Cast the inputs of the model to float16.")
    loss_scale: float = Field(0.0, ge=0, description="Fixed loss scale; 0 scales dynamically.")
    initial_scale_power: int = Field(16, ge=0, description="The dynamic scale starts at 2 to this power.")
    loss_scale_window: int = Field(1000, ge=1, description="Steps without overflow before the scale doubles.")
    hysteresis: int = Field(2, ge=1, description="Overflows to bear before the scale is halved.")
    consecutive_hysteresis: bool = Field(
        False, description="Refill hysteresis at each step without overflow."
    )
    min_loss_scale: float = Field(1, gt=0, description="The dynamic scale never falls below this.")
    fp16_master_weights_and_grads: bool = unused(False, "DeepSpeed: keep the masters in float16.")


class Bf16(Block):
    enabled: bool = Field(False, description="Compute in bfloat16 with float32 masters.")
    immediate_grad_update: bool = unused(False, "Gradients are always added up in float32 inside backward.")
    check_grad_overflow: bool = unused(True, "DeepSpeed: look for infinities before the step.")
    bf16_master_weights_and_grads: bool = unused(False, "DeepSpeed: keep the masters in bfloat16.")
    bf16_optimizer_states: bool = unused(False, "DeepSpeed: keep the optimizer state in bfloat16.")


class Pipeline(Block):
    stages: int | Literal["auto"] = unused("auto", "PipelineModule(num_stages=...) decides.")
    partition: str = unused("best", "PipelineModule(partition_method=...) decides.")
    seed_layers: bool = unused(False, "PipelineModule(seed_layers=...) decides.")
    activation_checkpoint_interval: int = Field(
        0,
        ge=0,
        description="Layers per recomputed slice; above 0 it overrides the argument of PipelineModule.",
    )
    pipe_partitioned: bool = unused(
        True, "DeepSpeed: cut activations over the tensor-parallel ranks to send them."
    )
    grad_partitioned: bool = unused(True, "DeepSpeed: the same for gradients.")
    use_reentrant: bool | None = unused(None, "Checkpointing here is always non-reentrant.")


class ActivationCheckpointing(Block):
    partition_activations: bool = unused(
        False, "DeepSpeed: cut saved activations over tensor-parallel ranks."
    )
    number_checkpoints: int | None = unused(None, "DeepSpeed: how many buffers to reserve.")
    contiguous_memory_optimization: bool = unused(False, "DeepSpeed: one buffer for all saved activations.")
    synchronize_checkpoint_boundary: bool = unused(False, "DeepSpeed: synchronize the device at each slice.")
    profile: bool = unused(False, "DeepSpeed: time each slice.")
    cpu_checkpointing: bool = Field(
        False, description="Inputs of a PipelineModule's recomputed slices wait in host memory."
    )


class TensorParallelGroup(Block):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    tp_size: int = Field(1, ge=1, description="Tensor-parallel degree.")
    tp_grain_size: int = Field(1, ge=1, description="AutoTP deals columns of MLPs in units of so many.")
    mpu: Any = Field(None, description="An object that knows the tensor-parallel group.")
    tp_group: Any = Field(None, description="The tensor-parallel process group itself.")


class TensorParallel(Block):
    tp_size: int | None = Field(None, ge=1, description="Tensor-parallel degree, the chapter's spelling.")
    tp_grain_size: int = Field(1, ge=1, description="AutoTP deals columns of MLPs in units of so many.")
    autotp_size: int = Field(0, ge=0, description="Tensor-parallel degree, DeepSpeed's spelling; 0 is off.")
    tp: TensorParallelGroup = Field(
        default_factory=TensorParallelGroup, description="The degree and group, DeepSpeed's block."
    )
    dtype: Any = unused("fp16", "The blocks fp16 and bf16 decide.")
    tp_overlap_comm: bool = Field(
        False, description="Sum a column layer's input gradient while its weight's is computed."
    )
    domino: bool = Field(False, description="Each block runs its batch in two parts; sums hide under them.")
    partition_config: dict[str, Any] | None = Field(
        None, description="Which weights are cut, by pattern and how."
    )
    preset_model: str | None = Field(None, description="Name of a known architecture whose plan is used.")
    injection_policy_tuple: Any = Field(None, description="Layers whose output is summed over the group.")
    vocab_parallel_lm_head: bool | None = Field(None, description="Cut the output layer over the vocabulary.")
    vocab_parallel_ce_backend: Literal["torch", "liger"] = unused(
        "torch", "DeepSpeed: who computes the cross entropy over a cut vocabulary."
    )
    keep_module_on_host: bool = unused(False, "DeepSpeed: leave the shards in host memory.")

    @property
    def degree(self) -> int:
        """Tensor-parallel degree, whichever spelling gave it; `load_config` has checked that they agree."""
        return self.tp_size or self.autotp_size or self.tp.tp_size

    @property
    def grain(self) -> int:
        """In units of how many columns AutoTP deals an MLP, whichever spelling gave it."""
        return max(self.tp_grain_size, self.tp.tp_grain_size)

    @property
    def has_plan(self) -> bool:
        """Whether the config says itself which layers are cut."""
        return self.partition_config is not None or self.preset_model is not None

    @property
    def is_given(self) -> bool:
        """Whether the config names a degree at all."""
        return self.tp_size is not None or self.autotp_size > 0 or "tp_size" in self.tp.model_fields_set


class ExpertParallel(Block):
    enabled: bool = Field(
        False, description="Replace the MoE blocks of a transformers model by expert parallelism."
    )
    autoep_size: int = Field(1, ge=1, description="Expert-parallel degree.")
    expert_tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel degree inside an expert.")
    validate_folding_routing: bool = unused(False, "Check that folded ranks route alike.")
    preset_model: str | None = unused(None, "Name of a known architecture.")
    moe_layer_pattern: str | None = unused(None, "Regex for the names of MoE blocks.")
    expert_pattern: str | None = unused(None, "Regex for the names of experts in a block.")
    router_pattern: str | None = unused(None, "Regex for the name of the router in a block.")
    use_grouped_mm: bool = unused(True, "One grouped product for all local experts.")
    route_norm: bool | None = unused(None, "Whether the weights of the chosen experts add up to 1.")
    route_scale: float = unused(1.0, "Factor on the weights of the chosen experts.")
    score_func: str = unused("auto", "How logits become scores; auto asks the model.")
    top_k: int | Literal["auto"] = unused("auto", "Experts per token; auto asks the model.")
    score_apply: str = unused("auto", "Weight the tokens before or after the expert; auto asks the model.")
    combine_impl: str = unused("auto", "How the outputs of the experts are added up.")
    num_expert_groups: int | None = unused(None, "Groups of experts, for group-limited routing.")
    num_limited_groups: int | None = unused(None, "Groups a token may choose from.")
    load_balance_coeff: None = Field(
        None, description="Must stay null: the auxiliary loss is the model's own."
    )


class Compile(Block):
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = Field(
        None, description="Compiler passes to run over the captured graph."
    )


class ParallelWrite(Block):
    pipeline_stage: bool = Field(
        False, description="Every stage writes its own layer files at the same time."
    )


class Checkpoint(Block):
    parallel_write: ParallelWrite = Field(
        default_factory=ParallelWrite, description="Which ranks write together."
    )
    tag_validation: str = unused("Warn", "DeepSpeed: compare the tag over all ranks.")
    load_universal: bool = unused(False, "Every ds_lite checkpoint can be loaded in another layout.")
    use_node_local_storage: bool = unused(False, "DeepSpeed: each node writes to its own disk.")


class DSConfig(Block):
    """A whole ds_config, checked. `unused` lists the given keys that change nothing, as dotted names."""

    train_batch_size: int | None = Field(None, description="Samples per step, over all data-parallel ranks.")
    train_micro_batch_size_per_gpu: int | None = Field(
        None, description="Samples per micro-batch on one data rank."
    )
    gradient_accumulation_steps: int | None = Field(
        None, description="Micro-batches per step on one data rank."
    )
    optimizer: Optimizer | None = Field(None, description="Optimizer by name, where none is passed in.")
    scheduler: Scheduler | None = Field(
        None, description="Learning-rate schedule by name, where none is passed in."
    )
    gradient_clipping: float = Field(
        0.0, ge=0, description="Largest gradient norm; 0 (the default) never clips."
    )
    steps_per_print: int | None = Field(
        None, ge=1, description="Report progress every so many steps; null, the default, is silent."
    )
    wall_clock_breakdown: bool = Field(False, description="Report the time spent in each part of a step.")
    seed: int = Field(1234, ge=0, description="Start of ds_lite's own random numbers.")
    zero_optimization: Zero = Field(
        default_factory=Zero, description="Sharding over the data-parallel ranks."
    )
    fp16: Fp16 = Field(default_factory=Fp16, description="float16 training.")
    bf16: Bf16 = Field(default_factory=Bf16, description="bfloat16 training.")
    pipeline: Pipeline = Field(default_factory=Pipeline, description="The pipeline engine.")
    activation_checkpointing: ActivationCheckpointing = Field(
        default_factory=ActivationCheckpointing, description="How recomputed slices are saved."
    )
    tensor_parallel: TensorParallel = Field(
        default_factory=TensorParallel, description="Cutting layers over the model axis."
    )
    sequence_parallel_size: int = Field(1, ge=1, description="Ranks that share one sequence.")
    data_parallel_size: int | None = Field(None, ge=1, description="Data-parallel degree, to be checked.")
    expert_parallel: ExpertParallel = Field(
        default_factory=ExpertParallel, description="Automatic expert parallelism."
    )
    use_data_before_expert_parallelism: bool = Field(
        False, description="Form expert-data groups of neighbours, and expert groups across them."
    )
    compile: Compile = Field(default_factory=Compile, description="Compiler passes.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="How checkpoints are written.")

    _unused: tuple[str, ...] = PrivateAttr(())

    @property
    def unused(self) -> list[str]:
        return list(self._unused)
