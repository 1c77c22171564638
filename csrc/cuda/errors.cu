// What a returned cudaError_t is called.
#include "launch.h"

#ifdef __CUDACC__
DS_KFAC_API const char *ds_kfac_cuda_error_name(int error) {
    return cudaGetErrorName(static_cast<cudaError_t>(error));
}
DS_KFAC_API const char *ds_kfac_cuda_error_text(int error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}
#else
DS_KFAC_API const char *ds_kfac_cuda_error_name(int) { return "emulation"; }
DS_KFAC_API const char *ds_kfac_cuda_error_text(int) { return "the emulation has no errors"; }
#endif
