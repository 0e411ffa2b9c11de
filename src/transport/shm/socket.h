// Unix sockets: names, and calls that never raise SIGPIPE and never block beyond a deadline.
#pragma once

#include <sys/types.h>

#include <span>
#include <string>
#include <string_view>

#include "bascule/deadline.h"
#include "bascule/status.h"
#include "base/unix_fd.h"
#include "transport/shm/frame.h"

namespace bascule::shm {

// "shm1:@name" (abstract) or "shm1:/path/name.sock": names nobody can guess.
[[nodiscard]] std::string MakeAddress(std::string_view job, const std::string& directory);

// The file of a socket that is one, else empty.
[[nodiscard]] std::string SocketFile(std::string_view address);

// A listening, non-blocking socket. A file is readable and writable by its owner only.
[[nodiscard]] Result<UnixFd> ListenOn(const std::string& address, int backlog);

// kUnavailable when nobody listens there (another host, another network namespace, gone).
[[nodiscard]] Result<UnixFd> ConnectTo(const std::string& address, Deadline deadline);

// Who is at the other end, by the kernel.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};
[[nodiscard]] PeerCredentials GetPeerCredentials(int socket);
// Readable once that process has ended; a socket alone does not tell when a forked child of it
// still holds a copy. Invalid where the kernel has no such thing or the process cannot be seen.
[[nodiscard]] UnixFd OpenPeerProcess(int socket);

struct IoResult {
  size_t bytes = 0;
  bool blocked = false;  // would have to wait
  bool closed = false;   // end of stream or a broken connection
};
// Sends what fits; `descriptor` >= 0 goes with the first byte.
[[nodiscard]] IoResult SendSome(int socket, std::string_view bytes, int descriptor = -1);
// Receives what is there. Descriptors that come along are dropped by the kernel.
[[nodiscard]] IoResult ReceiveSome(int socket, std::span<char> space);
// The same, keeping at most one descriptor. More than one closes all and sets `closed`; one that
// this process has no room for sets `descriptor_lost`.
[[nodiscard]] IoResult ReceiveSomeWithDescriptor(int socket, std::span<char> space,
                                                 UnixFd& descriptor, bool& descriptor_lost);

// Blocking counterparts for the handshake. `process` may be -1. A connection that breaks while
// sending is told by the next ReceiveFrame, after what the peer said before it hung up.
[[nodiscard]] Status SendAll(int socket, std::string_view bytes, int process, Deadline deadline);
[[nodiscard]] Result<Frame> ReceiveFrame(int socket, uint64_t max_payload, int process,
                                         Deadline deadline);

}  // namespace bascule::shm
