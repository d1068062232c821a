"""Translates the KDA layers of published checkpoints: their names and shapes to those of :mod:`kda.nn`, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The names in checkpoints of the two maps of a low-rank projection.
LOW_RANK = {"f_a_proj": "f_proj.0", "f_b_proj": "f_proj.1", "g_a_proj": "g_proj.0", "g_b_proj": "g_proj.1"}
_PUBLISHED_MODULES = {own: published for published, own in LOW_RANK.items()}
# What transformers keeps in a module forget_gate.
IN_FORGET_GATE = ("A_log", "dt_bias", "f_proj.weight", "f_a_proj.weight", "f_b_proj.weight")
CONVOLUTIONS = [f"{x}_conv1d.weight" for x in "qkv"]
CONVOLUTION_BIASES = [f"{x}_conv1d.bias" for x in "qkv"]
ALWAYS = ["A_log", "dt_bias", "o_norm.weight", *(f"{x}_proj.weight" for x in "qkvbo")]
GATE_BIASES = ("g_proj.bias", "g_proj.1.bias")


class Form(NamedTuple):
    """How the checkpoints of a model differ from others. ``A_log`` is ``[1, 1, H, 1]``, or flat and padded with zeros
    to a multiple of ``pad``."""

    full_rank: str  # which of f_proj and g_proj are one linear map
    four_dimensions: bool = False
    pad: int = 1
    in_transformers: bool = True


# Keys are the model_type in the checkpoint's config.json.
FORMS = {
    "kimi_linear": Form("", four_dimensions=True),
    "kimi_k3": Form("g", pad=128, in_transformers=False),
    "glm5_next": Form(""),
    "bailing_hybrid": Form("fg"),
}


def from_published(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Translates a layer of a published checkpoint, or of transformers, to a state dict of ``KimiDeltaAttention``.

    Every number stays as it is, in its dtype; most tensors are the given ones, or views of them, and what is split is
    copied. ``load_state_dict`` of the layer renames by itself. This function can also extract one layer from a
    checkpoint, and its errors say more about a layer that it does not understand.

    Args:
        state_dict: tensors by name, of Kimi-Linear, Kimi K3, GLM-5, Ling-3, FLA or this library.
        prefix: what precedes the layer's names, such as ``"model.layers.0.self_attn."``. Other names are left out.

    Raises:
        ValueError: names are unknown or missing (the message lists all of them), or shapes do not fit each other.

    >>> import torch
    >>> from kda.nn import KimiDeltaAttention, from_published, to_published
    >>> layer = KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=32, gate_bias=False)
    >>> published = to_published(layer.state_dict(), "kimi_linear", "layers.0.")
    >>> "layers.0.f_a_proj.weight" in published, list(published["layers.0.A_log"].shape)
    (True, [1, 1, 2, 1])
    >>> layer.load_state_dict(from_published(published, "layers.0."))
    <All keys matched successfully>
    """
    own = own_names({name[len(prefix) :]: x for name, x in state_dict.items() if name.startswith(prefix)})
    _check_names(own, prefix)
    return own


def to_published(
    state_dict: Mapping[str, Tensor], model_type: str, prefix: str = "", *, in_transformers: bool = False
) -> dict[str, Tensor]:
    """Gives a state dict of ``KimiDeltaAttention`` the names and shapes of a published checkpoint.

    Args:
        state_dict: the state dict of one layer.
        model_type: ``"kimi_linear"``, ``"kimi_k3"``, ``"glm5_next"``, ``"bailing_hybrid"`` (Ling-3).
        prefix: put before every name.
        in_transformers: use the module names of transformers, which differ from those in the checkpoints that it
            reads and writes: one convolution for q, k and v, and a module ``forget_gate``.

    Raises:
        ValueError: such a checkpoint has no place for the layer, for example for an output gate with a bias that is
            not zero.
    """
    form = find_form(model_type, in_transformers)
    own = dict(state_dict)
    _check_names(own, "")
    _check_form(own, form, model_type)
    for name in GATE_BIASES:
        own.pop(name, None)
    return {prefix + name: x for name, x in published_names(own, form, in_transformers).items()}


def published_names(own: Mapping[str, Tensor], form: Form, in_transformers: bool) -> dict[str, Tensor]:
    """Renames and reshapes the parameters of a layer, and leaves the rest as it is: the names of adapters,
    parametrizations and quantised weights follow those of modules."""
    own = dict(own)
    A_log = own.get("A_log")
    if A_log is not None and form.four_dimensions:
        own["A_log"] = A_log.reshape(1, 1, -1, 1)
    elif A_log is not None and A_log.numel() % form.pad:
        own["A_log"] = torch.cat([A_log, A_log.new_zeros(-A_log.numel() % form.pad)])
    if in_transformers and all(name in own for name in CONVOLUTIONS):
        own["conv1d.weight"] = torch.cat([own.pop(name) for name in CONVOLUTIONS])
    return {_published_name(name, in_transformers): x for name, x in own.items()}


