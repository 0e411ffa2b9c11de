#include <fmt/format.h>

#include <optional>
#include <unordered_map>
#include <utility>

#include "bascule/mesh.h"
#include "layout/block_layout.h"
#include "layout/flat_layout.h"
#include "layout/template_builder.h"
#include "layout/world_template.h"

namespace bascule {

class LayoutBuilder::Impl {
 public:
  Impl(Mesh mesh, std::optional<std::vector<uint32_t>> coordinates)
      : world_(std::move(mesh)),
        coordinates_(std::move(coordinates)),
        blocks_(&world_, &coordinates_),
        flats_(&world_, &coordinates_) {}

  Status NeedCoordinates() const {
    if (coordinates_) return Status::Ok();
    return {Code::kInvalidArgument,
            "the builder was created without coordinates: it has no rank and takes no memory"};
  }

  BindingSink Sink() { return {&layout_, &tensor_numbers_}; }

  TemplateBuilder world_;
  std::optional<std::vector<uint32_t>> coordinates_;
  BlockExpander blocks_;
  FlatExpander flats_;
  Layout layout_;  // of the rank, as far as it was added
  std::unordered_map<std::string, uint32_t> tensor_numbers_;
};

LayoutBuilder::LayoutBuilder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LayoutBuilder::LayoutBuilder(LayoutBuilder&&) noexcept = default;
LayoutBuilder& LayoutBuilder::operator=(LayoutBuilder&&) noexcept = default;
LayoutBuilder::~LayoutBuilder() = default;

Result<LayoutBuilder> LayoutBuilder::Create(Mesh mesh) {
  BASCULE_RETURN_IF_ERROR(mesh.Validate());
  return LayoutBuilder(std::make_unique<Impl>(std::move(mesh), std::nullopt));
}

Result<LayoutBuilder> LayoutBuilder::Create(Mesh mesh, std::vector<uint32_t> coordinates) {
  BASCULE_RETURN_IF_ERROR(mesh.Validate());
  bool good = coordinates.size() == mesh.axis_sizes.size();
  for (size_t axis = 0; good && axis < coordinates.size(); ++axis) {
    good = coordinates[axis] < mesh.axis_sizes[axis];
  }
  if (!good) {
    return Status(Code::kInvalidArgument,
                  fmt::format("coordinates [{}] are not in the mesh of sizes [{}]",
                              fmt::join(coordinates, ", "), fmt::join(mesh.axis_sizes, ", ")));
  }
  return LayoutBuilder(std::make_unique<Impl>(std::move(mesh), std::move(coordinates)));
}

Result<std::vector<int64_t>> LayoutBuilder::LocalShape(const Block& block) {
  BASCULE_RETURN_IF_ERROR(impl_->NeedCoordinates());
  BASCULE_ASSIGN_OR_RETURN(MeasuredBlock measured, impl_->blocks_.Measure(block));
  if (measured.present) return std::move(measured.shape);
  return Status(Code::kNotFound, "the block is At other ranks");
}

Result<int64_t> LayoutBuilder::LocalElements(const FlatBuffer& flat) {
  return impl_->flats_.LocalElements(flat);
}

uint32_t LayoutBuilder::AddBuffer(Buffer buffer) {
  impl_->layout_.buffers.push_back(std::move(buffer));
  return static_cast<uint32_t>(impl_->layout_.buffers.size() - 1);
}

Status LayoutBuilder::Add(const Block& block) {
  BASCULE_ASSIGN_OR_RETURN(MeasuredBlock measured, impl_->blocks_.Measure(block));
  return impl_->blocks_.AddBoxes(block, measured);
}

Status LayoutBuilder::Add(const Block& block, const LocalMemory& memory) {
  BASCULE_RETURN_IF_ERROR(impl_->NeedCoordinates());
  BASCULE_ASSIGN_OR_RETURN(MeasuredBlock measured, impl_->blocks_.Measure(block));
  BASCULE_RETURN_IF_ERROR(impl_->blocks_.AddBoxes(block, measured));
  return impl_->blocks_.AddBindings(block, measured, memory, impl_->Sink());
}

Status LayoutBuilder::AddFlat(const FlatBuffer& flat) { return impl_->flats_.AddBoxes(flat); }

Status LayoutBuilder::AddFlat(const FlatBuffer& flat, const LocalMemory& memory) {
  BASCULE_RETURN_IF_ERROR(impl_->NeedCoordinates());
  BASCULE_RETURN_IF_ERROR(impl_->flats_.AddBoxes(flat));
  return impl_->flats_.AddBindings(flat, memory, impl_->Sink());
}

void LayoutBuilder::AddAlias(Alias alias) { impl_->layout_.aliases.push_back(std::move(alias)); }

void LayoutBuilder::AddUnused(std::string pattern) {
  impl_->layout_.unused.push_back(std::move(pattern));
}

void LayoutBuilder::AddPadding(const Padding& padding) {
  impl_->layout_.padding.push_back(padding);
}

Result<std::shared_ptr<const WorldTemplate>> LayoutBuilder::BuildWorld() const {
  return impl_->world_.Build(impl_->layout_.aliases, impl_->layout_.unused);
}

Result<Layout> LayoutBuilder::BuildLayout() const {
  BASCULE_RETURN_IF_ERROR(impl_->NeedCoordinates());
  Layout layout = impl_->layout_;
  BASCULE_ASSIGN_OR_RETURN(layout.world, BuildWorld());
  layout.coordinates = *impl_->coordinates_;
  BASCULE_RETURN_IF_ERROR(CheckAgainstTemplate(layout, *layout.world, layout.coordinates));
  return layout;
}

}  // namespace bascule
