// The ABI, pinned to numbers (x86-64): a change here breaks every program compiled against an older header.
#include <gtest/gtest.h>

#include <cstddef>

#include "kda/kda.h"

namespace {
#define EXPECT_FIELD(type, field, at) EXPECT_EQ(offsetof(type, field), static_cast<size_t>(at)) << #type "." #field

TEST(Abi, Tensor) {
  EXPECT_EQ(sizeof(kda_tensor), 96u);
  EXPECT_FIELD(kda_tensor, data, 0);
  EXPECT_FIELD(kda_tensor, dtype, 8);
  EXPECT_FIELD(kda_tensor, ndim, 12);
  EXPECT_FIELD(kda_tensor, shape, 16);
  EXPECT_FIELD(kda_tensor, stride, 56);
}

TEST(Abi, Exec) {
  EXPECT_EQ(sizeof(kda_exec), 48u);
  EXPECT_FIELD(kda_exec, device, 0);
  EXPECT_FIELD(kda_exec, device_id, 4);
  EXPECT_FIELD(kda_exec, stream, 8);
  EXPECT_FIELD(kda_exec, workspace, 16);
  EXPECT_FIELD(kda_exec, workspace_bytes, 24);
  EXPECT_FIELD(kda_exec, impl, 32);
  EXPECT_FIELD(kda_exec, num_threads, 40);
  EXPECT_FIELD(kda_exec, flags, 44);
}

TEST(Abi, Inputs) {
  EXPECT_EQ(sizeof(kda_inputs), 792u);
  EXPECT_FIELD(kda_inputs, q, 0);
  EXPECT_FIELD(kda_inputs, k, 96);
  EXPECT_FIELD(kda_inputs, v, 192);
  EXPECT_FIELD(kda_inputs, g, 288);
  EXPECT_FIELD(kda_inputs, beta, 384);
  EXPECT_FIELD(kda_inputs, A_log, 480);
  EXPECT_FIELD(kda_inputs, dt_bias, 576);
  EXPECT_FIELD(kda_inputs, cu_seqlens, 672);
  EXPECT_FIELD(kda_inputs, gate_form, 768);
  EXPECT_FIELD(kda_inputs, beta_form, 772);
  EXPECT_FIELD(kda_inputs, qk_l2norm, 776);
  EXPECT_FIELD(kda_inputs, state_layout, 780);
  EXPECT_FIELD(kda_inputs, lower_bound, 784);
  EXPECT_FIELD(kda_inputs, scale, 788);
}

TEST(Abi, States) {
  EXPECT_EQ(sizeof(kda_states), 392u);
  EXPECT_FIELD(kda_states, h0, 0);
  EXPECT_FIELD(kda_states, hT, 96);
  EXPECT_FIELD(kda_states, state_indices, 192);
  EXPECT_FIELD(kda_states, has_initial_state, 288);
  EXPECT_FIELD(kda_states, first_valid_slot, 384);
  EXPECT_FIELD(kda_states, reserved, 388);
}

TEST(Abi, NormInputs) {
  EXPECT_EQ(sizeof(kda_norm_inputs), 208u);
  EXPECT_FIELD(kda_norm_inputs, gate, 0);
  EXPECT_FIELD(kda_norm_inputs, weight, 96);
  EXPECT_FIELD(kda_norm_inputs, eps, 192);
  EXPECT_FIELD(kda_norm_inputs, activation, 200);
  EXPECT_FIELD(kda_norm_inputs, apply, 204);
}

TEST(Abi, ForwardArgs) {
  EXPECT_EQ(sizeof(kda_forward_args), 2328u);
  EXPECT_FIELD(kda_forward_args, struct_size, 0);
  EXPECT_FIELD(kda_forward_args, exec, 8);
  EXPECT_FIELD(kda_forward_args, in, 56);
  EXPECT_FIELD(kda_forward_args, states, 848);
  EXPECT_FIELD(kda_forward_args, o, 1240);
  EXPECT_FIELD(kda_forward_args, checkpoints, 1336);
  EXPECT_FIELD(kda_forward_args, checkpoint_slots, 1432);
  EXPECT_FIELD(kda_forward_args, h, 1528);
  EXPECT_FIELD(kda_forward_args, v_new, 1624);
  EXPECT_FIELD(kda_forward_args, Aqk, 1720);
  EXPECT_FIELD(kda_forward_args, Akk, 1816);
  EXPECT_FIELD(kda_forward_args, checkpoint_every, 1912);
  EXPECT_FIELD(kda_forward_args, h_every, 1916);
  EXPECT_FIELD(kda_forward_args, out_state_indices, 1920);
  EXPECT_FIELD(kda_forward_args, checkpoint_offset, 2016);
  EXPECT_FIELD(kda_forward_args, norm, 2112);
  EXPECT_FIELD(kda_forward_args, h_v_first, 2320);
}

TEST(Abi, BackwardArgs) {
  EXPECT_EQ(sizeof(kda_backward_args), 2296u);
  EXPECT_FIELD(kda_backward_args, struct_size, 0);
  EXPECT_FIELD(kda_backward_args, exec, 8);
  EXPECT_FIELD(kda_backward_args, in, 56);
  EXPECT_FIELD(kda_backward_args, h0, 848);
  EXPECT_FIELD(kda_backward_args, d_o, 944);
  EXPECT_FIELD(kda_backward_args, dhT, 1040);
  EXPECT_FIELD(kda_backward_args, h, 1136);
  EXPECT_FIELD(kda_backward_args, v_new, 1232);
  EXPECT_FIELD(kda_backward_args, Aqk, 1328);
  EXPECT_FIELD(kda_backward_args, Akk, 1424);
  EXPECT_FIELD(kda_backward_args, dq, 1520);
  EXPECT_FIELD(kda_backward_args, dk, 1616);
  EXPECT_FIELD(kda_backward_args, dv, 1712);
  EXPECT_FIELD(kda_backward_args, dg, 1808);
  EXPECT_FIELD(kda_backward_args, dbeta, 1904);
  EXPECT_FIELD(kda_backward_args, dA_log, 2000);
  EXPECT_FIELD(kda_backward_args, d_dt_bias, 2096);
  EXPECT_FIELD(kda_backward_args, dh0, 2192);
  EXPECT_FIELD(kda_backward_args, h_every, 2288);
  EXPECT_FIELD(kda_backward_args, h_v_first, 2292);
}

TEST(Abi, ConvInputs) {
  EXPECT_EQ(sizeof(kda_conv_inputs), 480u);
  EXPECT_FIELD(kda_conv_inputs, x, 0);
  EXPECT_FIELD(kda_conv_inputs, weight, 96);
  EXPECT_FIELD(kda_conv_inputs, bias, 192);
  EXPECT_FIELD(kda_conv_inputs, state, 288);
  EXPECT_FIELD(kda_conv_inputs, indices, 384);
}

TEST(Abi, Records) {
  EXPECT_EQ(sizeof(kda_records), 576u);
  EXPECT_FIELD(kda_records, u, 0);
  EXPECT_FIELD(kda_records, k, 96);
  EXPECT_FIELD(kda_records, alpha, 192);
  EXPECT_FIELD(kda_records, indices, 288);
  EXPECT_FIELD(kda_records, ring_first, 384);
  EXPECT_FIELD(kda_records, ring_count, 480);
}

TEST(Abi, DecodeArgs) {
  EXPECT_EQ(sizeof(kda_decode_args), 2408u);
  EXPECT_FIELD(kda_decode_args, struct_size, 0);
  EXPECT_FIELD(kda_decode_args, exec, 8);
  EXPECT_FIELD(kda_decode_args, in, 56);
  EXPECT_FIELD(kda_decode_args, states, 848);
  EXPECT_FIELD(kda_decode_args, o, 1240);
  EXPECT_FIELD(kda_decode_args, conv, 1336);
  EXPECT_FIELD(kda_decode_args, snapshots, 1816);
  EXPECT_FIELD(kda_decode_args, snapshot_slots, 1912);
  EXPECT_FIELD(kda_decode_args, accepted, 2008);
  EXPECT_FIELD(kda_decode_args, out_state_indices, 2104);
  EXPECT_FIELD(kda_decode_args, norm, 2200);
}

TEST(Abi, VerifyArgs) {
  EXPECT_EQ(sizeof(kda_verify_args), 2696u);
  EXPECT_FIELD(kda_verify_args, struct_size, 0);
  EXPECT_FIELD(kda_verify_args, exec, 8);
  EXPECT_FIELD(kda_verify_args, in, 56);
  EXPECT_FIELD(kda_verify_args, states, 848);
  EXPECT_FIELD(kda_verify_args, conv, 1240);
  EXPECT_FIELD(kda_verify_args, o, 1720);
  EXPECT_FIELD(kda_verify_args, records, 1816);
  EXPECT_FIELD(kda_verify_args, parents, 2392);
  EXPECT_FIELD(kda_verify_args, norm, 2488);
}

TEST(Abi, FlushArgs) {
  EXPECT_EQ(sizeof(kda_flush_args), 1312u);
  EXPECT_FIELD(kda_flush_args, struct_size, 0);
  EXPECT_FIELD(kda_flush_args, exec, 8);
  EXPECT_FIELD(kda_flush_args, state, 56);
  EXPECT_FIELD(kda_flush_args, state_indices, 152);
  EXPECT_FIELD(kda_flush_args, records, 248);
  EXPECT_FIELD(kda_flush_args, accept_len, 824);
  EXPECT_FIELD(kda_flush_args, parents, 920);
  EXPECT_FIELD(kda_flush_args, conv_x, 1016);
  EXPECT_FIELD(kda_flush_args, conv_state, 1112);
  EXPECT_FIELD(kda_flush_args, conv_indices, 1208);
  EXPECT_FIELD(kda_flush_args, state_layout, 1304);
  EXPECT_FIELD(kda_flush_args, first_valid_slot, 1308);
}

TEST(Abi, FlushVerifyArgs) {
  EXPECT_EQ(sizeof(kda_flush_verify_args), 3568u);
  EXPECT_FIELD(kda_flush_verify_args, struct_size, 0);
  EXPECT_FIELD(kda_flush_verify_args, exec, 8);
  EXPECT_FIELD(kda_flush_verify_args, in, 56);
  EXPECT_FIELD(kda_flush_verify_args, states, 848);
  EXPECT_FIELD(kda_flush_verify_args, conv, 1240);
  EXPECT_FIELD(kda_flush_verify_args, o, 1720);
  EXPECT_FIELD(kda_flush_verify_args, last, 1816);
  EXPECT_FIELD(kda_flush_verify_args, accept_len, 2392);
  EXPECT_FIELD(kda_flush_verify_args, last_parents, 2488);
  EXPECT_FIELD(kda_flush_verify_args, last_conv_x, 2584);
  EXPECT_FIELD(kda_flush_verify_args, records, 2680);
  EXPECT_FIELD(kda_flush_verify_args, parents, 3256);
  EXPECT_FIELD(kda_flush_verify_args, max_tokens, 3352);
  EXPECT_FIELD(kda_flush_verify_args, reserved, 3356);
  EXPECT_FIELD(kda_flush_verify_args, norm, 3360);
}

TEST(Abi, SegmentMapArgs) {
  EXPECT_EQ(sizeof(kda_segment_map_args), 1232u);
  EXPECT_FIELD(kda_segment_map_args, struct_size, 0);
  EXPECT_FIELD(kda_segment_map_args, exec, 8);
  EXPECT_FIELD(kda_segment_map_args, in, 56);
  EXPECT_FIELD(kda_segment_map_args, d_o, 848);
  EXPECT_FIELD(kda_segment_map_args, M, 944);
  EXPECT_FIELD(kda_segment_map_args, b, 1040);
  EXPECT_FIELD(kda_segment_map_args, d, 1136);
}

TEST(Abi, SegmentMergeArgs) {
  EXPECT_EQ(sizeof(kda_segment_merge_args), 448u);
  EXPECT_FIELD(kda_segment_merge_args, struct_size, 0);
  EXPECT_FIELD(kda_segment_merge_args, exec, 8);
  EXPECT_FIELD(kda_segment_merge_args, M, 56);
  EXPECT_FIELD(kda_segment_merge_args, b, 152);
  EXPECT_FIELD(kda_segment_merge_args, h0, 248);
  EXPECT_FIELD(kda_segment_merge_args, states, 344);
  EXPECT_FIELD(kda_segment_merge_args, state_layout, 440);
  EXPECT_FIELD(kda_segment_merge_args, reverse, 444);
}

TEST(Abi, GateArgs) {
  EXPECT_EQ(sizeof(kda_gate_args), 448u);
  EXPECT_FIELD(kda_gate_args, struct_size, 0);
  EXPECT_FIELD(kda_gate_args, exec, 8);
  EXPECT_FIELD(kda_gate_args, x, 56);
  EXPECT_FIELD(kda_gate_args, A_log, 152);
  EXPECT_FIELD(kda_gate_args, dt_bias, 248);
  EXPECT_FIELD(kda_gate_args, g, 344);
  EXPECT_FIELD(kda_gate_args, gate_form, 440);
  EXPECT_FIELD(kda_gate_args, lower_bound, 444);
}

TEST(Abi, GateBackwardArgs) {
  EXPECT_EQ(sizeof(kda_gate_backward_args), 736u);
  EXPECT_FIELD(kda_gate_backward_args, struct_size, 0);
  EXPECT_FIELD(kda_gate_backward_args, exec, 8);
  EXPECT_FIELD(kda_gate_backward_args, x, 56);
  EXPECT_FIELD(kda_gate_backward_args, A_log, 152);
  EXPECT_FIELD(kda_gate_backward_args, dt_bias, 248);
  EXPECT_FIELD(kda_gate_backward_args, dg, 344);
  EXPECT_FIELD(kda_gate_backward_args, dx, 440);
  EXPECT_FIELD(kda_gate_backward_args, dA_log, 536);
  EXPECT_FIELD(kda_gate_backward_args, d_dt_bias, 632);
  EXPECT_FIELD(kda_gate_backward_args, gate_form, 728);
  EXPECT_FIELD(kda_gate_backward_args, lower_bound, 732);
}

TEST(Abi, NormGateArgs) {
  EXPECT_EQ(sizeof(kda_norm_gate_args), 456u);
  EXPECT_FIELD(kda_norm_gate_args, struct_size, 0);
  EXPECT_FIELD(kda_norm_gate_args, exec, 8);
  EXPECT_FIELD(kda_norm_gate_args, x, 56);
  EXPECT_FIELD(kda_norm_gate_args, gate, 152);
  EXPECT_FIELD(kda_norm_gate_args, weight, 248);
  EXPECT_FIELD(kda_norm_gate_args, y, 344);
  EXPECT_FIELD(kda_norm_gate_args, eps, 440);
  EXPECT_FIELD(kda_norm_gate_args, activation, 448);
  EXPECT_FIELD(kda_norm_gate_args, reserved, 452);
}

TEST(Abi, NormGateBackwardArgs) {
  EXPECT_EQ(sizeof(kda_norm_gate_backward_args), 744u);
  EXPECT_FIELD(kda_norm_gate_backward_args, struct_size, 0);
  EXPECT_FIELD(kda_norm_gate_backward_args, exec, 8);
  EXPECT_FIELD(kda_norm_gate_backward_args, x, 56);
  EXPECT_FIELD(kda_norm_gate_backward_args, gate, 152);
  EXPECT_FIELD(kda_norm_gate_backward_args, weight, 248);
  EXPECT_FIELD(kda_norm_gate_backward_args, dy, 344);
  EXPECT_FIELD(kda_norm_gate_backward_args, dx, 440);
  EXPECT_FIELD(kda_norm_gate_backward_args, dgate, 536);
  EXPECT_FIELD(kda_norm_gate_backward_args, dweight, 632);
  EXPECT_FIELD(kda_norm_gate_backward_args, eps, 728);
  EXPECT_FIELD(kda_norm_gate_backward_args, activation, 736);
  EXPECT_FIELD(kda_norm_gate_backward_args, reserved, 740);
}

TEST(Abi, StageCumsumArgs) {
  EXPECT_EQ(sizeof(kda_stage_cumsum_args), 352u);
  EXPECT_FIELD(kda_stage_cumsum_args, struct_size, 0);
  EXPECT_FIELD(kda_stage_cumsum_args, exec, 8);
  EXPECT_FIELD(kda_stage_cumsum_args, at, 56);
  EXPECT_FIELD(kda_stage_cumsum_args, g, 160);
  EXPECT_FIELD(kda_stage_cumsum_args, G, 256);
}

TEST(Abi, StageChunkIntraArgs) {
  EXPECT_EQ(sizeof(kda_stage_chunk_intra_args), 1216u);
  EXPECT_FIELD(kda_stage_chunk_intra_args, struct_size, 0);
  EXPECT_FIELD(kda_stage_chunk_intra_args, exec, 8);
  EXPECT_FIELD(kda_stage_chunk_intra_args, at, 56);
  EXPECT_FIELD(kda_stage_chunk_intra_args, q, 160);
  EXPECT_FIELD(kda_stage_chunk_intra_args, k, 256);
  EXPECT_FIELD(kda_stage_chunk_intra_args, v, 352);
  EXPECT_FIELD(kda_stage_chunk_intra_args, G, 448);
  EXPECT_FIELD(kda_stage_chunk_intra_args, beta, 544);
  EXPECT_FIELD(kda_stage_chunk_intra_args, Aqk, 640);
  EXPECT_FIELD(kda_stage_chunk_intra_args, Akk_inv, 736);
  EXPECT_FIELD(kda_stage_chunk_intra_args, w, 832);
  EXPECT_FIELD(kda_stage_chunk_intra_args, u, 928);
  EXPECT_FIELD(kda_stage_chunk_intra_args, qG, 1024);
  EXPECT_FIELD(kda_stage_chunk_intra_args, kg, 1120);
}

TEST(Abi, StageRecomputeWUArgs) {
  EXPECT_EQ(sizeof(kda_stage_recompute_w_u_args), 1120u);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, struct_size, 0);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, exec, 8);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, at, 56);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, q, 160);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, k, 256);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, v, 352);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, G, 448);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, beta, 544);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, Akk_inv, 640);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, w, 736);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, u, 832);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, qG, 928);
  EXPECT_FIELD(kda_stage_recompute_w_u_args, kg, 1024);
}

