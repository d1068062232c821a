# Flags for every target of ours: a memory fault ends the process instead of becoming a tool for an attack, and no
# binary names a folder of the machine that built it. Sanitized builds have neither: sanitizers check more than the
# first flags do, and their reports need the paths that the second remove.
# -fcf-protection is left out: it counts only where all libraries of a process have it, and libcudart has not.

# Programs are position-independent, whatever the compiler's default: CMAKE_POSITION_INDEPENDENT_CODE now reaches the
# linker.
include(CheckPIESupported)
check_pie_supported()

# All functions are looked up when a library is loaded, so that the table of their addresses is read-only from then on.
# No stack is code, and no code is written to.
add_link_options(LINKER:-z,relro LINKER:-z,now LINKER:-z,noexecstack LINKER:-z,text)

# A .cu file has host code, too: nvcc's -Xcompiler passes an option to the host compiler.
function(kda_compile_options)
  foreach(option ${ARGN})
    add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:${option}> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${option}>)
  endforeach()
endfunction()

# Canaries cost nothing that can be measured at K = 128, and 3 % of decode where rows have tails, K = 100. With all
# addresses known, a call needs no detour through the linker's stubs: in a tiny call that pays for most of what
# canaries cost.
kda_compile_options(-fstack-protector-strong -fno-plt)

# Copies that know the size of what they write to: those of glibc, which warn where the compiler does not optimise.
# Some systems define another level. The host code of .cu files copies nothing.
add_compile_options("$<$<AND:$<COMPILE_LANGUAGE:C,CXX>,$<NOT:$<CONFIG:Debug>>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")

# The paths in __FILE__ and debug information. A build folder inside the source folder needs no option of its own.
# Without one, all builds of a clone compile with the same options, so that ccache gives the wheel what the tests'
# build has compiled.
kda_compile_options(-ffile-prefix-map=${PROJECT_SOURCE_DIR}=.)
cmake_path(IS_PREFIX PROJECT_SOURCE_DIR ${PROJECT_BINARY_DIR} NORMALIZE inside)
if(NOT inside)
  kda_compile_options(-ffile-prefix-map=${PROJECT_BINARY_DIR}=build)
endif()
