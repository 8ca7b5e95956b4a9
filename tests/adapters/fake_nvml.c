/* A stand-in for libnvidia-ml.so.1, built by tests and benchmarks and loaded by the real pynvml.
 *
 * FAKE_NVML_GPUS: how many (default 3). FAKE_NVML_INIT: what nvmlInit returns. FAKE_NVML_CALL_US="50:1000": every
 * call on a device waits that long, by chance, small waits as likely as large ones (log-uniform). FAKE_NVML_WINDOW_MS:
 * the driver samples utilization that often, and keeps the last 100.
 * FAKE_NVML_SCRIPT names a file that may change at any time, a line each; `*` is every device, every function:
 *     DEVICE FUNCTION error CODE       DEVICE FUNCTION delay_ms MS       DEVICE - mig INSTANCES
 *     DEVICE FIELD value NUMBER        DEVICE TIME_US sample PERCENT     DEVICE - xid NUMBER
 * Later lines win. An instance of device N has the number 100 * (N + 1) + its own.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { OK, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
enum { HANDLE = 100000, MAX_LINES = 256, KEPT_SAMPLES = 100 };
typedef unsigned int uint;
typedef unsigned long long ull;
typedef struct { int device; char name[64], what[16]; ull number; } line_t;
typedef union { double d; uint ui; ull u; } value_t;

static const char *script(void) {
    static const char *path;
    static int known;
    if (!known) { path = getenv("FAKE_NVML_SCRIPT"); known = 1; }
    return path;
}

/* The script is read anew before each call that it could change: a test's next read sees what it wrote. */
static int lines(line_t *out) {
    int count = 0;
    char device[16], text[160];
    FILE *file = script() ? fopen(script(), "r") : NULL;
    if (!file) return 0;
    while (count < MAX_LINES && fgets(text, sizeof text, file)) {
        line_t *l = out + count;
        if (sscanf(text, "%15s %63s %15s %llu", device, l->name, l->what, &l->number) != 4) continue;
        l->device = device[0] == '*' ? -1 : atoi(device);
        count++;
    }
    fclose(file);
    return count;
}
static int find(int device, const char *name, const char *what, ull *number) {
    line_t all[MAX_LINES];
    int found = 0;
    for (int i = 0, n = lines(all); i < n; i++) {
        int here = all[i].device < 0 || all[i].device == device;
        int named = !strcmp(all[i].name, "*") || !strcmp(all[i].name, name);
        if (here && named && !strcmp(all[i].what, what)) { *number = all[i].number; found = 1; }
    }
    return found;
}
static ull value(int device, const char *field, ull otherwise) {
    if (script()) find(device, field, "value", &otherwise);
    return otherwise;
}
static void wait_us(double us) {
    struct timespec t = { (time_t)(us / 1e6), (long)(fmod(us, 1e6) * 1e3) };
    nanosleep(&t, NULL);
}
static int scripted(int device, const char *function) {
    ull number;
    if (!script()) return OK;
    if (find(device, function, "delay_ms", &number)) wait_us(number * 1e3);
    return find(device, function, "error", &number) ? (int)number : OK;
}
static int enter(int device, const char *function) {
    static double low = -1, high;
    static __thread unsigned short seed[3] = { 1, 2, 3 };
    if (low < 0) {
        const char *us = getenv("FAKE_NVML_CALL_US");
        if (!us || sscanf(us, "%lf:%lf", &low, &high) != 2) low = high = 0;
    }
    if (high > 0) wait_us(low * pow(high / low, erand48(seed)));
    return scripted(device, function);
}
static int index_of(void *device) { return (int)((long)device - HANDLE); }
static int parent_of(int device) { return device < 100 ? device : device / 100 - 1; }
static int number_of(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
static ull now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000ULL + t.tv_nsec / 1000;
}

#define ENTER(handle) int d = index_of(handle), rc = enter(d, __func__); if (rc) return rc; (void)d
#define TELLS(function, type, field, otherwise) \
    int function(void *handle, type *out) { ENTER(handle); *out = (type)value(d, field, otherwise); return OK; }

