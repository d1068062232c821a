# CUDA, according to KDA_CUDA. Sets KDA_WITH_CUDA; kda_add_cuda(target) adds the kernels, or what the library knows of
# them without CUDA.
set(KDA_WITH_CUDA OFF)
if(NOT KDA_CUDA MATCHES "^(ON|AUTO|OFF)$")
  message(FATAL_ERROR "kda: KDA_CUDA: expected ON, AUTO or OFF, got ${KDA_CUDA}")
endif()

# What kernels are compiled for. The compiler proper runs once for each "arch", the assembler for each "code". There is
# no PTX for sm_90a and sm_100a: no other GPU takes it, and it would be two thirds of the code for Hopper.
set(KDA_CUDA_PORTABLE_CODE)
foreach(arch ${KDA_CUDA_PORTABLE})
  if(arch STREQUAL 80)
    list(APPEND KDA_CUDA_PORTABLE_CODE arch=compute_80,code=[compute_80,sm_80])
  elseif(NOT arch MATCHES "^(90|100)$")
    message(FATAL_ERROR "kda: KDA_CUDA_PORTABLE: expected some of 80, 90 and 100, got ${KDA_CUDA_PORTABLE}")
  endif()
endforeach()
set(newer ${KDA_CUDA_PORTABLE})
list(FILTER newer INCLUDE REGEX "^(90|100)$")
if(newer)
  list(TRANSFORM newer PREPEND sm_)
  list(JOIN newer "," newer)
  list(APPEND KDA_CUDA_PORTABLE_CODE arch=compute_90,code=[${newer}])
endif()
set(KDA_CUDA_HOPPER arch=compute_90a,code=sm_90a)
set(KDA_CUDA_BLACKWELL arch=compute_100a,code=sm_100a)
set(KDA_CUDA_NAMES ${KDA_CUDA_PORTABLE} 90a 100a)
list(TRANSFORM KDA_CUDA_NAMES PREPEND sm_)
list(TRANSFORM KDA_CUDA_NAMES REPLACE "^sm_80$" "sm_80 (and PTX)")
list(SORT KDA_CUDA_NAMES COMPARE NATURAL)
list(JOIN KDA_CUDA_NAMES ", " KDA_CUDA_NAMES)

