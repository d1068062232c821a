# Kernels for one instruction set, AVX2 on x86: threads do the same in all instruction sets, and clang takes a quarter
# of the time.
target_include_directories(kda_objects BEFORE PRIVATE tests/one_isa)
target_compile_definitions(kda_objects PRIVATE HWY_COMPILE_ONLY_STATIC)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(kda_objects PRIVATE -mavx2 -mfma -mf16c -mbmi -mbmi2 -maes -mpclmul)
endif()