int nvmlInitWithFlags(uint flags) { (void)flags; return number_of("FAKE_NVML_INIT", OK); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "fake error"; }
int nvmlSystemGetDriverVersion(char *text, uint length) { strncpy(text, "570.86.15", length); return OK; }
int nvmlDeviceGetCount_v2(uint *count) { *count = number_of("FAKE_NVML_GPUS", 3); return OK; }
int nvmlDeviceGetHandleByIndex_v2(uint index, void **device) {
    *device = (void *)(long)(HANDLE + index);
    return enter((int)index, __func__);
}
int nvmlDeviceGetIndex(void *handle, uint *index) { ENTER(handle); *index = (uint)d; return OK; }
int nvmlDeviceGetName(void *handle, char *name, uint length) {
    ENTER(handle);
    strncpy(name, d < 100 ? "NVIDIA H100 80GB HBM3" : "NVIDIA H100 80GB HBM3 MIG 1g.10gb", length);
    return OK;
}
int nvmlDeviceGetUUID(void *handle, char *uuid, uint length) {
    ENTER(handle);
    snprintf(uuid, length, "%s-%08d-0000-0000-0000-000000000000", d < 100 ? "GPU" : "MIG", d);
    return OK;
}
typedef struct { uint gpu, memory; } utilization_t;
int nvmlDeviceGetUtilizationRates(void *handle, utilization_t *rates) {
    ENTER(handle);
    if (d >= 100) return NOT_SUPPORTED;
    rates->gpu = (uint)value(d, "utilization", 73);
    rates->memory = 40;
    return OK;
}
typedef struct { ull total, free, used; } memory_t;
int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) { /* counts the driver's own reserve as used */
    ENTER(handle);
    memory->total = value(d, "total_mib", 81920) << 20;
    memory->used = (value(d, "used_mib", 10240) + value(d, "reserved_mib", 1024)) << 20;
    memory->free = memory->total - memory->used;
    return OK;
}
typedef struct { uint version; ull total, reserved, free, used; } memory_v2_t;
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory) {
    ENTER(handle);
    memory->total = value(d, "total_mib", 81920) << 20;
    memory->used = value(d, "used_mib", 10240) << 20;
    memory->reserved = value(d, "reserved_mib", 1024) << 20;
    memory->free = memory->total - memory->used - memory->reserved;
    return OK;
}
int nvmlDeviceGetTemperature(void *handle, int sensor, uint *celsius) {
    ENTER(handle);
    (void)sensor; *celsius = (uint)value(d, "celsius", 61);
    return d < 100 ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetPowerUsage(void *handle, uint *milliwatts) {
    ENTER(handle);
    *milliwatts = (uint)value(d, "milliwatts", 312500);
    return d < 100 ? OK : NOT_SUPPORTED;
}
TELLS(nvmlDeviceGetEnforcedPowerLimit, uint, "limit_milliwatts", 700000)
TELLS(nvmlDeviceGetFanSpeed, uint, "fan", 0)
int nvmlDeviceGetEncoderUtilization(void *handle, uint *percent, uint *us) { /* these are for peers of ours */
    ENTER(handle);
    *percent = 0; *us = 167000;
    return OK;
}
int nvmlDeviceGetDecoderUtilization(void *handle, uint *percent, uint *us) {
    ENTER(handle);
    *percent = 0; *us = 167000;
    return OK;
}
int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, ull *count) {
    ENTER(handle);
    (void)counter; *count = value(d, type ? "ecc_uncorrected" : "ecc_corrected", 0);
    return OK;
}
TELLS(nvmlDeviceGetCurrentClocksEventReasons, ull, "throttle", 0)
TELLS(nvmlDeviceGetCurrentClocksThrottleReasons, ull, "throttle", 0)
int nvmlDeviceGetClockInfo(void *handle, int type, uint *mhz) {
    ENTER(handle);
    *mhz = (uint)(type == 2 ? value(d, "memory_mhz", 2619) : value(d, "sm_mhz", 1980));
    return OK;
}
typedef struct { ull t_us; value_t value; } sample_t;
int nvmlDeviceGetSamples(void *handle, int type, ull since_us, int *value_type, uint *count, sample_t *out) {
    static int window_ms = -1;
    line_t all[MAX_LINES];
    uint found = 0;
    ENTER(handle);
    if (window_ms < 0) window_ms = number_of("FAKE_NVML_WINDOW_MS", 0);
    if (type != 1 || d >= 100) return NOT_SUPPORTED;
    *value_type = 1; /* unsigned int */
    if (!out && since_us == 0) { *count = KEPT_SAMPLES; return OK; } /* as the driver: the size of its buffer */
    if (window_ms) {
        ull step = window_ms * 1000ULL, last = now_us() / step;
        for (ull k = last > KEPT_SAMPLES ? last - KEPT_SAMPLES + 1 : 0; k <= last; k++)
            if (k * step > since_us && (!out || found < *count)) {
                if (out) out[found] = (sample_t){ k * step, { .ui = (uint)(k * 7919 % 101) } };
                found++;
            }
    } else {
        int any = 0;
        for (int i = 0, n = script() ? lines(all) : 0; i < n; i++)
            if ((all[i].device < 0 || all[i].device == d) && !strcmp(all[i].what, "sample")) {
                any = 1;
                if (strtoull(all[i].name, NULL, 10) <= since_us || (out && found >= *count)) continue;
                if (out) out[found] = (sample_t){ strtoull(all[i].name, NULL, 10), { .ui = (uint)all[i].number } };
                found++;
            }
        if (!any) return NOT_SUPPORTED;
    }
    *count = found;
    return found ? OK : NOT_FOUND;
}
typedef struct { uint id, scope; long long t_us, latency_us; int type, rc; value_t value; } field_t;
int nvmlDeviceGetFieldValues(void *handle, int count, field_t *fields) {
    /* What one call of the driver tells is told together (nvml.h), so that a kind of counter waits once. */
    static const struct { uint id; const char *name; int type; ull otherwise; int kind; } known[] = {
        { 185, "power_average", 1, 312500, 0 }, { 3, "ecc_corrected", 3, 0, 1 }, { 4, "ecc_uncorrected", 3, 0, 1 },
        { 138, "nvlink_tx_kib", 3, 0, 2 }, { 139, "nvlink_rx_kib", 3, 0, 2 },
        { 197, "pcie_tx_bytes", 3, 0, 3 }, { 198, "pcie_rx_bytes", 3, 0, 3 },
    };
    int waited[4] = { 1 }; /* the first kind is what ENTER waits for */
    ENTER(handle);
    for (int i = 0; i < count; i++) {
        fields[i].rc = NOT_SUPPORTED;
        for (uint k = 0; k < sizeof known / sizeof *known; k++)
            if (fields[i].id == known[k].id) {
                fields[i].type = known[k].type;
                fields[i].value.u = value(d, known[k].name, known[k].otherwise);
                fields[i].t_us = (long long)value(d, "field_us", now_us());
                fields[i].rc = waited[known[k].kind] ? scripted(d, known[k].name) : enter(d, known[k].name);
                waited[known[k].kind] = 1;
            }
    }
    return OK;
}
typedef struct { uint pid; ull used; uint gpu_instance, compute_instance; } process_t;
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, uint *count, process_t *out) {
    uint room = *count, found = 0;
    line_t all[MAX_LINES];
    ENTER(handle);
    for (int i = 0, n = script() ? lines(all) : 0; i < n; i++)
        if (all[i].device == d && !strcmp(all[i].what, "pid_mib")) {
            if (found < room && out) out[found] = (process_t){ (uint)atoi(all[i].name), all[i].number << 20, ~0u, ~0u };
            found++;
        }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, uint *count, process_t *out) {
    ENTER(handle);
    (void)out; *count = 0;
    return OK;
}
int nvmlDeviceGetMigMode(void *handle, uint *current, uint *pending) {
    ull instances = 0;
    ENTER(handle);
    *current = *pending = script() && find(d, "-", "mig", &instances) && instances > 0;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *handle, uint *count) { ENTER(handle); *count = 7; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, uint index, void **instance) {
    ull instances = 0;
    ENTER(handle);
    if (!find(d, "-", "mig", &instances) || index >= instances) return NOT_FOUND;
    *instance = (void *)(long)(HANDLE + 100 * (d + 1) + (int)index);
    return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **device) {
    *device = (void *)(long)(HANDLE + parent_of(index_of(handle)));
    return OK;
}
typedef struct { void *device; ull type, data; uint gpu_instance, compute_instance; } event_t;
int nvmlEventSetCreate(void **set) { *set = (void *)1L; return OK; }
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceRegisterEvents(void *handle, ull types, void *set) { ENTER(handle); (void)types; (void)set; return OK; }
int nvmlEventSetWait_v2(void *set, event_t *event, uint timeout_ms) { /* an XID line is told once per number */
    static ull told[100];
    line_t all[MAX_LINES];
    (void)set; (void)timeout_ms;
    for (int i = 0, n = script() ? lines(all) : 0; i < n; i++) {
        int d = all[i].device;
        if (d < 0 || d >= 100 || strcmp(all[i].what, "xid") || told[d] == all[i].number) continue;
        told[d] = all[i].number;
        *event = (event_t){ (void *)(long)(HANDLE + d), 8, all[i].number, 0, 0 };
        return OK;
    }
    return TIMEOUT;
}
