#include "coordinator/messages.h"

#include <utility>

#include "bascule.pb.h"

namespace bascule {
namespace {

// To protobuf.

void Set(v1::Digest* out, const ContentDigest& digest) {
  out->set_high(digest.high);
  out->set_low(digest.low);
}

void Set(v1::VersionId* out, const VersionId& id) {
  out->set_term(id.term);
  out->set_version(id.version);
}

void Set(v1::MemberInfo* out, const MemberInfo& member) {
  out->set_role(static_cast<uint32_t>(member.role));
  out->set_engine(member.engine);
  out->set_rank(member.rank);
  out->set_world_size(member.world_size);
  out->set_incarnation(member.incarnation);
  out->set_layout_serial(member.layout_serial);
  out->set_node(member.node);
  Set(out->mutable_world_template(), member.world_template);
  for (uint32_t coordinate : member.coordinates) out->add_coordinates(coordinate);
  for (const TransportAddress& address : member.addresses) {
    v1::TransportAddress* item = out->add_addresses();
    item->set_transport(address.transport);
    item->set_address(address.address);
  }
  out->set_channel(member.channel);
}

void Set(v1::HeldVersion* out, const HeldVersion& held) {
  Set(out->mutable_id(), held.id);
  out->set_told(static_cast<uint32_t>(held.told));
  out->set_epoch(held.epoch);
  out->set_layout_serial(held.layout_serial);
  for (const Sum& sum : held.replica_sums) {
    out->add_sum_digests(sum.digest);
    out->add_sum_elements(sum.elements);
  }
  out->set_publish_start_ns(held.publish_start_ns);
  out->set_deadline_ns(held.deadline_ns);
}

void Set(v1::MemberState* out, const MemberState& state) {
  for (const HeldVersion& held : state.held) Set(out->add_held(), held);
  Set(out->mutable_serving(), state.serving);
  out->set_servable(state.servable);
  out->set_highest_term(state.highest_term);
  out->set_joined_term(state.joined_term);
  out->set_term_complete(state.term_complete);
  for (uint64_t gone : state.told_gone) out->add_told_gone(gone);
  for (const HeldVersion& told : state.told) Set(out->add_told(), told);
  const MemberReport& report = state.report;
  if (report.done == 0 && report.error.empty()) return;
  v1::MemberReport* last = out->mutable_report();
  Set(last->mutable_id(), report.id);
  last->set_done(report.done);
  last->set_bytes(report.bytes);
  last->set_took_ns(report.took_ns);
  last->set_stall_ns(report.stall_ns);
  last->set_error(report.error);
  last->set_error_wall_ns(report.error_wall_ns);
}

// From protobuf. False: a value out of its range.

ContentDigest Get(const v1::Digest& in) { return {in.high(), in.low()}; }

VersionId Get(const v1::VersionId& in) { return {in.term(), in.version()}; }

bool Get(uint32_t in, VersionState* out) {
  if (in > static_cast<uint32_t>(VersionState::kRetired)) return false;
  *out = static_cast<VersionState>(in);
  return true;
}

bool Get(const v1::MemberInfo& in, MemberInfo* out) {
  if (in.role() > static_cast<uint32_t>(Role::kRollout)) return false;
  out->role = static_cast<Role>(in.role());
  out->engine = in.engine();
  out->rank = in.rank();
  out->world_size = in.world_size();
  out->incarnation = in.incarnation();
  out->layout_serial = in.layout_serial();
  out->node = in.node();
  out->world_template = Get(in.world_template());
  out->coordinates.assign(in.coordinates().begin(), in.coordinates().end());
  for (const v1::TransportAddress& address : in.addresses()) {
    out->addresses.push_back({address.transport(), address.address()});
  }
  out->channel = in.channel();
  return true;
}

bool Get(const v1::HeldVersion& in, HeldVersion* out) {
  if (in.sum_digests_size() != in.sum_elements_size()) return false;
  if (in.sum_digests_size() > static_cast<int>(kReplicaBuckets)) return false;
  out->id = Get(in.id());
  out->epoch = in.epoch();
  out->layout_serial = in.layout_serial();
  out->replica_sums.reserve(static_cast<size_t>(in.sum_digests_size()));
  for (int i = 0; i < in.sum_digests_size(); ++i) {
    out->replica_sums.push_back({in.sum_digests(i), in.sum_elements(i)});
  }
  out->publish_start_ns = in.publish_start_ns();
  out->deadline_ns = in.deadline_ns();
  return Get(in.told(), &out->told);
}

bool Get(const v1::MemberState& in, MemberState* out) {
  for (const v1::HeldVersion& held : in.held()) {
    if (!Get(held, &out->held.emplace_back())) return false;
  }
  out->serving = Get(in.serving());
  out->servable = in.servable();
  out->highest_term = in.highest_term();
  out->joined_term = in.joined_term();
  out->term_complete = in.term_complete();
  out->told_gone.assign(in.told_gone().begin(), in.told_gone().end());
  for (const v1::HeldVersion& told : in.told()) {
    if (!Get(told, &out->told.emplace_back())) return false;
  }
  const v1::MemberReport& report = in.report();
  out->report = {Get(report.id()),  report.done(),  report.bytes(),        report.took_ns(),
                 report.stall_ns(), report.error(), report.error_wall_ns()};
  return true;
}

bool Get(const v1::JoinRequest& in, JoinRequest* out) {
  out->job = in.job();
  out->token = in.token();
  out->protocol_min = in.protocol_min();
  out->protocol_max = in.protocol_max();
  out->planner_version = in.planner_version();
  out->build = in.build();
  out->told_epoch = in.told_epoch();
  return Get(in.member(), &out->member) && Get(in.state(), &out->state);
}

bool Get(const v1::JoinReply& in, JoinReply* out) {
  out->term = in.term();
  out->stale_term = in.stale_term();
  out->epoch = in.epoch();
  out->wall_ns = in.wall_ns();
  out->heartbeat_ms = in.heartbeat_ms();
  out->coordinator = in.coordinator();
  return true;
}

bool Get(const v1::Membership& in, Membership* out) {
  out->epoch = in.epoch();
  out->term = in.term();
  out->complete = in.complete();
  out->members.reserve(static_cast<size_t>(in.members_size()));
  for (const v1::MemberInfo& member : in.members()) {
    if (!Get(member, &out->members.emplace_back())) return false;
  }
  return true;
}

bool Get(const v1::HeartbeatRequest& in, HeartbeatRequest* out) {
  out->token = in.token();
  out->incarnation = in.incarnation();
  out->layout_serial = in.layout_serial();
  out->told_epoch = in.told_epoch();
  return Get(in.state(), &out->state);
}

bool Get(const v1::HeartbeatReply& in, HeartbeatReply* out) {
  out->member = in.member();
  out->rejoin = in.rejoin();
  out->stale_term = in.stale_term();
  out->term = in.term();
  out->epoch = in.epoch();
  out->coordinator = in.coordinator();
  out->wall_ns = in.wall_ns();
  out->term_complete = in.term_complete();
  for (const v1::KnownVersion& version : in.versions()) {
    auto& item = out->versions.emplace_back(Get(version.id()), VersionState::kUnknown);
    if (!Get(version.state(), &item.second)) return false;
  }
  return true;
}

bool Get(const v1::HeldRequest& in, HeldRequest* out) {
  out->token = in.token();
  out->incarnation = in.incarnation();
  out->deadline_ns = in.deadline_ns();
  return Get(in.held(), &out->held);
}

bool Get(const v1::VersionReply& in, VersionReply* out) {
  out->reason = in.reason();
  out->publish_start_ns = in.publish_start_ns();
  out->epoch = in.epoch();
  return Get(in.state(), &out->state);
}

bool Get(const v1::PollReply& in, PollReply* out) {
  out->offered = in.offered();
  out->id = Get(in.id());
  out->epoch = in.epoch();
  out->own_membership = in.own_membership();
  out->publish_start_ns = in.publish_start_ns();
  return true;
}

bool Get(const v1::Query& in, ControlQuery* out) {
  out->incarnation = in.incarnation();
  out->id = Get(in.id());
  out->epoch = in.epoch();
  out->flag = in.flag();
  out->digest = Get(in.digest());
  out->bytes = in.bytes();
  return true;
}

bool Get(const v1::Flag& in, bool* out) {
  *out = in.value();
  return true;
}

template <typename Message, typename T>
Result<T> DecodeAs(std::string_view bytes) {
  Message message;
  T value{};
  if (bytes.size() > size_t{0x7fffffff} ||
      !message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) ||
      !Get(message, &value)) {
    return Status(Code::kInvalidArgument, "malformed control message");
  }
  return value;
}

}  // namespace

