// attention: causal attention on queries, keys and values packed as the projection writes them, against the machine's arithmetic: a
// CPU's f32 multiply-adds, a GPU's square product of the same dtype. Then sequences of documents against one document of as many
// tokens, windows against all keys, narrow values against padded ones, softcaps against none, and on GPUs our own kernels against
// cuDNN's.
#include "sheaf/tools/bench/attention_call.h"
#include "sheaf/tools/bench/suites.h"

namespace sheaf::bench {
namespace {

void measure(Session& session, DType dtype, const AttentionSize& full) {
  for (bool backward : {false, true}) {
    const std::string group = full.g == full.h ? "" : str("-G", full.g);
    const std::string name = str(backward ? "backward-" : "forward-", dtype, "-B", full.b, "-T",
                                 full.t, "-H", full.h, group, "-D", full.d);
    if (!session.wants("attention", name)) continue;
    AttentionSize s = full;
    // A quick run takes a quarter of the tokens, and on a GPU, which may be emulated, small sizes throughout.
    if (session.options().quick) s.t /= 4;
    if (session.options().quick && session.on_gpu()) s = {1, 16, 2 * s.h / s.g, 2, s.d};
    const Stream stream = session.stream();
    std::unique_ptr<const AttentionCall> call;
    Comparison c{.name = name, .unit = session.flops_unit()};
    c.amount = AttentionCall::flops(s, backward);
    c.arithmetic = dtype;
    c.prepare = [&] {
      call = std::make_unique<const AttentionCall>(dtype, s, session.device());
      call->forward(stream);
    };
    c.run = [&] { backward ? call->backward(stream) : call->forward(stream); };
    session.compare_with_peak("attention", c);
  }
}

// One call against another, both created when the line is measured.
template <class Make, class MakePeer>
void compare_calls(Session& session, const std::string& name, const char* peer_name, bool backward, Make make, MakePeer make_peer) {
  const Stream stream = session.stream();
  std::unique_ptr<const AttentionCall> call, peer;
  Comparison c{.name = name, .unit = Unit::seconds};
  c.peer = peer_name;
  c.prepare = [&] {
    call = make(), peer = make_peer();
    for (const auto* each : {&call, &peer}) (*each)->forward(stream);
  };
  c.run = [&] { backward ? call->backward(stream) : call->forward(stream); };
  c.peer_run = [&] { backward ? peer->backward(stream) : peer->forward(stream); };
  session.compare("attention", c);
}

// A mask in addition to causality: documents of this many tokens, or a window of this many keys.
struct Hidden {
  const char *name, *size, *peer;
  int64_t document, window;
};
// Document boundaries do not coincide with the kernels' block boundaries.
Hidden documents(int64_t tokens) { return {"documents-", "-of-", "one document", tokens, 0}; }
Hidden window(int64_t keys) { return {"window-", "-W", "all keys", 0, keys}; }

void measure_hidden(Session& session, DType dtype, const AttentionSize& full, const Hidden& whole) {
  for (bool backward : {false, true}) {
    Hidden hidden = whole;
    int64_t& size = hidden.window ? hidden.window : hidden.document;
    const std::string name = str(hidden.name, backward ? "backward-" : "forward-", dtype, "-B", full.b, "-T", full.t, "-H", full.h,
                                 "-D", full.d, hidden.size, size);
    if (!session.wants("attention", name)) continue;
    AttentionSize s = full;
    if (session.options().quick) s.t = 2 * size, s.h = s.g = 2;
    if (session.options().quick && session.on_gpu()) s.t = 32, size = 13;
    compare_calls(
        session, name, hidden.peer, backward,
        [&] { return std::make_unique<const AttentionCall>(dtype, s, session.device(), hidden.document, hidden.window); },
        [&] { return std::make_unique<const AttentionCall>(dtype, s, session.device()); });
  }
}

/// A shape run by our own kernels, with or without a softcap, against another implementation.
struct OurOwn {
  const char *name, *peer;
  double softcap;
  bool peer_is_ours;  ///< else the one chosen by default
  int64_t quick_tokens;
};

void measure_ours(Session& session, DType dtype, const AttentionSize& full, const OurOwn& ours) {
  for (bool backward : {false, true}) {
    const std::string name =
        str(ours.name, backward ? "backward-" : "forward-", dtype, "-B", full.b, "-T", full.t, "-H", full.h, "-G", full.g, "-D", full.d);
    if (!session.wants("attention", name)) continue;
    AttentionSize s = full;
    if (session.options().quick) s.b = 1, s.t = ours.quick_tokens, s.h = s.g = 2;
    compare_calls(
        session, name, ours.peer, backward,
        [&] { return std::make_unique<const AttentionCall>(dtype, s, session.device(), 0, 0, /*ours=*/true, ours.softcap); },
        [&] { return std::make_unique<const AttentionCall>(dtype, s, session.device(), 0, 0, ours.peer_is_ours); });
  }
}

// Values narrower than keys, as in latent attention, against values padded to the key width.
void measure_narrow_values(Session& session, DType dtype, const AttentionSize& full) {
  for (bool backward : {false, true}) {
    const std::string name = str("narrow-values-", backward ? "backward-" : "forward-", dtype, "-B", full.b, "-T", full.t, "-H", full.h,
                                 "-D", full.d, "-E", full.e);
    if (!session.wants("attention", name)) continue;
    AttentionSize narrow = full;
    if (session.options().quick) narrow.t /= 4, narrow.h = narrow.g = 2;
    if (session.options().quick && session.on_gpu()) narrow.t = 32;
    AttentionSize padded = narrow;
    padded.e = padded.d;
    compare_calls(
        session, name, "padded values", backward,
        [&] { return std::make_unique<const AttentionCall>(dtype, narrow, session.device()); },
        [&] { return std::make_unique<const AttentionCall>(dtype, padded, session.device()); });
  }
}

}  // namespace

void attention_suite(Session& session) {
  const OurOwn cudnn_too{"our-own-", "as chosen", 0, /*peer_is_ours=*/false, 64};
  const OurOwn softcap{"softcap-", "no softcap", 50, /*peer_is_ours=*/true, session.on_gpu() ? 32 : 256};  // as Gemma 2's scores
  if (!session.on_gpu()) {
    for (DType dtype : {kF32, kBF16})
      for (const int64_t tokens : {500, 100}) measure_hidden(session, dtype, {1, 1024, 12, 12, 64}, documents(tokens));
    for (DType dtype : {kF32, kBF16})
      for (const int64_t tokens : {1024, 4096})
        for (const int64_t keys : {128, 256}) measure_hidden(session, dtype, {1, tokens, 12, 12, 64}, window(keys));
    for (DType dtype : {kF32, kBF16}) measure_narrow_values(session, dtype, {1, 1024, 8, 8, 192, 128});
    for (DType dtype : {kF32, kBF16}) measure_ours(session, dtype, {1, 1024, 8, 4, 128}, softcap);
    for (DType dtype : {kF32, kBF16})
      for (const AttentionSize& s :
           {AttentionSize{4, 64, 12, 12, 64}, {1, 1024, 12, 12, 64}, {16, 256, 6, 6, 64}})
        measure(session, dtype, s);
    return;
  }
  // GPT-2 124M and 1.5B, Llama 3 8B with half of its context and all of it.
  for (DType dtype : {kBF16, kF16})
    for (const AttentionSize& s : {AttentionSize{16, 1024, 12, 12, 64},
                                   {16, 1024, 25, 25, 64},
                                   {2, 4096, 32, 8, 128},
                                   {1, 8192, 32, 8, 128}})
      measure(session, dtype, s);
  measure(session, kF32, {16, 1024, 12, 12, 64});
  // Gemma's head size, which cuDNN refuses, then sizes that it supports.
  measure(session, kBF16, {2, 4096, 8, 4, 256});
  for (const AttentionSize& s : {AttentionSize{16, 1024, 12, 12, 64}, {2, 4096, 32, 8, 128}}) measure_ours(session, kBF16, s, cudnn_too);
  for (const int64_t tokens : {1000, 250}) measure_hidden(session, kBF16, {2, 4096, 12, 12, 64}, documents(tokens));
  measure_narrow_values(session, kBF16, {1, 4096, 32, 32, 192, 128});
  measure_ours(session, kBF16, {2, 4096, 8, 4, 256}, softcap);
  for (const int64_t keys : {256, 1024}) measure_hidden(session, kBF16, {2, 4096, 12, 12, 64}, window(keys));
}

}  // namespace sheaf::bench
