"""`python -m engine.parallel.follower`: a rank but the first. Does what rank 0 says, and ends with it.

It knows no request and samples nothing. When rank 0 is gone, or has lost any other, it ends: the worker
starts all of them anew.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import torch

from engine.errors import RankLost
from engine.parallel.group import Meeting, RankGroup
from engine.parallel.sharded_decoder import ShardedDecoder, load_sharded
from engine.parallel.steps import Order, receive_step
from kernels.cpu import library
from kernels.kv_cache import PagedKVCache

EXIT_LOST = 4


def main() -> int:
    """Join, load, follow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--meeting", required=True, help="host:port of rank 0's store")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--dtype", required=True, choices=("float32", "bfloat16"))
    parser.add_argument("--device", required=True, choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kernels", type=Path, help="the compiled CPU kernels that rank 0 uses")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.kernels is not None:
        library.enable(arguments.kernels, arguments.threads)
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", arguments.rank)
        torch.cuda.set_device(device)
    host, _, port = arguments.meeting.rpartition(":")
    group = RankGroup.join(Meeting(host, int(port)), arguments.rank, arguments.size, device)
    decoder = load_sharded(arguments.path, getattr(torch, arguments.dtype), group)
    group.tell_ready()
    try:
        follow(decoder, group)
    except RankLost:
        return EXIT_LOST


def follow(decoder: ShardedDecoder, group: RankGroup) -> NoReturn:
    """Do what rank 0 says. Raises RankLost when it is gone."""
    kv_cache: PagedKVCache | None = None
    while True:
        header = group.receive_header()
        order = Order(header[0])
        if order is Order.CREATE_CACHE:
            kv_cache = None  # the old one first: there may be no room for both
            kv_cache = decoder.create_kv_cache(header[1])
            continue
        assert kv_cache is not None, "a step before there is a cache"
        if order is Order.COPY_BLOCK:
            kv_cache.copy_block(header[1], header[2])
            continue
        step = receive_step(group, header)
        with torch.inference_mode():
            decoder.forward(step.token_ids, kv_cache, step.metadata, step.rows)


if __name__ == "__main__":
    sys.exit(main())
