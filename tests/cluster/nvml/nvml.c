// A stand-in for libnvidia-ml.so.1 on machines without a card: just the part of NVML that NVIDIA's device plugin and
// nvml-wrapper call, for N cards of one model. Signatures and layouts follow NVIDIA's public nvml.h (CUDA 12).
//
// The machine it plays: cards i and i^1 share a PCIe switch, four cards share a NUMA node, no NVLink.
//
//   NVML_STAND_IN_CARDS=8      how many cards (default 8, at most 64)
//   NVML_STAND_IN_NODE=N       another machine: its cards have other UUIDs (default 0)
//   NVML_STAND_IN_DRIVER=V     the driver's version (default 550.54.15)
//   NVML_STAND_IN_CUDA=N       the CUDA version that it supports, 1000 for each major and 10 for each minor one (default 12040)
//   NVML_STAND_IN_STATE=DIR    faults, read at every call: DIR/xid-<i> holds an XID number, reported once per change of
//                              the file to every process that waits for events; DIR/lost-<i> makes card i fall off the bus;
//                              DIR/absent-<i> hides it from processes that start then, and those
//                              behind it have the next lower minor number; while DIR/hang-<i> is there no call for
//                              it returns; DIR/mig-<i> switches MIG on; DIR/no-events-<i> refuses its events;
//                              DIR/recovery-<i> has the recovery action that the driver asks for (1: a reset of the card);
//                              DIR/remap-<i> makes a row remapping of its memory wait for a reset; DIR/process-<i> has a
//                              line `PID [MIB [PERCENT]]` for each process that computes on it, with the memory that it uses (1 MiB)
//                              and how busy it keeps the card (0); a card's use is the sum of theirs.
//
// Build: cc -shared -fPIC -O2 -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml.c

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int nvmlReturn_t;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15 };
enum { MAX_CARDS = 64, TOPOLOGY_SINGLE = 10, TOPOLOGY_HOSTBRIDGE = 30, TOPOLOGY_SYSTEM = 50 };
static const unsigned long long EVENT_XID = 8ULL;
static const unsigned long long MEMORY_BYTES = 40ULL << 30;

typedef struct { int index; } card;
typedef card *nvmlDevice_t;
typedef struct { long seen_ns[MAX_CARDS]; } event_set;
typedef struct {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
} nvmlPciInfo_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct {
  nvmlDevice_t device;
  unsigned long long eventType, eventData;
  unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

typedef struct {
  unsigned fieldId, scopeId;
  long long timestamp, latencyUsec;
  int valueType;
  nvmlReturn_t nvmlReturn;
  union { double d; unsigned u; unsigned long long ull; } value;
} nvmlFieldValue_t;
typedef struct {
  unsigned pid;
  unsigned long long usedGpuMemory;
  unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct {
  unsigned pid;
  unsigned long long timeStamp;
  unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

static card cards[MAX_CARDS];
static int card_count;

static const char *state_dir(void) { return getenv("NVML_STAND_IN_STATE"); }

static int state_file(char *path, size_t size, const char *kind, int index) {
  if (!state_dir()) return 0;
  snprintf(path, size, "%s/%s-%d", state_dir(), kind, index);
  return 1;
}

static nvmlReturn_t check(nvmlDevice_t d) {
  char path[512];
  if (d < cards || d >= cards + card_count) return INVALID_ARGUMENT;
  while (state_file(path, sizeof path, "hang", d->index) && access(path, F_OK) == 0)
    nanosleep(&(struct timespec){0, 20 * 1000000L}, NULL);
  return state_file(path, sizeof path, "lost", d->index) && access(path, F_OK) == 0 ? GPU_IS_LOST : SUCCESS;
}

static nvmlReturn_t text(char *out, unsigned size, const char *value) {
  if (strlen(value) >= size) return INSUFFICIENT_SIZE;
  strcpy(out, value);
  return SUCCESS;
}

static void uuid_of(int index, char out[64]) {
  const char *node = getenv("NVML_STAND_IN_NODE");
  snprintf(out, 64, "GPU-00000000-0000-4000-%04x-%012x", 0x8000 + (node ? atoi(node) : 0), index);
}

#define WITH(d) do { nvmlReturn_t r = check(d); if (r != SUCCESS) return r; } while (0)

// ---- library ----

nvmlReturn_t nvmlInit_v2(void) {
  const char *wanted = getenv("NVML_STAND_IN_CARDS");
  int all = wanted ? atoi(wanted) : 8, present = 0;
  if (all < 0 || all > MAX_CARDS) return INVALID_ARGUMENT;
  for (int i = 0; i < all; i++) {
    char path[512];
    if (state_file(path, sizeof path, "absent", i) && access(path, F_OK) == 0) continue;
    cards[present++].index = i;
  }
  card_count = present;
  return SUCCESS;
}
nvmlReturn_t nvmlInit(void) { return nvmlInit_v2(); }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
nvmlReturn_t nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(nvmlReturn_t r) {
  switch (r) {
    case SUCCESS: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *v, unsigned n) {
  const char *wanted = getenv("NVML_STAND_IN_DRIVER");
  return text(v, n, wanted ? wanted : "550.54.15");
}
nvmlReturn_t nvmlSystemGetNVMLVersion(char *v, unsigned n) { return text(v, n, "12.550.54.15"); }
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *v) {
  const char *wanted = getenv("NVML_STAND_IN_CUDA");
  *v = wanted ? atoi(wanted) : 12040;
  return SUCCESS;
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *v) { return nvmlSystemGetCudaDriverVersion_v2(v); }

// ---- handles ----

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *n) { *n = card_count; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetCount(unsigned *n) { return nvmlDeviceGetCount_v2(n); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *d) {
  if ((int)i >= card_count) return INVALID_ARGUMENT;
  *d = &cards[i];
  return check(*d);
}
nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned i, nvmlDevice_t *d) { return nvmlDeviceGetHandleByIndex_v2(i, d); }

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *d) {
  char own[64];
  for (int i = 0; i < card_count; i++) {
    uuid_of(cards[i].index, own);
    if (strcmp(own, uuid) == 0) { *d = &cards[i]; return check(*d); }
  }
  return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *p) {
  WITH(d);
  memset(p, 0, sizeof *p);
  p->bus = 0x10 + d->index;
  p->pciDeviceId = 0x20B010DE;
  snprintf(p->busIdLegacy, sizeof p->busIdLegacy, "0000:%02X:00.0", p->bus);
  snprintf(p->busId, sizeof p->busId, "00000000:%02X:00.0", p->bus);
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t d, nvmlPciInfo_t *p) { return nvmlDeviceGetPciInfo_v3(d, p); }
nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t d, nvmlPciInfo_t *p) { return nvmlDeviceGetPciInfo_v3(d, p); }

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *d) {
  nvmlPciInfo_t p;
  for (int i = 0; i < card_count; i++) {
    if (nvmlDeviceGetPciInfo_v3(&cards[i], &p) != SUCCESS) continue;
    if (strcasecmp(p.busId, bus) == 0 || strcasecmp(p.busIdLegacy, bus) == 0) { *d = &cards[i]; return SUCCESS; }
  }
  return NOT_FOUND;
}

