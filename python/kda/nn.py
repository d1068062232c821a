"""The attention layer of Kimi-Linear as a torch module, for training, prefill, cached and speculative decode.

:class:`KimiDeltaAttention` has the constructor keywords and the parameters of FLA's layer of that name, so that a state
dict goes from one to the other. :class:`KDACache` is what it remembers of each sequence: of constant size, updated in
place; :class:`DraftCache` holds drafts on top of it. Dimensions are those of :mod:`kda.ops`; ``W`` is the width of the
short convolution and ``D`` a channel count.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import ops
from .convolution import causal_conv1d, causal_conv1d_update
from .speculation import Conv, Records, flush_kvbuffer, flush_verify_kvbuffer, new_records, verify_kvbuffer

__all__ = ["DraftCache", "KDACache", "KimiDeltaAttention", "RMSNormGated", "ShortConvolution", "causal_conv_silu"]

# Without gradients, pieces of up to this many tokens run through the token recurrence, longer ones through the chunks.
DECODE_TOKENS = 8


@dataclass
class KDACache:
    """What one layer remembers of ``N`` sequences; make it with :meth:`KimiDeltaAttention.new_cache`.

    conv: ``[N, D, W - 1]``, the last raw inputs of the short convolutions, oldest first, channels in the order q, k, v
        (``D = 2 * key_dim + value_dim``), in the dtype of their weights; None without short convolutions.
    state: ``[N, HV, V, K]`` float32, the recurrent state.

    Both are zero for a new sequence. The layer overwrites them and never allocates new ones.
    """

    conv: Tensor | None
    state: Tensor

    def reset(self, rows: Any = None) -> None:
        """Forget all sequences, or those at ``rows`` (an index, a slice, or an index tensor)."""
        for x in (self.conv, self.state):
            if x is not None:
                x[slice(None) if rows is None else rows] = 0

    def memory_bytes(self) -> int:
        """Bytes of the two tensors: the same after any number of tokens."""
        return sum(x.numel() * x.element_size() for x in (self.conv, self.state) if x is not None)


class DraftCache:
    """Speculative decoding over a :class:`KDACache`: the layer takes what it is given for drafts.

    A call with it computes the outputs of all drafts and leaves the cache as it is, but for records of a few vectors a
    token; then :meth:`accept` says how many of them stay. Drafts of which nobody says so are dropped.

    Args:
        layer: a :class:`KimiDeltaAttention`.
        cache: its cache, from :meth:`KimiDeltaAttention.new_cache`, which comes to hold what is accepted.
        max_tokens: drafts of a call at most, 1 to 16.
        fused: accepted drafts are applied by the next call, in one pass with its own work, or by :meth:`flush`; else at
            once by :meth:`accept`.

    >>> import torch
    >>> from kda.nn import DraftCache, KimiDeltaAttention
    >>> layer, x = KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=32), torch.randn(1, 5, 64)
    >>> drafts, plain = DraftCache(layer, layer.new_cache(1), 4), layer.new_cache(1)
    >>> with torch.no_grad():
    ...     _ = layer(x[:, :4], cache=drafts)  # four drafts, of which three are right
    ...     drafts.accept(torch.tensor([3], dtype=torch.int32))
    ...     o, _, _ = layer(x[:, 4:], cache=drafts)
    ...     expected = [layer(token, cache=plain)[0] for token in x[:, [0, 1, 2, 4]].split(1, 1)]
    >>> bool(torch.allclose(o, expected[3], atol=1e-5))
    True
    """

    def __init__(self, layer: KimiDeltaAttention, cache: KDACache, max_tokens: int, *, fused: bool = True) -> None:
        if not isinstance(max_tokens, int) or not 1 <= max_tokens <= 16:
            raise ValueError(f"max_tokens: expected 1..16, got {max_tokens}")
        self.cache, self.max_tokens, self.fused = cache, max_tokens, fused
        N, HV, V, K = cache.state.shape
        # With fused, two buffers take turns: one is read while the other is written.
        self.records: list[Records] = [
            new_records(N, max_tokens, layer.num_heads, HV, K, V, device=cache.state.device) for _ in range(1 + fused)
        ]
        self._rows: Tensor | None = None  # of the last call, before the convolution
        self._accept_len = torch.zeros(N, dtype=torch.int32, device=cache.state.device)

    def accept(self, accept_len: Tensor) -> None:
        """``[N]`` int32, on the device of the cache: how many of each sequence's last drafts stay."""
        if accept_len.shape != self._accept_len.shape or accept_len.dtype != torch.int32:
            raise ValueError(
                f"accept_len: expected int32 of shape {list(self._accept_len.shape)}, got {accept_len.dtype} of shape "
                f"{list(accept_len.shape)}"
            )
        self._accept_len.copy_(accept_len)
        if not self.fused:
            self.flush()

    def flush(self) -> None:
        """Bring the cache up to date with everything accepted."""
        if self._rows is not None:
            conv: dict[str, Any] = {}
            if self.cache.conv is not None:
                conv = {"conv_x": self._rows, "conv_state": self.cache.conv}
            flush_kvbuffer(self.cache.state, self.records[0], self._accept_len, **conv)
        self._accept_len.zero_()

    def memory_bytes(self) -> int:
        """Bytes of the records, apart from those of the cache."""
        return sum(x.numel() * x.element_size() for r in self.records for x in (r.u, r.k, r.alpha))

    def run(self, raw: Tensor, conv: Conv | None, inputs: tuple[Any, Any, Any, Any, Any], **options: Any) -> Tensor:
        """The drafts' outputs, for the layer: from ``raw`` and ``conv``, or from q, k, v among ``inputs``."""
        if raw.shape[1] > self.max_tokens:
            raise ValueError(
                f"hidden_states: expected at most max_tokens = {self.max_tokens} drafts, got {raw.shape[1]}"
            )
        o: Tensor
        if self.fused and self._rows is not None:
            last, new = self.records
            rolled = None if conv is None else self._rows
            o = flush_verify_kvbuffer(
                *inputs, self.cache.state, new, self._accept_len, last=last, last_conv_x=rolled, conv=conv, **options
            )
            self.records.reverse()
        else:
            o = verify_kvbuffer(*inputs, self.cache.state, self.records[0], conv=conv, **options)
        self._accept_len.zero_()
        self._rows = raw
        return o