TEST(Abi, StageDeltaHArgs) {
  EXPECT_EQ(sizeof(kda_stage_delta_h_args), 928u);
  EXPECT_FIELD(kda_stage_delta_h_args, struct_size, 0);
  EXPECT_FIELD(kda_stage_delta_h_args, exec, 8);
  EXPECT_FIELD(kda_stage_delta_h_args, at, 56);
  EXPECT_FIELD(kda_stage_delta_h_args, kg, 160);
  EXPECT_FIELD(kda_stage_delta_h_args, w, 256);
  EXPECT_FIELD(kda_stage_delta_h_args, u, 352);
  EXPECT_FIELD(kda_stage_delta_h_args, G, 448);
  EXPECT_FIELD(kda_stage_delta_h_args, h0, 544);
  EXPECT_FIELD(kda_stage_delta_h_args, h, 640);
  EXPECT_FIELD(kda_stage_delta_h_args, v_new, 736);
  EXPECT_FIELD(kda_stage_delta_h_args, hT, 832);
}

TEST(Abi, StageFwdOArgs) {
  EXPECT_EQ(sizeof(kda_stage_fwd_o_args), 736u);
  EXPECT_FIELD(kda_stage_fwd_o_args, struct_size, 0);
  EXPECT_FIELD(kda_stage_fwd_o_args, exec, 8);
  EXPECT_FIELD(kda_stage_fwd_o_args, at, 56);
  EXPECT_FIELD(kda_stage_fwd_o_args, q, 160);
  EXPECT_FIELD(kda_stage_fwd_o_args, v_new, 256);
  EXPECT_FIELD(kda_stage_fwd_o_args, G, 352);
  EXPECT_FIELD(kda_stage_fwd_o_args, Aqk, 448);
  EXPECT_FIELD(kda_stage_fwd_o_args, h, 544);
  EXPECT_FIELD(kda_stage_fwd_o_args, o, 640);
}