// ---- its memory's faults, and who computes on it ----

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t d, int n, nvmlFieldValue_t *values) {
  char path[512];
  WITH(d);
  unsigned waits = state_file(path, sizeof path, "remap", d->index) && access(path, F_OK) == 0, action = 0;
  FILE *recovery = state_file(path, sizeof path, "recovery", d->index) ? fopen(path, "r") : NULL;
  if (recovery) {
    if (fscanf(recovery, "%u", &action) != 1) action = 0;
    fclose(recovery);
  }
  for (int i = 0; i < n; i++) {
    values[i].nvmlReturn = SUCCESS;
    values[i].valueType = 1; // an unsigned int
    switch (values[i].fieldId) {
      case 144: values[i].value.u = waits; break;
      case 145: values[i].value.u = 0; break;
      case 230: values[i].value.u = action; break;
      default: values[i].nvmlReturn = NOT_SUPPORTED;
    }
  }
  return SUCCESS;
}

typedef struct { unsigned pid, percent; unsigned long long bytes; } process;
enum { MAX_PROCESSES = 64 };

static unsigned processes_of(nvmlDevice_t d, process found[MAX_PROCESSES]) {
  char path[512], line[128];
  unsigned n = 0;
  FILE *file = state_file(path, sizeof path, "process", d->index) ? fopen(path, "r") : NULL;
  if (!file) return 0;
  while (n < MAX_PROCESSES && fgets(line, sizeof line, file)) {
    unsigned pid = 0, mib = 1, percent = 0;
    if (sscanf(line, "%u %u %u", &pid, &mib, &percent) >= 1 && pid) found[n++] = (process){pid, percent, (unsigned long long)mib << 20};
  }
  fclose(file);
  return n;
}

static unsigned long long used_bytes(nvmlDevice_t d) {
  process found[MAX_PROCESSES];
  unsigned long long sum = 0;
  for (unsigned i = 0, n = processes_of(d, found); i < n; i++) sum += found[i].bytes;
  return sum;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *n, nvmlProcessInfo_t *processes) {
  process found[MAX_PROCESSES];
  unsigned room = *n;
  WITH(d);
  *n = processes_of(d, found);
  if (*n > room) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < *n; i++) processes[i] = (nvmlProcessInfo_t){found[i].pid, found[i].bytes, ~0u, ~0u};
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t d, nvmlProcessUtilizationSample_t *samples, unsigned *n, unsigned long long since) {
  process found[MAX_PROCESSES];
  struct timespec now;
  unsigned room = *n;
  WITH(d);
  clock_gettime(CLOCK_REALTIME, &now);
  unsigned long long at = now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
  *n = at > since ? processes_of(d, found) : 0;
  if (*n == 0) return NOT_FOUND;
  if (*n > room || !samples) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < *n; i++) samples[i] = (nvmlProcessUtilizationSample_t){found[i].pid, at, found[i].percent, 0, 0, 0};
  return SUCCESS;
}

