// What the Python objects of sessions share: the owners of the memory that a session uses, Python's
// garbage collector, and fork.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "bascule/session.h"
#include "calls.h"
#include "errors.h"

namespace bascule::python {

// The Python callable that runs after a commit. Its members are guarded by the GIL.
struct PostCommitHook {
  nb::object callable;
  nb::object error;  // what the last run raised, until it is taken
};

// A session object of the core as Python holds it. All members are used with the GIL.
template <typename Session>
class Handle {
 public:
  Handle(std::shared_ptr<Session> session, nb::object owners)
      : session_(std::move(session)), owners_(std::move(owners)) {}
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    hook_->callable.reset();
    hook_->error.reset();
    if (pid_ != getpid()) {
      // The session's threads did not survive the fork, so its destructor cannot run here.
      new std::shared_ptr<Session>(std::move(session_));
      return;
    }
    WithoutGil([this] {
      session_.reset();
      return true;
    });
  }

  // Raises bascule.Forked in a child.
  [[nodiscard]] std::shared_ptr<Session> Get() const {
    if (pid_ != getpid()) {
      Raise(Status(Code::kForked,
                   "this object was inherited through fork(); only the parent process may use it"));
    }
    return session_;
  }

  [[nodiscard]] nb::object& owners() { return owners_; }
  [[nodiscard]] const std::shared_ptr<PostCommitHook>& hook() const { return hook_; }

 private:
  std::shared_ptr<Session> session_;
  nb::object owners_;  // Python objects whose memory the session reads or writes
  std::shared_ptr<PostCommitHook> hook_ = std::make_shared<PostCommitHook>();
  pid_t pid_ = getpid();
};

// Lets Python's collector see through a handle, so that a hook which refers to its receiver is no
// leak.
template <typename Session>
int TraverseHandle(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  auto* handle = nb::inst_ptr<Handle<Session>>(self);
  Py_VISIT(handle->owners().ptr());
  Py_VISIT(handle->hook()->callable.ptr());
  Py_VISIT(handle->hook()->error.ptr());
  return 0;
}

template <typename Session>
int ClearHandle(PyObject* self) {
  auto* handle = nb::inst_ptr<Handle<Session>>(self);
  // The owners stay until the session is gone: it may still read their memory.
  handle->hook()->callable.reset();
  handle->hook()->error.reset();
  return 0;
}

template <typename Session>
inline PyType_Slot handle_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(TraverseHandle<Session>)},
    {Py_tp_clear, reinterpret_cast<void*>(ClearHandle<Session>)},
    {0, nullptr}};

}  // namespace bascule::python
