// Program: a tape prepared to run repeatedly, backward and optimizer included. What an eager step determines anew each time is fixed
// once: which op reads and writes which bytes. Every value has its place in one arena, so that a run allocates nothing, and its
// memory is known in advance.
//
//   Program program(tape, [&](ValueId v) { return memory of leaf v; }, wanted);
//   for (...) { write the inputs' memory; const auto values = program.run(); }
//
// compile() (compile.h) makes one from a step's code.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "sheaf/autograd/tape.h"
#include "sheaf/core/tensor.h"

namespace sheaf {

/// Belongs to the thread of its rank. All ranks of a mesh run it together: its collectives are those of the tape.
class Program {
 public:
  /// `leaf(v)` gives the memory that leaf v has in every run, of the leaf's type: runs read it, and write what the step updates.
  /// `wanted`: values that run() returns. Throws LifetimeError for a leaf without memory, PlacementError for one of another type.
  Program(Tape tape, const std::function<Tensor(ValueId)>& leaf, std::span<const ValueId> wanted);
  ~Program();
  Program(Program&&) noexcept;
  Program& operator=(Program&&) noexcept;

  /// One step. Returns copies of the wanted values. Bitwise equal to the recording, on every rank when all ranks run.
  std::vector<Tensor> run();

  const Tape& tape() const { return tape_; }
  /// A program for another tape, such as this one's after a pass (tape_editor.h), with the same leaves and wanted values, followed by
  /// `also`. Throws LifetimeError for the first finding of check_tape().
  Program with_tape(Tape tape, std::span<const ValueId> also = {}) const;
  /// Ids of what run() returns.
  std::span<const ValueId> wanted() const { return wanted_ids_; }
  /// Memory of the leaf, as it was given.
  const Tensor& leaf(ValueId v) const;
  /// By leaf, the first one with memory of the same storage, perhaps itself.
  std::map<ValueId, ValueId> leaves_of_same_memory() const;
  /// Bytes of the arena: what a run takes in addition to the leaves; on a GPU without offloaded values, which are in host memory.
  int64_t arena_bytes() const { return arena_bytes_; }
  /// A lower bound for any arrangement of the same values: the most bytes alive at once.
  int64_t least_bytes() const { return least_bytes_; }
  /// Bytes of the arena alive at each node of the tape.
  std::vector<int64_t> alive_bytes() const;
  /// Frees the arena's memory until the next run,
  void release();
  /// and allocates it again.
  void reserve();

 private:
  struct Instruction;
  struct Block;
  static void execute(const Instruction& i);
  struct Builder;

  void arrange_blocks();
  void note_holders(MemoryLog& log) const;

  Tape tape_;
  std::shared_ptr<Storage> host_arena_;  // of values that a GPU has offloaded; else null
  std::shared_ptr<Storage> arena_;       // declared before what is placed in it: lanes must finish before the memory is freed. Null while
                                    // released
  std::vector<Block> blocks_;
  std::vector<Instruction> instructions_;
  std::vector<std::pair<ValueId, Tensor>> leaves_;
  std::vector<ValueId> wanted_ids_;
  std::vector<Tensor> wanted_;
  int64_t arena_bytes_ = 0, host_bytes_ = 0, least_bytes_ = 0;
  bool wire_ = false;  // other ranks read parts of it directly, and so may read all of it
};

/// The value that owns the memory of v, or the leaf that stands for it in `same` (Program::leaves_of_same_memory).
ValueId memory_of(const Tape& tape, const std::map<ValueId, ValueId>& same, ValueId v);

}  // namespace sheaf