def causal_conv_silu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """:func:`kda.causal_conv1d` with the state held by the caller.

    Args:
        x, weight, bias, cu_seqlens: ``[B, T, D]``, ``[D, W]``, ``[D]``, ``[N + 1]``, as there.
        state: ``[N, D, W - 1]``, the inputs before the first token, oldest first; overwritten with the last ``W - 1``
            inputs, bit for bit, without gradients. Zeros, kept by nobody, if None.

    A width of 1, which remembers nothing, is taken as well.
    """
    if weight.shape[1] == 1:
        return _pointwise(x, weight[:, 0], bias, cu_seqlens)
    if state is None:
        y: Tensor = causal_conv1d(x, weight, bias, cu_seqlens=cu_seqlens)[0]
    elif torch.is_grad_enabled():  # backward reads the old state
        y, last = causal_conv1d(x, weight, bias, state.clone(), output_final_state=True, cu_seqlens=cu_seqlens)
        state.copy_(last.detach())
    else:
        y = causal_conv1d_update(x, state, weight, bias, cu_seqlens=cu_seqlens)
    return y


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) * weight.to(wide)
    y = F.silu(y if bias is None else y + bias.to(wide)).to(x.dtype)
    if cu_seqlens is None:
        return y
    return torch.where(torch.arange(x.shape[1], device=x.device)[:, None] < cu_seqlens[-1], y, 0)


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution and SiLU, with the parameters of FLA's: ``weight`` ``[D, 1, W]``, ``bias`` ``[D]``;
    ``W`` is 1 to 4.

    >>> import torch
    >>> from kda.nn import ShortConvolution
    >>> conv, x, state = ShortConvolution(8), torch.randn(2, 5, 8), torch.zeros(2, 8, 3)
    >>> y = conv(x, state)
    >>> list(y.shape), torch.equal(state, x[:, -3:].transpose(1, 2))
    ([2, 5, 8], True)
    """

    def __init__(self, hidden_size: int, kernel_size: int = 4, bias: bool = False) -> None:
        if kernel_size not in (1, 2, 3, 4):
            raise ValueError(f"kernel_size: expected 1..4, got {kernel_size}")
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, padding=kernel_size - 1, bias=bias)

    def forward(self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Arguments and result of :func:`causal_conv_silu`."""
        return causal_conv_silu(x, self.weight.squeeze(1), self.bias, state, cu_seqlens)


