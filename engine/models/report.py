"""What loading a model found out: which tier runs it, why, and the error of every check."""

from dataclasses import dataclass

from kernels.linear import Quantization

FUSED = "fused"
QUALITY: dict[Quantization, str] = {
    "int8": "the default model ranks another token first in 5 of 100 places (KL 0.008)",
    "int8_weight_only": "the default model ranks another token first in 3 of 100 places (KL 0.004)",
}
"""What quantising loses against fp32, as `engine.benchmarks.quality` measures it."""


@dataclass(frozen=True, slots=True)
class Check:
    """Logits of one kind of step beside those of the original model."""

    name: str
    """`prefill`, `chunk`, `decode`, or `resume`: the output as a part of the prompt."""
    error: float
    """Largest difference in a row of logits, as a part of the row's own range."""
    limit: float

    @property
    def is_passed(self) -> bool:
        """False for NaN as well."""
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.name} {self.error:.1e}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One line for the log, the heartbeat and the operator's screen."""

    tier: str
    """`fused`, `attention hook` or `own cache` with the way it goes on from its past."""
    reason: str = ""
    """Why no faster tier runs it; empty for the first."""
    checks: tuple[Check, ...] = ()
    quantization: Quantization = "none"
    unpacked: str = ""
    """How the checkpoint's weights were packed, where they were."""
    has_chat_template: bool = True
    kv_cache: str = ""
    """How an 8-bit KV cache is scaled, where there is one."""
    num_ranks: int = 1
    """Processes that share it."""

    @property
    def is_fused(self) -> bool:
        """Whether our own modules compute it."""
        return self.tier == FUSED

    def __str__(self) -> str:
        parts = [self.tier]
        if self.num_ranks > 1:
            parts.append(f"shared by {self.num_ranks} ranks")
        if self.unpacked:
            parts.append(self.unpacked)
        if self.quantization != "none":
            parts.append(f"{self.quantization}: {QUALITY[self.quantization]}")
        if self.kv_cache:
            parts.append(self.kv_cache)
        if self.checks:
            limit = self.checks[0].limit
            errors = ", ".join(str(check) for check in self.checks)
            parts.append(f"differs from the original by {errors} (at most {limit:g})")
        if self.reason:
            parts.append(f"no faster tier, because {self.reason}")
        if not self.has_chat_template:
            parts.append("no chat template: it completes plain text, and refuses conversations")
        return "; ".join(parts)