std::string Encode(const JoinRequest& message) {
  v1::JoinRequest out;
  out.set_job(message.job);
  out.set_token(message.token);
  out.set_protocol_min(message.protocol_min);
  out.set_protocol_max(message.protocol_max);
  out.set_planner_version(message.planner_version);
  out.set_build(message.build);
  out.set_told_epoch(message.told_epoch);
  Set(out.mutable_member(), message.member);
  Set(out.mutable_state(), message.state);
  return out.SerializeAsString();
}

std::string Encode(const JoinReply& message) {
  v1::JoinReply out;
  out.set_term(message.term);
  out.set_stale_term(message.stale_term);
  out.set_epoch(message.epoch);
  out.set_wall_ns(message.wall_ns);
  out.set_heartbeat_ms(message.heartbeat_ms);
  out.set_coordinator(message.coordinator);
  return out.SerializeAsString();
}

std::string Encode(const MemberInfo& message) {
  v1::MemberInfo out;
  Set(&out, message);
  return out.SerializeAsString();
}

std::string Encode(const Membership& message) {
  v1::Membership out;
  out.set_epoch(message.epoch);
  out.set_term(message.term);
  out.set_complete(message.complete);
  for (const MemberInfo& member : message.members) Set(out.add_members(), member);
  return out.SerializeAsString();
}

