"""What does here what vLLM's other names do: a call with one of them is refused with that word.

A value that asks for nothing, as None, or for what happens here anyhow, is taken: programs that were written for vLLM
pass such.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ParamSpec, TypeVar

from tsched.requests.errors import ArgumentTypeError
from tsched.torch_free import suggest_name

ClassT = TypeVar("ClassT", bound=type)
ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class OtherName:
    """What stands here for a name of vLLM.

    Attributes:
        answer: "is … here" or "has no counterpart: …".
        unused: The values beside None that ask for nothing, or for what happens here anyhow.
    """

    answer: str
    unused: tuple[Any, ...] = ()

    def asks_for(self, value: Any) -> bool:
        """Whether `value` asks for something that there is not."""
        if value is None:
            return False
        plain = isinstance(value, (bool, int, float, str, list, tuple, dict))
        return not plain or not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.unused
        )


def _lacking(why: str, names: str, *unused: Any) -> dict[str, OtherName]:
    """`names`, split at spaces, have no counterpart."""
    return dict.fromkeys(names.split(), OtherName(f"has no counterpart: {why}", unused))


def _renamed(own: str, names: str, *unused: Any) -> dict[str, OtherName]:
    """`names`, split at spaces, are `own` here."""
    return dict.fromkeys(names.split(), OtherName(f"is {own} here", unused))


_REVISION = "part of the model's name, 'owner/name@REVISION',"

ENGINE_NAMES: Mapping[str, OtherName] = {
    **_renamed("overlap", "async_scheduling"),
    **_renamed(
        "kernels={op: variant}",
        "attention_backend attention_config kernel_config linear_backend moe_backend mamba_backend mamba_ssu_algorithm "
        "gdn_prefill_backend kda_prefill_backend kda_decode_backend sparse_indexer_topk_backend ir_op_priority "
        "monokernel",
        "auto",
    ),
    **_renamed("tuning", "enable_flashinfer_autotune"),
    **_renamed("shared_prefixes, False for True", "disable_cascade_attn", True),
    **_renamed(
        "cuda_graphs",
        "compilation_config cudagraph_capture_sizes max_cudagraph_capture_size max_seq_len_to_capture "
        "optimization_level performance_mode",
    ),
    **_renamed("cuda_graphs, False for True", "enforce_eager", False),
    **_renamed("chunked_prefill", "enable_chunked_prefill"),
    **_renamed("prefix_cache, 'hash' or 'radix' for True and 'none' for False", "enable_prefix_caching"),
    **_renamed("prefix_cache", "prefix_caching_hash_algo prefix_match_unit mamba_cache_mode"),
    **_renamed("kv_cache_fraction", "gpu_memory_utilization"),
    **_renamed("kv_cache_bytes", "kv_cache_memory_bytes num_gpu_blocks_override"),
    **_renamed("max_chunk_tokens", "long_prefill_token_threshold", 0),
    **_renamed("max_num_batched_tokens", "max_num_scheduled_tokens"),
    **_renamed("max_num_seqs", "max_num_active_seqs"),
    **_renamed("decode_share and max_chunk_tokens", "max_num_partial_prefills max_long_partial_prefills", 1),
    **_renamed("preemption", "preemption_mode", "recompute"),
    **_renamed("order", "scheduling_policy", "fcfs"),
    **_renamed("swap_bytes, in bytes, with preemption='swap'", "swap_space", 0),
    **_renamed("ranges", "enable_layerwise_nvtx_tracing", False),
    **_renamed("architectures_from", "model_class_overrides"),
    **_renamed(_REVISION, "revision tokenizer_revision code_revision"),
    **_renamed("the hub's own cache, HF_HOME,", "download_dir"),
    **_renamed("the hub's own login, HF_TOKEN,", "hf_token", False),
    **_renamed("an argument of chat", "chat_template"),
    **_lacking("text alone is generated", "task", "auto", "generate"),
    **_lacking("text alone is generated", "runner", "auto", "generate"),
    **_lacking("text alone is generated", "convert", "auto", "none"),
    **_lacking("text alone is generated", "pooler_config override_pooler_config max_lora_cls_labels"),
    **_lacking("an engine has no name; `tk serve` has one for clients", "served_model_name"),
    **_lacking("an engine serves one device", "tensor_parallel_size pipeline_parallel_size data_parallel_size", 1),
    **_lacking(
        "an engine serves one device",
        "prefill_context_parallel_size decode_context_parallel_size data_parallel_size_local nnodes "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size elastic_ep_max_dp_size",
        1,
    ),
    **_lacking(
        "an engine serves one device",
        "distributed_executor_backend master_addr master_port node_rank distributed_timeout_seconds "
        "cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids dcp_comm_backend "
        "dcp_q_replicate data_parallel_rank data_parallel_start_rank data_parallel_address data_parallel_rpc_port "
        "data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
        "enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter all2all_backend "
        "enable_elastic_ep enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
        "dp_sync_interval disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy "
        "disable_custom_all_reduce enable_nccl_comm_suspend enable_shm_tensor_arena ray_workers_use_nsight "
        "worker_cls worker_extension_cls max_parallel_loading_workers",
        False,
    ),
    **_lacking(
        "no code of a checkpoint is run; architectures_from takes your own", "trust_remote_code model_impl", False
    ),
    **_lacking("a directory without a tokenizer is served by token ids", "skip_tokenizer_init", False),
    **_lacking("the tokenizer in the model's directory serves", "tokenizer tokenizer_mode", "auto"),
    **_lacking("the checkpoint's config.json holds", "hf_overrides hf_config_path", {}),
    **_lacking("the checkpoint's config.json holds", "config_format", "auto", "hf"),
    **_lacking("the checkpoint says how it is quantized", "quantization quantization_config"),
    **_lacking("the checkpoint says how it is quantized", "allow_deprecated_quantization", False),
    **_lacking("weights are safetensors", "load_format", "auto", "safetensors"),
    **_lacking(
        "weights are safetensors of the model's directory",
        "model_weights safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
        "model_loader_extra_config ignore_patterns pt_load_map_location",
    ),
    **_lacking("weights are loaded without a bar", "use_tqdm_on_load", False),
    **_lacking("the cache has the model's dtype", "kv_cache_dtype", "auto"),
    **_lacking("the cache has the model's dtype", "kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype"),
    **_lacking(
        "states have the model's dtype, and are kept as prefix_cache asks",
        "mamba_config mamba_block_size enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds prefix_cache_retention_interval "
        "swa_bounded_replay",
        False,
    ),
    **_lacking("weights and cache stay on the device", "cpu_offload_gb", 0),
    **_lacking(
        "weights and cache stay on the device",
        "offload_backend cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step "
        "offload_params kv_offloading_size kv_offloading_backend kv_transfer_config kv_events_config "
        "kv_sharing_fast_prefill enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph "
        "sleep_preserve_parameter_names enable_cumem_allocator",
        False,
    ),
    **_lacking(
        "a model's windows bound its cache as its config says",
        "disable_sliding_window disable_hybrid_kv_cache_manager",
        False,
    ),
    **_lacking("no adapters are read", "enable_lora default_mm_loras", False),
    **_lacking(
        "no adapters are read",
        "max_loras max_lora_rank fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules "
        "enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
        False,
    ),
    **_lacking(
        "models read text alone",
        "allowed_local_media_path allowed_media_domains language_model_only limit_mm_per_prompt enable_mm_embeds "
        "enable_prompt_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb "
        "mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only "
        "mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate "
        "video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize "
        "disable_chunked_mm_input enable_mm_processor_stats ec_transfer_config ec_manager_config io_processor_plugin "
        "renderer_num_workers diffusion_config",
        False,
        "",
        {},
    ),
    **_lacking("SamplingParams' defaults hold", "generation_config", "vllm"),
    **_lacking("SamplingParams' defaults hold", "override_generation_config", {}),
    **_lacking("SamplingParams bounds logprobs", "max_logprobs"),
    **_lacking("log-probabilities are those of the model's own logits", "logprobs_mode", "raw_logprobs"),
    **_lacking("SamplingParams has logits_processors, each request its own", "logits_processors", []),
    **_lacking(
        "draws are float64, and nothing is returned of them",
        "use_fp64_gumbel return_sampling_mask enable_return_routed_experts enable_trace_replay watermark_config "
        "aux_output_config engram_config",
        False,
    ),
    **_lacking("a grammar is llguidance's, compiled when a request asks for one", "structured_outputs_config"),
    **_lacking("a grammar is llguidance's, compiled when a request asks for one", "guided_decoding_backend", "auto"),
    **_lacking("thoughts are text like any", "reasoning_parser reasoning_parser_plugin reasoning_config", ""),
    **_lacking("nothing is speculated", "speculative_config spec_method spec_model spec_tokens"),
    **_lacking("nothing is speculated", "per_request_spec_decode_metrics", False),
    **_lacking("`stats()` counts, and nothing is logged", "disable_log_stats", True),
    **_lacking(
        "`stats()` counts, and nothing is logged",
        "aggregate_engine_logging enable_log_requests show_hidden_metrics_for_version otlp_traces_endpoint "
        "collect_detailed_traces kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics "
        "enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose logging_config "
        "log_level log_config_file profiler_config",
        False,
    ),
    **_lacking("a request is admitted as soon as there is room for its tokens", "scheduler_reserve_full_isl"),
    **_lacking("a request is admitted as soon as there is room for its tokens", "watermark", 0),
    **_lacking("max_chunk_tokens bounds a prompt's part of a step", "long_prefill_token_threshold_adaptive", False),
    **_lacking("policies are named by order and preemption", "scheduler_cls prefill_schedule_interval"),
    **_lacking("each step's tokens are handed on", "stream_interval", 1),
    **_lacking("a server's bounds are tk serve's", "max_num_queued_reqs max_num_queued_tokens shutdown_timeout"),
    **_lacking(
        "tk serve watches its worker",
        "watchdog_config fault_tolerance_config enable_fault_tolerance weight_transfer_config tokens_only "
        "fail_on_environ_validation additional_config disable_async_output_proc",
        False,
        {},
    ),
}
"""vLLM's argument of LLM, EngineArgs and AsyncEngineArgs -> what it is here."""

