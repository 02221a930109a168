// The emulated GPU's streams, events, captures and graphs. Streams run as late as they may; recorded work does not run until its
// graph is launched, and then in an order constrained only by the recorded dependencies.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sheaf/core/device.h"

namespace sheaf::kernels::cuda::emulation {

using Work = std::function<void()>;

/// The work recorded so far by all streams of one capture.
struct Capture {
  struct Node {
    Work work;  // none: joins streams
    std::vector<size_t> behind;  // nodes that it depends on
  };
  std::vector<Node> nodes;
  const void* origin = nullptr;  // the stream where it began, and must end
  std::string broken;            // why the capture is invalid; empty: it is valid
  bool over = false;

  /// Runs all nodes; among those that are ready, the one recorded last first.
  void run() const;
  /// Nodes that precede the nodes `last`, themselves included.
  std::vector<bool> before(const std::vector<size_t>& last) const;
};

struct EmulatedStream {
  std::deque<Work> work;
  uint64_t enqueued = 0, done = 0;
  std::shared_ptr<Capture> capture;  // null: work is run, not recorded
  std::vector<size_t> last;          // nodes that the next one depends on
};

/// A stream's position when the event was recorded: a ticket, or nodes of a capture.
struct EmulatedEvent {
  std::shared_ptr<EmulatedStream> stream;
  uint64_t ticket = 0;
  std::shared_ptr<Capture> capture;
  std::vector<size_t> nodes;
  std::shared_ptr<double> seconds = {};  ///< of a timed event: when the stream reached it
};

/// While one exists, the device's memory is accessible to all threads; otherwise an access is fatal. Opening and closing it is slow.
class OpenMemory {
 public:
  OpenMemory();
  ~OpenMemory();
  OpenMemory(const OpenMemory&) = delete;
  OpenMemory& operator=(const OpenMemory&) = delete;
};

/// All streams of the device. Thread-safe. Errors have CUDA's names and texts.
class Streams {
 public:
  static Streams& get();

  std::shared_ptr<EmulatedStream> make();
  void destroy(const Stream& stream);
  void enqueue(const Stream& stream, Work work);
  void synchronize(const Stream& stream);
  void synchronize(const EmulatedEvent& event);
  EmulatedEvent now(const Stream& stream);
  void wait(const Stream& stream, const EmulatedEvent& event);

  void begin_capture(const Stream& stream);
  std::shared_ptr<const Capture> end_capture(const Stream& stream);
  bool capturing(const Stream& stream);
  void launch(std::shared_ptr<const Capture> graph, const Stream& stream);

 private:
  static constexpr size_t kMostWaiting = 4096;

  std::shared_ptr<EmulatedStream> of(const Stream& stream);
  void put(EmulatedStream& s, Work work);
  void record(EmulatedStream& s, Work work);
  void run(EmulatedStream& s, uint64_t ticket);

  std::mutex mutex_;
  std::vector<std::shared_ptr<EmulatedStream>> streams_;
};

}  // namespace sheaf::kernels::cuda::emulation
