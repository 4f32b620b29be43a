"""Where the installed DeepSpeed does not do what the suite asks, as data; `judging.py` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["on purpose", "defect", "not offered", "refuses"]
VERSION = "0.19.8"  # of DeepSpeed; the table speaks of no other


@dataclass(frozen=True)
class Difference:
    """`tests` is an id from its file's name on, `*` for anything; `says` is found in the failure."""

    tests: str
    kind: Kind
    says: str
    reason: str
    source: str  # a row of SEMANTICS or FIELD_REPORTS, or file::symbol of DeepSpeed


# Tests that take `impl` and look into ds_lite itself all the same; why.
OF_DS_LITE_ALONE = {
    "test_mutants.py::*": "the mutants change ds_lite's own modules",
    "test_s09_2_field_reports.py::test_b01_is_seen": "the fault is put into ds_lite",
    "test_s09_2_field_reports.py::test_b05_is_seen": "the fault is put into ds_lite",
    "test_s09_10_field_order.py::test_b21_the_issued_order_*": "reads ds_lite's record of what a rank issued",
    "test_s09_10_field_order.py::test_b21_a_gpipe_engine_*": "derives an engine from ds_lite's",
}

PIPE, AXES = "test_s09_10_pipe_engine.py", "test_s09_3_three_axes.py"
LOW, DATA, TUPLES = "test_s09_3_precision.py", "test_s09_2_field_data.py", "test_s09_9_field_tuples.py"
ODD, FAULTS, CUT = "test_s09_10_uncommon_models.py", "test_s09_2_faults.py", "test_s09_9_partition.py"
ENGINE = "runtime/pipe/engine.py::PipelineEngine"

NO_ZERO_2 = "ZeRO-2 with a pipeline", "PipelineEngine asserts a ZeRO stage below 2", "SEMANTICS decision 6"
NO_ZERO_1 = (
    "ZeRO-1 of a float64 model",
    "ZeRO-1 shards are float32; in float32 and below they are judged, and pass",
    "SEMANTICS decision 23",
)
NO_TP = (
    "tensor_parallel=",
    "a PipelineModule cuts no layer: the caller brings layers that are cut, and their groups",
    "SEMANTICS 2.2",
)
NO_EXPERTS = (
    "expert_parallel=",
    "the gate computes in float32, which the law cannot follow; experts of its pipelines are not set up",
    "SEMANTICS 2.11",
)
FLOAT32_CLIP = (
    "differs by",
    "the norm that clips is taken in float32: right to about 1e-9",
    "runtime/utils.py::clip_grad_norm_",
)
STAGE_0_CLIP = (
    "differs by",
    "without ZeRO every stage clips by the norm of the first stage alone, in float32 models too",
    "SEMANTICS decision 22; runtime/utils.py::clip_grad_norm_",
)
NEEDS_GRADIENT = (
    "does not require grad|requires_grad|assert buffer.grad is not None",
    "every float between stages must need a gradient and get one",
    f"SEMANTICS decision 14; {ENGINE}._exec_backward_pass",
)
LOSS_IS_FLOAT32 = (
    "dtype torch.float32, expected torch.b?float16",
    "the loss of a bf16 or fp16 model is float32 beyond the last stage",
    f"{ENGINE}._aggregate_total_loss",
)
EVAL_SHAPE = (
    r"shape \(1,\), expected \(\)",
    "eval_batch gives 0-dim on the last stage and [1] elsewhere, in float32",
    "SEMANTICS decision 8, U5",
)
PER_LOSS = (
    "'list' object has no attribute 'clone'",
    "losses that are not one tensor a batch (several, or reduce_output=None) cannot be broadcast",
    f"SEMANTICS U5; {ENGINE}._bcast_pipe_scalar",
)
DECAYED = (
    "gradient of 0.never|0.idle: differs by",
    "a parameter that nothing used gets a gradient of zeros in ReduceGrads, and weight decay moves it",
    "runtime/engine.py::DeepSpeedEngine._get_gradients_for_reduction",
)
BAD_DATA = (
    "ranks raised|Read error|still ran",
    "ranks do not agree on data before they use it: one raises, in its own words, the others wait",
    "FIELD_REPORTS B22",
)
ALONE = (
    "still ran|ranks raised",
    "a rank that fails in a batch does not tell the others, which wait",
    "FIELD_REPORTS B13, B22",
)
PLAIN_INTS = "type.bound. is int", "bounds are numpy integers", "SEMANTICS decision 15"
LOWER_CASE = r"assert \[", "the whole method, regex too, is written in lower case", "SEMANTICS 2.6"


