"""The attention layer of Kimi-Linear as a torch module, for training, prefill, cached and speculative decode.

:class:`KimiDeltaAttention` has the constructor keywords and the parameters of FLA's layer of that name, so a state
dict of one fits the other. :class:`KDACache` is what it remembers of each sequence: of constant size, updated in
place. :class:`DraftCache` holds drafts on top of it. Dimensions are those of :mod:`kda.training`; ``W`` is the width of
the short convolution and ``D`` a channel count.
"""

from __future__ import annotations

from ._needs_torch import new_torch  # noqa: F401

# isort: split
import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import Conv
from .call.options import ALL_IN_KERNEL, Options, make_options
from .call.tracing import compiled_for_others, compiling, is_true, makes_graph
from .layer import parts, plans, training
from .layer.bypass import are_own
from .layer.cache import KDACache
from .layer.checkpoints import from_published, own_names, to_published
from .layer.convolution import ShortConvolution, causal_conv_silu, convolved
from .layer.draft_cache import DraftCache
from .layer.foreign_caches import ForeignCache, Form, find_foreign, read_foreign, write_foreign
from .layer.keywords import IGNORED_KEYWORDS, check_keywords, check_window  # noqa: F401
from .layer.norm import RMSNormGated, normed
from .layer.packing import find_layout
from .layer.parts import Rows, heads_of
from .layer.products import Places, unpack
from .layer.projections import joint_linear
from .layer.recompute import old_state
from .layer.step import Settings, StepWeights, is_one_call, may_be_quick, one_call, quick_step, weights_of
from .serving import decode, prefill
from .training import chunk_kda, fused_recurrent_kda

__all__ = [
    "DraftCache",
    "KDACache",
    "KimiDeltaAttention",
    "RMSNormGated",
    "ShortConvolution",
    "causal_conv_silu",
    "from_published",
    "to_published",
]

# Without gradients, calls of up to this many tokens use the token recurrence, longer ones the chunks.
DECODE_TOKENS = 8
_PLACES = "places of parameters"  # in the state of a copy: no name that an attribute could have