// ---- what a card is ----

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *v, unsigned n) { char own[64]; WITH(d); uuid_of(d->index, own); return text(v, n, own); }
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *v, unsigned n) { WITH(d); return text(v, n, "NVIDIA A100-SXM4-40GB"); }
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned *v) { WITH(d); *v = d - cards; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t d, unsigned *v) { WITH(d); *v = d - cards; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t d, unsigned *v) { WITH(d); *v = 14; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t d, unsigned *v) { WITH(d); *v = 7; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *a, int *b) { WITH(d); *a = 8; *b = 0; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m) {
  WITH(d);
  unsigned long long used = used_bytes(d);
  *m = (nvmlMemory_t){MEMORY_BYTES, MEMORY_BYTES - used, used};
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *m) {
  WITH(d);
  unsigned long long used = used_bytes(d);
  *m = (nvmlMemory_v2_t){m->version, MEMORY_BYTES, 0, MEMORY_BYTES - used, used};
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned *now, unsigned *pending) {
  char path[512];
  WITH(d);
  *now = *pending = state_file(path, sizeof path, "mig", d->index) && access(path, F_OK) == 0;
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned *n) { WITH(d); *n = 0; return SUCCESS; }
nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t d, unsigned *is) { WITH(d); *is = 0; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t d, unsigned *v) { WITH(d); *v = d->index / 4; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *u) {
  process found[MAX_PROCESSES];
  unsigned sum = 0;
  WITH(d);
  for (unsigned i = 0, n = processes_of(d, found); i < n; i++) sum += found[i].percent;
  *u = (nvmlUtilization_t){sum > 100 ? 100 : sum, 0};
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t d, unsigned *milliwatts) { WITH(d); *milliwatts = 62500; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, int sensor, unsigned *celsius) { (void)sensor; WITH(d); *celsius = 31; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t d, unsigned *n, void *p) { (void)p; WITH(d); *n = 0; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t d, void *m) { (void)m; WITH(d); return NOT_SUPPORTED; }
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t d, void *f) { (void)f; WITH(d); return NOT_SUPPORTED; }
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t d, void *f) { (void)f; WITH(d); return NOT_SUPPORTED; }

// ---- links ----

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, unsigned *level) {
  WITH(a);
  WITH(b);
  *level = a->index / 2 == b->index / 2 ? TOPOLOGY_SINGLE : a->index / 4 == b->index / 4 ? TOPOLOGY_HOSTBRIDGE : TOPOLOGY_SYSTEM;
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t d, unsigned link, unsigned *on) { (void)link; (void)on; WITH(d); return NOT_SUPPORTED; }
nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t d, unsigned link, unsigned *v) { (void)link; (void)v; WITH(d); return NOT_SUPPORTED; }
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t d, unsigned link, nvmlPciInfo_t *p) { (void)link; (void)p; WITH(d); return NOT_SUPPORTED; }

// ---- health ----

nvmlReturn_t nvmlEventSetCreate(event_set **set) { *set = calloc(1, sizeof **set); return SUCCESS; }
nvmlReturn_t nvmlEventSetFree(event_set *set) { free(set); return SUCCESS; }
nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t d, unsigned long long *types) { WITH(d); *types = EVENT_XID; return SUCCESS; }
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long types, event_set *set) {
  char path[512];
  (void)types; (void)set;
  WITH(d);
  return state_file(path, sizeof path, "no-events", d->index) && access(path, F_OK) == 0 ? NOT_SUPPORTED : SUCCESS;
}

static int next_xid(event_set *set, nvmlEventData_t *out) {
  char path[512];
  struct stat st;
  for (int i = 0; i < card_count; i++) {
    if (!state_file(path, sizeof path, "xid", cards[i].index) || stat(path, &st) != 0) continue;
    long stamp = st.st_mtim.tv_sec * 1000000000L + st.st_mtim.tv_nsec;
    if (set->seen_ns[i] == stamp) continue;
    set->seen_ns[i] = stamp;
    unsigned long long xid = 0;
    FILE *f = fopen(path, "r");
    if (!f) continue;
    int read = fscanf(f, "%llu", &xid);
    fclose(f);
    if (read != 1) continue;
    *out = (nvmlEventData_t){&cards[i], EVENT_XID, xid, 0xFFFFFFFF, 0xFFFFFFFF};
    return 1;
  }
  return 0;
}

nvmlReturn_t nvmlEventSetWait_v2(event_set *set, nvmlEventData_t *out, unsigned timeout_ms) {
  const unsigned step_ms = 20;
  for (unsigned waited = 0;; waited += step_ms) {
    if (next_xid(set, out)) return SUCCESS;
    if (waited >= timeout_ms) return TIMEOUT;
    nanosleep(&(struct timespec){0, step_ms * 1000000L}, NULL);
  }
}
nvmlReturn_t nvmlEventSetWait(event_set *set, nvmlEventData_t *out, unsigned t) { return nvmlEventSetWait_v2(set, out, t); }
