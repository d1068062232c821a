"""The modules and parameters of a layer at one time, to see later whether they are still the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_ADDRESS, _CONTIGUOUS = Tensor.data_ptr, Tensor.is_contiguous


def are_plain(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Does the memory of all tensors, on this device, hold their numbers as they read?"""
    return all(
        type(x) in (nn.Parameter, Tensor) and x.layout is torch.strided and x.device == device and not x.is_neg()
        for x in tensors
    )


class Snapshot:
    """What views of a layer's parameters depend on: which modules it has, and where their parameters lie.

    The numbers in that memory may change, since views show the new ones. What replaces a module or a parameter, gives
    one other memory, or hooks a module in the layer is noticed by :meth:`holds`.
    """

    def __init__(self, layer: nn.Module) -> None:
        modules = list(layer.modules())
        self.children = layer.__dict__, dict(layer._modules)
        self.parts = [(m, type(m), m.__dict__, dict(m._modules)) for m in modules[1:]]
        self.places = [(m.__dict__, name, p) for m in modules for name, p in m._parameters.items()]
        self.tensors = [p for _, _, p in self.places if p is not None]
        self.addresses, self.sizes = list(map(_ADDRESS, self.tensors)), [p.nbytes for p in self.tensors]

    def holds(self, layer: nn.Module) -> bool:
        """Every decode step asks this, so it reads what nn.Module keeps: attributes of modules take ten times as long,
        and calls for each module as long as the rest. It looks at the same things as :func:`may_bypass`, but for
        hooks of backward, which there is none of."""
        kept, children = self.children
        if kept is not layer.__dict__ or kept["_modules"] != children:  # torch copies it for replicas of a layer
            return False
        for module, kind, kept, children in self.parts:
            if type(module) is not kind or kept["_modules"] != children or "forward" in kept:
                return False
            if kept["_forward_hooks"] or kept["_forward_pre_hooks"] or kept.get("_compiled_call_impl") is not None:
                return False
        try:
            for kept, name, parameter in self.places:
                if kept["_parameters"][name] is not parameter:
                    return False
        except KeyError:
            return False
        tensors = self.tensors
        return (
            list(map(_ADDRESS, tensors)) == self.addresses
            and [p.nbytes for p in tensors] == self.sizes
            and all(map(_CONTIGUOUS, tensors))
        )
