"""The stages' tensors by name, in the order of the args structs and of the binding: ``?`` marks optional ones, and
those after ``->`` are written."""

from __future__ import annotations

STAGES = {
    "cumsum": "g -> G",
    "chunk_intra": "q k v G beta -> Aqk Akk_inv w? u? qG? kg?",
    "recompute_w_u": "q? k v G beta Akk_inv -> w? u? qG? kg?",
    "delta_h": "kg w u G h0? -> h? v_new? hT?",
    "fwd_o": "q v_new G Aqk h -> o",
    "bwd_local": "v_new d_o Aqk -> dAqk dv_local",
    "bwd_delta_h": "qG kg w G d_o dv_local dhT? -> dh dv_new dh0?",
    "bwd_wy_dqkg": "q k v v_new G beta Akk_inv h dh d_o dv_new -> dq dk dv dbeta dG dAkk",
    "bwd_intra": "q k G beta dAqk dAkk -> dq dk dbeta dG",
    "cumsum_backward": "g? dG -> dg",
}
