"""One run of `vllm bench serve` against a server, in a process of its own."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.peers.cells import BURST, Cell, CellKey
from tests.bench.peers.environment import ENVIRONMENT
from tests.bench.peers.processes import MachineTime, children_cpu_s, tree_cpu_s
from tests.bench.peers.servers import Server
from tests.bench.peers.traces import make_requests, write_jsonl

COUNT_TOLERANCE = 0.1
SETTLE_S = 1.0
"""Between two runs: the last one's connections close and its books are settled."""


@dataclass(frozen=True, slots=True)
class Client:
    """The load generator of vLLM, run from its environment."""

    environment: Path
    tokenizer: Path
    words: list[str]

    def drive(self, key: CellKey, server: Server, facts: Mapping[str, Any]) -> Cell:
        """Send one cell's requests and read what came back. Raises SystemExit when it fails."""
        time.sleep(SETTLE_S)
        with tempfile.TemporaryDirectory(prefix="nc-peers-") as directory:
            folder = Path(directory)
            requests = make_requests(key.trace, key.content, key.num_requests, self.words)
            write_jsonl(folder / "trace.jsonl", requests)
            usage = _Usage.begin(server.pid)
            ran = subprocess.run(
                self._command(key, server, folder),
                env=os.environ | ENVIRONMENT | {"OPENAI_API_KEY": server.api_key},
                capture_output=True,
                text=True,
                timeout=600 + 20 * key.num_requests,
                check=False,
            )
            result = folder / "result.json"
            if ran.returncode != 0 or not result.exists():
                raise SystemExit(
                    f"vllm bench serve failed\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
                )
            lengths = [request.output_tokens for request in requests]
            return usage.cell(key, json.loads(result.read_text()), lengths, facts)

    def _command(self, key: CellKey, server: Server, folder: Path) -> list[str]:
        command = [str(self.environment / "bin" / "vllm"), "bench", "serve"]
        command += ["--backend", "openai", "--base-url", server.origin]
        command += ["--endpoint", "/v1/completions", "--model", server.model]
        command += ["--tokenizer", str(self.tokenizer), "--dataset-name", "custom"]
        command += ["--dataset-path", str(folder / "trace.jsonl"), "--custom-output-len", "-1"]
        command += ["--skip-chat-template", "--disable-shuffle", "--no-oversample"]
        command += ["--num-prompts", str(key.num_requests), "--seed", str(key.seed)]
        command += ["--request-rate", "inf" if key.rate == BURST else str(key.rate)]
        command += ["--temperature", "0", "--ignore-eos", "--disable-tqdm"]
        command += ["--save-result", "--save-detailed", "--result-dir", str(folder)]
        return [*command, "--result-filename", "result.json"]


@dataclass(frozen=True, slots=True)
class _Usage:
    """CPU time at the start of a run."""

    server_pid: int
    started_s: float
    machine: MachineTime
    engine_s: float
    client_s: float

    @classmethod
    def begin(cls, server_pid: int) -> "_Usage":
        return cls(
            server_pid,
            time.monotonic(),
            MachineTime.now(),
            tree_cpu_s(server_pid),
            children_cpu_s(),
        )

    def cell(
        self,
        key: CellKey,
        result: dict[str, Any],
        lengths: list[int],
        facts: Mapping[str, Any],
    ) -> Cell:
        """What `vllm bench serve` saved, with the CPU time that was spent meanwhile.

        `lengths`: the output tokens that were asked for, which `ignore_eos` makes the ones that
        came (an engine without a usage event of its own has the client count its text again).
        """
        seconds = time.monotonic() - self.started_s
        machine = MachineTime.now()
        engine_s = tree_cpu_s(self.server_pid) - self.engine_s
        client_s = children_cpu_s() - self.client_s
        stolen_s = machine.stolen_s - self.machine.stolen_s
        others_s = machine.busy_s - self.machine.busy_s - engine_s - client_s
        ok = [index for index, error in enumerate(result["errors"]) if not error]
        asked = sum(lengths[index] for index in ok)
        if abs(result["total_output_tokens"] - asked) > COUNT_TOLERANCE * asked:
            raise SystemExit(
                f"{key.contestant} sent {result['total_output_tokens']} tokens, {asked} were asked for"
            )
        return Cell(
            key=key,
            num_failed=result["failed"],
            duration_s=result["duration"],
            input_tokens=result["total_input_tokens"],
            output_tokens=asked,
            ttft_s=[round(result["ttfts"][index], 6) for index in ok],
            tpot_s=[
                round(sum(result["itls"][index]) / max(1, lengths[index] - 1), 6) for index in ok
            ],
            other_cores=round((max(0.0, others_s) + stolen_s) / seconds, 3),
            engine_cores=round(engine_s / seconds, 3),
            client_cores=round(client_s / seconds, 3),
            facts=dict(facts),
        )
