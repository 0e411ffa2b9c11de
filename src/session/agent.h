// What a sender and a receiver have in common: being a member. Joins, beats, rejoins, leaves.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "bascule/session.h"
#include "coordinator/directory.h"
#include "session/membership.h"

namespace bascule {

// Records `error` in the report, as of now.
void NoteError(const Status& error, MemberReport* report);

class Agent {
 public:
  struct Options {
    JobOptions job;
    MemberInfo member;  // world_template is filled in from template_bytes
    std::string template_bytes;
    std::function<MemberState()> state;  // what this rank holds and serves; called on any thread
    // After each beat; on the agent's thread. May call the directory.
    std::function<void(const HeartbeatReply&)> on_beat;
    // The directory says that this incarnation is no member any more. Once.
    std::function<void(Status)> on_gone;
  };
  [[nodiscard]] static Result<std::unique_ptr<Agent>> Start(Options options, Deadline deadline);
  ~Agent();

  [[nodiscard]] Directory& directory() { return *directory_; }
  [[nodiscard]] ViewCache& views() { return *views_; }
  [[nodiscard]] uint64_t incarnation() const { return incarnation_; }
  [[nodiscard]] uint64_t term() const { return term_; }                // joined
  [[nodiscard]] uint64_t newest_term() const { return newest_term_; }  // heard of
  // Trainers: the joined term is over.
  [[nodiscard]] bool stale() const { return stale_; }
  [[nodiscard]] uint64_t epoch() const { return epoch_; }
  [[nodiscard]] const std::string& token() const { return options_.job.token; }
  [[nodiscard]] const std::string& coordinator() const { return coordinator_; }
  [[nodiscard]] MemberInfo member() const;

  // kForked in a child of fork(), kClosed after Close.
  [[nodiscard]] Status Usable() const;
  [[nodiscard]] bool forked() const;
  // Gives the coordinator another layout of this rank. Where that fails, member() is as before, but
  // for a serial that is higher by two: the failed one may arrive yet, and Settle ends it.
  [[nodiscard]] Status Rebind(const std::string& template_bytes,
                              const std::vector<uint32_t>& coordinates, Deadline deadline);
  // The coordinator has this rank's layout as member() has it: at once, unless a Rebind failed.
  [[nodiscard]] Status Settle(Deadline deadline);
  // Tells the job's log, with the rank's name before it.
  void Log(LogLevel level, const std::string& text) const;
  // Beats at once, from the agent's thread.
  void BeatSoon();
  // Leaves the job and stops beating. Idempotent.
  [[nodiscard]] Status Close(Deadline deadline);

 private:
  explicit Agent(Options options);
  [[nodiscard]] Status Join(Deadline deadline);
  [[nodiscard]] Status StoreTemplate(const std::string& bytes, const ContentDigest& digest,
                                     Deadline deadline);
  [[nodiscard]] static bool IsUncertain(const Status& status);
  void Loop();
  void Beat();

  Options options_;
  pid_t pid_;
  uint64_t incarnation_ = 0;
  std::string coordinator_;
  std::unique_ptr<CoordinatorServer> server_;  // hosted here
  std::unique_ptr<Directory> directory_;
  std::unique_ptr<ViewCache> views_;
  std::atomic<uint64_t> term_{0};
  std::atomic<uint64_t> newest_term_{0};
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int64_t> interval_ms_{500};
  std::atomic<bool> closed_{false};
  std::atomic<bool> gone_{false};
  std::atomic<bool> stale_{false};
  std::atomic<bool> joined_{false};
  bool away_ = false;                   // the last beat failed; of the agent's thread
  std::atomic<bool> unsettled_{false};  // a Rebind failed and may have been carried out

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  bool soon_ = false;
  std::thread thread_;
};

// A random 64-bit number, never 0.
[[nodiscard]] uint64_t RandomId();

}  // namespace bascule
