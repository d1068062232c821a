"""Context parallelism: packed sequences whose tokens are spread over the ranks of a ``torch.distributed`` group.

Every rank owns pieces of the row of all tokens: one, two (zigzag), or as many as it likes. What a sequence has in one
piece is a segment. The map of a segment, ``S_out = M S_in + b`` (docs/operators/segments.md), says everything that
other segments of the sequence need to know about it.
Ranks exchange their maps in one all-gather, and each folds the maps before its segments into their initial states.
Gradients go the other way with the dual maps. Nothing depends on which rank is faster: results have the same bits
every time.
"""

from .. import _needs_torch  # noqa: F401

# isort: split
from ._chunk import chunk_kda
from ._context import Context
from ._fla import as_context
from ._halo import conv_halo
from ._prefill import Pool, prefill

__all__ = ["Context", "Pool", "as_context", "chunk_kda", "conv_halo", "prefill"]
