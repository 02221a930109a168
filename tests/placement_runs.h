// Assignments of placements to an op's inputs, run on local ranks and compared with the unsharded run: shared by the placement checks.
// Inputs are cut and results assembled by hand, not by redistribute.
#pragma once

#include <string>
#include <vector>

#include "sheaf/core/mesh.h"
#include "sheaf/tests/op_samples.h"

namespace sheaf::testing {

/// A token per input: R, P, I, S<dim>, S<dim>|<size>,<size>../<units> (parts), F (flat), or - for a tensor without a mesh.
using Tokens = std::vector<std::string>;

/// All combinations of R, P, S(d), flat and the parts that the sample names, and those that it demands; all Invariant; and one mixture with
/// Invariant, which must be refused.
std::vector<Tokens> enumerate(const OpSample& sample);

/// How S<dim> cuts: in even shares, so unevenly that some ranks have much and some nothing, as several parts, or in intervals with an owner
/// each.
enum class Cuts : uint8_t { even, uneven, parts, owned };

struct PlacementRun {
  std::vector<MeshSpec::Axis> axes;
  /// Per axis. A further cut of blocks of different sizes is an even one.
  std::vector<Cuts> cuts;
  /// Each with a token per input and axis.
  std::vector<std::vector<Tokens>> assignments;
};

struct PlacementResult {
  std::string finding;  ///< "", or what is wrong
  struct Outcome {
    bool accepted = false;
    std::string refusal;
    std::vector<Type> outputs;
  };
  std::vector<Outcome> outcomes;  ///< per assignment
};

/// Runs all assignments: each is either refused, by an error that names op, axis and accepted rules, or has the outputs, gradients and
/// second derivatives of the unsharded run, without communication, on a tape that passes the checks T and D.
PlacementResult run_assignments(const OpSample& sample, const PlacementRun& run);

/// The map of a token S<dim>|<size>,<size>../<units> (one size: an even cut in <units> units), and whether a token is one.
OwnershipMap parts_of(const std::string& token);
inline bool is_parts(const std::string& token) { return token.find('|') != token.npos; }

/// A check's result: its finding, prefixed with the names of sample and check.
std::string placement_finding(const OpSample& sample, const char* check, const std::string& text);

}  // namespace sheaf::testing
