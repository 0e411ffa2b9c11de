// CoordinatorServer: the coordinator alone ("bascule serve").
#include <utility>

#include "bascule/session.h"
#include "base/fork_guard.h"
#include "coordinator/grpc_directory.h"

namespace bascule {
namespace {

class Server final : public CoordinatorServer {
 public:
  Server(std::shared_ptr<CoordinatorService> service, std::unique_ptr<RpcServer> rpc)
      : service_(std::move(service)), rpc_(std::move(rpc)) {}
  ~Server() override { Server::Stop(); }
  std::string address() const override { return rpc_->address(); }
  std::string StatusJson() const override { return service_->StatusJson(); }
  void Stop() override {
    service_->Stop();
    rpc_->Stop();
  }

 private:
  std::shared_ptr<CoordinatorService> service_;
  std::unique_ptr<RpcServer> rpc_;
};

}  // namespace

Result<std::string> CoordinatorStatusJson(const std::string& address, const std::string& token,
                                          Deadline deadline) {
  BASCULE_RETURN_IF_ERROR(CheckNotForked());
  return MakeGrpcDirectory(address, token)->StatusJson(deadline);
}

Result<std::unique_ptr<CoordinatorServer>> CoordinatorServer::Start(const JobOptions& job) {
  BASCULE_RETURN_IF_ERROR(CheckNotForked());
  if (job.heartbeat < std::chrono::milliseconds(1)) {
    return Status(Code::kInvalidArgument, "the heartbeat interval must be at least 1 ms");
  }
  CoordinatorServiceOptions options;
  options.job = job.name;
  options.token = job.token;
  options.heartbeat = job.heartbeat;
  options.log = job.log;
  auto service = CoordinatorService::Create(std::move(options));
  BASCULE_ASSIGN_OR_RETURN(auto rpc, ServeDirectory(service, job.listen, job.token));
  return std::unique_ptr<CoordinatorServer>(
      std::make_unique<Server>(std::move(service), std::move(rpc)));
}

}  // namespace bascule
