// A small limiter of memory in front of libcuda.so.1, for the tests of the verifier. It reads its limit, in MiB, from the file `limit` in its own
// folder, and adds up what the processes use in the file `usage` beside it.
//
// Built alone it is for LD_PRELOAD: it answers dlsym, too. Built with -DREPLACES='"libcuda-driver.so.1"' it stands in the place of
// libcuda.so.1 in front of the library of that name, which it is linked with. And with a fault, one of:
//
//   LIMITS_NOTHING            answers with its own functions and lets everything through
//   FORGETS_ASYNC             does not know the functions that allocate in the order of a stream
//   MISSES_GET_PROC_ADDRESS   is called by those alone who look for a function by its exported name
//   KEEPS_THE_DEAD            what a killed process used is never free again
//   KEEPS_WHAT_IS_FREED       nothing is, before the process ends
//   COUNTS_EACH_PROCESS       each process has the whole limit for itself

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

typedef int result;
enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_FOUND = 500 };

#ifdef REPLACES
#define DRIVER REPLACES
#define real_dlsym dlsym
#else
#define DRIVER "libcuda.so.1"
static void *real_dlsym(void *handle, const char *name) {
  static void *(*real)(void *, const char *);
  if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
  return real(handle, name);
}
#endif

static void *driver(const char *name) {
  static void *library;
  if (!library) library = dlopen(DRIVER, RTLD_NOW);
  return library ? real_dlsym(library, name) : NULL;
}

// ---- what is used ----

static int open_beside(const char *name, int flags) {
  Dl_info own;
  char path[4096];
  if (!dladdr(open_beside, &own)) return -1;
  snprintf(path, sizeof path, "%.*s/%s", (int)(strrchr(own.dli_fname, '/') - own.dli_fname), own.dli_fname, name);
  return open(path, flags | O_CLOEXEC, 0600);
}

static size_t limit(void) {
  char text[32] = "";
  int file = open_beside("limit", O_RDONLY);
  if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
  close(file);
  return (size_t)atol(text) << 20;
}

typedef struct { pid_t pid; size_t used; } process;
enum { PROCESSES = 64 };

// Adds to what this process uses where that stays within the limit, and says what is used then. `forget`: from nothing.
static int change(int64_t by, int forget, size_t *in_use) {
  process all[PROCESSES] = {0}, *own = NULL;
  int file = open_beside("usage", O_RDWR | O_CREAT);
  flock(file, LOCK_EX);
  if (pread(file, all, sizeof all, 0) < 0) memset(all, 0, sizeof all);
  size_t sum = 0;
  for (process *p = all; p < all + PROCESSES; p++) {
#ifndef KEEPS_THE_DEAD
    if (p->pid && kill(p->pid, 0) && errno == ESRCH) *p = (process){0};
#endif
    if (p->pid == getpid()) own = p;
#ifdef COUNTS_EACH_PROCESS
    if (p->pid == getpid())
#endif
    sum += p->used;
  }
  for (process *p = all; p < all + PROCESSES && !own; p++)
    if (!p->pid && !p->used) own = p;
  if (own && own->pid == getpid() && forget) { sum -= own->used; own->used = 0; }
  int fits = own && (by <= 0 || sum + by <= limit());
#ifdef LIMITS_NOTHING
  fits = 1;
#endif
  if (fits && own) {
    own->pid = getpid();
    own->used += by;
    sum += by;
  }
  if (pwrite(file, all, sizeof all, 0) < 0) fits = 0;
  close(file);
  if (in_use) *in_use = sum;
  return fits;
}

// A program that replaces another in the same process has nothing of what that had.
__attribute__((constructor)) static void begin(void) { change(0, 1, NULL); }
// One that is killed does not come here.
__attribute__((destructor)) static void end(void) { change(0, 1, NULL); }

typedef struct block { struct block *next; uint64_t at; size_t size; } block;
static block *blocks;

static result counted(result code, const uint64_t *at, size_t size) {
  if (code) {
    change(-(int64_t)size, 0, NULL);
    return code;
  }
  block *b = malloc(sizeof *b);
  *b = (block){blocks, *at, size};
  blocks = b;
  return code;
}

static result freed(result code, uint64_t at) {
  if (code) return code;
  for (block **b = &blocks; *b; b = &(*b)->next)
    if ((*b)->at == at) {
      block *gone = *b;
      *b = gone->next;
#ifndef KEEPS_WHAT_IS_FREED
      change(-(int64_t)gone->size, 0, NULL);
#endif
      free(gone);
      break;
    }
  return code;
}

// ---- the driver's functions ----

#define REAL(name) ({ result (*f)() = driver(name); if (!f) return NOT_FOUND; f; })
#define LIMITED(name, size, at, ...) do { \
  result (*f)() = REAL(name); \
  if (!change((int64_t)(size), 0, NULL)) return OUT_OF_MEMORY; \
  return counted(f(__VA_ARGS__), (const uint64_t *)(at), size); } while (0)