def own_names(given: Mapping[str, Tensor], sizes: Sequence[int] = (), heads: int = 0) -> dict[str, Tensor]:
    """Renames and reshapes what is known, and leaves the rest as it is. ``sizes``: channels of q, k and v, which are
    needed, like the number of heads, where the weights that tell them have other names or are absent."""
    own: dict[str, Tensor] = {}
    for name, x in given.items():
        module, _, rest = name.removeprefix("forget_gate.").partition(".")
        new = LOW_RANK.get(module, module) + (f".{rest}" if rest else "")
        if new in own:
            raise ValueError(f"state_dict: expected one tensor for {new}, got {name} and another name of it")
        own[new] = x
    if all(f"{x}_proj.weight" in own for x in "qkv"):
        sizes = [own[f"{x}_proj.weight"].shape[0] for x in "qkv"]
    packed = own.get("conv1d.weight")
    if packed is not None and len(sizes) == 3:
        if packed.shape[0] != sum(sizes):
            raise ValueError(f"conv1d.weight: expected {sum(sizes)} channels of q, k and v, got {packed.shape[0]}")
        del own["conv1d.weight"]
        own.update(zip(CONVOLUTIONS, (x.clone() for x in packed.split(sizes)), strict=True))
    for name in ("A_log", "dt_bias"):
        if name in own and own[name].ndim != 1:
            own[name] = own[name].reshape(-1)
    if "b_proj.weight" in own:
        heads = own["b_proj.weight"].shape[0]
    if "A_log" in own and heads:
        own["A_log"] = _without_padding(own["A_log"], heads)
    return own


def _without_padding(A_log: Tensor, heads: int) -> Tensor:
    """Removes padding: Kimi K3 keeps the 96 numbers of its heads in a tensor of 128. The rest must be zero, since
    other numbers would mean heads that appear nowhere else."""
    if A_log.numel() <= heads:
        return A_log
    if not A_log.is_meta and bool(A_log[heads:].any()):
        raise ValueError(f"A_log: expected {heads} numbers, as b_proj.weight has rows, and zeros, got {A_log.numel()}")
    return A_log[:heads].clone()


def _published_name(name: str, in_transformers: bool) -> str:
    module, _, rest = name.rpartition(".")
    if rest == "weight":
        name = _PUBLISHED_MODULES.get(module, module) + ".weight"
    return f"forget_gate.{name}" if in_transformers and name in IN_FORGET_GATE else name


def _check_names(own: Mapping[str, Tensor], prefix: str) -> None:
    wanted = list(ALWAYS)
    for module in ("f_proj", "g_proj"):
        full = f"{module}.weight" in own
        wanted += [f"{module}.weight"] if full else [f"{module}.0.weight", f"{module}.1.weight"]
    bias = "g_proj.bias" if "g_proj.weight" in own else "g_proj.1.bias"
    allowed = {*wanted, *CONVOLUTIONS, *CONVOLUTION_BIASES, bias}
    for names in (CONVOLUTIONS, CONVOLUTION_BIASES):
        wanted += names if any(name in own for name in names) else []
    missing = [f"{name} ({other})" if (other := _other(name)) else name for name in wanted if name not in own]
    unknown = [name for name in own if name not in allowed]
    if missing or unknown:
        said = [f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        where = f" that begin with {prefix!r}" if prefix else ""
        raise ValueError(f"state_dict: expected the names of a KDA layer{where}, got {'; '.join(said)}")


def _other(name: str) -> str:
    """The name of the same tensor in a checkpoint, empty if it is the same."""
    published = _published_name(name, in_transformers=False)
    return "" if published == name else published


def find_form(model_type: str, in_transformers: bool) -> Form:
    if model_type not in FORMS:
        raise ValueError(f"model_type: expected one of {', '.join(FORMS)}, got {model_type!r}")
    form = FORMS[model_type]
    if in_transformers and not form.in_transformers:
        raise ValueError(f"in_transformers: expected False for {model_type}, which transformers has not, got True")
    return form


def _check_form(own: Mapping[str, Tensor], form: Form, model_type: str) -> None:
    for module, keyword, full in (
        ("f_proj", "use_full_rank_decay", "f" in form.full_rank),
        ("g_proj", "use_full_rank_gate", "g" in form.full_rank),
    ):
        if (f"{module}.weight" in own) != full:
            raise ValueError(f"{module}: expected that of a layer with {keyword}={full} for {model_type}, got another")
    if CONVOLUTIONS[0] not in own or CONVOLUTION_BIASES[0] in own:
        raise ValueError(f"state_dict: expected convolutions without biases for {model_type}, got others or none")
    for name in GATE_BIASES:
        if name in own and bool(own[name].any()):
            raise ValueError(f"{name}: expected zeros (or gate_bias=False) for {model_type}, got other numbers")
