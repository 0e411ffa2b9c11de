// Senders, receivers, updates, publications and the coordinator. Thin: names, timeouts and reports
// are made in bascule/*.py.
#include "bascule/session.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "handle.h"
#include "logs.h"

namespace bascule::python {
namespace {

using Dict = nb::typed<nb::dict, nb::str, nb::any>;
using IdPair = std::pair<uint64_t, uint64_t>;

IdPair ToPair(VersionId id) { return {id.term, id.version}; }

Dict ToDict(const Phases& phases) {
  Dict dict;
  dict["publish"] = phases.publish;
  dict["stage"] = phases.stage;
  dict["verify"] = phases.verify;
  dict["decide"] = phases.decide;
  dict["commit"] = phases.commit;
  dict["audit"] = phases.audit;
  dict["stall"] = phases.stall;
  return dict;
}

Dict ToDict(const LinkReport& link) {
  Dict dict;
  dict["peer"] = link.peer;
  dict["transport"] = link.transport;
  dict["reason"] = link.reason;
  dict["bytes"] = link.bytes;
  return dict;
}

Dict ToDict(const Report& report) {
  Dict dict;
  dict["id"] = ToPair(report.id);
  dict["phases"] = ToDict(report.phases);
  dict["bytes"] = report.bytes;
  dict["publish_start_ns"] = report.publish_start_ns;
  dict["commit_end_ns"] = report.commit_end_ns;
  dict["ewtt_ns"] = report.ewtt_ns;
  dict["bound_ns"] = report.bound_ns;
  dict["control_messages"] = report.control_messages;
  dict["peer_messages"] = report.peer_messages;
  nb::list links;
  for (const LinkReport& link : report.links) links.append(ToDict(link));
  dict["links"] = links;
  dict["audited"] = report.audited;
  dict["peak_extra_bytes"] = report.peak_extra_bytes;
  return dict;
}

// The core's side of PostCommitHook: takes the GIL, and turns an exception into an error.
std::function<Status(VersionId)> CallInPython(std::shared_ptr<PostCommitHook> hook) {
  return [hook = std::move(hook)](VersionId id) -> Status {
    if (!TryBeginEntry()) return Status(Code::kClosed, "the interpreter is exiting");
    nb::gil_scoped_acquire gil;
    EndEntry();
    nb::object callable = hook->callable;
    if (!callable.is_valid()) return Status::Ok();
    try {
      callable(ToPair(id));
      return Status::Ok();
    } catch (nb::python_error& error) {
      hook->error = nb::borrow(error.value());
      return Status(Code::kInternal, "the post-commit hook raised " + TextOf(error.value()));
    }
  };
}

using SenderHandle = Handle<WeightSender>;
using ReceiverHandle = Handle<WeightReceiver>;
using PublicationHandle = Handle<Publication>;
using UpdateHandle = Handle<Update>;
using ServerHandle = Handle<CoordinatorServer>;

template <typename Session>
nb::object MakeHandle(std::shared_ptr<Session> session, nb::object owners = nb::none()) {
  return nb::cast(new Handle<Session>(std::move(session), std::move(owners)),
                  nb::rv_policy::take_ownership);
}

void Wait(nb::handle keep, std::function<Status()> call) { Check(Interruptibly(keep, call)); }

// A quick call: without the GIL too, since the core's locks may be held by a thread that wants it.
template <typename Session, typename Call>
auto Ask(Handle<Session>& handle, Call call) {
  auto session = handle.Get();
  return WithoutGil([&] { return call(*session); });
}

template <typename Session>
void ReplaceLayout(nb::handle self, const Layout& layout, nb::object owners, double timeout) {
  auto& handle = nb::cast<Handle<Session>&>(self);
  auto session = handle.Get();
  // Both layouts' memory stays while it is open which one holds, for good if Ctrl-C leaves it so.
  nb::object old = handle.owners();
  handle.owners() = nb::make_tuple(old, owners);
  const Status status = Interruptibly(self, [session, layout, deadline = DeadlineIn(timeout)] {
    return session->UpdateLayout(layout, deadline);
  });
  handle.owners() = status.ok() ? owners : old;
  Check(status);
}

void BindOptions(nb::module_& m) {
  nb::enum_<ArenaMode>(m, "ArenaMode", "Where published weights lie while peers read them.")
      .value("AUTO", ArenaMode::kAuto)
      .value("DEVICE", ArenaMode::kDevice)
      .value("HOST", ArenaMode::kHost)
      .value("DIRECT", ArenaMode::kDirect);
  nb::enum_<ShadowMode>(m, "ShadowMode", "Where staged bytes live until commit.")
      .value("AUTO", ShadowMode::kAuto)
      .value("DEVICE", ShadowMode::kDevice)
      .value("HOST", ShadowMode::kHost)
      .value("NONE", ShadowMode::kNone);
  nb::enum_<PublicationState>(m, "PublicationState", "What became of a published version.")
      .value("OPEN", PublicationState::kOpen)
      .value("AVAILABLE", PublicationState::kAvailable)
      .value("ABORTED", PublicationState::kAborted)
      .value("RETIRED", PublicationState::kRetired)
      .value("UNKNOWN", PublicationState::kUnknown);
  nb::enum_<ReceiverState>(m, "ReceiverState", "Where one rollout rank is in an update.")
      .value("IDLE", ReceiverState::kIdle)
      .value("STAGING", ReceiverState::kStaging)
      .value("READY", ReceiverState::kReady)
      .value("VERIFIED", ReceiverState::kVerified)
      .value("IN_DOUBT", ReceiverState::kInDoubt)
      .value("DECIDED", ReceiverState::kDecided)
      .value("COMMITTING", ReceiverState::kCommitting)
      .value("POISONED", ReceiverState::kPoisoned);

  nb::class_<JobOptions>(m, "JobOptions", "See bascule.Job.")
      .def(
          "__init__",
          [](JobOptions* self, std::string name, std::string coordinator, std::string token,
             std::string listen, double heartbeat, std::string socket_directory) {
            const std::chrono::duration<double, std::milli> interval(heartbeat * 1e3);
            new (self) JobOptions{
                .name = std::move(name),
                .coordinator = std::move(coordinator),
                .token = std::move(token),
                .listen = std::move(listen),
                .heartbeat = std::chrono::duration_cast<std::chrono::milliseconds>(interval),
                .socket_directory = std::move(socket_directory),
                .log = QueueingSink()};
          },
          nb::kw_only(), nb::arg("name"), nb::arg("coordinator"), nb::arg("token"),
          nb::arg("listen"), nb::arg("heartbeat"), nb::arg("socket_directory"));
}

void BindSender(nb::module_& m) {
  nb::class_<PublicationHandle>(m, "Publication", "See bascule.Publication.",
                                nb::type_slots(handle_slots<Publication>))
      .def_prop_ro("id",
                   [](PublicationHandle& self) {
                     return Ask(self, [](auto& session) { return ToPair(session.id()); });
                   })
      .def(
          "wait",
          [](nb::handle_t<PublicationHandle> self, double timeout) {
            auto publication = nb::cast<PublicationHandle&>(self).Get();
            Wait(self, [publication, deadline = DeadlineIn(timeout)] {
              return publication->Wait(deadline);
            });
          },
          nb::arg("timeout"))
      .def(
          "state",
          [](nb::handle_t<PublicationHandle> self, double timeout) {
            auto publication = nb::cast<PublicationHandle&>(self).Get();
            return Unwrap(Interruptibly(self, [publication, deadline = DeadlineIn(timeout)] {
              return publication->State(deadline);
            }));
          },
          nb::arg("timeout"))
      .def(
          "release",
          [](nb::handle_t<PublicationHandle> self, double timeout) {
            // Not interruptible: in direct mode the caller may write to the weights once it is
            // over.
            auto publication = nb::cast<PublicationHandle&>(self).Get();
            const Deadline deadline = DeadlineIn(timeout);
            Check(WithoutGil([&] { return publication->Release(deadline); }));
          },
          nb::arg("timeout"))
      .def("report", [](PublicationHandle& self) {
        return ToDict(Ask(self, [](auto& session) { return session.report(); }));
      });

  nb::class_<SenderHandle>(m, "WeightSender", "See bascule.WeightSender.",
                           nb::type_slots(handle_slots<WeightSender>))
      .def_static(
          "connect",
          [](const JobOptions& job, uint32_t rank, uint32_t world_size, ArenaMode arena,
             int threads, uint32_t versions_held, bool digest, const Layout& layout,
             nb::object owners, double timeout) {
            const TrainerOptions options{.rank = rank,
                                         .world_size = world_size,
                                         .arena = arena,
                                         .threads = threads,
                                         .versions_held = versions_held,
                                         .digest = digest};
            return MakeHandle<WeightSender>(
                Unwrap(Interruptibly(owners,
                                     [job, options, layout, deadline = DeadlineIn(timeout)] {
                                       return WeightSender::Connect(job, options, layout, deadline);
                                     })),
                owners);
          },
          nb::kw_only(), nb::arg("job"), nb::arg("rank"), nb::arg("world_size"), nb::arg("arena"),
          nb::arg("threads"), nb::arg("versions_held"), nb::arg("digest"), nb::arg("layout"),
          nb::arg("owners"), nb::arg("timeout"),
          nb::sig("def connect(*, job: JobOptions, rank: int, world_size: int, arena: ArenaMode, "
                  "threads: int, versions_held: int, digest: bool, layout: Layout, owners: object, "
                  "timeout: float) -> WeightSender"))
      .def(
          "publish",
          [](nb::handle_t<SenderHandle> self, uint64_t version, double timeout) {
            auto sender = nb::cast<SenderHandle&>(self).Get();
            return MakeHandle<Publication>(
                Unwrap(Interruptibly(self, [sender, version, deadline = DeadlineIn(timeout)] {
                  return sender->Publish(version, deadline);
                })));
          },
          nb::arg("version"), nb::arg("timeout"),
          nb::sig("def publish(self, version: int, timeout: float) -> Publication"))
      .def(
          "update_layout",
          [](nb::handle_t<SenderHandle> self, const Layout& layout, nb::object owners,
             double timeout) { ReplaceLayout<WeightSender>(self, layout, owners, timeout); },
          nb::arg("layout"), nb::arg("owners"), nb::arg("timeout"))
      .def_prop_ro("term",
                   [](SenderHandle& self) {
                     return Ask(self, [](auto& session) { return session.term(); });
                   })
      .def_prop_ro("coordinator",
                   [](SenderHandle& self) {
                     return Ask(self, [](auto& session) { return session.coordinator(); });
                   })
      .def(
          "close",
          [](SenderHandle& self, double timeout) {
            auto sender = self.Get();
            const Deadline deadline = DeadlineIn(timeout);
            Check(WithoutGil([&] { return sender->Close(deadline); }));
          },
          nb::arg("timeout"));
}

void BindUpdate(nb::module_& m) {
  nb::class_<UpdateHandle>(m, "Update", "See bascule.Update.", nb::type_slots(handle_slots<Update>))
      .def_prop_ro("id",
                   [](UpdateHandle& self) {
                     return Ask(self, [](auto& session) { return ToPair(session.id()); });
                   })
      .def(
          "stage",
          [](UpdateHandle& self, double timeout) {
            auto update = self.Get();
            const Deadline deadline = DeadlineIn(timeout);
            Check(WithoutGil([&] { return update->Stage(deadline); }));
          },
          nb::arg("timeout"))
      .def(
          "wait_staged",
          [](nb::handle_t<UpdateHandle> self, double timeout) {
            auto update = nb::cast<UpdateHandle&>(self).Get();
            Wait(self,
                 [update, deadline = DeadlineIn(timeout)] { return update->WaitStaged(deadline); });
          },
          nb::arg("timeout"))
      .def(
          "ready",
          [](nb::handle_t<UpdateHandle> self, double timeout) {
            auto update = nb::cast<UpdateHandle&>(self).Get();
            return Unwrap(Interruptibly(self, [update, deadline = DeadlineIn(timeout)] {
              return update->Ready(deadline);
            }));
          },
          nb::arg("timeout"))
      .def(
          "decide",
          [](nb::handle_t<UpdateHandle> self, double timeout) {
            auto update = nb::cast<UpdateHandle&>(self).Get();
            Wait(self,
                 [update, deadline = DeadlineIn(timeout)] { return update->Decide(deadline); });
          },
          nb::arg("timeout"))
      .def(
          "commit",
          [](UpdateHandle& self, double timeout) {
            // On this very thread and to its end: it writes the live weights and runs the hook.
            auto update = self.Get();
            const Deadline deadline = DeadlineIn(timeout);
            Check(WithoutGil([&] { return update->Commit(deadline); }));
          },
          nb::arg("timeout"))
      .def(
          "abort",
          [](nb::handle_t<UpdateHandle> self, double timeout) {
            auto update = nb::cast<UpdateHandle&>(self).Get();
            Wait(self,
                 [update, deadline = DeadlineIn(timeout)] { return update->Abort(deadline); });
          },
          nb::arg("timeout"))
      .def("report", [](UpdateHandle& self) {
        return ToDict(Ask(self, [](auto& session) { return session.report(); }));
      });
}

void BindReceiver(nb::module_& m) {
  nb::class_<ReceiverHandle>(m, "WeightReceiver", "See bascule.WeightReceiver.",
                             nb::type_slots(handle_slots<WeightReceiver>))
      .def_static(
          "connect",
          [](const JobOptions& job, std::string engine, uint32_t rank, uint32_t world_size,
             ShadowMode shadow, int threads, bool digest, const Layout& layout, nb::object owners,
             double timeout) {
            const RolloutOptions options{.engine = std::move(engine),
                                         .rank = rank,
                                         .world_size = world_size,
                                         .shadow = shadow,
                                         .threads = threads,
                                         .digest = digest};
            return MakeHandle<WeightReceiver>(
                Unwrap(Interruptibly(owners,
                                     [job, options, layout, deadline = DeadlineIn(timeout)] {
                                       return WeightReceiver::Connect(job, options, layout,
                                                                      deadline);
                                     })),
                owners);
          },
          nb::kw_only(), nb::arg("job"), nb::arg("engine"), nb::arg("rank"), nb::arg("world_size"),
          nb::arg("shadow"), nb::arg("threads"), nb::arg("digest"), nb::arg("layout"),
          nb::arg("owners"), nb::arg("timeout"),
          nb::sig("def connect(*, job: JobOptions, engine: str, rank: int, world_size: int, "
                  "shadow: ShadowMode, threads: int, digest: bool, layout: Layout, owners: object, "
                  "timeout: float) -> WeightReceiver"))
      .def(
          "poll",
          [](nb::handle_t<ReceiverHandle> self, double timeout) -> nb::object {
            auto receiver = nb::cast<ReceiverHandle&>(self).Get();
            auto update = Unwrap(Interruptibly(self, [receiver, deadline = DeadlineIn(timeout)] {
              return receiver->Poll(deadline);
            }));
            if (update == nullptr) return nb::none();
            return MakeHandle<Update>(std::move(update));
          },
          nb::arg("timeout"), nb::sig("def poll(self, timeout: float) -> Update | None"))
      .def(
          "open",
          [](ReceiverHandle& self, uint64_t term, uint64_t version) {
            auto receiver = self.Get();
            return MakeHandle<Update>(Unwrap(WithoutGil([&] {
              return receiver->Open({term, version});
            })));
          },
          nb::arg("term"), nb::arg("version"),
          nb::sig("def open(self, term: int, version: int) -> Update"))
      .def_prop_ro("state",
                   [](ReceiverHandle& self) {
                     return Ask(self, [](auto& session) { return session.state(); });
                   })
      .def_prop_ro("serving",
                   [](ReceiverHandle& self) -> std::optional<IdPair> {
                     const VersionId id =
                         Ask(self, [](auto& session) { return session.serving(); });
                     if (id.none()) return std::nullopt;
                     return ToPair(id);
                   })
      .def("check_servable",
           [](ReceiverHandle& self) {
             Check(Ask(self, [](auto& session) { return session.Servable(); }));
           })
      .def(
          "check_engine_servable",
          [](nb::handle_t<ReceiverHandle> self, double timeout) {
            auto receiver = nb::cast<ReceiverHandle&>(self).Get();
            Wait(self, [receiver, deadline = DeadlineIn(timeout)] {
              return receiver->EngineServable(deadline);
            });
          },
          nb::arg("timeout"))
      .def(
          "set_post_commit_hook",
          [](ReceiverHandle& self, nb::object callable) {
            auto receiver = self.Get();
            self.hook()->error.reset();
            if (callable.is_none()) {
              self.hook()->callable.reset();
              WithoutGil([&] {
                receiver->SetPostCommitHook(nullptr);
                return true;
              });
              return;
            }
            self.hook()->callable = std::move(callable);
            auto hook = CallInPython(self.hook());
            WithoutGil([&] {
              receiver->SetPostCommitHook(std::move(hook));
              return true;
            });
          },
          nb::arg("callable").none())
      .def(
          "take_hook_error",
          [](ReceiverHandle& self) -> nb::object {
            if (!self.hook()->error.is_valid()) return nb::none();
            return std::move(self.hook()->error);
          },
          nb::sig("def take_hook_error(self) -> BaseException | None"))
      .def(
          "audit",
          [](nb::handle_t<ReceiverHandle> self, double timeout) {
            auto receiver = nb::cast<ReceiverHandle&>(self).Get();
            Wait(self,
                 [receiver, deadline = DeadlineIn(timeout)] { return receiver->Audit(deadline); });
          },
          nb::arg("timeout"))
      .def(
          "update_layout",
          [](nb::handle_t<ReceiverHandle> self, const Layout& layout, nb::object owners,
             double timeout) { ReplaceLayout<WeightReceiver>(self, layout, owners, timeout); },
          nb::arg("layout"), nb::arg("owners"), nb::arg("timeout"))
      .def(
          "close",
          [](ReceiverHandle& self, double timeout) {
            auto receiver = self.Get();
            const Deadline deadline = DeadlineIn(timeout);
            Check(WithoutGil([&] { return receiver->Close(deadline); }));
          },
          nb::arg("timeout"));
}

void BindCoordinator(nb::module_& m) {
  m.def(
      "coordinator_status_json",
      [](const std::string& address, const std::string& token, double timeout) {
        const Deadline deadline = DeadlineIn(timeout);
        return Unwrap(WithoutGil([&] { return CoordinatorStatusJson(address, token, deadline); }));
      },
      nb::arg("address"), nb::arg("token"), nb::arg("timeout"));
  nb::class_<ServerHandle>(m, "CoordinatorServer", "See bascule.CoordinatorServer.",
                           nb::type_slots(handle_slots<CoordinatorServer>))
      .def_static(
          "start",
          [](const JobOptions& job) {
            return MakeHandle<CoordinatorServer>(
                Unwrap(WithoutGil([&] { return CoordinatorServer::Start(job); })));
          },
          nb::arg("job"), nb::sig("def start(job: JobOptions) -> CoordinatorServer"))
      .def_prop_ro("address",
                   [](ServerHandle& self) {
                     return Ask(self, [](auto& session) { return session.address(); });
                   })
      .def("status_json",
           [](ServerHandle& self) {
             return Ask(self, [](auto& session) { return session.StatusJson(); });
           })
      .def("stop", [](ServerHandle& self) {
        auto server = self.Get();
        WithoutGil([&] {
          server->Stop();
          return true;
        });
      });
}

}  // namespace

void BindSession(nb::module_& m) {
  BindOptions(m);
  BindSender(m);
  BindUpdate(m);
  BindReceiver(m);
  BindCoordinator(m);
  BindVerify(m);
  BindLogs(m);
}

}  // namespace bascule::python
