# Build rules shared by every folder.

# Which versions of the library may stand in for one another (docs/compatibility.md): until 1.0
# those of one minor version.
if(PROJECT_VERSION_MAJOR EQUAL 0)
  set(BASCULE_SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  set(BASCULE_COMPATIBILITY SameMinorVersion)
else()
  set(BASCULE_SOVERSION ${PROJECT_VERSION_MAJOR})
  set(BASCULE_COMPATIBILITY SameMajorVersion)
endif()

add_library(bascule_flags INTERFACE)
target_compile_options(bascule_flags INTERFACE -Wall -Wextra -Wshadow -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(bascule_flags INTERFACE -Wno-restrict)  # gcc bug 105651: std::string's +
endif()
target_include_directories(bascule_flags INTERFACE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_compile_features(bascule_flags INTERFACE cxx_std_20)
if(BASCULE_SANITIZE)
  target_compile_options(bascule_flags INTERFACE -fsanitize=${BASCULE_SANITIZE} -fno-omit-frame-pointer
                                                 -fno-sanitize-recover=all)
  target_link_options(bascule_flags INTERFACE -fsanitize=${BASCULE_SANITIZE})
endif()

# bascule_layer(NAME DEPENDS...): the static library bascule_NAME of every .cc below src/NAME,
# linked to the layers and libraries it may use. Dependencies point downward only.
function(bascule_layer name)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  if(NOT sources)
    message(FATAL_ERROR "layer ${name} has no sources")
  endif()
  add_library(bascule_${name} STATIC ${sources})
  target_link_libraries(bascule_${name} PUBLIC bascule_flags ${ARGN})
endfunction()

# bascule_tests(FOLDER DEPENDS...): one test program, test_FOLDER, of every *_test.cc in the folder.
function(bascule_tests folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cc)
  if(NOT sources)
    return()
  endif()
  add_executable(test_${folder} ${sources})
  target_include_directories(test_${folder} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(test_${folder} PRIVATE ${ARGN} GTest::gtest GTest::gtest_main GTest::gmock)
  gtest_discover_tests(test_${folder} DISCOVERY_TIMEOUT 60 PROPERTIES LABELS ${folder} TIMEOUT 300)
endfunction()
