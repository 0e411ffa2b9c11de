#!/usr/bin/env bash
# Builds the planner and its golden test with several compilers and levels, and runs each: all must
# compute the digests that the test states. From the repository root: tests/plan/compare_compilers.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
sources=(src/base/dtype.cc src/base/status.cc src/layout/layout.cc src/layout/world_template*.cc src/plan/*.cc
         tests/plan/golden_test.cc tests/plan/worlds.cc)
for compiler in "g++ -O0" "g++ -O2" "g++ -O3" "clang++ -O2"; do
  objects=()
  for source in "${sources[@]}"; do
    object="$out/${source//\//_}.o"
    $compiler -std=c++20 -Iinclude -Isrc -I. -c "$source" -o "$object"
    objects+=("$object")
  done
  ${compiler%% *} "${objects[@]}" -lgtest -lgtest_main -lfmt -lxxhash -lpthread -o "$out/golden"
  "$out/golden" --gtest_filter='PlanGolden*' --gtest_brief=1
  echo "$compiler: equal"
done
