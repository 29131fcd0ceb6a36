"""Models of a hub: looked at before anything large is fetched, and whole in our folder or not there.

First what describes a model (configuration, tokenizer, card) and the headers of its weights, which say
whether it may be hosted and fits; then the weights. They come into a hidden folder that gets its name
when it is complete: a download that breaks off goes on there when it is asked for again.
"""

import fnmatch
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from engine.errors import ModelRefused
from engine.memory.footprint import StoredWeights, told_bytes
from infra.local.child import Progress
from infra.local.default_model import directory_name
from infra.local.model_files import read_config
from infra.local.pickles import PICKLED, convert, has_only_pickles

HUB_NAME = re.compile(r"[\w.-]*\w[\w.-]*/[\w.-]*\w[\w.-]*")
DESCRIPTIONS = ("*.json", "*.jinja", "LICENSE*", "LICENCE*", "README.md")
"""No pickles and no code: only what is read as data."""
WEIGHTS = ("*.safetensors",)
UNUSED = ("consolidated*", "original/*", "onnx/*", "openvino/*")
"""The same weights in another layout."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
DESCRIPTION_BYTES_MAX = 200_000_000
REVISION_LENGTH = 8
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Which hub, and as whom. None: as its own client is configured."""

    endpoint: str | None = None
    token: str | None = None
    allows_pickles: bool = False
    """Weights may be read from pickles where there are no others."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of a hub whose descriptions are here, and whose weights may not be yet."""

    name: str
    access: HubAccess
    revision: str
    """The commit: whatever is pushed meanwhile, all files are of one."""
    files: Mapping[str, int]
    """Bytes of everything that is wanted, by path."""
    stored: StoredWeights
    """What the headers of its weights say."""
    directory: Path
    """Where its descriptions are."""
    target: Path
    """Where all of it will be."""


def is_hub_name(source: str) -> bool:
    """Whether `source` can be a hub's `owner/name`, and is nothing on this machine."""
    return HUB_NAME.fullmatch(source) is not None and not Path(source).exists()


def partial_directory(models_directory: Path, name: str) -> Path:
    """Where an unfinished download of `name` is."""
    return models_directory.resolve() / f".partial-{directory_name(name)}"


def describe(name: str, models_directory: Path, access: HubAccess, progress: Progress) -> HubModel:
    """Fetch what describes the model, and read its weights' headers. Raises ModelRefused."""
    progress(f"asking the hub for {name}")
    api = HfApi(endpoint=access.endpoint, token=access.token)
    with _told_as_refusal(name):
        info = api.model_info(name, files_metadata=True)
    revision = str(info.sha)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    files = _wanted(name, sizes, allows_pickles=access.allows_pickles)
    descriptions = [path for path in files if not _matches(path, (*WEIGHTS, PICKLED))]
    size = sum(files[path] for path in descriptions)
    if size > DESCRIPTION_BYTES_MAX:
        raise ModelRefused(f"{name} has {told_bytes(size)} of descriptions: that is no model")
    folder = f"{directory_name(name)}@{revision[:REVISION_LENGTH]}"
    target = models_directory.resolve() / folder
    directory = target if target.is_dir() else partial_directory(models_directory, name)
    if directory != target:
        with _told_as_refusal(name):
            _fetch(name, access, revision, directory, descriptions)
    with _told_as_refusal(name):
        elements: dict[str, int] = {}
        for path in (path for path in sorted(files) if _matches(path, (PICKLED,))):
            elements[path] = files[path] // _bytes_per_pickled(directory)
        for path in sorted(filter(_is_weight, files)):
            header = api.parse_safetensors_file_metadata(name, path, revision=revision)
            elements |= {key: tensor.parameter_count for key, tensor in header.tensors.items()}
    weights = {path: files[path] for path in files.keys() - set(descriptions)}
    stored = StoredWeights(weights, elements)
    return HubModel(name, access, revision, files, stored, directory, target)


