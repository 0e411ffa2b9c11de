#include <algorithm>
#include <numeric>

#include "plan/prepared.h"

namespace bascule::plan {
namespace {

// One box of consecutive tensors of a joint class, all from one place.
struct Run {
  uint32_t joined = 0;  // index in Joint::classes
  uint32_t first = 0;   // tensors [first, last) of the class
  uint32_t last = 0;
  uint32_t box = 0;   // index in the box table
  uint32_t from = 0;  // member id, or index in Prepared::shares
};

// What the runs of a class have in common, as the receiver sees them.
struct ReceivedClass {
  uint32_t first_tensor = 0;  // index in Part::tensors
  uint64_t element_bytes = 0;
};

// Calls emit(first tensor, last tensor, box) for the elements [first, last) of the line of `box`
// over tensors: the part of a tensor, whole tensors, the part of a tensor.
template <typename Emit>
void ForEachLinePart(const Box& box, int64_t first, int64_t last, Emit&& emit) {
  const int64_t size = box.size();
  std::vector<Box> parts;
  auto partial = [&](int64_t tensor, int64_t from, int64_t to) {
    parts.clear();
    AppendRange(box, from, to, &parts);
    const auto t = static_cast<uint32_t>(tensor);
    for (const Box& part : parts) emit(t, t + 1, part);
  };
  if (first >= last) return;
  int64_t tensor = first / size;
  const int64_t last_tensor = last / size;
  if (tensor == last_tensor) return partial(tensor, first % size, last % size);
  if (first % size != 0) partial(tensor++, first % size, size);
  if (tensor < last_tensor) {
    emit(static_cast<uint32_t>(tensor), static_cast<uint32_t>(last_tensor), box);
  }
  if (last % size != 0) partial(last_tensor, 0, last % size);
}

// value * numerator / denominator without overflow.
uint64_t Scale(uint64_t value, uint64_t numerator, uint64_t denominator) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(value) * numerator / denominator);
}

// Cuts pieces into chunks of about chunk_bytes, one source after the other.
class ChunkMaker {
 public:
  ChunkMaker(uint64_t chunk_bytes, BoxTable* boxes, Part* part)
      : chunk_bytes_(chunk_bytes), boxes_(*boxes), part_(*part) {}

  void Start(uint32_t source) {
    source_ = source;
    first_chunk_ = part_.chunks.size();
    open_ = Chunk{source, static_cast<uint32_t>(part_.pieces.size())};
  }

  void Add(const Run& run, const ReceivedClass& received) {
    SplitBox(run.box, received.element_bytes);
    for (uint32_t tensor = run.first; tensor < run.last; ++tensor) {
      for (const Slice& slice : slices_) Append(received.first_tensor + tensor, slice);
    }
  }

  // A small rest joins the chunk before it.
  void Finish() {
    if (open_.piece_count == 0) return;
    const bool small = 4 * open_.bytes < chunk_bytes_ && part_.chunks.size() > first_chunk_;
    if (small && part_.chunks.back().bytes + open_.bytes <= 2 * chunk_bytes_) {
      Chunk& last = part_.chunks.back();
      last.piece_count += open_.piece_count;
      last.bytes += open_.bytes;
      last.elements += open_.elements;
      part_.bytes += open_.bytes;
    } else {
      Close();
    }
  }

 private:
  struct Slice {
    uint32_t box = 0;
    uint64_t elements = 0;
    uint64_t bytes = 0;
  };

