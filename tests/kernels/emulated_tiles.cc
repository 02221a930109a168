// The matrix-tile instructions (AMX) where the machine has none: each one raises SIGILL there, and a handler emulates it. The machine code
// is the same as on a machine with tiles, and what such a machine refuses is refused. Semantics: Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 2 (LDTILECFG, TDPBF16PS, ...).
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstring>

#include <immintrin.h>
#include <ucontext.h>
#include <unistd.h>

#include "sheaf/kernels/cpu/bf16_instructions.h"
#include "sheaf/tests/kernels/emulated_tiles.h"

namespace sheaf::testing {
namespace {

constexpr int kTiles = 8, kRows = 16, kBytes = 64;

struct Tile {
  alignas(64) uint8_t row[kRows][kBytes];
};

/// The contents of a thread's tile registers. Trivial, as a signal handler may be the first to touch it.
struct State {
  bool configured;
  int rows[kTiles], bytes[kTiles];  ///< 0: not configured
  uint8_t raw_config[64];
  Tile tile[kTiles];
};
thread_local State state;
std::atomic<int64_t> executed{0};

struct Instruction {
  int prefix, opcode, mod, reg, rm, vvvv;  ///< prefix: 0 none, 1 66, 2 F3, 3 F2
  uintptr_t address;                       ///< base and displacement
  int64_t stride;                          ///< index register, scaled
  int length;
};

uint64_t general_register(const ucontext_t* u, int n) {
  constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return static_cast<uint64_t>(u->uc_mcontext.gregs[kOrder[n]]);
}

/// False: not an instruction with a three-byte VEX prefix in map 0F38.
bool decode(const ucontext_t* u, Instruction& out) {
  const auto* begin = reinterpret_cast<const uint8_t*>(u->uc_mcontext.gregs[REG_RIP]);
  const uint8_t* p = begin;
  if (*p++ != 0xC4) return false;
  const uint8_t v1 = *p++, v2 = *p++;
  const int r = ~v1 >> 7 & 1, x = ~v1 >> 6 & 1, b = ~v1 >> 5 & 1;
  if ((v1 & 31) != 2 || (v2 & 0x84) != 0) return false;  // W and L are 0
  out.vvvv = ~v2 >> 3 & 15, out.prefix = v2 & 3, out.opcode = *p++;
  const uint8_t modrm = *p++;
  out.mod = modrm >> 6, out.reg = (modrm >> 3 & 7) | r << 3, out.rm = modrm & 7;
  out.address = 0, out.stride = 0;
  if (out.mod == 3) {
    out.rm |= b << 3;
    out.length = static_cast<int>(p - begin);
    return true;
  }
  bool relative = false, wide = out.mod == 2;
  if (out.rm == 4) {
    const uint8_t sib = *p++;
    const int index = (sib >> 3 & 7) | x << 3, base = (sib & 7) | b << 3;
    if (index != 4) out.stride = static_cast<int64_t>(general_register(u, index) << (sib >> 6));
    if ((sib & 7) == 5 && out.mod == 0) wide = true;
    else out.address = general_register(u, base);
  } else if (out.rm == 5 && out.mod == 0) {
    relative = wide = true;
  } else {
    out.address = general_register(u, out.rm | b << 3);
  }
  if (wide) {
    int32_t d;
    std::memcpy(&d, p, 4), p += 4;
    out.address += static_cast<uintptr_t>(static_cast<int64_t>(d));
  } else if (out.mod == 1) {
    out.address += static_cast<uintptr_t>(static_cast<int64_t>(static_cast<int8_t>(*p++)));
  }
  if (relative) out.address += reinterpret_cast<uintptr_t>(p);
  out.length = static_cast<int>(p - begin);
  return true;
}

bool load_config(const uint8_t* from) {
  State& s = state;
  if (from[0] == 0) {
    s.configured = false;
    return true;
  }
  if (from[0] != 1 || std::any_of(from + 2, from + 16, [](uint8_t b) { return b != 0; })) return false;
  for (int t = 0; t < 16; ++t) {
    uint16_t bytes;
    std::memcpy(&bytes, from + 16 + 2 * t, 2);
    const int rows = from[48 + t];
    if (t >= kTiles && (bytes != 0 || rows != 0)) return false;
    if (bytes > kBytes || rows > kRows || (bytes == 0) != (rows == 0)) return false;
    if (t < kTiles) s.bytes[t] = bytes, s.rows[t] = rows;
  }
  s.configured = true;
  std::memcpy(s.raw_config, from, 64);
  std::memset(s.tile, 0, sizeof s.tile);
  return true;
}

/// In f32, one by one, like the instruction: both halves of the pairs are summed separately, subnormal numbers are zero.
void multiply_pairs(const Tile& a, const Tile& b, Tile& c, int rows, int pairs, int cols) {
  const auto f32 = [](const uint8_t* bf16) {
    uint16_t bits;
    std::memcpy(&bits, bf16, 2);
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  };
  float wide[kRows][2 * kRows];
  for (int k = 0; k < pairs; ++k)
    for (int n = 0; n < 2 * cols; ++n) wide[k][n] = f32(b.row[k] + 2 * n);
  for (int m = 0; m < rows; ++m) {
    float sum[2 * kRows] = {};
    for (int k = 0; k < pairs; ++k) {
      const float x[2] = {f32(a.row[m] + 4 * k), f32(a.row[m] + 4 * k + 2)};
      for (int n = 0; n < 2 * kRows; ++n) sum[n] = std::fma(x[n & 1], n < 2 * cols ? wide[k][n] : 0, sum[n]);
    }
    for (int n = 0; n < cols; ++n) {
      float old;
      std::memcpy(&old, c.row[m] + 4 * n, 4);
      const float next = old + (sum[2 * n] + sum[2 * n + 1]);
      std::memcpy(c.row[m] + 4 * n, &next, 4);
    }
  }
}

/// Emulates the instruction; false where a machine with tiles would refuse it, too.
bool execute(const Instruction& i) {
  State& s = state;
  const auto configured = [&](int t) { return s.configured && t < kTiles && s.rows[t] > 0; };
  enum { kNone = 0, k66 = 1, kF3 = 2, kF2 = 3 };
  switch (i.opcode) {
    case 0x49:
      if (i.mod != 3) {
        auto* memory = reinterpret_cast<uint8_t*>(i.address);
        if (i.reg != 0 || i.vvvv != 0) return false;
        if (i.prefix == kNone) return load_config(memory);
        if (i.prefix != k66) return false;
        if (s.configured) std::memcpy(memory, s.raw_config, 64);
        else std::memset(memory, 0, 64);
        return true;
      }
      if (i.prefix == kNone && i.reg == 0 && i.rm == 0) {  // TILERELEASE
        s.configured = false;
        return true;
      }
      if (i.prefix != kF2 || i.rm != 0 || !configured(i.reg)) return false;  // TILEZERO
      std::memset(&s.tile[i.reg], 0, sizeof(Tile));
      return true;
    case 0x4B: {
      if (i.mod == 3 || i.rm != 4 || i.prefix == kNone || !configured(i.reg)) return false;
      Tile& t = s.tile[i.reg];
      const auto bytes = static_cast<size_t>(s.bytes[i.reg]);
      if (i.prefix != kF3) std::memset(&t, 0, sizeof t);
      for (int r = 0; r < s.rows[i.reg]; ++r) {
        auto* memory = reinterpret_cast<uint8_t*>(i.address) + r * i.stride;
        if (i.prefix == kF3) std::memcpy(memory, t.row[r], bytes);
        else std::memcpy(t.row[r], memory, bytes);
      }
      return true;
    }
    case 0x5C: {  // TDPBF16PS
      const int c = i.reg, a = i.rm, b = i.vvvv;
      if (i.mod != 3 || i.prefix != kF3 || a == b || a == c || b == c) return false;
      if (!configured(a) || !configured(b) || !configured(c)) return false;
      if (s.rows[c] != s.rows[a] || s.bytes[c] != s.bytes[b] || s.bytes[a] != 4 * s.rows[b] || s.bytes[c] % 4 != 0)
        return false;
      multiply_pairs(s.tile[a], s.tile[b], s.tile[c], s.rows[a], s.rows[b], s.bytes[c] / 4);
      return true;
    }
    default:
      return false;
  }
}

void on_illegal_instruction(int, siginfo_t*, void* context) {
  auto* u = static_cast<ucontext_t*>(context);
  _mm_setcsr(0x9FC0);  // rounds to nearest, flushes subnormal numbers; returning from the handler restores the thread's own setting
  Instruction i;
  if (decode(u, i) && execute(i)) {
    executed.fetch_add(1, std::memory_order_relaxed);
    u->uc_mcontext.gregs[REG_RIP] += i.length;
    return;
  }
  constexpr char kRefused[] = "emulated tiles: an instruction that no machine would take in this state\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kRefused, sizeof kRefused - 1);
  std::signal(SIGILL, SIG_DFL);  // and again
}

}  // namespace

int64_t emulated_tile_instructions() { return executed.load(std::memory_order_relaxed); }

}  // namespace sheaf::testing

bool sheaf::kernels::cpu::amx::emulated() {
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = sheaf::testing::on_illegal_instruction;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGILL, &action, nullptr) == 0;
  }();
  return installed;
}
