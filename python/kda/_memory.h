// Scratch memory on a GPU where no argument's framework has an allocator: from the driver's own, which takes and gives
// back memory in the order of a stream, as a framework's allocator does.
#pragma once
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kda::binding {

// Why there is no memory.
struct MemoryFailure {
  bool full;  // or the driver has failed
  std::string text;
};

// What is needed of libcuda. Its types are spelled out, because the binding is compiled without CUDA, too.
struct Driver {
  using Context = void*;
  using Address = unsigned long long;

  int (*get_device)(int* device, int number);
  int (*retain)(Context* context, int device);
  int (*release)(int device);
  int (*push)(Context context);
  int (*pop)(Context* context);
  int (*allocate)(Address* address, size_t bytes, void* stream);
  int (*free)(Address address, void* stream);

  // The driver of this process, which whoever has made the arrays has loaded before.
  static const Driver& loaded() {
    static const Driver driver = load();
    return driver;
  }

 private:
  template <class F>
  static void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (!function) throw MemoryFailure{false, std::string("the driver of CUDA has no ") + name};
  }
  static Driver load() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) throw MemoryFailure{false, std::string("the driver of CUDA was not found: ") + dlerror()};
    Driver d;
    find(library, "cuDeviceGet", d.get_device);
    find(library, "cuDevicePrimaryCtxRetain", d.retain);
    find(library, "cuDevicePrimaryCtxRelease_v2", d.release);
    find(library, "cuCtxPushCurrent_v2", d.push);
    find(library, "cuCtxPopCurrent_v2", d.pop);
    find(library, "cuMemAllocAsync", d.allocate);
    find(library, "cuMemFreeAsync", d.free);
    return d;
  }
};

// Memory of a stream. What the stream does before the end of this object may use it; the end waits for nothing.
class StreamMemory {
 public:
  StreamMemory(int number, void* stream, uint64_t bytes, const Driver& driver = Driver::loaded())
      : driver_(driver), stream_(stream) {
    if (driver.get_device(&device_, number) || driver.retain(&context_, device_))
      throw MemoryFailure{false, "the driver of CUDA has no device " + std::to_string(number)};
    int status = driver.push(context_);  // a default stream is that of the current device
    if (status == 0) {
      status = driver.allocate(&address_, bytes, stream);
      pop();
    }
    if (status == 0) return;
    driver.release(device_);
    throw MemoryFailure{status == kFull, "could not allocate " + std::to_string(bytes) + " bytes (CUDA driver error " +
                                             std::to_string(status) + ")"};
  }
  ~StreamMemory() {
    if (driver_.push(context_) == 0) {
      driver_.free(address_, stream_);
      pop();
    }
    driver_.release(device_);
  }
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  void* data() const { return reinterpret_cast<void*>(static_cast<uintptr_t>(address_)); }

 private:
  static constexpr int kFull = 2;  // CUDA_ERROR_OUT_OF_MEMORY

  void pop() {
    Driver::Context own;
    driver_.pop(&own);
  }

  const Driver& driver_;
  void* stream_;
  int device_ = 0;
  Driver::Context context_ = nullptr;
  Driver::Address address_ = 0;
};

}  // namespace kda::binding