TEST(Abi, StageBwdLocalArgs) {
  EXPECT_EQ(sizeof(kda_stage_bwd_local_args), 640u);
  EXPECT_FIELD(kda_stage_bwd_local_args, struct_size, 0);
  EXPECT_FIELD(kda_stage_bwd_local_args, exec, 8);
  EXPECT_FIELD(kda_stage_bwd_local_args, at, 56);
  EXPECT_FIELD(kda_stage_bwd_local_args, v_new, 160);
  EXPECT_FIELD(kda_stage_bwd_local_args, d_o, 256);
  EXPECT_FIELD(kda_stage_bwd_local_args, Aqk, 352);
  EXPECT_FIELD(kda_stage_bwd_local_args, dAqk, 448);
  EXPECT_FIELD(kda_stage_bwd_local_args, dv_local, 544);
}

TEST(Abi, StageBwdDeltaHArgs) {
  EXPECT_EQ(sizeof(kda_stage_bwd_delta_h_args), 1120u);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, struct_size, 0);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, exec, 8);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, at, 56);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, qG, 160);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, kg, 256);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, w, 352);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, G, 448);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, d_o, 544);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, dv_local, 640);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, dhT, 736);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, dh, 832);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, dv_new, 928);
  EXPECT_FIELD(kda_stage_bwd_delta_h_args, dh0, 1024);
}

