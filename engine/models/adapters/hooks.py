"""Adapters of transformers' own modules: a hook behind each projection adds what belongs to its rows.

y[rows] += up (down x[rows])
"""

from typing import Any

import torch
from torch.nn.functional import linear

from engine.errors import ModelRefused
from engine.models.adapters.rows import Groups
from engine.models.adapters.weights import Adapter, LowRank, refuse_misfit
from engine.models.original import Original

ALL_ROWS = slice(None)


class HookedAdapters:
    """The adapters of one original, by number. `tokens` and `samples` say what a forward is of."""

    def __init__(self, original: Original, *, is_head_sampled: bool) -> None:
        self._original = original
        self._head = original.get_output_embeddings() if is_head_sampled else None
        """It sees the rows whose logits are wanted; every other module sees all tokens."""
        self._modules: dict[str, torch.nn.Module] = dict(original.named_modules())
        self._hooked: set[str] = set()
        self._by_number: dict[int, Adapter] = {}
        self.tokens: Groups = ()
        self.samples: Groups = ()
        self.only = 0
        """The adapter of all rows, where a forward is of one sequence."""

    def attach(self, number: int, adapter: Adapter) -> None:
        """Hook an adapter's modules under a number that was never used. Raises ModelRefused."""
        weights = self._original.parameters()
        like = next(weight for weight in weights if weight.is_floating_point())
        for path, low_rank in adapter.items():
            refuse_misfit(path, low_rank, self._shape(path))
        moved = {
            path: LowRank(*(x.to(like.dtype).to(like.device) for x in (each.down, each.up)))
            for path, each in adapter.items()
        }
        for path in moved.keys() - self._hooked:
            self._modules[path].register_forward_hook(self._hook(path))
            self._hooked.add(path)
        self._by_number[number] = moved

    def detach(self, number: int) -> None:
        """Forget an adapter; its hooks stay, and add nothing."""
        self._by_number.pop(number, None)

    def refuse_unseen(self, adapter: Adapter, calls: dict[str, list[int]], num_tokens: int) -> None:
        """Raise ModelRefused where a module did not see all of `num_tokens` tokens in one call.

        `calls`: rows of each call in one forward. An expert sees the tokens that were sent to it, and
        whose they are is not known there.
        """
        for path in adapter:
            wanted = 1 if self._modules[path] is self._head else num_tokens
            if calls.get(path, []) != [wanted]:
                raise ModelRefused(
                    f"the adapter changes {path}, which does not see every token: not supported"
                )

    def watch(self, adapter: Adapter, calls: dict[str, list[int]]) -> list[Any]:
        """Note the rows of every call of the adapter's modules, until the handles are removed."""

        def note(path: str) -> Any:
            def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                calls.setdefault(path, []).append(inputs[0].shape[:-1].numel())

            return hook

        return [self._modules[path].register_forward_pre_hook(note(path)) for path in adapter]

    def _shape(self, path: str) -> tuple[int, int] | None:
        """(out, in) of a projection; None for what is none."""
        weight = getattr(self._modules.get(path), "weight", None)
        kind = type(self._modules.get(path)).__name__
        if kind not in ("Linear", "Conv1D") or weight is None:
            return None
        rows, columns = weight.shape
        return (columns, rows) if kind == "Conv1D" else (rows, columns)

    def _hook(self, path: str) -> Any:
        is_head = self._modules[path] is self._head

        def hook(
            module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
        ) -> torch.Tensor:
            if self.only:
                return output + self._product(path, self.only, inputs[0])
            x, out = inputs[0].flatten(0, -2), output.flatten(0, -2)
            for number, rows in self.samples if is_head else self.tokens:
                if path in self._by_number[number]:
                    out = out.index_add(0, rows, self._product(path, number, x[rows]))
            return out.view(output.shape)

        return hook

    def _product(self, path: str, number: int, x: torch.Tensor) -> torch.Tensor:
        low_rank = self._by_number[number].get(path)
        if low_rank is None:
            return x.new_zeros(1)
        return linear(linear(x, low_rank.down), low_rank.up)
