// The CUDA driver functions that a launch needs, found at run time: no CUDA header and no CUDA library is needed to
// build, and none but the driver to run. Declarations follow the driver's C ABI.
#pragma once
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace moeflex {
namespace cuda {

using Context = void*;
using Module = void*;
using Function = void*;
using Stream = void*;
using Graph = void*;
using UserObject = void*;
using DeviceAddress = unsigned long long;

// CUtensorMap, passed to kernels by value.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

struct LaunchAttribute {
    int id;
    char pad[4];
    int value[16];
};

struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    Stream stream;
    LaunchAttribute* attributes;
    unsigned num_attributes;
};

enum {
    kCooperative = 2,            // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    kMaxDynamicSharedBytes = 8,  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    kNumMultiprocessors = 16,    // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    kCapabilityMajor = 75,       // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    kCapabilityMinor = 76,       // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    kTypeFloat16 = 6,            // CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    kTypeBfloat16 = 9,           // CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    kSwizzle128 = 3,             // CU_TENSOR_MAP_SWIZZLE_128B
    kPromote128 = 2,             // CU_TENSOR_MAP_L2_PROMOTION_L2_128B
    kCaptureActive = 1,          // CU_STREAM_CAPTURE_STATUS_ACTIVE
    kCaptureRelaxed = 2,         // CU_STREAM_CAPTURE_MODE_RELAXED
    kNonBlocking = 1,            // CU_STREAM_NON_BLOCKING
    kNoDestructorSync = 1,       // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    kMoveReference = 1,          // CU_GRAPH_USER_OBJECT_MOVE
};

#define MOEFLEX_DRIVER_FUNCTIONS(X)                                                               \
    X(cuInit, (unsigned))                                                                         \
    X(cuGetErrorName, (int, const char**))                                                        \
    X(cuDeviceGet, (int*, int))                                                                   \
    X(cuDeviceGetAttribute, (int*, int, int))                                                     \
    X(cuDevicePrimaryCtxRetain, (Context*, int))                                                  \
    X(cuCtxGetCurrent, (Context*))                                                                \
    X(cuCtxPushCurrent_v2, (Context))                                                             \
    X(cuCtxPopCurrent_v2, (Context*))                                                             \
    X(cuModuleLoadData, (Module*, const void*))                                                   \
    X(cuModuleGetFunction, (Function*, Module, const char*))                                      \
    X(cuFuncSetAttribute, (Function, int, int))                                                   \
    X(cuLaunchKernelEx, (const LaunchConfig*, Function, void**, void**))                          \
    X(cuTensorMapEncodeTiled,                                                                     \
      (TensorMap*, int, unsigned, const void*, const uint64_t*, const uint64_t*, const uint32_t*, \
       const uint32_t*, int, int, int, int))                                                      \
    X(cuMemAlloc_v2, (DeviceAddress*, size_t))                                                    \
    X(cuMemsetD8Async, (DeviceAddress, unsigned char, size_t, Stream))                            \
    X(cuStreamCreate, (Stream*, unsigned))                                                        \
    X(cuStreamDestroy_v2, (Stream))                                                               \
    X(cuStreamSynchronize, (Stream))                                                              \
    X(cuStreamGetCaptureInfo_v2, (Stream, int*, uint64_t*, Graph*, const void**, size_t*))        \
    X(cuThreadExchangeStreamCaptureMode, (int*))                                                  \
    X(cuUserObjectCreate, (UserObject*, void*, void (*)(void*), unsigned, unsigned))              \
    X(cuGraphRetainUserObject, (Graph, UserObject, unsigned, unsigned))

struct Driver {
#define MOEFLEX_DECLARE(name, arguments) int(*name) arguments = nullptr;
    MOEFLEX_DRIVER_FUNCTIONS(MOEFLEX_DECLARE)
#undef MOEFLEX_DECLARE

    void check(int code, const std::string& what) const {
        if (code == 0) return;
        const char* name = nullptr;
        cuGetErrorName(code, &name);
        throw std::runtime_error("moeflex::moe_layer: " + what +
                                 " failed: " + (name ? name : "unknown error") + " (" +
                                 std::to_string(code) + ")");
    }
};

// The driver of this machine; never unloaded.
inline const Driver& driver() {
    static const Driver* const one = [] {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        if (!library)
            throw std::runtime_error(
                "moeflex::moe_layer: a launch needs the NVIDIA driver (libcuda.so.1), which was "
                "not found");
        auto* found = new Driver;
        const auto load = [library](const char* name) {
            void* function = dlsym(library, name);
            if (!function)
                throw std::runtime_error(
                    std::string("moeflex::moe_layer: the NVIDIA driver has no ") + name +
                    "; moeflex needs a driver for CUDA 12 or newer");
            return function;
        };
#define MOEFLEX_LOAD(name, arguments) found->name = (int(*) arguments)load(#name);
        MOEFLEX_DRIVER_FUNCTIONS(MOEFLEX_LOAD)
#undef MOEFLEX_LOAD
        found->check(found->cuInit(0), "cuInit");
        return found;
    }();
    return *one;
}

// Calls that a capturing thread may make only when it asks for them.
class RelaxedCapture {
  public:
    explicit RelaxedCapture(const Driver& driver) : driver_(driver) {
        driver_.check(driver_.cuThreadExchangeStreamCaptureMode(&mode_), "relaxing the capture");
    }
    RelaxedCapture(const RelaxedCapture&) = delete;
    ~RelaxedCapture() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }

  private:
    const Driver& driver_;
    int mode_ = kCaptureRelaxed;
};

// Makes `context` current in this scope.
class Current {
  public:
    Current(const Driver& driver, Context context) : driver_(driver) {
        Context now = nullptr;
        driver_.check(driver_.cuCtxGetCurrent(&now), "cuCtxGetCurrent");
        if (now == context) return;
        driver_.check(driver_.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
        pushed_ = true;
    }
    Current(const Current&) = delete;
    ~Current() {
        Context popped;
        if (pushed_) driver_.cuCtxPopCurrent_v2(&popped);
    }

  private:
    const Driver& driver_;
    bool pushed_ = false;
};

}  // namespace cuda
}  // namespace moeflex