TEST(Abi, StageBwdWyDqkgArgs) {
  EXPECT_EQ(sizeof(kda_stage_bwd_wy_dqkg_args), 1792u);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, struct_size, 0);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, exec, 8);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, at, 56);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, q, 160);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, k, 256);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, v, 352);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, v_new, 448);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, G, 544);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, beta, 640);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, Akk_inv, 736);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, h, 832);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, dh, 928);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, d_o, 1024);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, dv_new, 1120);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, dq, 1216);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, dk, 1312);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, dv, 1408);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, dbeta, 1504);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, dG, 1600);
  EXPECT_FIELD(kda_stage_bwd_wy_dqkg_args, dAkk, 1696);
}

TEST(Abi, StageBwdIntraArgs) {
  EXPECT_EQ(sizeof(kda_stage_bwd_intra_args), 1120u);
  EXPECT_FIELD(kda_stage_bwd_intra_args, struct_size, 0);
  EXPECT_FIELD(kda_stage_bwd_intra_args, exec, 8);
  EXPECT_FIELD(kda_stage_bwd_intra_args, at, 56);
  EXPECT_FIELD(kda_stage_bwd_intra_args, q, 160);
  EXPECT_FIELD(kda_stage_bwd_intra_args, k, 256);
  EXPECT_FIELD(kda_stage_bwd_intra_args, G, 352);
  EXPECT_FIELD(kda_stage_bwd_intra_args, beta, 448);
  EXPECT_FIELD(kda_stage_bwd_intra_args, dAqk, 544);
  EXPECT_FIELD(kda_stage_bwd_intra_args, dAkk, 640);
  EXPECT_FIELD(kda_stage_bwd_intra_args, dq, 736);
  EXPECT_FIELD(kda_stage_bwd_intra_args, dk, 832);
  EXPECT_FIELD(kda_stage_bwd_intra_args, dbeta, 928);
  EXPECT_FIELD(kda_stage_bwd_intra_args, dG, 1024);
}

