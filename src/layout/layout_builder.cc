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
  Impl(Mesh mesh, std::optional<std::vector<uint32_t>> place)
      : world(std::move(mesh)),
        coordinates(std::move(place)),
        blocks(&world, &coordinates),
        flats(&world, &coordinates) {}

  Status NeedCoordinates() const {
    if (coordinates) return Status::Ok();
    return {Code::kInvalidArgument,
            "the builder was created without coordinates: it has no rank and takes no memory"};
  }

  BindingSink Sink() { return {&layout, &tensor_numbers}; }

  TemplateBuilder world;
  std::optional<std::vector<uint32_t>> coordinates;
  BlockExpander blocks;
  FlatExpander flats;
  Layout layout;  // of the rank, as far as it was added
  std::unordered_map<std::string, uint32_t> tensor_numbers;
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
  BASCULE_ASSIGN_OR_RETURN(MeasuredBlock measured, impl_->blocks.Measure(block));
  if (measured.present) return std::move(measured.shape);
  return Status(Code::kNotFound, "the block is At other ranks");
}

Result<int64_t> LayoutBuilder::LocalElements(const FlatBuffer& flat) {
  return impl_->flats.LocalElements(flat);
}

uint32_t LayoutBuilder::AddBuffer(Buffer buffer) {
  impl_->layout.buffers.push_back(std::move(buffer));
  return static_cast<uint32_t>(impl_->layout.buffers.size() - 1);
}

Status LayoutBuilder::Add(const Block& block) {
  BASCULE_ASSIGN_OR_RETURN(MeasuredBlock measured, impl_->blocks.Measure(block));
  return impl_->blocks.AddBoxes(block, measured);
}

Status LayoutBuilder::Add(const Block& block, const LocalMemory& memory) {
  BASCULE_RETURN_IF_ERROR(impl_->NeedCoordinates());
  BASCULE_ASSIGN_OR_RETURN(MeasuredBlock measured, impl_->blocks.Measure(block));
  BASCULE_RETURN_IF_ERROR(impl_->blocks.AddBoxes(block, measured));
  return impl_->blocks.AddBindings(block, measured, memory, impl_->Sink());
}

Status LayoutBuilder::AddFlat(const FlatBuffer& flat) { return impl_->flats.AddBoxes(flat); }

Status LayoutBuilder::AddFlat(const FlatBuffer& flat, const LocalMemory& memory) {
  BASCULE_RETURN_IF_ERROR(impl_->NeedCoordinates());
  BASCULE_RETURN_IF_ERROR(impl_->flats.AddBoxes(flat));
  return impl_->flats.AddBindings(flat, memory, impl_->Sink());
}

void LayoutBuilder::AddAlias(Alias alias) { impl_->layout.aliases.push_back(std::move(alias)); }

void LayoutBuilder::AddUnused(std::string pattern) {
  impl_->layout.unused.push_back(std::move(pattern));
}

void LayoutBuilder::AddPadding(const Padding& padding) { impl_->layout.padding.push_back(padding); }

Result<std::shared_ptr<const WorldTemplate>> LayoutBuilder::BuildWorld() const {
  return impl_->world.Build(impl_->layout.aliases, impl_->layout.unused);
}

Result<Layout> LayoutBuilder::BuildLayout() const {
  BASCULE_RETURN_IF_ERROR(impl_->NeedCoordinates());
  Layout layout = impl_->layout;
  BASCULE_ASSIGN_OR_RETURN(layout.world, BuildWorld());
  layout.coordinates = *impl_->coordinates;
  BASCULE_RETURN_IF_ERROR(CheckAgainstTemplate(layout, *layout.world, layout.coordinates));
  return layout;
}

}  // namespace bascule
