// Writes seeds for the fuzzers: fuzz_seeds FOLDER makes FOLDER/<fuzzer>/ with valid inputs of every
// kind, from which mutations start.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>

#include "bascule/layout_json.h"
#include "bascule/mesh.h"
#include "coordinator/messages.h"
#include "layout/world_template.h"
#include "session/messages.h"
#include "transport/shm/frame.h"

namespace bascule {
namespace {

class Folder {
 public:
  Folder(const std::filesystem::path& root, const std::string& fuzzer) : path_(root / fuzzer) {
    std::filesystem::create_directories(path_);
  }
  void Add(const std::string& bytes) {
    std::ofstream out(path_ / ("seed-" + std::to_string(count_++)), std::ios::binary);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!out) std::cerr << "cannot write to " << path_ << "\n";
  }

 private:
  std::filesystem::path path_;
  int count_ = 0;
};

// A rank of a mesh of two axes: a fused tensor, a cut one, a replicated one, an alias.
Layout SomeLayout(std::byte* memory) {
  Layout layout;
  layout.tensors = {{"model.layers.0.q", {8, 4}, DType::kBF16, false},
                    {"model.layers.0.k", {4, 4}, DType::kBF16, false},
                    {"model.norm", {4}, DType::kF32, true}};
  layout.buffers = {{"qk", memory, 96, MemoryKind::kHost, -1, 0},
                    {"norm", memory, 16, MemoryKind::kHost, -1, 0}};
  for (uint32_t i = 0; i < 3; ++i) {
    Binding binding;
    binding.tensor = i;
    binding.buffer = i == 2 ? 1 : 0;
    binding.box = Box::Whole(layout.tensors[i].shape);
    binding.byte_offset = i == 1 ? 64 : 0;
    binding.byte_strides =
        i == 2 ? std::array<int64_t, kMaxDims>{4} : std::array<int64_t, kMaxDims>{8, 2};
    binding.dtype = layout.tensors[i].dtype;
    layout.bindings.push_back(binding);
  }
  layout.aliases = {{"lm_head", "model.layers.0.q"}};
  return layout;
}

constexpr const char* kDeclaredWorld = R"({"bascule_world": 1,
  "mesh": [{"axis": "fsdp", "size": 4}, {"axis": "tp", "size": 2}],
  "tensors": [{"name": "a", "shape": [16, 6], "dtype": "BF16",
               "placements": {"fsdp": {"strided_shard": 0, "split_factor": 2}, "tp": {"shard": 0}}}],
  "flat": [{"axes": ["fsdp"], "cuts": [0, 10, 20, 30, 38],
            "tensors": [{"name": "b", "shape": [6, 4], "dtype": "F32"},
                        {"name": "c", "shape": [12], "dtype": "F32", "start": 26}]}],
  "aliases": {"d": "a"}, "unused": ["model.mtp.*"]})";
constexpr const char* kExpandedWorld = R"({"bascule_world": 1,
  "mesh": [{"axis": "tp", "size": 2}],
  "lists": [[[[0, 4]], [[4, 8]]], [[[0, 6]]]],
  "classes": [{"shape": [8, 6], "dtype": "BF16",
               "products": [[{"list": 0, "axes": ["tp"]}, {"list": 1, "axes": []}]]}],
  "names": {"a": 0, "b": 0}})";

std::string Safetensors(const std::string& header, size_t data) {
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  return file + header + std::string(data, 'x');
}