TEST(Abi, StageCumsumBackwardArgs) {
  EXPECT_EQ(sizeof(kda_stage_cumsum_backward_args), 448u);
  EXPECT_FIELD(kda_stage_cumsum_backward_args, struct_size, 0);
  EXPECT_FIELD(kda_stage_cumsum_backward_args, exec, 8);
  EXPECT_FIELD(kda_stage_cumsum_backward_args, at, 56);
  EXPECT_FIELD(kda_stage_cumsum_backward_args, g, 160);
  EXPECT_FIELD(kda_stage_cumsum_backward_args, dG, 256);
  EXPECT_FIELD(kda_stage_cumsum_backward_args, dg, 352);
}

TEST(Abi, Stage) {
  EXPECT_EQ(sizeof(kda_stage), 104u);
  EXPECT_FIELD(kda_stage, cu_seqlens, 0);
  EXPECT_FIELD(kda_stage, scale, 96);
  EXPECT_FIELD(kda_stage, state_layout, 100);
}

TEST(Abi, PrefillF32Args) {
  EXPECT_EQ(sizeof(kda_prefill_f32_args), 1032u);
  EXPECT_FIELD(kda_prefill_f32_args, struct_size, 0);
  EXPECT_FIELD(kda_prefill_f32_args, exec, 8);
  EXPECT_FIELD(kda_prefill_f32_args, q, 56);
  EXPECT_FIELD(kda_prefill_f32_args, k, 152);
  EXPECT_FIELD(kda_prefill_f32_args, v, 248);
  EXPECT_FIELD(kda_prefill_f32_args, g, 344);
  EXPECT_FIELD(kda_prefill_f32_args, beta, 440);
  EXPECT_FIELD(kda_prefill_f32_args, h0, 536);
  EXPECT_FIELD(kda_prefill_f32_args, o, 632);
  EXPECT_FIELD(kda_prefill_f32_args, w, 728);
  EXPECT_FIELD(kda_prefill_f32_args, u, 824);
  EXPECT_FIELD(kda_prefill_f32_args, hT, 920);
  EXPECT_FIELD(kda_prefill_f32_args, chunk, 1016);
  EXPECT_FIELD(kda_prefill_f32_args, state_layout, 1020);
  EXPECT_FIELD(kda_prefill_f32_args, scale, 1024);
  EXPECT_FIELD(kda_prefill_f32_args, reserved, 1028);
}

