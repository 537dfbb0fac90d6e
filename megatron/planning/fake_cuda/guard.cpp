// A CUDA device for fake tensors on a machine without one: torch asks these objects for devices, streams and
// generators. No kernel ever runs. Loaded before torch is imported, see shim.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device kDevice(c10::DeviceType::CUDA, 0);

struct Guard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = nullptr; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::DEFAULT, kDevice); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kDevice); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// What torch would take on a GPU of compute capability 9.0: the first kernel that is switched on and takes
// the call. Without this it would be mathematics, with its scores of seq x seq.
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask,
    double, bool, std::optional<double>, bool) {
  const auto& context = at::globalContext();
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  auto chosen = at::SDPBackend::error;
  if (half && context.userEnabledCuDNNSDP()) {
    chosen = at::SDPBackend::cudnn_attention;
  } else if (half && !mask.has_value() && context.userEnabledFlashSDP()) {
    chosen = at::SDPBackend::flash_attention;
  } else if (context.userEnabledMemEfficientSDP()) {
    chosen = at::SDPBackend::efficient_attention;
  } else if (context.userEnabledMathSDP()) {
    chosen = at::SDPBackend::math;
  }
  TORCH_CHECK(chosen != at::SDPBackend::error, "No available kernel. Aborting execution.");
  return static_cast<int64_t>(chosen);
}

}  // namespace

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

namespace native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

}  // namespace at
