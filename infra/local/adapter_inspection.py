"""What is known of an adapter before it is loaded: its base, its licence, its size."""

import hashlib
from dataclasses import replace
from pathlib import Path

from engine.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config
from engine.catalog import HostedModel
from engine.errors import ModelRefused
from engine.memory.footprint import read_adapter_footprint, told_bytes
from infra.local.inspection import BYTES_PER_ELEMENT, Inspection, read_licence
from infra.local.model_files import read_model_facts


def inspect_adapter(directory: Path, licence: str, base: HostedModel, dtype: str) -> Inspection:
    """Everything that can be said before it joins `base`. Raises ModelRefused with the reason."""
    if base.base is not None:
        raise ModelRefused(f"{base.name} is an adapter itself: name its base, {base.base}")
    if base.kind != "generate":
        raise ModelRefused(f"{base.name} answers with vectors, and adapters with text")
    footprint = read_adapter_footprint(directory, BYTES_PER_ELEMENT[dtype])
    fit = (
        f"an adapter of {base.name}, {told_bytes(footprint.weight_bytes)} in {dtype} beside it;"
        " it shares its base's weights, memory and steps"
    )
    facts = read_model_facts(Path(base.path))
    facts = replace(facts, revision=_fingerprint(directory), weight_bytes=footprint.weight_bytes)
    return Inspection(facts, footprint, licence or read_licence(directory), fit)


def base_of(directory: Path, named: str) -> str:
    """The public name of its base: as the operator says, else as the adapter calls it."""
    base = named or read_adapter_config(directory).base
    if not base:
        raise ModelRefused("the adapter does not say which model it is for: name it with --base")
    return base


def _fingerprint(directory: Path) -> str:
    """Of all that it is: adapters of one base have the same shapes, and often the same size."""
    digest = hashlib.sha256((directory / ADAPTER_CONFIG).read_bytes())
    with (directory / ADAPTER_WEIGHTS).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:12]
