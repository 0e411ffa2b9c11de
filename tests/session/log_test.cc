// What the job's log is told.
#include "bascule/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/session/job_fixture.h"

namespace bascule {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using testing::ToyJob;

class Lines {
 public:
  LogSink sink() {
    return [this](LogLevel level, std::string_view text) {
      const std::lock_guard lock(mutex_);
      lines_.push_back(std::to_string(static_cast<int>(level)) + " " + std::string(text));
    };
  }
  std::vector<std::string> lines() {
    const std::lock_guard lock(mutex_);
    return lines_;
  }
  // Waits for a line that holds `text`.
  bool Has(const std::string& text) {
    for (int i = 0; i < 1000; ++i) {
      for (const std::string& line : lines()) {
        if (line.find(text) != std::string::npos) return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

TEST(Log, TellsOfUpdatesMembersAndAnAbsentCoordinator) {
  Lines lines;  // outlives the job
  ToyJob job;
  job.job.log = lines.sink();
  auto server = CoordinatorServer::Start(job.job);
  ASSERT_TRUE(server.ok());
  job.job.coordinator = (*server)->address();
  job.AddTrainers(1);
  job.AddEngine("e0", 1, -1);
  job.Publish(1);
  job.Update(1);
  EXPECT_THAT(lines.lines(), Contains(HasSubstr("1 trainer 0: published version 1 in")));
  EXPECT_THAT(lines.lines(), Contains(HasSubstr("1 engine e0 rank 0: committed version 1: EWTT")));
  EXPECT_THAT(lines.lines(), Contains(HasSubstr("1 coordinator: trainer 0 joined")));
  JobOptions again = job.job;
  again.listen = (*server)->address();
  (*server)->Stop();
  EXPECT_TRUE(lines.Has("2 trainer 0: the coordinator does not answer"));
  server->reset();
  server = CoordinatorServer::Start(again);
  ASSERT_TRUE(server.ok());
  EXPECT_TRUE(lines.Has("1 trainer 0: the coordinator answers again"));
}

}  // namespace
}  // namespace bascule
