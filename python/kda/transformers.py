"""Puts the layer into models of transformers, which is not imported: their layers are recognised by name."""

from __future__ import annotations

from ._needs_torch import new_torch  # noqa: F401

# isort: split
from functools import partial
from typing import Any

from torch import Tensor, nn

from .layer.checkpoints import find_form, from_published, published_names
from .nn import KimiDeltaAttention

# The KDA layers of transformers' models, and the model_type of each.
LAYERS = {
    "KimiLinearDeltaAttention": "kimi_linear",
    "Glm5NextTextLinearAttention": "glm5_next",
    "BailingHybridDeltaAttention": "bailing_hybrid",
}


class LayerInTransformers(KimiDeltaAttention):
    """The layer, called as transformers calls its own."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, cache: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        kwargs.pop("input_ids", None)  # GLM-5 passes them to all its layers
        o, _, _ = super().forward(hidden_states, attention_mask, cache, **kwargs)
        return o


def replace_layers(model: nn.Module, *, keep_names: bool = True) -> int:
    """Puts :class:`kda.nn.KimiDeltaAttention` in the place of every KDA layer of a transformers model, with its
    weights: Kimi-Linear, GLM-5 and Ling-3.

    Do this after loading and before an optimizer, FSDP or a compiler sees the parameters.

    Args:
        model: changed in place.
        keep_names: ``state_dict`` of the model keeps the names and shapes of before, so ``save_pretrained`` writes the
            same files. What adapters, parametrizations and others add keeps its names. With False the new layers have
            their own names, as they must for state dicts of FSDP2, whose names are those of the parameters. FSDP1 has
            these in either case.

    Returns:
        The number of layers that were replaced.

    Raises:
        ValueError: the model has no such layer, or one that this layer cannot be; nothing was replaced then.
    """
    places = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer).__name__ in LAYERS
    ]
    if not places:
        raise ValueError(f"model: expected one with layers of {', '.join(LAYERS)}, got {type(model).__name__}")
    for parent, name, layer in [(parent, name, _like(layer, keep_names)) for parent, name, layer in places]:
        setattr(parent, name, layer)
    return len(places)


def _like(theirs: Any, keep_names: bool) -> LayerInTransformers:
    """The layer with the weights of transformers' layer. It moves those of projections and convolutions, except in
    memory that others rely on, such as a mapped file."""
    if theirs.activation not in ("silu", "swish"):
        raise ValueError(f"model: expected silu as activation of its KDA layers, got {theirs.activation}")
    if hasattr(theirs, "_hf_hook"):
        raise ValueError("model: expected one without hooks of accelerate (device_map), got some")
    model_type, gate = LAYERS[type(theirs).__name__], theirs.forget_gate
    lower_bound = getattr(gate, "safe_gate_lower_bound", None)
    if getattr(gate, "safe_gate", False):
        lower_bound = gate.lower_bound
    layer = LayerInTransformers(
        hidden_size=theirs.hidden_size,
        num_heads=theirs.num_heads,
        head_dim=theirs.head_dim,
        conv_size=theirs.conv_kernel_size,
        lower_bound=lower_bound,
        layer_idx=theirs.layer_idx,
        norm_eps=theirs.o_norm.variance_epsilon,
        use_full_rank_gate=hasattr(theirs, "g_proj"),
        use_full_rank_decay=hasattr(gate, "f_proj"),
        gate_bias=False,
        device="meta",
    )
    parameters = from_published(dict(theirs.named_parameters()))
    layer.load_state_dict({name: x.detach() for name, x in parameters.items()}, assign=True)
    layer.pack_weights()
    for name, x in layer.named_parameters():
        x.requires_grad_(parameters[name].requires_grad)
    layer.train(theirs.training)
    if keep_names:
        layer.register_state_dict_post_hook(partial(_rename, model_type))
    return layer


def _rename(model_type: str, _: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    if "_fsdp_wrapped_module." in prefix:  # FSDP1 finds its parameters by their names
        return
    own = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    own = {name[len(prefix) :]: x for name, x in own.items()}
    published = published_names(own, find_form(model_type, in_transformers=True), in_transformers=True)
    state_dict.update({prefix + name: x for name, x in published.items()})
