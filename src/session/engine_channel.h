// The engine channel: how the ranks of one engine agree. Every rank answers the others; rank 0
// leads. Carries the pure cores of engine_core.h over RPC.
//
// Thread-safe. Answers never wait longer than a slice (1 s); callers ask again by their deadline.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/rpc.h"
#include "session/agent.h"
#include "session/engine_core.h"

namespace bascule {

class EngineChannel {
 public:
  struct Options {
    std::string engine;
    uint32_t rank = 0;
    uint32_t world_size = 1;
    uint64_t incarnation = 0;
    std::string listen;
    std::string token;
    bool in_place = false;
  };
  [[nodiscard]] static Result<std::unique_ptr<EngineChannel>> Start(Options options);
  ~EngineChannel();

  [[nodiscard]] const std::string& address() const { return address_; }
  // The membership is asked for addresses. Set before the first use of another rank.
  void SetAgent(Agent* agent) { agent_ = agent; }

  // ---- this rank's machine, under the channel's lock
  // Runs `f(core)`; then wakes all waiters.
  template <typename F>
  auto WithCore(F&& f) {
    std::lock_guard lock(mutex_);
    auto wake = std::unique_ptr<std::condition_variable, void (*)(std::condition_variable*)>(
        &changed_, [](std::condition_variable* c) { c->notify_all(); });
    return f(core_);
  }
  // Waits until `done(core)`, at most to the deadline; true when done.
  bool WaitCore(const std::function<bool(const RankCore&)>& done, Deadline deadline);

  // ---- polling
  struct PollResult {
    std::optional<UpdateKey> key;
    uint64_t epoch = 0;  // membership to plan with
    bool own_membership = false;
    int64_t publish_start_ns = 0;
  };
  [[nodiscard]] Result<PollResult> Poll(Deadline deadline);
  // The key of the engine's attempt at an explicit version.
  [[nodiscard]] Result<UpdateKey> AttemptAt(VersionId id, Deadline deadline);
  [[nodiscard]] Result<bool> Ready(const UpdateKey& key, Deadline deadline);

  // ---- deciding
  // Tells the leader that this rank staged (or failed to stage) the update; again until it is told.
  [[nodiscard]] Status Vote(const UpdateKey& key, bool ok, const std::string& why,
                            Deadline deadline);
  // Learns or (rank 0) makes the decision. OK: this rank's core is DECIDED.
  [[nodiscard]] Status Decide(const UpdateKey& key, Deadline deadline);
  // Records abort if undecided; the core learns the outcome. OK: aborted. kBusy: it was committed.
  [[nodiscard]] Status Abort(const UpdateKey& key, const std::string& why, Deadline deadline);
  // One round of learning the outcome for a rank in doubt.
  void ResolveDoubt(Deadline deadline);
  // Rank 0 leaves: tells the others of the commit that it has made, which they might have to learn
  // from it yet.
  void HandOver(Deadline deadline);
  // Tells the leader what this rank serves now.
  void AnnounceServing(Deadline deadline);
  // Introduces this rank to the leader, if it is there and was not told yet.
  void Introduce(Deadline deadline);
  [[nodiscard]] Status EngineServable(Deadline deadline);
  // The engine's ranks as of the plan that is being staged: whose lives termination asks about.
  void NoteMembers(const std::vector<MemberInfo>& members);

  // Incarnations that termination acted upon as gone; a restarted coordinator must not take them
  // back. At most 64, newest last.
  [[nodiscard]] std::vector<uint64_t> ToldGone();

  // Requests sent to other ranks so far.
  [[nodiscard]] uint64_t requests() const { return requests_; }
  // Ends this rank's own calls within a slice.
  void Cancel() { cancelled_ = true; }
  void Stop();

 private:
  explicit EngineChannel(Options options);
  [[nodiscard]] bool leads() const { return options_.rank == 0; }

  // Server side.
  [[nodiscard]] Result<std::string> Handle(const std::string& method, const std::string& request,
                                           Deadline deadline);
  [[nodiscard]] Result<std::string> HandleLeader(const std::string& method,
                                                 const std::string& request, Deadline deadline);

  // Client side.
  [[nodiscard]] Result<std::string> AskRank(uint32_t rank, const std::string& method,
                                            const std::string& request, Deadline deadline);
  [[nodiscard]] Result<std::string> AskLeader(const std::string& method, const std::string& request,
                                              Deadline deadline);
  [[nodiscard]] Status Hello(Deadline deadline);
  [[nodiscard]] Status EnsureIntroduced(Deadline deadline);
  // What a rank answers about an update; `why` goes with an abort, where it is known.
  struct Learned {
    Outcome outcome = Outcome::kNotLearned;
    std::string why;
  };
  // `abort`: why the decider should record an abort if it has not decided; empty: only ask.
  [[nodiscard]] Result<Learned> AskOutcome(uint32_t rank, const UpdateKey& key, bool decider_gone,
                                           const std::string& abort, Deadline deadline);
  [[nodiscard]] Result<std::shared_ptr<RpcClient>> ClientOf(uint32_t rank, Deadline deadline);
  void AwaitIntroductions(Deadline deadline);
  [[nodiscard]] Result<PollResult> LeaderPoll(Deadline deadline);
  [[nodiscard]] Status LeaderDecide(const UpdateKey& key, Deadline deadline);
  [[nodiscard]] Status FollowerDecide(const UpdateKey& key, Deadline deadline);
  [[nodiscard]] Status AfterOutcome(const UpdateKey& key, const Learned& learned);
  [[nodiscard]] std::optional<Outcome> TerminationRound(Termination* termination,
                                                        Deadline deadline);
  void NoteGone(uint64_t incarnation);
  [[nodiscard]] std::string Name(uint32_t rank) const;

  Options options_;
  Agent* agent_ = nullptr;
  std::string address_;
  std::unique_ptr<RpcServer> server_;
  std::atomic<bool> cancelled_{false};
  std::atomic<uint64_t> requests_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  RankCore core_;
  std::optional<DeciderCore> decider_;  // rank 0

  std::mutex client_mutex_;  // guards what follows
  struct Client {
    std::string address;
    uint64_t incarnation = 0;
    std::shared_ptr<RpcClient> client;
  };
  std::map<uint32_t, Client> clients_;
  std::map<uint32_t, uint64_t> last_incarnation_;  // of ranks, as of the last membership seen
  std::vector<uint64_t> told_gone_;
  uint64_t leader_ = 0;  // incarnation that this rank has introduced itself to
  uint64_t next_poll_ = 0;
  bool poll_missed_ = false;  // a Poll ended without an answer: its number may be another rank's
  UpdateKey ready_key_;       // the update that Ready was called of last
  uint64_t next_ready_ = 0;
};

}  // namespace bascule
