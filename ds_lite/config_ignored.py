"""§9.2 Names in a ds_config that need no class: other spellings, true uses of "auto", unread keys."""

OTHER_SPELLINGS = {"bfloat16": "bf16"}  # an old DeepSpeed name and the one it stands for

# Values for which "auto" is DeepSpeed's own default; everywhere else a trainer around it would fill them in.
AUTO_IS_A_VALUE = frozenset(
    {
        "pipeline.stages",
        "expert_parallel.score_func",
        "expert_parallel.top_k",
        "expert_parallel.score_apply",
        "expert_parallel.combine_impl",
        "expert_parallel.row_weighting_impl",
        "expert_parallel.routed_scaling_factor",
        "data_types.keep_in_fp32_modules",
    }
)

# DeepSpeed's other keys: accepted, never read, reported once. What lies below such a key is not examined.
UNUSED_KEYS: dict[str, str] = {
    "aio": "asynchronous file access",
    "amp": "NVIDIA apex mixed precision",
    "autotuning": "search for a good config",
    "checkpoint_writer": "writer processes of the checkpoint engine",
    "comet": "reports to Comet",
    "comms_logger": "log of collectives; here comm.py keeps a ledger",
    "communication_data_type": "gradients travel in their own type",
    "compression_training": "pruning and quantization",
    "csv_monitor": "reports to CSV files",
    "curriculum_learning": "sequence lengths that grow",
    "data_efficiency": "data sampling and routing",
    "data_types": "type of accumulated gradients",
    "dataloader_drop_last": "a last, smaller batch",
    "datastates_ckpt": "asynchronous checkpoints",
    "ddp_bf16": "bfloat16 in data-parallel training",
    "disable_allgather": "how updated parameters are gathered",
    "disable_python_gc": "garbage collection during training",
    "dump_state": "print the engine's state at start",
    "eigenvalue": "curvature estimates for quantization",
    "elasticity": "batch sizes for a changing number of ranks",
    "flops_profiler": "count of operations",
    "gradient_allreduce_op": "gradients are always averaged over the data ranks",
    "gradient_predivide_factor": "where gradients are divided",
    "hybrid_engine": "switch between training and generation",
    "log_level": "verbosity of DeepSpeed's logger",
    "managed_gradient_accumulation": "who counts micro-batches",
    "memory_breakdown": "report of memory in each part of a step",
    "nebula": "checkpoints in a cloud service",
    "prescale_gradients": "where gradients are divided",
    "progressive_layer_drop": "skipped layers",
    "quantize_training": "quantization-aware training",
    "seq_parallel_communication_data_type": "gradients travel in their own type",
    "sparse_gradients": "sparse embedding gradients",
    "tensorboard": "reports to TensorBoard",
    "timers": "settings of the throughput timer",
    "torch_autocast": "torch.autocast; the caller may enter it",
    "vocabulary_size": "check of the vocabulary's alignment",
    "wandb": "reports to Weights & Biases",
    "weight_quantization": "quantized weights",
    "zero_allow_untested_optimizer": "every optimizer of torch.optim is allowed",
    "zero_force_ds_cpu_optimizer": "DeepSpeed's CPU optimizer",
    **{
        f"zero_optimization.{key}": "how DeepSpeed lays out, moves or offloads the shards"
        for key in """
        allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload
        cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
        ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights log_trace_cache_warnings
        memory_efficient_linear offload_optimizer offload_param overlap_comm override_module_apply
        parameter_alignment pipeline_loading_checkpoint reduce_scatter
        round_robin_gradients save_muon_momentum_buffer_in_memory stage3_allgather_sequential
        stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
        stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
        stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
        stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce zenflow
        zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights
        zero_quantized_weights
        """.split()
    },
    **{
        f"expert_parallel.{key}": "how DeepSpeed finds or computes experts"
        for key in """
        async_split_plan comm_backend comm_max_tokens_per_rank comm_num_sm comm_qp_margin
        disable_triton_grouped_mm expert_activation expert_w1 expert_w2 expert_w3 gate_up_impl
        has_shared_experts num_experts_attr routed_scaling_factor row_weighting_impl
        shared_experts_gate_pattern shared_experts_pattern top_k_attr
        """.split()
    },
    **{
        f"compile.{key}": "how DeepSpeed's compiler passes work"
        for key in """
        autoep_non_moe debug_log deepcompile double_buffer free_activation free_activation_threshold
        keep_all_input_tensors keep_int_input_tensors offload_activation offload_activation_pin_memory
        offload_opt_states offload_parameters symmetric_memory sync_after_allgather sync_after_reduce
        sync_before_allgather sync_before_reduce
        """.split()
    },
    "tensor_parallel.kernel_inject": "DeepSpeed's inference kernels",
    "tensor_parallel.replace_with_kernel_inject": "DeepSpeed's inference kernels",
}
