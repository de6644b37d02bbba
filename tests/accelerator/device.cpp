// A device without hardware: PrivateUse1 with memory of the CPU, and every operator by a call of the CPU's kernel.
//
// It is as strict as CUDA: tensors of two devices do not mix (but for CPU scalars), a generator of the CPU draws nothing
// on the device, and the factor of a matrix with NaN is reported as a success. Whatever would make the host wait for a
// GPU is reported to Python. Tensors are handed to the CPU's kernels without a copy.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

constexpr auto kDev = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kNumDevices = 2;
thread_local DeviceIndex current_device = 0;

// -- what the host has to wait for ------------------------------------------------------------------------------------

std::atomic<bool> listening{false};
py::object* listener = nullptr;

void waits(const std::string& what) {
  if (!listening) return;
  py::gil_scoped_acquire gil;
  if (listener != nullptr) (*listener)(what);
}

// -- memory -----------------------------------------------------------------------------------------------------------

void free_memory(void* memory) { c10::GetCPUAllocator()->raw_deallocate(memory); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = size ? c10::GetCPUAllocator()->raw_allocate(size) : nullptr;
    return {memory, memory, &free_memory, Device(kDev, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
DeviceAllocator allocator;
REGISTER_ALLOCATOR(kDev, &allocator);

// -- devices, streams and events: one stream per device, on which everything has happened already -----------------------

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDev; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kDev, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kNumDevices, "dev: invalid device ordinal ", static_cast<int>(device.index()));
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kNumDevices) current_device = device.index();
  }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { waits("synchronize"); }
  void synchronizeEvent(void*) const override { waits("synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { waits("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

// -- random numbers: a generator of the device holds one of the CPU, so that equal seeds give equal numbers -------------

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  DeviceGenerator(DeviceIndex index, at::Generator inner)
      : c10::GeneratorImpl(Device(kDev, index), DispatchKeySet(DispatchKey::PrivateUse1)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "dev: a generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "dev: a generator has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.set_state(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&state))));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.get_state().getIntrusivePtr(); }
  c10::GeneratorImpl* clone_impl() const override { return new DeviceGenerator(device_.index(), inner.clone()); }
};

