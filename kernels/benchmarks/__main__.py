"""`make bench-kernels`: every benchmark on a GPU, beside its limits, its targets and its peers.

Without a GPU the static model's predictions for the product's shapes, and a line that says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from kernels.benchmarks import elementwise, linear, paged_attention, sampling
from kernels.benchmarks.limits import DTYPES, measured_setting
from kernels.benchmarks.predictions import print_predictions

BENCHMARKS = (paged_attention, elementwise, linear, sampling)


def main() -> int:
    """Print it all; 1 where a target is missed on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--json", type=Path, help="write what was measured here as well")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print_predictions()
        return 0
    setting = measured_setting(torch.device("cuda"), DTYPES[arguments.dtype])
    for benchmark in BENCHMARKS:
        benchmark.measure_all(setting)
    if arguments.json is not None:
        figures = {"limits": asdict(setting.limits), "rows": [asdict(row) for row in setting.rows]}
        arguments.json.write_text(json.dumps(figures, indent=2))
    num_missed = sum(row.is_missed for row in setting.rows)
    print(f"launches={len(setting.rows)} targets_missed={num_missed}")
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
