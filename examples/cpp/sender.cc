// A trainer of one rank: hosts the coordinator and publishes versions of a small fp32 model as
// bf16.
#include <csignal>

#include "bascule/mesh.h"
#include "example.h"

using bascule::Deadline;
using namespace std::chrono_literals;

namespace {

// Stands for a training step. False when somebody wants the program to end.
bool Train(const sigset_t& ends, uint32_t seconds) {
  const timespec time = {.tv_sec = seconds, .tv_nsec = 0};
  return sigtimedwait(&ends, nullptr, &time) < 0;
}

}  // namespace

int main(int argc, char** argv) {
  const example::Options options(
      argc, argv, {{"listen", "127.0.0.1:7070"}, {"versions", "3"}, {"step", "1"}, {"hold", "10"}});

  // Before the library starts threads: SIGINT and SIGTERM are waited for, in Train.
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGINT);
  sigaddset(&ends, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);

  // The live weights, and where they lie.
  const auto tensors = example::Tensors();
  std::vector<std::vector<float>> weights;
  auto builder = example::Check(bascule::LayoutBuilder::Create({}, {}), "layout");
  for (const auto& tensor : tensors) {
    auto& memory = weights.emplace_back(bascule::Box::Whole(tensor.shape).size());
    const uint32_t buffer = builder.AddBuffer({.name = tensor.name,
                                               .data = reinterpret_cast<std::byte*>(memory.data()),
                                               .bytes = memory.size() * sizeof(float)});
    example::Check(
        builder.Add(bascule::Block::Of(tensor), {.buffer = buffer, .dtype = bascule::DType::kF32}),
        tensor.name);
  }
  const auto layout = example::Check(builder.BuildLayout(), "layout");

  bascule::JobOptions job = example::Job(bascule::kHostHere);
  job.listen = options.Text("listen");
  auto sender =
      example::Check(bascule::WeightSender::Connect(job, {}, layout, Deadline::In(60s)), "connect");
  std::printf("coordinator at %s\n", sender->coordinator().c_str());

  for (uint64_t version = 1; version <= options.Number("versions"); ++version) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto columns = static_cast<size_t>(tensors[i].shape.back());
      for (size_t k = 0; k < weights[i].size(); ++k) {
        weights[i][k] = example::Value(version, i, static_cast<int64_t>(k / columns),
                                       static_cast<int64_t>(k % columns));
      }
    }
    auto publication = example::Check(sender->Publish(version, Deadline::In(60s)), "publish");
    example::Check(publication->Wait(Deadline::In(60s)), "publish");
    std::printf("published version %lu\n", version);
    std::fflush(stdout);
    if (!Train(ends, options.Number("step"))) return 0;
  }
  Train(ends, options.Number("hold"));  // receivers may still be reading the last one
}
