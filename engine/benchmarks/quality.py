"""What quantising loses: the model against itself in fp32, on a text that ships with a package.

    python -m engine.benchmarks.quality --path var/models/… [--quantization int8]

Every position of the text is predicted from the true tokens before it. KL is the mean of
KL(fp32 | quantised) in nats; top-1 agreement is the share of positions with the same likeliest token.
"""

import argparse
import json
from importlib import metadata
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.models.decoder import Decoder, load_decoder
from engine.settings import EngineSettings
from kernels.attention_metadata import AttentionMetadata
from kernels.cpu import library
from kernels.linear import Quantization

PACKAGE = "celery"
"""Its README: 5,500 tokens of English prose about software."""
WINDOW = 512
NUM_WINDOWS = 4


def main() -> None:
    """Compare and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--quantization", choices=("none", "int8", "int8_weight_only"))
    arguments = parser.parse_args()
    built = library.build(EngineSettings().kernel_cache)
    if built.path is None:
        raise SystemExit(built.reason)
    library.enable(built.path, num_threads=2)
    torch.set_num_threads(1)
    windows = text_windows(arguments.path)
    figures: dict[str, float] = {}
    chosen: list[Quantization] = ["int8", "int8_weight_only"]
    if arguments.quantization:
        chosen = [arguments.quantization]
    for quantization in chosen:
        kl, agreement = compare(arguments.path, windows, quantization)
        print(f"{quantization:18} KL {kl:.5f}, top-1 agreement {agreement:.4f}")
        figures |= {f"kl_{quantization}": kl, f"top1_agreement_{quantization}": agreement}
    print(json.dumps(figures))


def text_windows(path: Path) -> list[torch.Tensor]:
    """Token ids of the text, in windows."""
    text = metadata.metadata(PACKAGE)["Description"]
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids
    tokens = torch.tensor(ids[: WINDOW * NUM_WINDOWS])
    return [tokens[first : first + WINDOW] for first in range(0, len(tokens), WINDOW)]


@torch.inference_mode()
def compare(
    path: Path, windows: list[torch.Tensor], quantization: Quantization
) -> tuple[float, float]:
    """(KL, top-1 agreement) over all windows."""
    device = torch.device("cpu")
    exact = load_decoder(path, torch.float32, device)
    quantised = load_decoder(path, torch.bfloat16, device, quantization)
    divergence, num_agreeing, num_positions = 0.0, 0, 0
    for tokens in windows:
        expected = _logits(exact, tokens).log_softmax(dim=-1)
        found = _logits(quantised, tokens).log_softmax(dim=-1)
        divergence += float((expected.exp() * (expected - found)).sum())
        num_agreeing += int((expected.argmax(-1) == found.argmax(-1)).sum())
        num_positions += len(tokens)
    return divergence / num_positions, num_agreeing / num_positions


def _logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    num_blocks = -(-len(tokens) // 64)
    metadata_of_step = AttentionMetadata.build(
        query_lens=[len(tokens)],
        context_lens=[len(tokens)],
        block_tables=[list(range(num_blocks))],
    )
    kv_cache = model.create_kv_cache(num_blocks)
    return model.forward(tokens, kv_cache, metadata_of_step, torch.arange(len(tokens)))


if __name__ == "__main__":
    main()
