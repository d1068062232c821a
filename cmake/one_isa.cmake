# With sanitizers kernels are compiled for one instruction set, AVX2 on x86, which takes a quarter of the time. Threads
# do the same in all of them; accesses behind a tensor, which tails of other widths could make, fail without sanitizers,
# too (KDA_TEST_GUARD in tests/cpp).
target_include_directories(kda_objects BEFORE PRIVATE tests/one_isa)
target_compile_definitions(kda_objects PRIVATE HWY_COMPILE_ONLY_STATIC)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  target_compile_options(kda_objects PRIVATE -mavx2 -mfma -mf16c -mbmi -mbmi2 -maes -mpclmul)
endif()
# Below -O2 g++ leaves out vzeroupper, and whatever runs behind a kernel, libm and the oracle, takes ten times as long.
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  target_compile_options(kda_objects PRIVATE -fexpensive-optimizations)
endif()
