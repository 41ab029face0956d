// Functions of the CUDA runtime, its driver and cuBLAS that do nothing and succeed, whatever their arguments are.
// In C, and apart from CUDA's headers, because such definitions differ from the declarations.

#define SUCCEEDS(name) \
    int name() { return 0; }

// runtime
SUCCEEDS(cudaDeviceEnablePeerAccess) SUCCEEDS(cudaGetLastError) SUCCEEDS(cudaPeekAtLastError)
SUCCEEDS(cudaProfilerStart) SUCCEEDS(cudaProfilerStop) SUCCEEDS(cudaStreamDestroy)
SUCCEEDS(cudaHostRegister) SUCCEEDS(cudaHostUnregister) SUCCEEDS(cudaMemcpyToSymbol) SUCCEEDS(cudaMemPoolSetAttribute)
SUCCEEDS(cudaFuncSetAttribute)

// driver
SUCCEEDS(cuInit) SUCCEEDS(cuCtxSetCurrent) SUCCEEDS(cuCtxSetLimit) SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig) SUCCEEDS(cuLaunchCooperativeKernel) SUCCEEDS(cuLinkCreate_v2) SUCCEEDS(cuLinkAddData_v2)
SUCCEEDS(cuLinkComplete) SUCCEEDS(cuMemcpy) SUCCEEDS(cuModuleUnload) SUCCEEDS(cuPointerGetAttributes)
SUCCEEDS(cuTensorMapEncodeTiled) SUCCEEDS(cuTensorMapEncodeIm2col)

// cuBLAS
SUCCEEDS(cublasDestroy_v2) SUCCEEDS(cublasSetStream_v2) SUCCEEDS(cublasSetWorkspace_v2) SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2) SUCCEEDS(cublasGemmEx) SUCCEEDS(cublasGemmStridedBatchedEx) SUCCEEDS(cublasSgemm_v2)
SUCCEEDS(cublasDgemm_v2) SUCCEEDS(cublasSgemmEx) SUCCEEDS(cublasSgemmStridedBatched) SUCCEEDS(cublasDgemmStridedBatched)
SUCCEEDS(cublasSgemv_v2) SUCCEEDS(cublasDgemv_v2) SUCCEEDS(cublasSdot_v2) SUCCEEDS(cublasDdot_v2) SUCCEEDS(cublasDotEx)
SUCCEEDS(cublasLtMatmul) SUCCEEDS(cublasLtMatmulDescSetAttribute) SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
