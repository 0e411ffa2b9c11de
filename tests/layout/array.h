// A small array in the manner of numpy, to say a second time, element by element, what placements
// and blocks mean. Nothing here is shared with the code under test.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace bascule::testing {

struct Array {
  std::vector<int64_t> shape;
  std::vector<int64_t> values;  // row-major
};

inline int64_t Count(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

// Elements first, first + 1, ... in row-major order.
inline Array Range(std::vector<int64_t> shape, int64_t first = 0) {
  Array array{shape, std::vector<int64_t>(static_cast<size_t>(Count(shape)))};
  std::iota(array.values.begin(), array.values.end(), first);
  return array;
}

inline Array Full(std::vector<int64_t> shape, int64_t value) {
  return {shape, std::vector<int64_t>(static_cast<size_t>(Count(shape)), value)};
}

// The given indices along a dimension (numpy.take).
inline Array TakeAlong(const Array& array, size_t dim, const std::vector<int64_t>& indices) {
  Array taken;
  taken.shape = array.shape;
  taken.shape[dim] = static_cast<int64_t>(indices.size());
  int64_t outer = 1;
  int64_t inner = 1;
  for (size_t d = 0; d < dim; ++d) outer *= array.shape[d];
  for (size_t d = dim + 1; d < array.shape.size(); ++d) inner *= array.shape[d];
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t index : indices) {
      for (int64_t i = 0; i < inner; ++i) {
        taken.values.push_back(
            array.values[static_cast<size_t>((o * array.shape[dim] + index) * inner + i)]);
      }
    }
  }
  return taken;
}

inline std::vector<int64_t> Indices(int64_t begin, int64_t end, int64_t step = 1) {
  std::vector<int64_t> indices;
  for (int64_t index = begin; index < end; index += step) indices.push_back(index);
  return indices;
}

inline Array SliceAlong(const Array& array, size_t dim, int64_t begin, int64_t end) {
  return TakeAlong(array, dim, Indices(begin, end));
}

inline Array ConcatAlong(size_t dim, const std::vector<Array>& parts) {
  Array joined;
  joined.shape = parts[0].shape;
  joined.shape[dim] = 0;
  for (const Array& part : parts) joined.shape[dim] += part.shape[dim];
  int64_t outer = 1;
  for (size_t d = 0; d < dim; ++d) outer *= joined.shape[d];
  for (int64_t o = 0; o < outer; ++o) {
    for (const Array& part : parts) {
      auto row = static_cast<int64_t>(part.values.size()) / std::max<int64_t>(outer, 1);
      joined.values.insert(joined.values.end(), part.values.begin() + o * row,
                           part.values.begin() + (o + 1) * row);
    }
  }
  return joined;
}

inline Array StackOf(const std::vector<Array>& parts) {
  std::vector<Array> rows = parts;
  for (Array& row : rows) row.shape.insert(row.shape.begin(), 1);
  return ConcatAlong(0, rows);
}

inline Array Transposed(const Array& array, const std::vector<int>& order) {
  Array result;
  std::vector<int64_t> strides(order.size(), 1);
  for (size_t d = order.size(); d-- > 1;) strides[d - 1] = strides[d] * array.shape[d];
  for (int dim : order) result.shape.push_back(array.shape[static_cast<size_t>(dim)]);
  for (int64_t n = 0; n < Count(result.shape); ++n) {
    int64_t rest = n;
    int64_t at = 0;
    for (size_t d = order.size(); d-- > 0;) {
      at += rest % result.shape[d] * strides[static_cast<size_t>(order[d])];
      rest /= result.shape[d];
    }
    result.values.push_back(array.values[static_cast<size_t>(at)]);
  }
  return result;
}

// torch.chunk(array, chunks, dim)[index], empty where torch gives fewer chunks.
inline Array Chunk(const Array& array, size_t dim, int64_t chunks, int64_t index) {
  int64_t extent = array.shape[dim];
  int64_t size = (extent + chunks - 1) / chunks;
  int64_t begin = std::min(extent, size * index);
  return SliceAlong(array, dim, begin, std::min(extent, begin + size));
}

}  // namespace bascule::testing
