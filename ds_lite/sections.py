"""§9.1-9.16 The map from the sections of the chapter to what exists here: data only.

`ds-lite where`, the site's "at a glance" boxes and the tests read this table. A path may hold a `*`; all of
them start at the root of the repository. A section that is not built yet lists only what exists.

Source: §9.1-9.16; DeepSpeed symbols as `file::symbol`, files below `deepspeed/`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """One section of the chapter. There is no §9.8."""

    number: str
    title: str
    chinese_title: str
    modules: tuple[str, ...] = ()
    chapter: str | None = None
    tests: tuple[str, ...] = ()
    lab: str | None = None
    deepspeed: tuple[str, ...] = ()


SECTIONS: tuple[Section, ...] = (
    Section(
        "9.1",
        "Why ZeRO is not enough",
        "为什么除了 ZeRO 还需要别的并行",
        modules=(
            "ds_lite/engine.py",
            "ds_lite/gradients.py",
            "ds_lite/buckets.py",
            "ds_lite/zero.py",
            "ds_lite/precision.py",
            "ds_lite/saving/writing.py",
            "ds_lite/saving/loading.py",
        ),
        chapter="chapters/ch01_why_not_zero_alone.py",
        tests=("tests/test_s09_1_*.py",),
        deepspeed=(
            "runtime/engine.py::DeepSpeedEngine",
            "runtime/zero/stage_1_and_2.py::DeepSpeedZeroOptimizer",
            "runtime/fp16/loss_scaler.py::DynamicLossScaler",
        ),
    ),
    Section(
        "9.2",
        "The pipeline engine: a model cut into stages",
        "Pipeline 引擎：把模型切成 stage",
        modules=(
            "ds_lite/initialize.py",
            "ds_lite/config.py",
            "ds_lite/pipe/engine.py",
            "ds_lite/pipe/simulate.py",
        ),
        chapter="chapters/ch02_pipeline_engine.py",
        tests=("tests/test_s09_2_*.py", "tests/test_seed_code.py"),
        lab="labs/lab02_pipeline",
        deepspeed=(
            "__init__.py::initialize",
            "runtime/config.py::DeepSpeedConfig",
            "runtime/pipe/engine.py::PipelineEngine.train_batch",
        ),
    ),
    Section(
        "9.3",
        "3D parallelism: ZeRO x TP x PP",
        "3D 并行：ZeRO × TP × PP",
        modules=(
            "ds_lite/gradients.py",
            "ds_lite/zero.py",
            "ds_lite/tags.py",
            "ds_lite/tensor_parallel/layers.py",
            "ds_lite/tensor_parallel/regions.py",
            "ds_lite/tensor_parallel/cross_entropy.py",
            "ds_lite/toy_parallel.py",
        ),
        chapter="chapters/ch03_three_axes.py",
        tests=("tests/test_s09_3_*.py",),
        deepspeed=(
            "runtime/tensor_parallel/config.py::TPTrainingConfig",
            "module_inject/layers.py::LinearLayer",
            "module_inject/layers.py::LinearAllreduce",
        ),
    ),
    Section(
        "9.4",
        "MoE: expert parallelism",
        "MoE：专家并行",
        modules=(
            "ds_lite/moe/layer.py",
            "ds_lite/moe/experts.py",
            "ds_lite/moe/mappings.py",
            "ds_lite/expert_groups.py",
            "ds_lite/toy_moe.py",
        ),
        chapter="chapters/ch04_mixture_of_experts.py",
        tests=("tests/test_s09_4_*.py",),
        deepspeed=("moe/layer.py::MoE",),
    ),
    Section(
        "9.5",
        "Sequence parallelism for long contexts",
        "Sequence Parallel：长上下文必备",
        modules=(
            "ds_lite/sequence/auto_sp.py",
            "ds_lite/sequence/models.py",
            "ds_lite/sequence/routes.py",
            "ds_lite/sequence/data.py",
        ),
        chapter="chapters/ch05_long_contexts.py",
        tests=("tests/test_s09_14_equality.py", "tests/test_s09_14_auto_sp.py"),
        deepspeed=("sequence/layer.py::DistributedAttention",),
    ),
    Section(
        "9.6",
        "What to use when",
        "实战层次推荐",
        modules=(
            "ds_lite/choosing.py",
            "ds_lite/layout.py",
            "ds_lite/moe/spread.py",
            "ds_lite/moe/whole.py",
            "ds_lite/explain/places.py",
            "ds_lite/explain/traffic.py",
        ),
        chapter="chapters/ch06_every_layout.py",
        tests=("tests/test_every_layout.py", "tests/test_s09_6_*.py"),
    ),
    Section(
        "9.7",
        "How it relates to Megatron-LM",
        "与 Megatron-LM 的关系",
        modules=("ds_lite/mpu.py", "ds_lite/foreign_tags.py", "ds_lite/forming.py", "ds_lite/grid.py"),
        chapter="chapters/ch07_megatron.py",
        tests=("tests/test_s09_7_*.py",),
        deepspeed=(
            "runtime/pipe/topology.py::PipelineParallelGrid",
            "utils/bwc.py::bwc_tensor_model_parallel_rank",
            "__init__.py::initialize",
        ),
    ),
    Section(
        "9.9",
        "PipelineModule: layers described, then built where they belong",
        "PipelineModule 的构造细节",
        modules=(
            "ds_lite/pipe/module.py",
            "ds_lite/pipe/partition.py",
            "ds_lite/pipe/causal_lm/hull.py",
            "ds_lite/pipe/causal_lm/layers.py",
            "ds_lite/pipe/causal_lm/routers.py",
        ),
        chapter="chapters/ch09_pipeline_module.py",
        tests=("tests/test_s09_9_*.py",),
        lab="labs/lab02_pipeline",
        deepspeed=(
            "runtime/pipe/module.py::PipelineModule",
            "runtime/pipe/module.py::LayerSpec",
            "runtime/pipe/module.py::TiedLayerSpec",
            "runtime/utils.py::partition_balanced",
        ),
    ),
    Section(
        "9.10",
        "Schedules and the ten pipe instructions",
        "Pipeline schedule 全表 & PipeInstruction",
        modules=(
            "ds_lite/pipe/schedule.py",
            "ds_lite/pipe/instructions.py",
            "ds_lite/pipe/simulate.py",
            "ds_lite/pipe/engine.py",
            "ds_lite/trace.py",
            "ds_lite/trace_file.py",
            "ds_lite/hang.py",
        ),
        chapter="chapters/ch10_schedules.py",
        tests=("tests/test_s09_10_*.py",),
        lab="labs/lab02_pipeline",
        deepspeed=(
            "runtime/pipe/schedule.py::TrainSchedule",
            "runtime/pipe/schedule.py::PipeInstruction",
            "runtime/pipe/engine.py::PipelineEngine._exec_schedule",
        ),
    ),
    Section(
        "9.11",
        "ProcessTopology: coordinates in a 3D world",
        "ProcessTopology：3D 世界的笛卡尔坐标",
        modules=("ds_lite/topology.py", "ds_lite/grid.py", "ds_lite/comm.py", "ds_lite/pipe/p2p.py"),
        chapter="chapters/ch11_topology.py",
        tests=("tests/test_s09_11_*.py",),
        lab="labs/lab01_ranks",
        deepspeed=(
            "runtime/pipe/topology.py::ProcessTopology",
            "runtime/pipe/topology.py::PipelineParallelGrid",
            "runtime/pipe/p2p.py::send",
        ),
    ),
    Section(
        "9.12",
        "The parameters of MoE in the source",
        "MoE 关键参数源码解读",
        modules=(
            "ds_lite/moe/gating.py",
            "ds_lite/moe/queues.py",
            "ds_lite/moe/routing.py",
            "ds_lite/moe/gate.py",
            "ds_lite/moe/noise.py",
            "ds_lite/moe/dispatch.py",
        ),
        chapter="chapters/ch12_gating.py",
        tests=("tests/test_s09_12_*.py",),
        deepspeed=("moe/sharded_moe.py::top1gating", "moe/sharded_moe.py::_AllToAll"),
    ),
    Section(
        "9.13",
        "AutoTP: cutting a transformers model by itself",
        "AutoTP：怎么自动把 HF 模型切成 TP",
        modules=(
            "ds_lite/tensor_parallel/policy.py",
            "ds_lite/tensor_parallel/reading/block.py",
            "ds_lite/tensor_parallel/reading/operations.py",
            "ds_lite/tensor_parallel/placing.py",
            "ds_lite/tensor_parallel/heads.py",
            "ds_lite/tensor_parallel/fused_qkv.py",
            "ds_lite/tensor_parallel/auto_tp.py",
            "ds_lite/tensor_parallel/whole_model.py",
        ),
        chapter="chapters/ch13_auto_tp.py",
        tests=("tests/test_s09_13_*.py",),
        deepspeed=("module_inject/auto_tp.py::AutoTP", "module_inject/tp_shard.py::get_shard_size"),
    ),
    Section(
        "9.14",
        "Sequence parallelism: Ulysses and ALST",
        "Sequence Parallel：Ulysses 与 ALST",
        modules=(
            "ds_lite/sequence/exchange.py",
            "ds_lite/sequence/layer.py",
            "ds_lite/sequence/whole.py",
            "ds_lite/sequence/masks.py",
            "ds_lite/sequence/tiled.py",
            "ds_lite/sequence/tiled_loss.py",
            "ds_lite/sequence/chunked.py",
            "ds_lite/sequence/ulysses_chunks.py",
            "ds_lite/sequence/host_store.py",
            "ds_lite/sequence/offload.py",
        ),
        chapter="chapters/ch14_ulysses.py",
        tests=("tests/test_s09_14_*.py",),
        deepspeed=("sequence/layer.py::_SeqAllToAll", "sequence/fpdt_layer.py::FPDT_Attention"),
    ),
    Section(
        "9.15",
        "Domino: all-reduce that computation hides",
        "Domino：把 TP 通信推到 backward 才同步",
        modules=(
            "ds_lite/domino/transformer.py",
            "ds_lite/domino/async_linear.py",
            "ds_lite/domino/weights.py",
            "ds_lite/domino/interleave.py",
            "ds_lite/domino/blocks.py",
            "ds_lite/domino/trial.py",
            "ds_lite/domino/lanes.py",
            "ds_lite/tensor_parallel/pending.py",
            "ds_lite/tensor_parallel/turns.py",
            "ds_lite/tensor_parallel/overlap.py",
        ),
        chapter="chapters/ch15_domino.py",
        tests=("tests/test_s09_15_*.py",),
        deepspeed=("runtime/domino/transformer.py::DominoTransformerLayer",),
    ),
    Section(
        "9.16",
        "What to take away",
        "这章你需要带走什么",
        modules=("ds_lite/grading.py",),
        chapter="chapters/ch16_what_to_take_away.py",
        tests=("tests/test_grading.py",),
    ),
)


def find(number: str) -> Section:
    """The section with this number, or the one that holds it: 9.10.2 is found in 9.10.

    Raises: ValueError that lists the known numbers.

    >>> find("9.10.2").title
    'Schedules and the ten pipe instructions'
    """
    wanted = ".".join(number.strip().lstrip("§").split(".")[:2])
    for section in SECTIONS:
        if section.number == wanted:
            return section
    known = ", ".join(section.number for section in SECTIONS)
    raise ValueError(f"section {number!r} is not in the chapter; choose one of {known}")