at::Generator make_generator(DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(index < 0 ? current_device : index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> generators{make_generator(0), make_generator(1)};
  return generators.at(index < 0 ? current_device : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { DeviceGuard().setDevice(Device(kDev, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return DeviceGuard().exchangeDevice(Device(kDev, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override { return make_generator(index); }
  Device getDeviceFromPtr(void*) const override { return Device(kDev, current_device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const auto guard = c10::DeviceGuard(storage.device());
    c10::DataPtr memory = allocator.allocate(size);
    if (size && storage.nbytes()) std::memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(size);
  }
};

// -- from the device to the CPU's view of the same memory, and back -------------------------------------------------------

void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

// The storage of `device` over the memory of a storage of the CPU, which it keeps alive; and the other way round.
c10::Storage storage_on(const c10::Storage& storage, Device device) {
  c10::DataPtr memory(storage.mutable_data(), new c10::Storage(storage), &drop_storage, device);
  auto* owner = device.type() == kDev ? static_cast<c10::Allocator*>(&allocator) : c10::GetCPUAllocator();
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), owner, true);
}

at::Tensor with_storage(const at::Tensor& tensor, c10::Storage storage, DispatchKey key) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

at::Tensor make_sparse(const at::Tensor& like, at::Tensor indices, at::Tensor values, DispatchKey key, bool coalesced) {
  const c10::DeviceGuard guard(values.device());
  auto result = at::detail::make_tensor<at::SparseTensorImpl>(DispatchKeySet(key), values.dtype());
  auto* impl = static_cast<at::SparseTensorImpl*>(result.unsafeGetTensorImpl());
  impl->resize_(like.sparse_dim(), like.dense_dim(), like.sizes());
  impl->set_indices_and_values_unsafe(indices, values);
  impl->set_coalesced(coalesced);
  return result;
}

// One call of one operator: which tensors stand for which, and where the results belong.
struct Call {
  std::optional<Device> device;
  std::unordered_map<c10::StorageImpl*, c10::Storage> to_cpu, to_device;

  at::Tensor down(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kDev) return tensor;
    if (tensor.is_sparse()) {
      return make_sparse(
          tensor, down(tensor._indices()), down(tensor._values()), DispatchKey::SparseCPU, tensor.is_coalesced());
    }
    auto* known = tensor.storage().unsafeGetStorageImpl();
    auto found = to_cpu.find(known);
    if (found == to_cpu.end()) {
      found = to_cpu.emplace(known, storage_on(tensor.storage(), at::kCPU)).first;
      to_device.emplace(found->second.unsafeGetStorageImpl(), tensor.storage());
    }
    return with_storage(tensor, found->second, DispatchKey::CPU);
  }

  c10::Storage storage_up(const at::Tensor& tensor) {
    const auto known = to_device.find(tensor.storage().unsafeGetStorageImpl());
    return known == to_device.end() ? storage_on(tensor.storage(), *device) : known->second;
  }

  at::Tensor up(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() == kDev) return tensor;
    if (tensor.is_sparse()) {
      return make_sparse(
          tensor, up(tensor._indices()), up(tensor._values()), DispatchKey::SparsePrivateUse1, tensor.is_coalesced());
    }
    return with_storage(tensor, storage_up(tensor), DispatchKey::PrivateUse1);
  }

  // The kernel may have resized what it wrote to.
  void write_back(const at::Tensor& original, const at::Tensor& alias) {
    if (original.is_sparse()) {
      auto* impl = static_cast<at::SparseTensorImpl*>(original.unsafeGetTensorImpl());
      impl->resize_(alias.sparse_dim(), alias.dense_dim(), alias.sizes());
      impl->set_indices_and_values_unsafe(up(alias._indices()), up(alias._values()));
      impl->set_coalesced(alias.is_coalesced());
      return;
    }
    const auto known = to_device.find(alias.storage().unsafeGetStorageImpl());
    if (known == to_device.end()) {
      original.unsafeGetTensorImpl()->set_storage_keep_dtype(storage_up(alias));
    } else if (alias.storage().mutable_data() != original.storage().mutable_data()) {
      const auto& storage = original.storage();  // grown in place: take over the new memory
      c10::DataPtr memory(alias.storage().mutable_data(), new c10::Storage(alias.storage()), &drop_storage, *device);
      storage.set_data_ptr_noswap(std::move(memory));
      storage.set_nbytes(alias.storage().nbytes());
    }
    if (original.sizes() != alias.sizes() || original.strides() != alias.strides()) {
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
};

// -- what CUDA waits for ----------------------------------------------------------------------------------------------------

const std::unordered_map<std::string, int> kWaits{
    // operators whose result has a size or a message that depends on values
    {"aten::nonzero", 1}, {"aten::masked_select", 1}, {"aten::_unique2", 1}, {"aten::_unique", 1},
    {"aten::unique_dim", 1}, {"aten::unique_consecutive", 1}, {"aten::unique_dim_consecutive", 1}, {"aten::equal", 1},
    {"aten::bincount", 2}, {"aten::_coalesce", 1}, {"aten::linalg_eigh", 1}, {"aten::_linalg_eigh", 1},
    {"aten::_linalg_svd", 1}, {"aten::linalg_lstsq", 1}, {"aten::linalg_eig", 1}, {"aten::histc", 2},
    {"aten::_linalg_check_errors", 1}};

bool is_mask(const IValue& indices) {
  if (!indices.isList()) return false;
  for (const IValue& index : indices.toListRef()) {
    if (index.isTensor() && index.toTensor().defined()) {
      const auto type = index.toTensor().scalar_type();
      if (type == at::kBool || type == at::kByte) return true;
    }
  }
  return false;
}

void report(const std::string& name, const torch::jit::Stack& stack, size_t first) {
  const auto found = kWaits.find(name);
  if (found != kWaits.end()) {
    for (int i = 0; i < found->second; ++i) waits(name.substr(6));
  } else if (name == "aten::_index_put_impl_") {  // index by a mask calls nonzero before it comes here
    const bool fills = stack[first + 2].toTensor().numel() == 1 && !stack[first + 3].toBool();
    if (is_mask(stack[first + 1]) && !fills) waits("index_put by a mask");
  } else if (name == "aten::repeat_interleave") {
    for (size_t i = first; i < stack.size(); ++i) {
      if (stack[i].isInt()) return;  // output_size was given
    }
    waits("repeat_interleave");
  }
}

// -- the fallback -------------------------------------------------------------------------------------------------------------

void refuse_mix(const std::string& name, Device first, Device second) {
  TORCH_CHECK(
      false, "Expected all tensors to be on the same device, but found at least two devices, ", first, " and ", second,
      "! (when calling ", name, ")");
}

template <typename Visit>
void each_tensor(const IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& item : value.toListRef()) each_tensor(item, visit);
  }
}

IValue map_tensors(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return IValue(changed);
  }
  if (value.isList()) {
    auto list = value.toList();
    const auto type = list.elementType();
    const bool optional = type->isSubtypeOf(*c10::OptionalType::ofTensor());
    if (optional) {
      c10::List<std::optional<at::Tensor>> changed;
      for (const IValue& item : value.toListRef()) {
        changed.push_back(item.isTensor() ? std::optional<at::Tensor>(change(item.toTensor())) : std::nullopt);
      }
      return IValue(changed);
    }
  }
  return value;
}

// cuSOLVER's factor of a matrix with NaN is NaN, and its info says nothing of it.
void pass_nan(const at::Tensor& factor, const at::Tensor& matrix, const at::Tensor& info) {
  if (!matrix.numel()) return;
  const auto bad = matrix.isnan().flatten(-2).any(-1);
  if (!bad.any().item<bool>()) return;
  info.masked_fill_(bad, 0);
  factor.copy_(factor.masked_fill(bad.unsqueeze(-1).unsqueeze(-1), std::nan("")).tril());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const std::string name = schema.name();
  const size_t first = stack->size() - arguments.size();
  Call call;

  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& value = (*stack)[first + i];
    if (value.isDevice() && value.toDevice().type() == kDev) call.device = value.toDevice();
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    each_tensor((*stack)[first + i], [&](const at::Tensor& tensor) {
      if (tensor.device().type() != kDev) return;
      if (call.device && call.device->has_index() && *call.device != tensor.device()) {
        refuse_mix(name, *call.device, tensor.device());
      }
      call.device = tensor.device();
    });
  }
  // A generator of the device is all that can have brought a call here without a tensor or a device of ours.
  TORCH_CHECK(call.device, "Expected a 'cpu' device type for generator but found 'dev' (when calling ", name, ")");
  if (!call.device->has_index()) call.device = Device(kDev, current_device);
  const bool indexes = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
      name == "aten::index_put";
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool written = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    each_tensor((*stack)[first + i], [&](const at::Tensor& tensor) {
      if (tensor.device().type() == kDev) return;
      if (tensor.device().type() == at::kCPU && !written) {
        if (tensor.dim() == 0) return;
        if (indexes && i == 1) {
          waits("upload of an index");
          return;
        }
      }
      refuse_mix(name, *call.device, tensor.device());
    });
  }
  report(name, *stack, first);

  const std::vector<IValue> originals(stack->begin() + first, stack->end());
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& value = (*stack)[first + i];
    const auto type = arguments[i].real_type();
    const bool generates = type->kind() == c10::TypeKind::GeneratorType ||
        (type->kind() == c10::TypeKind::OptionalType &&
         type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
    if (generates) {
      const at::Generator generator = value.isNone() ? default_generator(call.device->index()) : value.toGenerator();
      TORCH_CHECK(
          generator.device().type() == kDev, "Expected a 'dev' device type for generator but found '",
          generator.device().type(), "'");
      TORCH_CHECK(
          generator.device() == *call.device, "Expected a generator of ", *call.device, " but found one of ",
          generator.device());
      value = generator.get<DeviceGenerator>()->inner;
    } else if (value.isDevice()) {
      value = Device(at::kCPU);
    } else {
      value = map_tensors(value, [&](const at::Tensor& tensor) { return call.down(tensor); });
    }
  }
  const std::vector<IValue> aliases(stack->begin() + first, stack->end());
  bool sparse = false;
  for (const IValue& value : aliases) {
    each_tensor(value, [&](const at::Tensor& tensor) { sparse = sparse || tensor.is_sparse(); });
  }
  sparse = sparse || name.rfind("aten::_sparse_coo_tensor", 0) == 0;
  op.redispatchBoxed(DispatchKeySet(sparse ? DispatchKey::SparseCPU : DispatchKey::CPU), stack);
  if (name == "aten::linalg_cholesky_ex" && schema.overload_name() == "L") {
    pass_nan(aliases[3].toTensor(), aliases[0].toTensor(), aliases[4].toTensor());
  }

  // What was written to is the argument itself; what is new moves to the device.
  std::unordered_map<c10::TensorImpl*, at::Tensor> known;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias_info = arguments[i].alias_info();
    if (alias_info == nullptr || !alias_info->isWrite()) continue;
    std::vector<at::Tensor> before, after;
    each_tensor(originals[i], [&](const at::Tensor& tensor) { before.push_back(tensor); });
    each_tensor(aliases[i], [&](const at::Tensor& tensor) { after.push_back(tensor); });
    for (size_t j = 0; j < before.size(); ++j) {
      call.write_back(before[j], after[j]);
      known[after[j].unsafeGetTensorImpl()] = before[j];
    }
  }
  const size_t num_returns = schema.returns().size();
  for (size_t i = stack->size() - num_returns; i < stack->size(); ++i) {
    (*stack)[i] = map_tensors((*stack)[i], [&](const at::Tensor& tensor) {
      const auto found = tensor.defined() ? known.find(tensor.unsafeGetTensorImpl()) : known.end();
      return found == known.end() ? call.up(tensor) : found->second;
    });
  }
}