def _row(tests: str, kind: Kind, why: tuple[str, str, str]) -> Difference:
    return Difference(tests, kind, *why)


# The first row that covers a test counts.
TABLE: tuple[Difference, ...] = (
    # axes and stages that are not there
    _row(f"{PIPE}::*zero=2*", "refuses", NO_ZERO_2),
    _row("test_s09_3_*::*[pp=*,tp=2*", "not offered", NO_TP),
    _row(f"{AXES}::*[pp=*,tp=3*", "not offered", NO_TP),
    _row(f"{AXES}::*[pp=*,tp=4*", "not offered", NO_TP),
    _row(f"{AXES}::*zero=2*", "refuses", NO_ZERO_2),
    _row(f"{LOW}::*zero=2*", "refuses", NO_ZERO_2),
    _row(f"{LOW}::test_b17*[a replica, ZeRO-2-*", "refuses", NO_ZERO_2),
    _row(f"{LOW}::test_b17*[bf16-*", "refuses", NO_ZERO_2),
    _row(f"{LOW}::test_b17*[a tensor-parallel rank-*", "not offered", NO_TP),
    _row("test_s09_3_field_reports.py::test_b13*at_every_stage[2]", "refuses", NO_ZERO_2),
    _row("test_s09_3_field_reports.py::test_b13_a_failure*", "refuses", NO_ZERO_2),
    _row("test_s09_4_*", "not offered", NO_EXPERTS),
    _row(f"{PIPE}::test_a_pipeline*zero=1*", "not offered", NO_ZERO_1),
    _row(f"{AXES}::*zero=1*", "not offered", NO_ZERO_1),
    _row("test_s09_3_field_reports.py::test_b13*at_every_stage[1]", "not offered", NO_ZERO_1),
    _row("test_s09_1_optimizers.py::test_zero_with_fewer*", "not offered", NO_ZERO_1),
    _row(f"{ODD}::test_uncommon_models*[2-2-1]", "not offered", NO_ZERO_1),
    _row("test_s09_2_field_eval.py::test_b19_training*[4-1-False]", "not offered", NO_ZERO_1),
    # gradients, norms and clipping
    _row(f"{PIPE}::test_a_pipeline*num_stages=1,*clip=*", "on purpose", FLOAT32_CLIP),
    _row(f"{AXES}::*pp=1,*clip=*", "on purpose", FLOAT32_CLIP),
    _row(f"{AXES}::*pp=2,*tp=1,clip=*", "defect", STAGE_0_CLIP),
    _row("test_s09_11_field_ranks.py::test_b31_any_order*[axes3-*", "on purpose", FLOAT32_CLIP),
    _row("test_s09_2_field_reports.py::test_b05*", "on purpose", FLOAT32_CLIP),
    _row(f"{PIPE}::test_a_pipeline*kind=tuple*", "refuses", NEEDS_GRADIENT),
    _row(f"{PIPE}::test_a_float32*num_stages=2,*clip=0.05,kind*", "defect", STAGE_0_CLIP),
    _row("test_s09_11_field_ranks.py::test_b31_any_order*", "defect", STAGE_0_CLIP),
    _row("test_s09_1_optimizers.py::test_groups_keep*", "defect", STAGE_0_CLIP),
    _row("test_s09_3_field_reports.py::test_b13*at_every_stage[0]", "defect", STAGE_0_CLIP),
    _row("test_s09_1_missing_gradients.py::*", "defect", DECAYED),
    _row("test_s09_1_optimizers.py::test_a_parameter_without*", "defect", DECAYED),
    Difference(
        "test_s09_9_field_reports.py::test_b25a*",
        "defect",
        "self.dim.. cannot be 0",
        "a 0-dim parameter cannot be broadcast when the engine starts",
        "runtime/engine.py::DeepSpeedEngine._broadcast_model",
    ),
    # bf16, fp16
    _row(f"{LOW}::test_low*[pp=2*", "defect", LOSS_IS_FLOAT32),
    Difference(
        f"{LOW}::test_b17*[a stage, patience left-*",
        "defect",
        r"assert \{512.0\} == \{1024.0\}",
        "hysteresis is ignored: an optimizer of torch gets a scale that halves at once",
        "runtime/fp16/unfused_optimizer.py::FP16_UnfusedOptimizer._update_scale",
    ),
    Difference(
        f"{LOW}::test_b17*[float64-*",
        "on purpose",
        "differs from a lower rank's|moved in a skipped step",
        "without fp16 no step is skipped: what is not finite goes into the weights",
        "runtime/engine.py::DeepSpeedEngine._take_model_step",
    ),
    Difference(
        f"{LOW}::test_a_skip_is_reported*",
        "on purpose",
        "said.count",
        "a skipped step is told in other words, and not under a fixed scale",
        "runtime/fp16/unfused_optimizer.py::FP16_UnfusedOptimizer",
    ),
    _row(f"{LOW}::test_auto_cast*", "defect", EVAL_SHAPE),
    # what travels between stages
    _row(f"{TUPLES}::test_b10*", "refuses", NEEDS_GRADIENT),
    _row(f"{TUPLES}::test_b11_lengths*", "refuses", NEEDS_GRADIENT),
    _row(f"{TUPLES}::test_b11_a_member_that_is_not_used*", "refuses", NEEDS_GRADIENT),
    _row(f"{TUPLES}::test_b11_a_buffer*", "refuses", NEEDS_GRADIENT),
    _row(f"{TUPLES}::test_b11_a_stage_without*", "refuses", NEEDS_GRADIENT),
    _row(f"{ODD}::test_uncommon_models*[4-1-0]", "refuses", NEEDS_GRADIENT),
    Difference(
        f"{TUPLES}::test_b11_tuples_arrive*",
        "refuses",
        "Could not send meta type .class 'list'",
        "a list between stages is refused, tuples pass",
        f"{ENGINE}._send_tensor_meta",
    ),
    Difference(
        f"{TUPLES}::test_b11_conjugate*",
        "defect",
        "unresolved conjugated tensors",
        "conjugate views are handed to gloo as they are",
        f"{ENGINE}._exec_send_activations",
    ),
    Difference(
        f"{FAULTS}::test_legal_but_odd*",
        "on purpose",
        "'tuple' object has no attribute 'left'",
        "a named tuple of inputs arrives as a plain one",
        f"{ENGINE}._exec_load_micro_batch",
    ),
    Difference(
        f"{ODD}::test_nested_inputs*",
        "refuses",
        "torch.is_tensor",
        "inputs are a tensor or a flat tuple of tensors",
        f"{ENGINE}._exec_load_micro_batch",
    ),
    Difference(
        f"{DATA}::test_b18*",
        "defect",
        "SIGABRT",
        "with dynamic_shape a buffer is used again for another dtype: the message does not fit, gloo aborts",
        f"{ENGINE}._allocate_or_extend_buffers",
    ),
    Difference(
        f"{ODD}::test_two_engines_in_turn",
        "defect",
        "adjacent ranks only|invalid",
        "the grid that messages go by is global: of two engines the newer one decides for both",
        "runtime/pipe/p2p.py::init_process_groups",
    ),
    # data
    _row(f"{DATA}::test_b22_bad_data*", "defect", BAD_DATA),
    _row(f"{DATA}::test_b22_unequal*", "defect", BAD_DATA),
    Difference(
        f"{DATA}::test_b22_training_goes_on*",
        "defect",
        "StopIteration",
        "data that ends is found in the middle of a batch, as StopIteration",
        "FIELD_REPORTS B22",
    ),
    Difference(
        f"{DATA}::test_b22_the_ends_read*",
        "on purpose",
        "StopIteration",
        "a loader given to set_dataloader is read once, it does not begin anew",
        f"{ENGINE}.set_dataloader",
    ),
    Difference(
        f"{FAULTS}::test_a_batch_fn*",
        "on purpose",
        "'list' object is not an iterator",
        "a list is refused in Python's own words, on the ranks that read it",
        f"{ENGINE}._next_batch",
    ),
    # losses and evaluation
    _row("test_s09_2_field_reports.py::test_b20_the_loss*", "defect", EVAL_SHAPE),
    _row("test_s09_2_field_eval.py::test_b19_eval*", "defect", EVAL_SHAPE),
    _row("test_s09_2_field_eval.py::test_b19_training*", "defect", PER_LOSS),
    _row(f"{FAULTS}::test_eval_keeps*", "defect", PER_LOSS),
    Difference(
        "test_s09_2_field_reports.py::test_b20_two_hundred*",
        "defect",
        "an autograd graph is still alive",
        "the engine keeps the last micro-batch's loss with its graph until the next one",
        f"{ENGINE}._exec_forward_pass",
    ),
    Difference(
        f"{FAULTS}::test_modes*",
        "on purpose",
        "layer.training for layer",
        "train_batch and eval_batch set the mode of every layer",
        f"{ENGINE}.train_batch",
    ),
    Difference(
        f"{ODD}::test_seeded_dropout*",
        "on purpose",
        "the global generator moved",
        "seed_layers seeds the global generator and leaves it so",
        "SEMANTICS decision 16",
    ),
    # failures
    Difference(
        f"{FAULTS}::test_an_engine_that_failed*",
        "on purpose",
        "timer has already been started",
        "an engine that failed midway is not refused as such; its timer is what stops it",
        "utils/timer.py::SynchronizedWallClockTimer",
    ),
    _row(f"{FAULTS}::test_a_failure_on_one_replica*", "defect", ALONE),
    Difference(
        f"{FAULTS}::test_a_loss_that_never*",
        "defect",
        "loss must be a scalar tensor",
        "a micro-batch whose loss hangs on no parameter is an error, also where others have one",
        "runtime/engine.py::DeepSpeedEngine.backward",
    ),
    Difference(
        f"{FAULTS}::test_a_module_on_two_stages*",
        "defect",
        "0 of 2 ranks raised ValueError",
        "a module given to two stages without a tie becomes two modules that drift apart",
        "runtime/pipe/module.py::PipelineModule._build",
    ),
    _row(f"{FAULTS}::test_adagrad*", "not offered", NO_ZERO_1),
    # partition
    Difference(
        f"{CUT}::test_recorded_empty*",
        "on purpose",
        "DID NOT RAISE",
        "more stages than layers leave stages empty",
        "SEMANTICS decision 15",
    ),
    _row(f"{CUT}::test_a_type_regex*", "on purpose", PLAIN_INTS),
    _row(f"{CUT}::test_layers_without_parameters*", "on purpose", PLAIN_INTS),
    _row(f"{CUT}::test_the_regex_keeps_its_case", "defect", LOWER_CASE),
    Difference(
        f"{CUT}::test_the_regex_keeps_a_second_colon",
        "defect",
        "unexpected end of pattern",
        "the regex ends at its first colon",
        "SEMANTICS 2.6",
    ),
)
