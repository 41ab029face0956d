// The CUDA runtime, driver and cuBLAS of a machine without a GPU: preloaded, they report H100s to PyTorch's CUDA build.
//
// Memory of the "devices" is host memory. Copies and fills happen at once, in the calling thread. Kernels do nothing:
// launches return success, and site/emulate.py computes ATen's operations on the same bytes instead. streams.cpp has
// streams, events and graphs, nccl.cpp the collectives, nothing.c what needs only to succeed.

#include "streams.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#undef cudaGetDeviceProperties
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t MEMORY = 85028765696, SHARED_MEMORY = 232448, PAGE = 4096;
constexpr int VERSION = 13000, DEVICES = 8;

thread_local int current_device = 0;
std::atomic<bool> has_context[DEVICES];

// Allocations by start address. The kinds differ only in what cudaPointerGetAttributes says of them.
std::mutex allocations_lock;
struct Allocation { size_t bytes; cudaMemoryType type; int device; };
std::map<char*, Allocation> allocations;

cudaError_t allocate(void** result, size_t bytes, cudaMemoryType type) {
    if (int error = unsafe_call()) return cudaError_t(error);
    has_context[current_device] = true;
    bytes = bytes ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE;
    // Pages that nobody touches take no memory, so that allocations of a GPU's size succeed on small machines.
    void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return cudaErrorMemoryAllocation;
    std::lock_guard<std::mutex> guard(allocations_lock);
    allocations[static_cast<char*>(made)] = {bytes, type, current_device};
    *result = made;
    return cudaSuccess;
}

cudaError_t release(void* start) {
    if (!start) return cudaSuccess;
    if (int error = unsafe_call()) return cudaError_t(error);
    std::lock_guard<std::mutex> guard(allocations_lock);
    auto found = allocations.find(static_cast<char*>(start));
    if (found == allocations.end()) return cudaErrorInvalidValue;
    munmap(start, found->second.bytes);
    allocations.erase(found);
    return cudaSuccess;
}

int nothing() { return 0; }

// What Triton and torch ask of an H100, by numbers that runtime and driver share. Other attributes are flags: 1.
int attribute(int number) {
    switch (number) {
        case cudaDevAttrComputeCapabilityMajor: return 9;
        case cudaDevAttrComputeCapabilityMinor: return 0;
        case cudaDevAttrMultiProcessorCount: return 132;
        case cudaDevAttrMaxThreadsPerBlock: return 1024;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
        case cudaDevAttrMaxGridDimX: return 2147483647;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrClockRate: return 1980000;
        case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return SHARED_MEMORY;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return SHARED_MEMORY + 1024;
        default: return 1;
    }
}

}  // namespace

// Devices.

EXPORT cudaError_t cudaGetDeviceCount(int* count) { *count = DEVICES; return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= DEVICES) return cudaErrorInvalidDevice;
    has_context[current_device = device] = true;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
    std::memset(found, 0, sizeof *found);
    std::strcpy(found->name, "NVIDIA H100 80GB HBM3");
    std::memset(&found->uuid, device + 1, sizeof found->uuid);
    found->pciBusID = device + 1;
    found->totalGlobalMem = MEMORY, found->l2CacheSize = 52428800, found->memoryBusWidth = 5120;
    found->major = 9, found->multiProcessorCount = 132, found->warpSize = 32, found->textureAlignment = 512;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
    found->maxThreadsPerMultiProcessor = 2048, found->regsPerBlock = found->regsPerMultiprocessor = 65536;
    found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->sharedMemPerBlock = 49152, found->sharedMemPerBlockOptin = SHARED_MEMORY;
    found->sharedMemPerMultiprocessor = SHARED_MEMORY + 1024;
    found->unifiedAddressing = found->managedMemory = found->concurrentKernels = found->canMapHostMemory = 1;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr number, int) {
    *value = attribute(number);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
    std::snprintf(text, bytes, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int* version) { *version = VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { *version = VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
    *total = MEMORY, *available = MEMORY - (1 << 30);
    return cudaSuccess;
}
EXPORT const char* cudaGetErrorName(cudaError_t) { return "cudaErrorSoftwareGpu"; }

// Memory.

EXPORT cudaError_t cudaMalloc(void** result, size_t bytes) { return allocate(result, bytes, cudaMemoryTypeDevice); }
EXPORT cudaError_t cudaMallocAsync(void** result, size_t bytes, cudaStream_t) { return cudaMalloc(result, bytes); }
EXPORT cudaError_t cudaHostAlloc(void** result, size_t bytes, unsigned) {
    return allocate(result, bytes, cudaMemoryTypeHost);
}
EXPORT cudaError_t cudaFree(void* start) { return release(start); }
EXPORT cudaError_t cudaFreeAsync(void* start, cudaStream_t) { return release(start); }
EXPORT cudaError_t cudaFreeHost(void* start) { return release(start); }
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
    std::memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeUnregistered, found->device = -2;
    std::lock_guard<std::mutex> guard(allocations_lock);
    char* address = static_cast<char*>(const_cast<void*>(pointer));
    auto next = allocations.upper_bound(address);
    if (next == allocations.begin()) return cudaSuccess;
    auto [start, allocation] = *std::prev(next);
    if (address >= start + allocation.bytes) return cudaSuccess;
    found->type = allocation.type, found->device = allocation.device, found->devicePointer = address;
    if (allocation.type == cudaMemoryTypeHost) found->hostPointer = address;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return cudaError_t(launched(stream, [=] { std::memmove(to, from, bytes); return 0; }));
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    int error = unsafe_call();
    return error ? cudaError_t(error) : cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    return cudaError_t(launched(stream, [=] { std::memset(to, value, bytes); return 0; }));
}
EXPORT cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }
EXPORT cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static char symbols[1 << 16];
    *address = symbols;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
    *pool = reinterpret_cast<cudaMemPool_t>(1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
    std::memset(value, 0, sizeof(long));
    return cudaSuccess;
}

