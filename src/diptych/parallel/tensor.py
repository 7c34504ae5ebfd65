"""Layers split over ranks: heads of every attention, inner width of every feed-forward, rows of every modulation.

Each rank has whole tokens and a part of the layer's width inside. Norms are per head, so that nothing is sent before
the last product of a layer; what the ranks make there is added up (Megatron-LM, arXiv:1909.08053), and the bias of that
product is on the first rank only. Heads need not divide: the first ranks have one more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from diptych.attention.collectives import start_all_gather, start_all_reduce
from diptych.attention.place import Group
from diptych.attention.plan import Span, spans, split
from diptych.model.layers import Attention, FeedForward, GeluProjection, Modulation
from diptych.model.loading import Cut
from diptych.model.transformer import Transformer
from diptych.parallel.weights import WeightSplit

Cuts = dict[str, list[Cut]]
"""Which part of each stored tensor this rank holds, by name; tensors left out are held whole."""


def split_model(model: Transformer, split: WeightSplit) -> Cuts:
    """Leave of a model on meta what this rank computes; the rest is put together as it runs."""
    return split_layers(model, split.tensor) | spread_modulations(model, split.spread, split.lanes)


def split_layers(model: Transformer, group: Group) -> Cuts:
    """Leave this rank's part of every attention and feed-forward in a model on meta, and add the parts up as it runs.

    All ranks of the group hold the same tokens, and have the same bits of every result.
    """
    cuts: Cuts = {}
    if group.size == 1:
        return cuts

    def reduce(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        return start_all_reduce(out, group).wait()

    for name, module in model.named_modules():
        if isinstance(module, Attention):
            heads = spans(split(module.to_query.out_features // module.head_dim, group.size))[group.rank]
            own = Span(heads.start * module.head_dim, heads.stop * module.head_dim)
            for layer in ("to_query", "to_key", "to_value"):
                _keep_rows(module, layer, own, cuts, name)
            _keep_columns(module, "out_layer", own, cuts, name, bias=group.rank == 0)
        elif isinstance(module, FeedForward):
            first = module.net[0]
            assert isinstance(first, GeluProjection)
            own = spans(split(first.proj.out_features, group.size))[group.rank]
            _keep_rows(first, "proj", own, cuts, f"{name}.net.0")
            _keep_columns(module.net, "2", own, cuts, f"{name}.net", bias=False)
        else:
            continue
        module.register_forward_hook(reduce)
    return cuts


def spread_modulations(model: Transformer, group: Group, lanes: tuple[int, ...] = (0,)) -> Cuts:
    """Leave this rank's rows of every modulation in a model on meta, and put the parts together as it runs.

    Their weights are a sixth of the model and their results a few kilobytes: so the results are sent, not the weights.
    lanes: which pass of guidance each rank of the group computes. Where these are two, each rank computes its rows for
    both.
    """
    cuts: Cuts = {}
    if group.size == 1:
        return cuts
    for name, module in model.named_modules():
        if isinstance(module, Modulation):
            sizes = split(module.out_layer.out_features, group.size)
            _keep_rows(module, "out_layer", spans(sizes)[group.rank], cuts, name)
            together = _Together(group, sizes, lanes)
            module.register_forward_pre_hook(together.inputs)
            module.register_forward_hook(together.outputs)
    return cuts


class _Together:
    """Rows of one product on several ranks, for the input of each lane."""

    def __init__(self, group: Group, sizes: tuple[int, ...], lanes: tuple[int, ...]) -> None:
        self.group, self.sizes = group, sizes
        distinct = sorted(set(lanes))
        self.speakers = [lanes.index(lane) for lane in distinct]
        self.own = distinct.index(lanes[group.rank]) if len(distinct) > 1 else 0

    def inputs(self, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        """This lane's (B, E) to those of all lanes (lanes * B, E)."""
        if len(self.speakers) == 1:
            return None
        of_ranks = start_all_gather(inputs[0], self.group).wait().unflatten(0, (self.group.size, -1))
        return (torch.cat([of_ranks[rank] for rank in self.speakers]),)

    def outputs(self, module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        """This rank's rows, (lanes * B, n), to all rows of this lane, (B, N)."""
        padded = pad(out, (0, max(self.sizes) - out.shape[1]))
        of_ranks = start_all_gather(padded, self.group).wait().unflatten(0, (self.group.size, -1)).unbind(0)
        rows = torch.cat([part[:, :size] for part, size in zip(of_ranks, self.sizes, strict=True)], dim=1)
        return rows.chunk(len(self.speakers))[self.own]


def _keep_rows(parent: nn.Module, name: str, own: Span, cuts: Cuts, path: str) -> None:
    linear = parent.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    _put(parent, name, _like(linear, linear.in_features, own.size, bias=linear.bias is not None))
    cuts[f"{path}.{name}.weight"] = [(0, *own)]
    if linear.bias is not None:
        cuts[f"{path}.{name}.bias"] = [(0, *own)]


def _keep_columns(parent: nn.Module, name: str, own: Span, cuts: Cuts, path: str, *, bias: bool) -> None:
    linear = parent.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    _put(parent, name, _like(linear, own.size, linear.out_features, bias=bias))
    cuts[f"{path}.{name}.weight"] = [(1, *own)]


def _like(linear: nn.Linear, inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    return type(linear)(inputs, outputs, bias=bias, device=linear.weight.device, dtype=linear.weight.dtype)


def _put(parent: nn.Module, name: str, linear: nn.Linear) -> None:
    parent._modules[name] = linear
