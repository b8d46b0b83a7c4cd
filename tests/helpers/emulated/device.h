// What the process group needs of the device.
#pragma once
#include <ATen/core/Generator.h>
#include <torch/library.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

namespace emulated {

// What the host has waited for.
struct Counts {
  std::atomic<int64_t> reads{0};             // of single values, and of sizes that depend on values
  std::atomic<int64_t> copies_to_host{0};    // that block
  std::atomic<int64_t> copies_to_device{0};  // that block
  std::atomic<int64_t> waits{0};             // for a stream, an event or the device
  std::atomic<int64_t> unsafe_frees{0};      // of memory in use on another stream that record_stream was not told
};
extern Counts counts;

c10::DeviceIndex device_count();
const at::Generator& default_generator(c10::DeviceIndex index);
// Memory that is pinned or kept in the cache of pinned memory.
int64_t pinned_bytes();
bool is_ours(const at::Tensor& tensor);
// Return the same memory as a CPU tensor.
at::Tensor on_host(const at::Tensor& tensor);
c10::Stream current_stream(c10::Device device);
c10::Stream new_stream(c10::Device device);
// Add work to a stream: `start` is called in order, before the stream's next kernel; `land` when the host waits.
void enqueue(c10::Stream stream, std::function<void()> start, std::function<void()> land);
void start_all(c10::Stream stream);

}  // namespace emulated