_BEAMS_ASIDE = "a beam search looks at log-probabilities alone"

SAMPLING_NAMES: Mapping[str, OtherName] = {
    **_lacking("n completions are drawn and all are given", "best_of", 1),
    **_lacking("text is made wherever there is a tokenizer", "detokenize", True),
    **_lacking("logprobs are one dict a token", "flat_logprobs", False),
    **_lacking("logprobs are of the most likely tokens", "logprob_token_ids prompt_logprob_token_ids"),
    **_lacking("prompt_logprobs are of the whole prompt", "prompt_logprob_start"),
    **_lacking("the tokenizer's own spaces stand", "spaces_between_special_tokens", True),
    **_lacking("each step's tokens are handed on", "stream_interval", 1),
    **_lacking("parameters are immutable", "skip_clone output_text_buffer_length", False, 0),
    **_lacking("logits_processors take what they need with them", "extra_args", {}),
    **_lacking("such a request has prompt_logprobs, or a cache_salt of its own", "skip_reading_prefix_cache", False),
    **_lacking("thoughts are text like any", "thinking_token_budget", -1),
    **_lacking("stopping_criteria see the output", "repetition_detection"),
    **_lacking("the model's own choices are not returned", "routed_experts_prompt_start", 0),
    **_lacking("allowed_token_ids and logits_processors bound what is chosen", "trace_decode_token_ids"),
    **_lacking("outputs carry no mark", "watermarking", False),
    **_renamed("BeamSearchParams.length_penalty", "length_penalty"),
    **_renamed("AsyncLLM.generate here for cumulative outputs, AsyncLLM.add_request for deltas", "output_kind"),
    **_renamed("LLM.beam_search", "use_beam_search", False),
    **_renamed("structured_outputs", "guided_decoding"),
}
"""vLLM's field of SamplingParams -> what it is here."""

