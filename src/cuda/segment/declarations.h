// What the registry and other folders see of maps of segments.
#pragma once
#include <cstdint>
#include <string>

#include "contract/problem.h"

namespace kda::cuda {

const char* segment_hopper_why_not(const SegmentMapProblem& p);
uint64_t segment_hopper_workspace(const SegmentMapProblem& p);
void segment_hopper(const SegmentMapProblem& p);
std::string segment_hopper_form(const SegmentMapProblem& p);
const char* segment_chunk_why_not(const SegmentMapProblem& p);
const char* segment_chunk_too_rough(const SegmentMapProblem& p);
uint64_t segment_chunk_workspace(const SegmentMapProblem& p);
void segment_chunk(const SegmentMapProblem& p);
std::string segment_chunk_form(const SegmentMapProblem& p);
const char* segment_recurrent_why_not(const SegmentMapProblem& p);
uint64_t segment_recurrent_workspace(const SegmentMapProblem& p);
void segment_recurrent(const SegmentMapProblem& p);
std::string segment_recurrent_form(const SegmentMapProblem& p);
const char* segment_merge_why_not(const SegmentMergeProblem& p);
void segment_merge(const SegmentMergeProblem& p);

}  // namespace kda::cuda
