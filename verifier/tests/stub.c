// A stand-in for NVIDIA's libcuda.so.1 on machines without a card: the part of the driver API that initialises, allocates and frees, for one
// card of 4096 MiB which each process has for itself. It limits nothing and hides nothing. Signatures follow NVIDIA's public cuda.h.
//
// Build: cc -std=gnu17 -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 stub.c

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int result;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500 };
static const size_t CARD = (size_t)4096 << 20;

static pid_t initialised;
static __thread int current;
static size_t used;

typedef struct block { struct block *next; uint64_t at; size_t size; int kind; } block;
enum { MEMORY, HANDLE, ARRAY, MIPMAPPED };
static block *blocks;
static uint64_t next = (uint64_t)1 << 40;

// As the driver: nothing works before cuInit, in a fork of a process that has called it, or without a context.
static result ready(void) {
  if (initialised != getpid()) return NOT_INITIALIZED;
  return current ? SUCCESS : INVALID_CONTEXT;
}
#define READY do { result r = ready(); if (r) return r; } while (0)

static result allocate(uint64_t *at, size_t size, int kind) {
  READY;
  if (!at || !size) return INVALID_VALUE;
  if (size > CARD - used) return OUT_OF_MEMORY;
  block *b = malloc(sizeof *b);
  *b = (block){blocks, next, size, kind};
  next += size;
  used += size;
  *at = b->at;
  blocks = b;
  return SUCCESS;
}

static result release(uint64_t at, int kind) {
  READY;
  for (block **b = &blocks; *b; b = &(*b)->next)
    if ((*b)->at == at && (*b)->kind == kind) {
      block *gone = *b;
      *b = gone->next;
      used -= gone->size;
      free(gone);
      return SUCCESS;
    }
  return INVALID_VALUE;
}

result cuInit(unsigned flags) { initialised = getpid(); return flags ? INVALID_VALUE : SUCCESS; }
result cuDriverGetVersion(int *version) { *version = 13050; return SUCCESS; }
result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
result cuDeviceGet(int *device, int ordinal) {
  if (initialised != getpid()) return NOT_INITIALIZED;
  *device = 0;
  return ordinal ? 101 : SUCCESS;
}
result cuDevicePrimaryCtxRetain(void **context, int device) {
  if (initialised != getpid()) return NOT_INITIALIZED;
  *context = &used;
  return device ? 101 : SUCCESS;
}
result cuCtxSetCurrent(void *context) { current = context != NULL; return SUCCESS; }
result cuStreamSynchronize(void *stream) { (void)stream; return ready(); }
result cuGetErrorString(result code, const char **text) { *text = code ? "an error" : "no error"; return SUCCESS; }
result cuLaunchKernel(void) { return INVALID_HANDLE; }

result cuMemGetInfo_v2(size_t *left, size_t *total) { READY; *left = CARD - used; *total = CARD; return SUCCESS; }
result cuDeviceTotalMem_v2(size_t *total, int device) { (void)device; *total = CARD; return SUCCESS; }

result cuMemAlloc_v2(uint64_t *p, size_t size) { return allocate(p, size, MEMORY); }
result cuMemAllocPitch_v2(uint64_t *p, size_t *pitch, size_t width, size_t height, unsigned element) {
  (void)element;
  *pitch = (width + 511) & ~(size_t)511;
  return allocate(p, *pitch * height, MEMORY);
}
result cuMemAllocManaged(uint64_t *p, size_t size, unsigned flags) { return flags ? allocate(p, size, MEMORY) : INVALID_VALUE; }
result cuMemFree_v2(uint64_t p) { return release(p, MEMORY); }
result cuMemAllocAsync(uint64_t *p, size_t size, void *stream) { (void)stream; return allocate(p, size, MEMORY); }
result cuMemAllocAsync_ptsz(uint64_t *p, size_t size, void *stream) { (void)stream; return allocate(p, size, MEMORY); }
result cuMemFreeAsync(uint64_t p, void *stream) { (void)stream; return release(p, MEMORY); }
result cuMemFreeAsync_ptsz(uint64_t p, void *stream) { (void)stream; return release(p, MEMORY); }
result cuMemPoolCreate(void **pool, const int *properties) { READY; *pool = &used; return properties[0] > 0 ? SUCCESS : INVALID_VALUE; }
result cuMemPoolDestroy(void *pool) { READY; return pool == &used ? SUCCESS : INVALID_VALUE; }
result cuMemAllocFromPoolAsync(uint64_t *p, size_t size, void *pool, void *stream) {
  (void)stream;
  return pool == &used ? allocate(p, size, MEMORY) : INVALID_VALUE;
}
result cuMemCreate(uint64_t *handle, size_t size, const int *properties, uint64_t flags) {
  // Of the least granularity.
  if (properties[0] != 1 || flags || size % ((size_t)2 << 20)) return INVALID_VALUE;
  return allocate(handle, size, HANDLE);
}
result cuMemRelease(uint64_t handle) { return release(handle, HANDLE); }