BEAM_NAMES: Mapping[str, OtherName] = {
    **_lacking(_BEAMS_ASIDE, "temperature", 0.0, 0),
    **_lacking(_BEAMS_ASIDE, "structured_outputs allowed_token_ids watermarking", False),
    **_lacking("a beam ends at its length or at an end-of-sequence token", "include_stop_str_in_output", False),
    **_lacking("special tokens have no text in a beam", "skip_special_tokens", True),
}
"""vLLM's field of BeamSearchParams -> what it is here."""

FORM_NAMES: Mapping[str, OtherName] = {
    **_lacking("white space is as llguidance has it", "disable_any_whitespace whitespace_pattern backend", False),
    **_lacking("a schema says what properties it has", "disable_additional_properties", False),
    **_renamed("grammar", "structural_tag"),
}
"""vLLM's field of StructuredOutputsParams -> what it is here."""

CALL_NAMES: Mapping[str, OtherName] = {
    **_lacking("no adapters are read", "lora_request prompt_adapter_request"),
    **_lacking("models read text alone", "mm_processor_kwargs", {}),
    **_lacking("the tokenizer in the model's directory serves, with its own settings", "tokenization_kwargs", {}),
    **_lacking("tools are not called", "tools", []),
    **_lacking("a message's content is text", "chat_template_content_format", "auto", "string"),
    **_lacking("as many searches run at once as max_num_seqs has rows for", "concurrency_limit"),
    **_lacking("a beam search shows no bar", "use_tqdm", False),
    **_lacking("nothing is traced", "trace_headers", {}),
    **_lacking("an engine serves one device", "data_parallel_rank"),
    **_lacking("prefixes are found by prefix_cache", "session_id kv_hints"),
    **_lacking("thoughts are text like any", "reasoning_ended reasoning_parser_kwargs", False, {}),
    **_lacking("the text of a prompt of token ids is not kept", "prompt_text"),
    **_lacking("a request arrives when it is made", "arrival_time"),
    **_renamed("SamplingParams.structured_outputs", "guided_options_request"),
    **_renamed("prompts=[{'prompt_token_ids': ids}]", "prompt_token_ids"),
    **_lacking("a request of the caller's is aborted by the caller's name", "internal", False),
}
"""vLLM's argument of `generate` and its like -> what it is here."""

