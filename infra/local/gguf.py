"""Reads a GGUF file once and writes what the engine loads: safetensors, tokenizer, configuration.

Transformers does the reading, in a process of its own (`python -m infra.local.gguf FILE TARGET`),
so that neither the supervisor nor the command line imports torch. The weights come out
dequantised to fp32, rounded as the file had rounded them.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from infra.errors import DiskFull, SetUpFailed
from infra.local.child import Progress, run_module, say

CONVERSION_FILE = "conversion.json"
"""What was converted from what; also the mark of a complete conversion."""
MAGIC = b"GGUF"
EXPANSION = 7
"""fp32 weights against 4-bit ones with their scales, and some room (measured: 5.5)."""


def convert(
    gguf: Path,
    target: Path,
    *,
    facts: Mapping[str, str],
    extra_files: Mapping[str, Path],
    progress: Progress,
) -> None:
    """Make `target` out of `gguf`; it appears whole, by one rename, or not at all.

    `extra_files` are copied in by name. Raises SetUpFailed with the reason, DiskFull.
    """
    with gguf.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise SetUpFailed(f"{gguf} could not be converted: it is not a GGUF file")
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    _check_room(gguf, folder)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    try:
        failed = f"{gguf.name} could not be converted"
        run_module("infra.local.gguf", [str(gguf), str(partial)], progress, failed=failed)
        for name, path in extra_files.items():
            shutil.copyfile(path, partial / name)
        (partial / CONVERSION_FILE).write_text(json.dumps(dict(facts), indent=2) + "\n")
        if target.exists():  # incomplete: it has no conversion.json
            shutil.rmtree(target)
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_room(gguf: Path, folder: Path) -> None:
    needed, free = EXPANSION * gguf.stat().st_size, shutil.disk_usage(folder).free
    if free < needed:
        raise DiskFull(
            f"disk full: the converted model needs {needed / 1e6:,.0f} MB in {folder},"
            f" {free / 1e6:,.0f} MB are free; make room, then run again",
            free_bytes=free,
        )


def _read_and_write(gguf: Path, target: Path) -> None:
    """The child's work."""
    say(f"reading {gguf.stat().st_size / 1e6:,.0f} MB of GGUF (98 MB take half a minute)")
    import transformers  # noqa: PLC0415 - only this child pays for it

    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype="float32",
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"writing {num_parameters * 4 / 1e6:,.0f} MB of safetensors")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    _read_and_write(Path(sys.argv[1]), Path(sys.argv[2]))