static size_t bytes(int format) { return format == 0x20 || format == 3 || format == 10 ? 4 : format == 1 || format == 8 ? 1 : 2; }
typedef struct { size_t width, height; int format; unsigned channels; } array_2d;
result cuArrayCreate_v2(uint64_t *array, const array_2d *of) {
  return allocate(array, of->width * (of->height ? of->height : 1) * of->channels * bytes(of->format), ARRAY);
}
typedef struct { size_t width, height, depth; int format; unsigned channels, flags; } array_3d;
static size_t volume(const array_3d *of) {
  return of->width * (of->height ? of->height : 1) * (of->depth ? of->depth : 1) * of->channels * bytes(of->format);
}
result cuArray3DCreate_v2(uint64_t *array, const array_3d *of) { return allocate(array, volume(of), ARRAY); }
result cuArrayDestroy(uint64_t array) { return release(array, ARRAY); }
result cuMipmappedArrayCreate(uint64_t *array, const array_3d *of, unsigned levels) {
  return levels ? allocate(array, volume(of), MIPMAPPED) : INVALID_VALUE;
}
result cuMipmappedArrayDestroy(uint64_t array) { return release(array, MIPMAPPED); }

// The name without a version, the functions for it, and since which CUDA there is one.
result cuGetProcAddress(const char *, void **, int, uint64_t);
result cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
#define PLAIN(name, since) {#name, name, name, since}
#define SECOND(name, since) {#name, name##_v2, name##_v2, since}
#define STREAM(name, since) {#name, name, name##_ptsz, since}
static const struct { const char *name; void *function, *per_thread; int since; } FUNCTIONS[] = {
  PLAIN(cuInit, 2000), PLAIN(cuDriverGetVersion, 2020), PLAIN(cuDeviceGetCount, 2000), PLAIN(cuDeviceGet, 2000),
  PLAIN(cuDevicePrimaryCtxRetain, 7000), PLAIN(cuCtxSetCurrent, 4000), PLAIN(cuStreamSynchronize, 2000),
  PLAIN(cuGetErrorString, 6000), PLAIN(cuLaunchKernel, 4000), SECOND(cuMemGetInfo, 3020), SECOND(cuDeviceTotalMem, 3020),
  SECOND(cuMemAlloc, 3020), SECOND(cuMemAllocPitch, 3020), PLAIN(cuMemAllocManaged, 6000), SECOND(cuMemFree, 3020),
  STREAM(cuMemAllocAsync, 11020), STREAM(cuMemFreeAsync, 11020), PLAIN(cuMemPoolCreate, 11020), PLAIN(cuMemPoolDestroy, 11020),
  PLAIN(cuMemAllocFromPoolAsync, 11020), PLAIN(cuMemCreate, 10020), PLAIN(cuMemRelease, 10020), SECOND(cuArrayCreate, 3020),
  SECOND(cuArray3DCreate, 3020), PLAIN(cuArrayDestroy, 2000), PLAIN(cuMipmappedArrayCreate, 5000),
  PLAIN(cuMipmappedArrayDestroy, 5000), SECOND(cuGetProcAddress, 12000), PLAIN(cuGetProcAddress, 11030),
};

result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  int known = 0;
  *function = NULL;
  for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS && !*function; i++)
    if (!strcmp(FUNCTIONS[i].name, name)) {
      known = 1;
      if (version >= FUNCTIONS[i].since) *function = flags & 2 ? FUNCTIONS[i].per_thread : FUNCTIONS[i].function;
    }
  // Found; not found; of a later version.
  if (status) *status = *function ? 0 : known ? 2 : 1;
  return *function ? SUCCESS : NOT_FOUND;
}
result cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
