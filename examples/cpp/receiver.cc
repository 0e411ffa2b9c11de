// A rank of a tensor-parallel engine: follows the sender until it leaves, and checks every element.
#include <thread>

#include "bascule/mesh.h"
#include "example.h"

using bascule::Block;
using bascule::Code;
using bascule::Deadline;
using namespace std::chrono_literals;

namespace {

// Moves this rank to the version, if every rank of the engine can.
bascule::Status Follow(bascule::Update& update) {
  // Lands in the background, beside the live weights. A failure is this rank's vote against it.
  bascule::Status status = update.Stage(Deadline::In(60s));
  if (status.ok()) status = update.WaitStaged(Deadline::In(60s));
  // Waits for the other ranks. An engine that generates meanwhile asks Ready before it pauses.
  if (status.ok()) status = update.Commit(Deadline::In(2s));
  return status;
}

// An update that ended and no more: the version is gone, or another rank is not there yet or
// failed.
bool PollAgain(Code code) {
  return code == Code::kRetired || code == Code::kNotDecided || code == Code::kAborted;
}

}  // namespace

int main(int argc, char** argv) {
  const example::Options options(
      argc, argv, {{"coordinator", "127.0.0.1:7070"}, {"rank", "0"}, {"ranks", "2"}});
  const uint32_t rank = options.Number("rank");
  const uint32_t ranks = options.Number("ranks");

  // How the engine holds the model: rows or columns of a tensor, q, k and v in one array.
  const auto t = example::Tensors();
  const std::vector<std::pair<std::string, Block>> blocks = {
      {"embed", Block::Of(t[0], {{"tp", bascule::Shard(0)}})},
      {"qkv", bascule::FusedQkv(t[1], t[2], t[3], example::kKvHeads, "tp")},
      {"o", Block::Of(t[4], {{"tp", bascule::Shard(1)}})},
      {"norm", Block::Of(t[5])}};
  auto builder =
      example::Check(bascule::LayoutBuilder::Create({{"tp"}, {ranks}}, {rank}), "layout");
  std::vector<std::vector<uint16_t>> weights;
  for (const auto& [name, block] : blocks) {
    const auto shape = example::Check(builder.LocalShape(block), name);
    auto& memory = weights.emplace_back(bascule::Box::Whole(shape).size());
    const uint32_t buffer = builder.AddBuffer({.name = name,
                                               .data = reinterpret_cast<std::byte*>(memory.data()),
                                               .bytes = memory.size() * sizeof(uint16_t)});
    example::Check(builder.Add(block, {.buffer = buffer}), name);
  }
  const auto layout = example::Check(builder.BuildLayout(), "layout");

  auto receiver = example::Check(
      bascule::WeightReceiver::Connect(example::Job(options.Text("coordinator")),
                                       {.engine = "e0", .rank = rank, .world_size = ranks}, layout,
                                       Deadline::In(60s)),
      "connect");
  uint64_t shown = 0;
  const Deadline patience = Deadline::In(60s);  // for the other ranks and the first version
  while (true) {
    auto polled = receiver->Poll(Deadline::In(5s));
    bascule::Status status = polled.status();
    if (status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded) {
      if (!receiver->serving().none()) break;  // the sender has left, and the coordinator with it
      if (!patience.Passed()) continue;
    }
    if (status.ok() && *polled != nullptr) status = Follow(**polled);
    if (!PollAgain(status.code())) example::Check(status, "update");
    if (receiver->serving().version == shown) {
      std::this_thread::sleep_for(50ms);  // an engine would generate
      continue;
    }
    shown = receiver->serving().version;
    std::printf("rank %u: version %lu, %lu elements as sent\n", rank, shown,
                example::CheckElements(layout, shown));
    std::fflush(stdout);
  }
  std::printf("rank %u: the sender has left\n", rank);
}