if(NOT KDA_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(KDA_WITH_CUDA ON)
    set(CMAKE_CUDA_ARCHITECTURES 80)  # a default to please CMake: kda_cuda_kernels names the real ones
    enable_language(CUDA)
    # cmake 3.25 does not know that nvcc speaks C++20.
    foreach(kind STANDARD EXTENSION)
      if(NOT DEFINED CMAKE_CUDA20_${kind}_COMPILE_OPTION)
        set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
      endif()
    endforeach()
    set(CMAKE_CUDA_STANDARD 20)
    find_package(CUDAToolkit REQUIRED)
    message(STATUS "kda: CUDA kernels for ${KDA_CUDA_NAMES}, with nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
  elseif(KDA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "kda: KDA_CUDA=ON but no nvcc was found (set CUDACXX, or KDA_CUDA=OFF)")
  else()
    message(STATUS "kda: no nvcc found, building for the CPU only (set CUDACXX, or KDA_CUDA=ON to insist)")
  endif()
endif()

# engine/ and files that begin with hopper_ or blackwell_ are for these GPUs alone. All others run from sm_80 on.
set(KDA_CUDA_FILES_PORTABLE
  src/cuda/backward/chunk.cu
  src/cuda/backward/recurrent.cu
  src/cuda/backward/sums.cu
  src/cuda/conv/backward.cu
  src/cuda/conv/conv.cu
  src/cuda/decode/decode.cu
  src/cuda/decode/snapshots.cu
  src/cuda/decode/sweep.cu
  src/cuda/drafts/flush_registers.cu
  src/cuda/drafts/general.cu
  src/cuda/drafts/mma.cu
  src/cuda/drafts/recurrent.cu
  src/cuda/drafts/recurrent_flush_verify.cu
  src/cuda/drafts/recurrent_ring.cu
  src/cuda/drafts/recurrent_verify.cu
  src/cuda/drafts/roll.cu
  src/cuda/gate/gate.cu
  src/cuda/norm/gate.cu
  src/cuda/prefill/chunk.cu
  src/cuda/prefill/recurrent.cu
  src/cuda/segment/chunk.cu
  src/cuda/segment/hopper.cu
  src/cuda/segment/map.cu
  src/cuda/segment/merge.cu
  src/cuda/segment/recurrent.cu
  src/cuda/stages/backward.cu
  src/cuda/stages/chunk_intra.cu
  src/cuda/stages/cumsum.cu
  src/cuda/stages/delta_h.cu
  src/cuda/stages/fwd_o.cu
  src/cuda/stages/prefill_f32.cu)
set(KDA_CUDA_FILES_HOPPER
  src/cuda/backward/hopper_backward_chunk.cu
  src/cuda/engine/reverse.cu
  src/cuda/engine/maps.cu
  src/cuda/engine/hopper_prefill_pairs.cu
  src/cuda/engine/hopper_prefill_segments.cu
  src/cuda/stages/hopper_stages_wy_dqkg.cu)
set(KDA_CUDA_FILES_PAIRS src/cuda/engine/schedule.cu)
set(KDA_CUDA_FILES_BLACKWELL
  src/cuda/engine/blackwell_prefill.cu
  src/cuda/engine/blackwell_prefill_segments.cu
  src/cuda/blackwell_stages/bwd_delta_h.cu
  src/cuda/blackwell_stages/delta_h.cu
  src/cuda/blackwell_stages/fwd_o.cu
  src/cuda/blackwell_stages/wy_dqkg.cu)
set(KDA_CUDA_FILES ${KDA_CUDA_FILES_PORTABLE} ${KDA_CUDA_FILES_HOPPER} ${KDA_CUDA_FILES_PAIRS}
  ${KDA_CUDA_FILES_BLACKWELL})

function(kda_cuda_code target)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF)
  list(TRANSFORM ARGN PREPEND --generate-code=)
  target_compile_options(${target} PRIVATE ${ARGN})
endfunction()

# One object library per set of architectures.
function(kda_cuda_kernels target name code)
  add_library(kda_cuda_${name} OBJECT ${ARGN})
  kda_cuda_code(kda_cuda_${name} ${code})
  target_include_directories(kda_cuda_${name} PRIVATE include src)
  target_compile_options(kda_cuda_${name} PRIVATE --compress-mode=size --expt-relaxed-constexpr -Xptxas=-warn-spills -Xcompiler=-Wall)
  target_sources(${target} INTERFACE $<TARGET_OBJECTS:kda_cuda_${name}>)
endfunction()

# Without CUDA: all that is said of calls on GPUs, which explain and workspace need for an assumed one. The same files
# are compiled as C++. src/cuda_host has headers in place of the toolkit's, and names no kernel, so none is compiled:
# with optimisation, that is. They make the library 0.2 MB larger and take a core 50 s. -Os takes as long as -O1, and
# half of the room. The emulator compiles them with warnings and sanitizers.
function(kda_add_without_cuda target)
  add_library(kda_without_cuda OBJECT ${KDA_CUDA_FILES} src/cuda/runtime.cc src/cuda_host/runtime.cc)
  set_source_files_properties(${KDA_CUDA_FILES} PROPERTIES LANGUAGE CXX)
  target_include_directories(kda_without_cuda BEFORE PRIVATE src/cuda_host src/cuda_host/include)
  target_include_directories(kda_without_cuda PRIVATE include src)
  target_compile_definitions(kda_without_cuda PRIVATE KDA_WITH_CUDA=0 "KDA_CUDA_ARCHITECTURES=\"\"")
  target_compile_options(kda_without_cuda PRIVATE -Os -w)
  if(KDA_SANITIZE)
    target_compile_options(kda_without_cuda PRIVATE -fno-sanitize=all)
  endif()
  target_sources(${target} INTERFACE $<TARGET_OBJECTS:kda_without_cuda>)
  set(KDA_CUDA_OBJECTS $<TARGET_OBJECTS:kda_without_cuda> PARENT_SCOPE)
endfunction()

function(kda_add_cuda target)
  if(NOT KDA_WITH_CUDA)
    kda_add_without_cuda(${target})
    set(KDA_CUDA_OBJECTS ${KDA_CUDA_OBJECTS} PARENT_SCOPE)
    return()
  endif()
  target_sources(${target} PRIVATE src/cuda/runtime.cc)
  set_source_files_properties(src/cuda/runtime.cc PROPERTIES COMPILE_DEFINITIONS
    "KDA_WITH_CUDA=1;KDA_CUDA_ARCHITECTURES=\"${KDA_CUDA_NAMES}\"")
  target_link_libraries(${target} PUBLIC CUDA::cudart_static)
  kda_cuda_kernels(${target} portable "${KDA_CUDA_PORTABLE_CODE}" ${KDA_CUDA_FILES_PORTABLE})
  kda_cuda_kernels(${target} hopper "${KDA_CUDA_HOPPER}" ${KDA_CUDA_FILES_HOPPER})
  kda_cuda_kernels(${target} pairs "${KDA_CUDA_HOPPER};${KDA_CUDA_BLACKWELL}" ${KDA_CUDA_FILES_PAIRS})
  kda_cuda_kernels(${target} blackwell "${KDA_CUDA_BLACKWELL}" ${KDA_CUDA_FILES_BLACKWELL})
  set(KDA_CUDA_OBJECTS $<TARGET_OBJECTS:kda_cuda_portable> $<TARGET_OBJECTS:kda_cuda_hopper>
    $<TARGET_OBJECTS:kda_cuda_pairs> $<TARGET_OBJECTS:kda_cuda_blackwell> PARENT_SCOPE)
endfunction()