// -- the few operators that are not computations ------------------------------------------------------------------------------

Device resolve(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(kDev, current_device);
}

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_generic(
      size, &allocator, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(resolve(device));
  return at::detail::empty_strided_generic(
      size, stride, &allocator, DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (self.device().type() == kDev && target.device().type() != kDev) waits("copy to the CPU");
  if (self.device().type() != kDev && target.device().type() == kDev && !non_blocking) waits("copy to the device");
  Call from, to;
  to.down(target).copy_(from.down(self));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  waits("item");
  Call call;
  return at::_local_scalar_dense(call.down(self));
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  if (self.device() != other.device()) refuse_mix("aten::equal", self.device(), other.device());
  if (self.sizes() != other.sizes()) return false;  // seen by the host
  waits("equal");
  Call call;
  return at::equal(call.down(self), call.down(other));
}

at::Tensor as_cpu(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kDev, "expected a tensor of dev, got one on ", tensor.device());
  Call call;
  return call.down(tensor.detach());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("equal", &equal);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  m.def("start", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("current_device", [] { return static_cast<int>(current_device); });
  m.def("set_device", [](int index) { DeviceGuard().setDevice(Device(kDev, index)); });
  m.def("default_generator", [](int index) { return default_generator(index); });
  m.def("as_cpu", &as_cpu);
  m.def("listen", [](py::object callback) {
    listening = false;
    delete listener;
    listener = callback.is_none() ? nullptr : new py::object(callback);
    listening = listener != nullptr;
  });
}
