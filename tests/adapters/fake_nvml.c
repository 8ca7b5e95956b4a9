/* A stand-in for libnvidia-ml.so.1, built by test_nvml.py and loaded by the real pynvml.
 *
 * The environment says what the machine is like: FAKE_NVML_GPUS (default 3), FAKE_NVML_INIT (a return code).
 * Device 0 works; 1 supports neither utilization nor power (as under MIG) and has only the old memory call;
 * 2 is lost once the file FAKE_NVML_LOST exists; 3 may not be opened (no permission).
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, NO_PERMISSION = 4, NOT_SUPPORTED = 3, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15 };
typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2_t;

static int number(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}
static int index_of(void *device) { return (int)(long)device - 100; }
static int state(void *device) {
    const char *lost = getenv("FAKE_NVML_LOST");
    return index_of(device) == 2 && lost && access(lost, F_OK) == 0 ? GPU_IS_LOST : OK;
}

int nvmlInitWithFlags(unsigned int flags) { (void)flags; return number("FAKE_NVML_INIT", OK); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "fake error"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = number("FAKE_NVML_GPUS", 3); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    *device = (void *)(long)(index + 100);
    return index == 3 ? NO_PERMISSION : state(*device);
}
int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    strncpy(name, index_of(device) == 1 ? "NVIDIA A100-SXM4-80GB" : "NVIDIA H100 80GB HBM3", length);
    return state(device);
}
int nvmlDeviceGetUtilizationRates(void *device, utilization_t *rates) {
    if (index_of(device) == 1) return NOT_SUPPORTED;
    rates->gpu = 73; rates->memory = 40;
    return state(device);
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    memory->total = 80ULL << 30; memory->used = 20ULL << 30; memory->free = 60ULL << 30;
    return state(device);
}
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *memory) {
    if (index_of(device) == 1) return FUNCTION_NOT_FOUND;
    memory->total = 80ULL << 30; memory->reserved = 1ULL << 30; memory->used = 10ULL << 30; memory->free = 69ULL << 30;
    return state(device);
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
    (void)sensor; *celsius = 61;
    return state(device);
}
int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
    if (index_of(device) == 1) return NOT_SUPPORTED;
    *milliwatts = 312500;
    return state(device);
}
