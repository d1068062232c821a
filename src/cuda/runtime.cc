#include "cuda/runtime.h"

#include <cuda.h>

#include <atomic>
#include <string>

#include "cuda/cuda.h"
#include "environment.h"

namespace kda::cuda {
namespace {

// The GPU that explain and workspace answer for, if it is not the machine's.
struct AssumedGpu {
  int capability = 0;  // 10 * major + minor; 0: none is assumed
  int multiprocessors = 0;
};
thread_local AssumedGpu assumed;

// Bytes of shared memory that a block may have at most, by compute capability (CUDA programming guide, technical
// specifications).
constexpr struct {
  int capability, shared_memory;
} kKnownGpus[] = {{80, 163 << 10},  {86, 99 << 10},   {89, 99 << 10}, {90, 227 << 10},
                  {100, 227 << 10}, {103, 227 << 10}, {120, 99 << 10}};

// "13.0" of the 13000 of CUDA's functions.
std::string version_of(int number) { return str(number / 1000, ".", number % 1000 / 10); }

// A runtime runs with every driver of its own major version and newer ones (CUDA compatibility guide). People know
// drivers by their branch.
std::string needed_driver() {
  constexpr int kMajor = CUDART_VERSION / 1000;
  constexpr int kBranch = kMajor == 13 ? 580 : kMajor == 12 ? 525 : 0;
  return str("a driver for CUDA ", kMajor, ".0 or newer", kBranch ? str(" (R", kBranch, ")") : "");
}

thread_local std::string text;  // of without_devices

// Why there are no devices, which the last call of cudaGetDeviceCount said. Every thread has its own text.
const char* without_devices(cudaError_t error) {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  cudaGetLastError();  // the failure must not surface in a later launch
  if (error == cudaErrorInitializationError && forked())
    return "cannot run in a process forked from one that used CUDA, which does not survive that: spawn it instead";
  if (driver == 0) return "found no CUDA driver";
  if (error == cudaErrorInsufficientDriver)
    text = str("needs ", needed_driver(), ", got one for CUDA ", version_of(driver));
  else if (error == cudaSuccess || error == cudaErrorNoDevice) text = "found a CUDA driver, but no device";
  else
    text = str("asked CUDA for its devices and got: ", cudaGetErrorString(error), " (", static_cast<int>(error), ")");
  return text.c_str();
}

// The facts of each device, packed in one number, so that threads that ask at once need no lock: SMs, capability and
// KiB of shared memory, 16 bits each. 0: nobody has asked.
constexpr int kDevices = 64;  // those beyond are asked each time
std::atomic<uint64_t> known_facts[kDevices];

constexpr uint64_t packed(const DeviceFacts& f) {
  return static_cast<uint64_t>(f.multiprocessors) << 32 | static_cast<uint64_t>(f.capability) << 16 |
         static_cast<uint64_t>(f.shared_memory >> 10);
}
constexpr DeviceFacts unpacked(uint64_t x) {
  return {static_cast<int>(x >> 16 & 0xffff), static_cast<int>(x >> 32), static_cast<int>((x & 0xffff) << 10)};
}

DeviceFacts ask_facts(int device) {
  int major = 0, minor = 0;
  DeviceFacts facts{};
  KDA_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  KDA_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  KDA_CUDA(cudaDeviceGetAttribute(&facts.multiprocessors, cudaDevAttrMultiProcessorCount, device));
  KDA_CUDA(cudaDeviceGetAttribute(&facts.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  facts.capability = 10 * major + minor;
  return facts;
}

// What the table knows, or 0. In a forked process CUDA no longer runs, whatever the table says.
uint64_t known_of(int device) {
  return device >= 0 && device < kDevices && !forked() ? known_facts[device].load(std::memory_order_relaxed) : 0;
}

}  // namespace

void assume_gpu(int capability, int count) {
  std::string known;
  for (const auto& gpu : kKnownGpus) {
    if (gpu.capability == capability && count >= 1) return void(assumed = {capability, count});
    known += str(known.empty() ? "" : ", ", gpu.capability);
  }
  if (capability == 0) return void(assumed = {});
  if (count < 1) invalid("multiprocessors: expected at least 1, got ", count);
  invalid("capability: expected 0 or one of ", known, ", got ", capability);
}

bool is_built() { return KDA_WITH_CUDA; }
bool gpu_is_assumed() { return assumed.capability != 0; }

const char* device_why_not(const kda_exec& exec) {
  if (exec.device != KDA_CUDA) return "runs on CUDA tensors only";
  if (gpu_is_assumed()) return nullptr;  // none of them is older than 8.0
  if (!is_built()) return "needs a library that was built with CUDA";
  if (!known_of(exec.device_id)) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) return without_devices(error);  // which may leave `count` alone
    if (exec.device_id >= count) return "found fewer CUDA devices than exec.device_id asks for";
  }
  return facts_of(exec.device_id).capability >= 80 ? nullptr : "needs compute capability 8.0 or newer";
}

DeviceFacts facts_of(int device) {
  for (const auto& gpu : kKnownGpus)
    if (gpu.capability == assumed.capability) return {gpu.capability, assumed.multiprocessors, gpu.shared_memory};
  if (const uint64_t known = known_of(device)) return unpacked(known);
  const DeviceFacts facts = ask_facts(device);
  if (device < kDevices) known_facts[device].store(packed(facts), std::memory_order_relaxed);
  return facts;
}

void forget_facts() {
  for (auto& facts : known_facts) facts.store(0, std::memory_order_relaxed);
}

// Asks the driver, to which this library is not linked. One that cannot say has made a context before, as all do.
bool DeviceGuard::has_context(int device) {
  using StateOf = CUresult (*)(CUdevice, unsigned*, int*);
  static const auto state_of = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &entry, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<StateOf>(entry);
  }();
  unsigned flags = 0;
  int active = 1;
  return !state_of || state_of(device, &flags, &active) != CUDA_SUCCESS || active;
}

