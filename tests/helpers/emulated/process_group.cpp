// A process group for the emulated device: gloo's collectives, with NCCL's way of ending.
//
// A collective is a piece of work on a stream of its own: the host goes on, and the stream that uses the result waits. A
// lost process is not noticed. `shutdown` blocks while a collective is outstanding and until all processes have called it,
// for ever if need be; only `abort` ends that. After `run_ahead(true)` kernels do not wait for collectives, as if the device were far behind the host: the
// numbers are then meaningless, and only a host that waits for the device is held up.
#include "device.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <optional>
#include <thread>

namespace emulated {

namespace {

using at::Tensor;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

std::atomic<bool> runs_ahead{false};

// A thread that waits here must not keep others out of Python.
struct WithoutPython {
  WithoutPython() {
    if (PyGILState_Check()) released.emplace();
  }
  std::optional<py::gil_scoped_release> released;
};

struct Collective final : public Work {
  Collective(WorkPtr gloo, std::shared_ptr<std::atomic<bool>> aborted, c10::Stream stream, std::vector<Tensor> results)
      : gloo(std::move(gloo)), aborted(std::move(aborted)), stream(stream), results(std::move(results)) {}
  bool outstanding() { return !*aborted && !(gloo->isCompleted() && gloo->isSuccess()); }
  void finish() {
    WithoutPython released;
    while (outstanding()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    TORCH_CHECK(!*aborted || gloo->isCompleted(), "the process group was aborted");
  }
  bool isCompleted() override { return !outstanding(); }
  bool isSuccess() const override { return gloo->isCompleted() && gloo->isSuccess(); }
  bool wait(std::chrono::milliseconds) override {
    future->wait();  // the current stream waits; the host does not
    return true;
  }
  void synchronize() override { future->wait(); }
  std::vector<Tensor> result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  WorkPtr gloo;
  std::shared_ptr<std::atomic<bool>> aborted;
  c10::Stream stream;
  std::vector<Tensor> results;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

std::vector<Tensor> views(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> hosts;
  for (const Tensor& tensor : tensors) hosts.push_back(on_host(tensor));
  return hosts;
}
std::vector<std::vector<Tensor>> views(const std::vector<std::vector<Tensor>>& lists) {
  std::vector<std::vector<Tensor>> hosts;
  for (const auto& list : lists) hosts.push_back(views(list));
  return hosts;
}

}  // namespace

struct Group final : public c10d::Backend {
  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo(std::move(gloo)) {}
  const std::string getBackendName() const override { return "emulated"; }

  void shutdown() override {
    WithoutPython released;
    auto wait_for = [this](auto&& done) {
      while (!done() && !*aborted) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    };
    for (auto& one : pending) wait_for([&] { return !one->outstanding(); });
    pending.clear();
    auto everybody = *aborted ? WorkPtr() : gloo->barrier();
    if (everybody) wait_for([&] { return everybody->isCompleted() && everybody->isSuccess(); });
  }
  void abort() override { *aborted = true; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  // `call` starts the collective in gloo. `used`: its tensors; `results`: those that it fills.
  WorkPtr run(const std::vector<Tensor>& used, const std::vector<Tensor>& results, const std::function<WorkPtr()>& call) {
    TORCH_CHECK(!used.empty() && is_ours(used[0]), "a collective of the emulated device got tensors of another device");
    auto device = used[0].device();
    for (const Tensor& tensor : used)
      TORCH_CHECK(tensor.device() == device, "a collective got tensors on ", device, " and ", tensor.device());
    start_all(current_stream(device));
    if (!streams.count(device.index())) streams.emplace(device.index(), new_stream(device));
    auto stream = streams.at(device.index());
    auto work = c10::make_intrusive<Collective>(call(), aborted, stream, results);
    enqueue(
        stream, [work = work.get(), held = work] { if (!runs_ahead) work->finish(); },
        [work = work.get(), held = work] { work->finish(); });
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    {
      c10::StreamGuard guard(stream);
      work->future->markCompleted(c10::IValue(results));
    }
    std::erase_if(pending, [](auto& one) { return !one->outstanding(); });
    pending.push_back(work);
    return work;
  }

  WorkPtr broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return run(tensors, tensors, [&] { auto hosts = views(tensors); return gloo->broadcast(hosts, options); });
  }
  WorkPtr allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;  // gloo cannot
    auto sum = options;
    if (mean) {
      sum.reduceOp = c10d::ReduceOp::SUM;
      for (auto& tensor : tensors) tensor.div_(getSize());
    }
    return run(tensors, tensors, [&] { auto hosts = views(tensors); return gloo->allreduce(hosts, sum); });
  }
  WorkPtr allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return run(tensors, tensors, [&] { auto hosts = views(tensors); return gloo->allreduce_coalesced(hosts, options); });
  }
  WorkPtr reduce(std::vector<Tensor>& tensors, const c10d::ReduceOptions& options) override {
    return run(tensors, tensors, [&] { auto hosts = views(tensors); return gloo->reduce(hosts, options); });
  }
  WorkPtr allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override {
    return run(inputs, outputs[0], [&] {
      auto out = views(outputs);
      auto in = views(inputs);
      return gloo->allgather(out, in, options);
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return run({output, input}, {output}, [&] {
      auto out = on_host(output), in = on_host(input);
      return gloo->_allgather_base(out, in, options);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return run(outputs, outputs, [&] {
      auto out = views(outputs), in = views(inputs);
      return gloo->allgather_into_tensor_coalesced(out, in, options);
    });
  }
  WorkPtr gather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
                 const c10d::GatherOptions& options) override {
    return run(inputs, inputs, [&] {
      auto out = views(outputs);
      auto in = views(inputs);
      return gloo->gather(out, in, options);
    });
  }
  WorkPtr scatter(std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override {
    return run(outputs, outputs, [&] {
      auto out = views(outputs);
      auto in = views(inputs);
      return gloo->scatter(out, in, options);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    auto sum = options;
    if (mean) {
      sum.reduceOp = c10d::ReduceOp::SUM;
      input.div_(getSize());
    }
    return run({output, input}, {output}, [&] {
      auto out = on_host(output), in = on_host(input);
      return gloo->_reduce_scatter_base(out, in, sum);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }

  c10::intrusive_ptr<c10d::Backend> gloo;
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  std::map<c10::DeviceIndex, c10::Stream> streams;
  std::vector<c10::intrusive_ptr<Collective>> pending;
};

}  // namespace emulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"reads", counts.reads},
        {"copies to the host", counts.copies_to_host},
        {"copies to the device", counts.copies_to_device},
        {"waits", counts.waits},
        {"unsafe frees", counts.unsafe_frees},
    };
  });
  m.def("device_count", &device_count);
  m.def("default_generator", &default_generator);
  m.def("pinned_bytes", &pinned_bytes);
  m.def("run_ahead", [](bool on) { runs_ahead = on; });
  m.def("make_group", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Group>(std::move(gloo), rank, size);
  });
}