def fetch_weights(model: HubModel, progress: Progress) -> Path:
    """Fetch the rest, telling how far it is; the whole checkpoint's folder. Raises ModelRefused."""
    if model.directory == model.target:
        progress(f"{model.name} is here already")
        return model.target
    total = sum(model.files.values())
    free = shutil.disk_usage(model.directory).free + _bytes_in(model.directory)
    if total > free:
        raise ModelRefused(
            f"{model.name} takes {told_bytes(total)} on disk, {told_bytes(free)} are free"
        )
    began_s, there = time.monotonic(), _bytes_in(model.directory)
    with _told_as_refusal(model.name), ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(
            _fetch, model.name, model.access, model.revision, model.directory, list(model.files)
        )
        while not _is_over(fetching):
            here = _bytes_in(model.directory)
            rate = max(0, here - there) / max(POLL_S, time.monotonic() - began_s)
            progress(
                f"{told_bytes(here)} of {told_bytes(total)} ({min(100, 100 * here // total)} %),"
                f" {told_bytes(rate)}/s"
            )
    for path, size in model.files.items():
        if (model.directory / path).stat().st_size != size:
            raise ModelRefused(f"{model.name} could not be downloaded: {path} came incomplete")
    if has_only_pickles(model.directory):
        convert(model.directory, model.directory, progress)
        for pickled in model.directory.glob(PICKLED):
            pickled.unlink()
    shutil.rmtree(model.directory / ".cache", ignore_errors=True)
    model.directory.rename(model.target)
    return model.target


def _wanted(name: str, sizes: Mapping[str, int], *, allows_pickles: bool) -> dict[str, int]:
    """Everything that the engine reads. Raises ModelRefused where it would read no weights."""
    files = {
        path: size
        for path, size in sizes.items()
        if _matches(path, (*DESCRIPTIONS, *WEIGHTS))
        and not _matches(path, UNUSED)
        and ".." not in PurePosixPath(path).parts
        and not path.startswith("/")
    }
    if any(_is_weight(path) for path in files):
        return files
    pickled = {path: size for path, size in sizes.items() if _matches(path, (PICKLED,))}
    if pickled and allows_pickles:
        return files | pickled
    if any(_matches(path, PICKLES) for path in sizes):
        raise ModelRefused(
            f"{name} has its weights as pickles only, and a pickle can run code:"
            " allow it with --allow-pickles, and they are read as tensors, once, and written anew"
        )
    if any(path.endswith(".gguf") for path in sizes):
        raise ModelRefused(
            f"{name} has GGUF files only: download one of them and add that file by its path"
        )
    raise ModelRefused(f"{name} has no safetensors weights")


def _is_weight(path: str) -> bool:
    return "/" not in path and _matches(path, WEIGHTS)


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _fetch(name: str, access: HubAccess, revision: str, directory: Path, paths: list[str]) -> None:
    disable_progress_bars()  # they would be drawn over the supervisor's own lines
    snapshot_download(
        name,
        revision=revision,
        local_dir=directory,
        allow_patterns=[_escaped(path) for path in paths],
        endpoint=access.endpoint,
        token=access.token,
    )


def _bytes_per_pickled(directory: Path) -> int:
    """How much a weight takes in a pickle, as the configuration has it: its header tells nothing."""
    config = read_config(directory)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return 2 if stored.endswith("16") else 4


def _escaped(path: str) -> str:
    """A pattern that only this path matches."""
    return re.sub(r"([*?[])", r"[\1]", path)


def _is_over(fetching: Future[None]) -> bool:
    try:
        fetching.result(timeout=POLL_S)
    except FutureTimeout:
        if not fetching.done():
            return False
        raise
    return True


def _bytes_in(directory: Path) -> int:
    """Bytes of all files, the unfinished ones included; files may come and go meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


@contextmanager
def _told_as_refusal(name: str) -> Iterator[None]:
    """Whatever the hub's client raises, and its HTTP library behind it, in one sentence."""
    try:
        yield
    except ModelRefused:
        raise
    except GatedRepoError as fault:
        raise ModelRefused(
            f"{name} is gated: accept its terms on the hub, and set HF_TOKEN to a token that may read it"
        ) from fault
    except RepositoryNotFoundError as fault:
        raise ModelRefused(
            f"the hub has no {name}, or shows it only to others than HF_TOKEN's owner"
        ) from fault
    except Exception as fault:  # the client lets its HTTP library's own faults through
        reason = (str(fault).strip() or repr(fault)).splitlines()[0]
        raise ModelRefused(f"{name} could not be downloaded: {reason}") from fault
