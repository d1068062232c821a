// What the kernels of the stages are launched with, by the stages themselves and by prefill_f32.
#pragma once
#include "cuda/stages/chunks.h"

namespace kda::cuda::stages {

// F1.
struct CumsumCall {
  Chunks chunks;
  Rows g, G;
  int32_t HV, K;
};
void run(const kda_exec& exec, const CumsumCall& c);

// F2, F3.
struct IntraCall {
  Chunks chunks;
  Rows q, k, v, beta;
  Rows G;       // or g, natural logarithms, if `steps`
  Rows sums;    // out, optional: G
  Rows Aqk, T;  // T is read if Aqk is absent and not `solve`
  Rows w, u, qG, kg;
  Rows ends;  // out, optional: G of the last row of chunks [B,chunks,HV,K], all of which are whole
  int32_t HV, group, K, V;
  int32_t chunk;  // of T, w, u, qG, kg: 32 or 64
  // Bytes from one chunk of w or u to the next; all rows of a chunk are written then. 0: chunks follow by token.
  int64_t w_skip, u_skip;
  float scale;
  bool steps, solve;
};
void run(const kda_exec& exec, const IntraCall& c, bool exact);

// F4.
struct ScanCall {
  Dims dims;
  Chunks chunks;
  Rows kg, w, u, G, v_new;
  Rows h0, h, hT;  // lines
  int64_t h_rows;
  bool v_first;
  Rows qG, Aqk, ends, o;  // with outputs; ends: G of the last row of chunks [B,chunks,HV,K]
  float scale;
};
void run(const kda_exec& exec, const ScanCall& c, bool exact);
// F4 and F5 in one kernel, in f32, from qG and ends in place of q and G, without h and v_new.
bool makes_outputs(const kda_exec& exec, const Dims& d);
void run_with_outputs(const kda_exec& exec, const ScanCall& c);

// F5.
struct OutputCall {
  Chunks chunks;
  Rows q, v_new, G, Aqk, o;
  Rows h;  // lines
  int64_t h_rows;
  int32_t HV, group, K, V;
  float scale;
  bool v_first;
};
void run(const kda_exec& exec, const OutputCall& c, bool exact);

}  // namespace kda::cuda::stages
