#include "sheaf/tests/distributed/thread_nccl.h"

#include <algorithm>
#include <condition_variable>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "sheaf/core/rank_context.h"
#include "sheaf/core/storage.h"
#include "sheaf/kernels/cuda/config.h"
#include "sheaf/kernels/reduce_ranks.h"

namespace sheaf::testing {
namespace {

enum class Kind : uint8_t {
  all_gather,
  broadcast,
  all_reduce,
  reduce,
  reduce_scatter,
  send,
  receive
};

struct Op {
  Kind kind;
  const std::byte* in;
  std::byte* out;
  int64_t count;
  int peer = 0;  // or root
  DType dtype = DType::u8;
  Reduction reduction = Reduction::sum;
  std::vector<std::optional<NcclRules::Place>> places = {};  // of the op's buffers

  bool is_pair() const { return kind == Kind::send || kind == Kind::receive; }
  bool fits(const Op& o) const {
    return kind == o.kind && count == o.count && peer == o.peer && dtype == o.dtype &&
           reduction == o.reduction;
  }
};

std::byte* bytes(const void* p) { return static_cast<std::byte*>(const_cast<void*>(p)); }

}  // namespace

struct ThreadNccl::Clique {
  struct Member {
    bool here = false, aborted = false, finalized = false;
    std::vector<std::vector<Op>> groups;  // all that it has submitted
    Stream stream;
  };

  Clique(int size, std::shared_ptr<NcclRules> r) : members(size), rules(std::move(r)) {}

  std::mutex mutex;
  std::condition_variable condition;
  std::vector<Member> members;
  const std::shared_ptr<NcclRules> rules;
  uint64_t done = 0;  // groups

  // Under the lock: executes the next group once all members have submitted it.
  void advance(Gpu& gpu, const Stream& stream) {
    for (const Member& m : members)
      if (m.groups.size() <= done || m.aborted) return;
    const auto ops_of = [&](size_t m) -> std::vector<Op>& { return members[m].groups[done]; };
    std::vector<std::pair<const Op*, const Op*>> pairs;  // from, to
    const bool paired = !ops_of(0).empty() && ops_of(0)[0].is_pair();
    if (paired ? !match(pairs) : !all_fit()) return;
    for (const Member& m : members) gpu.sync(m.stream);  // the buffers of all are ready
    for (const auto& [from, to] : pairs) copy(gpu, stream, to->out, from->in, from->count);
    for (size_t i = 0; !paired && i < ops_of(0).size(); ++i) {
      std::vector<Op> all;
      for (size_t m = 0; m < members.size(); ++m) all.push_back(ops_of(m)[i]);
      for (size_t b = 0; b < all[0].places.size(); ++b) {
        std::vector<std::optional<NcclRules::Place>> places;
        for (const Op& o : all) places.push_back(o.places[b]);
        rules->compare(places);
      }
      together(gpu, stream, all);
    }
    gpu.sync(stream);
    ++done;
    condition.notify_all();
  }

