# Flags for every target of ours: a fault of memory ends the process instead of becoming somebody's tool, and no binary
# names a folder of the machine that built it. Sanitizers check more than the first, and their reports need the second's
# paths: sanitized builds have neither.
# Left out is -fcf-protection: it counts only where all libraries of a process have it, and libcudart has not.

# Programs are position-independent, whatever the compiler's default: CMAKE_POSITION_INDEPENDENT_CODE now reaches the linker.
include(CheckPIESupported)
check_pie_supported()

# All functions are looked up when a library is loaded, so that the table of their addresses is read-only from then on.
# No stack is code, and no code is written to.
add_link_options(LINKER:-z,relro LINKER:-z,now LINKER:-z,noexecstack LINKER:-z,text)

# A .cu file has host code, too: nvcc's -Xcompiler hands an option to the compiler of that.
function(kda_compile_options)
  foreach(option ${ARGN})
    add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:${option}> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${option}>)
  endforeach()
endfunction()

# Canaries cost nothing that can be measured at K = 128, and 3 % of decode where rows have tails, K = 100. With all addresses
# known, a call needs no detour through the linker's stubs: in a tiny call that pays for most of them.
kda_compile_options(-fstack-protector-strong -fno-plt)

# Copies that know the size of what they write to: glibc's, which warn where the compiler does not optimise. Some systems
# define another level. The host code of .cu files copies nothing.
add_compile_options("$<$<AND:$<COMPILE_LANGUAGE:C,CXX>,$<NOT:$<CONFIG:Debug>>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")

# __FILE__ and debug information. A build folder inside the source's needs no word of its own; and without one, all builds
# of a clone compile with the same options, so that ccache gives the wheel what the tests' build has compiled.
kda_compile_options(-ffile-prefix-map=${PROJECT_SOURCE_DIR}=.)
cmake_path(IS_PREFIX PROJECT_SOURCE_DIR ${PROJECT_BINARY_DIR} NORMALIZE inside)
if(NOT inside)
  kda_compile_options(-ffile-prefix-map=${PROJECT_BINARY_DIR}=build)
endif()