// Kernels of torch's own libraries, which do nothing.

EXPORT cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
    return cudaError_t(launched(stream, nothing));
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
    return cudaError_t(launched(config->stream, nothing));
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
    std::memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024, found->numRegs = 32, found->ptxVersion = found->binaryVersion = 90;
    found->maxDynamicSharedSizeBytes = SHARED_MEMORY;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                          unsigned) {
    *blocks = 2;
    return cudaSuccess;
}

// The driver, which Triton loads as libcuda.so.1: this library too. Modules and functions are any pointer but null.

namespace {
struct Launch { unsigned grid[3], block[3], shared_bytes; void* stream; };  // CUlaunchConfig begins so
int give(void** result) { *result = reinterpret_cast<void*>(0x70); return 0; }
}  // namespace

EXPORT int cuDeviceGet(int* device, int number) { *device = number; return 0; }
EXPORT int cuDeviceGetCount(int* count) { *count = DEVICES; return 0; }
EXPORT int cuDeviceGetAttribute(int* value, int number, int) { *value = attribute(number); return 0; }
EXPORT int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    *flags = 0, *active = has_context[device];
    return 0;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int) { return give(context); }
EXPORT int cuCtxGetCurrent(void** context) { return give(context); }
EXPORT int cuCtxGetDevice(int* device) { *device = current_device; return 0; }
EXPORT int cuCtxGetLimit(size_t* value, int) { *value = 0; return 0; }
EXPORT int cuStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    return cudaStreamIsCapturing(stream, status);
}
EXPORT int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream,
                          void**, void**) {
    return launched(stream, nothing);
}
EXPORT int cuLaunchKernelEx(const Launch* launch, void*, void**, void**) { return launched(launch->stream, nothing); }
EXPORT int cuModuleLoad(void** module, const char*) { return give(module); }
EXPORT int cuModuleLoadData(void** module, const void*) { return give(module); }
EXPORT int cuModuleLoadDataEx(void** module, const void*) { return give(module); }
EXPORT int cuModuleGetFunction(void** function, void*, const char*) { return give(function); }
EXPORT int cuFuncGetAttribute(int* value, int number, void*) {
    *value = number == 0 ? 1024 : number == 4 ? 32 : 0;  // threads of a block, registers; no spills, no shared memory
    return 0;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, ...) { *blocks = 2; return 0; }
EXPORT int cuOccupancyMaxActiveClusters(int* clusters, ...) { *clusters = 2; return 0; }
EXPORT int cuPointerGetAttribute(void* value, int, unsigned long long pointer) {
    std::memcpy(value, &pointer, sizeof pointer);  // the address of a device pointer is itself
    return 0;
}
EXPORT int cuGetErrorString(int, const char** text) { *text = "an error of the software GPU"; return 0; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
    void* ours = dlsym(RTLD_DEFAULT, name);
    *function = ours ? ours : dlsym(RTLD_DEFAULT, "cuInit");
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// cuBLAS. Handles and descriptors are memory that nobody reads.

EXPORT int cublasCreate_v2(void** handle) { *handle = std::malloc(64); return 0; }
EXPORT int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
EXPORT int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
EXPORT size_t cublasLtGetVersion() { return 130100; }
EXPORT int cublasLtMatmulDescCreate(void** made, ...) { *made = std::calloc(1, 256); return 0; }
EXPORT int cublasLtMatmulPreferenceCreate(void** made) { *made = std::calloc(1, 256); return 0; }
EXPORT int cublasLtMatrixLayoutCreate(void** made, ...) { *made = std::calloc(1, 256); return 0; }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results,
                                          int* count) {
    std::memset(results, 0, 96), *count = 1;
    return 0;
}
EXPORT int cublasLtMatmulDescDestroy(void* made) { std::free(made); return 0; }
EXPORT int cublasLtMatmulPreferenceDestroy(void* made) { std::free(made); return 0; }
EXPORT int cublasLtMatrixLayoutDestroy(void* made) { std::free(made); return 0; }