 private:
  bool all_fit() const {
    const std::vector<Op>& first = members[0].groups[done];
    return std::ranges::all_of(members, [&](const Member& m) {
      return std::ranges::equal(m.groups[done], first,
                                [](const Op& a, const Op& b) { return a.fits(b); });
    });
  }
  bool match(std::vector<std::pair<const Op*, const Op*>>& pairs) const {
    size_t receives = 0;
    for (size_t from = 0; from < members.size(); ++from)
      for (const Op& s : members[from].groups[done]) {
        if (!s.is_pair()) return false;
        receives += s.kind == Kind::receive;
        if (s.kind != Kind::send) continue;
        const auto& theirs = members[s.peer].groups[done];
        const auto to = std::ranges::find_if(theirs, [&](const Op& r) {
          return r.kind == Kind::receive && r.peer == static_cast<int>(from) && r.count == s.count;
        });
        if (to == theirs.end()) return false;
        pairs.emplace_back(&s, &*to);
      }
    return receives == pairs.size();
  }
  static void copy(Gpu& gpu, const Stream& stream, void* to, const void* from, int64_t count) {
    if (to != from) gpu.copy(stream, to, from, static_cast<size_t>(count), Gpu::Copy::on_device);
  }
  static void together(Gpu& gpu, const Stream& stream, const std::vector<Op>& all) {
    const Op& op = all[0];
    const int64_t size = op.count * static_cast<int64_t>(size_of(op.dtype));
    const auto reduced = [&](int64_t begin) {
      const auto out = Storage::allocate(gpu.device(), size);
      gpu.record(gpu.compute()).order(stream);  // the storage may have had another user
      std::vector<const void*> sources;
      for (const Op& o : all) sources.push_back(o.in + begin);
      if constexpr (kernels::kHasCuda)
        kernels::cuda::reduce_in_order(stream, out->data(), sources, op.count, op.dtype,
                                       op.reduction);
      return out;
    };
    for (size_t r = 0; r < all.size(); ++r) {
      const auto begin = static_cast<int64_t>(r) * size;
      switch (op.kind) {
        case Kind::all_gather:
          for (const Op& o : all) copy(gpu, stream, o.out + begin, all[r].in, size);
          break;
        case Kind::reduce_scatter: {
          const auto sum = reduced(begin);
          copy(gpu, stream, all[r].out, sum->data(), size);
          gpu.sync(stream);  // before the storage goes
          break;
        }
        default:
          break;
      }
    }
    if (op.kind == Kind::broadcast)
      for (const Op& o : all) copy(gpu, stream, o.out, all[op.peer].in, size);
    if (op.kind == Kind::all_reduce || op.kind == Kind::reduce) {
      const auto sum = reduced(0);
      for (size_t m = 0; m < all.size(); ++m)
        if (op.kind == Kind::all_reduce || static_cast<int>(m) == op.peer)
          copy(gpu, stream, all[m].out, sum->data(), size);
      gpu.sync(stream);
    }
  }
};

namespace {

using Clique = ThreadNccl::Clique;

/// The point at which one member's group is done, or aborted.
class GroupPoint final : public DevicePoint {
 public:
  GroupPoint(std::shared_ptr<Clique> clique, int rank, uint64_t group)
      : clique_(std::move(clique)), rank_(rank), group_(group) {}
  void sync() const override {
    std::unique_lock lock(clique_->mutex);
    clique_->condition.wait(lock, [&] { return is_over(); });
  }
  bool reached() const override {
    std::lock_guard lock(clique_->mutex);
    return is_over();
  }
  void order(const Stream&) const override { sync(); }  // the host waits for the device

 private:
  bool is_over() const { return clique_->done >= group_ || clique_->members[rank_].aborted; }

  const std::shared_ptr<Clique> clique_;
  const int rank_;
  const uint64_t group_;
};

class ThreadComm final : public NcclComm {
 public:
  ThreadComm(std::shared_ptr<Clique> clique, int rank, bool refuses)
      : refuses_(refuses),
        gpu_(RankContext::current().gpu),
        stream_(gpu_->make_lane()),
        clique_(std::move(clique)),
        rank_(rank) {
    std::lock_guard lock(clique_->mutex);
    me().here = true;
    me().stream = stream_;
    clique_->rules->joined(gpu_.get());
  }
  ~ThreadComm() override {
    abort();  // nobody uses the stream any more
    clique_->rules->left(gpu_.get());
    gpu_->destroy_lane(stream_);
  }
  ThreadComm(const ThreadComm&) = delete;
  ThreadComm& operator=(const ThreadComm&) = delete;

