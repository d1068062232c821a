# What C and C++ users need: the library, its header, find_package(kda) with the target kda::kda, and kda.pc. All of
# it may be moved as a whole. In the wheel, which scikit-build-core makes, it lies inside the Python package, and the
# library beside the binding. A wheel has no links: there the name libkda.so is left out, and linkers get the name of
# the file itself.
include(CMakePackageConfigHelpers)
if(SKBUILD)
  set(KDA_INSTALL_ROOT kda)
  set(KDA_INSTALL_LIBRARY kda)
  set(KDA_INSTALL_INCLUDE kda/include)
  set(KDA_INSTALL_DATA kda/lib)
  set(KDA_INSTALL_NAMELINK NAMELINK_SKIP)
  # The file as an option: pkgconf escapes spaces in options alone.
  set(KDA_PC_LIBRARY "-L\${libdir} -l:$<TARGET_FILE_NAME:kda>")
  install(TARGETS kda_binding LIBRARY DESTINATION kda)
else()
  include(GNUInstallDirs)
  set(KDA_INSTALL_ROOT .)
  set(KDA_INSTALL_LIBRARY ${CMAKE_INSTALL_LIBDIR})
  set(KDA_INSTALL_INCLUDE ${CMAKE_INSTALL_INCLUDEDIR})
  set(KDA_INSTALL_DATA ${CMAKE_INSTALL_LIBDIR})
  set(KDA_INSTALL_NAMELINK "")
  set(KDA_PC_LIBRARY "-L\${libdir} -lkda")
  install(FILES LICENSE THIRD_PARTY_NOTICES DESTINATION ${CMAKE_INSTALL_DOCDIR})
endif()

install(TARGETS kda EXPORT kda LIBRARY DESTINATION ${KDA_INSTALL_LIBRARY} ${KDA_INSTALL_NAMELINK}
  INCLUDES DESTINATION ${KDA_INSTALL_INCLUDE})
install(FILES include/kda/kda.h DESTINATION ${KDA_INSTALL_INCLUDE}/kda)

install(EXPORT kda NAMESPACE kda:: FILE kdaConfig.cmake DESTINATION ${KDA_INSTALL_DATA}/cmake/kda)
# Before 1.0 a minor version may take things away.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kdaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kdaConfigVersion.cmake DESTINATION ${KDA_INSTALL_DATA}/cmake/kda)

# kda.pc names places relative to its own folder.
function(kda_relative variable path from)
  cmake_path(SET path NORMALIZE /x/${path})
  cmake_path(SET from NORMALIZE /x/${from})
  cmake_path(RELATIVE_PATH path BASE_DIRECTORY ${from} OUTPUT_VARIABLE path)
  set(${variable} ${path} PARENT_SCOPE)
endfunction()
kda_relative(KDA_PC_PREFIX ${KDA_INSTALL_ROOT} ${KDA_INSTALL_DATA}/pkgconfig)
kda_relative(KDA_PC_LIBDIR ${KDA_INSTALL_LIBRARY} ${KDA_INSTALL_ROOT})
kda_relative(KDA_PC_INCLUDEDIR ${KDA_INSTALL_INCLUDE} ${KDA_INSTALL_ROOT})
configure_file(cmake/kda.pc.in ${PROJECT_BINARY_DIR}/kda.pc.in @ONLY)
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/kda.pc INPUT ${PROJECT_BINARY_DIR}/kda.pc.in)
install(FILES ${PROJECT_BINARY_DIR}/kda.pc DESTINATION ${KDA_INSTALL_DATA}/pkgconfig)