result cuMemAlloc_v2(uint64_t *p, size_t size) { LIMITED("cuMemAlloc_v2", size, p, p, size); }
result cuMemAllocPitch_v2(uint64_t *p, size_t *pitch, size_t width, size_t height, unsigned element) {
  LIMITED("cuMemAllocPitch_v2", width * height, p, p, pitch, width, height, element);
}
result cuMemAllocManaged(uint64_t *p, size_t size, unsigned flags) { LIMITED("cuMemAllocManaged", size, p, p, size, flags); }
result cuMemFree_v2(uint64_t p) { return freed(REAL("cuMemFree_v2")(p), p); }
result cuMemCreate(uint64_t *p, size_t size, const void *properties, uint64_t flags) {
  LIMITED("cuMemCreate", size, p, p, size, properties, flags);
}
result cuMemRelease(uint64_t p) { return freed(REAL("cuMemRelease")(p), p); }
// All formats that the clients use have four bytes.
typedef struct { size_t width, height; int format; unsigned channels; } array_2d;
result cuArrayCreate_v2(uint64_t *p, const array_2d *of) {
  LIMITED("cuArrayCreate_v2", of->width * of->height * of->channels * 4, p, p, of);
}
typedef struct { size_t width, height, depth; int format; unsigned channels, flags; } array_3d;
static size_t volume(const array_3d *of) { return of->width * of->height * (of->depth ? of->depth : 1) * of->channels * 4; }
result cuArray3DCreate_v2(uint64_t *p, const array_3d *of) { LIMITED("cuArray3DCreate_v2", volume(of), p, p, of); }
result cuArrayDestroy(uint64_t p) { return freed(REAL("cuArrayDestroy")(p), p); }
result cuMipmappedArrayCreate(uint64_t *p, const array_3d *of, unsigned levels) {
  LIMITED("cuMipmappedArrayCreate", volume(of), p, p, of, levels);
}
result cuMipmappedArrayDestroy(uint64_t p) { return freed(REAL("cuMipmappedArrayDestroy")(p), p); }
#ifndef FORGETS_ASYNC
result cuMemAllocAsync(uint64_t *p, size_t size, void *stream) { LIMITED("cuMemAllocAsync", size, p, p, size, stream); }
result cuMemAllocAsync_ptsz(uint64_t *p, size_t size, void *stream) { LIMITED("cuMemAllocAsync_ptsz", size, p, p, size, stream); }
result cuMemFreeAsync(uint64_t p, void *stream) { return freed(REAL("cuMemFreeAsync")(p, stream), p); }
result cuMemFreeAsync_ptsz(uint64_t p, void *stream) { return freed(REAL("cuMemFreeAsync_ptsz")(p, stream), p); }
result cuMemAllocFromPoolAsync(uint64_t *p, size_t size, void *pool, void *stream) {
  LIMITED("cuMemAllocFromPoolAsync", size, p, p, size, pool, stream);
}
#endif
#ifndef LIMITS_NOTHING
result cuMemGetInfo_v2(size_t *left, size_t *total) {
  result code = REAL("cuMemGetInfo_v2")(left, total);
  size_t used;
  if (code) return code;
  change(0, 0, &used);
  *total = limit();
  *left = *total - used;
  return code;
}
result cuDeviceTotalMem_v2(size_t *total, int device) {
  result code = REAL("cuDeviceTotalMem_v2")(total, device);
  *total = limit();
  return code;
}
#endif

result cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
result cuGetProcAddress(const char *, void **, int, uint64_t);
// The name without a version, the exported one, ours.
static const struct { const char *name, *exported; void *function; } OURS[] = {
#define PLAIN(name) {#name, #name, name}
#define SECOND(name) {#name, #name "_v2", name##_v2}
  SECOND(cuMemAlloc), SECOND(cuMemAllocPitch), PLAIN(cuMemAllocManaged), SECOND(cuMemFree), PLAIN(cuMemCreate), PLAIN(cuMemRelease),
  SECOND(cuArrayCreate), SECOND(cuArray3DCreate), PLAIN(cuArrayDestroy), PLAIN(cuMipmappedArrayCreate), PLAIN(cuMipmappedArrayDestroy),
#ifndef FORGETS_ASYNC
  {"cuMemAllocAsync_ptsz", "cuMemAllocAsync_ptsz", cuMemAllocAsync_ptsz}, {"cuMemFreeAsync_ptsz", "cuMemFreeAsync_ptsz", cuMemFreeAsync_ptsz},
  PLAIN(cuMemAllocAsync), PLAIN(cuMemFreeAsync), PLAIN(cuMemAllocFromPoolAsync),
#endif
#ifndef LIMITS_NOTHING
  SECOND(cuMemGetInfo), SECOND(cuDeviceTotalMem),
#endif
#ifndef MISSES_GET_PROC_ADDRESS
  SECOND(cuGetProcAddress), {"", "cuGetProcAddress", cuGetProcAddress},
#endif
};
enum { OURS_COUNT = sizeof OURS / sizeof *OURS };

#ifndef MISSES_GET_PROC_ADDRESS
result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  result code = REAL("cuGetProcAddress_v2")(name, function, version, flags, status);
  char per_thread[64];
  snprintf(per_thread, sizeof per_thread, "%s_ptsz", name);
  // A function of a thread's own stream has another name; most have none.
  for (int i = 0; i < OURS_COUNT && !code; i++)
    if (!strcmp(OURS[i].name, name) && (version >= 12000 || strcmp(name, "cuGetProcAddress"))) *function = OURS[i].function;
  for (int i = 0; i < OURS_COUNT && !code && flags & 2; i++)
    if (!strcmp(OURS[i].name, per_thread)) *function = OURS[i].function;
  return code;
}
result cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
#endif

#ifndef REPLACES
void *dlsym(void *handle, const char *name) {
  if (handle != RTLD_NEXT && handle != RTLD_DEFAULT && !strncmp(name, "cu", 2))
    for (int i = 0; i < OURS_COUNT; i++)
      if (!strcmp(OURS[i].exported, name) && real_dlsym(handle, name)) return OURS[i].function;
  return real_dlsym(handle, name);
}
#endif
