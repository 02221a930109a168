// Shared by the tests of the gated delta rule on all devices: operands, results, and their properties.
#pragma once

#include <gtest/gtest.h>

#include "sheaf/kernels/delta_rule.h"
#include "sheaf/tests/kernels/delta_rule_reference.h"

namespace sheaf::testing::delta_rule {

struct Sizes {
  int64_t batch, tokens, key_heads, heads, width, of_values;
  Shape q() const { return {batch, tokens, key_heads, width}; }
  Shape v() const { return {batch, tokens, heads, of_values}; }
  Shape gates() const { return {batch, tokens, heads}; }
  Shape states() const { return {batch, heads, width, of_values}; }
};

struct Operands {
  Array q, k, v, decay, beta, dout;
  Array initial = {}, dstate = {}, begins = {};  // optional
  kernels::DeltaRuleOptions options;

  DType dtype() const { return q.view().dtype; }
  std::string to_string() const {
    return str(dtype(), q.view().shape, v.view().shape, " eps ", options.norm_eps, initial.bytes() ? " initial" : "",
               begins.bytes() ? " documents" : "");
  }
};

/// Strides are those of q and k, and of v and the result; keys have length 1, or about that if they are normalised.
inline Operands random(DType d, const Sizes& s, double norm_eps = 1e-6, Shape of_q = {}, Shape of_v = {}, Shape of_gates = {}) {
  const DType exact = statistics_of(d);
  const double length = norm_eps ? 1.5 : 1 / std::sqrt(static_cast<double>(s.width));
  Operands o{.q = Array::random(d, s.q(), 1, length, of_q),
             .k = Array::random(d, s.q(), 2, length, of_q),
             .v = Array::random(d, s.v(), 3, 1, of_v),
             .decay = Array::random(exact, s.gates(), 4, 0.2, of_gates),
             .beta = Array::random(exact, s.gates(), 5, 1, of_gates),
             .dout = Array::random(d, s.v(), 6, 1, of_v),
             .options = {.scale = 0.7, .norm_eps = norm_eps}};
  for (int64_t i = 0; i < o.decay.view().numel(); ++i)
    o.decay.set(i, -std::abs(o.decay.at(i))), o.beta.set(i, 1 / (1 + std::exp(-o.beta.at(i))));
  return o;
}
inline Operands with_states(Operands o) {
  const Sizes s{o.q.view().shape[0], 0, 0, o.v.view().shape[2], o.q.view().shape[3], o.v.view().shape[3]};
  o.initial = Array::random(statistics_of(o.dtype()), s.states(), 7), o.dstate = Array::random(statistics_of(o.dtype()), s.states(), 8);
  return o;
}
/// Documents of these lengths, in each sequence.
inline Operands with_documents(Operands o, const std::vector<int64_t>& lengths) {
  const int64_t B = o.q.view().shape[0], T = o.q.view().shape[1];
  o.begins = Array(kI32, {B, T});
  for (int64_t b = 0; b < B; ++b) {
    int64_t begin = 0, t = 0;
    for (const int64_t length : lengths) {
      for (; t < begin + length; ++t) o.begins.set(b * T + t, static_cast<double>(begin));
      begin = t;
    }
    EXPECT_EQ(t, T);
  }
  return o;
}

struct Results {
  Array out, state, dq, dk, dv, ddecay, dbeta, dinitial;
};

template <class F>
void each(const Results& a, const Results& b, F f) {
  f("out", a.out, b.out), f("state", a.state, b.state), f("dq", a.dq, b.dq), f("dk", a.dk, b.dk), f("dv", a.dv, b.dv);
  f("ddecay", a.ddecay, b.ddecay), f("dbeta", a.dbeta, b.dbeta), f("dinitial", a.dinitial, b.dinitial);
}

/// All of them, by the kernels of one device.
using Compute = Results (*)(const Operands&);

inline Results in_reference(const Operands& o) {
  const auto wide = [](const Array& x) { return x.bytes() ? in_f64(x) : Array(); };
  const DeltaRuleReference reference{wide(o.q),       wide(o.k), wide(o.v),       wide(o.decay),     wide(o.beta),
                                     wide(o.initial), o.begins,  o.options.scale, o.options.norm_eps};
  const auto r = reference.forward();
  const auto d = reference.backward(wide(o.dout), wide(o.dstate));
  return {r.out, r.state, d.q, d.k, d.v, d.decay, d.beta, d.initial};
}

/// `narrow`: with 16-bit operands the factors of products have 16 bits, too.
inline void compare(Compute compute, bool narrow, const Operands& o, double slack = 1) {
  each(compute(o), in_reference(o), [&](const char* what, const Array& got, const Array& want) {
    const DType d = got.view().dtype;
    const double bound = d == kF64 ? 1e-13 : d != kF32 ? epsilon(d) : o.dtype() == kF32 || !narrow ? 2e-6 : 1e-4;
    EXPECT_LT(scaled_error(got, values(want)), slack * bound) << what << " of " << o.to_string();
  });
}

// Full and partial chunks, full and partial tiles, one and several columns of tiles.
inline const Sizes kSizes[] = {{2, 5, 1, 1, 3, 7}, {1, 1, 2, 2, 8, 8}, {1, 64, 1, 2, 16, 24}, {2, 65, 2, 4, 20, 12},
                        {1, 130, 1, 2, 64, 65}, {1, 70, 1, 1, 72, 20}};

/// Tokens [first, first + count) of x [B, T, ..].
inline Array part(const Array& x, int64_t first, int64_t count) {
  Shape shape = x.view().shape;
  const int64_t all = shape[1], row = shape.numel() / (shape[0] * all);
  shape[1] = count;
  Array out(x.view().dtype, shape);
  out.fill([&](int64_t i) { return x.at((i / (count * row) * all + first) * row + i % (count * row)); });
  return out;
}
inline Operands part(Operands o, int64_t first, int64_t count) {
  for (Array* x : {&o.q, &o.k, &o.v, &o.decay, &o.beta, &o.dout}) *x = part(*x, first, count);
  o.begins = Array();
  return o;
}

inline void expect_packed_documents_are_those_alone(Compute compute) {
  const std::vector<int64_t> lengths{70, 5, 129};
  for (DType d : {kF32, kBF16}) {
    const Operands o = with_documents(random(d, {1, 204, 1, 2, 20, 12}), lengths);
    const Results packed = compute(o);
    int64_t first = 0;
    for (const int64_t length : lengths) {
      const Results alone = compute(part(o, first, length));
      EXPECT_TRUE(same_bits(part(packed.out, first, length), alone.out)) << first;
      EXPECT_TRUE(same_bits(part(packed.dq, first, length), alone.dq)) << first;
      EXPECT_TRUE(same_bits(part(packed.dk, first, length), alone.dk)) << first;
      EXPECT_TRUE(same_bits(part(packed.dv, first, length), alone.dv)) << first;
      EXPECT_TRUE(same_bits(part(packed.ddecay, first, length), alone.ddecay)) << first;
      EXPECT_TRUE(same_bits(part(packed.dbeta, first, length), alone.dbeta)) << first;
      first += length;
      if (first == 204) {
        EXPECT_TRUE(same_bits(packed.state, alone.state));
      }
    }
  }
}

inline void expect_the_first_document_may_have_begun_earlier(Compute compute) {
  const Operands o = with_documents(with_states(random(kF32, {1, 70, 1, 1, 8, 8})), {66, 4});
  Operands earlier = o;
  earlier.begins = o.begins.clone();
  for (int64_t t = 0; t < 66; ++t) earlier.begins.set(t, -37);
  each(compute(earlier), compute(o), [&](const char* what, const Array& a, const Array& b) { EXPECT_TRUE(same_bits(a, b)) << what; });
}

/// Forward from the previous part's last state, backward from the gradient of the next part's first state.
inline void expect_parts_are_the_whole(Compute compute) {
  for (DType d : {kF32, kBF16}) {
    const Operands o = with_states(random(d, {1, 150, 1, 2, 20, 12}));
    const Results whole = compute(o);
    Operands low = part(o, 0, 128), high = part(o, 128, 22);
    high.initial = compute(low).state;
    const Results of_high = compute(high);
    low.dstate = of_high.dinitial;
    const Results of_low = compute(low);
    EXPECT_TRUE(same_bits(of_high.state, whole.state)) << name(d);
    EXPECT_TRUE(same_bits(of_low.dinitial, whole.dinitial)) << name(d);
    for (const auto& [got, want] : {std::pair(of_low.out, part(whole.out, 0, 128)), {of_high.out, part(whole.out, 128, 22)},
                                    {of_low.dq, part(whole.dq, 0, 128)}, {of_high.dk, part(whole.dk, 128, 22)},
                                    {of_low.dv, part(whole.dv, 0, 128)}, {of_high.dbeta, part(whole.dbeta, 128, 22)},
                                    {of_low.ddecay, part(whole.ddecay, 0, 128)}})
      EXPECT_TRUE(same_bits(got, want)) << name(d);
  }
}

inline void expect_runs_and_strides_change_nothing(Compute compute) {
  const Sizes s{2, 70, 1, 2, 24, 16};
  for (DType d : {kF64, kBF16}) {
    const Operands dense = with_documents(with_states(random(d, s)), {30, 40});
    const Results want = compute(dense), again = compute(dense);
    each(again, want, [&](const char* what, const Array& a, const Array& b) { EXPECT_TRUE(same_bits(a, b)) << what << name(d); });
    for (int64_t gap : {8, 3}) {  // packs aligned to 16 bytes, and not
      Operands o = random(d, s, 1e-6, {80 * (s.width * 2 + gap), s.width * 2 + gap, s.width, 1}, {75 * (64 + gap), 64 + gap, 16, 1},
                          {1000, 9, 2});
      o.begins = dense.begins, o.initial = dense.initial, o.dstate = dense.dstate;
      const Results got = compute(o);
      each(got, want, [&](const char* what, const Array& a, const Array& b) {
        EXPECT_TRUE(same_bits(a, b)) << what << name(d);
        EXPECT_TRUE(gaps_kept(like(a), a)) << what << name(d);
      });
    }
  }
}

inline void expect_decays_that_cut_the_state_off(Compute compute) {
  for (DType d : {kF64, kF32}) {
    Operands o = with_states(random(d, {1, 140, 1, 1, 12, 8}));
    for (const int64_t t : {0, 3, 64, 65, 100}) o.decay.set(t, -INFINITY);
    o.decay.set(20, -1e30), o.decay.set(80, -1000), o.decay.set(90, -60), o.decay.set(139, -INFINITY);
    compare(compute, false, o, 4);
    EXPECT_EQ(compute(o).ddecay.at(64), 0);
  }
}

inline void expect_states_of_no_tokens(Compute compute) {
  const Operands o = with_states(random(kF32, {2, 0, 1, 2, 8, 12}));
  const Results got = compute(o);
  EXPECT_TRUE(same_bits(got.state, o.initial) && same_bits(got.dinitial, o.dstate));
  compute(random(kBF16, {0, 70, 1, 2, 8, 12}));
}

}  // namespace sheaf::testing::delta_rule
