"""Settings of an engine worker. Read once where the worker starts, then passed in."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class EngineSettings(BaseSettings):
    """`NCOMPASS_ENGINE_…`: the machine, its memory, and how a step is balanced."""

    model_config = SettingsConfigDict(env_prefix="NCOMPASS_ENGINE_", frozen=True)

    # the machine
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto` times both for half a second and takes bf16 only where it is native and faster."""
    quantization: Literal["none", "int8", "int8_weight_only"] = "none"
    """8-bit weights on the CPU, with or without 8-bit activations; docs/operating.md: what it costs."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """`fp8`: keys and values in 8-bit floats, so that the same memory holds twice the tokens of bf16."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Processes (on GPUs: as many GPUs) that share every model of this worker."""
    gpu_graphs: bool = True
    """On a CUDA GPU: decode steps as graphs, each planned while the one before it runs."""
    verify_fused: bool = False
    """Hold a fused model against transformers at load: takes the memory of both, and seconds. What
    runs through transformers' own modules is always held against them."""
    num_threads: int = Field(default=0, ge=0)
    """Compute threads on the CPU; 0 takes every core this process may use."""
    kernel_cache: Path = Path("var/kernels")
    """Where the compiled CPU kernels are kept; without a compiler plain torch computes."""
    tuning_cache: Path = Path("var/tuning")
    """Where `python -m kernels.benchmarks.tune` leaves the tiles that it measured on this GPU."""
    calibration_cache: Path = Path("var/calibration")
    """Where measured cost models are kept, by model, precision, device and library versions."""

    # memory
    memory_mib: int = Field(default=0, ge=0)
    """For the weights and KV caches of all models; 0 takes a share of what is free at the start."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    idle_unload_s: float = Field(default=0.0, ge=0)
    """A model that had no request for so long is unloaded, and comes back on the next; 0: never."""
    swap_after_s: float = Field(default=30.0, gt=0)
    """Where all loaded models are busy: how long another one's requests wait until one gives way."""
    kv_cache_mib: int = Field(default=0, ge=0)
    """KV cache of each model; 0 takes a share of the memory that is left when it is loaded."""
    kv_cache_share: float = Field(default=0.3, gt=0, lt=1)
    gpu_kv_cache_share: float = Field(default=0.9, gt=0, lt=1)
    """The same on a GPU, less what the largest step turns out to need."""
    kv_cache_mib_max: int = Field(default=6144, ge=1)
    """Upper limit of the automatic choice on the CPU, where others need the memory as well."""
    kv_cache_ahead_mib: int = Field(default=1024, ge=0)
    """Of the KV cache on the CPU: so much beyond what was used is brought into memory while idle."""
    max_context: int = Field(default=0, ge=0)
    """Longest prompt plus output; 0 is the model's own context length."""
    is_prefix_cache_on: bool = True

    # one step
    policy: Literal["ncompass", "vllm", "vllm-tuned", "sglang"] = "ncompass"
    """How steps are planned. The others are their engines' rules on our kernels, to compare with."""
    max_running: int = Field(default=256, ge=1)
    """Sequences that hold KV blocks at the same time."""
    kept_slots_share: float = Field(default=1 / 16, ge=0, lt=1)
    """Part of these that only tenants who run few of them may take: no flood takes the last one."""
    max_step_tokens: int = Field(default=2048, ge=64)
    """Bound of the activations; also the whole budget while there is no cost model."""
    step_s: float = Field(default=0.3, gt=0)
    """Seconds of prefill in one step while sequences decode; one that ends a prompt may end sooner.

    On a simulated 2-core CPU (2 x 600 requests of the small load at 90 % of capacity) 0.15 has a mean
    TTFT of 639 ms, a p99 of long prompts of 13.8 s and an ITL p99 of 182 ms; 0.25 has 570 ms, 10.4 s
    and 285 ms; 0.3 has 561 ms, 9.2 s and 332 ms.
    """
    idle_step_s: float = Field(default=0.3, gt=0)
    """Seconds of one step when nothing decodes; a new arrival waits at most this long."""
    gap_s: float = Field(default=0.4, gt=0)
    """Hard limit: longest predicted pause between two tokens of one stream."""
    pace_s: float = Field(default=0.1, ge=0)
    """Seconds per token that a stream may be slowed down to for others' prefills; 0: never."""
    ride_share: float = Field(default=0.6, ge=0)
    """Decodes join a prefill step that they make longer by less than this part of their own."""
    crowded_share: float = Field(default=0.85, ge=0, le=1)
    """Part of the KV cache in use from which no decode is put off: it holds memory meanwhile."""
    prefill_share: float = Field(default=0.7, gt=0, lt=1)
    """Part of a mixed step that prefill may take when the decodes alone take long."""
    paused_share: float = Field(default=0.25, gt=0, le=1)
    """Part of the KV cache that paused prefills may hold; more would evict reusable prefixes."""
    backfill_lock_s: float = Field(default=5.0, ge=0)
    """A request that has waited this long for memory is overtaken by no other."""

    is_speculation_on: bool = True
    """Guess what repeats earlier text and check it, exactly, where that is measured to pay."""

    # structured output
    structure_timeout_s: float = Field(default=0.8, gt=0)
    """What takes longer to compile is refused: no honest schema does, a hostile one may for ever."""

    # the queue
    take_window: int = Field(default=32, ge=1)
    """Requests held beyond the running ones: enough to choose from, few enough to share."""
    heartbeat_s: float = Field(default=0.5, gt=0)
    renew_s: float = Field(default=2.0, gt=0)
    """How often leases of held requests are renewed."""
    dead_node_check_s: float = Field(default=1.0, gt=0)
    """How often the nodes that wait for frames are checked to be alive."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """After SIGTERM: how long running requests may go on before they are given back."""
    redis_backoff_s_max: float = Field(default=2.0, gt=0)