  // Boxes above chunk_bytes become ranges of about equal size.
  void SplitBox(uint32_t index, uint64_t element_bytes) {
    slices_.clear();
    const Box box = boxes_[index];
    const int64_t size = box.size();
    const uint64_t bytes = static_cast<uint64_t>(size) * element_bytes;
    auto add = [&](uint32_t slice, int64_t elements) {
      const auto count = static_cast<uint64_t>(elements);
      slices_.push_back({slice, count, count * element_bytes});
    };
    if (bytes <= chunk_bytes_) return add(index, size);
    const auto count = static_cast<int64_t>(
        std::min(static_cast<uint64_t>(size), (bytes + chunk_bytes_ - 1) / chunk_bytes_));
    const int64_t grain = CutGrain(box, static_cast<int64_t>(chunk_bytes_ / 8 / element_bytes));
    ranges_.clear();
    int64_t from = 0;
    for (int64_t i = 1; i <= count; ++i) {
      const auto exact = static_cast<int64_t>(Scale(
          static_cast<uint64_t>(size), static_cast<uint64_t>(i), static_cast<uint64_t>(count)));
      const int64_t to = i == count ? size : std::min(size, (exact + grain / 2) / grain * grain);
      AppendRange(box, from, to, &ranges_);
      from = to;
    }
    for (const Box& range : ranges_) add(boxes_.Intern(range), range.size());
  }

  void Append(uint32_t tensor, const Slice& slice) {
    if (open_.piece_count > 0 && open_.bytes + slice.bytes > chunk_bytes_ + chunk_bytes_ / 2) {
      Close();
    }
    part_.pieces.push_back({tensor, slice.box});
    ++open_.piece_count;
    open_.bytes += slice.bytes;
    open_.elements += slice.elements;
    if (open_.bytes >= chunk_bytes_) Close();
  }

  void Close() {
    part_.bytes += open_.bytes;
    part_.chunks.push_back(open_);
    open_ = Chunk{source_, static_cast<uint32_t>(part_.pieces.size())};
  }

  uint64_t chunk_bytes_;
  BoxTable& boxes_;
  Part& part_;
  uint32_t source_ = 0;
  size_t first_chunk_ = 0;
  Chunk open_;
  std::vector<Slice> slices_;
  std::vector<Box> ranges_;
};

class PartMaker {
 public:
  PartMaker(const Prepared& prepared, uint32_t member)
      : prepared_(prepared), member_(member), node_(prepared.node_of[member]) {}

  Part Make() {
    part_.member = member_;
    if (prepared_.world.members[member_].role == Role::kTrainer) return std::move(part_);
    received_.resize(prepared_.joint.classes.size());
    for (uint32_t j = 0; j < prepared_.joint.classes.size(); ++j) {
      if (!prepared_.NeedOf(member_, prepared_.joint.classes[j]).empty()) AddClass(j);
    }
    ShareOut();
    MakeChunks();
    part_.boxes = std::move(boxes_).Take();
    return std::move(part_);
  }

 private:
  const JointClass& ClassAt(uint32_t joined) const { return prepared_.joint.classes[joined]; }

  void AddClass(uint32_t j) {
    const JointClass& joined = ClassAt(j);
    const DType wire = prepared_.WireOf(member_, joined);
    received_[j] = {static_cast<uint32_t>(part_.tensors.size()),
                    static_cast<uint64_t>(DTypeSize(wire))};
    AddTensors(joined, wire);
    const Cells needs = prepared_.NeedsOn(prepared_.nodes[node_], joined, wire);
    for (uint32_t cell = 0; cell < needs.boxes.size(); ++cell) {
      auto needers = needs.OwnersOf(cell);
      if (std::binary_search(needers.begin(), needers.end(), member_)) {
        AddNeed(j, needs.boxes[cell], needers, j + cell);
      }
    }
  }

  void AddTensors(const JointClass& joined, DType wire) {
    const World& world = prepared_.world;
    const Joint& joint = prepared_.joint;
    const uint32_t slot = prepared_.slot_of[member_];
    const uint32_t own = joint.need_templates[slot];
    const uint32_t destination_class = joined.need_class[slot];
    const DType destination = world.templates[own]->classes[destination_class].dtype;
    for (uint32_t i = joined.first_item; i < joined.first_item + joined.items; ++i) {
      PartTensor& tensor = part_.tensors.emplace_back();
      tensor.destination_class = destination_class;
      tensor.destination_name = joint.own_name_index[slot][i];
      tensor.published = joined.published;
      tensor.wire = wire;
      tensor.destination = destination;
      tensor.source_names.reserve(world.templates.size());
      for (const auto& index : joint.name_index) {
        tensor.source_names.push_back(index.empty() ? kNone : index[i]);
      }
      tensor.name = PublishedName(i);
    }
  }