void WriteLayouts(const std::filesystem::path& root) {
  std::byte memory[128];
  Layout layout = SomeLayout(memory);
  Folder json(root, "layout_json");
  json.Add(*LayoutToJson(layout));
  json.Add(*LayoutToJson(layout, 1));
  Folder blobs(root, "world_template");
  for (const char* text : {kDeclaredWorld, kExpandedWorld}) {
    json.Add(text);
    auto world = WorldFromJson(text);
    if (!world.ok()) std::abort();
    blobs.Add(world->world->Serialize());
  }
  auto world = TemplateOf(layout);
  if (!world.ok()) std::abort();
  blobs.Add(world->Serialize());

  Folder files(root, "safetensors");
  const std::string one = R"({"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}})";
  const std::string two =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]},)"
      R"("b":{"dtype":"I64","shape":[],"data_offsets":[6,14]}})";
  for (const auto& [header, data] : {std::pair(one, 16), std::pair(two, 14)}) {
    const std::string file = Safetensors(header, static_cast<size_t>(data));
    std::string length(8, '\0');
    for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(file.size() >> (8 * i));
    files.Add(length + file);
  }
}

void WritePeerMessages(const std::filesystem::path& root) {
  Folder folder(root, "peer_messages");
  PeerRequest request;
  request.method = PeerMethod::kSums;
  request.id = {7, 3};
  request.engine = "e0";
  request.live = {0, 2};
  request.wanted = {{"model.norm", Box{{0, 4}}, DType::kF32}};
  folder.Add(std::string(1, 0) + Encode(request));
  OpenReply open;
  open.generation = 4;
  open.header = "header";
  open.regions = {"region"};
  open.direct = true;
  open.places = {{{0, 8, Box{{0, 4}, {1, 3}}, {4, 2}, DType::kBF16}}};
  folder.Add(std::string(1, 1) + Encode(open));
  folder.Add(std::string(1, 2) + Encode(SumsReply{{7, 3}, {"model"}, {{11, 4}}}));
}

void WriteFrames(const std::filesystem::path& root) {
  Folder folder(root, "transport_frames");
  const std::string start = {'\x10', '\x40'};
  auto add = [&](shm::FrameType type, const std::string& payload) {
    folder.Add(start + shm::EncodeFrame(type, 1, payload, false));
  };
  shm::Hello hello;
  hello.job = "job";
  hello.name = "trainer 0";
  add(shm::FrameType::kHello, Encode(hello));
  add(shm::FrameType::kChallenge, Encode(shm::Challenge{}));
  add(shm::FrameType::kWelcome, Encode(shm::Welcome{}));
  add(shm::FrameType::kOpen, Encode(shm::Open{}));
  add(shm::FrameType::kOpened, Encode(shm::Opened{}));
  add(shm::FrameType::kError, shm::Encode(Status(Code::kRetired, "gone").WithPeer("trainer 1")));
}

void WriteControlMessages(const std::filesystem::path& root) {
  Folder folder(root, "control_messages");
  auto step = [](uint8_t method, const std::string& bytes) {
    const std::string head = {static_cast<char>(method), static_cast<char>(bytes.size()),
                              static_cast<char>(bytes.size() >> 8), '\x05'};
    return head + bytes;
  };
  JoinRequest join;
  join.job = "job";
  join.member.role = Role::kTrainer;
  join.member.incarnation = 5;
  join.member.addresses = {{"shm", "@x"}};
  HeldRequest held;
  held.incarnation = 5;
  held.held.id = {1, 1};
  held.held.replica_sums = {{3, 4}};
  HeartbeatRequest beat;
  beat.incarnation = 5;
  beat.state.held = {held.held};
  beat.state.report = {{1, 1}, 1, 10, 5, 5, "error", 1};
  const std::string query = Encode(ControlQuery{.incarnation = 5, .id = {1, 1}});
  std::string all = step(0, Encode(join)) + step(2, Encode(held)) + step(1, Encode(beat));
  for (uint8_t method = 5; method < 8; ++method) all += step(method, query);
  folder.Add(all);
  folder.Add(step(3, Encode(join.member)));
  Membership members;
  members.members = {join.member};
  folder.Add(step(4, Encode(members)));
}

}  // namespace
}  // namespace bascule

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: fuzz_seeds FOLDER\n";
    return 2;
  }
  bascule::WriteLayouts(argv[1]);
  bascule::WritePeerMessages(argv[1]);
  bascule::WriteFrames(argv[1]);
  bascule::WriteControlMessages(argv[1]);
  return 0;
}
