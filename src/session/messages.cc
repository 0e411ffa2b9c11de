#include "session/messages.h"

#include "base/wire.h"

namespace bascule {
namespace {

Status Malformed(const char* what) {
  return Status(Code::kInvalidArgument, std::string("malformed ") + what +
                                            " (a peer of another build, or a damaged message)");
}

void PutBox(WireWriter* out, const Box& box) {
  out->U8(static_cast<uint8_t>(box.ndim()));
  for (int d = 0; d < box.ndim(); ++d) {
    out->I64(box[d].begin);
    out->I64(box[d].end);
  }
}

bool GetBox(WireReader* in, Box* box) {
  uint8_t ndim = in->U8();
  if (!in->ok() || ndim > kMaxDims) return false;
  std::vector<Interval> dims(ndim);
  for (Interval& dim : dims) {
    dim.begin = in->I64();
    dim.end = in->I64();
  }
  *box = Box(dims);
  return in->ok();
}

void PutSums(WireWriter* out, const std::vector<Sum>& sums) {
  out->U32(static_cast<uint32_t>(sums.size()));
  for (const Sum& sum : sums) {
    out->U64(sum.digest);
    out->U64(sum.elements);
  }
}

void GetSums(WireReader* in, std::vector<Sum>* sums) {
  sums->resize(in->Count(sizeof(Sum)));
  for (Sum& sum : *sums) {
    sum.digest = in->U64();
    sum.elements = in->U64();
  }
}

}  // namespace

std::string Encode(const PeerRequest& request) {
  WireWriter out;
  out.U8(static_cast<uint8_t>(request.method));
  out.U64(request.id.term);
  out.U64(request.id.version);
  out.U64(request.plan.high);
  out.U64(request.plan.low);
  out.U64(request.epoch);
  out.U8(request.own_membership ? 1 : 0);
  out.Bytes(request.engine);
  out.U32(request.rank);
  out.U8(static_cast<uint8_t>(request.scope));
  out.U64(request.known_layout);
  out.U32(static_cast<uint32_t>(request.live.size()));
  for (uint32_t rank : request.live) out.U32(rank);
  out.U32(static_cast<uint32_t>(request.wanted.size()));
  for (const WantedSum& wanted : request.wanted) {
    out.Bytes(wanted.tensor);
    PutBox(&out, wanted.box);
    out.U8(static_cast<uint8_t>(wanted.wire));
  }
  return out.Take();
}

Result<PeerRequest> DecodePeerRequest(std::string_view bytes) {
  WireReader in(bytes);
  PeerRequest request;
  uint8_t method = in.U8();
  request.id.term = in.U64();
  request.id.version = in.U64();
  request.plan.high = in.U64();
  request.plan.low = in.U64();
  request.epoch = in.U64();
  request.own_membership = in.U8() != 0;
  request.engine = in.Bytes();
  request.rank = in.U32();
  uint8_t scope = in.U8();
  request.known_layout = in.U64();
  request.live.resize(in.Count(sizeof(uint32_t)));
  for (uint32_t& rank : request.live) rank = in.U32();
  request.wanted.resize(in.Count(6));
  for (WantedSum& wanted : request.wanted) {
    wanted.tensor = in.Bytes();
    if (!GetBox(&in, &wanted.box)) return Malformed("peer request");
    wanted.wire = static_cast<DType>(in.U8());
    if (!in.ok() || DTypeSize(wanted.wire) == 0) return Malformed("peer request");
  }
  if (!in.done() || method < 1 || method > 6 || scope > 3) return Malformed("peer request");
  request.method = static_cast<PeerMethod>(method);
  request.scope = static_cast<AuditScope>(scope);
  return request;
}

std::string Encode(const OpenReply& reply) {
  WireWriter out;
  out.U64(reply.generation);
  out.Bytes(reply.header);
  out.U64(reply.header_offset);
  out.U64(reply.data_offset);
  out.U8(reply.direct ? 1 : 0);
  out.U64(reply.layout_serial);
  out.U32(static_cast<uint32_t>(reply.regions.size()));
  for (const std::string& region : reply.regions) out.Bytes(region);
  out.U32(static_cast<uint32_t>(reply.places.size()));
  for (const auto& tensor : reply.places) {
    out.U32(static_cast<uint32_t>(tensor.size()));
    for (const SourcePlace& place : tensor) {
      out.U32(place.base);
      out.I64(place.offset);
      PutBox(&out, place.box);
      for (int d = 0; d < place.box.ndim(); ++d)
        out.I64(place.byte_strides[static_cast<size_t>(d)]);
      out.U8(static_cast<uint8_t>(place.dtype));
    }
  }
  PutSums(&out, reply.checks);
  return out.Take();
}

Result<OpenReply> DecodeOpenReply(std::string_view bytes) {
  WireReader in(bytes);
  OpenReply reply;
  reply.generation = in.U64();
  reply.header = in.Bytes();
  reply.header_offset = in.U64();
  reply.data_offset = in.U64();
  reply.direct = in.U8() != 0;
  reply.layout_serial = in.U64();
  reply.regions.resize(in.Count(sizeof(uint32_t)));
  for (std::string& region : reply.regions) region = in.Bytes();
  reply.places.resize(in.Count(sizeof(uint32_t)));
  for (auto& tensor : reply.places) {
    tensor.resize(in.Count(14));
    for (SourcePlace& place : tensor) {
      place.base = in.U32();
      place.offset = in.I64();
      if (!GetBox(&in, &place.box)) return Malformed("open reply");
      for (int d = 0; d < place.box.ndim(); ++d) {
        place.byte_strides[static_cast<size_t>(d)] = in.I64();
      }
      place.dtype = static_cast<DType>(in.U8());
      if (!in.ok() || DTypeSize(place.dtype) == 0 || place.base >= reply.regions.size()) {
        return Malformed("open reply");
      }
    }
  }
  GetSums(&in, &reply.checks);
  if (!in.done()) return Malformed("open reply");
  return reply;
}

std::string Encode(const SumsReply& reply) {
  WireWriter out;
  out.U64(reply.id.term);
  out.U64(reply.id.version);
  out.U32(static_cast<uint32_t>(reply.names.size()));
  for (const std::string& name : reply.names) out.Bytes(name);
  PutSums(&out, reply.sums);
  return out.Take();
}

Result<SumsReply> DecodeSumsReply(std::string_view bytes) {
  WireReader in(bytes);
  SumsReply reply;
  reply.id.term = in.U64();
  reply.id.version = in.U64();
  reply.names.resize(in.Count(sizeof(uint32_t)));
  for (std::string& name : reply.names) name = in.Bytes();
  GetSums(&in, &reply.sums);
  bool rows = reply.names.empty() || reply.names.size() == reply.sums.size();
  if (!in.done() || !rows) return Malformed("sums reply");
  return reply;
}

}  // namespace bascule
