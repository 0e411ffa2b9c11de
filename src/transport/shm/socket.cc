#include "transport/shm/socket.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

#include "transport/shm/memory_map.h"
#include "transport/shm/stale_sockets.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace bascule::shm {
namespace {

constexpr std::string_view kScheme = "shm1:";

struct UnixName {
  sockaddr_un address{};
  socklen_t length = 0;
};

Result<UnixName> ParseAddress(std::string_view address) {
  std::string_view name = address;
  if (!name.starts_with(kScheme) || name.size() < kScheme.size() + 2) {
    return Status(Code::kInvalidArgument,
                  fmt::format("'{}' is no address of an shm transport", address.substr(0, 128)));
  }
  name.remove_prefix(kScheme.size());
  UnixName unix_name;
  if (name.size() >= sizeof(unix_name.address.sun_path)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("the socket name '{}' is longer than {} bytes; choose a shorter "
                              "directory",
                              name.substr(0, 256), sizeof(unix_name.address.sun_path) - 1));
  }
  unix_name.address.sun_family = AF_UNIX;
  std::memcpy(unix_name.address.sun_path, name.data(), name.size());
  if (name[0] == '@') unix_name.address.sun_path[0] = '\0';
  // An abstract name is all bytes up to the length; a path has its terminator.
  size_t used = offsetof(sockaddr_un, sun_path) + name.size() + (name[0] == '@' ? 0 : 1);
  unix_name.length = static_cast<socklen_t>(used);
  return unix_name;
}

Result<UnixFd> OpenSocket() {
  int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd >= 0) return UnixFd(fd);
  if (errno == EMFILE || errno == ENFILE) {
    return Status(Code::kResourceExhausted,
                  "out of file descriptors for a socket; raise the limit (ulimit -n)");
  }
  return Status(Code::kUnavailable, "cannot open a Unix socket: " + ErrnoText(errno));
}

Status ConnectError(const std::string& address, int error) {
  switch (error) {
    case ECONNREFUSED:
    case ENOENT:
      return {
          Code::kUnavailable,
          fmt::format("nobody listens at '{}': the peer has exited, or is on another host or in "
                      "another network namespace (for containers of one host set "
                      "ShmOptions.directory to a volume that both mount)",
                      address)};
    case EACCES:
    case EPERM:
      return {Code::kUnavailable,
              fmt::format("no permission to connect to '{}': run both sides as the same user",
                          address)};
    default:
      return {Code::kUnavailable, fmt::format("connect to '{}': {}", address, ErrnoText(error))};
  }
}

// Waits until `socket` is ready. The other process ending, or the deadline, is an error.
Status WaitFor(int socket, short events, int process, Deadline deadline) {
  while (true) {
    pollfd fds[2] = {{socket, events, 0}, {process, POLLIN, 0}};
    std::chrono::nanoseconds left = deadline.Left();
    timespec timeout{static_cast<time_t>(left.count() / 1'000'000'000),
                     static_cast<long>(left.count() % 1'000'000'000)};
    int ready = ::ppoll(fds, 2, &timeout, nullptr);
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 0) return {Code::kInternal, "poll: " + ErrnoText(errno)};
    if (fds[0].revents != 0) return Status::Ok();
    if (fds[1].revents != 0) return {Code::kUnavailable, "the peer's process ended"};
    if (deadline.Passed()) {
      return {Code::kDeadlineExceeded,
              "the peer's process accepted no connection or did not answer the handshake in time; "
              "is it stopped or overloaded?"};
    }
  }
}

// Takes the descriptors out of a received message; more than one closes all.
bool KeepOne(msghdr& message, UnixFd& descriptor) {
  bool at_most_one = true;
  for (cmsghdr* item = CMSG_FIRSTHDR(&message); item != nullptr;
       item = CMSG_NXTHDR(&message, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
    size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
      UnixFd owned(fd);
      if (descriptor.valid()) {
        at_most_one = false;
      } else {
        descriptor = std::move(owned);
      }
    }
  }
  if (!at_most_one) descriptor.Reset();
  return at_most_one;
}

}  // namespace

std::string MakeAddress(std::string_view job, const std::string& directory) {
  std::string safe;
  for (char c : job.substr(0, 24))
    safe += (std::isalnum(static_cast<unsigned char>(c)) != 0) ? c : '-';
  std::string name = MakeSocketName("bascule-" + safe);
  return directory.empty() ? fmt::format("{}@{}", kScheme, name)
                           : fmt::format("{}{}/{}.sock", kScheme, directory, name);
}

std::string SocketFile(std::string_view address) {
  address.remove_prefix(std::min(address.size(), kScheme.size()));
  return address.starts_with('@') ? std::string() : std::string(address);
}

Result<UnixFd> ListenOn(const std::string& address, int backlog) {
  BASCULE_ASSIGN_OR_RETURN(UnixName name, ParseAddress(address));
  BASCULE_ASSIGN_OR_RETURN(UnixFd socket, OpenSocket());
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&name.address), name.length) != 0) {
    return Status(Code::kInvalidArgument,
                  fmt::format("cannot create the socket '{}': {}; ShmOptions.directory must exist "
                              "and be writable",
                              address, ErrnoText(errno)));
  }
  std::string file = SocketFile(address);
  // Nobody can connect before listen, so nobody gets in before the mode is narrowed.
  if ((!file.empty() && ::chmod(file.c_str(), 0600) != 0) || ::listen(socket.get(), backlog) != 0) {
    int error = errno;
    if (!file.empty()) ::unlink(file.c_str());
    return Status(Code::kUnavailable, fmt::format("listen on '{}': {}", address, ErrnoText(error)));
  }
  return socket;
}