PROMPT_NAMES: Mapping[str, OtherName] = {
    **_lacking("models read text alone", "multi_modal_data multi_modal_uuids media_io_kwargs mm_processor_kwargs", {}),
    **_lacking("models read text alone", "prompt_embeds token_type_ids encoder_prompt decoder_prompt"),
    **_lacking("the text of a prompt of token ids is not looked at", "prompt_token_offsets"),
    **_renamed("an argument of generate", "cache_salt"),
}
"""vLLM's key of a prompt mapping -> what it is here."""

_HAS_OPTIONS = "LLM(model, **options) or AsyncLLM(model, **options)"
_TEXT_ALONE = "text alone is generated"

METHOD_NAMES: Mapping[str, OtherName] = {
    **_renamed(_HAS_OPTIONS, "from_engine_args from_vllm_config"),
    **_renamed("AsyncLLM.add_request", "enqueue enqueue_chat wait_for_completion"),
    **_renamed("close()", "shutdown"),
    **_renamed("the property tokenizer", "set_tokenizer"),
    **_renamed("AsyncLLM.drain()", "wait_for_requests_to_drain"),
    **_renamed("AsyncLLM.num_unfinished", "get_num_unfinished_requests"),
    **_renamed("stats()", "get_metrics do_log_stats get_num_queued_tokens"),
    **_renamed("AsyncLLM.is_running", "check_health is_stopped errored should_keep_api_server_alive get_status"),
    **_renamed("AsyncLLM.add_death_callback", "dead_error"),
    **_renamed("tk profile", "start_profile stop_profile"),
    **_lacking(_TEXT_ALONE, "encode embed classify score reward get_supported_tasks"),
    **_lacking("models read text alone", "reset_mm_cache reset_encoder_cache"),
    **_lacking("a cache_salt keeps prefixes apart", "reset_prefix_cache"),
    **_lacking("an engine serves one device", "get_world_size collective_rpc apply_model scale_elastic_ep"),
    **_lacking("an engine serves one device", "get_external_elastic_ep_status handle_fault"),
    **_lacking(
        "weights and cache stay on the device until close()",
        "sleep wake_up is_sleeping release_kv_cache_memory checkpoint_prepare checkpoint_restore",
    ),
    **_lacking(
        "weights are loaded once; swap_kernels changes what runs over them",
        "init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update start_draft_weight_update "
        "update_weights finish_weight_update update_weight_version get_weight_version compute_weight_checksums",
    ),
    **_lacking("steps go on as long as there are requests", "pause_generation resume_generation is_paused"),
    **_lacking("tk serve bounds what is taken", "check_admission"),
    **_lacking("nothing is traced", "is_tracing_enabled"),
    **_lacking("the cache stays in its engine", "notify_kv_transfer_request_rejected get_kv_event_sources"),
    **_lacking("no adapters are read", "add_lora remove_lora list_loras pin_lora"),
}
"""vLLM's method or property of LLM and AsyncLLM -> what it is here."""