  const Stream& stream() const override { return stream_; }
  Event record() override {
    std::lock_guard lock(clique_->mutex);
    return Event::at(std::make_shared<GroupPoint>(clique_, rank_, me().groups.size()));
  }
  void group(const std::function<void()>& calls) override {
    clique_->rules->issued(gpu_.get());
    ops_.clear();
    calls();
    std::lock_guard lock(clique_->mutex);
    if (me().aborted) throw CommError("aborted");
    me().groups.push_back(ops_);
    clique_->advance(*gpu_, stream_);
  }
  void all_gather(const void* in, void* out, int64_t bytes_each) override {
    add({Kind::all_gather, bytes(in), bytes(out), bytes_each}, "all_gather", bytes_each,
        bytes_each * size());
  }
  void broadcast(const void* in, void* out, int64_t n, int root) override {
    ops_.push_back({Kind::broadcast, bytes(in), bytes(out), n, root});
  }
  void all_reduce(const void* in, void* out, int64_t count, DType dtype,
                  Reduction reduction) override {
    const int64_t n = count * static_cast<int64_t>(size_of(dtype));
    add({Kind::all_reduce, bytes(in), bytes(out), count, 0, dtype, reduction}, "all_reduce", n, n);
  }
  void reduce(const void* in, void* out, int64_t count, DType dtype, Reduction reduction,
              int root) override {
    ops_.push_back({Kind::reduce, bytes(in), bytes(out), count, root, dtype, reduction});
  }
  void reduce_scatter(const void* in, void* out, int64_t count_each, DType dtype,
                      Reduction reduction) override {
    const int64_t n = count_each * static_cast<int64_t>(size_of(dtype));
    add({Kind::reduce_scatter, bytes(in), bytes(out), count_each, 0, dtype, reduction},
        "reduce_scatter", n * size(), n);
  }
  void send(const void* data, int64_t n, int peer) override {
    ops_.push_back({Kind::send, bytes(data), nullptr, n, peer});
  }
  void receive(void* data, int64_t n, int peer) override {
    ops_.push_back({Kind::receive, nullptr, bytes(data), n, peer});
  }

  void* register_memory(void* base, int64_t n) override {
    if (refuses_) throw CommError("this member refuses");
    return clique_->rules->add(this, base, n);
  }
  void deregister_memory(void* registration) override {
    std::lock_guard lock(clique_->mutex);
    EXPECT_EQ(clique_->done, me().groups.size()) << "deregistered under a call";
    clique_->rules->remove(this, registration);
  }

  State state(std::string& why) override {
    std::lock_guard lock(clique_->mutex);
    if (me().aborted) {
      why = "aborted";
      return State::failed;
    }
    const auto waits = [&](const Clique::Member& m) {
      return !m.here || (me().finalized && !m.finalized);
    };
    return std::ranges::any_of(clique_->members, waits) ? State::busy : State::ready;
  }
  void finalize() override {
    std::lock_guard lock(clique_->mutex);
    me().finalized = true;
    clique_->rules->ended(this);
  }
  void abort() override {
    std::lock_guard lock(clique_->mutex);
    me().aborted = true;
    clique_->rules->forget(this);
    clique_->condition.notify_all();
  }

 private:
  Clique::Member& me() { return clique_->members[rank_]; }
  int64_t size() const { return static_cast<int64_t>(clique_->members.size()); }
  void add(Op op, const std::string& name, int64_t in_bytes, int64_t out_bytes) {
    op.places = {clique_->rules->note(this, name + " in", op.in, in_bytes),
                 clique_->rules->note(this, name + " out", op.out, out_bytes)};
    ops_.push_back(std::move(op));
  }

  const bool refuses_;
  const std::shared_ptr<Gpu> gpu_;
  const Stream stream_;
  const std::shared_ptr<Clique> clique_;
  const int rank_;
  std::vector<Op> ops_;
};

}  // namespace

std::string ThreadNccl::unique_id() {
  std::lock_guard lock(mutex_);
  return std::to_string(++ids_);
}

std::unique_ptr<NcclComm> ThreadNccl::join(const std::string& id, int size, int rank,
                                           const std::string&) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Clique>& clique = cliques_[id];
  if (!clique) clique = std::make_shared<Clique>(size, rules);
  return std::make_unique<ThreadComm>(clique, rank, rank == refusing);
}

}  // namespace sheaf::testing