bool KernelCode::ask(const void* kernel, int device, int shared_bytes) {
  cudaFuncAttributes code;
  KDA_CUDA(cudaFuncGetAttributes(&code, kernel));
  const auto own = static_cast<uint32_t>(code.sharedSizeBytes);
  uint32_t known = kAsked | own;
  // A GPU of 9.0 or newer may run what the driver has made from older PTX: the binary's version says nothing then.
  if (code.ptxVersion >= 90) known |= kWaits;
  if (own + static_cast<uint32_t>(shared_bytes) > kUsual) {
    KDA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  shared_memory_of_block(device) - static_cast<int>(own)));
    known |= kMayHaveAll;
  }
  if (device < kDevices) known_[device].fetch_or(known, std::memory_order_release);
  return known & kWaits;
}

// The same for code of one compute capability, of which there is no PTX.
static const char* capability_why_not(int device, int capability, const char* other) {
  if (facts_of(device).capability != capability) return other;
  return environment().force_ptx && !gpu_is_assumed() ? "has no PTX, which CUDA_FORCE_PTX_JIT asks for" : nullptr;
}
const char* hopper_why_not(int device) {
  return capability_why_not(device, 90, "needs compute capability 9.0 (Hopper)");
}
const char* blackwell_why_not(int device) {
  return capability_why_not(device, 100, "needs compute capability 10.0 (Blackwell)");
}
const char* blackwell_unsuited() {
  return environment().blackwell ? nullptr : "emulated, never run on a GPU: KDA_BLACKWELL=1 chooses it";
}

std::string info() {
  if (!is_built()) return "not built (no CUDA compiler was found, or KDA_CUDA=OFF)";
  std::string text = str("CUDA ", version_of(CUDART_VERSION), ", kernels for ", KDA_CUDA_ARCHITECTURES);
  int driver = 0, count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) return str(text, "; ", without_devices(error));
  if (cudaDriverGetVersion(&driver) == cudaSuccess) text += str("; driver for CUDA ", version_of(driver));
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, i) == cudaSuccess)
      text += str("; device ", i, ": ", properties.name, " (sm_", properties.major, properties.minor, ")");
  }
  return text;
}

}  // namespace kda::cuda