def drop_unused(given: Mapping[str, Any], others: Mapping[str, OtherName], what: str) -> dict[str, Any]:
    """`given` without vLLM's other names, which ask for nothing here.

    Raises:
        ArgumentTypeError: One asks for something. The message, which begins with `what`, has its counterpart.
    """
    left = {}
    for name, value in given.items():
        if name not in others:
            left[name] = value
        elif others[name].asks_for(value):
            raise ArgumentTypeError(f"{what} {name!r}: it {others[name].answer}")
    return left


def refuse_other_names(others: Mapping[str, OtherName]) -> Callable[[ClassT], ClassT]:
    """Makes a dataclass refuse a keyword that it lacks by what `others` say it is here, or the nearest there is."""

    def decorate(record: ClassT) -> ClassT:
        make: Callable[..., None] = vars(record)["__init__"]
        known = [one.name for one in fields(record)]
        lack = f"{record.__name__} has no field"

        @functools.wraps(make)
        def __init__(self: Any, *values: Any, **given: Any) -> None:
            if given.keys() - known:
                given = drop_unused(given, others, lack)
                for name in given.keys() - known:
                    hint = suggest_name(name, known)
                    raise ArgumentTypeError(f"{lack} {name!r}: there is {', '.join(known)}{hint}")
            make(self, *values, **given)

        record.__init__ = __init__  # type: ignore[misc]
        return record

    return decorate


def take_unused_arguments(method: Callable[ParametersT, ResultT]) -> Callable[ParametersT, ResultT]:
    """Makes a method take vLLM's other arguments where they ask for nothing, and refuse them where they do."""
    own = inspect.signature(method).parameters
    others = {name: one for name, one in CALL_NAMES.items() if name not in own}

    @functools.wraps(method)
    def call(*arguments: ParametersT.args, **named: ParametersT.kwargs) -> ResultT:
        if named.keys() & others.keys():
            return method(*arguments, **drop_unused(named, others, f"{method.__name__}() has no argument"))
        return method(*arguments, **named)

    return call