TEST(Abi, ConvArgs) {
  EXPECT_EQ(sizeof(kda_conv_args), 1512u);
  EXPECT_FIELD(kda_conv_args, struct_size, 0);
  EXPECT_FIELD(kda_conv_args, exec, 8);
  EXPECT_FIELD(kda_conv_args, x, 56);
  EXPECT_FIELD(kda_conv_args, weight, 152);
  EXPECT_FIELD(kda_conv_args, bias, 248);
  EXPECT_FIELD(kda_conv_args, cu_seqlens, 344);
  EXPECT_FIELD(kda_conv_args, initial_state, 440);
  EXPECT_FIELD(kda_conv_args, final_state, 536);
  EXPECT_FIELD(kda_conv_args, state_indices, 632);
  EXPECT_FIELD(kda_conv_args, has_initial_state, 728);
  EXPECT_FIELD(kda_conv_args, y, 824);
  EXPECT_FIELD(kda_conv_args, silu, 920);
  EXPECT_FIELD(kda_conv_args, first_valid_slot, 924);
  EXPECT_FIELD(kda_conv_args, out_state_indices, 928);
  EXPECT_FIELD(kda_conv_args, checkpoints, 1024);
  EXPECT_FIELD(kda_conv_args, checkpoint_slots, 1120);
  EXPECT_FIELD(kda_conv_args, checkpoint_offset, 1216);
  EXPECT_FIELD(kda_conv_args, checkpoint_every, 1312);
  EXPECT_FIELD(kda_conv_args, reserved, 1316);
  EXPECT_FIELD(kda_conv_args, x1, 1320);
  EXPECT_FIELD(kda_conv_args, x2, 1416);
}

