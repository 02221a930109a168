// The clock, on handmade tapes with given times.
#include "sheaf/autograd/clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sheaf/autograd/op.h"
#include "sheaf/core/json.h"

namespace sheaf::testing {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Computes {
  static constexpr const char* kName = "computes";
  using Attrs = NoAttrs;
};
struct Travels {
  static constexpr const char* kName = "travels";
  static constexpr Lane kLane = Lane::gather;
  using Attrs = NoAttrs;
};

// A tape of nodes with one output each, and the nodes' times.
class Steps {
 public:
  ValueId computes(double seconds, std::vector<ValueId> inputs = {}) {
    return add(op_def<Computes>(), std::move(inputs), {.computes = seconds});
  }
  ValueId travels(double seconds, std::vector<ValueId> inputs, const std::string& lane = "lane", uint32_t links = 0) {
    return add(op_def<Travels>(), std::move(inputs), {.travels = seconds, .lane = lane_of(lane), .links = links});
  }
  ValueId elsewhere(std::vector<ValueId> inputs) { return add(op_def<Computes>(), std::move(inputs), {.computes = 1, .runs = false}); }
  ValueId view(ValueId of) {
    const ValueId v = add(op_def<Computes>(), {of}, {});
    tape_.mutable_value(v).view_of = of;
    return v;
  }
  RankTimes times(double issue_seconds = 0) {
    times_.tape = &tape_;
    times_.issue_seconds = issue_seconds;
    return times_;
  }

