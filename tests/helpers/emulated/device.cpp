// An accelerator made of host memory: an ordinary PrivateUse1 device with streams, events, pinned memory and generators.
//
// Kernels run on the CPU, at once. Copies between host and device with non_blocking=True do nothing until they must: a
// copy to the device happens when its stream is needed by a kernel, a copy to the host when somebody waits for it. Fresh
// memory is filled with 0xFF (NaN, -1), so whoever reads too early reads wrong numbers in every run. Operations that mix
// devices are refused, and everything for which the host waits is counted.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>

namespace emulated {

Counts counts;

c10::DeviceIndex device_count() {
  const char* given = std::getenv("EMULATED_DEVICES");
  return given ? std::atoi(given) : 2;
}

// -- streams: queues of work that is done as late as is allowed -------------------------------------------------------

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;

struct Operation {
  int64_t number;
  std::function<void()> start;  // in the order of the stream, before its next kernel
  std::function<void()> land;   // when the host waits for it
};

struct Queue {
  int64_t last = 0;
  std::deque<Operation> waiting, started;
};

struct Event {
  c10::Stream stream;
  int64_t number;
  std::chrono::steady_clock::time_point time;
};

// Never destroyed: tensors are freed until the very end of the process.
auto& mutex = *new std::recursive_mutex();
int depth = 0;
auto& finished = *new std::vector<Operation>();  // until nobody holds the mutex: freeing a tensor may need Python's lock
auto& queues = *new std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue>();
std::atomic<c10::StreamId> streams{0};
thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

struct Locked {
  Locked() { mutex.lock(), depth++; }
  ~Locked() {
    std::vector<Operation> garbage;
    if (--depth == 0) garbage.swap(finished);
    mutex.unlock();
  }
};

Queue& queue_of(c10::Stream stream) { return queues[{stream.device_index(), stream.id()}]; }

void start_until(c10::Stream stream, int64_t number) {
  Queue& queue = queue_of(stream);
  while (!queue.waiting.empty() && queue.waiting.front().number <= number) {
    Operation operation = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    if (operation.land) queue.started.push_back(operation);
    operation.start();
    finished.push_back(std::move(operation));
  }
}

void land_until(c10::Stream stream, int64_t number) {
  start_until(stream, number);
  Queue& queue = queue_of(stream);
  while (!queue.started.empty() && queue.started.front().number <= number) {
    Operation operation = std::move(queue.started.front());
    queue.started.pop_front();
    operation.land();
    finished.push_back(std::move(operation));
  }
}

void wait_for_all(c10::Stream stream) {
  Locked locked;
  land_until(stream, queue_of(stream).last);
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), ++streams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked locked;
    delete static_cast<Event*>(*event);
    *event = new Event{stream, queue_of(stream).last, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto until = *static_cast<Event*>(event);
    enqueue(stream, [until] { start_until(until.stream, until.number); }, [until] { land_until(until.stream, until.number); });
  }
  bool queryEvent(void* event) const override {
    if (event) land(*static_cast<Event*>(event));  // whoever asks again and again lets time pass
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override {
    wait_for_all(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    counts.waits++;
    wait_for_all(stream);
  }
  void synchronizeEvent(void* event) const override {
    counts.waits++;
    if (event) land(*static_cast<Event*>(event));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    counts.waits++;
    Locked locked;
    for (auto& [key, queue] : queues)
      if (key.first == device) land_until(c10::Stream(c10::Stream::UNSAFE, {TYPE, device}, key.second), queue.last);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto span = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  c10::Device indexed(c10::Device device) const { return device.has_index() ? device : getDevice(); }
  static void land(const Event& event) {
    Locked locked;
    land_until(event.stream, event.number);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

c10::Stream current_stream(c10::Device device) {
  c10::Device indexed(TYPE, device.has_index() ? device.index() : current_device);
  return c10::Stream(c10::Stream::UNSAFE, indexed, current_streams[indexed.index()]);
}

c10::Stream new_stream(c10::Device device) { return Guard().getNewStream(device, 0); }

void enqueue(c10::Stream stream, std::function<void()> start, std::function<void()> land) {
  Locked locked;
  Queue& queue = queue_of(stream);
  queue.waiting.push_back({++queue.last, std::move(start), std::move(land)});
}

void start_all(c10::Stream stream) {
  Locked locked;
  start_until(stream, queue_of(stream).last);
}

// -- memory -----------------------------------------------------------------------------------------------------------

namespace {

struct Block {
  c10::StreamId stream;        // on which it was allocated
  std::set<c10::StreamId> used, recorded;  // other streams that read it; those that record_stream has named
};

auto& blocks_mutex = *new std::mutex();
auto& blocks = *new std::map<void*, Block>();

void free_block(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(blocks_mutex);
    auto found = blocks.find(pointer);
    if (found != blocks.end()) {
      const Block& block = found->second;
      if (!std::includes(block.recorded.begin(), block.recorded.end(), block.used.begin(), block.used.end()))
        counts.unsafe_frees++;
      blocks.erase(found);
    }
  }
  c10::free_cpu(pointer);
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    c10::Device device(TYPE, current_device);
    if (size == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    void* pointer = c10::alloc_cpu(size);
    std::memset(pointer, 0xFF, size);
    std::lock_guard<std::mutex> lock(blocks_mutex);
    blocks[pointer] = {current_stream(device).id(), {}, {}};
    return {pointer, pointer, &free_block, device};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};

DeviceAllocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

void used_on(const at::Tensor& tensor, c10::StreamId stream) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto found = blocks.find(tensor.storage().mutable_data());
  if (found != blocks.end() && found->second.stream != stream) found->second.used.insert(stream);
}

// Like CUDA's: sizes are rounded up to powers of two, and what is freed stays here until somebody empties the cache.
struct PinnedAllocator final : at::HostAllocator {
  at::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, at::kCPU};
    size = std::bit_ceil(size);
    std::lock_guard<std::mutex> lock(mutex);
    auto cached = free.find(size);
    void* pointer = cached != free.end() ? cached->second : c10::alloc_cpu(size);
    if (cached != free.end()) free.erase(cached);
    std::memset(pointer, 0xFF, size);
    taken[pointer] = size;
    return {pointer, pointer, &give_back, at::kCPU};
  }
  static void give_back(void* pointer);
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& [size, pointer] : free) c10::free_cpu(pointer);
    free.clear();
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    auto next = taken.upper_bound(const_cast<void*>(data));
    if (next == taken.begin()) return false;
    --next;
    return static_cast<const char*>(data) < static_cast<char*>(next->first) + next->second;
  }
  int64_t bytes() {
    std::lock_guard<std::mutex> lock(mutex);
    int64_t sum = 0;
    for (auto& [pointer, size] : taken) sum += size;
    for (auto& [size, pointer] : free) sum += size;
    return sum;
  }
  std::mutex mutex;
  std::map<void*, size_t> taken;
  std::multimap<size_t, void*> free;
};

PinnedAllocator& pinned = *new PinnedAllocator();  // outlives all tensors

void PinnedAllocator::give_back(void* pointer) {
  std::lock_guard<std::mutex> lock(pinned.mutex);
  pinned.free.emplace(pinned.taken.at(pointer), pointer);
  pinned.taken.erase(pointer);
}

REGISTER_HOST_ALLOCATOR(TYPE, &pinned);

// -- random numbers: one generator for each device --------------------------------------------------------------------

struct DeviceGenerator final : public c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index)
      : c10::GeneratorImpl({TYPE, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::make_generator<at::CPUGeneratorImpl>()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto copy = new DeviceGenerator(device_.index());
    copy->host = host.clone();
    return copy;
  }
  at::Generator host;
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto& all = *new std::map<c10::DeviceIndex, at::Generator>();
  static std::mutex lock;
  std::lock_guard<std::mutex> locked(lock);
  if (index < 0) index = current_device;
  if (!all.count(index)) all[index] = at::make_generator<DeviceGenerator>(index);
  return all[index];
}

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({TYPE, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({TYPE, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, current_device}; }
  bool isPinnedPtr(const void* data) const override { return pinned.holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::OptionalDeviceGuard guard(impl->device());
    auto fresh = allocator.allocate(size);
    if (auto kept = std::min(size, impl->nbytes())) std::memcpy(fresh.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

int64_t pinned_bytes() { return pinned.bytes(); }

// -- tensors and copies -----------------------------------------------------------------------------------------------

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  auto* kept = new c10::Storage(tensor.storage());
  c10::DataPtr data(kept->mutable_data(), kept, [](void* held) { delete static_cast<c10::Storage*>(held); }, at::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), kept->nbytes(), std::move(data), nullptr, false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.dim() == 0) impl->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return view;
}

namespace {

using at::Tensor;

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

void use(const Tensor& tensor) {
  auto stream = current_stream(tensor.device());
  used_on(tensor, stream.id());
  start_all(stream);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor source = on_host(from), target = on_host(to);
  if (is_ours(from) && is_ours(to)) {
    use(from), use(to);
    target.copy_(source);
  } else if (is_ours(to)) {
    auto stream = current_stream(to.device());
    used_on(to, stream.id());
    if (!non_blocking) {
      counts.copies_to_device++;
      wait_for_all(stream);
      target.copy_(source);
      return to;
    }
    // From ordinary memory the driver takes the bytes at once.
    bool late = pinned.holds(source.const_data_ptr()) && source.dtype() == target.dtype();
    if (!late) source = source.to(target.scalar_type(), false, true);
    enqueue(stream, [source, target] { at::AutoDispatchBelowADInplaceOrView below; target.copy_(source); }, nullptr);
  } else {
    auto stream = current_stream(from.device());
    used_on(from, stream.id());
    if (!non_blocking || !pinned.holds(target.const_data_ptr())) {
      counts.copies_to_host++;
      wait_for_all(stream);
      target.copy_(source);
      return to;
    }
    auto bytes = std::make_shared<Tensor>();
    enqueue(
        stream, [source, bytes] { at::AutoDispatchBelowADInplaceOrView below; *bytes = source.clone(); },
        [target, bytes] { at::AutoDispatchBelowADInplaceOrView below; target.copy_(*bytes); });
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) const_cast<Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar read(const Tensor& tensor) {
  counts.reads++;
  wait_for_all(current_stream(tensor.device()));
  return on_host(tensor).item();
}

Tensor as_strided(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(t, size, stride, offset);
}
Tensor view(const Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
const Tensor& resize(const Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}
Tensor& set_storage(Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(t, storage, offset, size, stride);
}
Tensor reshape_alias(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
void record_stream(Tensor& t, c10::Stream stream) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto found = blocks.find(t.storage().mutable_data());
  if (found != blocks.end()) found->second.recorded.insert(stream.id());
}

// -- every other operation: on the CPU, with the same memory ----------------------------------------------------------

struct Call {
  const c10::OperatorHandle& op;
  std::optional<c10::Device> device;
  std::vector<std::pair<Tensor, Tensor>> seen;       // (of the device, its view on the host)
  std::vector<std::pair<Tensor, Tensor>> unsized{};  // (empty result tensor, the tensor that takes its place)

  void check(const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (is_ours(tensor)) {
      TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found ",
                  *device, " and ", tensor.device(), " (", op.schema().name(), ")");
      device = tensor.device();
    }
  }
  void refuse_host(const Tensor& tensor) const {
    if (device && tensor.defined() && tensor.is_cpu() && tensor.dim() > 0)
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found ", *device, " and cpu (",
                  op.schema().name(), ")");
  }
  Tensor enter(const Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    Tensor host = on_host(tensor);
    seen.emplace_back(tensor, host);
    return host;
  }
  Tensor leave(const Tensor& host) {
    if (!host.defined() || !host.is_cpu() || !device) return host;
    for (auto& [ours, view] : seen) {
      if (host.is_same(view)) return ours;
      if (host.storage().data() == view.storage().data() && host.storage().data() != nullptr) {
        Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(), host.dtype());
        alias.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
        return alias;
      }
    }
    Tensor ours = empty_strided(host.sizes(), host.strides(), host.scalar_type(), {}, device, {});
    if (host.numel()) on_host(ours).copy_(host);
    return ours;
  }
};

bool waits_for_values(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  if (op.hasTag(at::Tag::data_dependent_output)) return true;
  if (!op.hasTag(at::Tag::dynamic_output_shape)) return false;
  if (op.schema().name() != "aten::index") return true;
  for (const c10::IValue& index : arguments[1].toListRef())
    if (index.isTensor() && (index.toTensor().scalar_type() == at::kBool || index.toTensor().scalar_type() == at::kByte))
      return true;
  return false;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const size_t begin = stack->size() - schema.arguments().size();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  auto each_tensor = [&](auto&& function) {
    for (const c10::IValue& value : arguments) {
      if (value.isTensor()) function(value.toTensor());
      if (value.isList())
        for (const c10::IValue& item : value.toListRef())
          if (item.isTensor()) function(item.toTensor());
    }
  };
  Call call{op, std::nullopt, {}};
  each_tensor([&](const Tensor& tensor) { call.check(tensor); });
  for (const c10::IValue& value : arguments)
    if (value.isDevice() && value.toDevice().type() == TYPE) call.device = Guard().indexed(value.toDevice());
  // Optimizers keep counters of steps on the host; positions may be there, at the price of a copy.
  const std::string& name = schema.name();
  const bool indexes = name.find("aten::index") == 0 || name.find("aten::_index_put_impl") == 0;
  const bool lists = name.find("aten::_foreach") == 0 || name.find("aten::_fused") == 0 || name.find("aten::_amp") == 0;
  if (!indexes && !lists) each_tensor([&](const Tensor& tensor) { call.refuse_host(tensor); });
  if (indexes) each_tensor([&](const Tensor& tensor) { counts.copies_to_device += tensor.defined() && tensor.is_cpu() && tensor.dim() > 0; });
  each_tensor([](const Tensor& tensor) { if (is_ours(tensor)) use(tensor); });
  if (waits_for_values(op, arguments)) {
    counts.reads++;
    if (call.device) wait_for_all(current_stream(*call.device));
  }

  c10::OptionalDeviceGuard guard(call.device);
  auto device_generator = default_generator(call.device ? call.device->index() : -1);
  at::Generator used = static_cast<DeviceGenerator*>(device_generator.unsafeGetGeneratorImpl())->host;
  std::vector<c10::IValue> before(arguments.begin(), arguments.end());
  bool has_generator = false;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    c10::IValue& value = (*stack)[begin + i];
    const auto& argument = schema.arguments()[i];
    if (value.isTensor()) {
      Tensor tensor = value.toTensor(), host = call.enter(tensor);
      if (is_ours(tensor) && argument.is_out() && tensor.numel() == 0) {
        host = at::empty({0}, tensor.options().device(at::kCPU));
        call.unsized.emplace_back(tensor, host);
      }
      value = host;
    } else if (value.isTensorList()) {
      c10::List<Tensor> hosts;
      for (const Tensor& tensor : value.toTensorVector()) hosts.push_back(call.enter(tensor));
      value = hosts;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> hosts;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
        hosts.push_back(tensor ? std::optional<Tensor>(call.enter(*tensor)) : std::nullopt);
      value = hosts;
    } else if (value.isDevice() && value.toDevice().type() == TYPE) {
      value = c10::Device(at::kCPU);
    } else if (argument.type()->str().find("Generator") == 0) {
      has_generator = true;
      if (value.isGenerator() && value.toGenerator().device().type() == TYPE)
        used = static_cast<DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())->host;
      value = used;
    }
  }
  // Some random operations have no argument for a generator: for them the CPU's takes the device's state.
  const bool lends = op.hasTag(at::Tag::nondeterministic_seeded) && !has_generator;
  auto cpu = at::detail::getDefaultCPUGenerator();
  Tensor kept;
  if (lends) kept = cpu.get_state(), cpu.set_state(used.get_state());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (lends) used.set_state(cpu.get_state()), cpu.set_state(kept);

  for (auto& [ours, host] : call.unsized) copy_from_and_resize(host, ours);
  const size_t results = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) {
    c10::IValue& value = (*stack)[results + i];
    if (value.isTensor()) {
      Tensor host = value.toTensor();
      auto unsized = std::find_if(call.unsized.begin(), call.unsized.end(), [&](auto& pair) { return pair.second.is_same(host); });
      value = unsized != call.unsized.end() ? unsized->first : call.leave(host);
    } else if (value.isTensorList()) {
      c10::List<Tensor> ours;
      for (const Tensor& host : value.toTensorVector()) ours.push_back(call.leave(host));
      value = ours;
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("record_stream", record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

}  // namespace
}  // namespace emulated