Result<UnixFd> ConnectTo(const std::string& address, Deadline deadline) {
  BASCULE_ASSIGN_OR_RETURN(UnixName name, ParseAddress(address));
  BASCULE_ASSIGN_OR_RETURN(UnixFd socket, OpenSocket());
  auto pause = std::chrono::milliseconds(1);
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name.address), name.length) !=
         0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return ConnectError(address, errno);
    // The peer's queue is full; the kernel has nothing to wait on for that.
    if (deadline.Passed()) {
      return Status(Code::kDeadlineExceeded,
                    fmt::format("the peer at '{}' does not accept connections; is it stopped or "
                                "overloaded?",
                                address));
    }
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline.Left()));
    pause = std::min(pause * 2, std::chrono::milliseconds(20));
  }
  return socket;
}

PeerCredentials GetPeerCredentials(int socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return {};
  return {credentials.pid, credentials.uid};
}

UnixFd OpenPeerProcess(int socket) {
  int fd = -1;
  socklen_t length = sizeof(fd);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0) return UnixFd(fd);
  if (errno != ENOPROTOOPT) return {};
  // Linux before 6.5.
  pid_t pid = GetPeerCredentials(socket).pid;
  if (pid <= 0) return {};
  return UnixFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

IoResult SendSome(int socket, std::string_view bytes, int descriptor) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* item = CMSG_FIRSTHDR(&message);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(item), &descriptor, sizeof(int));
  }
  ssize_t n = -1;
  do {
    n = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n >= 0) return {.bytes = static_cast<size_t>(n)};
  bool full = errno == EAGAIN || errno == EWOULDBLOCK;
  return {.blocked = full, .closed = !full};
}

IoResult ReceiveSome(int socket, std::span<char> space) {
  ssize_t n = -1;
  do {
    n = ::recv(socket, space.data(), space.size(), MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n > 0) return {.bytes = static_cast<size_t>(n)};
  bool empty = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  return {.blocked = empty, .closed = !empty};
}

IoResult ReceiveSomeWithDescriptor(int socket, std::span<char> space, UnixFd& descriptor,
                                   bool& descriptor_lost) {
  iovec part{space.data(), space.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t n = -1;
  do {
    n = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n <= 0) {
    bool empty = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    return {.blocked = empty, .closed = !empty};
  }
  if (!KeepOne(message, descriptor)) return {.closed = true};
  if ((message.msg_flags & MSG_CTRUNC) != 0) descriptor_lost = true;
  return {.bytes = static_cast<size_t>(n)};
}

Status SendAll(int socket, std::string_view bytes, int process, Deadline deadline) {
  while (!bytes.empty()) {
    IoResult sent = SendSome(socket, bytes);
    if (sent.closed) return Status::Ok();
    bytes.remove_prefix(sent.bytes);
    if (sent.blocked) BASCULE_RETURN_IF_ERROR(WaitFor(socket, POLLOUT, process, deadline));
  }
  return Status::Ok();
}

Result<Frame> ReceiveFrame(int socket, uint64_t max_payload, int process, Deadline deadline) {
  FrameAssembler assembler(max_payload);
  while (!assembler.complete()) {
    IoResult received = ReceiveSome(socket, assembler.Space());
    if (received.closed) return Status(Code::kUnavailable, "the peer closed the connection");
    if (received.blocked) {
      BASCULE_RETURN_IF_ERROR(WaitFor(socket, POLLIN, process, deadline));
      continue;
    }
    BASCULE_RETURN_IF_ERROR(assembler.Advance(received.bytes));
  }
  return assembler.Take();
}

}  // namespace bascule::shm