 private:
  ValueId add(const OpDef& op, std::vector<ValueId> inputs, NodeTime time) {
    const Type type;
    const Type* const outputs[] = {&type};
    const NodeId id = tape_.add_node(op, nullptr, inputs, outputs, "m", Phase::forward);
    times_.nodes.push_back(time);
    return tape_.output(tape_.node(id));
  }
  int32_t lane_of(const std::string& name) {
    const auto found = std::ranges::find(times_.lanes, name);
    if (found == times_.lanes.end()) return times_.lanes.push_back(name), static_cast<int32_t>(times_.lanes.size() - 1);
    return static_cast<int32_t>(found - times_.lanes.begin());
  }
  Tape tape_;
  RankTimes times_;
};

Timeline alone(Steps& steps, double issue_seconds = 0) {
  const RankTimes times[] = {steps.times(issue_seconds)};
  return clock(times)[0];
}

TEST(Clock, WhatTravelsIsHiddenBehindWhatComputes) {
  Steps s;
  const ValueId a = s.computes(2), t = s.travels(3, {a});
  s.computes(4, {a});
  s.computes(1, {t});
  const Timeline line = alone(s);
  EXPECT_THAT(line.start, ElementsAre(0, 2, 2, 6));
  EXPECT_THAT(line.end, ElementsAre(2, 5, 6, 7));
  EXPECT_EQ(line.seconds, 7);
  EXPECT_EQ(line.computing, 7);
  EXPECT_TRUE(line.waits.empty());
}

TEST(Clock, WhoeverReadsWaits) {
  Steps s;
  const ValueId a = s.computes(2), t = s.travels(3, {a});
  s.computes(1, {a});
  s.computes(1, {s.view(t)});
  const Timeline line = alone(s);
  EXPECT_EQ(line.seconds, 6);
  EXPECT_EQ(line.computing, 4);
  ASSERT_EQ(line.waits.size(), 1u);
  EXPECT_EQ(line.waits[0].of, 1);
  EXPECT_EQ(line.waits[0].seconds, 2);
}

TEST(Clock, AStepLastsUntilItsLanesAreDone) {
  Steps s;
  s.travels(5, {s.computes(1)});
  EXPECT_EQ(alone(s).seconds, 6);
}

TEST(Clock, LanesAreInOrderAndLinksCarryOneAtATime) {
  const auto seconds = [](const char* second_lane, uint32_t first_links, uint32_t second_links) {
    Steps s;
    const ValueId a = s.computes(1);
    s.travels(3, {a}, "first", first_links);
    s.travels(4, {a}, second_lane, second_links);
    return alone(s).seconds;
  };
  EXPECT_EQ(seconds("first", 0, 0), 8);
  EXPECT_EQ(seconds("second", 0, 0), 5);
  EXPECT_EQ(seconds("second", 1, 2), 5);
  EXPECT_EQ(seconds("second", 3, 2), 8);
}

TEST(Clock, TheHostIssuesNodesOneAfterAnother) {
  Steps s;
  for (int i = 0; i < 3; ++i) s.computes(1);
  s.elsewhere({});
  EXPECT_THAT(alone(s, 2).start, ElementsAre(2, 4, 6, 7));
  EXPECT_THAT(alone(s, 0.5).start, ElementsAre(0.5, 1.5, 2.5, 3.5));
}

TEST(Clock, RanksMeetWhenTheLastOneComes) {
  Steps first, second;
  const ValueId t = first.travels(3, {first.computes(1)}, "both");
  first.computes(2, {t});
  const ValueId u = second.travels(3, {second.computes(5)}, "both");
  second.computes(1, {u});
  const RankTimes times[] = {first.times(), second.times()};
  const auto lines = clock(times);
  EXPECT_EQ(lines[0].seconds, 10);
  EXPECT_EQ(lines[1].seconds, 9);
  EXPECT_EQ(lines[0].waits[0].seconds, 7);
  EXPECT_EQ(lines[1].waits[0].seconds, 3);
}

// Neither rank waits for its own collective: the first rank issues its second call before the second rank reaches its second one.
TEST(Clock, CallsOfALaneMeetInTheirOrder) {
  Steps first, second;
  const ValueId a = first.travels(1, {}, "there");
  const ValueId b = first.travels(1, {}, "there");
  const ValueId c = first.travels(1, {first.computes(1)}, "back");
  first.computes(1, {a, b, c});
  const ValueId d = second.travels(1, {second.computes(4)}, "back");
  const ValueId e = second.travels(1, {}, "there"), f = second.travels(1, {}, "there");
  second.computes(1, {d, e, f});
  const RankTimes times[] = {first.times(), second.times()};
  for (const Timeline& line : clock(times)) EXPECT_EQ(line.seconds, 7);  // 4, two calls, what reads them
}

TEST(Clock, WhoWaitsForARankKeepsNobodyFromTheLink) {
  Steps first, second;
  first.travels(1, {}, "both", 1);
  first.travels(2, {first.computes(1)}, "own", 1);
  second.travels(1, {second.computes(10)}, "both", 1);
  const RankTimes times[] = {first.times(), second.times()};
  EXPECT_THAT(clock(times)[0].end, ElementsAre(11, 1, 3));
}

TEST(Clock, WhatIsElsewhereWaitsForNothing) {
  Steps s;
  const ValueId t = s.travels(9, {}, "lane");
  s.elsewhere({t});
  s.computes(1);
  const Timeline line = alone(s);
  EXPECT_EQ(line.end[2], 1);
  EXPECT_TRUE(line.waits.empty());
}

// A prefetch: each iteration reads what the previous one issued.
TEST(Clock, StretchesRunAsOftenAsTheyAreListed) {
  const auto of_turns = [](Steps& s, int turns) {
    ValueId ahead = s.travels(3, {s.computes(1)}, "gathers");
    for (int i = 0; i < turns; ++i) {
      const ValueId next = s.travels(4, {}, "gathers");
      const ValueId sum = s.computes(1, {ahead});
      s.travels(2, {sum}, "reduces");
      ahead = next;
    }
    s.computes(5, {ahead});
  };
  Steps five, three;
  of_turns(five, 5), of_turns(three, 3);
  const RankTimes all[] = {five.times()};
  RankTimes times = three.times();
  times.order = {{0, 5}, {5, 8}, {5, 8}, {5, 8}, {8, 12}};  // the middle iteration three times
  const RankTimes repeated[] = {times};
  const Timeline whole = clock(all)[0], line = clock(repeated)[0];
  EXPECT_EQ(whole.seconds, 29);  // 1, 3, five times 4, and what reads
  EXPECT_EQ(line.seconds, whole.seconds);
  EXPECT_EQ(line.computing, whole.computing);
  ASSERT_EQ(line.waits.size(), whole.waits.size());
  for (size_t i = 0; i < line.waits.size(); ++i) EXPECT_EQ(line.waits[i].seconds, whole.waits[i].seconds);
}

TEST(Clock, RanksThatWaitForEachOtherAreNamed) {
  Steps first, second;
  first.computes(1, {first.travels(1, {}, "a")});
  first.travels(1, {}, "b");
  second.computes(1, {second.travels(1, {}, "b")});
  second.travels(1, {}, "a");
  const RankTimes times[] = {first.times(), second.times()};
  try {
    clock(times);
    FAIL() << "ends";
  } catch (const CommError& e) {
    EXPECT_THAT(e.what(), HasSubstr("rank 0 in computes (m, node 1); rank 1 in computes (m, node 1)"));
  }
}

TEST(Clock, ATraceHasEveryNodeThatTakesTime) {
  Steps s;
  const ValueId a = s.computes(2e-6);
  s.travels(3e-6, {s.view(a)}, "a \"lane\"");
  const RankTimes times[] = {s.times()};
  const auto lines = clock(times);
  const std::string names[] = {"rank 7"};
  const Json trace = Json::parse(to_trace(times, lines, names), "trace");
  std::vector<std::string> seen;
  for (const Json& e : trace.at("traceEvents").as_array()) {
    if (e.at("ph").as_string() == "M") {
      seen.push_back(e.at("args").at("name").as_string());
      continue;
    }
    seen.push_back(str(e.at("name").as_string(), " in row ", e.at("tid").as_int(), " of ", e.at("pid").as_int()));
    EXPECT_THAT(e.at("dur").as_double(), DoubleEq(e.at("tid").as_int() == 0 ? 2 : 3));
    EXPECT_THAT(e.at("ts").as_double(), DoubleEq(e.at("tid").as_int() == 0 ? 0 : 2));
  }
  EXPECT_THAT(seen, ElementsAre("rank 7", "compute", "a \"lane\"", "computes in row 0 of 0", "travels in row 1 of 0"));
}

}  // namespace
}  // namespace sheaf::testing
