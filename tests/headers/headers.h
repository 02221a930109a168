// The headers that tests include most, parsed once for all of them (tools/bazel/precompiled.bzl).
#ifndef SHEAF_TESTS_HEADERS_HEADERS_H_
#define SHEAF_TESTS_HEADERS_HEADERS_H_  // g++ warns about #pragma once in files that it precompiles

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#endif
