// safetensors files as layouts. Format: https://github.com/huggingface/safetensors#format
//
//   8 bytes   N, little-endian: bytes of the header
//   N bytes   JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}; "__metadata__" of
//   texts the rest  data; offsets count from its start; tensors are dense, row-major, without holes
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bascule/layout.h"
#include "bascule/status.h"

#pragma GCC visibility push(default)
namespace bascule {

// Headers beyond this are refused, as by the reference implementation. Bytes.
inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;

// A tensor of a file, and where its data lies.
struct SafetensorsTensor {
  LogicalTensor tensor;
  uint64_t begin = 0;  // bytes from the start of the data
  uint64_t end = 0;
};

// What a file says of itself.
struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // by begin, then name
  std::map<std::string, std::string> metadata;
  uint64_t data_offset = 0;  // of the data in the file; may be odd in files of other writers
};

// Parses the header of a file of `file_bytes` bytes; `prefix` is its start: at least the header, or
// the whole file. Untrusted input: sizes, offsets, overlaps, holes and duplicates are checked, and
// InvalidArgument names the tensor. Unimplemented: a dtype that DType does not have.
[[nodiscard]] Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view prefix,
                                                               uint64_t file_bytes);

// A file in memory: mapped or read by the caller, who keeps it for the session.
struct SafetensorsFile {
  std::string path;  // for messages; the buffer's name
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  MemoryKind kind = MemoryKind::kHost;  // kHost or kShared: the header is read here
  int fd = -1;                          // kShared: of the file's pages
  uint64_t fd_offset = 0;               // kShared: of `data` in it
};

// One buffer a file (its data without the header) and one binding a tensor. A tensor that is in two
// files is an error.
[[nodiscard]] Result<Layout> LayoutOfSafetensors(std::span<const SafetensorsFile> files);

}  // namespace bascule
#pragma GCC visibility pop