std::string Encode(const HeartbeatRequest& message) {
  v1::HeartbeatRequest out;
  out.set_token(message.token);
  out.set_incarnation(message.incarnation);
  out.set_layout_serial(message.layout_serial);
  out.set_told_epoch(message.told_epoch);
  Set(out.mutable_state(), message.state);
  return out.SerializeAsString();
}

std::string Encode(const HeartbeatReply& message) {
  v1::HeartbeatReply out;
  out.set_member(message.member);
  out.set_rejoin(message.rejoin);
  out.set_stale_term(message.stale_term);
  out.set_term(message.term);
  out.set_epoch(message.epoch);
  out.set_coordinator(message.coordinator);
  out.set_wall_ns(message.wall_ns);
  out.set_term_complete(message.term_complete);
  for (const auto& [id, state] : message.versions) {
    v1::KnownVersion* item = out.add_versions();
    Set(item->mutable_id(), id);
    item->set_state(static_cast<uint32_t>(state));
  }
  return out.SerializeAsString();
}

std::string Encode(const HeldRequest& message) {
  v1::HeldRequest out;
  out.set_token(message.token);
  out.set_incarnation(message.incarnation);
  out.set_deadline_ns(message.deadline_ns);
  Set(out.mutable_held(), message.held);
  return out.SerializeAsString();
}

std::string Encode(const VersionReply& message) {
  v1::VersionReply out;
  out.set_state(static_cast<uint32_t>(message.state));
  out.set_reason(message.reason);
  out.set_publish_start_ns(message.publish_start_ns);
  out.set_epoch(message.epoch);
  return out.SerializeAsString();
}

std::string Encode(const PollReply& message) {
  v1::PollReply out;
  out.set_offered(message.offered);
  Set(out.mutable_id(), message.id);
  out.set_epoch(message.epoch);
  out.set_own_membership(message.own_membership);
  out.set_publish_start_ns(message.publish_start_ns);
  return out.SerializeAsString();
}

std::string Encode(const ControlQuery& message) {
  v1::Query out;
  out.set_incarnation(message.incarnation);
  Set(out.mutable_id(), message.id);
  out.set_epoch(message.epoch);
  out.set_flag(message.flag);
  Set(out.mutable_digest(), message.digest);
  out.set_bytes(message.bytes);
  return out.SerializeAsString();
}

std::string Encode(bool message) {
  v1::Flag out;
  out.set_value(message);
  return out.SerializeAsString();
}

template <>
Result<JoinRequest> Decode(std::string_view bytes) {
  return DecodeAs<v1::JoinRequest, JoinRequest>(bytes);
}
template <>
Result<JoinReply> Decode(std::string_view bytes) {
  return DecodeAs<v1::JoinReply, JoinReply>(bytes);
}
template <>
Result<MemberInfo> Decode(std::string_view bytes) {
  return DecodeAs<v1::MemberInfo, MemberInfo>(bytes);
}
template <>
Result<Membership> Decode(std::string_view bytes) {
  return DecodeAs<v1::Membership, Membership>(bytes);
}
template <>
Result<HeartbeatRequest> Decode(std::string_view bytes) {
  return DecodeAs<v1::HeartbeatRequest, HeartbeatRequest>(bytes);
}
template <>
Result<HeartbeatReply> Decode(std::string_view bytes) {
  return DecodeAs<v1::HeartbeatReply, HeartbeatReply>(bytes);
}
template <>
Result<HeldRequest> Decode(std::string_view bytes) {
  return DecodeAs<v1::HeldRequest, HeldRequest>(bytes);
}
template <>
Result<VersionReply> Decode(std::string_view bytes) {
  return DecodeAs<v1::VersionReply, VersionReply>(bytes);
}
template <>
Result<PollReply> Decode(std::string_view bytes) {
  return DecodeAs<v1::PollReply, PollReply>(bytes);
}
template <>
Result<ControlQuery> Decode(std::string_view bytes) {
  return DecodeAs<v1::Query, ControlQuery>(bytes);
}
template <>
Result<bool> Decode(std::string_view bytes) {
  return DecodeAs<v1::Flag, bool>(bytes);
}

}  // namespace bascule
