# Every foreign library, found in one place.

find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(OpenSSL REQUIRED)  # HMAC-SHA256 of the shm handshake; gRPC brings it anyway
pkg_check_modules(hwy REQUIRED IMPORTED_TARGET libhwy)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)
if(BASCULE_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
if(BASCULE_BUILD_BENCH)
  find_package(CLI11 REQUIRED)
endif()
