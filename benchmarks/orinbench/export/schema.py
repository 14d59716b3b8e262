"""The fields of a record, in order: llama-bench's by the same names, then ours.

`SCHEMA_VERSION` rises when a field changes its meaning or goes; a new field does not raise it.
"""

from typing import Any

SCHEMA_VERSION = 1
#: A row: the fields below, by name.
Record = dict[str, Any]

_SQL_TYPES = {"I": "INTEGER", "R": "REAL", "T": "TEXT"}


def _fields(table: str) -> dict[str, str]:
    """Return name -> SQL type of a table of `name:T` words."""
    return {name: _SQL_TYPES[kind] for name, kind in (word.split(":") for word in table.split())}


# llama.cpp 0.5.0, tools/llama-bench: test::get_fields(), and the two that its JSON adds.
LLAMA_FIELDS = _fields("""
    build_commit:T build_number:I cpu_info:T gpu_info:T backends:T model_filename:T model_type:T
    model_size:I model_n_params:I n_batch:I n_ubatch:I n_threads:I cpu_mask:T cpu_strict:I
    poll:I type_k:T type_v:T n_gpu_layers:I n_cpu_moe:I split_mode:T main_gpu:I no_kv_offload:I
    flash_attn:I devices:T tensor_split:T tensor_buft_overrides:T load_mode:T lazy_mode:T
    use_mmap:I embeddings:I no_op_offload:I no_host:I repack:I fit_target:I fit_min_ctx:I
    n_prompt:I n_gen:I n_depth:I test_time:T avg_ns:I stddev_ns:I avg_ts:R stddev_ts:R
    samples_ns:T samples_ts:T
""")
OUR_FIELDS = _fields("""
    schema_version:I benchmark:T unit:T work:R peak_percent:R extra:T
    backend:T software:T device:T device_name:T driver:T arch:T renderer:T
    test:T error:T partial:I synthetic:I seed:I repetitions:I rounds:T processes:T ignored_flags:T
    median_ts:R p5_ts:R p95_ts:R ci95_low_ts:R ci95_high_ts:R discarded_ns:T warnings:T
    comparisons:T token_read_bytes:I token_read_by_tensor:T copy_bandwidth_gb_s:R
    copy_bandwidth_samples_gb_s:T roofline_ts:R roofline_percent:R kernels_per_token:I
    launches_per_token:I peak_device_bytes:I peak_rss_bytes:I ttft_prompt:I ttft_cold_s:R
    ttft_warm_s:R ttft_warm_samples_s:T load_s:R cold_compile_s:R cold_kernels_compiled:I
    warm_up_s:R warm_up_compile_s:R check:T excluded:T decode_path:T included:T joules_per_token:R
    tokens_per_joule:R energy:T clocks:T board_before:T board_after:T environment:T
""")
FIELDS = {**LLAMA_FIELDS, **OUR_FIELDS}