  // The name under which the first template of trainers that has the tensor stores it.
  std::string_view PublishedName(uint32_t item) const {
    for (uint32_t t : prepared_.joint.source_templates) {
      const uint32_t name = prepared_.joint.name_index[t][item];
      if (name != kNone) return prepared_.world.templates[t]->names[name];
    }
    return prepared_.joint.items[item];
  }

  // One cell of the node's needs: parts that a trainer of this node holds are read there; the rest
  // is fetched once by the node.
  void AddNeed(uint32_t j, const Box& box, std::span<const uint32_t> needers, uint32_t turn) {
    if (prepared_.nodes[node_].trainers.empty()) return AddOutside(j, box, needers, turn);
    const HolderCells& holders = prepared_.HoldersOf(ClassAt(j));
    holders.index.ForEachOverlap(box, [&](uint32_t cell, const Box& common) {
      const SourceChoice choice = prepared_.ChoiceFor(holders.set[cell], node_);
      if (choice.on_node) {
        AddRun(j, 0, ClassAt(j).items, common, choice);
      } else {
        AddOutside(j, common, needers, turn + cell);
      }
    });
  }

  // The needers each fetch an equal share of the line of `box` over the class's tensors from
  // outside and read the others' shares from them. `turn` rotates who gets what.
  void AddOutside(uint32_t j, const Box& box, std::span<const uint32_t> needers, uint32_t turn) {
    const JointClass& joined = ClassAt(j);
    const uint64_t element_bytes = received_[j].element_bytes;
    const int64_t line = box.size() * joined.items;
    const size_t count = needers.size();
    int64_t from = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto exact = static_cast<int64_t>(Scale(static_cast<uint64_t>(line), i + 1, count));
      const int64_t to =
          i + 1 == count ? line : SnapCut(box, exact, element_bytes, prepared_.world.whole_bytes);
      const uint32_t fetcher = needers[(i + turn) % count];
      ForEachLinePart(box, from, to, [&](uint32_t first, uint32_t last, const Box& part) {
        if (fetcher == member_) {
          AddFetched(j, first, last, part);
        } else {
          peer_runs_.push_back({j, first, last, boxes_.Intern(part), fetcher});
        }
      });
      from = to;
    }
  }

  void AddFetched(uint32_t j, uint32_t first, uint32_t last, const Box& box) {
    const HolderCells& holders = prepared_.HoldersOf(ClassAt(j));
    holders.index.ForEachOverlap(box, [&](uint32_t cell, const Box& common) {
      AddRun(j, first, last, common, prepared_.ChoiceFor(holders.set[cell], node_));
    });
  }

  void AddRun(uint32_t j, uint32_t first, uint32_t last, const Box& box,
              const SourceChoice& choice) {
    Run run{j, first, last, boxes_.Intern(box), choice.holder};
    if (choice.shares == kNone) {
      runs_.push_back(run);
    } else {
      run.from = choice.shares;
      shared_runs_.push_back(run);
    }
  }

  uint64_t BytesOf(const Run& run) const {
    return static_cast<uint64_t>(boxes_[run.box].size()) * received_[run.joined].element_bytes *
           (run.last - run.first);
  }

  // Gives runs that several holders could serve to holders, by the holders' shares.
  void ShareOut() {
    std::stable_sort(shared_runs_.begin(), shared_runs_.end(),
                     [](const Run& a, const Run& b) { return a.from < b.from; });
    for (size_t first = 0; first < shared_runs_.size();) {
      size_t last = first;
      while (last < shared_runs_.size() && shared_runs_[last].from == shared_runs_[first].from) {
        ++last;
      }
      CutByShares({shared_runs_.data() + first, last - first},
                  prepared_.shares[shared_runs_[first].from]);
      first = last;
    }
  }

  // All runs with these holders make one line; it is cut at the cumulative shares. The first
  // holder is rotated, so that lines too short to be cut are spread as well.
  void CutByShares(std::span<const Run> runs, const Shares& shares) {
    uint64_t line = 0;
    for (const Run& run : runs) line += BytesOf(run);
    const size_t count = shares.holders.size();
    const size_t rotation = prepared_.ordinal_of[member_] % count;
    size_t step = 0;  // the holder at hand is number (step + rotation) % count
    uint64_t poured = shares.bytes[rotation];
    uint64_t offset = 0;
    for (const Run& run : runs) {
      const uint64_t bytes = BytesOf(run);
      const uint64_t element_bytes = received_[run.joined].element_bytes;
      const Box box = boxes_[run.box];
      int64_t from = 0;
      while (step + 1 < count) {
        const uint64_t cut = Scale(line, poured, shares.total);
        if (cut >= offset + bytes) break;
        const int64_t exact =
            cut > offset ? static_cast<int64_t>((cut - offset) / element_bytes) : 0;
        const int64_t to = SnapCut(box, exact, element_bytes, prepared_.world.whole_bytes);
        AddPartOfRun(run, box, from, to, shares.holders[(step + rotation) % count]);
        from = to;
        ++step;
        poured += shares.bytes[(step + rotation) % count];
      }
      AddPartOfRun(run, box, from, box.size() * (run.last - run.first),
                   shares.holders[(step + rotation) % count]);
      offset += bytes;
    }
  }

  void AddPartOfRun(const Run& run, const Box& box, int64_t from, int64_t to, uint32_t holder) {
    ForEachLinePart(box, from, to, [&](uint32_t first, uint32_t last, const Box& part) {
      runs_.push_back(
          {run.joined, run.first + first, run.first + last, boxes_.Intern(part), holder});
    });
  }

  void MakeChunks() {
    uint64_t pieces = 0;
    for (const auto* runs : {&runs_, &peer_runs_}) {
      for (const Run& run : *runs) pieces += run.last - run.first;
    }
    part_.pieces.reserve(pieces);
    // Peers on the node come last: they must fetch first what is read from them.
    ChunksOf(&runs_);
    ChunksOf(&peer_runs_);
  }

  // Sources in turn, beginning at another one on each rank.
  void ChunksOf(std::vector<Run>* runs) {
    if (runs->empty()) return;
    std::stable_sort(runs->begin(), runs->end(),
                     [](const Run& a, const Run& b) { return a.from < b.from; });
    std::vector<size_t> starts;
    for (size_t i = 0; i < runs->size(); ++i) {
      if (i == 0 || (*runs)[i].from != (*runs)[i - 1].from) starts.push_back(i);
    }
    const size_t sources = starts.size();
    starts.push_back(runs->size());
    const auto& users = prepared_.needers[prepared_.slot_of[member_]].members();
    const size_t rotation = prepared_.ordinal_of[member_] * sources / users.size();
    ChunkMaker maker(prepared_.world.chunk_bytes, &boxes_, &part_);
    for (size_t i = 0; i < sources; ++i) {
      const size_t source = (i + rotation) % sources;
      maker.Start((*runs)[starts[source]].from);
      for (size_t r = starts[source]; r < starts[source + 1]; ++r) {
        maker.Add((*runs)[r], received_[(*runs)[r].joined]);
      }
      maker.Finish();
    }
  }

  const Prepared& prepared_;
  uint32_t member_;
  uint32_t node_;
  Part part_;
  BoxTable boxes_;
  std::vector<ReceivedClass> received_;  // per joint class
  std::vector<Run> runs_;                // from one holder
  std::vector<Run> shared_runs_;         // from one of several holders
  std::vector<Run> peer_runs_;           // from rollouts of this node
};

}  // namespace

Part MakePart(const Prepared& prepared, uint32_t member) {
  return PartMaker(prepared, member).Make();
}

}  // namespace bascule::plan
