# What `cmake --install` puts under the prefix: libbascule.so, its headers, and what find_package
# and pkg-config look for. Components: runtime, development.

include(CMakePackageConfigHelpers)
set(config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/bascule)

install(
  TARGETS bascule
  EXPORT basculeTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT development)
install(
  DIRECTORY include/bascule
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT development
  FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE THIRD_PARTY_NOTICES DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT runtime)

install(
  EXPORT basculeTargets
  NAMESPACE bascule::
  DESTINATION ${config_folder}
  COMPONENT development)
configure_package_config_file(cmake/basculeConfig.cmake.in basculeConfig.cmake
                              INSTALL_DESTINATION ${config_folder} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(basculeConfigVersion.cmake COMPATIBILITY ${BASCULE_COMPATIBILITY})
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/basculeConfig.cmake
        ${CMAKE_CURRENT_BINARY_DIR}/basculeConfigVersion.cmake
  DESTINATION ${config_folder}
  COMPONENT development)

# bascule.pc finds everything from the folder that it lies in, so that an installed tree may be moved.
file(RELATIVE_PATH bascule_pc_include ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig
     ${CMAKE_INSTALL_FULL_INCLUDEDIR})
configure_file(cmake/bascule.pc.in bascule.pc @ONLY)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/bascule.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT development)