class RMSNormGated(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)`` over the last dimension, in float32, in the dtype of x.

    >>> import torch
    >>> from kda.nn import RMSNormGated
    >>> RMSNormGated(2, eps=0.0)(torch.tensor([3.0, 3.0]), torch.zeros(2)).tolist()
    [0.5, 0.5]
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        y = x.to(wide)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(wide)
        return (y * torch.sigmoid(gate.to(wide))).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def _heads(x: Tensor, heads: int) -> Tensor:
    y: Tensor = x.unflatten(-1, (heads, -1))  # type: ignore[no-untyped-call]
    return y


class KimiDeltaAttention(nn.Module):
    """The Kimi Delta Attention layer: ``[B, T, hidden_size]`` to ``[B, T, hidden_size]``.

    q, k, v are projections with a short convolution and SiLU; the decay, one per key channel, is
    ``-exp(A_log) * softplus(f_proj(x) + dt_bias)``; a sigmoid gate and an RMS norm stand before the output projection.

    Args:
        hidden_size, num_heads: width of the model; query/key heads ``H``.
        head_dim, expand_v: ``K``, and ``V = head_dim * expand_v``, which must be whole; both at most 256.
        num_v_heads: ``HV``, a multiple of ``num_heads``, which it is by default.
        mode: ``"chunk"``, or ``"fused_recurrent"`` for the token recurrence; calls with a cache choose by length.
        use_short_conv, conv_size, conv_bias: the convolutions, their width ``W`` (1 to 4), whether they have a
            bias.
        allow_neg_eigval: ``beta = 2 * sigmoid``, not ``sigmoid``.
        lower_bound: a negative number makes the decay ``lower_bound * sigmoid(exp(A_log) * (f_proj(x) + dt_bias))``.
        safe_gate: needs ``lower_bound`` in ``[-5, 0)`` and starts ``A_log`` from zero. Nothing else here depends on it.
        layer_idx: the key of this layer's cache in ``past_key_values``.
        norm_eps: of the output norm.

    Raises:
        ValueError: sizes that do not fit each other; the sentence names the argument.

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
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.head_k_dim = hidden_size, num_heads, head_dim
        self.num_v_heads = num_heads if num_v_heads is None else num_v_heads
        self.head_v_dim = round(head_dim * expand_v)
        self.key_dim, self.value_dim = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.mode, self.layer_idx = mode, layer_idx
        self.use_short_conv, self.conv_size = use_short_conv, conv_size
        self.allow_neg_eigval, self.safe_gate, self.lower_bound = allow_neg_eigval, safe_gate, lower_bound
        if mode not in ("chunk", "fused_recurrent"):
            raise ValueError(f"mode: expected 'chunk' or 'fused_recurrent', got {mode!r}")
        if not math.isclose(head_dim * expand_v, self.head_v_dim, rel_tol=1e-5):
            raise ValueError(f"expand_v: expected a whole number of value channels, got {head_dim} * {expand_v}")
        if self.num_v_heads < 1 or self.num_v_heads % num_heads:
            raise ValueError(f"num_v_heads: expected a multiple of num_heads = {num_heads}, got {num_v_heads}")
        if use_short_conv and conv_size not in (1, 2, 3, 4):
            raise ValueError(f"conv_size: expected 1..4, got {conv_size}")
        if safe_gate and (lower_bound is None or not -5 <= lower_bound < 0):
            raise ValueError(f"lower_bound: expected a number in [-5, 0) with safe_gate, got {lower_bound}")

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias)

        self.q_proj = linear(hidden_size, self.key_dim)
        self.k_proj = linear(hidden_size, self.key_dim)
        self.v_proj = linear(hidden_size, self.value_dim)
        if use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.k_conv1d = ShortConvolution(self.key_dim, conv_size, conv_bias)
            self.v_conv1d = ShortConvolution(self.value_dim, conv_size, conv_bias)
        gate_dim = self.num_v_heads * head_dim
        self.f_proj = nn.Sequential(linear(hidden_size, self.head_v_dim), linear(self.head_v_dim, gate_dim))
        self.b_proj = linear(hidden_size, self.num_v_heads)
        self.A_log = nn.Parameter(torch.empty(self.num_v_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(gate_dim, dtype=torch.float32))
        for parameter in (self.A_log, self.dt_bias):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]  # the mark FLA's and other trainers look for
        self.g_proj = nn.Sequential(
            linear(hidden_size, self.head_v_dim), linear(self.head_v_dim, self.value_dim, bias=True)
        )
        self.o_norm = RMSNormGated(self.head_v_dim, norm_eps)
        self.o_proj = linear(self.value_dim, hidden_size)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start the gate: ``exp(A_log)`` from U(1, 16), ``softplus(dt_bias)`` log-uniform in [0.001, 0.1]."""
        if self.safe_gate:
            self.A_log.zero_()
        else:
            self.A_log.uniform_(1, 16).log_()
        dt = self.dt_bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def new_cache(self, batch_size: int) -> KDACache:
        """A cache for ``batch_size`` new sequences, on the device of the weights."""
        weight = self.o_proj.weight
        state_dtype = torch.promote_types(torch.float32, weight.dtype)
        state = weight.new_zeros(batch_size, self.num_v_heads, self.head_v_dim, self.head_k_dim, dtype=state_dtype)
        if not self.use_short_conv:
            return KDACache(None, state)
        channels = 2 * self.key_dim + self.value_dim
        return KDACache(self.q_conv1d.weight.new_zeros(batch_size, channels, self.conv_size - 1), state)

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
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """FLA's calling convention; ``output_attentions`` and unknown keywords are ignored, as there.

        A cache is read first and then holds the state after the last token. Without gradients this happens in place in
        the kernels; with them the new state is copied in, and no gradient flows through the cache.

        Args:
            hidden_states: ``[B, T, hidden_size]``, of the parameters' dtype, or any under autocast.
            attention_mask: ``[B, T]`` or longer (the last ``T`` columns count), 0 for padding on either side: padding
                is skipped, its outputs are zero. Not looked at when ``cu_seqlens`` is given. Synchronises with a GPU.
            past_key_values: the cache, or a dict of caches by ``layer_idx``. A :class:`DraftCache` needs
                ``torch.no_grad()``, neither padding nor ``cu_seqlens``.
            use_cache: make the cache if there is none.
            cache: another name of ``past_key_values``.
            cu_seqlens: ``[N + 1]`` int32 or int64 offsets of sequences packed into one row (``B = 1``).

        Returns:
            ``(o, None, past_key_values)``, with ``o`` ``[B, T, hidden_size]``.

        Raises:
            ValueError: shapes that do not fit.  NotImplementedError: a cache of a foreign type.
        """
        if hidden_states.ndim != 3 or hidden_states.shape[2] != self.hidden_size:
            raise ValueError(
                f"hidden_states: expected shape [B, T, {self.hidden_size}], got {list(hidden_states.shape)}"
            )
        B, T, _ = hidden_states.shape
        if cu_seqlens is not None and B != 1:
            raise ValueError(f"hidden_states: expected one row with cu_seqlens, got {B}")
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        held, found = self._find_cache(past_key_values if cache is None else cache, bool(use_cache), N)

        x, kept = hidden_states, None
        if attention_mask is not None and cu_seqlens is None:
            if attention_mask.ndim != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
                raise ValueError(f"attention_mask: expected shape [{B}, {T}], got {list(attention_mask.shape)}")
            mask = attention_mask[:, attention_mask.shape[1] - T :].bool()
            if not bool(mask.all()):
                kept = mask.flatten().nonzero().flatten()
                x = hidden_states.flatten(0, 1)[kept][None]
                cu_seqlens = F.pad(mask.sum(1).cumsum(0), (1, 0))

        g, beta = _heads(self.f_proj(x), self.num_v_heads), self.b_proj(x)
        if isinstance(found, DraftCache):
            if cu_seqlens is not None or torch.is_grad_enabled():
                raise ValueError("cache: expected no padding, no cu_seqlens and torch.no_grad() with a DraftCache")
            o = self._draft(x, g, beta, found)
        else:
            o = self._attend((*self._qkv(x, found, cu_seqlens), g, beta), found, cu_seqlens, T)
        o = self.o_norm(o, _heads(self.g_proj(x), self.num_v_heads))
        o = self.o_proj(o.flatten(2))
        if kept is not None:
            o = o.new_zeros(B * T, self.hidden_size).index_copy(0, kept, o[0]).view(B, T, self.hidden_size)
        return o, None, held

    def _find_cache(self, held: Any, use_cache: bool, N: int) -> tuple[Any, KDACache | DraftCache | None]:
        """What to hand back as past_key_values, and this layer's cache."""
        cache: KDACache | DraftCache | None
        if held is None:
            held = cache = self.new_cache(N) if use_cache else None
        elif isinstance(held, KDACache | DraftCache):
            cache = held
        elif isinstance(held, MutableMapping):
            if self.layer_idx is None:
                raise ValueError("layer_idx: expected a number with a dict of caches, got None")
            if use_cache and self.layer_idx not in held:
                held[self.layer_idx] = self.new_cache(N)
            cache = held.get(self.layer_idx)
        else:
            raise NotImplementedError(
                f"past_key_values: expected a KDACache or a dict of them by layer_idx, got {type(held).__name__}"
            )
        kept = cache.cache if isinstance(cache, DraftCache) else cache
        if kept is not None and kept.state.shape[0] != N:
            raise ValueError(f"cache: expected one for {N} sequences, got one for {kept.state.shape[0]}")
        return held, cache

    def _qkv(self, x: Tensor, cache: KDACache | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, T, H, K]``, ``[B, T, H, K]`` and ``[B, T, HV, V]``."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.use_short_conv:
            sizes = [self.key_dim, self.key_dim, self.value_dim]
            states = (None, None, None) if cache is None or cache.conv is None else cache.conv.split(sizes, 1)
            q = self.q_conv1d(q, states[0], cu_seqlens)
            k = self.k_conv1d(k, states[1], cu_seqlens)
            v = self.v_conv1d(v, states[2], cu_seqlens)
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        return _heads(q, self.num_heads), _heads(k, self.num_heads), _heads(v, self.num_v_heads)

    def _draft(self, x: Tensor, g: Tensor, beta: Tensor, cache: DraftCache) -> Tensor:
        """``[B, T, HV, V]`` of drafts, the convolution done in the kernels."""
        raw = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        if not self.use_short_conv or cache.cache.conv is None:
            q, k, v = F.silu(raw).split([self.key_dim, self.key_dim, self.value_dim], -1)
            heads = (_heads(q, self.num_heads), _heads(k, self.num_heads), _heads(v, self.num_v_heads))
            return cache.run(raw, None, (*heads, g, beta), **self._options())
        parts = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        weight = torch.cat([part.weight.squeeze(1) for part in parts])
        biases = [part.bias for part in parts if part.bias is not None]
        bias = torch.cat(biases) if biases else None
        conv = Conv(raw, weight, bias, cache.cache.conv)
        return cache.run(raw, conv, (None, None, None, g, beta), **self._options())

    def _options(self) -> dict[str, Any]:
        return {
            "A_log": self.A_log.float() if self.A_log.dtype.itemsize < 4 else self.A_log,
            "dt_bias": self.dt_bias.float() if self.dt_bias.dtype.itemsize < 4 else self.dt_bias,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "lower_bound": self.lower_bound,
            "state_v_first": True,
        }

    def _attend(self, inputs: tuple[Tensor, ...], cache: KDACache | None, cu_seqlens: Tensor | None, T: int) -> Tensor:
        """The kernels on (q, k, v, g, beta); ``T`` bounds the tokens of a sequence. Returns ``[B, T, HV, V]``."""
        options = {**self._options(), "cu_seqlens": cu_seqlens}
        o: Tensor
        run: Any
        if cache is not None and not torch.is_grad_enabled():
            run = ops.decode if T <= DECODE_TOKENS else ops.prefill
            o = run(*inputs, cache.state, **options)
            return o
        run = ops.chunk_kda if self.mode == "chunk" else ops.fused_recurrent_kda
        if cache is None:
            o, _ = run(*inputs, **options)
        else:  # backward starts again from the old state: the kernels must keep one that nobody overwrites
            o, state = run(*inputs, **options, initial_state=cache.state.clone(), output_final_state=True)
            cache.state.copy_(state.detach())
        return o