TEST(Abi, ConvBackwardArgs) {
  EXPECT_EQ(sizeof(kda_conv_backward_args), 1312u);
  EXPECT_FIELD(kda_conv_backward_args, struct_size, 0);
  EXPECT_FIELD(kda_conv_backward_args, exec, 8);
  EXPECT_FIELD(kda_conv_backward_args, x, 56);
  EXPECT_FIELD(kda_conv_backward_args, weight, 152);
  EXPECT_FIELD(kda_conv_backward_args, bias, 248);
  EXPECT_FIELD(kda_conv_backward_args, cu_seqlens, 344);
  EXPECT_FIELD(kda_conv_backward_args, initial_state, 440);
  EXPECT_FIELD(kda_conv_backward_args, dy, 536);
  EXPECT_FIELD(kda_conv_backward_args, d_final_state, 632);
  EXPECT_FIELD(kda_conv_backward_args, dx, 728);
  EXPECT_FIELD(kda_conv_backward_args, dweight, 824);
  EXPECT_FIELD(kda_conv_backward_args, dbias, 920);
  EXPECT_FIELD(kda_conv_backward_args, d_initial_state, 1016);
  EXPECT_FIELD(kda_conv_backward_args, silu, 1112);
  EXPECT_FIELD(kda_conv_backward_args, reserved, 1116);
  EXPECT_FIELD(kda_conv_backward_args, x1, 1120);
  EXPECT_FIELD(kda_conv_backward_args, x2, 1216);
}

}  // namespace
