// The most included headers, parsed once for all sources (tools/bazel/precompiled.bzl).
#ifndef SHEAF_TOOLS_HEADERS_HEADERS_H_
#define SHEAF_TOOLS_HEADERS_HEADERS_H_  // g++ has a warning for #pragma once in what it precompiles

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
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