class KimiDeltaAttention(nn.Module):
    """The Kimi Delta Attention layer: ``[B, T, hidden_size]`` to ``[B, T, hidden_size]``.

    q, k, v are projections with a short convolution and SiLU. The decay, one per key channel, is
    ``-exp(A_log) * softplus(f_proj(x) + dt_bias)``. A sigmoid gate and an RMS norm come before the output projection.

    Args:
        hidden_size, num_heads: the width of the model, and the number of query/key heads ``H``.
        head_dim, expand_v: ``K``, and ``V = head_dim * expand_v``, which must be whole; both at most 256.
        num_v_heads: ``HV``, a multiple of ``num_heads`` and by default equal to it.
        mode: ``"chunk"``, or ``"fused_recurrent"`` for the token recurrence; calls with a cache choose by length.
        use_short_conv, conv_size, conv_bias: whether there are convolutions, their width ``W`` (1 to 4), and whether
            they have a bias.
        allow_neg_eigval: ``beta = 2 * sigmoid`` instead of ``sigmoid``.
        lower_bound: a negative number makes the decay ``lower_bound * sigmoid(exp(A_log) * (f_proj(x) + dt_bias))``.
        safe_gate: needs ``lower_bound`` in ``[-5, 0)`` and starts ``A_log`` from zero. Nothing else here depends on it.
        layer_idx: the key of this layer's cache in ``past_key_values``.
        norm_eps: the eps of the output norm.
        use_full_rank_gate: the output gate ``g_proj`` is one linear map, as in Kimi K3 and Ling-3, not two through
            ``head_v_dim`` channels.
        use_full_rank_decay: the same for ``f_proj``, as in Ling-3.
        gate_bias: whether ``g_proj`` ends with a bias. If None, the low-rank one does, as in FLA. No published
            checkpoint has one: pass False for Kimi-Linear and GLM-5, or the bias starts from zero when one is loaded.
        disable_recompute: keep what backward would otherwise compute again, as in :func:`kda.chunk_kda`; for
            ``mode="chunk"``.
        fuse_projections: put the weights of all projections of ``hidden_states`` side by side in memory, and compute
            these projections as one matrix product, and their convolutions in one launch. Names, shapes and values of
            parameters do not change. Projections that something has replaced, hooked, distributed or moved apart run
            one by one, as do all of them under autocast; their convolutions share a launch all the same. See
            :meth:`pack_weights`.
        device, dtype: of the parameters; ``A_log`` and ``dt_bias`` are float32 whatever dtype is asked for, here and
            by ``layer.to``, ``half`` and ``bfloat16`` (``double`` widens them).

    If made on the ``meta`` device, the layer and its modules are initialised by ``to_empty`` and then
    ``reset_parameters`` of every module, as FSDP and others do.

    Raises:
        ValueError: sizes do not fit each other; the message names the argument.

    >>> import torch
    >>> from kda.nn import KimiDeltaAttention
    >>> layer = KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=32).eval()
    >>> x = torch.randn(1, 100, 64)
    >>> o, _, _ = layer(x)  # training, or all at once
    >>> with torch.no_grad():
    ...     cache = layer.new_cache(1)
    ...     prompt, _, _ = layer(x[:, :99], cache=cache)  # prefill
    ...     token, _, _ = layer(x[:, 99:], cache=cache)  # decode
    >>> bool(torch.allclose(torch.cat([prompt, token], 1), o, atol=1e-5)), cache.memory_bytes()
    (True, 10496)
    """

    step_weights: StepWeights | None = None  # made by a decode step, for the next ones

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        *,
        use_full_rank_gate: bool = False,
        use_full_rank_decay: bool = False,
        gate_bias: bool | None = None,
        disable_recompute: bool = False,
        fuse_projections: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.head_k_dim = hidden_size, num_heads, head_dim
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_v_dim = round(head_dim * expand_v)
        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.mode, self.layer_idx, self.disable_recompute = mode, layer_idx, disable_recompute
        self.fuse_projections = fuse_projections
        self.use_short_conv, self.conv_size = use_short_conv, conv_size
        self.allow_neg_eigval, self.safe_gate, self.lower_bound = allow_neg_eigval, safe_gate, lower_bound
        self._check_sizes(head_dim, expand_v)

        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias, **factory)

        def projection(outputs: int, full_rank: bool, bias: bool) -> nn.Module:
            if full_rank:
                return linear(hidden_size, outputs, bias)
            return nn.Sequential(linear(hidden_size, self.head_v_dim), linear(self.head_v_dim, outputs, bias))

        self.q_proj = linear(hidden_size, self.key_dim)
        self.k_proj = linear(hidden_size, self.key_dim)
        self.v_proj = linear(hidden_size, self.value_dim)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias, **factory)
            self.k_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias, **factory)
            self.v_conv1d = ShortConvolution(self.value_dim, conv_size, conv_bias, **factory)
        gate_dim = self.num_v_heads * head_dim
        self.f_proj = projection(gate_dim, use_full_rank_decay, bias=False)
        self.b_proj = linear(hidden_size, self.num_v_heads)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32, device=device))
        self.dt_bias = nn.Parameter(torch.empty(gate_dim, dtype=torch.float32, device=device))
        self.g_proj = projection(
            self.value_dim, use_full_rank_gate, not use_full_rank_gate if gate_bias is None else gate_bias
        )
        self.o_norm = RMSNormGated(self.head_v_dim, norm_eps, **factory)
        self.o_proj = linear(self.value_dim, hidden_size)
        self.reset_parameters()
        self.pack_weights()

    def _check_sizes(self, head_dim: int, expand_v: float) -> None:
        if self.mode not in ("chunk", "fused_recurrent"):
            raise ValueError(f"mode: expected 'chunk' or 'fused_recurrent', got {self.mode!r}")
        if self.disable_recompute and self.mode != "chunk":
            raise ValueError(f"disable_recompute: expected mode='chunk' with it, got {self.mode!r}")
        if not math.isclose(head_dim * expand_v, self.head_v_dim, rel_tol=1e-5):
            raise ValueError(f"expand_v: expected a whole number of value channels, got {head_dim} * {expand_v}")
        if self.num_v_heads < 1 or self.num_v_heads % self.num_heads:
            raise ValueError(
                f"num_v_heads: expected a multiple of num_heads = {self.num_heads}, got {self.num_v_heads}"
            )
        if self.use_short_conv and self.conv_size not in (1, 2, 3, 4):
            raise ValueError(f"conv_size: expected 1..4, got {self.conv_size}")
        if self.safe_gate and (self.lower_bound is None or not -5 <= self.lower_bound < 0):
            raise ValueError(f"lower_bound: expected a number in [-5, 0) with safe_gate, got {self.lower_bound}")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the gate: ``exp(A_log)`` from U(1, 16), ``softplus(dt_bias)`` log-uniform in [0.001, 0.1]. The
        modules inside initialise themselves. Parameters that transformers marks as loaded (``_is_hf_initialized``)
        keep their values."""
        parts.mark_rates(self)
        loaded = [getattr(parameter, "_is_hf_initialized", False) for parameter in (self.A_log, self.dt_bias)]
        if not loaded[0] and self.safe_gate:
            self.A_log.zero_()
        elif not loaded[0]:
            self.A_log.uniform_(1, 16).log_()
        if not loaded[1]:
            dt = self.dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
            self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Marks the parameters again: ``to_empty`` and moves off the meta device replace them and lose the marks."""
        places = Places(self)
        module = super()._apply(parts.without_narrowing(self, fn), recurse)  # type: ignore[no-untyped-call]
        parts.mark_rates(self)
        self.step_weights = None
        if self.fuse_projections:
            parts.pack_weights(self._modules, places.still(self))
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), _PLACES: Places(self)}  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        places = state.pop(_PLACES, None)
        super().__setstate__(state)
        self.step_weights = None
        if self.fuse_projections:  # copy.deepcopy copies each weight by itself, copy.copy none
            parts.pack_weights(self._modules, () if places is None else places.addresses.values())

    def pack_weights(self) -> None:
        """Puts the weights of the projections side by side, and those of the convolutions, if ``fuse_projections``;
        without, gives each memory of its own again. This moves their memory: the parameters stay the same objects with
        the same values. The layer does this when it is made, moved, converted or copied. Call it after something has
        given parameters other memory, such as ``load_state_dict(assign=True)``. Without the call everything is right,
        but slower. Last bits of the projections may change with it. Memory that is shared, pinned, mapped from a file
        or part of a larger tensor stays, as does all that a conversion to the same dtype and device leaves."""
        self.step_weights = None
        if self.fuse_projections:
            parts.pack_weights(self._modules)
        else:
            unpack(self.parameters())

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Also accepts the names and shapes of published checkpoints."""
        self.step_weights = None
        given = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        given = {name[len(prefix) :]: x for name, x in given.items()}
        own = own_names(given, self._sizes(), self.num_v_heads)
        low_rank = given.get("g_b_proj.weight")
        if low_rank is not None and "1.bias" in self.g_proj.state_dict():  # zeros give the same layer
            own.setdefault("g_proj.1.bias", low_rank.new_zeros(low_rank.shape[0]))
        state_dict.update({prefix + name: x for name, x in own.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def new_cache(
        self, batch_size: int, *, device: Any = None, dtype: torch.dtype | None = None, like: Tensor | None = None
    ) -> KDACache:
        """A cache for ``batch_size`` new sequences of hidden_states on ``device``, of ``dtype``. By default both are
        those of the parameters. These may tell nothing: an offloader keeps them on ``meta``, and quantised parts have
        none. Then give the device and dtype, or the hidden_states as ``like``. Weights of real numbers have
        precedence over the dtype of ``like``. The recurrent state is float32, or float64 if the dtype is."""
        if dtype not in (None, torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise ValueError(f"dtype: expected bfloat16, float16, float32 or float64, got {dtype}")
        ranks = plans.ranks_of(self._mesh())
        if device is None:
            device = self.A_log.device if like is None else like.device
        inputs, dtype_of = None if like is None else like.dtype, parts.dtype_of
        narrow = dtype or dtype_of(self.o_proj) or inputs or dtype_of(self.o_norm) or self.A_log.dtype
        shape = batch_size, self.num_v_heads // ranks, self.head_v_dim, self.head_k_dim
        state = torch.zeros(shape, dtype=torch.promote_types(torch.float32, narrow), device=device)
        if not self.use_short_conv:
            return KDACache(None, state)
        narrow = dtype or dtype_of(self.q_conv1d) or inputs or narrow
        # Channels lie side by side: the GPU reads whole lines.
        size = batch_size, self.conv_size - 1, sum(self._sizes()) // ranks
        return KDACache(torch.zeros(size, dtype=narrow, device=device).transpose(1, 2), state)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KDACache | DraftCache | MutableMapping[int, Any] | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        *,
        cache: KDACache | DraftCache | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        seq_idx: Tensor | None = None,
        position_ids: Tensor | None = None,
        cp_context: Any = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """Runs the layer, with the calling conventions of FLA's layers and of transformers' trainers.

        A cache is read first and then holds the state after the last token. Without gradients, the kernels update it
        in place. With gradients, the new state is copied in, and no gradient flows through the cache.

        Documents packed into one row stay separate, however their boundaries are given. Boundaries given in several
        ways must agree; without any, a row is one document. Offsets cost nothing. The other ways are read on the
        host, which waits for a GPU, breaks the graph of ``torch.compile`` (``fullgraph=True`` refuses) and cannot be
        captured into a CUDA graph. If offsets are given as well, the other ways are only compared with them, and
        inside ``torch.compile`` and CUDA graph capture they are ignored. A mask alone is not read there, either:
        padding is computed and then dropped, and numbers other than 0 count as 1.

        Args:
            hidden_states: ``[B, T, hidden_size]``, of the parameters' dtype, or any under autocast.
            attention_mask: ``[B, T]`` or longer (the last ``T`` columns count), bool or numbers, 0 for padding on
                either side and 1 elsewhere. Padding is skipped, and its outputs are zero. Ignored if offsets are
                given.
            past_key_values: the cache, or a dict of caches by ``layer_idx``, or a cache object of FLA or
                transformers, whose entry ``layer_idx`` is read and replaced. A :class:`DraftCache` needs
                ``torch.no_grad()`` and allows neither padding nor packed documents. A function that backward runs
                again, as with ``torch.utils.checkpoint``, must not use a cache from outside: pass
                ``use_cache=False``.
            use_cache: make a cache if there is none, with one state per document.
            output_attentions: ignored, like the keywords of :data:`IGNORED_KEYWORDS`.
            cache: another name for ``past_key_values``.
            cu_seqlens, cu_seq_lens_q, cu_seq_lens_k, cu_seqlens_cpu: names for the same thing, ``[N + 1]`` int32 or
                int64 offsets of sequences packed into one row (``B = 1``): tensors, arrays of NumPy, lists or tuples.
            seq_idx: ``[B, T]``, the number of each token's document, from 0 on. A document begins where it changes.
            position_ids: ``[B, T]`` or ``[1, T]``. A document begins where positions restart, that is, do not grow.
                Padding by ``attention_mask`` does not count. Elsewhere they must go up by 1.
            cp_context: a :class:`kda.cp.Context`, or FLA's: hidden_states are this rank's window of all ranks' tokens.
            is_causal: True or None: a recurrence looks back only.

        Returns:
            ``(o, None, past_key_values)``, with ``o`` ``[B, T, hidden_size]``.

        Raises:
            ValueError: shapes do not fit, or arguments contradict each other.  TypeError: an unknown keyword.
            NotImplementedError: a cache of an unknown type.
        """
        check_keywords(kwargs, is_causal)
        if hidden_states.ndim != 3 or hidden_states.shape[2] != self.hidden_size:
            raise ValueError(
                f"hidden_states: expected shape [B, T, {self.hidden_size}], got {list(hidden_states.shape)}"
            )
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError("cache: expected the same as past_key_values, which it is another name of, got another")
        B, T, _ = hidden_states.shape
        held = past_key_values if cache is None else cache
        rows_alone = cu_seqlens is None and cu_seq_lens_q is None and cu_seq_lens_k is None and cu_seqlens_cpu is None
        rows_alone = rows_alone and seq_idx is None and position_ids is None and attention_mask is None
        if rows_alone and held is not None and cp_context is None and not compiling() and T == 1:
            found = held.get(self.layer_idx) if type(held) is dict else held
            if (o := self._quick_step(hidden_states, found)) is not None:
                return o, None, held
        offsets = {"cu_seqlens": cu_seqlens, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        offsets["cu_seqlens_cpu"] = cu_seqlens_cpu
        if cp_context is not None:
            cp_context = check_window(cp_context, hidden_states, held, use_cache, self.mode)
            offsets = {"cp_context": cp_context.cu_seqlens, **offsets}
        cu, kept, real = find_layout(hidden_states, offsets, seq_idx, position_ids, attention_mask)
        N = B if cu is None else cu.shape[0] - 1
        if out := compiling() and not isinstance(held, KDACache | DraftCache | None) and self._leaves_graph():
            found, foreign = self._look_up_outside(held, bool(use_cache), N, hidden_states)
            found = KDACache.of(*found) if isinstance(found, tuple) else found
        else:
            held, found, foreign = self._find_cache(held, bool(use_cache), N, hidden_states)
        x = hidden_states if cu is None or is_true(B == 1) else hidden_states.reshape(1, B * T, self.hidden_size)
        if kept is not None:
            x = x[:, kept]
        if real is not None:  # padding may hold anything, and 0 * NaN would reach gradients
            x = x.masked_fill(~real[:, None], 0)
        whole = self._train(x, cu) if found is None and cp_context is None else None
        o = self._run(x, found, cu, cp_context, T) if whole is None else normed(self.o_norm, self._mesh(), *whole)
        if foreign is not None and isinstance(found, KDACache):
            (_write_outside if out else write_foreign)(foreign, found.conv, found.state, T)
        o = self.o_proj(o.flatten(2)) if whole is None else training.project(self.o_proj, o.flatten(2))
        if kept is not None:
            o = o.new_zeros(B * T, self.hidden_size).index_copy(0, kept, o[0])
        if x is not hidden_states:  # otherwise o would become a view, and FSDP warns of those
            o = o.reshape(B, T, self.hidden_size)
        return o, None, held

    # ---- what forward reads of the layer: its modules may be replaced, hooked or distributed at any time ----

    def _sizes(self) -> list[int]:
        """The channels of q, k and v."""
        return [self.key_dim, self.key_dim, self.value_dim]

    def _mesh(self) -> Any:
        """The mesh whose ranks share the heads by a plan (:mod:`kda.layer.plans`), or None."""
        q_proj: Any = self._modules["q_proj"]
        distributed = hasattr(getattr(q_proj, "weight", None), "to_local")  # quantised maps have no weight
        return plans.mesh_of_plan(self._modules, self.A_log) if distributed else None

    def _joint_maps(self, x: Tensor) -> list[nn.Linear] | None:
        """The maps of x that run as one product, or None."""
        return parts.joint_maps(self._modules, self._sizes(), x) if self.fuse_projections else None

    def _options(self) -> dict[str, Any]:
        """Of the recurrence."""
        mesh, A_log, dt_bias = self._mesh(), self.A_log, self.dt_bias  # once: something may compute them
        return {
            "A_log": plans.local(A_log.float() if A_log.dtype.itemsize < 4 else A_log, mesh),
            "dt_bias": plans.local(dt_bias.float() if dt_bias.dtype.itemsize < 4 else dt_bias, mesh),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound,
            "state_v_first": True,
        }

    # ---- the way of a call: projections, convolution, recurrence, norm ----

    def _run(
        self, x: Tensor, cache: KDACache | DraftCache | None, cu: Tensor | None, cp_context: Any, T: int
    ) -> Tensor:
        """Returns the outputs after the norm, ``[B, T, HV, V]``."""
        rows, g, beta, gate = self._project(x)
        if isinstance(cache, DraftCache):
            if cu is not None or torch.is_grad_enabled():
                raise ValueError(
                    "cache: expected no padding, no packed documents (cu_seqlens) and torch.no_grad() with a DraftCache"
                )
            o = self._run_drafts(rows, g, beta, cache)
        elif (
            cache is not None
            and is_true(T <= DECODE_TOKENS)
            and isinstance(rows, Tensor)
            and is_one_call(self._modules, cache, self.conv_size)
        ):
            return one_call(self._modules, self._mesh(), (rows, g, beta, gate), cache, cu, self._options())
        else:
            o = self._attend((*self._convolve(rows, cache, cu, cp_context), g, beta), cache, cu, cp_context, T)
        return normed(self.o_norm, self._mesh(), o, gate)

    def _project(self, x: Tensor) -> tuple[Rows, Tensor, Tensor, Tensor]:
        """Returns the rows of q, k and v; the decay's input, ``[B, T, HV, K]``; the logits of beta, ``[B, T, HV]``; the
        gate's input, ``[B, T, HV, V]``."""
        K, V = self.head_k_dim, self.head_v_dim
        maps = self._joint_maps(x)
        if maps is None:
            rows = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            self._check_ranks(rows[0])
            return rows, heads_of(self.f_proj(x), K), self.b_proj(x), heads_of(self.g_proj(x), V)
        weights: list[Any] = [m._parameters["weight"] for m in maps]
        y = joint_linear(x, weights)
        sizes = [sum(self._sizes()), *(w.shape[0] for w in weights[3:])]
        raw, *firsts, _ = y.split_with_sizes([*sizes, y.shape[-1] - sum(sizes)], -1)
        f_proj, g_proj = self._modules["f_proj"], self._modules["g_proj"]
        shape = x.shape[0], x.shape[1]
        gate = parts.second_half(g_proj, firsts[1], shape) if len(firsts) == 3 else self.g_proj(x)
        return raw, heads_of(parts.second_half(f_proj, firsts[0], shape), K), firsts[-1], heads_of(gate, V)

    def _check_ranks(self, q: Tensor) -> None:
        ranks = plans.ranks_of(self._mesh())
        if q.shape[-1] * ranks != self.key_dim:
            wanted = "expected all heads of this layer, or a plan of kda.tp.HeadParallel or ColwiseParallel"
            raise ValueError(f"q_proj: {wanted}, got {q.shape[-1]} of {self.key_dim} channels on each of {ranks} ranks")

    def _convolve(
        self, rows: Rows, cache: KDACache | None = None, cu: Tensor | None = None, cp: Any = None, drafts: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v, ``[B, T, H, K]`` twice and ``[B, T, HV, V]``: the rows after the convolutions and SiLU.
        ``drafts``: they go on from the cache and leave it as it is."""
        halo = None
        if cp is not None and self.use_short_conv:
            from .cp._halo import conv_halo

            halo = conv_halo(parts.joined(rows), cp, self.conv_size)
        q, k, v = convolved(self._modules, rows, self._sizes(), self._mesh(), cache, cu, halo, drafts=drafts)
        return heads_of(q, self.head_k_dim), heads_of(k, self.head_k_dim), heads_of(v, self.head_v_dim)

    def _attend(
        self, inputs: tuple[Tensor, ...], cache: KDACache | None, cu_seqlens: Tensor | None, cp_context: Any, T: int
    ) -> Tensor:
        """Runs the kernels on (q, k, v, g, beta); ``T`` bounds the tokens of a sequence. Returns ``[B, T, HV, V]``."""
        options = {**self._options(), "cu_seqlens": cu_seqlens}
        o: Tensor
        run: Any = chunk_kda
        if cp_context is not None:
            options = {**self._options(), "cp_context": cp_context}
            o, _ = run(*inputs, **options, disable_recompute=self.disable_recompute)
            return o
        if cache is not None and not torch.is_grad_enabled():
            run = decode if is_true(T <= DECODE_TOKENS) else prefill
            o = run(*inputs, cache.state, **options)
            return o
        run = chunk_kda if self.mode == "chunk" else fused_recurrent_kda
        if self.disable_recompute:
            options["disable_recompute"] = True
        if cache is None:
            o, _ = run(*inputs, **options)
        else:  # backward starts again from the old state, so the kernels get a copy that stays
            old = old_state(cache.state, cache.made_in)
            o, state = run(*inputs, **options, initial_state=old, output_final_state=True)
            cache.state.copy_(state.detach())
        return o

    def _run_drafts(self, rows: Rows, g: Tensor, beta: Tensor, cache: DraftCache) -> Tensor:
        """Returns the outputs of drafts, ``[B, T, HV, V]``, with the convolution in the kernels where it can be."""
        raw, held, options = parts.joined(rows), cache.cache, self._options()
        if not self.use_short_conv or held.conv is None:
            return cache.run(raw, None, (*self._convolve(rows), g, beta), **options)
        if not parts.convolve_as_one(self._modules):  # what was accepted goes first: it moves the state of the modules
            cache.flush()
            return cache.run(raw, None, (*self._convolve(rows, held, drafts=True), g, beta), **options)
        conv = Conv(raw, *parts.conv_parameters(self._modules, self._mesh()), held.conv)
        return cache.run(raw, conv, (None, None, None, g, beta), **options)

    def _train(self, x: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """The outputs before the norm and the gate's input as one function of autograd; None where the parts have to
        run one by one, or if nothing needs gradients, or torch makes a graph."""
        if not torch.is_grad_enabled() or makes_graph() or self.mode != "chunk" or self.conv_size == 1:
            return None
        maps = self._joint_maps(x)
        weights: Any = None if maps is None else training.weights_of(self._modules, maps)
        if weights is None:
            return None
        H, HV, K, V = self.num_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        options = self._options()
        A_log, dt_bias = options["A_log"], options["dt_bias"].view(HV, K)
        form = make_options(A_log, None, self.lower_bound, ALL_IN_KERNEL, self.allow_neg_eigval, v_first=True)
        p = training.Parameters(**weights, A_log=A_log, dt_bias=dt_bias)
        return training.train(p, x, cu, (H, HV, K, V), Options(*form), self.disable_recompute)

    # ---- a decode step with little else (:mod:`kda.layer.step`) ----

    def _settings(self) -> tuple[Any, ...]:  # the fields of Settings: every step asks, and a tuple is faster to make
        norm: Any = self._modules["o_norm"]
        return self.lower_bound, self.allow_neg_eigval, norm.eps, norm.activation, self.fuse_projections

    def _quick_step(self, x: Tensor, cache: Any) -> Tensor | None:
        """The output for one token of each sequence, ``[B, 1, hidden_size]``; None if the general way has to run."""
        if not may_be_quick(x, cache):
            return None
        weights = self.step_weights
        if weights is None or not (weights.snapshot.holds(self) and weights.settings == self._settings()):
            weights = self.step_weights = self._new_step_weights(x)
        return None if weights is None else quick_step(weights, x, cache)

    def _new_step_weights(self, x: Tensor) -> StepWeights | None:
        if not are_own("norm", self._modules["o_norm"]) or not self._parameters.keys() >= {"A_log", "dt_bias"}:
            return None  # first, because a layer of which it is true would come here in every step
        maps = self._joint_maps(x)
        if maps is None or self.conv_size == 1:
            return None
        heads = self.num_v_heads, self.head_k_dim, self.head_v_dim
        return weights_of(self, maps, x, heads, Settings(*self._settings()))

    # ---- caches ----

    def _find_cache(
        self, held: Any, use_cache: bool, N: int, x: Tensor
    ) -> tuple[Any, KDACache | DraftCache | None, ForeignCache | None]:
        """Returns what to pass back as past_key_values, this layer's cache for hidden_states x, and, if that cache
        is another library's, where to write its numbers after the call."""
        cache: KDACache | DraftCache | None
        if held is None:
            held = cache = self.new_cache(N, like=x) if use_cache else None
        elif isinstance(held, KDACache | DraftCache):
            cache = held
        elif isinstance(held, MutableMapping):
            if self.layer_idx is None:
                raise ValueError("layer_idx: expected a number with a dict of caches, got None")
            if use_cache and self.layer_idx not in held:
                held[self.layer_idx] = self.new_cache(N, like=x)
            cache = held.get(self.layer_idx)
        else:
            ranks = plans.ranks_of(self._mesh())
            form = Form(self.layer_idx, [n // ranks for n in self._sizes()], self.conv_size * self.use_short_conv)
            foreign = find_foreign(held, form)
            return held, read_foreign(foreign, lambda: self.new_cache(N, like=x)), foreign
        kept = cache.cache if isinstance(cache, DraftCache) else cache
        if kept is not None and is_true(kept.state.shape[0] != N):
            raise ValueError(f"cache: expected one for {N} sequences, got one for {kept.state.shape[0]}")
        if kept is not None:
            if kept.state.device != x.device:
                wanted = f"expected one on {x.device} like hidden_states (new_cache has device=)"
                raise ValueError(f"cache: {wanted}, got one on {kept.state.device}")
            kept.check_first_run()
        return held, cache, None

    # In a model whose blocks are compiled one by one, the blocks share code, so the graph of the first one could serve
    # all. But a graph that looks into a dict of caches holds the number of its layer: each block would get a graph of
    # its own, and from the ninth on none at all (recompile_limit). So once a second block is compiled, its graph is
    # left for the look-up, and those of all other blocks are the same.

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _leaves_graph(self) -> bool:
        """A method, because then a graph runs it without holding the layer or its number."""
        return compiled_for_others(self.layer_idx)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look_up_outside(
        self, held: Any, use_cache: bool, N: int, x: Tensor
    ) -> tuple[tuple[Any, ...] | DraftCache | None, ForeignCache | None]:
        """What :meth:`_find_cache` finds, a cache as its parts: if the graph had an object that is also in the dict
        which it returns, it would be for this one alone."""
        _, found, foreign = self._find_cache(held, use_cache, N, x)
        return (found.conv, found.state, found.made_in) if isinstance(found, KDACache) else found, foreign


_write_outside: Any = torch.compiler.disable(write_foreign)
